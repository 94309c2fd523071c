"""Biases that are added to attention scores, computed for one tile of queries and keys at a time.

Axes: T tokens, B batch, H query heads.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

NEAR = 256
"""Largest number of queries in a tile whose bias may omit a per-query constant, which softmax cancels. In larger tiles
these constants differ so much that scores would lose precision."""


@dataclass(frozen=True)
class Bias:
    """A bias given by `tile(rows, columns, *tensors)`, which is added to the scores of these queries and keys.

    `rows` and `columns` are slices of the T tokens; the result is (B or 1, H or 1, rows or 1, columns or 1) and must be
    finite even for masked pairs. It is differentiable in `tensors`, which must include everything that needs a
    gradient. Attention passes them at least in float32, since the gradient of a table is a sum over all pairs.
    """

    tile: Callable[..., Tensor]
    tensors: tuple[Tensor, ...] = ()
    score: Callable[..., Tensor] | None = None
    """`score(b, h, q, k, *tensors)`, optional, returns the bias of one sequence, head, query and key, given as 0-d
    integer tensors. FlexAttention compiles it, so it may only form 0-d tensors."""
    left_out: Callable[..., Tensor] | None = None
    """`left_out(rows, *tensors)`, optional, returns the per-query constants (B or 1, H or 1, rows) omitted by tiles of
    at most `NEAR` queries. They change no output. In the backward pass they absorb the sum of a query's score
    gradients, which is not exactly zero for rounded outputs and would otherwise reach the tensors of other tokens."""

    def in_float32(self) -> "Bias":
        """Return the same bias with tensors of at least float32."""
        wider = tuple(x.to(torch.promote_types(x.dtype, torch.float32)) for x in self.tensors)
        return replace(self, tensors=wider)

    def without_tensors(self) -> "Bias":
        """Return the functions without the tensors, for objects that outlive the tensors."""
        return replace(self, tensors=())

    def of_heads(self, heads: slice) -> "Bias":
        """Return the bias of a slice of the heads."""
        whole = self.without_tensors()

        def tile(rows: slice, columns: slice, *tensors: Tensor) -> Tensor:
            found = whole.tile(rows, columns, *tensors)
            return found if found.shape[1] == 1 else found[:, heads]

        def score(b: Tensor, h: Tensor, q: Tensor, k: Tensor, *tensors: Tensor) -> Tensor:
            return whole.score(b, h + heads.start, q, k, *tensors)

        def left_out(rows: slice, *tensors: Tensor) -> Tensor:
            return whole.left_out(rows, *tensors)[:, heads]

        return Bias(tile, self.tensors, score if self.score else None, left_out if self.left_out else None)

    def of(self, rows: slice, columns: slice) -> Tensor:
        """Return a differentiable tile."""
        return self.tile(rows, columns, *self.tensors)


def gates_as_bias(log_gate_TBH: Tensor, bias: Bias | None = None) -> Bias:
    """Turn forget gates f into a bias: query s and key t get the sum of log f over t < j <= s.

    Forgetting Transformer (Lin et al., 2025), equation 5. The logarithms must be finite. They are summed in float64 to
    preserve differences of neighbors in long sequences; the result is at least in float32. Tiles of at most `NEAR`
    queries omit a constant per query. `bias`, if given, is added.
    """
    # Differences of one cumulative sum, in which everything before a document cancels.
    dtype = torch.promote_types(log_gate_TBH.dtype, torch.float32)
    sums_BHT = log_gate_TBH.double().cumsum(0).permute(1, 2, 0)
    # Each sum is split into two float32 numbers, because kernels do not compute in float64.
    high = sums_BHT.to(dtype)
    low = (sums_BHT - high).detach().to(dtype)

    def tile(rows: slice, columns: slice, of_query: Tensor, of_key: Tensor, low: Tensor, *rest: Tensor) -> Tensor:
        origin, origin_low = (x[..., rows.start, None].detach() for x in (of_query, low))
        gates = ((origin - of_key[..., columns]) + (origin_low - low[..., columns]))[..., None, :]
        if rows.stop - rows.start > NEAR:
            gates = gates + ((of_query[..., rows] - origin) + (low[..., rows] - origin_low))[..., None]
        return gates if bias is None else gates + bias.tile(rows, columns, *rest)

    def score(
        b: Tensor, h: Tensor, q: Tensor, k: Tensor, of_query: Tensor, of_key: Tensor, low: Tensor, *rest: Tensor
    ) -> Tensor:
        gates = (of_query[b, h, q] - of_key[b, h, k]) + (low[b, h, q] - low[b, h, k])
        return gates if bias is None else gates + bias.score(b, h, q, k, *rest)

    def left_out(rows: slice, of_query: Tensor, *rest: Tensor) -> Tensor:
        return of_query[..., rows]

    of_bias = () if bias is None else bias.tensors
    bias = None if bias is None else bias.without_tensors()
    pointwise = bias is None or bias.score is not None
    # Passed twice, because FlexAttention's compiled gradient requires tensors that are indexed once.
    return Bias(tile, (high, high.clone(), low, *of_bias), score if pointwise else None, left_out)
