"""What an attention backend gets.

Axes: S queries, T keys (the last S of them are the queries' own tokens), B batch, H query heads, G key/value groups, D
head dimension.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megatron_tape.ops.activation_checkpointing import run_directly
from megatron_tape.ops.packing import Packing
from megatron_tape.ops.positions import Positions
from megatron_tape.ops.rotation import rotate_groups


@dataclass(frozen=True, kw_only=True)
class AttentionInputs(Positions):
    """Queries, keys and values, and everything that `Positions` adds to them."""

    q_SBHD: Tensor
    k_TBGD: Tensor
    v_TBGD: Tensor
    packing: Packing | None = None
    """Keeps packed documents from attending to each other."""
    rotate: bool = True
    """Whether q and k are still to be rotated by z."""
    run: Callable[..., tuple[Tensor, ...]] = run_directly
    """`run(function, *tensors)` returns the tuple that `function` returns for these tensors. Where layers are
    recomputed it records or replays that (`ops.activation_checkpointing`). The backend naive, and tiled for whole rows
    of scores, do not use it."""

    def rotated(self) -> tuple[Tensor, Tensor]:
        """Return q and k, rotated if that is still to be done; some backends rotate in their kernel instead."""
        q, k, z = self.q_SBHD, self.k_TBGD, self.z_TBGD
        if z is not None and self.rotate:
            q, k = rotate_groups(q, z), rotate_groups(k, z)
        return q, k

    def values(self) -> list[Tensor]:
        """Return what the attention map averages: v and, on request, z."""
        return [self.v_TBGD, self.z_TBGD.expand_as(self.v_TBGD)] if self.average_state else [self.v_TBGD]
