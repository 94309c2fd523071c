"""Triton kernels that prepare the inputs of attention: rotated queries and keys, and the value [v |
z].

Inside attention, each tile of keys would be rotated again for every tile of queries. Instead, one
launch reads q, k, v and the state z once, and writes the inputs of attention. The value has 2D
elements per token and group, so that one product multiplies the weights with v and z. Axes: S
queries, T keys, B batch, H query heads, G key/value groups, D head dimension, F = D/2 complex
numbers. The reference is in `ops/rotation.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable


@triton.jit
def load_rows(
    pointer, base, rows, row_stride, columns, limit, D: tl.constexpr, CHECKED: tl.constexpr = True
):
    """Load (rows, columns) of a matrix, with zeros where row >= `limit` or column >= D.

    Without CHECKED, all rows must be below `limit`.
    """
    places = pointer + base + rows.to(tl.int64)[:, None] * row_stride + columns[None, :]
    if CHECKED:
        return tl.load(places, mask=(rows[:, None] < limit) & (columns[None, :] < D), other=0.0)
    if columns.shape[0] == D:
        return tl.load(places)
    return tl.load(places, mask=columns[None, :] < D, other=0.0)


@triton.jit
def load_numbers(pointer, rows, limit, other, CHECKED: tl.constexpr):
    """Load one number per row, or `other` where row >= `limit`; without CHECKED, all rows must be
    below `limit`.
    """
    if CHECKED:
        return tl.load(pointer + rows, mask=rows < limit, other=other)
    return tl.load(pointer + rows)


@triton.jit
def store_rows(pointer, base, rows, row_stride, columns, limit, value, D: tl.constexpr):
    """Store (rows, columns) of a matrix where row < `limit` and column < D."""
    inside = (rows[:, None] < limit) & (columns[None, :] < D)
    target = pointer + base + rows.to(tl.int64)[:, None] * row_stride + columns[None, :]
    tl.store(target, value.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def _rotate(X, Y, x_base, y_base, rows, x_row, y_row, columns, S, z_re, z_im, F: tl.constexpr):
    """Multiply rows of X by the state as complex numbers, stored as [real | imaginary]; write the
    result to Y.
    """
    x_re = load_rows(X, x_base, rows, x_row, columns, S, F).to(tl.float32)
    x_im = load_rows(X, x_base + F, rows, x_row, columns, S, F).to(tl.float32)
    store_rows(Y, y_base, rows, y_row, columns, S, x_re * z_re - x_im * z_im, F)
    store_rows(Y, y_base + F, rows, y_row, columns, S, x_re * z_im + x_im * z_re, F)


@triton.jit
def _prepare(
    Q, K, V, Z, Q_OUT, K_OUT, VALUE, q_row, q_batch, q_head, k_row, k_batch, k_head, v_row, v_batch, v_head,
    z_row, z_batch, z_head, B, T, G,
    PER_GROUP: tl.constexpr, F: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_S: tl.constexpr,
    ROTATE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """With ROTATE, rotate the queries and keys of one group; with WIDE, store the group's value [v
    | z].
    """
    batch = (tl.program_id(0) // G).to(tl.int64)
    group = (tl.program_id(0) % G).to(tl.int64)
    rows = tl.program_id(1) * BLOCK_S + tl.arange(0, BLOCK_S)
    columns = tl.arange(0, BLOCK_F)
    z_base = batch * z_batch + group * z_head
    z_re = load_rows(Z, z_base, rows, z_row, columns, T, F)
    z_im = load_rows(Z, z_base + F, rows, z_row, columns, T, F)
    D: tl.constexpr = 2 * F
    # Outputs are contiguous.
    line = batch * G + group
    if ROTATE:
        w_re = z_re.to(tl.float32)
        w_im = z_im.to(tl.float32)
        for member in range(PER_GROUP):
            head = group * PER_GROUP + member
            _rotate(
                Q, Q_OUT, batch * q_batch + head * q_head, (line * PER_GROUP + member) * D, rows, q_row,
                B * G * PER_GROUP * D, columns, T, w_re, w_im, F,
            )  # fmt: skip
        k_base = batch * k_batch + group * k_head
        _rotate(K, K_OUT, k_base, line * D, rows, k_row, B * G * D, columns, T, w_re, w_im, F)
    if WIDE:
        base = line * 2 * D
        stride = B * G * 2 * D
        v_base = batch * v_batch + group * v_head
        store_rows(
            VALUE,
            base,
            rows,
            stride,
            columns,
            T,
            load_rows(V, v_base, rows, v_row, columns, T, F),
            F,
        )
        store_rows(
            VALUE,
            base + F,
            rows,
            stride,
            columns,
            T,
            load_rows(V, v_base + F, rows, v_row, columns, T, F),
            F,
        )
        store_rows(VALUE, base + D, rows, stride, columns, T, z_re, F)
        store_rows(VALUE, base + D + F, rows, stride, columns, T, z_im, F)


@triton.jit
def _backward_one(
    X, DY, DX, x_base, y_base, base, rows, x_row, y_row, row, columns, S, z_re, z_im, dz_re, dz_im,
    F: tl.constexpr, NEEDED: tl.constexpr,
):  # fmt: skip
    dy_re = load_rows(DY, y_base, rows, y_row, columns, S, F).to(tl.float32)
    dy_im = load_rows(DY, y_base + F, rows, y_row, columns, S, F).to(tl.float32)
    store_rows(DX, base, rows, row, columns, S, dy_re * z_re + dy_im * z_im, F)
    store_rows(DX, base + F, rows, row, columns, S, dy_im * z_re - dy_re * z_im, F)
    if NEEDED:
        x_re = load_rows(X, x_base, rows, x_row, columns, S, F).to(tl.float32)
        x_im = load_rows(X, x_base + F, rows, x_row, columns, S, F).to(tl.float32)
        dz_re = dz_re + dy_re * x_re + dy_im * x_im
        dz_im = dz_im + dy_im * x_re - dy_re * x_im
    return dz_re, dz_im


@triton.jit
def _prepare_backward(
    Q, K, Z, DQ, DQ_OUT, DK, DK_OUT, DVALUE, DV_OUT, DZ_OUT,
    q_row, q_batch, q_head, k_row, k_batch, k_head, z_row, z_batch, z_head,
    dq_row, dq_batch, dq_head, dk_row, dk_batch, dk_head, dvalue_row, dvalue_batch, dvalue_head, B, S, G,
    PER_GROUP: tl.constexpr, F: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_S: tl.constexpr,
    WIDE: tl.constexpr, NEEDED: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of queries, keys and the state z from those of rotated queries and
    keys.

    With WIDE, split the gradient of the value [v | z]: store that of v, and add that of z to the
    state's gradient.
    """
    batch = (tl.program_id(0) // G).to(tl.int64)
    group = (tl.program_id(0) % G).to(tl.int64)
    rows = tl.program_id(1) * BLOCK_S + tl.arange(0, BLOCK_S)
    columns = tl.arange(0, BLOCK_F)
    z_base = batch * z_batch + group * z_head
    z_re = load_rows(Z, z_base, rows, z_row, columns, S, F).to(tl.float32)
    z_im = load_rows(Z, z_base + F, rows, z_row, columns, S, F).to(tl.float32)
    dz_re = tl.zeros((BLOCK_S, BLOCK_F), tl.float32)
    dz_im = tl.zeros((BLOCK_S, BLOCK_F), tl.float32)
    # Outputs are contiguous.
    line = (batch * G + group) * 2 * F
    stride = B * G * 2 * F
    if WIDE:
        base = batch * dvalue_batch + group * dvalue_head
        for half in tl.static_range(2):
            dv = load_rows(DVALUE, base + half * F, rows, dvalue_row, columns, S, F)
            store_rows(DV_OUT, line + half * F, rows, stride, columns, S, dv, F)
        if NEEDED:
            dz_re = load_rows(DVALUE, base + 2 * F, rows, dvalue_row, columns, S, F).to(tl.float32)
            dz_im = load_rows(DVALUE, base + 3 * F, rows, dvalue_row, columns, S, F).to(tl.float32)
    for member in range(PER_GROUP):
        head = group * PER_GROUP + member
        dz_re, dz_im = _backward_one(
            Q, DQ, DQ_OUT, batch * q_batch + head * q_head, batch * dq_batch + head * dq_head,
            line * PER_GROUP + member * 2 * F, rows, q_row, dq_row, stride * PER_GROUP, columns, S,
            z_re, z_im, dz_re, dz_im, F, NEEDED,
        )  # fmt: skip
    dz_re, dz_im = _backward_one(
        K, DK, DK_OUT, batch * k_batch + group * k_head, batch * dk_batch + group * dk_head,
        line, rows, k_row, dk_row, stride, columns, S, z_re, z_im, dz_re, dz_im, F, NEEDED,
    )  # fmt: skip
    if NEEDED:
        store_rows(DZ_OUT, line, rows, stride, columns, S, dz_re, F)
        store_rows(DZ_OUT, line + F, rows, stride, columns, S, dz_im, F)


def strides(x: Tensor) -> tuple[int, int, int]:
    """Return the strides of all axes but the last."""
    return x.stride(0), x.stride(1), x.stride(2)


def last_contiguous(x: Tensor) -> Tensor:
    """Return x if its last axis is contiguous, otherwise a contiguous copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def prepare(
    q: Tensor, k: Tensor, v: Tensor, z: Tensor | None, rotate: bool, wide: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q (S, B, H, D) and k (T, B, G, D), rotated by z (T, B, G, D) if `rotate`, and the
    value.

    The value is v, or [v | z] (T, B, G, 2D) if `wide`. `rotate` requires S = T. All last axes must
    be contiguous.
    """
    if not (rotate or wide):
        return q, k, v
    (T, B, G, D), H = k.shape, q.shape[2]
    rotated_q = q
    rotated_k = k
    value = v
    if rotate:
        rotated_q, rotated_k = (
            torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k)
        )
    if wide:
        value = torch.empty(T, B, G, 2 * D, dtype=v.dtype, device=v.device)
    block_f = triton.next_power_of_2(D // 2)
    block_s = max(1, 2048 // block_f)
    _prepare[(B * G, triton.cdiv(T, block_s))](
        q, k, v, z, rotated_q, rotated_k, value, *strides(q), *strides(k), *strides(v), *strides(z), B, T, G,
        H // G, D // 2, block_f, block_s, rotate, wide,
    )  # fmt: skip
    return rotated_q, rotated_k, value


def prepare_backward(
    q: Tensor, k: Tensor, z: Tensor, dq: Tensor, dk: Tensor, dvalue: Tensor | None, needed: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of q (in its dtype), k, v, and z, which is None unless `needed`.

    `dq` and `dk` are the gradients of the rotated q and k, and `dvalue` that of [v | z] (S, B, G,
    2D). If `dvalue` is None, the gradient of v is None, and that of z comes from the rotation
    alone.
    """
    (S, B, G, D), H = k.shape, q.shape[2]
    dq_out = torch.empty(S, B, H, D, dtype=q.dtype, device=q.device)
    dk_out = torch.empty(S, B, G, D, dtype=k.dtype, device=k.device)
    dv_out = (
        None if dvalue is None else torch.empty(S, B, G, D, dtype=dvalue.dtype, device=k.device)
    )
    dz_out = torch.empty(S, B, G, D, dtype=z.dtype, device=z.device) if needed else None
    wide = dvalue is not None
    block_f = triton.next_power_of_2(D // 2)
    block_s = max(1, 2048 // block_f // 2)
    _prepare_backward[(B * G, triton.cdiv(S, block_s))](
        q, k, z, dq, dq_out, dk, dk_out, *((dvalue, dv_out) if wide else (dk, dk_out)), dz_out if needed else dk_out,
        *strides(q), *strides(k), *strides(z), *strides(dq), *strides(dk), *strides(dvalue if wide else dk),
        B, S, G, H // G, D // 2, block_f, block_s, wide, needed,
    )  # fmt: skip
    return dq_out, dk_out, dv_out, dz_out


class _Prepared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, z, wide):
        q, k, v, z = (last_contiguous(x) for x in (q, k, v, z))
        rotated_q, rotated_k, value = prepare(q, k, v, z, True, wide)
        # The gradients of q and k need only z.
        ctx.save_for_backward(*((q, k) if ctx.needs_input_grad[3] else (None, None)), z)
        ctx.wide = wide
        return (rotated_q, rotated_k, value) if wide else (rotated_q, rotated_k)

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk, dvalue=None):
        q, k, z = ctx.saved_tensors
        dq, dk = (last_contiguous(x) for x in (dq, dk))
        dvalue = None if dvalue is None else last_contiguous(dvalue)
        q = dq if q is None else q
        k = dk if k is None else k
        return *prepare_backward(q, k, z, dq, dk, dvalue, ctx.needs_input_grad[3]), None


@triton.jit
def _join(
    LEFT, RIGHT, OUT, left_row, left_batch, left_head, right_row, right_batch, right_head,
    out_row, out_batch, out_head, S, H, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(0) // H).to(tl.int64)
    head = (tl.program_id(0) % H).to(tl.int64)
    rows = tl.program_id(1) * BLOCK_S + tl.arange(0, BLOCK_S)
    columns = tl.arange(0, BLOCK_D)
    base = batch * out_batch + head * out_head
    left = load_rows(LEFT, batch * left_batch + head * left_head, rows, left_row, columns, S, D)
    right = load_rows(
        RIGHT, batch * right_batch + head * right_head, rows, right_row, columns, S, D
    )
    store_rows(OUT, base, rows, out_row, columns, S, left, D)
    store_rows(OUT, base + D, rows, out_row, columns, S, right, D)


class _Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.like = torch.empty_like(x, device="meta")
        return x.chunk(2, dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx, left, right):
        left = last_contiguous(left)
        right = last_contiguous(right)
        (S, B, H, D), out = left.shape, torch.empty_like(ctx.like, device=left.device)
        block_d = triton.next_power_of_2(D)
        block_s = max(1, 2048 // block_d)
        _join[(B * H, triton.cdiv(S, block_s))](
            left,
            right,
            out,
            *strides(left),
            *strides(right),
            *strides(out),
            S,
            H,
            D,
            block_d,
            block_s,
        )
        return out


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the halves of x = [o | u] (S, B, H, 2D) as views; one kernel concatenates their
    gradients in x's layout.

    torch.split concatenates gradients by torch.cat, which reaches only a fifth of the memory
    bandwidth here.
    """
    with torch.cuda.device_of(x):
        return _Halves.apply(x)


def prepared(q: Tensor, k: Tensor, v: Tensor, z: Tensor, wide: bool) -> tuple[Tensor, ...]:
    """Return q (S, B, H, D) and k (S, B, G, D) rotated by z (S, B or 1, G or 1, D) and, if `wide`,
    [v | z].

    This is the differentiable form of `prepare`.
    """
    with torch.cuda.device_of(q):
        return _Prepared.apply(q, k, v, z.expand(k.shape), wide)
