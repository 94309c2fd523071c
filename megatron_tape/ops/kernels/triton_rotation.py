"""Triton kernels that prepare the inputs of attention: rotated queries and keys, and [v | z].

Inside attention, each tile of keys would be rotated again for every tile of queries. Instead, one
launch reads q, k, v and the state z once, and writes the inputs of attention. The value has 2D
elements per token and group, so that one product multiplies the weights with v and z. Axes: S
queries, T keys, B batch, H query heads, G key/value groups, D head dimension, F = D/2 complex
numbers. The reference is in `ops/rotation.py`.

In training, q, k and v are views of one projection and z may be broadcast. The kernels take the
strides of these tensors, since contiguous copies would cost as much as the rotation itself.

If each head has its own key, the kernels also write the gradients of q, k and v as views of one
tensor. This is the gradient of the projection's output, so `triton_split` need not concatenate it.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import Function, once_differentiable


@triton.jit
def load_rows(
    pointer,
    rows,
    stride,
    limit,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHECKED: tl.constexpr = True,
):
    """Load the rows with the indices `rows`: D numbers each, `stride` apart, padded with zeros to
    BLOCK_D.

    Rows from `limit` on are zero. Without CHECKED, all rows must be below `limit`.
    """
    # 64-bit offsets, since tensors may have more than 2^31 elements.
    columns = tl.arange(0, BLOCK_D)
    places = pointer + rows.to(tl.int64)[:, None] * stride + columns[None, :]

    if CHECKED:
        return tl.load(places, mask=(rows[:, None] < limit) & (columns[None, :] < D), other=0.0)
    if BLOCK_D == D:
        return tl.load(places)
    return tl.load(places, mask=columns[None, :] < D, other=0.0)


@triton.jit
def load_numbers(pointer, rows, limit, other, CHECKED: tl.constexpr):
    """Load one number per row, or `other` from row `limit` on.

    Without CHECKED, all rows must be below `limit`.
    """
    if CHECKED:
        return tl.load(pointer + rows, mask=rows < limit, other=other)
    return tl.load(pointer + rows)


@triton.jit
def store_rows(
    pointer,
    rows,
    stride,
    limit,
    values,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Store the first D columns of `values` (rows, BLOCK_D) in the rows below `limit`."""
    columns = tl.arange(0, BLOCK_D)
    places = pointer + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    inside = (rows[:, None] < limit) & (columns[None, :] < D)
    tl.store(places, values.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def _load_complex(
    pointer,
    rows,
    stride,
    limit,
    F: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """Load rows of F complex numbers, stored as [real | imaginary], as two fp32 matrices."""
    real = load_rows(pointer, rows, stride, limit, F, BLOCK_F)
    imaginary = load_rows(pointer + F, rows, stride, limit, F, BLOCK_F)
    return real.to(tl.float32), imaginary.to(tl.float32)


@triton.jit
def _store_complex(
    pointer,
    rows,
    stride,
    limit,
    real,
    imaginary,
    F: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """Store rows of F complex numbers as [real | imaginary], in the rows below `limit`."""
    store_rows(pointer, rows, stride, limit, real, F, BLOCK_F)
    store_rows(pointer + F, rows, stride, limit, imaginary, F, BLOCK_F)


@triton.jit
def _rotate(
    X,
    Y,
    rows,
    x_row,
    y_row,
    limit,
    z_re,
    z_im,
    F: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """Multiply rows of X by the state as complex numbers; write the products to Y.

    X and Y point to one head of a sequence; `x_row` and `y_row` are the strides of their rows.
    """
    re, im = _load_complex(X, rows, x_row, limit, F, BLOCK_F)
    new_re = re * z_re - im * z_im
    new_im = re * z_im + im * z_re
    _store_complex(Y, rows, y_row, limit, new_re, new_im, F, BLOCK_F)


@triton.jit
def _rotate_and_join(
    Q,
    K,
    V,
    Z,
    Q_OUT,
    K_OUT,
    VALUE,
    q_row,
    q_batch,
    q_head,
    k_row,
    k_batch,
    k_head,
    v_row,
    v_batch,
    v_head,
    z_row,
    z_batch,
    z_head,
    T,
    G,
    PER_GROUP: tl.constexpr,
    F: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_T: tl.constexpr,
    ROTATE: tl.constexpr,
    WIDE: tl.constexpr,
    COPY_Z: tl.constexpr,
):
    """With ROTATE, rotate the queries and keys of one group. With WIDE, store its v in the left
    half of [v | z] and, with COPY_Z, z in the right half.

    The arguments such as `q_row`, `q_batch` and `q_head` are the strides of the first three axes of
    Q (T, B, H, D), K, V and Z (T, B, G, D). The results Q_OUT (T, B, H, D), K_OUT (T, B, G, D) and
    VALUE (T, B, G, 2D) are contiguous. PER_GROUP is H / G; BLOCK_F is F, rounded up to a power of
    two. The grid is (B * G, blocks of BLOCK_T tokens).
    """
    D: tl.constexpr = 2 * F
    batch_groups = tl.num_programs(0)
    batch_group = tl.program_id(0).to(tl.int64)  # counts the groups of all sequences
    batch = batch_group // G
    group = batch_group % G
    rows = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)

    Z += batch * z_batch + group * z_head
    z_re, z_im = _load_complex(Z, rows, z_row, T, F, BLOCK_F)

    if ROTATE:
        Q += batch * q_batch + group * PER_GROUP * q_head
        Q_OUT += batch_group * PER_GROUP * D
        out_row = batch_groups * PER_GROUP * D
        for head in range(PER_GROUP):
            q = Q + head * q_head
            _rotate(
                q,
                Q_OUT + head * D,
                rows,
                q_row,
                out_row,
                T,
                z_re,
                z_im,
                F,
                BLOCK_F,
            )

        K += batch * k_batch + group * k_head
        _rotate(
            K,
            K_OUT + batch_group * D,
            rows,
            k_row,
            batch_groups * D,
            T,
            z_re,
            z_im,
            F,
            BLOCK_F,
        )

    if WIDE:
        V += batch * v_batch + group * v_head
        VALUE += batch_group * 2 * D
        v = load_rows(V, rows, v_row, T, D, 2 * BLOCK_F)
        store_rows(VALUE, rows, batch_groups * 2 * D, T, v, D, 2 * BLOCK_F)
    if WIDE and COPY_Z:
        _store_complex(
            VALUE + D,
            rows,
            batch_groups * 2 * D,
            T,
            z_re,
            z_im,
            F,
            BLOCK_F,
        )


@triton.jit
def _rotate_backward(
    X,
    DY,
    DX,
    rows,
    x_row,
    dy_row,
    dx_row,
    limit,
    z_re,
    z_im,
    dz_re,
    dz_im,
    F: tl.constexpr,
    BLOCK_F: tl.constexpr,
    NEEDS_DZ: tl.constexpr,
):
    """Write the gradient of X to DX, given the gradient DY of Y = X z; return the gradient of z.

    With NEEDS_DZ, the gradient is `dz_re` and `dz_im` plus the part of this product; without it,
    they are returned unchanged.
    """
    # The gradient of a factor is the product with the conjugate of the other one.
    dy_re, dy_im = _load_complex(DY, rows, dy_row, limit, F, BLOCK_F)
    dx_re = dy_re * z_re + dy_im * z_im
    dx_im = dy_im * z_re - dy_re * z_im
    _store_complex(DX, rows, dx_row, limit, dx_re, dx_im, F, BLOCK_F)

    if NEEDS_DZ:
        x_re, x_im = _load_complex(X, rows, x_row, limit, F, BLOCK_F)
        dz_re = dz_re + dy_re * x_re + dy_im * x_im
        dz_im = dz_im + dy_im * x_re - dy_re * x_im
    return dz_re, dz_im


@triton.jit
def _rotate_and_join_backward(
    Q,
    K,
    Z,
    DQ,
    DK,
    DVALUE,
    DQ_OUT,
    DK_OUT,
    DV_OUT,
    DZ_OUT,
    q_row,
    q_batch,
    q_head,
    k_row,
    k_batch,
    k_head,
    z_row,
    z_batch,
    z_head,
    dq_row,
    dq_batch,
    dq_head,
    dk_row,
    dk_batch,
    dk_head,
    dv_row,
    dv_batch,
    dv_head,
    S,
    G,
    PER_GROUP: tl.constexpr,
    F: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_S: tl.constexpr,
    WIDE: tl.constexpr,
    COPY_DV: tl.constexpr,
    NEEDS_DZ: tl.constexpr,
):
    """Compute the gradients of queries, keys and the state from those of rotated queries and keys.

    With COPY_DV, also store the gradient of v, which is DVALUE (S, B, G, D) or, with WIDE, the left
    half of the gradient DVALUE (S, B, G, 2D) of [v | z]; its right half is added to the state's
    gradient. DQ is (S, B, H, D) and DK (S, B, G, D); they, DVALUE and DZ_OUT (S, B, G, D) are
    contiguous. DQ_OUT, DK_OUT and DV_OUT have the strides `dq_*`, `dk_*` and `dv_*`. Q, K, Z, their
    strides and the grid are those of `_rotate_and_join`.
    """
    D: tl.constexpr = 2 * F
    E: tl.constexpr = 2 * D if WIDE else D  # width of the value
    batch_groups = tl.num_programs(0)
    batch_group = tl.program_id(0).to(tl.int64)  # counts the groups of all sequences
    batch = batch_group // G
    group = batch_group % G
    rows = tl.program_id(1) * BLOCK_S + tl.arange(0, BLOCK_S)

    Z += batch * z_batch + group * z_head
    z_re, z_im = _load_complex(Z, rows, z_row, S, F, BLOCK_F)
    dz_re = tl.zeros((BLOCK_S, BLOCK_F), tl.float32)
    dz_im = tl.zeros((BLOCK_S, BLOCK_F), tl.float32)

    if COPY_DV:
        dv = load_rows(DVALUE + batch_group * E, rows, batch_groups * E, S, D, 2 * BLOCK_F)
        DV_OUT += batch * dv_batch + group * dv_head
        store_rows(DV_OUT, rows, dv_row, S, dv, D, 2 * BLOCK_F)
    if WIDE and NEEDS_DZ:
        dz_re, dz_im = _load_complex(
            DVALUE + batch_group * E + D,
            rows,
            batch_groups * E,
            S,
            F,
            BLOCK_F,
        )

    Q += batch * q_batch + group * PER_GROUP * q_head
    DQ += batch_group * PER_GROUP * D
    DQ_OUT += batch * dq_batch + group * PER_GROUP * dq_head
    for head in range(PER_GROUP):
        dz_re, dz_im = _rotate_backward(
            Q + head * q_head,
            DQ + head * D,
            DQ_OUT + head * dq_head,
            rows,
            q_row,
            batch_groups * PER_GROUP * D,
            dq_row,
            S,
            z_re,
            z_im,
            dz_re,
            dz_im,
            F,
            BLOCK_F,
            NEEDS_DZ,
        )

    dz_re, dz_im = _rotate_backward(
        K + batch * k_batch + group * k_head,
        DK + batch_group * D,
        DK_OUT + batch * dk_batch + group * dk_head,
        rows,
        k_row,
        batch_groups * D,
        dk_row,
        S,
        z_re,
        z_im,
        dz_re,
        dz_im,
        F,
        BLOCK_F,
        NEEDS_DZ,
    )
    if NEEDS_DZ:
        _store_complex(
            DZ_OUT + batch_group * D,
            rows,
            batch_groups * D,
            S,
            dz_re,
            dz_im,
            F,
            BLOCK_F,
        )


def last_contiguous(x: Tensor) -> Tensor:
    """Return x if its last axis is contiguous, otherwise a contiguous copy.

    The kernels take the strides of the other axes as arguments.
    """
    return x if x.stride(-1) == 1 else x.contiguous()


def first_strides(*tensors: Tensor) -> list[int]:
    """Return the strides of the tensors' first three axes."""
    return [stride for x in tensors for stride in x.stride()[:3]]


def rotate_and_join(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor | None,
    rotate: bool,
    wide: bool,
    joined: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q (S, B, H, D) and k (T, B, G, D), rotated by z (T, B, G, D) if `rotate`, and the
    value.

    The value is v, or [v | z] (T, B, G, 2D) if `wide`. If `joined` is given, v is written into its
    left half, and it is returned as [v | z]; its right half must be z already. `rotate` requires S
    = T. All last axes must be contiguous. What is neither rotated nor joined is returned as it is.
    """
    if not (rotate or wide):
        return q, k, v
    T, B, G, D = k.shape

    rotated_q = q
    rotated_k = k
    value = v
    if rotate:
        rotated_q = q.new_empty(q.shape)
        rotated_k = k.new_empty(k.shape)
    if wide:
        value = joined
        if joined is None:
            value = v.new_empty(T, B, G, 2 * D)

    # Each program rotates about 2048 complex numbers of a head at once.
    block_f = triton.next_power_of_2(D // 2)
    block_t = max(1, 2048 // block_f)
    _rotate_and_join[(B * G, triton.cdiv(T, block_t))](
        q,
        k,
        v,
        z,
        rotated_q,
        rotated_k,
        value,
        *first_strides(q, k, v, z),
        T,
        G,
        q.shape[2] // G,
        D // 2,
        block_f,
        block_t,
        rotate,
        wide,
        joined is None,
    )
    return rotated_q, rotated_k, value


def rotate_and_join_backward(
    q: Tensor,
    k: Tensor,
    z: Tensor,
    dq: Tensor,
    dk: Tensor,
    dvalue: Tensor,
    together: bool,
    needs_dz: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of q (in its dtype), k, v, and z, which is None unless `needs_dz`.

    `dq` and `dk` are the gradients of the rotated q and k, and `dvalue` that of v (S, B, G, D) or
    of [v | z] (S, B, G, 2D); all are contiguous. With `together`, which requires as many heads as
    groups, the gradients of q, k and v are the parts of one tensor (S, B, G, 3D); see `are_parts`.
    """
    S, B, G, D = k.shape
    wide = dvalue.shape[-1] > D
    # Otherwise `dvalue` itself is the gradient of v.
    copy_dv = together or wide
    if together:
        dq_out, dk_out, dv_out = k.new_empty(S, B, G, 3 * D).chunk(3, dim=-1)
    else:
        dq_out = q.new_empty(q.shape)
        dk_out = k.new_empty(k.shape)
        dv_out = dvalue
        if wide:
            dv_out = k.new_empty(k.shape)
    dz_out = z.new_empty(k.shape) if needs_dz else None

    # Each program has half as many numbers as in `rotate_and_join`, since it also holds gradients
    # in registers.
    block_f = triton.next_power_of_2(D // 2)
    block_s = max(1, 1024 // block_f)
    _rotate_and_join_backward[(B * G, triton.cdiv(S, block_s))](
        q,
        k,
        z,
        dq,
        dk,
        dvalue,
        dq_out,
        dk_out,
        dv_out,
        dz_out,
        *first_strides(q, k, z, dq_out, dk_out, dv_out),
        S,
        G,
        q.shape[2] // G,
        D // 2,
        block_f,
        block_s,
        wide,
        copy_dv,
        needs_dz,
    )
    return dq_out, dk_out, dv_out, dz_out


def are_parts(parts: Sequence[Tensor], stride: tuple[int, ...]) -> bool:
    """Return whether the tensors are adjacent parts, in order, of the last axis of one tensor with
    these strides.
    """
    first = parts[0]
    offset = first.storage_offset()
    for part in parts:
        # `_cdata` instead of `data_ptr`, since fake tensors have no address.
        same_memory = part.untyped_storage()._cdata == first.untyped_storage()._cdata
        if not same_memory or part.stride() != stride or part.storage_offset() != offset:
            return False
        offset += part.shape[-1]
    return True


def from_one_projection(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether q, k and v (S, B, G, D) are the parts of one contiguous tensor (S, B, G, 3D),
    as the output of a projection is.
    """
    _, B, G, D = k.shape
    width = 3 * D
    return q.shape == k.shape and are_parts([q, k, v], (B * G * width, G * width, width, 1))


class _RotatedAndJoined(Function):
    """The differentiable form of `rotate_and_join`, which always rotates."""

    @staticmethod
    def forward(
        ctx,
        q,
        k,
        v,
        z,
        wide,
        joined,
    ):
        q, k, v, z = (last_contiguous(x) for x in (q, k, v, z))
        rotated_q, rotated_k, value = rotate_and_join(q, k, v, z, True, wide, joined)

        ctx.together = from_one_projection(q, k, v)
        if ctx.needs_input_grad[3]:
            ctx.save_for_backward(q, k, z)
        else:
            # The gradients of q and k need only z.
            ctx.save_for_backward(None, None, z)
        # Detached, since autograd would treat `joined` itself as an input that needs no gradient.
        if joined is not None:
            value = value.detach()
        return rotated_q, rotated_k, value

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        q, k, z = ctx.saved_tensors
        # Most libraries return gradients in the layout of their inputs, which is contiguous.
        dq, dk, dvalue = (x.contiguous() for x in gradients)
        if q is None:
            # Without z's gradient, only the shapes and dtypes of q and k matter.
            q = dq
            k = dk
        needs_dz = ctx.needs_input_grad[3]
        gradients = rotate_and_join_backward(q, k, z, dq, dk, dvalue, ctx.together, needs_dz)
        return *gradients, None, None


def rotated_and_joined(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    wide: bool,
    joined: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q (S, B, H, D) and k (S, B, G, D) rotated by z (S, B or 1, G or 1, D), and v or, if
    `wide`, [v | z] (S, B, G, 2D). All are differentiable.

    `joined` is memory for [v | z], whose right half is z already, or None.
    """
    if not wide:
        joined = None
    with torch.cuda.device_of(q):
        return _RotatedAndJoined.apply(q, k, v, z.expand(k.shape), wide, joined)
