"""Biases that are added to attention scores, computed for one tile of queries and keys at a time.

Axes: T tokens, B batch, H query heads.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

NEAR = 256
"""Largest number of queries in a tile whose bias may omit a constant for each query. Softmax
cancels such constants. Larger tiles must include them, since the rest of the bias would be so large
that scores lose precision."""


@dataclass(frozen=True)
class Bias:
    """A bias of attention scores, computed by `tile(rows, columns, *tensors)` for a tile of queries
    and keys.

    `rows` (of queries) and `columns` (of keys) are slices of the T tokens. A tile is (B or 1, H or
    1, rows or 1, columns or 1). It must be finite even for masked pairs. It must be differentiable
    in `tensors`, which must include every tensor that needs a gradient. Attention passes `tensors`
    in at least float32, since the gradient of a table is a sum over all pairs of query and key.
    """

    tile: Callable[..., Tensor]
    tensors: tuple[Tensor, ...] = ()
    score: Callable[..., Tensor] | None = None
    """Optional; `score(b, h, q, k, *tensors)` returns the bias of one pair. The indices of
    sequence, head, query and key are 0-d integer tensors. FlexAttention compiles the function, so
    all of its intermediate results must be 0-d."""
    left_out: Callable[..., Tensor] | None = None
    """Optional; `left_out(rows, *tensors)` returns the constants per query, (B or 1, H or 1, rows),
    that tiles of at most `NEAR` queries omit. They do not change attention's outputs, but they have
    a gradient: the sum of a query's score gradients. This sum is zero in exact arithmetic, but not
    with rounded outputs. Without it, the rounding errors would add up in the gradients of other
    tokens."""

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
        all_heads = self.without_tensors()

        def tile(rows: slice, columns: slice, *tensors: Tensor) -> Tensor:
            """Return these heads of a tile of the whole bias."""
            bias = all_heads.tile(rows, columns, *tensors)
            # All heads may have the same bias.
            if bias.shape[1] == 1:
                return bias
            return bias[:, heads]

        def score(
            b: Tensor,
            h: Tensor,
            q: Tensor,
            k: Tensor,
            *tensors: Tensor,
        ) -> Tensor:
            """Return the bias of one pair; `h` counts from the first of these heads."""
            return all_heads.score(b, h + heads.start, q, k, *tensors)

        def left_out(rows: slice, *tensors: Tensor) -> Tensor:
            """Return the constants of these heads."""
            return all_heads.left_out(rows, *tensors)[:, heads]

        return Bias(
            tile, self.tensors, score if self.score else None, left_out if self.left_out else None
        )

    def of(self, rows: slice, columns: slice) -> Tensor:
        """Return the bias of these queries and keys, differentiable in `tensors`."""
        return self.tile(rows, columns, *self.tensors)


def gates_as_bias(
    log_gate_TBH: Tensor,
    bias: Bias | None = None,
    complete: bool = False,
) -> Bias:
    """Return forget gates f as a bias: the sum of log f_j over t < j <= s for query s and key t.

    This is equation 5 of the Forgetting Transformer (Lin et al., 2025). `log_gate_TBH` must be
    finite. It is summed in float64, so that differences between nearby tokens stay accurate in long
    sequences; the returned bias is in at least float32. `bias` is added unless None.

    Tiles of at most `NEAR` queries omit a constant per query (`Bias.left_out`) unless `complete`.
    It must be complete with a sink, which has no bias, so that softmax would not cancel the
    constants.
    """
    # The bias is a difference of two cumulative sums, in which all tokens before the document
    # cancel.
    dtype = torch.promote_types(log_gate_TBH.dtype, torch.float32)
    sums_BHT = log_gate_TBH.double().cumsum(0).permute(1, 2, 0)
    # Each sum is split into two float32 numbers, because kernels do not compute in float64.
    high = sums_BHT.to(dtype)
    low = (sums_BHT - high).detach().to(dtype)

    # The arguments `of_query` and `of_key` are both `high`, (B, H, T).
    def tile(
        rows: slice,
        columns: slice,
        of_query: Tensor,
        of_key: Tensor,
        low: Tensor,
        *bias_tensors: Tensor,
    ) -> Tensor:
        """Return the gates (B, H, 1 or rows, columns) of a tile, plus `bias`."""
        # Differences to the sums at the tile's first query, (B, H, 1), are small, so float32
        # suffices for them. Softmax cancels the first query's sums, so they need no gradient.
        origin = of_query[..., rows.start, None].detach()
        origin_low = low[..., rows.start, None]
        to_keys = (origin - of_key[..., columns]) + (origin_low - low[..., columns])
        gates = to_keys[..., None, :]
        if complete or rows.stop - rows.start > NEAR:
            to_queries = (of_query[..., rows] - origin) + (low[..., rows] - origin_low)
            gates = gates + to_queries[..., None]
        if bias is None:
            return gates
        return gates + bias.tile(rows, columns, *bias_tensors)

    def score(
        b: Tensor,
        h: Tensor,
        q: Tensor,
        k: Tensor,
        of_query: Tensor,
        of_key: Tensor,
        low: Tensor,
        *bias_tensors: Tensor,
    ) -> Tensor:
        """Return the gates of one pair of query and key, plus `bias`."""
        gates = (of_query[b, h, q] - of_key[b, h, k]) + (low[b, h, q] - low[b, h, k])
        if bias is None:
            return gates
        return gates + bias.score(b, h, q, k, *bias_tensors)

    def left_out(rows: slice, of_query: Tensor, *_: Tensor) -> Tensor:
        """Return the sums at the queries, (B, H, rows), which small tiles omit."""
        return of_query[..., rows]

    # `high` is passed twice, because FlexAttention's compiled gradient requires tensors that are
    # indexed once.
    tensors = (high, high.clone(), low)
    pointwise = True
    if bias is not None:
        tensors += bias.tensors
        # The functions above keep `bias`, and must not keep its tensors.
        bias = bias.without_tensors()
        pointwise = bias.score is not None
    return Bias(tile, tensors, score if pointwise else None, None if complete else left_out)
