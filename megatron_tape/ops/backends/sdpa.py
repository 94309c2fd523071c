"""torch's scaled_dot_product_attention, called once for each value, as a wider value would not take its fast path.

Two calls cost twice RoPE's attention; one pass over a widened value would cost 1.5 times as much.
"""

from functools import partial

import torch.nn.functional as F
from torch import Tensor

from megatron_tape.ops.attention_inputs import AttentionInputs
from megatron_tape.ops.bias import NEAR, Bias
from megatron_tape.ops.packing import additive_mask


def attend(x: AttentionInputs) -> tuple[Tensor, ...]:
    """Return the average of each value, (S, B, H, D)."""
    q, k = x.rotated()
    values = x.values()
    mask = _mask(x)
    heads_per_group = q.shape[2] // k.shape[2]
    if mask is not None and heads_per_group > 1:
        # SDPA's kernels that take a mask do not support groups; its fallback would hold all S x S scores.
        k, *values = (y.repeat_interleave(heads_per_group, dim=2) for y in (k, *values))
    q, k = (y.permute(1, 2, 0, 3) for y in (q, k))
    values = [value.permute(1, 2, 0, 3) for value in values]
    # No fast kernel computes the gradient of a mask, so that it is none of the tensors that may need one.
    averages = (
        x.run(partial(_averages, mask), q, k, *values) if x.bias is None else x.run(_averages, mask, q, k, *values)
    )
    return tuple(average.permute(2, 0, 1, 3) for average in averages)


def _averages(mask: Tensor | None, q_BHSD: Tensor, k_BGTD: Tensor, *values_BGTD: Tensor) -> tuple[Tensor, ...]:
    return tuple(
        F.scaled_dot_product_attention(
            q_BHSD,
            k_BGTD,
            value,
            attn_mask=mask,
            is_causal=mask is None and q_BHSD.shape[2] > 1,
            enable_gqa=q_BHSD.shape[1] != k_BGTD.shape[1],
        )
        for value in values_BGTD
    )


def _mask(x: AttentionInputs) -> Tensor | None:
    S, T, dtype, device = x.q_SBHD.shape[0], x.k_TBGD.shape[0], x.q_SBHD.dtype, x.q_SBHD.device
    if x.bias is None and x.packing is None and S in (1, T):
        # A single query sees all keys; with as many queries as keys, SDPA applies the causal mask itself.
        return None
    mask = additive_mask(S, T, None, device, dtype) if x.packing is None else x.packing.mask(S, dtype)
    return mask if x.bias is None else _bias(x.bias, slice(T - S, T), T).to(dtype) + mask


def _bias(bias: Bias, rows: slice, keys: int) -> Tensor:
    """Return the bias with what small tiles leave out: without it, numbers near a query are too large to round."""
    tile = bias.of(rows, slice(0, keys))
    if bias.left_out is None or rows.stop - rows.start > NEAR:
        return tile
    left_out = bias.left_out(rows, *bias.tensors)
    return tile + (left_out - left_out[..., :1].detach())[..., None]
