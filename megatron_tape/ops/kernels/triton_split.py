"""A split of a tensor along its last axis, whose backward pass concatenates the gradients in one
Triton kernel, or not at all.

It splits the output of the projection into queries, keys and values, and the averages [o | u] into
those of values and position state. The kernels that compute the gradients may write them where they
belong: `triton_rotation` those of queries, keys and values, the position update that of u. Axes: S
tokens, B batch, H heads or groups, D head dimension.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from megatron_tape.ops.kernels.triton_rotation import (
    are_parts,
    first_strides,
    load_rows,
    store_rows,
)


@triton.jit
def _join(
    FIRST,
    SECOND,
    THIRD,
    OUT,
    out_row,
    out_batch,
    out_head,
    S,
    B,
    H,
    WIDTH_1: tl.constexpr,
    WIDTH_2: tl.constexpr,
    WIDTH_3: tl.constexpr,
    BLOCK_1: tl.constexpr,
    BLOCK_2: tl.constexpr,
    BLOCK_3: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Store [first | second | third] of one head of a sequence to OUT, of any strides.

    The parts (S, B, H, WIDTH_*) are contiguous; the width of a missing one is 0. BLOCK_1 and so on
    are the widths, rounded up to powers of two. The grid has one axis, since the others are limited
    to 65535 programs: B * H programs for each block of BLOCK_S tokens.
    """
    program = tl.program_id(0).to(tl.int64)
    batch_heads = B * H
    batch_head = program % batch_heads  # counts the heads of all sequences
    rows = program // batch_heads * BLOCK_S + tl.arange(0, BLOCK_S)
    OUT += batch_head // H * out_batch + batch_head % H * out_head

    part = FIRST + batch_head * WIDTH_1
    values = load_rows(part, rows, batch_heads * WIDTH_1, S, WIDTH_1, BLOCK_1)
    store_rows(OUT, rows, out_row, S, values, WIDTH_1, BLOCK_1)
    if WIDTH_2 > 0:
        part = SECOND + batch_head * WIDTH_2
        values = load_rows(part, rows, batch_heads * WIDTH_2, S, WIDTH_2, BLOCK_2)
        store_rows(OUT + WIDTH_1, rows, out_row, S, values, WIDTH_2, BLOCK_2)
    if WIDTH_3 > 0:
        part = THIRD + batch_head * WIDTH_3
        values = load_rows(part, rows, batch_heads * WIDTH_3, S, WIDTH_3, BLOCK_3)
        store_rows(OUT + WIDTH_1 + WIDTH_2, rows, out_row, S, values, WIDTH_3, BLOCK_3)


def empty_next_to_left_half(x: Tensor) -> Tensor:
    """Return uninitialized memory for the gradient of x (S, B, H, D).

    If the strides of x are those of the right half of [left | x], the result is such a half, too.
    `_Split` then writes only the gradient of `left`, into the memory next to it.
    """
    *_, head_stride, _ = x.stride()
    D = x.shape[-1]
    if head_stride != 2 * D:
        return torch.empty_like(x)

    whole = torch.empty_strided(
        (*x.shape[:-1], 2 * D),
        x.stride(),
        dtype=x.dtype,
        device=x.device,
    )
    right_half = whole[..., D:]
    # Only with this attribute may `_Split` overwrite the left half. Autograd passes this tensor
    # itself to `_Split`, unless it adds up several gradients.
    right_half.left_half_is_free = True
    return right_half


class _Split(Function):
    """The differentiable form of `split`."""

    @staticmethod
    def forward(ctx, x, widths):
        # A tensor without memory, which keeps the shape, dtype and strides of x.
        ctx.like = torch.empty_like(x, device="meta")
        return x.split(widths, dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx, *parts):
        like = ctx.like
        # The gradient is one tensor already.
        if are_parts(parts, like.stride()):
            first = parts[0]
            return first.as_strided(like.shape, like.stride(), first.storage_offset()), None

        S, B, H, _ = like.shape
        widths = [part.shape[-1] for part in parts]
        last = parts[-1]
        has_free_half = getattr(last, "left_half_is_free", False)
        if has_free_half and last.stride() == like.stride():
            # `last` is in its place already, so that only the first part is copied.
            out = last.as_strided(like.shape, like.stride(), last.storage_offset() - widths[0])
            parts = parts[:1]
        else:
            out = torch.empty_like(like, device=last.device)

        # In training, the parts are contiguous already. The kernel does not read missing parts.
        tensors = [part.contiguous() for part in parts]
        missing = 3 - len(parts)
        widths = [*widths[: len(parts)], *[0] * missing]
        tensors += tensors[:1] * missing
        blocks = [triton.next_power_of_2(width) for width in widths]
        block_s = max(1, 2048 // max(blocks))
        _join[(B * H * triton.cdiv(S, block_s),)](
            *tensors,
            out,
            *first_strides(out),
            S,
            B,
            H,
            *widths,
            *blocks,
            block_s,
        )
        return out, None


def split(x: Tensor, widths: list[int]) -> tuple[Tensor, ...]:
    """Return two or three views of x (S, B, H, sum of the widths), split along the last axis.

    If the gradients of the parts are the parts of one tensor already, this tensor is the gradient
    of x. Otherwise, one kernel concatenates them. torch.split would call torch.cat, which reaches
    only a fifth of the memory bandwidth here.
    """
    with torch.cuda.device_of(x):
        return _Split.apply(x, widths)
