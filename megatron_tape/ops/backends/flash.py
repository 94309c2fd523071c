"""flash-attn, called once for each value, as its kernels require values to have the width of the keys."""

from collections.abc import Callable
from functools import partial

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
        kernel = partial(flash_attn_func, **settings)
        averages = x.run(partial(_averages, kernel), q, k, *values)
        return tuple(average.transpose(0, 1) for average in averages)
    q_ends, k_ends, q_longest, k_longest = x.packing.lengths(S)
    settings |= {"cu_seqlens_q": q_ends, "cu_seqlens_k": k_ends, "max_seqlen_q": q_longest, "max_seqlen_k": k_longest}
    kernel = partial(flash_attn_varlen_func, **settings)
    averages = x.run(partial(_averages, kernel), *(y.flatten(0, 1) for y in (q, k, *values)))
    return tuple(average.unflatten(0, (B, S)).transpose(0, 1) for average in averages)


def _averages(kernel: Callable[..., Tensor], q: Tensor, k: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
    return tuple(kernel(q, k, value) for value in values)
