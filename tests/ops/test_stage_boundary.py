"""Tensors that pipeline stages send each other."""

import pytest
import torch

from megatron_tape.ops.stage_boundary import pack, packed_width, unpack


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize(
    "of_token",
    [(3, 4), (1,), ()],
)
def test_states_and_gradients_cross_a_stage_boundary_bit_for_bit(dtype, copies, of_token):
    generator = torch.Generator().manual_seed(0)
    tokens, batch, width = 5, 2, 6
    # All bit patterns, including NaN and infinity; T may be a multiple of the rank's tokens.
    shape = (copies * tokens, batch, *of_token)
    bits = torch.randint(
        -(2**31),
        2**31 - 1,
        shape,
        generator=generator,
        dtype=torch.int32,
    )
    state = bits.view(torch.float32).requires_grad_()
    hidden = torch.randn(tokens, batch, width, generator=generator).to(dtype).requires_grad_()
    packed = pack(hidden, state)
    added = packed_width(shape, torch.float32, tokens, dtype)
    assert packed.shape == (tokens, batch, width + added)

    received = packed.detach().requires_grad_()
    unpacked = unpack(received, width, shape, torch.float32)
    assert torch.equal(unpacked[0], hidden)
    assert torch.equal(unpacked[1].view(torch.int32), bits)
    gradients = torch.randn(hidden.shape, generator=generator).to(dtype), state.detach().flip(0)
    torch.autograd.backward(unpacked, gradients)
    torch.autograd.backward(packed, received.grad)
    assert torch.equal(hidden.grad, gradients[0])
    assert torch.equal(state.grad.view(torch.int32), bits.flip(0))
