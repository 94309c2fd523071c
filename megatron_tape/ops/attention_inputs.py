"""The input of an attention backend."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megatron_tape.ops.activation_checkpointing import run_directly
from megatron_tape.ops.bias import Bias
from megatron_tape.ops.packing import Packing
from megatron_tape.ops.rescore import Rescore
from megatron_tape.ops.rotation import rotate_groups


@dataclass(frozen=True)
class AttentionInputs:
    """Checked arguments of `ops.attention.attention`."""

    q_SBHD: Tensor
    k_TBGD: Tensor
    v_TBGD: Tensor
    z_TBGD: Tensor | None
    average_state: bool
    packing: Packing | None
    rotate: bool
    bias: Bias | None
    """What is added to the scores, gates included."""
    rescore: Rescore | None
    log_gate_TBH: Tensor | None
    """The gates alone, for kernels made for them."""
    run: Callable[..., tuple[Tensor, ...]] = run_directly
    """`run(function, *tensors)` returns the tuple that `function` returns for these tensors; see
    `ops.activation_checkpointing`."""

    def rotated(self) -> tuple[Tensor, Tensor]:
        """Return queries and keys, rotated by the state if requested."""
        if not self.rotate or self.z_TBGD is None:
            return self.q_SBHD, self.k_TBGD
        return rotate_groups(self.q_SBHD, self.z_TBGD), rotate_groups(self.k_TBGD, self.z_TBGD)

    def values(self) -> tuple[Tensor, ...]:
        """Return what is averaged: the value and, if requested, the state."""
        return (self.v_TBGD, self.z_TBGD.expand_as(self.v_TBGD)) if self.average_state else (self.v_TBGD,)
