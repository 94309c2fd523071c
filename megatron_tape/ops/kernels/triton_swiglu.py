"""Triton kernels of SwiGLU, silu(gate) * up, which read and write every element once.

Liger's kernels (Hsu et al., 2024) need gate and up as separate contiguous tensors, which would take
a copy of the projection's output. The reference is in `ops/swiglu.py`. Axes: F hidden size of the
MLP.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Columns per program."""


@triton.jit
def _swiglu(X, Y, F, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < F
    gate = tl.load(X + row * 2 * F + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(X + row * 2 * F + F + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        Y + row * F + columns, (gate * tl.sigmoid(gate) * up).to(Y.dtype.element_ty), mask=inside
    )


@triton.jit
def _swiglu_backward(X, DY, DX, F, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < F
    gate = tl.load(X + row * 2 * F + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(X + row * 2 * F + F + columns, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(DY + row * F + columns, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    dgate = dy * up * (sigmoid + silu * (1 - sigmoid))
    tl.store(DX + row * 2 * F + columns, dgate.to(DX.dtype.element_ty), mask=inside)
    tl.store(DX + row * 2 * F + F + columns, (dy * silu).to(DX.dtype.element_ty), mask=inside)


def forward(gate_and_up: Tensor) -> Tensor:
    """Return silu(gate) * up (..., F) for a contiguous [gate | up] (..., 2F)."""
    F = gate_and_up.shape[-1] // 2
    y = torch.empty(*gate_and_up.shape[:-1], F, dtype=gate_and_up.dtype, device=gate_and_up.device)
    if y.numel():
        with torch.cuda.device_of(gate_and_up):
            _swiglu[(y.numel() // F, triton.cdiv(F, BLOCK))](gate_and_up, y, F, BLOCK)
    return y


def backward(gate_and_up: Tensor, dy: Tensor) -> Tensor:
    """Return the gradient of [gate | up] (..., 2F), given the contiguous gradient `dy` of the
    result (..., F).
    """
    F = dy.shape[-1]
    d_gate_and_up = torch.empty_like(gate_and_up)
    if dy.numel():
        with torch.cuda.device_of(gate_and_up):
            _swiglu_backward[(dy.numel() // F, triton.cdiv(F, BLOCK))](
                gate_and_up, dy, d_gate_and_up, F, BLOCK
            )
    return d_gate_and_up
