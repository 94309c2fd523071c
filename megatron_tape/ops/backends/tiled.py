"""Causal attention that averages several values with the same weights, in plain torch, one tile of
scores at a time.

The fused CPU kernels of torch's SDPA require values as wide as the keys, so that TAPE would need
two calls: for v and for z. Here the values are concatenated, and tiles of scores fit into a
processor's cache. This is faster than two calls on CPUs, and packed documents need no S x T
matrices. The algorithm is flash attention (Dao, 2023); the reference is `naive.py`. Scores that an
encoding changes are computed by `rows.py` instead.
Axes: B batch, G key/value groups, R query heads of a group, S queries, T keys (the last S of them
are the queries' own tokens), D head dimension.
"""

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_tape.ops.attention_inputs import AttentionInputs
from megatron_tape.ops.backends.rows import attend_by_rows

QUERIES = 128
KEYS = 256
"""Rows and columns of a tile."""
LOG2_E = 1 / math.log(2)
"""log2(e), to compute exp(x) as exp2(x LOG2_E): on CPUs, exp2 takes a third of the time of exp."""


def attend(x: AttentionInputs) -> tuple[Tensor, ...]:
    """Return the averages over keys of v and, if averaged, z, each (S, B, H, D). bf16 and fp16 are
    computed in fp32.
    """
    if x.bias is not None or x.rescore is not None:
        return attend_by_rows(x, QUERIES)
    q, k = x.rotated()
    q, k, *values = (y.permute(1, 2, 0, 3) for y in (q, k, *x.values()))
    S = q.shape[2]
    starts = None
    first = [0] * S
    if x.packing is not None:
        starts = x.packing.bounds_2BT[0]
        first = x.packing.first_seen(S)
    q_BGRSD = q.unflatten(1, (k.shape[1], -1))
    averages = x.run(partial(_TiledAttention.apply, first, starts), q_BGRSD, k, *values)
    return tuple(y.flatten(1, 2).permute(2, 0, 1, 3) for y in averages)


class _Tiles:
    """The tiles with at least one visible pair of query and key, and the masks inside them.

    `first` holds, for each query, the first key that it or a later query may attend to in any
    sequence of the batch.
    """

    def __init__(self, q: Tensor, T: int, starts: Tensor | None, first: list[int]):
        *_, self.R, self.S, _ = q.shape
        self.keys = torch.arange(T, device=q.device)
        # Queries are numbered from 0, keys from the start of the cache.
        self.offset = T - self.S
        self.queries = self.keys[self.offset :]
        self.starts = None if starts is None else starts[:, self.offset :]
        self.first = first

    def blocks(self) -> Iterator[tuple[slice, list[slice]]]:
        """Yield each block of queries, and the blocks of keys to which they attend."""
        for a in range(0, self.S, QUERIES):
            b = min(a + QUERIES, self.S)
            low = self.first[a] // KEYS * KEYS
            high = b + self.offset
            yield slice(a, b), [slice(c, min(c + KEYS, high)) for c in range(low, high, KEYS)]

    def hide(self, scores: Tensor, rows: slice, columns: slice, value: float) -> None:
        """Overwrite the masked elements of `scores` (B*G, R*rows, columns) with `value`."""
        if self.starts is None:
            # All queries of the block attend to every key up to the first query's own token.
            first = max(columns.start, rows.start + self.offset + 1)
            if first >= columns.stop:
                return
            if value == 0.0:  # for a whole tile, tril_ takes a tenth of the time of a mask
                scores.unflatten(-2, (self.R, -1)).tril_(rows.start + self.offset - columns.start)
                return
            scores = scores[..., first - columns.start :]
            columns = slice(first, columns.stop)

        queries = self.queries[rows, None]
        keys = self.keys[columns]
        hidden = keys > queries
        if self.starts is not None:
            hidden = (hidden | (keys < self.starts[:, rows, None]))[:, None, None]
            scores = scores.unflatten(0, (len(self.starts), -1))
        scores.unflatten(-2, (self.R, -1)).masked_fill_(hidden, value)


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, first: list[int], starts, q, k, *values):
        B, G, R, S, D = q.shape
        dtype = torch.promote_types(q.dtype, torch.float32)
        tiles = _Tiles(q, k.shape[2], starts, first)
        keys, wide = (x.flatten(0, 1).to(dtype) for x in (k, torch.cat(values, dim=-1)))
        # In memory, the sequence axis comes first, as the output projection expects; otherwise it
        # would make a copy.
        outputs = [v.new_empty(S, B, G, R, D).permute(1, 2, 3, 0, 4) for v in values]
        lse = q.new_empty(B, G, R, S, dtype=dtype)

        for rows, blocks in tiles.blocks():
            queries = _rows(q, rows, dtype) * (D**-0.5 * LOG2_E)
            largest = queries.new_full((*queries.shape[:2], 1), float("-inf"))
            total = torch.zeros_like(largest)
            averaged = queries.new_zeros(*queries.shape[:2], wide.shape[-1])
            for columns in blocks:
                scores = queries @ keys[:, columns].mT
                tiles.hide(scores, rows, columns, float("-inf"))
                now = torch.maximum(largest, scores.amax(-1, keepdim=True))
                # A query without any visible key so far has no largest score to subtract.
                shift = now.masked_fill(now == float("-inf"), 0.0)
                p = _exp2(scores.sub_(shift))
                shrink = largest.sub_(shift).exp2_()
                tiles.hide(p, rows, columns, 0.0)
                total.mul_(shrink).add_(p.sum(-1, keepdim=True))
                averaged.mul_(shrink).baddbmm_(p, wide[:, columns])
                largest = now

            averaged = averaged.div_(total).view(B, G, R, -1, wide.shape[-1])
            for output, part in zip(outputs, averaged.split(D, dim=-1)):
                output[:, :, :, rows] = part
            lse[:, :, :, rows] = total.log2_().add_(largest).view(B, G, R, -1)

        ctx.save_for_backward(q, k, lse, starts, *values, *outputs)
        ctx.first = first
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        q, k, lse, starts, *rest = ctx.saved_tensors
        values = rest[: len(gradients)]
        outputs = rest[len(gradients) :]
        B, G, R, S, D = q.shape
        dtype = lse.dtype
        tiles = _Tiles(q, k.shape[2], starts, ctx.first)
        keys, wide = (x.flatten(0, 1).to(dtype) for x in (k, torch.cat(values, dim=-1)))
        dq = torch.empty_like(q)
        dkeys = torch.zeros_like(keys)
        dwide = torch.zeros_like(wide)
        delta = sum((do.to(dtype) * o).sum(-1) for do, o in zip(gradients, outputs))

        for rows, blocks in tiles.blocks():
            queries = _rows(q, rows, dtype) * (D**-0.5 * LOG2_E)
            gradient = torch.cat([_rows(do, rows, dtype) for do in gradients], dim=-1)
            lse_of_rows, delta_of_rows = (
                x[:, :, :, rows].reshape(B * G, -1, 1) for x in (lse, delta)
            )
            dqueries = torch.zeros_like(queries)
            for columns in blocks:
                scores = queries @ keys[:, columns].mT
                p = _exp2(scores.sub_(lse_of_rows))
                tiles.hide(p, rows, columns, 0.0)
                dwide[:, columns].baddbmm_(p.mT, gradient)
                ds = (gradient @ wide[:, columns].mT).sub_(delta_of_rows).mul_(p)
                dqueries.baddbmm_(ds, keys[:, columns])
                dkeys[:, columns].baddbmm_(ds.mT, queries)
            dq[:, :, :, rows] = dqueries.mul_(D**-0.5).view(B, G, R, -1, D).to(q.dtype)

        dk = dkeys.div_(LOG2_E).view_as(k).to(k.dtype)
        dvalues = dwide.view(B, G, k.shape[2], -1).split(D, dim=-1)
        return None, None, dq, dk, *(dv.to(v.dtype) for dv, v in zip(dvalues, values))


def _exp2(x: Tensor) -> Tensor:
    """Compute exp2(x) in place, clamped from below to 2^-90, since CPUs are several times slower
    for denormal results.

    The clamped weights are negligible, because the largest weight of a row is 1.
    """
    return x.clamp_(min=-90.0).exp2_()


def _rows(x: Tensor, rows: slice, dtype: torch.dtype) -> Tensor:
    """Return the block (B*G, R*rows, ...) of x (B, G, R, S, ...)."""
    return x[:, :, :, rows].flatten(0, 1).flatten(1, 2).to(dtype)
