"""SwiGLU, silu(gate) * up, of which the backward pass needs only its input."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def swiglu(gate_and_up: Tensor) -> Tensor:
    """Return silu(gate) * up, (..., F), for both side by side, (..., 2F)."""
    return _SwiGLU.apply(gate_and_up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, both):
        ctx.save_for_backward(both)
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (both,) = ctx.saved_tensors
        d_both = torch.empty_like(both)
        (gate, up), (d_gate, d_up) = both.chunk(2, dim=-1), d_both.chunk(2, dim=-1)
        torch.mul(dy, F.silu(gate), out=d_up)
        torch.ops.aten.silu_backward.grad_input(dy * up, gate, grad_input=d_gate)
        return d_both
