"""Triton kernels of SwiGLU, silu(gate) * up, which read and write every element once.

Liger's kernels (Hsu et al., 2024) need gate and up as separate contiguous tensors, which would take
a copy of the projection's output. The reference is in `ops/swiglu.py`. Axes: F hidden size of the
MLP.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Columns per program."""


@triton.jit
def _load(pointer, columns, F):
    """Load these columns of a row of F numbers as fp32."""
    return tl.load(pointer + columns, mask=columns < F, other=0.0).to(tl.float32)


@triton.jit
def _store(pointer, columns, F, values):
    """Store `values` in these columns of a row of F numbers."""
    tl.store(pointer + columns, values.to(pointer.dtype.element_ty), mask=columns < F)


@triton.jit
def _swiglu(X, Y, F, BLOCK: tl.constexpr):
    """Map a row of X (rows, 2F) to a row of Y (rows, F); the grid is (rows, blocks of columns)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    X += row * 2 * F
    gate = _load(X, columns, F)
    up = _load(X + F, columns, F)
    _store(Y + row * F, columns, F, gate * tl.sigmoid(gate) * up)


@triton.jit
def _swiglu_backward(X, DY, DX, F, BLOCK: tl.constexpr):
    """Write the gradient DX of X, given the gradient DY of Y, with the shapes and grid of
    `_swiglu`.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    X += row * 2 * F
    DX += row * 2 * F
    gate = _load(X, columns, F)
    up = _load(X + F, columns, F)
    dy = _load(DY + row * F, columns, F)

    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    # The derivative of silu is sigmoid + silu * (1 - sigmoid).
    _store(
        DX,
        columns,
        F,
        dy * up * (sigmoid + silu * (1 - sigmoid)),
    )
    _store(DX + F, columns, F, dy * silu)


def forward(gate_and_up: Tensor) -> Tensor:
    """Return silu(gate) * up (..., F) for a contiguous [gate | up] (..., 2F)."""
    F = gate_and_up.shape[-1] // 2
    y = gate_and_up.new_empty(*gate_and_up.shape[:-1], F)
    _launch(_swiglu, gate_and_up, y)
    return y


def backward(gate_and_up: Tensor, dy: Tensor) -> Tensor:
    """Return the gradient of [gate | up] (..., 2F), given the contiguous gradient `dy` of the
    result (..., F).
    """
    d_gate_and_up = torch.empty_like(gate_and_up)
    _launch(_swiglu_backward, gate_and_up, dy, d_gate_and_up)
    return d_gate_and_up


def _launch(kernel: Any, gate_and_up: Tensor, *tensors: Tensor) -> None:
    """Launch a kernel on the rows of [gate | up] and of `tensors`."""
    F = gate_and_up.shape[-1] // 2
    rows = gate_and_up.numel() // (2 * F)
    # CUDA refuses an empty grid.
    if rows:
        with torch.cuda.device_of(gate_and_up):
            kernel[(rows, triton.cdiv(F, BLOCK))](
                gate_and_up,
                *tensors,
                F,
                BLOCK,
            )
