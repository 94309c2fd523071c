"""What an attention backend gets.

Axes: S queries, T keys (the last S of them are the queries' own tokens), B batch, H query heads, G key/value groups, D
head dimension.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_tape.ops.activation_checkpointing import run_directly
from megatron_tape.ops.backends.choice import rotates_fused
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

    def rotated(self, fused: bool = True) -> tuple[Tensor, Tensor]:
        """Return q and k, rotated if that is still to be done; the backend triton rotates them itself.

        With `fused`, our kernel rotates them where it runs.
        """
        q, k, z = self.q_SBHD, self.k_TBGD, self.z_TBGD
        if z is None or not self.rotate:
            return q, k
        if fused and rotates_fused(q):
            from megatron_tape.ops.kernels.triton_rotation import prepared

            return prepared(q, k, self.v_TBGD, z, wide=False)
        return rotate_groups(q, z), rotate_groups(k, z)

    def with_one_value(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the same q and k, and what the attention map averages as one tensor: v or, on request, [v | z]."""
        if not self.average_state:
            return *self.rotated(), self.v_TBGD
        if self.rotate and rotates_fused(self.q_SBHD):
            from megatron_tape.ops.kernels.triton_rotation import prepared

            return prepared(self.q_SBHD, self.k_TBGD, self.v_TBGD, self.z_TBGD, wide=True)
        return *self.rotated(), torch.cat(self.values(), dim=-1)

    def values(self) -> list[Tensor]:
        """Return what the attention map averages: v and, on request, z."""
        return [self.v_TBGD, self.z_TBGD.expand_as(self.v_TBGD)] if self.average_state else [self.v_TBGD]
