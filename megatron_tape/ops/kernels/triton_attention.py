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
tiles that the causal mask or bounds mask in part, which lie before and after the unmasked ones.
Bounds are those of `ops.visibility`: the first token that a token attends to (`starts`), and the
token after the last one that attends to it (`ends`), within a document, a segment or a sliding
window. Both never decrease along a sequence, so tiles outside of them are not visited.

All tensors are contiguous, so that strides follow from sizes. In kernels, `batch_head` is the index
b * H + h of a head of a sequence, and `batch_group` is b * G + g. In a tensor (S, B, H, D), the
rows of a head, one per token, start at batch_head * D and are B * H * D numbers apart.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from megatron_tape.ops.kernels.triton_rotation import (
    from_one_projection,
    last_contiguous,
    load_numbers,
    load_rows,
    rotate_and_join,
    rotate_and_join_backward,
    store_rows,
)

MAX_HEADS = 65535
"""Maximum of batch size times heads, the limit of a CUDA grid's second axis."""


@triton.jit
def _seen(queries, keys, starts, offset, BOUNDED: tl.constexpr):
    """Return whether query s, at token s + offset, attends to key t: t is neither later nor, with
    BOUNDED, before the first token that the query may attend to.

    Keys beyond the last one (t >= T) pass only for queries beyond the last one, whose results are
    not stored.
    """
    seen = keys <= queries + offset
    if BOUNDED:
        seen = seen & (keys >= starts)
    return seen


@triton.jit
def _forward(
    Q,
    K,
    VALUE,
    OUT,
    U,
    LSE,
    STARTS,
    scale,
    S,
    T,
    H,
    PER_GROUP: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """Compute o and, if E > D, u, and the log-sum-exp of one block of one head's queries.

    Q, OUT and U are (S, B, H, D), K (T, B, G, D), VALUE (T, B, G, E) and LSE (B, H, S). With
    BOUNDED, STARTS (B, T) holds the first token that each token may attend to. `scale` is log2(e) /
    sqrt(D), since GPUs compute exp2 faster than exp. PER_GROUP is H / G; BLOCK_D and BLOCK_E are D
    and E, rounded up to powers of two. The grid is (blocks of BLOCK_S queries, B * H).
    """
    # Blocks of the last queries attend to the most keys. They run first, so that the programs that
    # run last are short.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    batch_heads = tl.num_programs(1)
    batch_head = tl.program_id(1).to(tl.int64)
    batch_groups = batch_heads // PER_GROUP
    queries = block * BLOCK_S + tl.arange(0, BLOCK_S)
    offset = T - S

    K += batch_head // PER_GROUP * D
    VALUE += batch_head // PER_GROUP * E
    q = load_rows(Q + batch_head * D, queries, batch_heads * D, S, D, BLOCK_D)
    averaged = tl.zeros((BLOCK_S, BLOCK_E), tl.float32)
    largest = tl.full((BLOCK_S,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_S,), tl.float32)

    # All queries attend to the keys from the last query's start to the first query's own token: the
    # tiles from `middle` to `diagonal`. The tiles from `low` to `middle` and from `diagonal` to
    # `end` are masked in part.
    diagonal = (block * BLOCK_S + offset) // BLOCK_T
    end = tl.cdiv(tl.minimum(T, (block + 1) * BLOCK_S + offset), BLOCK_T)
    low = 0
    middle = 0
    starts = queries  # unused without BOUNDED, but Triton requires a value
    if BOUNDED:
        STARTS += batch_head // H * T + offset
        starts = tl.load(STARTS + queries, mask=queries < S, other=0)
        low = tl.load(STARTS + block * BLOCK_S) // BLOCK_T
        last_start = tl.load(STARTS + tl.minimum((block + 1) * BLOCK_S, S) - 1)
        middle = tl.minimum(tl.cdiv(last_start, BLOCK_T), diagonal)

    # First the unmasked tiles, in a faster loop, then the masked ones before and after them.
    for MASKED in tl.static_range(2):
        tiles = diagonal - middle
        if MASKED:
            tiles = end - low - tiles

        for number in range(tiles):
            tile = middle + number
            if MASKED:
                # Skip the unmasked tiles, from `middle` to `diagonal`.
                tile = low + number
                tile += tl.where(tile < middle, 0, diagonal - middle)
            keys = tile * BLOCK_T + tl.arange(0, BLOCK_T)

            k = load_rows(K, keys, batch_groups * D, T, D, BLOCK_D, MASKED)
            # "ieee": products of fp32 are not rounded to TF32.
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            if MASKED:
                seen = _seen(
                    queries[:, None],
                    keys[None, :],
                    starts[:, None],
                    offset,
                    BOUNDED,
                )
                scores = tl.where(seen, scores, float("-inf"))

            # The scale is applied in the exponent, where a fused multiply-add also subtracts the
            # largest score.
            largest_now = tl.maximum(largest, tl.max(scores, 1))
            shift = largest_now * scale
            if MASKED and BOUNDED:
                # Queries without any visible key so far have no maximum to subtract; the difference
                # of two infinities would be NaN.
                shift = tl.where(largest_now == float("-inf"), 0.0, shift)
            p = tl.exp2(tl.fma(scores, scale, -shift[:, None]))
            # The sums so far are relative to the previous maximum.
            shrink = tl.exp2(largest * scale - shift)
            total = total * shrink + tl.sum(p, 1)

            # The weights are rounded to the dtype of the values; sums are in fp32.
            value = load_rows(VALUE, keys, batch_groups * E, T, E, BLOCK_E, MASKED)
            averaged = averaged * shrink[:, None]
            averaged = tl.dot(p.to(value.dtype), value, averaged, input_precision="ieee")
            largest = largest_now

    # The first D columns of the average [o | u] go to OUT, the others to U.
    averaged = averaged / total[:, None]
    store_rows(OUT + batch_head * D, queries, batch_heads * D, S, averaged, D, BLOCK_E)
    if E > D:
        columns = tl.arange(0, BLOCK_E)[None, :]
        places = (
            U + batch_head * D + queries.to(tl.int64)[:, None] * (batch_heads * D) + (columns - D)
        )
        inside = (queries[:, None] < S) & (columns >= D) & (columns < E)
        tl.store(places, averaged.to(U.dtype.element_ty), mask=inside)
    lse = largest * scale + tl.log2(total)
    tl.store(LSE + batch_head * S + queries, lse, mask=queries < S)


@triton.jit
def _delta(
    OUT,
    U,
    DO,
    DU,
    DOUT,
    DELTA,
    S,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Compute DELTA (B, H, S), the dot product of each output and its gradient, which the softmax's
    backward pass subtracts.

    OUT, U, DO and DU are (S, B, H, D). With WIDE, also store [do | du], the gradient of the output
    [o | u], to DOUT (S, B, H, 2D). The grid is (blocks of BLOCK_S queries, B * H).
    """
    batch_heads = tl.num_programs(1)
    batch_head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)

    o = load_rows(
        OUT + batch_head * D,
        rows,
        batch_heads * D,
        S,
        D,
        BLOCK_D,
    ).to(tl.float32)
    do = load_rows(DO + batch_head * D, rows, batch_heads * D, S, D, BLOCK_D)
    delta = tl.sum(o * do.to(tl.float32), 1)

    if WIDE:
        u = load_rows(
            U + batch_head * D,
            rows,
            batch_heads * D,
            S,
            D,
            BLOCK_D,
        ).to(tl.float32)
        du = load_rows(DU + batch_head * D, rows, batch_heads * D, S, D, BLOCK_D)
        delta += tl.sum(u * du.to(tl.float32), 1)
        DOUT += batch_head * 2 * D
        store_rows(DOUT, rows, batch_heads * 2 * D, S, do, D, BLOCK_D)
        store_rows(DOUT + D, rows, batch_heads * 2 * D, S, du, D, BLOCK_D)
    tl.store(DELTA + batch_head * S + rows, delta, mask=rows < S)


@triton.jit
def _backward_keys(
    Q,
    K,
    VALUE,
    DOUT,
    LSE,
    DELTA,
    ENDS,
    DK,
    DVALUE,
    DQ,
    scale,
    S,
    T,
    H,
    PER_GROUP: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BOUNDED: tl.constexpr,
    B,
    VALUES: tl.constexpr,
    KEYS: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """Compute the gradients of one block of keys, from all later queries of all heads of the group.

    VALUES stores the gradients of values to DVALUE (T, B, G, E), KEYS stores those of keys to DK
    (T, B, G, D), and QUERIES adds to those of queries, DQ (S, B, H, D) in fp32. DOUT (S, B, H, E)
    is the gradient of the output, and DELTA the result of `_delta`. With BOUNDED, ENDS (B, T) holds
    the token after the last one that may attend to each token. Q is (S, B, H, D), K (T, B, G, D),
    VALUE (T, B, G, E) and LSE (B, H, S); the remaining arguments are those of `_forward`. The grid
    is (blocks of BLOCK_T keys, B * G).

    Scores have the shape (keys, queries), so that the products with p and ds need no transposed
    registers.
    """
    block = tl.program_id(0)
    batch_heads = B * H
    batch_groups = batch_heads // PER_GROUP
    batch_group = tl.program_id(1).to(tl.int64)
    keys = block * BLOCK_T + tl.arange(0, BLOCK_T)
    offset = T - S

    k = load_rows(K + batch_group * D, keys, batch_groups * D, T, D, BLOCK_D)
    value = k  # unused without KEYS, but Triton requires a value
    if KEYS:
        value = load_rows(VALUE + batch_group * E, keys, batch_groups * E, T, E, BLOCK_E)
    dk = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    dvalue = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)

    # Tiles of queries from `low` to `high` attend to keys of this block.
    low = tl.maximum(block * BLOCK_T - offset, 0) // BLOCK_S
    high = tl.cdiv(S, BLOCK_S)
    # From tile `middle` on, all queries come after the block's keys; a partial last block has no
    # such tiles.
    middle = tl.cdiv(tl.maximum((block + 1) * BLOCK_T - 1 - offset, 0), BLOCK_S)
    # From tile `tail` on, tiles are masked again. Without bounds, only a partial last tile is.
    tail = S // BLOCK_S
    ends = keys  # unused without BOUNDED, but Triton requires a value
    if BOUNDED:
        # `tail` is the first tile with queries that may not attend to the block's first key.
        ENDS += batch_group * PER_GROUP // H * T
        ends = tl.load(ENDS + keys, mask=keys < T, other=0)
        last_end = tl.load(ENDS + tl.minimum((block + 1) * BLOCK_T, T) - 1)
        high = tl.cdiv(last_end - offset, BLOCK_S)
        tail = (tl.load(ENDS + block * BLOCK_T) - offset) // BLOCK_S
    middle = tl.minimum(middle, high)
    tail = tl.maximum(tail, middle)

    # `scale` includes the factor log2(e) for exp2. Times ln(2), it is 1 / sqrt(D).
    factor = scale * 0.6931471805599453
    # From here on, the pointers are those of the group's first head.
    batch_head = batch_group * PER_GROUP
    Q += batch_head * D
    DOUT += batch_head * E
    LSE += batch_head * S
    DELTA += batch_head * S
    DQ += batch_head * D
    # First the unmasked tiles, in a faster loop, then the masked ones before and after them.
    for MASKED in tl.static_range(2):
        tiles = tail - middle
        if MASKED:
            tiles = high - low - tiles

        # Tiles and heads share one loop, so that loads are prefetched across heads.
        for step in range(tiles * PER_GROUP):
            head = 0
            number = step
            if PER_GROUP > 1:
                head = step // tiles
                number = step % tiles
            tile = middle + number
            if MASKED:
                # Skip the unmasked tiles, from `middle` to `tail`.
                tile = low + number
                tile += tl.where(tile < middle, 0, tail - middle)
            queries = tile * BLOCK_S + tl.arange(0, BLOCK_S)

            q = load_rows(
                Q + head * D,
                queries,
                batch_heads * D,
                S,
                D,
                BLOCK_D,
                MASKED,
            )
            # An infinite log-sum-exp zeroes the weights of queries beyond the last one.
            lse = load_numbers(LSE + head * S, queries, S, float("inf"), MASKED)
            # "ieee": products of fp32 are not rounded to TF32.
            scores = tl.dot(k, tl.trans(q), input_precision="ieee")
            p = tl.exp2(tl.fma(scores, scale, -lse[None, :]))
            if MASKED:
                seen = keys[:, None] <= queries[None, :] + offset
                if BOUNDED:
                    seen = seen & (queries[None, :] + offset < ends[:, None])
                p = tl.where(seen, p, 0.0)

            do = load_rows(
                DOUT + head * E,
                queries,
                batch_heads * E,
                S,
                E,
                BLOCK_E,
                MASKED,
            )
            if VALUES:
                dvalue = tl.dot(p.to(do.dtype), do, dvalue, input_precision="ieee")
            if KEYS:
                dp = tl.dot(value, tl.trans(do), input_precision="ieee")
                # The gradient of the scores, by the derivative of softmax.
                delta = load_numbers(DELTA + head * S, queries, S, 0.0, MASKED)
                ds = (p * (dp - delta[None, :])).to(q.dtype)
                dk = tl.dot(ds, q, dk, input_precision="ieee")
                if QUERIES:
                    if BLOCK_S < 64:
                        # Hopper's tensor cores require 64 rows; the transposed product has D rows.
                        dq = tl.trans(tl.dot(tl.trans(k), ds, input_precision="ieee"))
                    else:
                        dq = tl.dot(tl.trans(ds), k, input_precision="ieee")
                    columns = tl.arange(0, BLOCK_D)[None, :]
                    rows = queries.to(tl.int64)[:, None] * (batch_heads * D)
                    inside = columns < D
                    if MASKED:
                        inside = inside & (queries[:, None] < S)
                    places = DQ + head * D + rows + columns
                    tl.atomic_add(places, dq * factor, mask=inside, sem="relaxed")

    # The same number as `batch_groups`, but computed again: otherwise the addresses above would be
    # kept for the stores during the whole loop, and registers would spill.
    batch_groups = tl.num_programs(1)
    if KEYS:
        store_rows(
            DK + batch_group * D,
            keys,
            batch_groups * D,
            T,
            dk * factor,
            D,
            BLOCK_D,
        )
    if VALUES:
        store_rows(DVALUE + batch_group * E, keys, batch_groups * E, T, dvalue, E, BLOCK_E)


@triton.jit
def _backward_queries(
    Q,
    K,
    VALUE,
    DOUT,
    LSE,
    DELTA,
    STARTS,
    DQ,
    scale,
    S,
    T,
    H,
    PER_GROUP: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """Compute the gradient DQ (S, B, H, D) of one block of one head's queries from the keys to
    which it attends, in their order.

    Q is (S, B, H, D), K (T, B, G, D), VALUE (T, B, G, E), DOUT, the gradient of the output, (S, B,
    H, E), LSE and DELTA (B, H, S), STARTS (B, T). The other arguments are those of `_forward`. The
    grid is (blocks of BLOCK_S queries, B * H).
    """
    # As in `_forward`, the blocks with the most keys run first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    batch_heads = tl.num_programs(1)
    batch_head = tl.program_id(1).to(tl.int64)
    batch_groups = batch_heads // PER_GROUP
    queries = block * BLOCK_S + tl.arange(0, BLOCK_S)
    offset = T - S

    K += batch_head // PER_GROUP * D
    VALUE += batch_head // PER_GROUP * E
    q = load_rows(Q + batch_head * D, queries, batch_heads * D, S, D, BLOCK_D)
    do = load_rows(DOUT + batch_head * E, queries, batch_heads * E, S, E, BLOCK_E)
    lse = load_numbers(LSE + batch_head * S, queries, S, float("inf"), CHECKED=True)
    delta = load_numbers(DELTA + batch_head * S, queries, S, 0.0, CHECKED=True)
    dq = tl.zeros((BLOCK_S, BLOCK_D), tl.float32)

    low = 0
    starts = queries  # unused without BOUNDED, but Triton requires a value
    if BOUNDED:
        STARTS += batch_head // H * T + offset
        starts = tl.load(STARTS + queries, mask=queries < S, other=0)
        low = tl.load(STARTS + block * BLOCK_S) // BLOCK_T * BLOCK_T

    # All tiles are masked: this kernel runs only in deterministic mode, so it is kept simple.
    for first in range(low, tl.minimum(T, (block + 1) * BLOCK_S + offset), BLOCK_T):
        keys = first + tl.arange(0, BLOCK_T)
        k = load_rows(K, keys, batch_groups * D, T, D, BLOCK_D)
        value = load_rows(VALUE, keys, batch_groups * E, T, E, BLOCK_E)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        seen = _seen(
            queries[:, None],
            keys[None, :],
            starts[:, None],
            offset,
            BOUNDED,
        )
        p = tl.where(seen, tl.exp2(tl.fma(scores, scale, -lse[:, None])), 0.0)
        dp = tl.dot(do, tl.trans(value), input_precision="ieee")
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")

    # log2(e) / sqrt(D) times ln(2) is 1 / sqrt(D).
    dq *= scale * 0.6931471805599453
    store_rows(DQ + batch_head * D, queries, batch_heads * D, S, dq, D, BLOCK_D)


_TILES = {
    (227, False): {
        "forward": (128, 64, 8, 3),
        "all": (64, 128, 8, 3),
        "queries": (128, 64, 8, 3),
    },
    (227, True): {
        "forward": (128, 64, 8, 3),
        "values": (64, 128, 8, 3),
        "keys": (32, 128, 8, 3),
        "queries": (128, 64, 8, 2),
    },
    (163, False): {
        "forward": (128, 64, 8, 3),
        "all": (64, 128, 8, 3),
        "queries": (128, 64, 8, 2),
    },
    (163, True): {
        "forward": (128, 64, 8, 3),
        "values": (64, 128, 8, 3),
        "keys": (64, 128, 8, 2),
        "queries": (128, 64, 8, 2),
    },
    (99, False): {
        "forward": (128, 64, 8, 3),
        "all": (32, 128, 8, 3),
        "queries": (128, 64, 8, 2),
    },
    (99, True): {
        "forward": (64, 64, 8, 2),
        "values": (64, 64, 8, 2),
        "keys": (64, 32, 8, 2),
        "queries": (32, 64, 8, 2),
    },
    (64, False): {
        "forward": (128, 64, 4, 1),
        "all": (32, 64, 4, 1),
        "queries": (64, 32, 4, 1),
    },
    (64, True): {
        "forward": (64, 32, 4, 1),
        "values": (32, 64, 4, 1),
        "keys": (32, 32, 4, 1),
        "queries": (32, 32, 4, 1),
    },
}
"""Queries and keys of a tile, warps and stages of each kernel, by KiB of shared memory and whether
heads are wider than 64.

"all", "values" and "keys" are launches of `_backward_keys`. The sizes were chosen by inspecting
binaries, not by comparing times. Only those for 227 KiB have run on a GPU, an H200.

A kernel that needs more registers than a thread has spills some of them to memory. In training in
bf16, with Triton 3.6 and 3.9, only these spill, at most so many bytes per thread
(tests/ops/test_binaries.py):

- capability 8.0: "forward" with heads of 128: 184 bytes; "all" with heads of 64: 104 bytes;
- 8.6 and 8.9: "all" with heads of 64: 24 bytes;
- 12.0: "all" with heads of 64: 120 bytes;
- "queries", for deterministic runs, with heads of 128: 104 bytes on 8.0, and 8 bytes on 10.0.

Smaller tiles would spill less, but read more shared memory for each product. Loops in three stages
copy the next tile while they compute. Loops in two stages wait until a tile has been copied, since
shared memory has no room for a second one."""
_TILE_FP32 = {False: (32, 32, 4, 1), True: (16, 32, 4, 1)}
"""Queries and keys of a tile, warps and stages in fp32, for all GPUs and kernels, by whether heads
are wider than 64.
"""


def shared_memory(device: torch.device) -> int:
    """Return the KiB of shared memory that a program may use on `device`: a key of `_TILES`."""
    if torch.version.hip:
        return 64
    # Triton's interpreter has no limit.
    if device.type != "cuda":
        return 227
    capability = torch.cuda.get_device_capability(device)
    if capability[0] in (9, 10):
        return 227
    if capability in ((8, 0), (8, 7)):
        return 163
    # GPUs for consumers and workstations (8.6, 8.9, 12.x).
    return 99


def _launch(
    kernel: Any,
    name: str,
    *tensors: Tensor | None,
    **options: int,
) -> None:
    """Launch `kernel` in the tiles that `_TILES` has for `name` on this GPU.

    `tensors` are the kernel's arguments before `scale`: q, k, the value and further tensors.
    `options` are its last arguments, by name.
    """
    q, _, value, *_ = tensors
    S, B, H, D = q.shape
    T, _, G, E = value.shape
    wide = D > 64
    block_s, block_t, warps, stages = _TILES[shared_memory(q.device), wide][name]
    if q.dtype is torch.float32:
        block_s, block_t, warps, stages = _TILE_FP32[wide]
    # Few queries, as in decoding, need only a small tile. Products need 16 rows.
    block_s = min(block_s, max(16, triton.next_power_of_2(S)))
    grid = (triton.cdiv(S, block_s), B * H)
    if kernel is _backward_keys:
        grid = (triton.cdiv(T, block_t), B * G)

    # The scores' scale 1 / sqrt(D), times log2(e), as kernels compute exp2.
    kernel[grid](
        *tensors,
        D**-0.5 / math.log(2),
        S,
        T,
        H,
        H // G,
        D,
        E,
        triton.next_power_of_2(D),
        triton.next_power_of_2(E),
        block_s,
        block_t,
        **options,
        num_warps=warps,
        num_stages=stages,
    )


class _Attention(Function):
    """Differentiable attention. With `rotate`, z rotates q and k; with `wide`, z is averaged along
    with v.

    q is (S, B, H, D); k, v and z are (T, B, G, D). `starts` and `ends` (B, T) are the bounds, or
    None. Rotated queries and keys are not saved, but computed again.
    """

    @staticmethod
    def forward(
        ctx,
        q,
        k,
        v,
        z,
        starts,
        ends,
        rotate,
        wide,
    ):
        q, k, v = (last_contiguous(x) for x in (q, k, v))
        if z is not None:
            z = last_contiguous(z)
        inputs = _contiguous_inputs(
            q,
            k,
            v,
            z,
            rotate,
            wide,
        )
        o, u, lse = attend(*inputs, starts)
        ctx.save_for_backward(q, k, v, z, o, u, lse, starts, ends)
        ctx.rotate = rotate
        ctx.wide = wide
        return (o, u) if wide else o

    @staticmethod
    @once_differentiable
    def backward(ctx, do, du=None):
        q, k, v, z, o, u, lse, starts, ends = ctx.saved_tensors
        inputs = _contiguous_inputs(q, k, v, z, ctx.rotate, ctx.wide)
        dq, dk, dvalue = attend_backward(
            inputs,
            (o, u, lse),
            (do, du),
            (starts, ends),
        )

        dz = None
        if ctx.rotate:
            # One kernel adds up z's gradients from the rotation and from the average.
            dq, dk, dv, dz = rotate_and_join_backward(
                q,
                k,
                z,
                dq,
                dk,
                dvalue,
                from_one_projection(q, k, v),
                ctx.needs_input_grad[3],
            )
        elif ctx.wide:
            dv, dz = dvalue.chunk(2, dim=-1)
        else:
            dv = dvalue
        # The gradient of q is in fp32 if blocks of keys added to it and no rotation rounded it.
        return dq.to(q.dtype), dk, dv, dz, None, None, None, None


def _contiguous_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor | None,
    rotate: bool,
    wide: bool,
) -> list[Tensor]:
    """Return the contiguous inputs of `attend`: q and k, rotated if `rotate`, and v or, if `wide`,
    [v | z].

    The results of the rotation kernel are contiguous already. What it leaves as it is may be a view
    of the projection and is copied: v unless `wide`, and q and k unless `rotate`. This takes a read
    and a write of these tensors, little compared with attention itself.
    """
    return [
        x.contiguous()
        for x in rotate_and_join(
            q,
            k,
            v,
            z,
            rotate,
            wide,
        )
    ]


def attend(
    q: Tensor,
    k: Tensor,
    value: Tensor,
    starts: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return o and, if the value is [v | z], u (S, B, H, D), and the scores' base-2 log-sum-exp (B,
    H, S).

    q (S, B, H, D) and k (T, B, G, D) are already rotated. `value` is v (T, B, G, D) or [v | z] (T,
    B, G, 2D). `starts` (B, T) are the first tokens that tokens may attend to, or None. All are
    contiguous.
    """
    S, B, H, D = q.shape
    o = torch.empty_like(q)
    u = torch.empty_like(q) if value.shape[-1] > D else None
    lse = q.new_empty(B, H, S, dtype=torch.float32)
    _launch(
        _forward,
        "forward",
        q,
        k,
        value,
        o,
        u,
        lse,
        starts,
        BOUNDED=starts is not None,
    )
    return o, u, lse


def attend_backward(
    inputs: list[Tensor],
    outputs: tuple[Tensor, Tensor | None, Tensor],
    gradients: tuple[Tensor, Tensor | None],
    bounds: tuple[Tensor | None, Tensor | None],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of rotated q (in fp32 unless deterministic), of rotated k, and of the
    value.

    `inputs` are q, k and the value, `outputs` the results of `attend`, `gradients` those of o and
    u, and `bounds` are `starts` and `ends`, or None each.
    """
    q, k, value = inputs
    o, u, lse = outputs
    # In training, the gradients of the outputs are contiguous already.
    do, du = (None if x is None else x.contiguous() for x in gradients)
    starts, ends = bounds
    S, B, H, D = q.shape
    wide = u is not None
    in_one_order = sums_in_one_order()

    dout = q.new_empty(S, B, H, 2 * D) if wide else do
    delta = torch.empty_like(lse)
    block_d = triton.next_power_of_2(D)
    # Each program computes delta for 64 queries.
    _delta[(triton.cdiv(S, 64), B * H)](
        o,
        u,
        do,
        du,
        dout,
        delta,
        S,
        D,
        block_d,
        64,
        wide,
    )

    # All blocks of keys add to dq, which must start at zero, unless `_backward_queries` stores it.
    dq = torch.empty_like(q) if in_one_order else torch.zeros_like(q, dtype=torch.float32)
    dk = torch.empty_like(k)
    dvalue = torch.empty_like(value)
    tensors = (q, k, value, dout, lse, delta)
    bounded = starts is not None
    # With wider heads, the registers cannot hold all sums: one launch computes the gradient of the
    # values, another one those of keys and queries.
    for name in ("all",) if D <= 64 else ("values", "keys"):
        _launch(
            _backward_keys,
            name,
            *tensors,
            ends,
            dk,
            dvalue,
            dq,
            BOUNDED=bounded,
            B=B,
            VALUES=name != "keys",
            KEYS=name != "values",
            QUERIES=name != "values" and not in_one_order,
        )
    if in_one_order:
        _launch(_backward_queries, "queries", *tensors, starts, dq, BOUNDED=bounded)
    return dq, dk, dvalue


def sums_in_one_order() -> bool:
    """Return whether gradients of queries must be summed in a fixed order, because torch must be
    deterministic.
    """
    return torch.are_deterministic_algorithms_enabled()


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

    With `rotate`, which requires S = T, z (T, B, G, D) rotates q (S, B, H, D) and k (T,
    B, G, D). `bounds_2BT` (int32) is that of `ops.visibility`. Raises ValueError if batch size
    times heads exceeds `MAX_HEADS`.
    """
    B, H = q.shape[1:3]
    if B * H > MAX_HEADS:
        raise ValueError(
            f"{B} sequences of {H} heads exceed the {MAX_HEADS} heads of one launch; use a smaller"
            " batch"
        )

    rotate = rotate and z is not None
    # An unused z would be saved for the backward pass.
    if not (rotate or average_state):
        z = None
    starts, ends = (None, None) if bounds_2BT is None else bounds_2BT.contiguous()
    with torch.cuda.device_of(q):
        out = _Attention.apply(q, k, v, z, starts, ends, rotate, average_state)
    return out if average_state else (out,)
