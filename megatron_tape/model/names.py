"""Names of a model's parameters: Hugging Face's for whole weights, Megatron's for shards. Imports no torch."""

import re

KINDS = ("embeddings", "output", "attention", "mlp", "biases", "norms", "position", "lora")
"""Kinds of parameters that settings, figures and the estimate refer to (see `kind_of`).

`attention` and `mlp` are matrices only. `position` are the parameters of the positional encoding. A matrix tied between
the input embedding and the output layer counts as `embeddings`.
"""
MATRICES = ("attention", "mlp")
WRAPPED = "gpt."
"""Prefix of `GPTModel` parameter names in `LanguageModel` and checkpoints."""
POSITION = "position."
"""Prefix of a positional encoding's parameters within a layer, in Megatron's and Hugging Face's names."""
OUTPUT = "lm_head.weight"
"""Hugging Face's name of the output layer's matrix."""
AVERAGE = "average"
"""Name of a parameter's averaged weight in checkpoints, next to `weight` and the moments such as `exp_avg`."""
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
FUSED = re.compile(r"self_attention\.linear_qkv\.(weight|bias)")


def split_layer(name: str) -> tuple[str, str, str]:
    """Split a Megatron name into (Megatron prefix, Hugging Face prefix, rest)."""
    if match := re.fullmatch(r"decoder\.layers\.([0-9]+)\.(.*)", name):
        return f"decoder.layers.{match[1]}.", f"model.layers.{match[1]}.", match[2]
    return "", "", name


def whole_name(prefix: str, rest: str) -> str:
    """Return Hugging Face's name of an unfused parameter, given the last two results of `split_layer`."""
    return prefix + (f"{rest}.weight" if rest.startswith(POSITION) else PLAIN.get(rest, rest))


def kind_of(name: str) -> str:
    """Return which of `KINDS` the parameter of a `GPTModel` or `LanguageModel` is."""
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
