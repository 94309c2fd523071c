"""Learned position increments, and position states with normalized modulus."""

import math

import pytest
import torch
from models import INCREMENTS, SIGNED, build, random_tokens, small_model

from megatron_tape.ops import rotation
from megatron_tape.ops.rotation import phases, with_modulus
from megatron_tape.position import BUILT_IN
from megatron_tape.position.encoding import NO_CACHE

DOCUMENTS = torch.tensor([[0] * 5 + [1] * 11, [0] * 16])


@pytest.mark.parametrize("case", INCREMENTS)
def test_a_new_model_equals_one_with_fixed_increments_and_no_norm(case):
    ids = random_tokens()
    fresh, _ = build(small_model(**INCREMENTS[case]), randomize=False)
    without = {"increments": "fixed", "state_norm": "none"}
    plain, _ = build(small_model(**INCREMENTS[case] | without), randomize=False)
    torch.testing.assert_close(fresh(ids), plain(ids), atol=1e-5, rtol=1e-5)
    moved, _ = build(small_model(**INCREMENTS[case]))
    assert (moved(ids) - plain(ids)).abs().max() > 1e-2


@pytest.mark.parametrize("zero", ["down", "up"])
def test_either_matrix_of_the_position_mlp_can_start_at_zero(zero):
    ids = random_tokens()
    built, _ = build(small_model(mlp_zero=zero), randomize=False)
    rope, _ = build(small_model(position_encoding="rope"), randomize=False)
    logits = built(ids)
    torch.testing.assert_close(logits, rope(ids), atol=1e-5, rtol=1e-5)
    logits.square().sum().backward()
    matrices = dict(built.layers["0"].position.named_parameters())
    for name in ("up_proj", "down_proj"):
        starts_at_zero = name == f"{zero}_proj"
        assert (matrices[name].grad.norm() > 0) == starts_at_zero
        assert (matrices[name].norm() == 0) == starts_at_zero


@pytest.mark.parametrize("case", INCREMENTS)
def test_the_start_of_the_cumulative_sum_changes_nothing(case):
    """The sum of a pack's second document starts after the first one; left padding is such a first
    document.
    """
    built, _ = build(small_model(**INCREMENTS[case]))
    ids = random_tokens()
    packed = built(ids, documents=DOCUMENTS)
    torch.testing.assert_close(
        packed[:1, 5:],
        built(ids[:1, 5:]),
        atol=1e-4,
        rtol=1e-4,
    )
    torch.testing.assert_close(
        packed[1:],
        built(ids[1:]),
        atol=1e-4,
        rtol=1e-4,
    )
    torch.testing.assert_close(
        built(ids), built(ids, positions=torch.arange(16) + 500), atol=2e-4, rtol=1e-3
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_position_differences_are_exact_over_128k_tokens(dtype):
    encoding = build(small_model(**INCREMENTS["rope_learned"]))[0].encoding
    logits = torch.randn(2**17, 1, 2, generator=torch.Generator().manual_seed(5)).to(dtype)
    p = encoding.running_sum(logits, NO_CACHE)
    expected = (2 * logits.double().sigmoid())[-200:].cumsum(0)
    assert p[-1].min() > 100_000
    assert ((p[-200:] - p[-201]) - expected).abs().max() < 1e-9
    rounded = p.float()
    assert ((rounded[-200:] - rounded[-201]) - expected).abs().max() > 1e-3


def test_phases_and_their_gradients_equal_the_definition():
    p = (1000 * torch.rand(5, 2, 3, dtype=torch.float64)).requires_grad_()
    theta = torch.tensor([1.0, 0.1, 1e-3], dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda p: phases(p, theta, 1.3, torch.float64),
        (p,),
    )
    angles = p[..., None] * theta
    expected = 1.3 * torch.cat([angles.cos(), angles.sin()], dim=-1)
    torch.testing.assert_close(
        phases(p, theta, 1.3, torch.float64),
        expected,
        atol=1e-12,
        rtol=0,
    )
    assert phases(p, theta, 1.3, torch.bfloat16).dtype is torch.bfloat16


@pytest.mark.parametrize("case", ["unit", "both_yarn"])
def test_every_update_preserves_the_modulus(case, monkeypatch):
    built, _ = build(small_model(**INCREMENTS[case]))
    updated = []
    states = []
    monkeypatch.setattr(
        rotation, "with_modulus", lambda *x: updated.append(x[0]) or with_modulus(*x)
    )
    for layer in built.layers.values():
        layer.position.register_forward_hook(
            lambda module, arguments, output: states.append(output)
        )
    built(random_tokens())
    factor = 0.1 * math.log(4) + 1 if case == "both_yarn" else 1.0
    assert len(updated) == 2
    assert states[2] is states[1]
    for before, after in zip(updated, states):
        was, now = (x.detach().unflatten(-1, (2, -1)).norm(dim=-2) for x in (before, after))
        torch.testing.assert_close(
            now,
            factor * (was / 1e-3).clamp(max=1),
            atol=1e-6,
            rtol=1e-5,
        )
        assert (was - factor).abs().max() > 0.5
        assert (was > 1e-3).float().mean() > 0.95


def test_gradients_of_the_modulus_are_finite_at_zero_and_exact_elsewhere():
    z = torch.randn(
        4,
        3,
        2,
        8,
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(1),
    )
    z[0, 0, 0, [2, 6]] = torch.tensor(
        [4e-4, -3e-4],
        dtype=torch.float64,
    )  # shorter than SHORTEST
    z.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda z: with_modulus(z, 1.3),
        (z,),
        eps=1e-7,
        atol=1e-3,
    )
    z = torch.zeros(1, 1, 1, 4, requires_grad=True)
    with_modulus(z, 1.0).sum().backward()
    assert z.grad.unique().tolist() == pytest.approx([1000.0])


def test_signed_increments_can_decrease_positions():
    built, _ = build(small_model(position_encoding="rope", **SIGNED))
    logits = torch.tensor([0.0, -3.0, 0.5])[:, None, None]
    assert built.encoding.running_sum(logits, NO_CACHE).flatten().tolist() == [1.0, -1.0, 0.5]


@pytest.mark.parametrize("name", [encoding.name for encoding in BUILT_IN if encoding.needs])
def test_skipped_layers_equal_those_of_a_model_without_positions(name):
    """With the same weights, a layer without positions does what it does in a model of `nope`."""
    some, _ = build(small_model(position_encoding=name, num_layers=4, layers_without_positions=2))
    nope, _ = build(small_model(position_encoding="nope", num_layers=4))
    nope.load_state_dict(
        {key: value for key, value in some.state_dict().items() if ".position." not in key}
    )
    inputs = []
    for layer in some.layers.values():
        record = lambda *arguments: inputs.append(arguments[1:])  # noqa: E731
        layer.register_forward_hook(record, with_kwargs=True)
    some(random_tokens())
    differences = []
    for layer, (given, kwargs, made) in zip(nope.layers.values(), inputs):
        found, _ = layer(given[0], None, **kwargs)
        differences.append((found - made[0]).abs().max())
    assert max(differences[1::2]) < 1e-6 < min(differences[::2])
