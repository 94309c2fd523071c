"""Causal attention that averages `[v | z]` with one map, as Triton kernels; queries and keys are rotated beside it.

Axes: S queries, T keys (the last S of them are the queries' own tokens), B batch, H query heads, G key/value groups, D
head dimension. Flash attention (Dao, 2023) with a second value: a pair of query and key costs D + 2D multiply-adds
forward instead of D + D, and 7/5 as many backward. What is saved for the backward pass: q, k, v, z, both outputs and
one log-sum-exp for each query. The plain form to compare with is `megatron_tape.reference.attend`.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable


@triton.jit
def _rows(pointer, base, rows, row_stride, columns, limit, D: tl.constexpr):
    """Load (rows, columns) of a matrix, zero where a row is at or beyond `limit` or a column beyond D."""
    inside = (rows[:, None] < limit) & (columns[None, :] < D)
    return tl.load(pointer + base + rows.to(tl.int64)[:, None] * row_stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _store_rows(pointer, base, rows, row_stride, columns, limit, value, D: tl.constexpr):
    inside = (rows[:, None] < limit) & (columns[None, :] < D)
    target = pointer + base + rows.to(tl.int64)[:, None] * row_stride + columns[None, :]
    tl.store(target, value.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def _seen(queries, keys, starts, offset, T, PACKED: tl.constexpr):
    """Whether query s, which is token s + offset, sees key t: not a later one, and none before its document."""
    seen = (keys[None, :] <= queries[:, None] + offset) & (keys[None, :] < T)
    if PACKED:
        seen = seen & (keys[None, :] >= starts[:, None])
    return seen


@triton.jit
def _forward_blocks(
    o, u, largest, total, q, K, V, Z, k_base, v_base, z_base, k_row, v_row, z_row,
    queries, starts, low, high, offset, T, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
    WIDE: tl.constexpr, PACKED: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK_D)
    for first in range(low, high, BLOCK_T):
        keys = first + tl.arange(0, BLOCK_T)
        k = _rows(K, k_base, keys, k_row, columns, T, D)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if MASKED:
            scores = tl.where(_seen(queries, keys, starts, offset, T, PACKED), scores, float("-inf"))
        now = tl.maximum(largest, tl.max(scores, 1))
        # A row that has seen nothing yet has no largest score to subtract.
        shift = tl.where(now == float("-inf"), 0.0, now)
        p = tl.exp2(scores - shift[:, None])
        shrink = tl.exp2(largest - shift)
        total = total * shrink + tl.sum(p, 1)
        v = _rows(V, v_base, keys, v_row, columns, T, D)
        o = o * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        if WIDE:
            z = _rows(Z, z_base, keys, z_row, columns, T, D)
            u = u * shrink[:, None] + tl.dot(p.to(z.dtype), z, input_precision=PRECISION)
        largest = now
    return o, u, largest, total


@triton.jit
def _forward(
    Q, K, V, Z, OUT, U, LSE, STARTS, scale,
    q_row, q_batch, q_head, k_row, k_batch, k_head, v_row, v_batch, v_head, z_row, z_batch, z_head,
    o_row, o_batch, o_head,
    S, T, H,
    PER_GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_T: tl.constexpr,
    WIDE: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # The last queries see the most keys: they start first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    batch, head = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    group = head // PER_GROUP
    queries, columns = block * BLOCK_S + tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    offset = T - S
    q = _rows(Q, batch * q_batch + head * q_head, queries, q_row, columns, S, D)
    low = 0
    starts = queries
    if PACKED:
        starts = tl.load(STARTS + batch * S + queries, mask=queries < S, other=0)
        low = tl.load(STARTS + batch * S + block * BLOCK_S) // BLOCK_T * BLOCK_T
    o = tl.zeros((BLOCK_S, BLOCK_D), tl.float32)
    u = tl.zeros((BLOCK_S, BLOCK_D), tl.float32)
    largest = tl.full((BLOCK_S,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_S,), tl.float32)
    high = tl.minimum(T, (block + 1) * BLOCK_S + offset)
    # Keys before the first query's own are seen by the whole block.
    middle = low
    k_base, v_base, z_base = batch * k_batch + group * k_head, batch * v_batch + group * v_head, 0
    if WIDE:
        z_base = batch * z_batch + group * z_head
    if not PACKED:
        middle = (block * BLOCK_S + offset) // BLOCK_T * BLOCK_T
        o, u, largest, total = _forward_blocks(
            o, u, largest, total, q, K, V, Z, k_base, v_base, z_base, k_row, v_row, z_row,
            queries, starts, low, middle, offset, T, scale,
            D, BLOCK_D, BLOCK_T, WIDE, PACKED, False, PRECISION,
        )  # fmt: skip
    o, u, largest, total = _forward_blocks(
        o, u, largest, total, q, K, V, Z, k_base, v_base, z_base, k_row, v_row, z_row,
        queries, starts, middle, high, offset, T, scale,
        D, BLOCK_D, BLOCK_T, WIDE, PACKED, True, PRECISION,
    )  # fmt: skip
    o_base = batch * o_batch + head * o_head
    _store_rows(OUT, o_base, queries, o_row, columns, S, o / total[:, None], D)
    if WIDE:
        _store_rows(U, o_base, queries, o_row, columns, S, u / total[:, None], D)
    tl.store(LSE + tl.program_id(1).to(tl.int64) * S + queries, largest + tl.log2(total), mask=queries < S)


@triton.jit
def _delta(
    OUT, U, DO, DU, DELTA, o_row, o_batch, o_head, S, H,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """What the softmax's backward pass subtracts: each output times its gradient, summed."""
    batch, head = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    queries, columns = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    base = batch * o_batch + head * o_head
    o = _rows(OUT, base, queries, o_row, columns, S, D).to(tl.float32)
    delta = tl.sum(o * _rows(DO, base, queries, o_row, columns, S, D).to(tl.float32), 1)
    if WIDE:
        u = _rows(U, base, queries, o_row, columns, S, D).to(tl.float32)
        delta += tl.sum(u * _rows(DU, base, queries, o_row, columns, S, D).to(tl.float32), 1)
    tl.store(DELTA + tl.program_id(1).to(tl.int64) * S + queries, delta, mask=queries < S)


@triton.jit
def _backward_keys(
    Q, K, V, Z, DO, DU, LSE, DELTA, STARTS, ENDS, DK, DV, DZ, scale,
    q_row, q_batch, q_head, k_row, k_batch, k_head, v_row, v_batch, v_head, z_row, z_batch, z_head,
    o_row, o_batch, o_head, dk_row, dk_batch, dk_head,
    S, T, H, G,
    PER_GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_T: tl.constexpr,
    WIDE: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of one block of keys and values, from all later queries of all heads of the group."""
    block = tl.program_id(0)
    batch, group = (tl.program_id(1) // G).to(tl.int64), (tl.program_id(1) % G).to(tl.int64)
    keys, columns = block * BLOCK_T + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    offset = T - S
    k = _rows(K, batch * k_batch + group * k_head, keys, k_row, columns, T, D)
    v = _rows(V, batch * v_batch + group * v_head, keys, v_row, columns, T, D)
    z = v
    if WIDE:
        z = _rows(Z, batch * z_batch + group * z_head, keys, z_row, columns, T, D)
    dk = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    dz = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    low = tl.maximum(block * BLOCK_T - offset, 0) // BLOCK_S * BLOCK_S
    high = S
    if PACKED:
        high = tl.load(ENDS + batch * S + tl.minimum((block + 1) * BLOCK_T, T) - 1)
    for member in range(PER_GROUP):
        head = group * PER_GROUP + member
        line = (batch * H + head) * S
        for first in range(low, high, BLOCK_S):
            queries = first + tl.arange(0, BLOCK_S)
            q = _rows(Q, batch * q_batch + head * q_head, queries, q_row, columns, S, D)
            do = _rows(DO, batch * o_batch + head * o_head, queries, o_row, columns, S, D)
            lse = tl.load(LSE + line + queries, mask=queries < S, other=float("inf"))
            delta = tl.load(DELTA + line + queries, mask=queries < S, other=0.0)
            starts = queries
            if PACKED:
                starts = tl.load(STARTS + batch * S + queries, mask=queries < S, other=0)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            seen = _seen(queries, keys, starts, offset, T, PACKED)
            p = tl.where(seen, tl.exp2(scores - lse[:, None]), 0.0)
            dv += tl.dot(tl.trans(p).to(do.dtype), do, input_precision=PRECISION)
            dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
            if WIDE:
                du = _rows(DU, batch * o_batch + head * o_head, queries, o_row, columns, S, D)
                dz += tl.dot(tl.trans(p).to(du.dtype), du, input_precision=PRECISION)
                dp += tl.dot(du, tl.trans(z), input_precision=PRECISION)
            ds = p * (dp - delta[:, None])
            dk += tl.dot(tl.trans(ds).to(q.dtype), q, input_precision=PRECISION)
    base = batch * dk_batch + group * dk_head
    # `scale` holds the logarithm's base as well.
    _store_rows(DK, base, keys, dk_row, columns, T, dk * (scale * 0.6931471805599453), D)
    _store_rows(DV, base, keys, dk_row, columns, T, dv, D)
    if WIDE:
        _store_rows(DZ, base, keys, dk_row, columns, T, dz, D)


@triton.jit
def _backward_queries(
    Q, K, V, Z, DO, DU, LSE, DELTA, STARTS, DQ, scale,
    q_row, q_batch, q_head, k_row, k_batch, k_head, v_row, v_batch, v_head, z_row, z_batch, z_head,
    o_row, o_batch, o_head,
    S, T, H,
    PER_GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_T: tl.constexpr,
    WIDE: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of one block of queries of one head, from all keys that it sees."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    batch, head = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    group = head // PER_GROUP
    queries, columns = block * BLOCK_S + tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    offset = T - S
    line = (batch * H + head) * S
    q = _rows(Q, batch * q_batch + head * q_head, queries, q_row, columns, S, D)
    do = _rows(DO, batch * o_batch + head * o_head, queries, o_row, columns, S, D)
    du = do
    if WIDE:
        du = _rows(DU, batch * o_batch + head * o_head, queries, o_row, columns, S, D)
    lse = tl.load(LSE + line + queries, mask=queries < S, other=float("inf"))
    delta = tl.load(DELTA + line + queries, mask=queries < S, other=0.0)
    low = 0
    starts = queries
    if PACKED:
        starts = tl.load(STARTS + batch * S + queries, mask=queries < S, other=0)
        low = tl.load(STARTS + batch * S + block * BLOCK_S) // BLOCK_T * BLOCK_T
    dq = tl.zeros((BLOCK_S, BLOCK_D), tl.float32)
    for first in range(low, tl.minimum(T, (block + 1) * BLOCK_S + offset), BLOCK_T):
        keys = first + tl.arange(0, BLOCK_T)
        k = _rows(K, batch * k_batch + group * k_head, keys, k_row, columns, T, D)
        v = _rows(V, batch * v_batch + group * v_head, keys, v_row, columns, T, D)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        p = tl.where(_seen(queries, keys, starts, offset, T, PACKED), tl.exp2(scores - lse[:, None]), 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        if WIDE:
            z = _rows(Z, batch * z_batch + group * z_head, keys, z_row, columns, T, D)
            dp += tl.dot(du, tl.trans(z), input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        dq += tl.dot(ds.to(k.dtype), k, input_precision=PRECISION)
    base = batch * o_batch + head * o_head
    _store_rows(DQ, base, queries, o_row, columns, S, dq * (scale * 0.6931471805599453), D)


@triton.jit
def _rotate(
    X, Z, Y, x_row, x_batch, x_head, z_row, z_batch, z_head, y_row, y_batch, y_head, S, H,
    PER_GROUP: tl.constexpr, F: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Multiply by the state as complex numbers, stored as [real | imaginary]."""
    batch, head = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    rows, columns = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_F)
    x_base, z_base = batch * x_batch + head * x_head, batch * z_batch + head // PER_GROUP * z_head
    x_re = _rows(X, x_base, rows, x_row, columns, S, F).to(tl.float32)
    x_im = _rows(X, x_base + F, rows, x_row, columns, S, F).to(tl.float32)
    z_re = _rows(Z, z_base, rows, z_row, columns, S, F).to(tl.float32)
    z_im = _rows(Z, z_base + F, rows, z_row, columns, S, F).to(tl.float32)
    y_base = batch * y_batch + head * y_head
    _store_rows(Y, y_base, rows, y_row, columns, S, x_re * z_re - x_im * z_im, F)
    _store_rows(Y, y_base + F, rows, y_row, columns, S, x_re * z_im + x_im * z_re, F)


@triton.jit
def _rotate_backward_one(
    X, DY, DX, x_base, y_base, rows, x_row, y_row, columns, S, z_re, z_im, dz_re, dz_im, F: tl.constexpr
):
    dy_re = _rows(DY, y_base, rows, y_row, columns, S, F).to(tl.float32)
    dy_im = _rows(DY, y_base + F, rows, y_row, columns, S, F).to(tl.float32)
    x_re = _rows(X, x_base, rows, x_row, columns, S, F).to(tl.float32)
    x_im = _rows(X, x_base + F, rows, x_row, columns, S, F).to(tl.float32)
    _store_rows(DX, y_base, rows, y_row, columns, S, dy_re * z_re + dy_im * z_im, F)
    _store_rows(DX, y_base + F, rows, y_row, columns, S, dy_im * z_re - dy_re * z_im, F)
    return dz_re + dy_re * x_re + dy_im * x_im, dz_im + dy_im * x_re - dy_re * x_im


@triton.jit
def _rotate_backward(
    Q, K, Z, DQ, DK, DZ, q_row, q_batch, q_head, k_row, k_batch, k_head, z_row, z_batch, z_head,
    dq_row, dq_batch, dq_head, dk_row, dk_batch, dk_head, S, G,
    PER_GROUP: tl.constexpr, F: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_S: tl.constexpr,
    WIDE: tl.constexpr, NEEDED: tl.constexpr,
):  # fmt: skip
    """Turn the gradients of rotated queries and keys, in place, into those of queries and keys; add the state's."""
    batch, group = (tl.program_id(1) // G).to(tl.int64), (tl.program_id(1) % G).to(tl.int64)
    rows, columns = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_F)
    z_base = batch * z_batch + group * z_head
    z_re = _rows(Z, z_base, rows, z_row, columns, S, F).to(tl.float32)
    z_im = _rows(Z, z_base + F, rows, z_row, columns, S, F).to(tl.float32)
    dk_base = batch * dk_batch + group * dk_head
    dz_re = tl.zeros((BLOCK_S, BLOCK_F), tl.float32)
    dz_im = tl.zeros((BLOCK_S, BLOCK_F), tl.float32)
    if WIDE:
        dz_re = _rows(DZ, dk_base, rows, dk_row, columns, S, F).to(tl.float32)
        dz_im = _rows(DZ, dk_base + F, rows, dk_row, columns, S, F).to(tl.float32)
    for member in range(PER_GROUP):
        head = group * PER_GROUP + member
        dz_re, dz_im = _rotate_backward_one(
            Q, DQ, DQ, batch * q_batch + head * q_head, batch * dq_batch + head * dq_head, rows, q_row, dq_row,
            columns, S, z_re, z_im, dz_re, dz_im, F,
        )  # fmt: skip
    dz_re, dz_im = _rotate_backward_one(
        K, DK, DK, batch * k_batch + group * k_head, dk_base, rows, k_row, dk_row,
        columns, S, z_re, z_im, dz_re, dz_im, F,
    )  # fmt: skip
    if NEEDED:
        _store_rows(DZ, dk_base, rows, dk_row, columns, S, dz_re, F)
        _store_rows(DZ, dk_base + F, rows, dk_row, columns, S, dz_im, F)


def _strides(x: Tensor) -> tuple[int, int, int]:
    return x.stride(0), x.stride(1), x.stride(2)


def _last_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


# Queries and keys of a tile, warps, stages, for heads of up to 64 and of more. In bf16 none spills registers on compute
# capability 9.0, and all fit the shared memory of 8.6 (seen in the binaries, not measured).
_TILES = {
    "forward": ((128, 64, 8, 3), (128, 64, 8, 2)),
    "keys": ((64, 64, 4, 2), (32, 64, 8, 2)),
    "queries": ((128, 64, 8, 2), (64, 32, 8, 2)),
}
_TILE_FP32 = (32, 32, 4, 1)


def _tile(kernel: str, D: int, S: int, *tensors: Tensor) -> tuple[int, int, dict[str, int]]:
    """Return a tile's queries and keys, and how to launch."""
    wide = any(x.dtype is torch.float32 for x in tensors)
    queries, keys, warps, stages = _TILE_FP32 if wide else _TILES[kernel][D > 64]
    queries = min(queries, max(16, triton.next_power_of_2(S)))
    return queries, keys, {"num_warps": warps, "num_stages": stages}


def rotated(x: Tensor, z: Tensor) -> Tensor:
    """Return x (S, B, H, D) times z (S, B, G, D) as complex numbers, in x's type."""
    S, B, H, D = x.shape
    y = torch.empty(S, B, H, D, dtype=x.dtype, device=x.device)
    block_f = triton.next_power_of_2(D // 2)
    block_s = max(1, 4096 // block_f // 2)
    _rotate[(triton.cdiv(S, block_s), B * H)](
        x, z, y, *_strides(x), *_strides(z), *_strides(y), S, H, H // z.shape[2], D // 2, block_f, block_s
    )
    return y


class _RotatedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, z, starts, ends, wide):
        q, k, v = (_last_contiguous(x) for x in (q, k, v))
        z = None if z is None else _last_contiguous(z)
        o, u, lse = attend(*_turned(q, k, z), v, z if wide else None, starts)
        ctx.save_for_backward(q, k, v, z, o, u, lse, starts, ends)
        ctx.wide = wide
        return (o, u) if wide else o

    @staticmethod
    @once_differentiable
    def backward(ctx, do, du=None):
        q, k, v, z, o, u, lse, starts, ends = ctx.saved_tensors
        turned_q, turned_k = _turned(q, k, z)
        dq, dk, dv, dz = attend_backward(
            turned_q, turned_k, v, z if ctx.wide else None, o, u, lse, do, du, starts, ends
        )
        if z is not None:
            S, B, G, D = k.shape
            needed = ctx.needs_input_grad[3]
            if dz is None:
                dz = torch.empty_like(dk, dtype=z.dtype) if needed else dk
            block_f = triton.next_power_of_2(D // 2)
            block_s = max(1, 2048 // block_f // 2)
            _rotate_backward[(triton.cdiv(S, block_s), B * G)](
                q, k, z, dq, dk, dz, *_strides(q), *_strides(k), *_strides(z), *_strides(dq), *_strides(dk),
                S, G, q.shape[2] // G, D // 2, block_f, block_s, ctx.wide, needed,
            )  # fmt: skip
            dz = dz if needed else None
        return dq, dk, dv, dz, None, None, None


def _turned(q: Tensor, k: Tensor, z: Tensor | None) -> tuple[Tensor, Tensor]:
    return (q, k) if z is None else (rotated(q, z), rotated(k, z))


def attend(
    q: Tensor, k: Tensor, v: Tensor, z: Tensor | None, starts: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Average v, and z if given, for rotated q (S, B, H, D) and k (T, B, G, D), whose last S are the queries' own.

    So generation with a cache of rotated keys is served: S = 1, T as long as the cache. `starts` only with T = S.
    Returns o and u (S, B, H, D), u in z's type, and the base-2 log-sum-exp (B, H, S) of the scores.
    """
    S, B, H, D = q.shape
    T, G = k.shape[0], k.shape[2]
    o = torch.empty(S, B, H, D, dtype=q.dtype, device=q.device)
    u = None if z is None else torch.empty(S, B, H, D, dtype=z.dtype, device=q.device)
    lse = torch.empty(B, H, S, dtype=torch.float32, device=q.device)
    block_s, block_t, launch = _tile("forward", D, S, q, v if z is None else z)
    _forward[(triton.cdiv(S, block_s), B * H)](
        q, k, v, v if z is None else z, o, o if u is None else u, lse, lse if starts is None else starts,
        D**-0.5 / math.log(2), *_strides(q), *_strides(k), *_strides(v), *_strides(v if z is None else z), *_strides(o),
        S, T, H, H // G, D, max(16, triton.next_power_of_2(D)), block_s, block_t,
        z is not None, starts is not None, _precision(q), **launch,
    )  # fmt: skip
    return o, u, lse


def attend_backward(q, k, v, z, o, u, lse, do, du, starts, ends):
    """Return the gradients of rotated q and k, of v, and of z as a value, from those of o and u."""
    S, B, H, D = q.shape
    T, G = k.shape[0], k.shape[2]
    do = do.contiguous()
    du = do if z is None else du.contiguous()
    wide, packed = z is not None, starts is not None
    z = v if z is None else z
    dq = torch.empty(S, B, H, D, dtype=q.dtype, device=q.device)
    dk, dv = (torch.empty(T, B, G, D, dtype=x.dtype, device=q.device) for x in (k, v))
    dz = torch.empty(T, B, G, D, dtype=z.dtype, device=q.device) if wide else dv
    delta = torch.empty_like(lse)
    starts, ends = (starts, ends) if packed else (lse, lse)
    block_d = max(16, triton.next_power_of_2(D))
    common = dict(PER_GROUP=H // G, D=D, BLOCK_D=block_d, WIDE=wide, PACKED=packed, PRECISION=_precision(q))
    _delta[(triton.cdiv(S, 64), B * H)](
        o, o if u is None else u, do, du, delta, *_strides(o), S, H, D, block_d, 64, wide
    )
    strides = (*_strides(q), *_strides(k), *_strides(v), *_strides(z), *_strides(o))
    scale = D**-0.5 / math.log(2)
    block_s, block_t, launch = _tile("keys", D, S, q, z)
    _backward_keys[(triton.cdiv(T, block_t), B * G)](
        q, k, v, z, do, du, lse, delta, starts, ends, dk, dv, dz, scale, *strides, *_strides(dk), S, T, H, G,
        BLOCK_S=block_s, BLOCK_T=block_t, **common, **launch,
    )  # fmt: skip
    block_s, block_t, launch = _tile("queries", D, S, q, z)
    _backward_queries[(triton.cdiv(S, block_s), B * H)](
        q, k, v, z, do, du, lse, delta, starts, dq, scale, *strides, S, T, H,
        BLOCK_S=block_s, BLOCK_T=block_t, **common, **launch,
    )  # fmt: skip
    return dq, dk, dv, dz if wide else None


def _precision(q: Tensor) -> str:
    return "ieee" if q.dtype is torch.float32 else "tf32"


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor | None = None,
    average_state: bool = False,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Rotate q (S, B, H, D) and k (S, B, G, D) by z, and average v and, if `average_state`, z.

    z (S, B or 1, G or 1, D). `starts` and `ends` (B, S), int32, say for each token where its document begins and the
    next one does. Returns o (S, B, H, D) and u, its like, or None. Queries and keys are those of the same tokens.
    """
    assert q.shape[0] == k.shape[0]
    if z is not None:
        z = z.expand(*k.shape)
    starts, ends = (None if x is None else x.contiguous() for x in (starts, ends))
    out = _RotatedAttention.apply(q, k, v, z, starts, ends, average_state)
    return out if average_state else (out, None)
