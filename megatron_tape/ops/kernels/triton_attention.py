"""Causal attention that averages `[v | z]` with one map, as Triton kernels; `triton_rotation.py` holds the rotation.

Axes: S queries, T keys (the last S of them are the queries' own tokens), B batch, H query heads, G key/value groups, D
head dimension. This is flash attention (Dao, 2023) with a second value: a pair of query and key costs D + 2D
multiply-adds forward instead of D + D, and backward 7D instead of 5D, or 8D if heads are wider than 64. All blocks of
keys add to the gradients of queries, in an order that varies, so that their last bits differ from run to run; under
`torch.use_deterministic_algorithms` a separate kernel computes them, at 10D. What is saved for the backward
pass: q, k, v, z, both outputs and one log-sum-exp for each query. The plain form to compare with is
`ops.backends.naive`.
"""

import logging
import math
from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.runtime.errors import OutOfResources

from megatron_tape.ops.kernels.triton_rotation import (
    last_contiguous,
    load_rows,
    rotated,
    rotated_backward,
    store_rows,
    strides,
)

logger = logging.getLogger(__name__)

MAX_HEADS = 65535
"""Heads of all sequences together: the limit of the second axis of a CUDA grid."""


@triton.jit
def _seen(queries, keys, starts, offset, T, PACKED: tl.constexpr):
    """Whether query s, which is token s + offset, sees key t: it must not be later, nor before the query's document."""
    seen = (keys <= queries + offset) & (keys < T)
    if PACKED:
        seen = seen & (keys >= starts)
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
        k = load_rows(K, k_base, keys, k_row, columns, T, D)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if MASKED:
            seen = _seen(queries[:, None], keys[None, :], starts[:, None], offset, T, PACKED)
            scores = tl.where(seen, scores, float("-inf"))
        now = tl.maximum(largest, tl.max(scores, 1))
        # A row that has not seen any key yet has no largest score to subtract.
        shift = tl.where(now == float("-inf"), 0.0, now)
        p = tl.exp2(scores - shift[:, None])
        shrink = tl.exp2(largest - shift)
        total = total * shrink + tl.sum(p, 1)
        v = load_rows(V, v_base, keys, v_row, columns, T, D)
        o = o * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        if WIDE:
            z = load_rows(Z, z_base, keys, z_row, columns, T, D)
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
    # The last queries start first, as they see the most keys.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    batch, head = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    group = head // PER_GROUP
    queries, columns = block * BLOCK_S + tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    offset = T - S
    q = load_rows(Q, batch * q_batch + head * q_head, queries, q_row, columns, S, D)
    low = 0
    starts = queries
    if PACKED:
        starts = tl.load(STARTS + batch * T + offset + queries, mask=queries < S, other=0)
        low = tl.load(STARTS + batch * T + offset + block * BLOCK_S) // BLOCK_T * BLOCK_T
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
    store_rows(OUT, o_base, queries, o_row, columns, S, o / total[:, None], D)
    if WIDE:
        store_rows(U, o_base, queries, o_row, columns, S, u / total[:, None], D)
    tl.store(LSE + tl.program_id(1).to(tl.int64) * S + queries, largest + tl.log2(total), mask=queries < S)


@triton.jit
def _delta(
    OUT, U, DO, DU, DELTA, o_row, o_batch, o_head, S, H,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Sum the products of each output and its gradient, which the softmax's backward pass subtracts."""
    batch, head = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    queries, columns = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    base = batch * o_batch + head * o_head
    o = load_rows(OUT, base, queries, o_row, columns, S, D).to(tl.float32)
    delta = tl.sum(o * load_rows(DO, base, queries, o_row, columns, S, D).to(tl.float32), 1)
    if WIDE:
        u = load_rows(U, base, queries, o_row, columns, S, D).to(tl.float32)
        delta += tl.sum(u * load_rows(DU, base, queries, o_row, columns, S, D).to(tl.float32), 1)
    tl.store(DELTA + tl.program_id(1).to(tl.int64) * S + queries, delta, mask=queries < S)


@triton.jit
def _backward_keys(
    Q, K, V, Z, DO, DU, LSE, DELTA, STARTS, ENDS, DK, DV, DZ, DQ, scale,
    q_row, q_batch, q_head, k_row, k_batch, k_head, v_row, v_batch, v_head, z_row, z_batch, z_head,
    o_row, o_batch, o_head, dk_row, dk_batch, dk_head,
    S, T, H, G,
    PER_GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_T: tl.constexpr,
    WIDE: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
    VALUES: tl.constexpr, STATE: tl.constexpr, KEYS: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Gradients of one block of keys, from all later queries of all heads of the group.

    VALUES stores the gradients of values and, with STATE, of the averaged state; KEYS stores those of keys; QUERIES
    adds to those of queries, in fp32. Scores are (keys, queries), so that the products with p and ds need no transposed
    registers.
    """
    block = tl.program_id(0)
    batch, group = (tl.program_id(1) // G).to(tl.int64), (tl.program_id(1) % G).to(tl.int64)
    keys, columns = block * BLOCK_T + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    offset = T - S
    k = load_rows(K, batch * k_batch + group * k_head, keys, k_row, columns, T, D)
    v = k
    z = k
    if KEYS:
        v = load_rows(V, batch * v_batch + group * v_head, keys, v_row, columns, T, D)
        if WIDE:
            z = load_rows(Z, batch * z_batch + group * z_head, keys, z_row, columns, T, D)
    dk = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    dz = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    low = tl.maximum(block * BLOCK_T - offset, 0) // BLOCK_S * BLOCK_S
    high = S
    if PACKED:
        high = tl.load(ENDS + batch * T + tl.minimum((block + 1) * BLOCK_T, T) - 1) - offset
    # `scale` includes the conversion to base-2 logarithms.
    factor = scale * 0.6931471805599453
    for member in range(PER_GROUP):
        head = group * PER_GROUP + member
        line = (batch * H + head) * S
        o_base = batch * o_batch + head * o_head
        for first in range(low, high, BLOCK_S):
            queries = first + tl.arange(0, BLOCK_S)
            q = load_rows(Q, batch * q_batch + head * q_head, queries, q_row, columns, S, D)
            lse = tl.load(LSE + line + queries, mask=queries < S, other=float("inf"))
            starts = queries
            if PACKED:
                starts = tl.load(STARTS + batch * T + offset + queries, mask=queries < S, other=0)
            scores = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale
            seen = _seen(queries[None, :], keys[:, None], starts[None, :], offset, T, PACKED)
            p = tl.where(seen, tl.exp2(scores - lse[None, :]), 0.0)
            do = load_rows(DO, o_base, queries, o_row, columns, S, D)
            du = do
            if WIDE:
                du = load_rows(DU, o_base, queries, o_row, columns, S, D)
            if VALUES:
                dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
                if STATE:
                    dz = tl.dot(p.to(du.dtype), du, dz, input_precision=PRECISION)
            if KEYS:
                dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
                if WIDE:
                    dp = tl.dot(z, tl.trans(du), dp, input_precision=PRECISION)
                delta = tl.load(DELTA + line + queries, mask=queries < S, other=0.0)
                ds = (p * (dp - delta[None, :])).to(q.dtype)
                dk = tl.dot(ds, q, dk, input_precision=PRECISION)
                if QUERIES:
                    dq = tl.dot(tl.trans(ds), k, input_precision=PRECISION) * factor
                    at = DQ + o_base + queries.to(tl.int64)[:, None] * o_row + columns[None, :]
                    tl.atomic_add(at, dq, mask=(queries[:, None] < S) & (columns[None, :] < D), sem="relaxed")
    base = batch * dk_batch + group * dk_head
    if KEYS:
        store_rows(DK, base, keys, dk_row, columns, T, dk * factor, D)
    if VALUES:
        store_rows(DV, base, keys, dk_row, columns, T, dv, D)
        if STATE:
            store_rows(DZ, base, keys, dk_row, columns, T, dz, D)


@triton.jit
def _backward_queries(
    Q, K, V, Z, DO, DU, LSE, DELTA, STARTS, DQ, scale,
    q_row, q_batch, q_head, k_row, k_batch, k_head, v_row, v_batch, v_head, z_row, z_batch, z_head,
    o_row, o_batch, o_head,
    S, T, H,
    PER_GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_T: tl.constexpr,
    WIDE: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of one block of queries of one head, from all keys that the block sees."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    batch, head = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    group = head // PER_GROUP
    queries, columns = block * BLOCK_S + tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    offset = T - S
    line = (batch * H + head) * S
    q = load_rows(Q, batch * q_batch + head * q_head, queries, q_row, columns, S, D)
    do = load_rows(DO, batch * o_batch + head * o_head, queries, o_row, columns, S, D)
    du = do
    if WIDE:
        du = load_rows(DU, batch * o_batch + head * o_head, queries, o_row, columns, S, D)
    lse = tl.load(LSE + line + queries, mask=queries < S, other=float("inf"))
    delta = tl.load(DELTA + line + queries, mask=queries < S, other=0.0)
    low = 0
    starts = queries
    if PACKED:
        starts = tl.load(STARTS + batch * T + offset + queries, mask=queries < S, other=0)
        low = tl.load(STARTS + batch * T + offset + block * BLOCK_S) // BLOCK_T * BLOCK_T
    dq = tl.zeros((BLOCK_S, BLOCK_D), tl.float32)
    for first in range(low, tl.minimum(T, (block + 1) * BLOCK_S + offset), BLOCK_T):
        keys = first + tl.arange(0, BLOCK_T)
        k = load_rows(K, batch * k_batch + group * k_head, keys, k_row, columns, T, D)
        v = load_rows(V, batch * v_batch + group * v_head, keys, v_row, columns, T, D)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        seen = _seen(queries[:, None], keys[None, :], starts[:, None], offset, T, PACKED)
        p = tl.where(seen, tl.exp2(scores - lse[:, None]), 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        if WIDE:
            z = load_rows(Z, batch * z_batch + group * z_head, keys, z_row, columns, T, D)
            dp += tl.dot(du, tl.trans(z), input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        dq += tl.dot(ds.to(k.dtype), k, input_precision=PRECISION)
    base = batch * o_batch + head * o_head
    store_rows(DQ, base, queries, o_row, columns, S, dq * (scale * 0.6931471805599453), D)


_SMALLEST = 99
# (queries of a tile, keys of a tile, warps, stages) for heads of up to 64 and for wider ones, by KiB of shared
# memory; the tuples that are keys say what the backward kernel computes. Chosen by looking at the binaries for
# capabilities 9.0 and 8.6 (not measured): no kernel used in training serializes its matrix instructions or spills more
# than a few registers.
_TILES = {
    227: {
        "forward": ((128, 64, 8, 3), (128, 64, 8, 3)),
        (True, True, True): ((64, 128, 8, 2), None),
        (True, False, False): (None, (64, 128, 8, 2)),
        (False, True, True): (None, (64, 128, 8, 2)),
        (True, True, False): ((64, 128, 8, 2), (32, 128, 8, 2)),
        "queries": ((128, 64, 8, 2), (128, 64, 8, 2)),
    },
    _SMALLEST: {
        "forward": ((128, 64, 8, 3), (64, 64, 8, 2)),
        (True, True, True): ((32, 64, 4, 2), None),
        (True, False, False): (None, (64, 64, 8, 2)),
        (False, True, True): (None, (64, 32, 8, 2)),
        (True, True, False): ((64, 32, 8, 2), (64, 32, 8, 2)),
        "queries": ((128, 64, 8, 2), (32, 64, 8, 2)),
    },
}
_TILES[163] = _TILES[227]  # capability 8.0 needs less of it for them: at most 160.8 KiB
too_large: set[tuple] = set()
"""Keys of `_TILES`, and whether heads are wide: kernels that took more shared memory than this process's GPU has."""
_TILE_FP32 = ((32, 32, 4, 1), (16, 32, 4, 1))


def shared_memory(device: torch.device) -> int:
    """Return how many KiB of shared memory a program can use: 227 on an H100, 163 on an A100, 99 on smaller cards."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    return 227 if capability[0] in (9, 10) else 163 if capability in ((8, 0), (8, 7)) else 99


def _tile(kernel: str | tuple, D: int, S: int, *tensors: Tensor) -> tuple[int, int, dict[str, int]]:
    """Return a tile's queries and keys, and how to launch."""
    memory = _SMALLEST if (kernel, D > 64) in too_large else shared_memory(tensors[0].device)
    of_kernel = _TILE_FP32 if any(x.dtype is torch.float32 for x in tensors) else _TILES[memory][kernel]
    queries, keys, warps, stages = of_kernel[D > 64]
    queries = min(queries, max(16, triton.next_power_of_2(S)))
    return queries, keys, {"num_warps": warps, "num_stages": stages}


def _in_tiles(kernel: str | tuple, D: int, S: int, tensors: tuple[Tensor, ...], launch: Callable[..., None]) -> None:
    """Call `launch` with what `_tile` returns for this GPU.

    Some kernels take nearly all of its shared memory here. If another version of Triton makes one that does not fit,
    smaller tiles are taken from then on.
    """
    tile = _tile(kernel, D, S, *tensors)
    try:
        launch(*tile)
        return
    except OutOfResources as error:
        of_fp32 = any(x.dtype is torch.float32 for x in tensors)
        if of_fp32 or (kernel, D > 64) in too_large or shared_memory(tensors[0].device) == _SMALLEST:
            raise
        sizes = error.required / 1024, error.limit / 1024
        logger.warning("a kernel of attention takes %.1f KiB of the %.1f there are; it runs in smaller tiles", *sizes)
    too_large.add((kernel, D > 64))
    launch(*_tile(kernel, D, S, *tensors))


class _Attention(torch.autograd.Function):
    """`rotate`: z rotates q and k; `wide`: z is averaged."""

    @staticmethod
    def forward(ctx, q, k, v, z, starts, ends, rotate, wide):
        q, k, v = (last_contiguous(x) for x in (q, k, v))
        z = None if z is None else last_contiguous(z)
        o, u, lse = attend(*_rotated(q, k, z, rotate), v, z if wide else None, starts)
        ctx.save_for_backward(q, k, v, z, o, u, lse, starts, ends)
        ctx.rotate, ctx.wide = rotate, wide
        return (o, u) if wide else o

    @staticmethod
    @once_differentiable
    def backward(ctx, do, du=None):
        q, k, v, z, o, u, lse, starts, ends = ctx.saved_tensors
        inputs = *_rotated(q, k, z, ctx.rotate), v, z if ctx.wide else None
        needed = ctx.needs_input_grad[3]
        dq, dk, dv, dz = attend_backward(inputs, (o, u, lse), (do, du), (starts, ends), needed)
        if ctx.rotate:
            dq, dz = rotated_backward(q, k, z, dq, dk, dz, needed)
        return dq.to(q.dtype), dk, dv, dz, None, None, None, None


def _rotated(q: Tensor, k: Tensor, z: Tensor | None, rotate: bool) -> tuple[Tensor, Tensor]:
    return (rotated(q, z), rotated(k, z)) if rotate else (q, k)


def attend(
    q: Tensor, k: Tensor, v: Tensor, z: Tensor | None, starts: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Average v and, if given, z for rotated q (S, B, H, D) and k (T, B, G, D), whose last S belong to the queries.

    Returns o and u (S, B, H, D), u in z's type, and the base-2 log-sum-exp (B, H, S) of the scores.
    """
    S, B, H, D = q.shape
    T, G = k.shape[0], k.shape[2]
    o = torch.empty(S, B, H, D, dtype=q.dtype, device=q.device)
    u = None if z is None else torch.empty(S, B, H, D, dtype=z.dtype, device=q.device)
    lse = torch.empty(B, H, S, dtype=torch.float32, device=q.device)
    value = v if z is None else z

    def launch(block_s: int, block_t: int, options: dict[str, int]) -> None:
        _forward[(triton.cdiv(S, block_s), B * H)](
            q, k, v, value, o, o if u is None else u, lse, lse if starts is None else starts,
            D**-0.5 / math.log(2), *strides(q), *strides(k), *strides(v), *strides(value), *strides(o),
            S, T, H, H // G, D, max(16, triton.next_power_of_2(D)), block_s, block_t,
            z is not None, starts is not None, _precision(q), **options,
        )  # fmt: skip

    _in_tiles("forward", D, S, (q, value), launch)
    return o, u, lse


def attend_backward(inputs, outputs, gradients, bounds, needed: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of rotated q (possibly in fp32) and k, of v and, if `needed`, of z as a value.

    `inputs` are q, k, v and z, `outputs` those of `attend`, `gradients` those of o and u, and `bounds` starts and ends.
    """
    (q, k, v, z), (o, u, lse), (do, du), (starts, ends) = inputs, outputs, gradients, bounds
    S, B, H, D = q.shape
    T, G = k.shape[0], k.shape[2]
    do = do.contiguous()
    du = do if z is None else du.contiguous()
    wide, packed, repeatable = z is not None, starts is not None, sums_in_one_order()
    needed = needed and wide
    z = v if z is None else z
    if repeatable:
        dq = torch.empty(S, B, H, D, dtype=q.dtype, device=q.device)
    else:
        dq = torch.zeros(S, B, H, D, dtype=torch.float32, device=q.device)
    dk, dv = (torch.empty(T, B, G, D, dtype=x.dtype, device=q.device) for x in (k, v))
    dz = torch.empty(T, B, G, D, dtype=z.dtype, device=q.device) if needed else dv
    delta = torch.empty_like(lse)
    starts, ends = (starts, ends) if packed else (lse, lse)
    block_d = max(16, triton.next_power_of_2(D))
    common = dict(PER_GROUP=H // G, D=D, BLOCK_D=block_d, WIDE=wide, PACKED=packed, PRECISION=_precision(q))
    _delta[(triton.cdiv(S, 64), B * H)](
        o, o if u is None else u, do, du, delta, *strides(o), S, H, D, block_d, 64, wide
    )
    of_inputs = (*strides(q), *strides(k), *strides(v), *strides(z), *strides(o))
    scale = D**-0.5 / math.log(2)

    def of_keys(computed: tuple[bool, bool, bool], block_s: int, block_t: int, options: dict[str, int]) -> None:
        values, keys, queries = computed
        _backward_keys[(triton.cdiv(T, block_t), B * G)](
            q, k, v, z, do, du, lse, delta, starts, ends, dk, dv, dz, dq, scale, *of_inputs, *strides(dk), S, T, H, G,
            BLOCK_S=block_s, BLOCK_T=block_t, VALUES=values, STATE=needed, KEYS=keys, QUERIES=queries,
            **common, **options,
        )  # fmt: skip

    def of_queries(block_s: int, block_t: int, options: dict[str, int]) -> None:
        _backward_queries[(triton.cdiv(S, block_s), B * H)](
            q, k, v, z, do, du, lse, delta, starts, dq, scale, *of_inputs, S, T, H,
            BLOCK_S=block_s, BLOCK_T=block_t, **common, **options,
        )  # fmt: skip

    for computed in _backward_passes(D, repeatable):
        _in_tiles(computed, D, S, (q, z), partial(of_keys, computed))
    if repeatable:
        _in_tiles("queries", D, S, (q, z), of_queries)
    return dq, dk, dv, dz if needed else None


def sums_in_one_order() -> bool:
    """Return whether gradients of queries must always be summed in the same order."""
    return torch.are_deterministic_algorithms_enabled()


def _backward_passes(D: int, repeatable: bool) -> tuple[tuple[bool, bool, bool], ...]:
    """Return what each launch of `_backward_keys` computes: gradients of values, of keys, of queries.

    Wide heads need two launches, which both compute the scores, as all sums would not fit into a program's registers.
    """
    if repeatable:
        return ((True, True, False),)
    return ((True, True, True),) if D <= 64 else ((True, False, False), (False, True, True))


def _precision(q: Tensor) -> str:
    return "ieee" if q.dtype is torch.float32 else "tf32"


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor | None = None,
    average_state: bool = False,
    bounds_2BT: Tensor | None = None,
    rotate: bool = True,
) -> tuple[Tensor, ...]:
    """Rotate q (S, B, H, D) and k (T, B, G, D) by z if requested, and average v and, if `average_state`, z.

    z is (T, B or 1, G or 1, D). `bounds_2BT`, int32, says for each token where its document and the next one begin.
    Returns o (S, B, H, D) and u, which has the same shape, or None. z can rotate only if S = T. Raises
    ValueError if all sequences together have more heads than one launch can take.
    """
    B, H = q.shape[1:3]
    if B * H > MAX_HEADS:
        raise ValueError(f"{B} sequences of {H} heads exceed the {MAX_HEADS} heads of one launch; use smaller batches")
    z = z.expand(*k.shape) if z is not None and (rotate or average_state) else None
    starts, ends = (None, None) if bounds_2BT is None else bounds_2BT.contiguous()
    with torch.cuda.device_of(q):
        out = _Attention.apply(q, k, v, z, starts, ends, rotate and z is not None, average_state)
    return out if average_state else (out,)
