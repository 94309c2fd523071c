"""Triton kernels of causal attention, which average [v | z] in one pass. `triton_rotation.py`
prepares the inputs.

Axes: S queries, T keys (the last S of them are the queries' own tokens), B batch, H query heads, G
key/value groups, D head dimension, E width of the value: D, or 2D for [v | z]. This is flash
attention (Dao, 2023) with a wider value. A pair of query and key costs D + E multiply-adds forward
and 3D + 2E backward, or 4D + 2E if heads are wider than 64. Blocks of keys add to the gradients of
queries atomically, so the last bits differ from run to run. Under
`torch.use_deterministic_algorithms`, a separate kernel computes them instead, for another D + E
multiply-adds. Saved for the backward pass: q, k, v, z, both outputs and one log-sum-exp per query.
The reference is `ops.backends.naive`.

Each kernel visits its keys or queries in two loops: one over the unmasked tiles, and one over the
tiles that the causal mask or a document boundary masks in part, which lie before and after the
unmasked ones.
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
    load_numbers,
    load_rows,
    prepare,
    prepare_backward,
    store_rows,
    strides,
)

logger = logging.getLogger(__name__)

MAX_HEADS = 65535
"""Maximum of batch size times heads, the limit of a CUDA grid's second axis."""


@triton.jit
def _seen(queries, keys, starts, offset, PACKED: tl.constexpr):
    """Return whether query s, at token s + offset, attends to key t: t is neither later nor in an
    earlier document.

    Keys beyond the last one (t >= T) pass only for queries beyond the last one, whose results are
    not stored.
    """
    seen = keys <= queries + offset
    if PACKED:
        seen = seen & (keys >= starts)
    return seen


@triton.jit
def _tile_start(number, first, count, second, BLOCK: tl.constexpr, TWO: tl.constexpr):
    """Return a tile's first row. With TWO, the first `count` tiles start at row `first`, the others
    at `second`.
    """
    start = first + number * BLOCK
    if TWO:
        start = tl.where(number < count, start, second + (number - count) * BLOCK)
    return start


@triton.jit
def _forward_blocks(
    averaged, largest, total, q, K, VALUE, k_base, v_base, k_row, v_row, queries, starts,
    first, count, second, tiles, offset, T, scale,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_T: tl.constexpr,
    PACKED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Accumulate the averages over tiles of keys (see `_tile_start`). The scale is applied in the
    exponent.
    """
    columns = tl.arange(0, BLOCK_D)
    wide = tl.arange(0, BLOCK_E)
    for number in range(tiles):
        keys = _tile_start(number, first, count, second, BLOCK_T, PACKED and MASKED) + tl.arange(
            0, BLOCK_T
        )
        k = load_rows(K, k_base, keys, k_row, columns, T, D, MASKED)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            seen = _seen(queries[:, None], keys[None, :], starts[:, None], offset, PACKED)
            scores = tl.where(seen, scores, float("-inf"))
        largest_now = tl.maximum(largest, tl.max(scores, 1))
        shift = largest_now * scale
        if MASKED and PACKED:
            # Queries without any visible key so far have no maximum to subtract.
            shift = tl.where(largest_now == float("-inf"), 0.0, shift)
        p = tl.exp2(tl.fma(scores, scale, -shift[:, None]))
        shrink = tl.exp2(largest * scale - shift)
        total = total * shrink + tl.sum(p, 1)
        value = load_rows(VALUE, v_base, keys, v_row, wide, T, E, MASKED)
        averaged = averaged * shrink[:, None]
        averaged = tl.dot(p.to(value.dtype), value, averaged, input_precision="ieee")
        largest = largest_now
    return averaged, largest, total


@triton.jit
def _forward(
    Q, K, VALUE, OUT, U, LSE, STARTS, scale,
    q_row, q_batch, q_head, k_row, k_batch, k_head, v_row, v_batch, v_head, o_row, o_batch, o_head,
    S, T, H,
    PER_GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_T: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    # Blocks of the last queries run first, as they attend to the most keys.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    batch = (tl.program_id(1) // H).to(tl.int64)
    head = (tl.program_id(1) % H).to(tl.int64)
    group = head // PER_GROUP
    queries = block * BLOCK_S + tl.arange(0, BLOCK_S)
    offset = T - S
    q = load_rows(Q, batch * q_batch + head * q_head, queries, q_row, tl.arange(0, BLOCK_D), S, D)
    k_base = batch * k_batch + group * k_head
    v_base = batch * v_batch + group * v_head
    averaged = tl.zeros((BLOCK_S, BLOCK_E), tl.float32)
    largest = tl.full((BLOCK_S,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_S,), tl.float32)
    # All queries attend to the keys before the first query's own token that are in the last query's
    # document.
    diagonal = (block * BLOCK_S + offset) // BLOCK_T
    low = 0
    middle = 0
    starts = queries
    if PACKED:
        starts = tl.load(STARTS + batch * T + offset + queries, mask=queries < S, other=0)
        low = tl.load(STARTS + batch * T + offset + block * BLOCK_S) // BLOCK_T
        last = tl.load(STARTS + batch * T + offset + tl.minimum((block + 1) * BLOCK_S, S) - 1)
        middle = tl.minimum(tl.cdiv(last, BLOCK_T), diagonal)
    end = tl.cdiv(tl.minimum(T, (block + 1) * BLOCK_S + offset), BLOCK_T)
    averaged, largest, total = _forward_blocks(
        averaged, largest, total, q, K, VALUE, k_base, v_base, k_row, v_row, queries, starts,
        middle * BLOCK_T, diagonal - middle, 0, diagonal - middle, offset, T, scale,
        D, E, BLOCK_D, BLOCK_E, BLOCK_T, PACKED, False,
    )  # fmt: skip
    averaged, largest, total = _forward_blocks(
        averaged, largest, total, q, K, VALUE, k_base, v_base, k_row, v_row, queries, starts,
        (low if PACKED else diagonal) * BLOCK_T, middle - low, diagonal * BLOCK_T, middle - low + end - diagonal,
        offset, T, scale,
        D, E, BLOCK_D, BLOCK_E, BLOCK_T, PACKED, True,
    )  # fmt: skip
    averaged = averaged / total[:, None]
    o_base = batch * o_batch + head * o_head
    columns = tl.arange(0, BLOCK_E)
    store_rows(OUT, o_base, queries, o_row, columns, S, averaged, D)
    if E > D:
        state = (queries[:, None] < S) & (columns[None, :] >= D) & (columns[None, :] < E)
        target = U + o_base + queries.to(tl.int64)[:, None] * o_row + (columns[None, :] - D)
        tl.store(target, averaged.to(U.dtype.element_ty), mask=state)
    lse = largest * scale + tl.log2(total)
    tl.store(LSE + tl.program_id(1).to(tl.int64) * S + queries, lse, mask=queries < S)


@triton.jit
def _delta(
    OUT, U, DO, DU, DOUT, DELTA, o_row, o_batch, o_head, do_row, do_batch, do_head, du_row, du_batch, du_head, B, S, H,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute delta, the dot product of each output and its gradient, which the softmax's backward
    pass subtracts.

    With WIDE, also store [do | du], the gradient of the output [o | u].
    """
    batch = (tl.program_id(1) // H).to(tl.int64)
    head = (tl.program_id(1) % H).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    columns = tl.arange(0, BLOCK_D)
    base = batch * o_batch + head * o_head
    o = load_rows(OUT, base, rows, o_row, columns, S, D).to(tl.float32)
    do = load_rows(DO, batch * do_batch + head * do_head, rows, do_row, columns, S, D)
    delta = tl.sum(o * do.to(tl.float32), 1)
    if WIDE:
        u = load_rows(U, base, rows, o_row, columns, S, D).to(tl.float32)
        du = load_rows(DU, batch * du_batch + head * du_head, rows, du_row, columns, S, D)
        delta += tl.sum(u * du.to(tl.float32), 1)
        to = (batch * H + head) * 2 * D
        store_rows(DOUT, to, rows, B * H * 2 * D, columns, S, do, D)
        store_rows(DOUT, to + D, rows, B * H * 2 * D, columns, S, du, D)
    tl.store(DELTA + tl.program_id(1).to(tl.int64) * S + rows, delta, mask=rows < S)


@triton.jit
def _backward_keys_blocks(
    dk, dvalue, k, value, Q, DOUT, LSE, DELTA, DQ, q_base, do_base, dq_base, line, q_row, do_row, dq_row,
    q_head, do_head, dq_head, keys, ends, first, count, second, tiles, offset, S, T, scale, factor,
    PER_GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_S: tl.constexpr, PACKED: tl.constexpr, MASKED: tl.constexpr,
    VALUES: tl.constexpr, KEYS: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Accumulate the gradients of a block of keys over tiles of queries (see `_tile_start`) of all
    heads of a group.

    Tiles and heads share one loop, so that loads are prefetched across heads.
    """
    columns = tl.arange(0, BLOCK_D)
    wide = tl.arange(0, BLOCK_E)
    for step in range(tiles * PER_GROUP):
        head = 0
        number = step
        if PER_GROUP > 1:
            head = step // tiles
            number = step % tiles
        queries = _tile_start(number, first, count, second, BLOCK_S, MASKED) + tl.arange(0, BLOCK_S)
        q = load_rows(Q, q_base + head * q_head, queries, q_row, columns, S, D, MASKED)
        # An infinite log-sum-exp zeroes the weights of queries beyond the last one.
        lse = load_numbers(LSE + line + head * S, queries, S, float("inf"), MASKED)
        scores = tl.dot(k, tl.trans(q), input_precision="ieee")
        p = tl.exp2(tl.fma(scores, scale, -lse[None, :]))
        if MASKED:
            seen = keys[:, None] <= queries[None, :] + offset
            if PACKED:
                seen = seen & (queries[None, :] + offset < ends[:, None])
            p = tl.where(seen, p, 0.0)
        do = load_rows(DOUT, do_base + head * do_head, queries, do_row, wide, S, E, MASKED)
        if VALUES:
            dvalue = tl.dot(p.to(do.dtype), do, dvalue, input_precision="ieee")
        if KEYS:
            dp = tl.dot(value, tl.trans(do), input_precision="ieee")
            delta = load_numbers(DELTA + line + head * S, queries, S, 0.0, MASKED)
            ds = (p * (dp - delta[None, :])).to(q.dtype)
            dk = tl.dot(ds, q, dk, input_precision="ieee")
            if QUERIES:
                if BLOCK_S < 64:
                    # Hopper's tensor cores require 64 rows; the transposed product has D rows.
                    dq = tl.trans(tl.dot(tl.trans(k), ds, input_precision="ieee"))
                else:
                    dq = tl.dot(tl.trans(ds), k, input_precision="ieee")
                at = (
                    DQ
                    + dq_base
                    + head * dq_head
                    + queries.to(tl.int64)[:, None] * dq_row
                    + columns[None, :]
                )
                inside = columns[None, :] < D
                if MASKED:
                    inside = inside & (queries[:, None] < S)
                tl.atomic_add(at, dq * factor, mask=inside, sem="relaxed")
    return dk, dvalue


@triton.jit
def _backward_keys(
    Q, K, VALUE, DOUT, LSE, DELTA, ENDS, DK, DVALUE, DQ, scale,
    q_row, q_batch, q_head, k_row, k_batch, k_head, v_row, v_batch, v_head, do_row, do_batch, do_head,
    dq_row, dq_batch, dq_head, dk_row, dk_batch, dk_head, dv_row, dv_batch, dv_head,
    S, T, H, G,
    PER_GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_T: tl.constexpr, PACKED: tl.constexpr,
    VALUES: tl.constexpr, KEYS: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one block of keys, from all later queries of all heads of the group.

    VALUES stores the gradients of values, KEYS stores those of keys, and QUERIES adds to those of
    queries, in fp32. Scores have the shape (keys, queries), so that the products with p and ds need
    no transposed registers.
    """
    block = tl.program_id(0)
    batch = (tl.program_id(1) // G).to(tl.int64)
    group = (tl.program_id(1) % G).to(tl.int64)
    keys = block * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = tl.arange(0, BLOCK_D)
    wide = tl.arange(0, BLOCK_E)
    offset = T - S
    k = load_rows(K, batch * k_batch + group * k_head, keys, k_row, columns, T, D)
    value = k
    if KEYS:
        value = load_rows(VALUE, batch * v_batch + group * v_head, keys, v_row, wide, T, E)
    dk = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    dvalue = tl.zeros((BLOCK_T, BLOCK_E if VALUES else 16), tl.float32)
    low = tl.maximum(block * BLOCK_T - offset, 0) // BLOCK_S
    high = tl.cdiv(S, BLOCK_S)
    # From tile `middle` on, all queries come after the block's keys; a partial last block has no
    # such tiles.
    middle = tl.cdiv(tl.maximum((block + 1) * BLOCK_T - 1 - offset, 0), BLOCK_S)
    # From tile `tail` on, tiles are masked again. It is the partial last tile or,
    tail = S // BLOCK_S
    ends = keys
    if PACKED:
        ends = tl.load(ENDS + batch * T + keys, mask=keys < T, other=0)
        # if packed, the first tile with queries of a later document than that of the block's first
        # key.
        high = tl.cdiv(
            tl.load(ENDS + batch * T + tl.minimum((block + 1) * BLOCK_T, T) - 1) - offset, BLOCK_S
        )
        tail = (tl.load(ENDS + batch * T + block * BLOCK_T) - offset) // BLOCK_S
    middle = tl.minimum(middle, high)
    tail = tl.maximum(tail, middle)
    # `scale` includes the conversion to base-2 logarithms.
    factor = scale * 0.6931471805599453
    line = (batch * H + group * PER_GROUP) * S
    q_base = batch * q_batch + group * PER_GROUP * q_head
    do_base = batch * do_batch + group * PER_GROUP * do_head
    dq_base = batch * dq_batch + group * PER_GROUP * dq_head
    dk, dvalue = _backward_keys_blocks(
        dk, dvalue, k, value, Q, DOUT, LSE, DELTA, DQ, q_base, do_base, dq_base, line, q_row, do_row, dq_row,
        q_head, do_head, dq_head, keys, ends, middle * BLOCK_S, tail - middle, 0, tail - middle,
        offset, S, T, scale, factor,
        PER_GROUP, D, E, BLOCK_D, BLOCK_E, BLOCK_S, PACKED, False, VALUES, KEYS, QUERIES,
    )  # fmt: skip
    dk, dvalue = _backward_keys_blocks(
        dk, dvalue, k, value, Q, DOUT, LSE, DELTA, DQ, q_base, do_base, dq_base, line, q_row, do_row, dq_row,
        q_head, do_head, dq_head, keys, ends, low * BLOCK_S, middle - low, tail * BLOCK_S, middle - low + high - tail,
        offset, S, T, scale, factor,
        PER_GROUP, D, E, BLOCK_D, BLOCK_E, BLOCK_S, PACKED, True, VALUES, KEYS, QUERIES,
    )  # fmt: skip
    if KEYS:
        store_rows(DK, batch * dk_batch + group * dk_head, keys, dk_row, columns, T, dk * factor, D)
    if VALUES:
        store_rows(DVALUE, batch * dv_batch + group * dv_head, keys, dv_row, wide, T, dvalue, E)


@triton.jit
def _backward_queries(
    Q, K, VALUE, DOUT, LSE, DELTA, STARTS, DQ, scale,
    q_row, q_batch, q_head, k_row, k_batch, k_head, v_row, v_batch, v_head, do_row, do_batch, do_head,
    dq_row, dq_batch, dq_head,
    S, T, H,
    PER_GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_T: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of one head's block of queries from the keys to which it attends, in
    their order.
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    batch = (tl.program_id(1) // H).to(tl.int64)
    head = (tl.program_id(1) % H).to(tl.int64)
    group = head // PER_GROUP
    queries = block * BLOCK_S + tl.arange(0, BLOCK_S)
    columns = tl.arange(0, BLOCK_D)
    wide = tl.arange(0, BLOCK_E)
    offset = T - S
    line = (batch * H + head) * S
    q = load_rows(Q, batch * q_batch + head * q_head, queries, q_row, columns, S, D)
    do = load_rows(DOUT, batch * do_batch + head * do_head, queries, do_row, wide, S, E)
    lse = tl.load(LSE + line + queries, mask=queries < S, other=float("inf"))
    delta = tl.load(DELTA + line + queries, mask=queries < S, other=0.0)
    low = 0
    starts = queries
    if PACKED:
        starts = tl.load(STARTS + batch * T + offset + queries, mask=queries < S, other=0)
        low = tl.load(STARTS + batch * T + offset + block * BLOCK_S) // BLOCK_T * BLOCK_T
    dq = tl.zeros((BLOCK_S, BLOCK_D), tl.float32)
    k_base = batch * k_batch + group * k_head
    v_base = batch * v_batch + group * v_head
    for first in range(low, tl.minimum(T, (block + 1) * BLOCK_S + offset), BLOCK_T):
        keys = first + tl.arange(0, BLOCK_T)
        k = load_rows(K, k_base, keys, k_row, columns, T, D)
        value = load_rows(VALUE, v_base, keys, v_row, wide, T, E)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        seen = _seen(queries[:, None], keys[None, :], starts[:, None], offset, PACKED)
        p = tl.where(seen, tl.exp2(tl.fma(scores, scale, -lse[:, None])), 0.0)
        dp = tl.dot(do, tl.trans(value), input_precision="ieee")
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    base = batch * dq_batch + head * dq_head
    store_rows(DQ, base, queries, dq_row, columns, S, dq * (scale * 0.6931471805599453), D)


# By KiB of shared memory and kernel: (queries of a tile, keys of a tile, warps, stages) for heads
# of width up to 64 and for wider ones. A tuple as key is a pass of `_backward_passes`. The sizes
# were chosen by inspecting the binaries for capabilities 9.0, 8.0 and 8.6 and for gfx942, not by
# measurements: no kernel used in training spills registers, and loops prefetch where shared memory
# suffices.
_TILES = {
    227: {
        "forward": ((128, 64, 8, 3), (128, 64, 8, 3)),
        (True, True, True): ((64, 128, 8, 3), None),
        (True, False, False): (None, (64, 128, 8, 3)),
        (False, True, True): (None, (32, 128, 8, 3)),
        (True, True, False): ((64, 128, 8, 3), None),
        (False, True, False): (None, (32, 128, 8, 3)),
        "queries": ((128, 64, 8, 3), (128, 64, 8, 2)),
    },
    163: {
        "forward": ((128, 64, 8, 3), (128, 64, 8, 3)),
        (True, True, True): ((64, 128, 8, 2), None),
        (True, False, False): (None, (64, 128, 8, 2)),
        (False, True, True): (None, (64, 128, 8, 2)),
        (True, True, False): ((64, 128, 8, 2), None),
        (False, True, False): (None, (64, 128, 8, 2)),
        "queries": ((128, 64, 8, 2), (128, 64, 8, 2)),
    },
    99: {
        "forward": ((128, 64, 8, 3), (64, 64, 8, 2)),
        (True, True, True): ((32, 64, 4, 2), None),
        (True, False, False): (None, (64, 64, 8, 2)),
        (False, True, True): (None, (64, 32, 8, 2)),
        (True, True, False): ((64, 32, 8, 2), None),
        (False, True, False): (None, (64, 32, 8, 2)),
        "queries": ((128, 64, 8, 2), (32, 64, 8, 2)),
    },
    64: {
        "forward": ((128, 64, 4, 1), (64, 32, 4, 1)),
        (True, True, True): ((32, 64, 4, 1), None),
        (True, False, False): (None, (32, 64, 4, 1)),
        (False, True, True): (None, (32, 32, 4, 1)),
        (True, True, False): ((32, 32, 4, 1), None),
        (False, True, False): (None, (32, 32, 4, 1)),
        "queries": ((64, 32, 4, 1), (32, 32, 4, 1)),
    },
}
_TILE_FP32 = ((32, 32, 4, 1), (16, 32, 4, 1))
limits: dict[tuple, int] = {}
"""Key of `_TILES` to use instead of `shared_memory` for kernels whose tiles did not fit on this
process's GPU. The key here is a kernel's key in `_TILES` and whether heads are wider than 64."""


def shared_memory(device: torch.device) -> int:
    """Return the largest key of `_TILES` that fits into a program's shared memory, in KiB."""
    if torch.version.hip:
        return 64
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    return 227 if capability[0] in (9, 10) else 163 if capability in ((8, 0), (8, 7)) else 99


def _tile(kernel: str | tuple, D: int, S: int, q: Tensor) -> tuple[int, int, dict[str, int]]:
    """Return the numbers of queries and keys of a kernel's tiles, and its launch options."""
    memory = limits.get((kernel, D > 64), shared_memory(q.device))
    queries, keys, warps, stages = (
        _TILE_FP32 if q.dtype is torch.float32 else _TILES[memory][kernel]
    )[D > 64]
    queries = min(queries, max(16, triton.next_power_of_2(S)))
    return queries, keys, {"num_warps": warps, "num_stages": stages}


def _in_tiles(kernel: str | tuple, D: int, S: int, q: Tensor, launch: Callable[..., None]) -> None:
    """Call `launch` with the tile sizes and options for this GPU.

    Some kernels use nearly all of the shared memory. If a version of Triton needs more than the GPU
    has, this and later calls use smaller tiles.
    """
    try:
        launch(*_tile(kernel, D, S, q))
        return
    except OutOfResources as error:
        memory = limits.get((kernel, D > 64), shared_memory(q.device))
        smaller = [size for size in _TILES if size < memory]
        if q.dtype is torch.float32 or not smaller:
            raise
        sizes = error.required / 1024, error.limit / 1024
        logger.warning(
            "an attention kernel needs %.1f KiB of shared memory but has %.1f; using smaller tiles",
            *sizes,
        )
    limits[kernel, D > 64] = max(smaller)
    _in_tiles(kernel, D, S, q, launch)


class _Attention(torch.autograd.Function):
    """Differentiable attention. With `rotate`, z rotates q and k; with `wide`, z is averaged along
    with v.
    """

    @staticmethod
    def forward(ctx, q, k, v, z, starts, ends, rotate, wide):
        q, k, v = (last_contiguous(x) for x in (q, k, v))
        z = None if z is None else last_contiguous(z)
        o, u, lse = attend(*prepare(q, k, v, z, rotate, wide), starts)
        ctx.save_for_backward(q, k, v, z, o, u, lse, starts, ends)
        ctx.rotate = rotate
        ctx.wide = wide
        return (o, u) if wide else o

    @staticmethod
    @once_differentiable
    def backward(ctx, do, du=None):
        q, k, v, z, o, u, lse, starts, ends = ctx.saved_tensors
        inputs = prepare(q, k, v, z, ctx.rotate, ctx.wide)
        D = q.shape[-1]
        dq, dk, dvalue = attend_backward(inputs, (o, u, lse), (do, du), (starts, ends))
        dv, dz = (dvalue[..., :D], dvalue[..., D:]) if ctx.wide else (dvalue, None)
        if ctx.rotate:
            whole = dvalue if ctx.wide else None
            dq, dk, split, dz = prepare_backward(q, k, z, dq, dk, whole, ctx.needs_input_grad[3])
            dv = split if ctx.wide else dv
        return dq.to(q.dtype), dk, dv, dz, None, None, None, None


def attend(
    q: Tensor, k: Tensor, value: Tensor, starts: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return o and, if the value is [v | z], u (S, B, H, D), and the scores' base-2 log-sum-exp (B,
    H, S).

    q (S, B, H, D) and k (T, B, G, D) are already rotated. `value` is v (T, B, G, D) or [v | z] (T,
    B, G, 2D). `starts` (B, T) are the starts of the tokens' documents.
    """
    S, B, H, D = q.shape
    T = k.shape[0]
    G = k.shape[2]
    E = value.shape[-1]
    o = torch.empty(S, B, H, D, dtype=q.dtype, device=q.device)
    u = torch.empty_like(o) if E > D else None
    lse = torch.empty(B, H, S, dtype=torch.float32, device=q.device)

    def launch(block_s: int, block_t: int, options: dict[str, int]) -> None:
        _forward[(triton.cdiv(S, block_s), B * H)](
            q, k, value, o, o if u is None else u, lse, lse if starts is None else starts, D**-0.5 / math.log(2),
            *strides(q), *strides(k), *strides(value), *strides(o), S, T, H, H // G, D, E, _block(D), _block(E),
            block_s, block_t, starts is not None, **options,
        )  # fmt: skip

    _in_tiles("forward", D, S, q, launch)
    return o, u, lse


def attend_backward(
    inputs: tuple[Tensor, Tensor, Tensor],
    outputs: tuple[Tensor, Tensor | None, Tensor],
    gradients: tuple[Tensor, Tensor | None],
    bounds: tuple[Tensor | None, Tensor | None],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of rotated q (in fp32 unless deterministic), of rotated k, and of the
    value.

    `inputs` are q, k and the value, `outputs` the results of `attend`, `gradients` those of o and
    u, and `bounds` the starts and ends of the tokens' documents.
    """
    (q, k, value), (o, u, lse), (do, du), (starts, ends) = inputs, outputs, gradients, bounds
    S, B, H, D = q.shape
    T = k.shape[0]
    G = k.shape[2]
    E = value.shape[-1]
    wide = E > D
    packed = starts is not None
    repeatable = sums_in_one_order()
    do = last_contiguous(do)
    du = last_contiguous(du) if wide else do
    dout = torch.empty(S, B, H, E, dtype=q.dtype, device=q.device) if wide else do
    if repeatable:
        dq = torch.empty(S, B, H, D, dtype=q.dtype, device=q.device)
    else:
        dq = torch.zeros(S, B, H, D, dtype=torch.float32, device=q.device)
    dk, dvalue = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, value))
    delta = torch.empty_like(lse)
    _delta[(triton.cdiv(S, 64), B * H)](
        o, u if wide else o, do, du, dout, delta, *strides(o), *strides(do), *strides(du), B, S, H, D, _block(D), 64,
        wide,
    )  # fmt: skip
    starts, ends = (starts, ends) if packed else (lse, lse)
    scale = D**-0.5 / math.log(2)
    of_inputs = (*strides(q), *strides(k), *strides(value), *strides(dout))
    common = dict(PER_GROUP=H // G, D=D, E=E, BLOCK_D=_block(D), BLOCK_E=_block(E), PACKED=packed)

    def of_keys(
        computed: tuple[bool, bool, bool], block_s: int, block_t: int, options: dict[str, int]
    ) -> None:
        values, keys, queries = computed
        _backward_keys[(triton.cdiv(T, block_t), B * G)](
            q, k, value, dout, lse, delta, ends, dk, dvalue, dq, scale, *of_inputs,
            *strides(dq), *strides(dk), *strides(dvalue), S, T, H, G,
            BLOCK_S=block_s, BLOCK_T=block_t, VALUES=values, KEYS=keys, QUERIES=queries, **common, **options,
        )  # fmt: skip

    def of_queries(block_s: int, block_t: int, options: dict[str, int]) -> None:
        _backward_queries[(triton.cdiv(S, block_s), B * H)](
            q, k, value, dout, lse, delta, starts, dq, scale, *of_inputs, *strides(dq), S, T, H,
            BLOCK_S=block_s, BLOCK_T=block_t, **common, **options,
        )  # fmt: skip

    for computed in _backward_passes(D, repeatable):
        _in_tiles(computed, D, S, q, partial(of_keys, computed))
    if repeatable:
        _in_tiles("queries", D, S, q, of_queries)
    return dq, dk, dvalue


def _block(width: int) -> int:
    return max(16, triton.next_power_of_2(width))


def sums_in_one_order() -> bool:
    """Return whether gradients of queries must be summed in a fixed order, because torch must be
    deterministic.
    """
    return torch.are_deterministic_algorithms_enabled()


def _backward_passes(D: int, repeatable: bool) -> tuple[tuple[bool, bool, bool], ...]:
    """Return for each launch of `_backward_keys` whether it computes gradients of values, of keys,
    and of queries.

    Heads wider than 64 take two launches, both of which compute the scores, because the registers
    cannot hold all sums.
    """
    queries = not repeatable
    return ((True, True, queries),) if D <= 64 else ((True, False, False), (False, True, queries))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor | None = None,
    average_state: bool = False,
    bounds_2BT: Tensor | None = None,
    rotate: bool = True,
) -> tuple[Tensor, ...]:
    """Return the average o of v or, with `average_state`, the averages o and u of v and z, (S, B,
    H, D) each.

    With `rotate`, which requires S = T, z (T, B or 1, G or 1, D) rotates q (S, B, H, D) and k (T,
    B, G, D). `bounds_2BT` (int32) has the starts of each token's document and of the next one.
    Raises ValueError if batch size times heads exceeds `MAX_HEADS`.
    """
    B, H = q.shape[1:3]
    if B * H > MAX_HEADS:
        raise ValueError(
            f"{B} sequences of {H} heads exceed the {MAX_HEADS} heads of one launch; use a smaller"
            " batch"
        )
    z = z.expand(*k.shape) if z is not None and (rotate or average_state) else None
    starts, ends = (None, None) if bounds_2BT is None else bounds_2BT.contiguous()
    with torch.cuda.device_of(q):
        out = _Attention.apply(q, k, v, z, starts, ends, rotate and z is not None, average_state)
    return out if average_state else (out,)
