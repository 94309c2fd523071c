"""Names of a model's parameters, and their conversion from Megatron to Hugging Face. Imports no torch.

Megatron's names, such as `decoder.layers.0.mlp.linear_fc1.weight`, are those of parameters in training, which may be
sharded. Hugging Face's names, such as `model.layers.0.mlp.up_proj.weight`, are those of unsharded weights in exports.
"""

import re

KINDS = ("embeddings", "output", "attention", "mlp", "biases", "norms", "position", "lora")
"""Kinds of parameters, as settings, tables and metrics name them (see `kind_of`).

`attention` and `mlp` are matrices only. `position` are the parameters of the positional encoding. A matrix that is tied
between the input embedding and the output layer counts as `embeddings`.
"""
MATRICES = ("attention", "mlp")
"""The kinds of the matrices in the decoder layers, apart from the positional encoding and LoRA."""
WRAPPED = "gpt."
"""Prefix that `LanguageModel` and checkpoints add to the names of `GPTModel`."""
POSITION = "position."
"""Prefix of a positional encoding's parameters in a layer, in both Megatron's and Hugging Face's names."""
OUTPUT = "lm_head.weight"
"""Hugging Face's name of the output layer's matrix."""
AVERAGE = "average"
"""The key of averaged weights in checkpoints, `average/NAME`, next to `weight/NAME` and moments (`exp_avg/NAME`)."""
PLAIN = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": OUTPUT,
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_gate.weight": "self_attn.gate_proj.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
"""Maps Megatron's names of unfused parameters to Hugging Face's names, both without the layer prefix."""
FUSED = re.compile(r"self_attention\.linear_qkv\.(weight|bias)")
"""Megatron's names of the fused projection to queries, keys and values, without the layer prefix."""


def split_layer(name: str) -> tuple[str, str, str]:
    """Split a Megatron name: return Megatron's and Hugging Face's layer prefix (may be empty), and the suffix."""
    if match := re.fullmatch(r"decoder\.layers\.([0-9]+)\.(.*)", name):
        return f"decoder.layers.{match[1]}.", f"model.layers.{match[1]}.", match[2]
    return "", "", name


def whole_name(prefix: str, suffix: str) -> str:
    """Return Hugging Face's name of an unfused parameter, from the last two results of `split_layer`."""
    return prefix + (f"{suffix}.weight" if suffix.startswith(POSITION) else PLAIN.get(suffix, suffix))


def kind_of(name: str) -> str:
    """Return the kind, one of `KINDS`, of a parameter by its name in a `GPTModel` or `LanguageModel`."""
    name = name.removeprefix(WRAPPED)
    if name.startswith(("embedding.", "output_layer.")):
        return "embeddings" if name.startswith("embedding.") else "output"
    if f".{POSITION}" in name:
        return "position"
    if ".lora." in name:
        return "lora"
    if name.endswith(".bias"):
        return "biases"
    if name.endswith("layernorm.weight"):
        return "norms"
    return "mlp" if ".mlp." in name else "attention"
