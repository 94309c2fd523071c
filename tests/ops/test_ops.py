"""Fast implementations equal their references in float64, outputs and all gradients, at odd
sizes.
"""

import pytest
import torch
import torch.nn.functional as F
from comparing import assert_same, draw, draw_qkvz

from megatron_tape.model import reference
from megatron_tape.ops.attention import attention
from megatron_tape.ops.packing import Packing
from megatron_tape.ops.parity import inexact
from megatron_tape.ops.position_update import (
    compact_update,
    contextualize,
    mix_tokens,
    plain_update,
)
from megatron_tape.ops.rotation import rotate, rotate_groups


@pytest.mark.parametrize("length", [1, 7, 63, 65])
@pytest.mark.parametrize("heads, groups", [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("packed", [False, True])
def test_attention_averages_v_and_z_with_one_attention_map(length, heads, groups, packed):
    q, k, v, z = draw_qkvz(length, heads, groups, 8)
    if packed:
        documents = torch.tensor(
            [[i // 5 for i in range(length)], [i // 11 for i in range(length)]]
        )
    else:
        documents = None
    ours = attention(q, k, v, z, True, None if documents is None else Packing.of(documents))
    turned = rotate_groups(q, z), rotate(k, z)
    q_, k_, values = (x.transpose(0, 1) for x in (*turned, torch.cat([v, z], dim=-1)))
    theirs = reference.attend(q_, k_, values, documents).transpose(0, 1)
    assert_same(torch.cat(ours, dim=-1), theirs, (q, k, v, z))


@pytest.mark.parametrize("tokens", [1, 5, 33])
@pytest.mark.parametrize("heads, groups, inner", [(4, 4, 16), (6, 2, 5), (3, 1, 7)])
def test_the_collapsed_update_equals_the_literal_update(tokens, heads, groups, inner):
    z = draw(tokens, groups, 8)
    u = draw(tokens, heads, 8, seed=1)
    gate = draw(tokens, inner, seed=2)
    mixing = draw(groups, heads, seed=3)
    up = draw(inner, groups, seed=4)
    down = draw(groups, inner, seed=5)
    ours = contextualize(mix_tokens(z, u, mixing), gate, up, down)
    mixed = z + torch.einsum("gh,nhd->ngd", mixing, u)
    literal = torch.einsum(
        "gp,npd->ngd", down, F.silu(gate)[..., None] * torch.einsum("pg,ngd->npd", up, mixed)
    )
    assert_same(ours, mixed + literal, (z, u, gate, mixing, up, down))


@pytest.mark.parametrize("tokens", [1, 33])
@pytest.mark.parametrize(
    "heads, groups, inner, full", [(4, 4, 16, True), (6, 2, 5, True), (3, 3, 7, False)]
)
def test_the_compact_update_equals_the_plain_update_and_saves_z_u_and_gate(
    tokens, heads, groups, inner, full
):
    z = draw(tokens, groups, 8)
    u = draw(tokens, heads, 8, seed=1)
    gate = draw(tokens, inner, seed=2)
    mixing = draw(groups, heads, seed=3) if full else draw(heads, seed=3)
    inputs = (z, u, gate, mixing, draw(inner, groups, seed=4), draw(groups, inner, seed=5))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: saved.append(x.data_ptr()) or x, lambda x: x
    ):
        ours = compact_update(*inputs)
    assert saved == [x.data_ptr() for x in inputs]
    assert_same(ours, plain_update(*inputs), inputs)


@pytest.mark.parametrize("full", [True, False])
def test_the_compact_update_of_an_fp32_state_has_at_most_twice_the_rounding_error(full):
    shapes = [(40, 4, 16), (40, 4, 16), (40, 9), (4, 4) if full else (4,), (9, 4), (4, 9)]
    exact = [draw(*shape, seed=i).detach() for i, shape in enumerate(shapes)]
    inputs = [x.float() if i == 0 else x.bfloat16() for i, x in enumerate(exact)]
    assert (
        inexact(
            lambda *x: [compact_update(*x)], lambda *x: [plain_update(*x)], inputs, torch.bfloat16
        )
        is None
    )


def test_rotation_is_a_complex_product_and_heads_of_a_group_share_a_state():
    q = draw(5, 2, 6, 8)
    z = draw(5, 2, 3, 8, seed=1)

    def as_complex(x):
        return torch.complex(*x.chunk(2, dim=-1))

    expected = as_complex(q) * as_complex(z.repeat_interleave(2, dim=2))
    assert_same(rotate_groups(q, z), torch.cat([expected.real, expected.imag], dim=-1), (q, z))
    phase = reference.rope_phases(torch.arange(5), 10000.0 ** -(torch.arange(4) / 4)).double()
    torch.testing.assert_close(rotate(q[:, 0, 0], phase).norm(dim=-1), q[:, 0, 0].norm(dim=-1))
