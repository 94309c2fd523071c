"""Fast implementations equal their references in float64, outputs and all gradients, at odd
sizes.
"""

import pytest
import torch
from comparing import assert_same, draw

from megatron_tape.ops.parity import inexact
from megatron_tape.ops.position_update import (
    compact_update,
    plain_update,
)
from megatron_tape.ops.rotation import rotate_groups


@pytest.mark.parametrize("tokens", [1, 33])
@pytest.mark.parametrize(
    "heads, groups, inner, full",
    [
        (4, 4, 16, True),
        (6, 2, 5, True),
        (3, 3, 7, False),
    ],
)
def test_the_compact_update_equals_the_plain_update_and_does_not_save_the_mixed_state(
    tokens, heads, groups, inner, full
):
    z = draw(tokens, groups, 8)
    u = draw(tokens, heads, 8, seed=1)
    gate = draw(tokens, inner, seed=2)
    mixing = draw(groups, heads, seed=3) if full else draw(heads, seed=3)
    inputs = (z, u, gate, mixing, draw(inner, groups, seed=4), draw(groups, inner, seed=5))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        ours = compact_update(*inputs).state
    z, u, gate, M, *matrices = saved
    kept = [x.data_ptr() for x in (z, u, gate, *matrices)]
    assert kept == [x.data_ptr() for x in inputs]
    assert M.shape == (tokens, groups, groups)
    assert_same(ours, plain_update(*inputs), inputs)


@pytest.mark.parametrize("full", [True, False])
def test_the_compact_update_of_an_fp32_state_has_at_most_twice_the_rounding_error(full):
    shapes = [
        (40, 4, 16),
        (40, 4, 16),
        (40, 9),
        (4, 4) if full else (4,),
        (9, 4),
        (4, 9),
    ]
    z, *others = (draw(*shape, seed=i).detach() for i, shape in enumerate(shapes))
    inputs = [z.float(), *(x.bfloat16() for x in others)]

    def compact(z, *x):
        return compact_update(z, *x, rounded_NGD=z.to(x[0].dtype))

    def plain(z, *x):
        new = plain_update(z, *x)
        copy = new.to(x[0].dtype)
        return new, copy, copy

    assert inexact(compact, plain, inputs, torch.bfloat16) is None


def test_rotation_is_a_complex_product_and_heads_of_a_group_share_a_state():
    q = draw(5, 2, 6, 8)
    z = draw(5, 2, 3, 8, seed=1)
    turned = torch.complex(*q.chunk(2, dim=-1))
    turned = turned * torch.complex(*z.repeat_interleave(2, dim=2).chunk(2, dim=-1))
    assert_same(
        rotate_groups(q, z),
        torch.cat([turned.real, turned.imag], dim=-1),
        (q, z),
    )
