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
from megatron_tape.ops.position_inputs import PositionInputs
from megatron_tape.ops.rotation import rotate_groups
from megatron_tape.ops.visibility import Visibility


@dataclass(frozen=True, kw_only=True)
class AttentionInputs(PositionInputs):
    """The inputs of attention in one layer: queries, keys and values, and the inherited fields of
    `PositionInputs`.
    """

    q_SBHD: Tensor
    k_TBGD: Tensor
    v_TBGD: Tensor
    visibility: Visibility | None = None
    """Packed documents, which do not attend to each other, and the sliding window. None if each
    sequence is one document, and tokens attend to all earlier ones.
    """
    rotate: bool = True
    """Whether attention rotates q and k by z; false if they are already rotated."""
    run: Callable[..., tuple[Tensor, ...]] = run_directly
    """`run(function, *tensors)` returns `function(*tensors)`; with selective activation
    checkpointing it records and replays the call (`ops.activation_checkpointing`). The naive
    backend ignores it, as does tiled with `rescore`."""

    @property
    def documents(self) -> Visibility | None:
        """`visibility` if the sequences consist of documents or segments, else None."""
        if self.visibility is None or self.visibility.documents_2BT is None:
            return None
        return self.visibility

    @property
    def window(self) -> int | None:
        """Size of the sliding window, or None."""
        if self.visibility is None:
            return None
        return self.visibility.window

    def prepared(self, join: bool = False, fused: bool = True) -> tuple[Tensor, ...]:
        """Return q (S, B, H, D) and k (T, B, G, D), rotated by z unless z is None or `rotate` is
        False, and what the attention weights average.

        This is v (T, B, G, D), followed by z with `average_state`. With `join`, they are one tensor
        [v | z] (T, B, G, 2D). With `fused`, the Triton kernel rotates and joins on devices that
        support it, so that z is read only once; plain torch does it elsewhere.
        """
        q = self.q_SBHD
        k = self.k_TBGD
        value = self.v_TBGD
        z = self.z_TBGD
        rotate = self.rotate and z is not None
        wide = join and self.average_state
        if rotate and fused and supports_rotation_kernels(q):
            # Imported here, since Triton is installed only on some systems.
            from megatron_tape.ops.kernels.triton_rotation import rotated_and_joined

            q, k, value = rotated_and_joined(q, k, value, z, wide, self.joined_TBGE)
        else:
            if rotate:
                q = rotate_groups(q, z)
                k = rotate_groups(k, z)
            if wide:
                state = z.expand_as(value)
                value = torch.cat([value, state], dim=-1)

        if self.average_state and not wide:
            return q, k, value, z.expand_as(value)
        return q, k, value


def split(x_SBHE: Tensor, widths: list[int]) -> tuple[Tensor, ...]:
    """Return two or three views of x, split along its last axis.

    On devices that support it, a Triton kernel concatenates their gradients, unless another kernel
    has written them into one tensor already. torch.split always concatenates them.
    """
    if supports_rotation_kernels(x_SBHE):
        # Imported here, since Triton is installed only on some systems.
        from megatron_tape.ops.kernels.triton_split import split as split_with_kernel

        return split_with_kernel(x_SBHE, widths)
    return x_SBHE.split(widths, dim=-1)


def with_sink(scores_BHST: Tensor, sink_H: Tensor | None) -> Tensor:
    """Return the scores, followed by those of the sink (B, H, S, T + 1) unless it is None."""
    if sink_H is None:
        return scores_BHST
    B, _, S, _ = scores_BHST.shape
    sinks = sink_H.to(scores_BHST.dtype)[:, None, None].expand(B, -1, S, 1)
    return torch.cat([scores_BHST, sinks], dim=-1)
