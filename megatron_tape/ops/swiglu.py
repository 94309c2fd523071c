"""SwiGLU, silu(gate) * up, which saves only its input for the backward pass."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function, once_differentiable


def swiglu(gate_and_up: Tensor, fused: bool = False) -> Tensor:
    """Return silu(gate) * up (..., F) for the concatenated [gate | up] (..., 2F); `fused` uses a
    Triton kernel.
    """
    return _SwiGLU.apply(gate_and_up, fused)


class _SwiGLU(Function):
    """The differentiable form of `swiglu`."""

    @staticmethod
    def forward(ctx, gate_and_up, fused):
        ctx.fused = fused
        if fused:
            # Imported here, since Triton is installed only on some systems.
            from megatron_tape.ops.kernels import triton_swiglu

            gate_and_up = gate_and_up.contiguous()
            ctx.save_for_backward(gate_and_up)
            return triton_swiglu.forward(gate_and_up)
        ctx.save_for_backward(gate_and_up)
        gate, up = gate_and_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (gate_and_up,) = ctx.saved_tensors
        if ctx.fused:
            from megatron_tape.ops.kernels import triton_swiglu

            return triton_swiglu.backward(gate_and_up, dy.contiguous()), None
        # Both gradients are written into one tensor: concatenating them would copy them.
        d_gate_and_up = torch.empty_like(gate_and_up)
        gate, up = gate_and_up.chunk(2, dim=-1)
        d_gate, d_up = d_gate_and_up.chunk(2, dim=-1)
        torch.mul(dy, F.silu(gate), out=d_up)
        torch.ops.aten.silu_backward.grad_input(dy * up, gate, grad_input=d_gate)
        return d_gate_and_up, None
