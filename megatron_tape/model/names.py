"""Names of a model's parameters: whole weights have Hugging Face's names, others Megatron's. Imports no torch."""

import re

from megatron_tape.config.schema import OF_ENCODING

WRAPPED = "gpt."
"""Prefix that `LanguageModel` and checkpoints add to the names of `GPTModel` parameters."""
POSITION = "position."
"""Prefix of a positional encoding's parameters within a layer, here and in Hugging Face's names."""
OUTPUT = "lm_head.weight"
"""Hugging Face's name of the output layer's matrix."""
AVERAGE = "average"
"""What checkpoints call the average of a weight, as `weight` is the weight itself and `exp_avg` one of its moments."""
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
    """Return which of `config.schema.PARAMETER_KINDS` the parameter of a `GPTModel` or `LanguageModel` is."""
    if f".{POSITION}" in name:
        return "position"
    if ".lora." in name:
        return "lora"
    if name.removeprefix(WRAPPED).startswith(("embedding.", "output_layer.")):
        return "embeddings"
    if name.endswith(".bias"):
        return "biases"
    return "norms" if name.endswith("layernorm.weight") else "matrices"


BLOCKS = ("embeddings", "attention", "mlp", "position", "norms", "lora")


def block_of(name: str) -> str:
    """Return which of `BLOCKS` a parameter belongs to: its kind, or where its matrix or bias is."""
    kind = kind_of(name)
    if kind in ("matrices", "biases"):
        return "mlp" if ".mlp." in name else "attention"
    return kind


def part_of(name: str) -> str:
    """Return which part of the model a parameter is: one of `config.schema.TRAINABLE`, or `matrices` or `biases`."""
    kind = kind_of(name)
    if kind == "embeddings" and name.removeprefix(WRAPPED).startswith("output_layer."):
        return "output"
    return OF_ENCODING if kind == "position" else kind
