"""Biases that are added to attention scores, computed for one tile of queries and keys at a time.

Axes: T tokens, B batch, H query heads.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

NEAR = 256
"""Maximum number of queries in a tile that may omit constants per query from its bias, since
softmax cancels them. In larger tiles, biases without these constants would be so large that scores
lose precision."""


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
    left_out: Callable[..., Tensor] | None = None
    """Optional; `left_out(rows, *tensors)` returns the constants per query, (B or 1, H or 1, rows),
    that tiles of at most `NEAR` queries omit. They do not change attention's outputs. In the
    backward pass, they absorb the sum of a query's score gradients, which is not exactly zero for
    rounded outputs and would otherwise reach other tokens."""

    def in_float32(self) -> "Bias":
        """Return a copy whose tensors are in at least float32."""
        wider = tuple(x.to(torch.promote_types(x.dtype, torch.float32)) for x in self.tensors)
        return replace(self, tensors=wider)

    def without_tensors(self) -> "Bias":
        """Return a copy that keeps the functions but no tensors, for objects that outlive the
        tensors.
        """
        return replace(self, tensors=())

    def of_heads(self, heads: slice) -> "Bias":
        """Return the bias of the query heads in the slice `heads`."""
        whole = self.without_tensors()

        def tile(rows: slice, columns: slice, *tensors: Tensor) -> Tensor:
            every = whole.tile(rows, columns, *tensors)
            if every.shape[1] == 1:
                return every
            return every[:, heads]

        def score(b: Tensor, h: Tensor, q: Tensor, k: Tensor, *tensors: Tensor) -> Tensor:
            return whole.score(b, h + heads.start, q, k, *tensors)

        def left_out(rows: slice, *tensors: Tensor) -> Tensor:
            return whole.left_out(rows, *tensors)[:, heads]

        return Bias(
            tile, self.tensors, score if self.score else None, left_out if self.left_out else None
        )

    def of(self, rows: slice, columns: slice) -> Tensor:
        """Return the tile of these queries and keys, through which gradients reach `tensors`."""
        return self.tile(rows, columns, *self.tensors)


def gates_as_bias(log_gate_TBH: Tensor, bias: Bias | None = None) -> Bias:
    """Return forget gates f as a bias: the sum of log f_j over t < j <= s for query s and key t.

    This is equation 5 of the Forgetting Transformer (Lin et al., 2025). `log_gate_TBH` must be
    finite. It is summed in float64, so that differences between nearby tokens stay accurate in long
    sequences; the returned bias is in at least float32. Tiles of at most `NEAR` queries omit a
    constant per query (`Bias.left_out`). `bias` is added unless None.
    """
    # The bias is a difference of two cumulative sums, in which all tokens before the document
    # cancel.
    dtype = torch.promote_types(log_gate_TBH.dtype, torch.float32)
    sums_BHT = log_gate_TBH.double().cumsum(0).permute(1, 2, 0)
    # Each sum is split into two float32 numbers, because kernels do not compute in float64.
    high = sums_BHT.to(dtype)
    low = (sums_BHT - high).detach().to(dtype)

    def tile(
        rows: slice, columns: slice, of_query: Tensor, of_key: Tensor, low: Tensor, *of_bias: Tensor
    ) -> Tensor:
        origin, origin_low = (x[..., rows.start, None].detach() for x in (of_query, low))
        gates = ((origin - of_key[..., columns]) + (origin_low - low[..., columns]))[..., None, :]
        if rows.stop - rows.start > NEAR:
            gates = (
                gates + ((of_query[..., rows] - origin) + (low[..., rows] - origin_low))[..., None]
            )
        if bias is None:
            return gates
        return gates + bias.tile(rows, columns, *of_bias)

    def score(
        b: Tensor,
        h: Tensor,
        q: Tensor,
        k: Tensor,
        of_query: Tensor,
        of_key: Tensor,
        low: Tensor,
        *of_bias: Tensor,
    ) -> Tensor:
        gates = (of_query[b, h, q] - of_key[b, h, k]) + (low[b, h, q] - low[b, h, k])
        if bias is None:
            return gates
        return gates + bias.score(b, h, q, k, *of_bias)

    def left_out(rows: slice, of_query: Tensor, *_: Tensor) -> Tensor:
        return of_query[..., rows]

    of_bias = () if bias is None else bias.tensors
    bias = None if bias is None else bias.without_tensors()
    pointwise = bias is None or bias.score is not None
    # Passed twice, because FlexAttention's compiled gradient requires tensors that are indexed
    # once.
    return Bias(tile, (high, high.clone(), low, *of_bias), score if pointwise else None, left_out)
