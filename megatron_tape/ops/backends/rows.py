"""Attention in blocks of whole rows of scores, for encodings with a `Rescore`: CoPE, PaTH and
PaTH-FoX.

A row holds the scores of one query and all its keys. These encodings compute a score from several
keys of the row. Blocks are recomputed in the backward pass, so no S x T matrix is saved. The
reference is `naive.py`. Axes: S queries, T keys (the last S of them are the queries' own tokens), B
batch, H query heads, G key/value groups, R query heads of a group, r queries of a block, t keys up
to the last of them, D head dimension, E width of all values together.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_tape.ops.attention_inputs import AttentionInputs
from megatron_tape.ops.bias import Bias
from megatron_tape.ops.rescore import Rescore


def attend_by_rows(x: AttentionInputs, rows: int) -> tuple[Tensor, ...]:
    """Return the averages over keys of v and, if it is averaged, z, each (S, B, H, D), in blocks of
    `rows` queries.

    bf16 and fp16 inputs are computed in fp32.
    """
    q, k = x.rotated()
    dtype = torch.promote_types(q.dtype, torch.float32)
    values = [y.expand(-1, k.shape[1], k.shape[2], -1) for y in x.values()]
    # Concatenating a single value would copy it.
    value = torch.cat(values, dim=-1) if len(values) > 1 else values[0]
    q_BHSD, k_BGTD, v_BGTE = (y.permute(1, 2, 0, 3).to(dtype) for y in (q, k, value))
    tensors = x.rescore.prepared(q_BHSD, k_BGTD)
    of_bias = () if x.bias is None else x.bias.tensors
    scoring = _Scoring(
        replace(x.rescore, tensors=()),
        None if x.bias is None else x.bias.without_tensors(),
        len(tensors),
        None if x.packing is None else x.packing.bounds_2BT[0],
    )
    averages = _AttentionByRows.apply(
        scoring, rows, x.v_TBGD.dtype, q_BHSD, k_BGTD, v_BGTE, *tensors, *of_bias
    )
    return tuple(y.permute(2, 0, 1, 3) for y in averages)


class _Scoring:
    """Computes the scores of a block: `rescore` with the first `count` tensors, plus `bias` with
    the others.
    """

    def __init__(self, rescore: Rescore, bias: Bias | None, count: int, starts_BT: Tensor | None):
        self.takes_scores = rescore.takes_scores
        self._rescore = rescore
        self._bias = bias
        self._count = count
        self._starts = starts_BT

    def seen(self, tokens: slice, device: torch.device) -> Tensor:
        """Return the mask (B or 1, 1, r, t), True where a query at `tokens` attends to a key."""
        keys = torch.arange(tokens.stop, device=device)
        seen = (keys <= keys[tokens, None])[None, None]
        if self._starts is not None:
            seen = seen & (keys >= self._starts[:, None, tokens, None])
        return seen

    def __call__(
        self,
        products: Tensor | None,
        q: Tensor,
        k: Tensor,
        seen: Tensor,
        tokens: slice,
        *tensors: Tensor,
    ):
        """Return the scores (B, H, r, t) of queries q (B, H, r, D) and keys k (B, G, t, D); see
        `Rescore`.
        """
        scores = self._rescore.rows(products, q, k, seen, tokens, *tensors[: self._count])
        if self._bias is not None:
            scores = scores + self._bias.tile(
                tokens, slice(0, tokens.stop), *tensors[self._count :]
            )
        return scores


class _AttentionByRows(torch.autograd.Function):
    """Attention in which autograd differentiates only the scores of each block."""

    @staticmethod
    def forward(ctx, scoring: _Scoring, rows: int, dtype: torch.dtype, q, k, v, *tensors):
        (B, H, S, D), T, E = q.shape, k.shape[2], v.shape[-1]
        # In memory, the sequence axis comes first, as the output projection expects; otherwise it
        # would make a copy.
        outputs = [q.new_empty(S, B, H, D, dtype=dtype).permute(1, 2, 0, 3) for _ in range(E // D)]
        for block, tokens in _blocks(S, T, rows):
            seen = scoring.seen(tokens, q.device)
            queries = q[:, :, block]
            keys = k[:, :, : tokens.stop]
            products = _products(queries, keys) if scoring.takes_scores else None
            p = _softmax(scoring(products, queries, keys, seen, tokens, *tensors), seen)
            for output, part in zip(outputs, _times(p, v[:, :, : tokens.stop]).split(D, dim=-1)):
                output[:, :, block] = part
        ctx.save_for_backward(q, k, v, *tensors)
        ctx.scoring = scoring
        ctx.rows = rows
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *doutputs):
        q, k, v, *tensors = ctx.saved_tensors
        scoring, (need_q, need_k, need_v, *need) = ctx.scoring, ctx.needs_input_grad[3:]
        dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        dtensors = [torch.zeros_like(x) if needed else None for x, needed in zip(tensors, need)]
        leaves = [x.detach().requires_grad_(needed) for x, needed in zip(tensors, need)]
        for block, tokens in _blocks(q.shape[2], k.shape[2], ctx.rows):
            seen = scoring.seen(tokens, q.device)
            values = v[:, :, : tokens.stop]
            queries = q[:, :, block].detach().requires_grad_(need_q)
            keys = k[:, :, : tokens.stop].detach().requires_grad_(need_k)
            with torch.enable_grad():
                products = _products(queries, keys) if scoring.takes_scores else None
                scores = scoring(products, queries, keys, seen, tokens, *leaves)
            p = _softmax(scores.detach(), seen)
            d = torch.cat([do[:, :, block].to(q.dtype) for do in doutputs], dim=-1)
            if need_v:
                dv[:, :, : tokens.stop] += _transposed_times(p, d, v.shape[1])
            if not scores.requires_grad:
                continue
            # From p, not from the rounded outputs, with which the gradients of a row would not sum
            # to zero.
            dscores = torch.ops.aten._softmax_backward_data(_times(d, values.mT), p, -1, p.dtype)
            gradients = _gradients(scores, (queries, keys, *leaves), dscores)
            for total, part in zip(
                (dq[:, :, block], dk[:, :, : tokens.stop], *dtensors), gradients
            ):
                if part is not None:
                    total += part
        return None, None, None, dq, dk, dv, *dtensors


def _gradients(scores: Tensor, sources: tuple[Tensor, ...], dscores: Tensor) -> list[Tensor | None]:
    """Return the gradient of each source; None for sources that need no gradient or are unused."""
    needed = [x for x in sources if x.requires_grad]
    gradients = iter(
        torch.autograd.grad(scores, needed, dscores.to(scores.dtype), allow_unused=True)
    )
    return [next(gradients) if x.requires_grad else None for x in sources]


def _blocks(S: int, T: int, rows: int) -> Iterator[tuple[slice, slice]]:
    """Yield two slices for each block of queries: their indices among the S queries, and among the
    T keys.
    """
    for first in range(0, S, rows):
        last = min(first + rows, S)
        yield slice(first, last), slice(T - S + first, T - S + last)


def _products(q_BHrD: Tensor, k_BGtD: Tensor) -> Tensor:
    """Return q.k / sqrt(D), (B, H, r, t)."""
    return _times(q_BHrD * q_BHrD.shape[-1] ** -0.5, k_BGtD.mT)


def _softmax(scores: Tensor, seen: Tensor) -> Tensor:
    """Return the softmax of the scores where `seen` is True, and 0 elsewhere."""
    hidden = torch.zeros_like(seen, dtype=scores.dtype).masked_fill_(~seen, float("-inf"))
    return (scores + hidden).softmax(-1)


def _times(x_BHrm: Tensor, y_BGmn: Tensor) -> Tensor:
    """Return (B, H, r, n), the product of each head with the matrix of its group."""
    B, H, r, m = x_BHrm.shape
    G = y_BGmn.shape[1]
    return (x_BHrm.reshape(B, G, H // G * r, m) @ y_BGmn).view(B, H, r, -1)


def _transposed_times(x_BHrm: Tensor, y_BHrn: Tensor, G: int) -> Tensor:
    """Return (B, G, m, n), the sum over the heads of a group of x^T y."""
    x, y = (z.reshape(z.shape[0], G, -1, z.shape[-1]) for z in (x_BHrm, y_BHrn))
    return x.mT @ y
