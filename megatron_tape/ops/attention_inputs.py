"""The inputs of the attention backends in `ops/backends`.

Axes: S queries, T keys (the last S of them are the queries' own tokens), B batch, H query heads, G
key/value groups, D head dimension.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_tape.ops.activation_checkpointing import run_directly
from megatron_tape.ops.backends.choice import supports_rotation_kernels
from megatron_tape.ops.packing import Packing
from megatron_tape.ops.position_inputs import PositionInputs
from megatron_tape.ops.rotation import rotate_groups


@dataclass(frozen=True, kw_only=True)
class AttentionInputs(PositionInputs):
    """The inputs of attention in one layer: queries, keys and values, and the inherited fields of
    `PositionInputs`.
    """

    q_SBHD: Tensor
    k_TBGD: Tensor
    v_TBGD: Tensor
    packing: Packing | None = None
    """Bounds of packed documents, which do not attend to each other; None if each sequence is one
    document.
    """
    rotate: bool = True
    """Whether attention rotates q and k by z; false if they are already rotated."""
    run: Callable[..., tuple[Tensor, ...]] = run_directly
    """`run(function, *tensors)` returns `function(*tensors)`; with selective activation
    checkpointing it records and replays the call (`ops.activation_checkpointing`). The naive
    backend ignores it, as does tiled with `rescore`."""

    def rotated(self, fused: bool = True) -> tuple[Tensor, Tensor]:
        """Return q (S, B, H, D) and k (T, B, G, D), rotated by z unless z is None or `rotate` is
        False.

        With `fused`, the Triton kernel rotates on devices that support it. Without it, and on other
        devices, plain torch rotates.
        """
        q = self.q_SBHD
        k = self.k_TBGD
        z = self.z_TBGD
        if z is None or not self.rotate:
            return q, k
        if fused and supports_rotation_kernels(q):
            # Imported here, since Triton is installed only on some systems.
            from megatron_tape.ops.kernels.triton_rotation import rotated_and_joined

            return rotated_and_joined(q, k, self.v_TBGD, z, wide=False)
        return rotate_groups(q, z), rotate_groups(k, z)

    def with_one_value(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return q and k as `rotated` does, and v (T, B, G, D) or, with `average_state`, [v | z]
        (T, B, G, 2D).
        """
        # If possible, one kernel rotates and concatenates, so that z is read only once.
        if not self.average_state:
            return *self.rotated(), self.v_TBGD
        if self.rotate and supports_rotation_kernels(self.q_SBHD):
            from megatron_tape.ops.kernels.triton_rotation import rotated_and_joined

            return rotated_and_joined(self.q_SBHD, self.k_TBGD, self.v_TBGD, self.z_TBGD, wide=True)
        return *self.rotated(), torch.cat(self.values(), dim=-1)

    def values(self) -> list[Tensor]:
        """Return the tensors (T, B, G, D) that the attention weights average: v and, with
        `average_state`, z.
        """
        if self.average_state:
            return [self.v_TBGD, self.z_TBGD.expand_as(self.v_TBGD)]
        return [self.v_TBGD]
