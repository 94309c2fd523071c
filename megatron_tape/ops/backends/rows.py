"""Attention in blocks of whole rows of scores, for encodings that derive scores from them.

A block is computed again in the backward pass, so no S x T numbers are kept. The plain form is `naive.py`.
Axes: S queries, T keys (the last S of them are the queries' own tokens), B batch, H query heads, G key/value groups, D
head dimension, E width of all values together.
"""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_tape.ops.bias import Bias
from megatron_tape.ops.inputs import AttentionInputs
from megatron_tape.ops.rescore import Rescore


def attend_by_rows(x: AttentionInputs, rows: int) -> tuple[Tensor, ...]:
    """Return the average of each value, (S, B, H, D), from blocks of `rows` queries.

    bf16 and fp16 are computed in fp32.
    """
    q, k = x.rotated()
    (S, _, _, D), T = q.shape, k.shape[0]
    dtype = torch.promote_types(q.dtype, torch.float32)
    values = [y.expand(-1, k.shape[1], k.shape[2], -1) for y in x.values()]
    # Concatenating a single value would copy it.
    value = torch.cat(values, dim=-1) if len(values) > 1 else values[0]
    q_BHSD, k_BGTD, v_BGTE = (y.permute(1, 2, 0, 3).to(dtype) for y in (q, k, value))
    tensors = x.rescore.prepared(q_BHSD, k_BGTD)
    of_bias = () if x.bias is None else x.bias.tensors
    starts = None if x.packing is None else x.packing.bounds_2BT[0]
    blocks = []
    for first in range(0, S, rows):
        tokens = slice(T - S + first, T - S + min(first + rows, S))
        given = (x.rescore, x.bias, tokens, starts, len(tensors))
        given = (*given, q_BHSD[:, :, tokens.start - T + S : tokens.stop - T + S], k_BGTD, v_BGTE, *tensors, *of_bias)
        blocks.append(checkpoint(_block, *given, use_reentrant=False, preserve_rng_state=False))
    averaged = torch.cat(blocks, dim=2).permute(2, 0, 1, 3).to(x.v_TBGD.dtype)
    return averaged.split(D, dim=-1)


def _block(
    rescore: Rescore,
    bias: Bias | None,
    tokens: slice,
    starts_BT: Tensor | None,
    count: int,
    q_BHrD: Tensor,
    k_BGTD: Tensor,
    v_BGTE: Tensor,
    *tensors: Tensor,
) -> Tensor:
    """Return the averages (B, H, r, E) of the queries of `tokens`."""
    k_BGtD, v_BGtE = (y[:, :, : tokens.stop] for y in (k_BGTD, v_BGTE))
    (B, H, r, D), (G, t) = q_BHrD.shape, k_BGtD.shape[1:3]
    keys = torch.arange(t, device=q_BHrD.device)
    queries = keys[tokens, None]
    seen = (keys <= queries)[None, None]
    if starts_BT is not None:
        seen = seen & (keys >= starts_BT[:, None, tokens, None])
    scores = None
    if rescore.takes_scores:
        scores = (q_BHrD.reshape(B, G, -1, D) * D**-0.5 @ k_BGtD.mT).view(B, H, r, t)
    scores = rescore.rows(scores, q_BHrD, k_BGtD, seen, tokens, *tensors[:count])
    if bias is not None:
        scores = scores + bias.tile(tokens, slice(0, t), *tensors[count:])
    # Unlike overwriting, adding takes no pass over the scores in the backward pass.
    p = (scores + torch.zeros_like(seen, dtype=scores.dtype).masked_fill_(~seen, float("-inf"))).softmax(-1)
    return (p.view(B, G, -1, t) @ v_BGtE).view(B, H, r, -1)
