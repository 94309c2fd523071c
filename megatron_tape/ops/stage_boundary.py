"""One tensor of hidden states and position state, as pipeline stages send each other one tensor.

Nothing is rounded: a state in float32 crosses the boundary as pairs of bf16 numbers with the same bits, and so does its
gradient.

Axes: s tokens of this rank, B batch, C hidden size, T tokens of the state: s, or a multiple of it.
"""

import torch
from torch import Tensor


def pack(hidden_sBC: Tensor, state: Tensor) -> Tensor:
    """Return hidden states and, behind them, the bits of the state (T, B, ...): (s, B, C + `packed_width`)."""
    return _Pack.apply(hidden_sBC, state)


def unpack(packed: Tensor, hidden_size: int, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the hidden states (s, B, C) and the state of this shape (T, B, ...) and dtype that `pack` joined."""
    return _Unpack.apply(packed, hidden_size, shape, dtype)


def packed_width(shape: tuple[int, ...], state_dtype: torch.dtype, tokens: int, dtype: torch.dtype) -> int:
    """Return how many numbers of `dtype` a state of this shape takes for each of the `tokens` s of this rank."""
    return torch.Size(shape).numel() // (tokens * shape[1]) * state_dtype.itemsize // dtype.itemsize


def _join(hidden_sBC: Tensor, state: Tensor) -> Tensor:
    by_token = state.unflatten(0, (-1, len(hidden_sBC))).movedim(0, 2).flatten(2).contiguous()
    return torch.cat([hidden_sBC, by_token.view(hidden_sBC.dtype)], dim=2)


def _cut(packed: Tensor, hidden_size: int, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    hidden_sBC, by_token = packed[..., :hidden_size], packed[..., hidden_size:]
    state = by_token.contiguous().view(dtype).unflatten(2, (-1, *shape[2:])).movedim(2, 0).flatten(0, 1)
    return hidden_sBC.contiguous(), state.contiguous()


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_sBC, state):
        ctx.sizes = hidden_sBC.shape[2], state.shape, state.dtype
        return _join(hidden_sBC, state)

    @staticmethod
    def backward(ctx, gradient):
        return _cut(gradient, *ctx.sizes)


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, packed, hidden_size, shape, dtype):
        return _cut(packed, hidden_size, shape, dtype)

    @staticmethod
    def backward(ctx, hidden_sBC, state):
        return _join(hidden_sBC, state), None, None, None
