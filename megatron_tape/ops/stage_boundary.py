"""Pack hidden states and position state into the single tensor that a pipeline stage sends to the
next one.

Nothing is rounded: if hidden states are in bf16, a float32 state and its gradient are sent as pairs
of bf16 numbers with the same bits.

Axes: s tokens of this rank, B batch, C hidden size, T tokens of the state (s or a multiple of it).
"""

import math

import torch
from torch import Tensor


def pack(hidden_sBC: Tensor, state: Tensor) -> Tensor:
    """Concatenate hidden states and the bits of the state (T, B, ...) into (s, B, C +
    `packed_width`).
    """
    return _Pack.apply(hidden_sBC, state)


def unpack(
    packed: Tensor,
    hidden_size: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Split the result of `pack` into hidden states (s, B, `hidden_size`) and a state of `shape`
    and `dtype`.
    """
    return _Unpack.apply(packed, hidden_size, shape, dtype)


def packed_width(
    shape: tuple[int, ...],
    state_dtype: torch.dtype,
    tokens: int,
    dtype: torch.dtype,
) -> int:
    """Return the elements per token that a state of `shape` adds to hidden states of `dtype`;
    `tokens` is s.
    """
    # The state's elements for each of this rank's tokens; `shape[1]` is B.
    elements = math.prod(shape) // (tokens * shape[1])
    return elements * state_dtype.itemsize // dtype.itemsize


def _join(hidden_sBC: Tensor, state: Tensor) -> Tensor:
    """Return the result of `pack`, without a gradient."""
    # The T tokens of the state are T / s blocks of s tokens; each token of this rank carries one
    # token of every block.
    by_token = state.unflatten(0, (-1, len(hidden_sBC))).movedim(0, 2)
    by_token = _contiguous_copy(by_token).flatten(2)
    return torch.cat([hidden_sBC, by_token.view(hidden_sBC.dtype)], dim=2)


def _split(
    packed: Tensor,
    hidden_size: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the result of `unpack`, without a gradient: the inverse of `_join`."""
    hidden_sBC = packed[..., :hidden_size]
    by_token = _contiguous_copy(packed[..., hidden_size:]).view(dtype)
    # The blocks of s tokens become the first axis again.
    by_token = by_token.unflatten(2, (-1, *shape[2:]))
    state = by_token.movedim(2, 0).flatten(0, 1)
    return hidden_sBC.contiguous(), state.contiguous()


def _contiguous_copy(tensor: Tensor) -> Tensor:
    """Return a contiguous copy that can be viewed as another dtype."""
    # `contiguous` is not enough: it keeps any strides of axes of size 1.
    return tensor.clone(memory_format=torch.contiguous_format)


class _Pack(torch.autograd.Function):
    """The differentiable form of `_join`; its gradient is split into the same bits."""

    @staticmethod
    def forward(ctx, hidden_sBC, state):
        ctx.sizes = hidden_sBC.shape[2], state.shape, state.dtype
        return _join(hidden_sBC, state)

    @staticmethod
    def backward(ctx, gradient):
        return _split(gradient, *ctx.sizes)


class _Unpack(torch.autograd.Function):
    """The differentiable form of `_split`; its gradients are joined into the same bits."""

    @staticmethod
    def forward(ctx, packed, hidden_size, shape, dtype):
        return _split(packed, hidden_size, shape, dtype)

    @staticmethod
    def backward(ctx, hidden_sBC, state):
        return _join(hidden_sBC, state), None, None, None
