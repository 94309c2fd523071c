"""Biases that are added to attention scores, computed for one tile of queries and keys at a time.

Axes: T tokens, B batch, H query heads.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Bias:
    """A bias of attention scores, computed by `tile(rows, columns, *tensors)` for a tile of queries
    and keys.

    `rows` (of queries) and `columns` (of keys) are slices of the T tokens. A tile is (B or 1, H or
    1, rows or 1, columns or 1). It must be finite even for masked pairs, and differentiable in
    `tensors`, which must include every tensor that needs a gradient. Attention passes `tensors` in
    at least float32, since the gradient of a table is a sum over all pairs of query and key.
    """

    tile: Callable[..., Tensor]
    tensors: tuple[Tensor, ...] = ()
    score: Callable[..., Tensor] | None = None
    """Optional; `score(b, h, q, k, *tensors)` returns the bias of one pair. The indices of
    sequence, head, query and key are 0-d integer tensors. FlexAttention compiles the function, so
    all of its intermediate results must be 0-d."""

    def in_float32(self) -> "Bias":
        """Return a copy whose tensors are in at least float32."""
        wider = tuple(x.to(torch.promote_types(x.dtype, torch.float32)) for x in self.tensors)
        return replace(self, tensors=wider)

    def of_heads(self, heads: slice) -> "Bias":
        """Return the bias of the query heads in the slice `heads`."""

        def tile(rows: slice, columns: slice, *tensors: Tensor) -> Tensor:
            every = self.tile(rows, columns, *tensors)
            if every.shape[1] == 1:
                return every
            return every[:, heads]

        def score(b: Tensor, h: Tensor, q: Tensor, k: Tensor, *tensors: Tensor) -> Tensor:
            return self.score(b, h + heads.start, q, k, *tensors)

        return Bias(tile, self.tensors, score if self.score else None)

    def of(self, rows: slice, columns: slice) -> Tensor:
        """Return the tile of these queries and keys, through which gradients reach `tensors`."""
        return self.tile(rows, columns, *self.tensors)


def gates_as_bias(log_gate_TBH: Tensor, bias: Bias | None = None) -> Bias:
    """Return forget gates f as a bias: the sum of log f_j over t < j <= s for query s and key t.

    This is equation 5 of the Forgetting Transformer (Lin et al., 2025). `log_gate_TBH` must be
    finite. It is summed in float64, so that differences between nearby tokens stay accurate in long
    sequences; the returned bias is in at least float32. `bias` is added unless None.
    """
    # The bias is a difference of two cumulative sums, in which all tokens before the document
    # cancel.
    dtype = torch.promote_types(log_gate_TBH.dtype, torch.float32)
    sums_BHT = log_gate_TBH.double().cumsum(0).permute(1, 2, 0)
    # Each sum is split into two float32 numbers, because kernels do not compute in float64.
    high = sums_BHT.to(dtype)
    low = (sums_BHT - high).detach().to(dtype)

    def tile(
        rows: slice, columns: slice, of_query: Tensor, of_key: Tensor, low: Tensor, *others: Tensor
    ) -> Tensor:
        gates = of_query[..., rows, None] - of_key[..., None, columns]
        gates = gates + (low[..., rows, None] - low[..., None, columns])
        if bias is None:
            return gates
        return gates + bias.tile(rows, columns, *others)

    def score(
        b: Tensor, h: Tensor, q: Tensor, k: Tensor, of_query, of_key, low, *others: Tensor
    ) -> Tensor:
        gates = (of_query[b, h, q] - of_key[b, h, k]) + (low[b, h, q] - low[b, h, k])
        if bias is None:
            return gates
        return gates + bias.score(b, h, q, k, *others)

    others = () if bias is None else bias.tensors
    pointwise = bias is None or bias.score is not None
    # The sums are passed twice, because FlexAttention's compiled gradient requires tensors that are
    # indexed once.
    return Bias(tile, (high, high.clone(), low, *others), score if pointwise else None)
