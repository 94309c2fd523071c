"""Baseline encodings: equations, packed documents, recomputation and costs (golden files test them,
too).
"""

import pytest
import torch
from configurations import with_values
from models import INCREMENTS, SOME_LAYERS, build, move_positions, random_tokens, small_model
from plans import on_cpu, saved_bytes
from torch.nn.functional import linear
from toy_encodings import TOYS, registered

from megatron_tape.errors import ConfigError
from megatron_tape.model.validation import validate_model
from megatron_tape.ops.attention import attention
from megatron_tape.ops.backends import tiled
from megatron_tape.planning.flops import flops_per_token
from megatron_tape.planning.parameters import parameter_count
from megatron_tape.position import (
    BUILT_IN,
    MicroBatchSizes,
    encoding_of,
    register,
)
from megatron_tape.position.alibi import alibi_slopes
from megatron_tape.position.encoding import NO_CACHE
from megatron_tape.position.rope import RotaryPosition

BATCH = MicroBatchSizes(16, 16, 4, 1)
# Settings with which 16 tokens reach every branch.
CHANGES = {
    "alibi": {},
    "t5": {"t5_num_buckets": 6, "t5_max_distance": 9},
    "fire": {"fire_threshold": 3.0},
    "sincos": {},
    "xpos": {"xpos_scale_base": 8.0},
    "path": {"path_rank": 5},
    "cope": {"cope_max_position": 5},
    "fox": {},
    "randpe": {"randpe_range": 50},
    "repo": {"repo_width": 5},
    "path_fox": {"path_rank": 5, "fox_bias_start": 6.0},
    "wall": {"wall_bias_start": 1.0},
    "wall_with_all_parts": {
        "position_encoding": "wall",
        "wall_bias_start": 0.0,
        "wall_scalar_gate": True,
        "wall_sink": True,
    },
    "selective_rope": {"selective_rope_bias": True},
    "selective_rope_fox": {"selective_rope_rank": 5, "fox_bias_start": 6.0},
}


def model_of(name, **changes):
    return small_model(**({"position_encoding": name} | CHANGES.get(name, {}) | changes))


def built_and_moved(name, **settings):
    return move_positions(build(model_of(name, **settings.pop("changes", {})), **settings)[0])


def whole_bias(built, layer=1, tokens=40):
    """Return the bias of every pair, (H, S, S), and the layer's parameters."""
    position = built.layers[str(layer)].position
    state = built.encoding.initial_state(torch.arange(tokens)[:, None], torch.float32)
    with torch.no_grad():
        bias = position.enter(state, torch.zeros(tokens, 1, 32))[1].bias
        assert torch.equal(
            bias.of(slice(9, 30), slice(4, 17)),
            bias.of(slice(0, tokens), slice(0, tokens))[:, :, 9:30, 4:17],
        )
        return bias.of(slice(0, tokens), slice(0, tokens))[0], dict(position.named_parameters())


def test_alibi_uses_the_papers_slopes():
    assert alibi_slopes(8) == [2.0**-h for h in range(1, 9)]
    assert alibi_slopes(12)[8:] == pytest.approx([2 ** (-0.5 * h) for h in (1, 3, 5, 7)])
    bias, _ = whole_bias(built_and_moved("alibi"))
    assert bias[:, 20, 13].tolist() == pytest.approx([-7 * slope for slope in alibi_slopes(4)])


def test_t5_has_the_buckets_of_transformers():
    from transformers.models.t5.modeling_t5 import T5Attention

    built = built_and_moved("t5")
    bias, parameters = whole_bias(built)
    at = torch.arange(40)
    for buckets, farthest in ((6, 9), (32, 128), (2, 4), (7, 30)):
        model = model_of("t5", t5_num_buckets=buckets, t5_max_distance=farthest)
        expected = T5Attention._relative_position_bucket(
            -torch.arange(300), False, buckets, farthest
        )
        assert torch.equal(encoding_of(model).buckets(torch.arange(300)), expected)
    expected = T5Attention._relative_position_bucket(at - at[:, None], False, 6, 9)
    table = parameters["table"].detach()
    torch.testing.assert_close(
        bias.tril(),
        table[expected].permute(2, 0, 1).tril(),
    )


def test_fire_equals_the_papers_equation():
    bias, w = whole_bias(built_and_moved("fire"))
    at = torch.arange(40.0)
    c = w["log_scale"].abs()
    threshold = (w["threshold_scale"] * 3.0).abs()
    assert 0 < threshold < 20
    ratio = torch.log(c * (at[:, None] - at).clamp(min=0) + 1) / torch.log(
        c * at[:, None].clamp(min=threshold) + 1
    )
    expected = linear(
        torch.relu(ratio[..., None] * w["up_weight"] + w["up_bias"]), w["down_weight"]
    )
    torch.testing.assert_close(
        bias.tril(), expected.detach().permute(2, 0, 1).tril(), atol=1e-4, rtol=1e-4
    )


def test_sincos_only_adds_sines_and_cosines_to_the_embedding():
    built = built_and_moved("sincos")
    added = built.encoding.embedding(torch.arange(16)[:, None], torch.float32)[:, 0]
    angles = torch.arange(16.0)[:, None] / 10000 ** (torch.arange(0, 32, 2) / 32)
    torch.testing.assert_close(
        added[:, 0::2],
        angles.sin(),
        atol=1e-6,
        rtol=0,
    )
    torch.testing.assert_close(
        added[:, 1::2],
        angles.cos(),
        atol=1e-6,
        rtol=0,
    )
    ids = random_tokens()
    assert (built(ids) - built(ids, positions=torch.arange(16) + 3)).abs().max() > 1e-3
    nope, _ = build(small_model(position_encoding="nope"))
    built.encoding.embedding = lambda positions, dtype: torch.zeros(16, 1, 32)
    assert torch.equal(built(ids), nope(ids))


def test_xpos_depends_only_on_distances():
    """Equation 12 of the paper, for one query and one key of ones."""
    built = built_and_moved("xpos")
    ids = random_tokens()
    shifted = built(ids, positions=torch.arange(16) + 5)
    torch.testing.assert_close(built(ids), shifted, atol=1e-4, rtol=1e-4)

    state = built.encoding.initial_state(torch.arange(16)[:, None], torch.float64)
    inputs = built.encoding.position_inputs(
        0,
        {},
        state,
        torch.zeros(16, 2, 32),
        NO_CACHE,
    )
    f = torch.arange(4, dtype=torch.float64)
    zeta = (2 * f / 8 + 0.4) / 1.4
    theta = 10000 ** (-2 * f / 8)
    distance = torch.arange(16)[:, None] - torch.arange(16)
    turned = zeta ** (distance[..., None] / 8.0) * (distance[..., None] * theta).cos()
    scores = 2 * turned.sum(-1) / 8**0.5
    expected = scores.masked_fill(distance < 0, float("-inf")).softmax(-1)[:, :8]
    ones = torch.ones(16, 1, 1, 8, dtype=torch.float64)
    v = torch.eye(16, 8, dtype=torch.float64)[:, None, None]
    for backend in ("tiled", "torch", "naive"):
        found, _ = attention(ones, ones, v, **vars(inputs), backend=backend)
        torch.testing.assert_close(
            found[:, 0, 0],
            expected,
            atol=1e-6,
            rtol=0,
        )


@pytest.mark.parametrize("name", [encoding.name for encoding in BUILT_IN])
@pytest.mark.parametrize("window", [None, 4])
def test_packed_documents_equal_separate_sequences(name, window):
    built = built_and_moved(name, changes={"sliding_window": window}, recompute="full")
    ids = random_tokens(2)
    packed = built(
        ids,
        documents=torch.tensor([[0] * 5 + [1] * 11, [0] * 16]),
    )
    for rows, columns in (
        (slice(0, 1), slice(0, 5)),
        (slice(0, 1), slice(5, 16)),
        (slice(1, 2), slice(0, 16)),
    ):
        torch.testing.assert_close(
            packed[rows, columns], built(ids[rows, columns]), atol=1e-4, rtol=1e-4
        )
    assert (built(ids) - packed)[0, 5:].abs().max() > 1e-3


def test_an_encoding_that_computes_from_positions_must_say_whether_they_restart_in_documents():
    class Moved(RotaryPosition):
        name = "moved"

        def embedding(self, positions_sB, dtype):
            return positions_sB

    with pytest.raises(ValueError, match="defines embedding, but not restarts_in_documents"):
        register(Moved)
    Moved.restarts_in_documents = True
    with registered():
        assert register(Moved) is Moved


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("window", [None, 33])
def test_gradients_do_not_depend_on_tiling_or_recomputation(name, window, monkeypatch):
    monkeypatch.setattr(tiled, "QUERIES", 24)
    monkeypatch.setattr(tiled, "KEYS", 40)
    ids = random_tokens(1, 90)
    layers = {"num_layers": 2}
    documents = None
    if window is not None:
        layers |= {"sliding_window": window, "full_attention_every": 2}
        documents = (torch.arange(90) >= 37).long()[None]
    gradients = []
    for backend, recompute in (
        ("tiled", "none"),
        ("tiled", "full"),
        ("tiled", "selective"),
        ("naive", "none"),
    ):
        changes = {"attention_backend": backend, "seq_length": 90} | layers
        built = built_and_moved(name, changes=changes, recompute=recompute, dtype=torch.float64)
        built(ids, ids.roll(-1, 1), documents=documents).backward()
        gradients.append({key: parameter.grad for key, parameter in built.named_parameters()})
    found, recomputed, selected, naive = gradients
    for key, expected in naive.items():
        assert torch.equal(found[key], recomputed[key]), key
        assert torch.equal(found[key], selected[key]), key
        assert expected.norm() > 0 and (found[key] - expected).norm() <= 1e-4 * expected.norm(), key


OTHERS = {
    name: {"attention_backend": "torch"} | changes
    for name, changes in (INCREMENTS | SOME_LAYERS).items()
}
OTHERS |= {name: {"position_encoding": name} for name in TOYS}


@pytest.mark.parametrize("case", [*CHANGES, *OTHERS])
def test_costs_match_the_built_model(case):
    with registered():
        if case in CHANGES:
            model = model_of(case)
        else:
            model = small_model(**OTHERS[case])
        model = with_values(model, seq_length=32)
        for precision, recompute in (("fp32", "none"), ("bf16", "none"), ("fp32", "full")):
            dtype = torch.float32 if precision == "fp32" else torch.bfloat16
            built, _ = build(model, recompute=recompute, dtype=dtype)
            assert on_cpu(model, 2, precision, recompute) == pytest.approx(
                saved_bytes(built, model), rel=0.02
            )
        assert parameter_count(model) == sum(parameter.numel() for parameter in built.parameters())
        added = sum(
            encoding_of(model).costs(layer, BATCH).multiply_adds
            for layer in range(model.num_layers)
        )
        assert (
            flops_per_token(model)
            == flops_per_token(with_values(model, position_encoding="nope")) + 6 * added
        )


@pytest.mark.parametrize(
    "name, changes, key",
    [
        ("t5", {"t5_num_buckets": 1}, "position.t5_num_buckets"),
        ("t5", {"t5_max_distance": 16}, "position.t5_max_distance"),
        ("fire", {"fire_threshold": 0.0}, "position.fire_threshold"),
        ("sincos", {"hidden_size": 33, "kv_channels": 8}, "hidden_size"),
        ("randpe", {"randpe_range": 15}, "position.randpe_range"),
        ("repo", {"repo_first_layer": 3}, "position.repo_first_layer"),
        ("xpos", {"seq_length": 10**6}, "position.xpos_scale_base"),
        ("fox", {"fox_bias_start": float("nan")}, "position.fox_bias_start"),
        ("path", {"attention_backend": "torch"}, "attention_backend"),
    ],
)
def test_invalid_settings_are_refused(name, changes, key):
    with pytest.raises(ConfigError) as refused:
        validate_model(small_model(position_encoding=name, **changes))
    assert refused.value.key == f"model.{key}"
