"""Names and shapes of LoRA's factors, as settings alone determine them. Imports no torch."""

from typing import NamedTuple

from megatron_tape.config.schema import ExtensionConfig, ModelConfig


class Factor(NamedTuple):
    """One of the two matrices of a LoRA layer."""

    target: str
    """The projection it belongs to: q, k, v or o."""
    side: str
    """A maps the projection's input to `lora_rank` numbers, B these to its output."""
    shape: tuple[int, int]
    cut: int | None
    """The axis along which tensor parallelism cuts it, as it cuts the projection; None if every rank has it whole."""


def lora_widths(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return the widths of the input and output of each projection that can have LoRA layers."""
    C, D = model.hidden_size, model.head_dim
    heads, groups = model.num_attention_heads * D, model.query_groups * D
    return {"q": (C, heads), "k": (C, groups), "v": (C, groups), "o": (heads, C)}


def lora_factors(model: ModelConfig, extension: ExtensionConfig) -> dict[str, Factor]:
    """Return the factors of one layer by name within it; none if the model has no LoRA layers."""
    if not extension.adds_lora:
        return {}
    factors = {}
    for target, (width_in, width_out) in lora_widths(model).items():
        if target not in extension.lora_targets:
            continue
        module = f"self_attention.{'linear_proj' if target == 'o' else 'linear_qkv'}.lora"
        cuts = {"A": 1, "B": None} if target == "o" else {"A": None, "B": 0}
        shapes = {"A": (extension.lora_rank, width_in), "B": (width_out, extension.lora_rank)}
        for side in "AB":
            factors[f"{module}.{target}_{side}"] = Factor(target, side, shapes[side], cuts[side])
    return factors
