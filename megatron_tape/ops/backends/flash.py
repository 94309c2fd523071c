"""flash-attn, called once for each value, as its kernels require values to have the width of the keys."""

import torch
from torch import Tensor

from megatron_tape.ops.inputs import AttentionInputs


def attend(x: AttentionInputs) -> tuple[Tensor, ...]:
    """Return the average of each value, (S, B, H, D)."""
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    q, k = x.rotated()
    S, B = q.shape[:2]
    q, k, *values = (y.transpose(0, 1) for y in (q, k, *x.values()))
    settings = {"causal": True, "deterministic": torch.are_deterministic_algorithms_enabled()}
    if x.packing is None:
        return tuple(flash_attn_func(q, k, value, **settings).transpose(0, 1) for value in values)
    lengths = x.packing.lengths(S)
    q, k = q.flatten(0, 1), k.flatten(0, 1)
    averages = (flash_attn_varlen_func(q, k, value.flatten(0, 1), *lengths, **settings) for value in values)
    return tuple(average.unflatten(0, (B, S)).transpose(0, 1) for average in averages)
