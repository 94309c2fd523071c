"""Selective RoPE, compared with the reference, RoPE and no positions."""

import math

import pytest
import torch
from comparing import assert_same, draw
from models import build, move_positions, random_tokens, small_model
from selective_rope_reference import angles, rotate

from megatron_tape.errors import ConfigError
from megatron_tape.model.validation import validate_model
from megatron_tape.ops.attention import attention
from megatron_tape.ops.rotation import phases_of_angles
from megatron_tape.ops.visibility import Visibility
from megatron_tape.position.encoding import NO_CACHE, TokenCache

B = 2
S = 19
H = 4
G = 2
D = 8
C = 32
WINDOW = 6
DOCUMENTS = torch.tensor([[0] * 7 + [1] * 2 + [2] * 10, [0] * 19])
PLAIN = {"selective_rope_silu": False, "selective_rope_gate": False}
CASES = {
    "default": {},
    "rank": {"selective_rope_rank": 5},
    "bias": {"selective_rope_bias": True},
    "plain": PLAIN,
    "rank_bias": {"selective_rope_rank": 3, "selective_rope_bias": True, **PLAIN},
    "narrow": {"selective_rope_conv_size": 1, "selective_rope_theta": 100.0},
    "wide": {"selective_rope_conv_size": 21, "selective_rope_bias": True},
}
NAMES = {
    "phase_weight": "weight",
    "phase_scale": "scalar",
    "phase_down": "down",
    "phase_up": "up",
    "conv": "conv",
    "step_bias": "bias",
    "phase_gate": "gate",
    "phase_gate_bias": "gate_bias",
}
"""The names of parameters in the reference."""


def encoding_with(**changes):
    return build(small_model(position_encoding="selective_rope", **changes))[0].encoding


def drawn_parameters(encoding):
    """Return parameters far from their initial values, as leaves."""
    declared = encoding.parameters(1).items()
    return {key: draw(*value.shape, seed=seed) for seed, (key, value) in enumerate(declared)}


def positions_in(documents):
    """Return each token's position in its document, (S, B)."""
    places = torch.arange(documents.shape[1])
    starts = torch.searchsorted(documents, documents)
    return (places - starts).T


def by_the_reference(encoding, hidden, parameters, q, k, v, documents, window):
    """Compute attention with the reference's angles, one matrix of scores for each head."""
    settings = encoding.settings
    p = {NAMES[key]: value for key, value in parameters.items()}
    p["conv"] = p["conv"].flatten(0, 1)
    a = angles(
        hidden.transpose(0, 1),
        p,
        G,
        D,
        settings.selective_rope_theta,
        settings.selective_rope_silu,
        documents,
    ).transpose(0, 1)
    # Query heads that share keys share angles.
    a_q = a.repeat_interleave(H // G, 2)
    q, k, v = rotate(q, a_q), rotate(k, a), v
    k, v = (x.repeat_interleave(H // G, 2) for x in (k, v))
    scores = torch.einsum("sbhd,tbhd->bhst", q, k) / D**0.5
    distance = torch.arange(S)[:, None] - torch.arange(S)
    seen = (documents[:, :, None] == documents[:, None]) & (distance >= 0) & (distance < window)
    p = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
    return torch.einsum("bhst,tbhd->sbhd", p, v)


@pytest.mark.parametrize("backend", ["naive", "tiled", "torch"])
@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_equal_the_reference(case, packed, window, backend):
    encoding = encoding_with(**CASES[case])
    parameters = drawn_parameters(encoding)
    hidden = draw(S, B, C, seed=50)
    q = draw(S, B, H, D, seed=51)
    k = draw(S, B, G, D, seed=52)
    v = draw(S, B, G, D, seed=53)
    documents = DOCUMENTS if packed else torch.zeros_like(DOCUMENTS)
    visibility = Visibility.of(documents)
    if window is not None:
        visibility = visibility.with_window(window)

    state = encoding.initial_state(positions_in(documents), torch.float64)
    inputs = encoding.position_inputs(1, parameters, state, hidden, NO_CACHE)
    found, _ = attention(q, k, v, **vars(inputs), visibility=visibility, backend=backend)
    expected = by_the_reference(encoding, hidden, parameters, q, k, v, documents, window or S)
    leaves = [hidden, *parameters.values(), q, k, v]
    assert_same(found, expected, leaves, atol=1e-9, rtol=1e-9)


def test_steps_of_zero_equal_nope():
    built, _ = build(small_model(position_encoding="selective_rope"))
    move_positions(built)
    nope, _ = build(small_model(position_encoding="nope"))
    ids = random_tokens()
    assert (built(ids) - nope(ids)).abs().max() > 1e-2
    with torch.no_grad():
        for layer in built.layers.values():
            layer.position.conv.zero_()
    assert torch.equal(built(ids), nope(ids))


def test_zero_phi_and_the_initial_bias_equal_rope():
    changes = {"selective_rope_bias": True, "selective_rope_gate": False}
    built, _ = build(small_model(position_encoding="selective_rope", **changes), randomize=False)
    rope, _ = build(small_model(position_encoding="rope", rope_theta=500000.0), randomize=False)
    with torch.no_grad():
        for layer in built.layers.values():
            layer.position.phase_scale.zero_()
    ids = random_tokens()
    torch.testing.assert_close(built(ids), rope(ids), atol=1e-5, rtol=1e-5)


class Recorded(TokenCache):
    """Keeps all tensors in memory, and can remove the last tokens."""

    def __init__(self):
        self.tensors = {}

    def append(self, name, new, before=0):
        if name in self.tensors:
            new = torch.cat([self.tensors[name], new])
        self.tensors[name] = new
        return new

    def cumsum(self, name, new):
        return self.append(name, new).cumsum(0, dtype=torch.float64)[-len(new) :]

    def crop(self, length):
        self.tensors = {name: tensor[:length] for name, tensor in self.tensors.items()}


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("packed", [False, True])
def test_phases_with_a_cache_equal_those_of_all_tokens(case, packed):
    encoding = encoding_with(**CASES[case])
    parameters = drawn_parameters(encoding)
    hidden = draw(S, B, C, seed=50)
    documents = DOCUMENTS if packed else torch.zeros_like(DOCUMENTS)
    state = encoding.initial_state(positions_in(documents), torch.float64)

    def phases(tokens, cache):
        return encoding.position_inputs(1, parameters, state[tokens], hidden[tokens], cache).z_TBGD

    expected = phases(slice(0, S), NO_CACHE)
    cache = Recorded()
    found = [phases(slice(0, 6), cache)]
    phases(slice(2, 9), cache)  # tokens that are removed
    cache.crop(6)
    found += [phases(slice(first, first + 1), cache) for first in range(6, 10)]
    found.append(phases(slice(10, S), cache))
    torch.testing.assert_close(torch.cat(found), expected, atol=1e-12, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_angles_are_exact_over_128k_tokens(dtype):
    """Differences of angles after 131,072 tokens equal those of the steps between, although both
    angles are large.
    """
    encoding = encoding_with(selective_rope_bias=True, selective_rope_gate=False)
    length = 2**17
    parameters = {key: x.detach().to(dtype) for key, x in drawn_parameters(encoding).items()}
    hidden = torch.randn(length, 1, C, generator=torch.Generator().manual_seed(5)).to(dtype)
    positions = torch.arange(length)[:, None].float()
    z = encoding.position_inputs(1, parameters, positions, hidden, NO_CACHE).z_TBGD
    assert z.dtype is dtype

    unit = encoding._unit_slices(hidden)
    phi = encoding._projected(parameters, unit)
    arguments = (positions, None, parameters["conv"], parameters["step_bias"], length)
    steps = encoding._steps(phi, *arguments)
    assert steps.dtype is torch.float32
    theta = encoding.frequencies()
    last = 200
    expected = (steps[-last:].double().cumsum(0) * theta).to(torch.float64)
    assert (steps.double().sum(0) * theta).abs().max() > 100_000

    def differences(z):
        re, im = z.double().chunk(2, -1)
        unit = torch.complex(re, im)
        return unit[-last:] * unit[-last - 1].conj()

    exact = torch.polar(torch.ones_like(expected), expected)
    # The rounding of two phases.
    tolerance = 4 * torch.finfo(dtype).eps
    assert (differences(z) - exact).abs().max() < tolerance
    summed_in_float32 = phases_of_angles((steps.cumsum(0) * theta).double(), torch.float32)
    assert (differences(summed_in_float32) - exact).abs().max() > 1e-3


def test_phases_of_angles_and_their_gradients_equal_the_definition():
    angles = (1000 * torch.rand(5, 2, 3, 4, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(lambda a: phases_of_angles(a, torch.float64), (angles,))
    expected = torch.cat([angles.cos(), angles.sin()], dim=-1)
    found = phases_of_angles(angles, torch.float64)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


def test_steps_start_small():
    """As in the authors' code, so that a new model is close to one without positions."""
    built, _ = build(
        small_model(position_encoding="selective_rope", hidden_size=512, init_std=0.02),
        randomize=False,
    )
    parameters = dict(built.layers["1"].position.named_parameters())
    lengths = parameters["phase_weight"].norm(dim=1)
    # A column has 256 elements, whose deviation is sqrt(2 / 64) for 64 frequencies.
    assert lengths.mean().item() == pytest.approx(math.sqrt(256 * 2 / 64), rel=0.05)
    hidden = torch.randn(64, 1, 512, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(64.0)[:, None]
    with torch.no_grad():
        phi = built.encoding._projected(parameters, built.encoding._unit_slices(hidden))
        steps = built.encoding._steps(phi, positions, None, parameters["conv"], None, 64)
    assert 0 < steps.std() < 0.02


def test_hidden_states_must_have_a_slice_for_each_group():
    changes = {"num_attention_heads": 3, "num_query_groups": 3, "kv_channels": 8}
    with pytest.raises(ConfigError) as refused:
        validate_model(small_model(position_encoding="selective_rope", **changes))
    assert refused.value.key == "model.hidden_size"
