"""The product of queries and keys with the position state as Triton kernels of their own.

Inside attention, each tile of keys would be rotated again for every tile of queries. Axes: S sequence, B batch, H query
heads, G groups, D head dimension, F = D/2 complex numbers. The plain form is in `ops/rotation.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def load_rows(pointer, base, rows, row_stride, columns, limit, D: tl.constexpr):
    """Load (rows, columns) of a matrix, with zeros where the row is not below `limit` or the column not below D."""
    inside = (rows[:, None] < limit) & (columns[None, :] < D)
    return tl.load(pointer + base + rows.to(tl.int64)[:, None] * row_stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def store_rows(pointer, base, rows, row_stride, columns, limit, value, D: tl.constexpr):
    """Store (rows, columns) of a matrix where the row is below `limit` and the column below D."""
    inside = (rows[:, None] < limit) & (columns[None, :] < D)
    target = pointer + base + rows.to(tl.int64)[:, None] * row_stride + columns[None, :]
    tl.store(target, value.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def _rotate(
    X, Z, Y, x_row, x_batch, x_head, z_row, z_batch, z_head, y_row, y_batch, y_head, S, H,
    PER_GROUP: tl.constexpr, F: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Multiply by the state as complex numbers, stored as [real | imaginary]."""
    batch, head = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    rows, columns = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_F)
    x_base, z_base = batch * x_batch + head * x_head, batch * z_batch + head // PER_GROUP * z_head
    x_re = load_rows(X, x_base, rows, x_row, columns, S, F).to(tl.float32)
    x_im = load_rows(X, x_base + F, rows, x_row, columns, S, F).to(tl.float32)
    z_re = load_rows(Z, z_base, rows, z_row, columns, S, F).to(tl.float32)
    z_im = load_rows(Z, z_base + F, rows, z_row, columns, S, F).to(tl.float32)
    y_base = batch * y_batch + head * y_head
    store_rows(Y, y_base, rows, y_row, columns, S, x_re * z_re - x_im * z_im, F)
    store_rows(Y, y_base + F, rows, y_row, columns, S, x_re * z_im + x_im * z_re, F)


@triton.jit
def _rotate_backward_one(
    X, DY, DX, x_base, y_base, rows, x_row, y_row, columns, S, z_re, z_im, dz_re, dz_im, F: tl.constexpr
):
    dy_re = load_rows(DY, y_base, rows, y_row, columns, S, F).to(tl.float32)
    dy_im = load_rows(DY, y_base + F, rows, y_row, columns, S, F).to(tl.float32)
    x_re = load_rows(X, x_base, rows, x_row, columns, S, F).to(tl.float32)
    x_im = load_rows(X, x_base + F, rows, x_row, columns, S, F).to(tl.float32)
    store_rows(DX, y_base, rows, y_row, columns, S, dy_re * z_re + dy_im * z_im, F)
    store_rows(DX, y_base + F, rows, y_row, columns, S, dy_im * z_re - dy_re * z_im, F)
    return dz_re + dy_re * x_re + dy_im * x_im, dz_im + dy_im * x_re - dy_re * x_im


@triton.jit
def _rotate_backward(
    Q, K, Z, DQ, DQ_OUT, DK, DZ, q_row, q_batch, q_head, k_row, k_batch, k_head, z_row, z_batch, z_head,
    dq_row, dq_batch, dq_head, dk_row, dk_batch, dk_head, S, G,
    PER_GROUP: tl.constexpr, F: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_S: tl.constexpr,
    WIDE: tl.constexpr, NEEDED: tl.constexpr,
):  # fmt: skip
    """Turn the gradients of rotated queries and keys into those of queries and keys; also compute the state's."""
    batch, group = (tl.program_id(1) // G).to(tl.int64), (tl.program_id(1) % G).to(tl.int64)
    rows, columns = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_F)
    z_base = batch * z_batch + group * z_head
    z_re = load_rows(Z, z_base, rows, z_row, columns, S, F).to(tl.float32)
    z_im = load_rows(Z, z_base + F, rows, z_row, columns, S, F).to(tl.float32)
    dk_base = batch * dk_batch + group * dk_head
    dz_re = tl.zeros((BLOCK_S, BLOCK_F), tl.float32)
    dz_im = tl.zeros((BLOCK_S, BLOCK_F), tl.float32)
    if WIDE:
        dz_re = load_rows(DZ, dk_base, rows, dk_row, columns, S, F).to(tl.float32)
        dz_im = load_rows(DZ, dk_base + F, rows, dk_row, columns, S, F).to(tl.float32)
    for member in range(PER_GROUP):
        head = group * PER_GROUP + member
        dz_re, dz_im = _rotate_backward_one(
            Q, DQ, DQ_OUT, batch * q_batch + head * q_head, batch * dq_batch + head * dq_head, rows, q_row, dq_row,
            columns, S, z_re, z_im, dz_re, dz_im, F,
        )  # fmt: skip
    dz_re, dz_im = _rotate_backward_one(
        K, DK, DK, batch * k_batch + group * k_head, dk_base, rows, k_row, dk_row,
        columns, S, z_re, z_im, dz_re, dz_im, F,
    )  # fmt: skip
    if NEEDED:
        store_rows(DZ, dk_base, rows, dk_row, columns, S, dz_re, F)
        store_rows(DZ, dk_base + F, rows, dk_row, columns, S, dz_im, F)


def strides(x: Tensor) -> tuple[int, int, int]:
    """Return the strides of all axes but the last."""
    return x.stride(0), x.stride(1), x.stride(2)


def last_contiguous(x: Tensor) -> Tensor:
    """Return x, or a copy of it whose last axis is contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def rotated(x: Tensor, z: Tensor) -> Tensor:
    """Return x (S, B, H, D) times z (S, B, G, D) as complex numbers, in x's type."""
    S, B, H, D = x.shape
    y = torch.empty(S, B, H, D, dtype=x.dtype, device=x.device)
    block_f = triton.next_power_of_2(D // 2)
    block_s = max(1, 4096 // block_f // 2)
    _rotate[(triton.cdiv(S, block_s), B * H)](
        x, z, y, *strides(x), *strides(z), *strides(y), S, H, H // z.shape[2], D // 2, block_f, block_s
    )
    return y


def rotated_backward(
    q: Tensor, k: Tensor, z: Tensor, dq: Tensor, dk: Tensor, dz: Tensor | None, needed: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of q, in its type, and of z, if it is `needed`, from those of rotated q and k.

    The gradient of k replaces dk, and that of q replaces dq if dq has q's type. `dz`, if given, is the gradient that z
    has from other uses; it is added to.
    """
    S, B, G, D = k.shape
    averaged = dz is not None
    if dz is None:
        dz = torch.empty_like(dk, dtype=z.dtype) if needed else dk
    dq_out = dq if dq.dtype == q.dtype else torch.empty_like(dq, dtype=q.dtype)
    block_f = triton.next_power_of_2(D // 2)
    block_s = max(1, 2048 // block_f // 2)
    _rotate_backward[(triton.cdiv(S, block_s), B * G)](
        q, k, z, dq, dq_out, dk, dz, *strides(q), *strides(k), *strides(z), *strides(dq), *strides(dk),
        S, G, q.shape[2] // G, D // 2, block_f, block_s, averaged, needed,
    )  # fmt: skip
    return dq_out, dz if needed else None
