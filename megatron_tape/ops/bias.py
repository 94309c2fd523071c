"""Biases that are added to attention scores, computed for one tile of queries and keys at a time.

Axes: T tokens, B batch, H query heads.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

NEAR = 256
"""Queries of a tile from whose bias a number for each query may be left out, as softmax cancels it; between more
queries these numbers differ so much that the scores would lose digits."""


@dataclass(frozen=True)
class Bias:
    """`tile(rows, columns, *tensors)` returns what is added to the scores of these queries and keys.

    `rows` and `columns` are slices of the T tokens; the result is (B or 1, H or 1, rows or 1, columns or 1) and must be
    finite even for pairs that are not seen. It is differentiable in `tensors`; everything that needs a gradient must be
    among them. Attention passes them at least in float32, since the gradient of a table is a sum over all pairs.
    """

    tile: Callable[..., Tensor]
    tensors: tuple[Tensor, ...] = ()
    score: Callable[..., Tensor] | None = None
    """`score(b, h, q, k, *tensors)`, if there is one, returns the same for one sequence, head, query's token and key's
    token, given as integer tensors without axes: what FlexAttention compiles. It may not form tensors with axes."""
    left_out: Callable[..., Tensor] | None = None
    """`left_out(rows, *tensors)`, if there is one, returns the numbers (B or 1, H or 1, rows) of these queries that
    tiles of at most `NEAR` queries lack. They change no result. But where gradients of a query's scores do not add up
    to zero, as with rounded outputs, theirs keeps what is left from reaching the tensors of other tokens."""

    def in_float32(self) -> "Bias":
        """Return the same bias with tensors of at least float32."""
        wider = tuple(x.to(torch.promote_types(x.dtype, torch.float32)) for x in self.tensors)
        return replace(self, tensors=wider)

    def without_tensors(self) -> "Bias":
        """Return the functions alone, for what outlives the tensors."""
        return replace(self, tensors=())

    def of_heads(self, heads: slice) -> "Bias":
        """Return the bias of some heads alone."""
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
        """Return a tile, with its gradient."""
        return self.tile(rows, columns, *self.tensors)


def gates_as_bias(log_gate_TBH: Tensor, bias: Bias | None = None) -> Bias:
    """Turn forget gates f into a bias: query s and key t get the sum of log f over t < j <= s.

    Forgetting Transformer (Lin et al., 2025), equation 5. The logarithms must be finite. They are added up in float64,
    so that neighbours keep their differences in long sequences; the result is at least in float32. In tiles of at most
    `NEAR` queries it leaves out a number for each query. `bias`, if given, is added to it.
    """
    # Differences of one running sum, so that everything before a document cancels out.
    dtype = torch.promote_types(log_gate_TBH.dtype, torch.float32)
    sums_BHT = log_gate_TBH.double().cumsum(0).permute(1, 2, 0)
    # Two float32 numbers for each sum, as kernels do not compute in float64.
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
    # Twice, as FlexAttention's compiled gradient is of tensors that are indexed once.
    return Bias(tile, (high, high.clone(), low, *of_bias), score if pointwise else None, left_out)
