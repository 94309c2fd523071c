"""flash-attn 3, whose kernels are made for Hopper; its package is called flash_attn_interface."""

from torch import Tensor

from megatron_tape.ops.attention_inputs import AttentionInputs
from megatron_tape.ops.backends import flash


def attend(x: AttentionInputs) -> tuple[Tensor, ...]:
    """Return the average of each value, (S, B, H, D)."""
    return flash.attend(x, "flash_attn_interface")
