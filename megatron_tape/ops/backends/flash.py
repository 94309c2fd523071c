"""flash-attn, called once for each value, as its kernels require values to have the width of the keys."""

import importlib

import torch
from torch import Tensor

from megatron_tape.ops.attention_inputs import AttentionInputs


def attend(x: AttentionInputs, package: str = "flash_attn") -> tuple[Tensor, ...]:
    """Return the average of each value, (S, B, H, D)."""
    functions = importlib.import_module(package)
    q, k = x.rotated()
    S, B = q.shape[:2]
    q, k, *values = (y.transpose(0, 1) for y in (q, k, *x.values()))
    settings = {"causal": True, "deterministic": torch.are_deterministic_algorithms_enabled()}
    lengths = () if x.packing is None else x.packing.lengths(S)

    def averages(q: Tensor, k: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        kernel = functions.flash_attn_varlen_func if lengths else functions.flash_attn_func
        found = (kernel(q, k, value, *lengths, **settings) for value in values)
        # Early versions of flash-attn 3 also return the logarithms of the sums.
        return tuple(average[0] if isinstance(average, tuple) else average for average in found)

    if not lengths:
        return tuple(average.transpose(0, 1) for average in x.run(averages, q, k, *values))
    found = x.run(averages, *(y.flatten(0, 1) for y in (q, k, *values)))
    return tuple(average.unflatten(0, (B, S)).transpose(0, 1) for average in found)
