"""Biases that are added to attention scores, computed for one tile of queries and keys at a time.

Axes: T tokens, B batch, H query heads.
"""

from collections.abc import Callable
from dataclasses import dataclass

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

    def in_float32(self) -> "Bias":
        """Return the same bias with tensors of at least float32."""
        return Bias(self.tile, tuple(x.to(torch.promote_types(x.dtype, torch.float32)) for x in self.tensors))

    def of_heads(self, heads: slice) -> "Bias":
        """Return the bias of some heads alone."""

        def tile(rows: slice, columns: slice, *tensors: Tensor) -> Tensor:
            whole = self.tile(rows, columns, *tensors)
            return whole if whole.shape[1] == 1 else whole[:, heads]

        return Bias(tile, self.tensors)

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

    def tile(rows: slice, columns: slice, sums: Tensor, *rest: Tensor) -> Tensor:
        origin = sums[..., rows.start, None].detach()
        gates = (origin - sums[..., columns]).to(dtype)[..., None, :]
        if rows.stop - rows.start > NEAR:
            gates = gates + (sums[..., rows] - origin).to(dtype)[..., None]
        return gates if bias is None else gates + bias.tile(rows, columns, *rest)

    return Bias(tile, (sums_BHT, *(() if bias is None else bias.tensors)))
