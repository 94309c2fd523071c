"""Names of a model's parameters, and their conversion to those of Hugging Face. Imports no torch.

The model's own names, such as `layers.0.mlp.linear_fc1.weight`, are those of `LanguageModel` and of
checkpoints; inside a layer, they are Megatron's. A parameter of this name may be sharded, and
Megatron fuses some matrices. Hugging Face's names, such as `model.layers.0.mlp.up_proj.weight`, are
those of unsharded weights in exports.
"""

import re

KINDS = ("embeddings", "output", "attention", "mlp", "biases", "norms", "position", "lora")
"""Kinds of parameters, as settings, tables and metrics name them (see `kind_of`).

`attention` and `mlp` are matrices only. `position` are the parameters of the positional encoding. A
matrix that is tied between the input embedding and the output layer counts as `embeddings`.
"""
MATRICES = ("attention", "mlp")
"""The kinds of the matrices in the decoder layers, apart from the positional encoding and LoRA."""
EMBEDDING = "embedding.weight"
"""The model's name of the embedding weight, which models with tied embeddings also use as the
output layer's weight.
"""
NORM = "norm.weight"
"""The model's name of the final norm's weight."""
OUTPUT = "output.weight"
"""The model's name of the output layer's matrix."""
POSITION = "position."
"""Prefix of a positional encoding's parameters in a layer, in both the model's and Hugging Face's
names.
"""
HUGGING_FACE_OUTPUT = "lm_head.weight"
"""Hugging Face's name of the output layer's matrix."""
AVERAGE = "average"
"""The key of averaged weights in checkpoints, `average/NAME`, next to `weight/NAME` and moments
(`exp_avg/NAME`).
"""
UNFUSED = {
    EMBEDDING: "model.embed_tokens.weight",
    NORM: "model.norm.weight",
    OUTPUT: HUGGING_FACE_OUTPUT,
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_gate.weight": "self_attn.gate_proj.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
"""Maps the model's names of unfused parameters to Hugging Face's names, both without the layer
prefix.
"""
FUSED = re.compile(r"self_attention\.linear_qkv\.(weight|bias)")
"""The model's names of the fused projection to queries, keys and values, without the layer prefix.
The group is `weight` or `bias`.
"""
_EARLIER = {
    EMBEDDING: "embedding.word_embeddings.weight",
    NORM: "decoder.final_layernorm.weight",
    OUTPUT: "output_layer.weight",
}
"""Maps the names of parameters outside the layers to those that they had in checkpoints of format
3.
"""
_CURRENT = {earlier: name for name, earlier in _EARLIER.items()}
"""The inverse of `_EARLIER`."""
_FORMAT_3 = "gpt."
"""Prefix of all names in checkpoints of format 3."""


def layer_name(layer: int, suffix: str) -> str:
    """Return the model's name of the parameter `suffix` of layer `layer` (from 0)."""
    return f"layers.{layer}.{suffix}"


def split_layer(name: str) -> tuple[int | None, str]:
    """Return the index of a parameter's layer, and its name in the layer: the inverse of
    `layer_name`.

    For a parameter outside the layers, return None and the name.
    """
    match = re.fullmatch(r"layers\.([0-9]+)\.(.*)", name)
    if match is None:
        return None, name
    return int(match[1]), match[2]


def hugging_face_prefix(layer: int | None) -> str:
    """Return Hugging Face's prefix of the parameters of a layer, or an empty string for None."""
    if layer is None:
        return ""
    return f"model.layers.{layer}."


def hugging_face_name(layer: int | None, suffix: str) -> str:
    """Return Hugging Face's name of an unfused parameter, from the results of `split_layer`."""
    # In Hugging Face's models, each matrix of an encoding is a linear layer with a `weight`.
    if suffix.startswith(POSITION):
        return f"{hugging_face_prefix(layer)}{suffix}.weight"
    return hugging_face_prefix(layer) + UNFUSED.get(suffix, suffix)


def seed_name(name: str) -> str:
    """Return the name by which a parameter's initial values are drawn (see `model.initialization`).

    It is the parameter's name in checkpoints of format 3, so that a seed still gives the values
    that it gave then.
    """
    if name in _EARLIER:
        return _EARLIER[name]
    return f"decoder.{name}"


def current_name(saved: str) -> str:
    """Return the name of a parameter, given its name in a checkpoint of format 3 or 4.

    Format 3 had the name of `seed_name`, with a prefix.
    """
    if not saved.startswith(_FORMAT_3):
        return saved
    earlier = saved.removeprefix(_FORMAT_3)
    if earlier in _CURRENT:
        return _CURRENT[earlier]
    return earlier.removeprefix("decoder.")


def kind_of(name: str) -> str:
    """Return the kind, one of `KINDS`, of a parameter by its name in a `LanguageModel`."""
    if name == EMBEDDING:
        return "embeddings"
    if name == OUTPUT:
        return "output"
    # Encodings and LoRA come first: the tests below would count their parameters as matrices.
    if f".{POSITION}" in name:
        return "position"
    if ".lora." in name:
        return "lora"
    if name.endswith(".bias"):
        return "biases"
    if name == NORM or name.endswith("layernorm.weight"):
        return "norms"
    if ".mlp." in name:
        return "mlp"
    return "attention"
