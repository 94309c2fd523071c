"""Tests of the Megatron-core model in one process against the reference and the released code."""

import math

import pytest
import torch
import torch.nn.functional as F
from models import (
    INCREMENTS,
    LLAMA3,
    SOME_LAYERS,
    WINDOWS,
    YARN,
    build,
    random_tokens,
    reference_config,
    released_model,
    small_model,
    whole_weights,
)

from megatron_tape.model import layers, reference
from megatron_tape.model.shapes import hugging_face_shapes, parameter_shapes
from megatron_tape.model.weights import from_megatron, load_weights
from megatron_tape.planning.parameters import parameter_count
from megatron_tape.position import BUILT_IN

VARIANTS = {
    "plain": {},
    "gate_from_attention": {"gate_input": "attention"},
    "per_head": {"num_query_groups": 4, "token_mixing": "per_head"},
    "scaled": {"rope_scaling_factor": 2.0, "rope_theta": 500.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn_rope": YARN
    | {"position_encoding": "rope", "rope_attention_factor": 1.3, "rope_truncate": False},
    "tied": {"tie_embeddings": True},
    "biased": {"qkv_bias": True},
    "qk_norm_wide_heads": {"qk_norm": True, "kv_channels": 12},
    "biased_qk_norm_rope": {
        "position_encoding": "rope",
        "qkv_bias": True,
        "qk_norm": True,
        "num_query_groups": 1,
    },
    "rope": {"position_encoding": "rope"},
    "gated_output_wide_heads": {"attention_output_gate": True, "kv_channels": 12},
}
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 11, [0] * 9 + [1] * 7])
BASELINES = ["rope", "nope", "yarn", "alibi", "t5rb", "fire", "sincos", "xpos"]


@pytest.mark.parametrize(
    "name, token_mixing",
    [(name, mixing) for name in ("adape", "adape_interp") for mixing in ("full", "per_head")]
    + [(name, "full") for name in BASELINES],
)
def test_logits_and_gradients_equal_the_released_code(name, token_mixing):
    """Computes in float64, so that only the released code rounds; the next test bounds our rounding
    in float32.
    """
    model, built, weights, gradients, outputs = released_model(
        name, torch.float64, token_mixing=token_mixing
    )
    weights = {key: value.requires_grad_() for key, value in weights.items()}
    load_weights(built, reference.from_released(weights), model, 0, 1)
    ids = outputs["input_ids"]
    logits = built(ids)
    torch.testing.assert_close(
        logits,
        outputs["logits"].double(),
        atol=1e-5,
        rtol=0,
    )
    F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    checked = 0
    renamed = reference.from_released(gradients)
    for key, parameter in built.named_parameters():
        for weight_name, gradient in from_megatron(key, parameter.grad, model).items():
            if weight_name.endswith("position.token_mixing.weight"):
                released = gradients[
                    weight_name.replace("position.token_mixing", "post_attention_linear")
                ]
                gradient = gradient.diag()
                released = released[:, 0]
            else:
                released = renamed[weight_name]
            if name in BASELINES and weight_name == "model.embed_tokens.weight":
                gradient = gradient.index_fill(
                    0, torch.tensor([63]), 0.0
                )  # the released code's padding token gets no gradient
            assert (gradient - released).norm() <= 1e-5 * released.norm(), weight_name
            checked += 1
    assert checked == len(renamed)


@pytest.mark.parametrize("name", ["adape", "adape_interp", "rope"])
def test_rounding_is_at_most_twice_that_of_plain_torch(name):
    model, built, weights, _, outputs = released_model(name)
    plain = reference.from_released(weights)
    load_weights(built, plain, model, 0, 1)
    ids = outputs["input_ids"]
    exact = reference.forward(
        {k: v.double() for k, v in plain.items()}, ids, reference_config(model)
    )["logits"]
    ours = (built(ids) - exact).square().mean().sqrt()
    plain_logits = reference.forward(plain, ids, reference_config(model))["logits"]
    theirs = (plain_logits - exact).square().mean().sqrt()
    assert ours <= 2 * theirs


@pytest.mark.parametrize(
    "variant, recompute",
    [(variant, "none") for variant in (*VARIANTS, *INCREMENTS, *SOME_LAYERS, *WINDOWS)]
    + [(variant, "full") for variant in ("rope_signed", "both_yarn", *SOME_LAYERS)]
    + [(variant, recompute) for variant in WINDOWS for recompute in ("full", "selective")],
)
def test_logits_gradients_and_parameter_count_equal_the_reference(variant, recompute):
    model = small_model(**(VARIANTS | INCREMENTS | SOME_LAYERS | WINDOWS)[variant])
    ids = random_tokens()
    built, _ = build(model, dtype=torch.float64, recompute=recompute)
    weights = {
        key: value.clone().requires_grad_() for key, value in whole_weights(built, model).items()
    }
    # Frequencies are in float32, and the reference rounds differently: yarn's interpolation, and
    # the phases of layers with a window that have frequencies of their own.
    tolerance = 1e-11
    if variant == "yarn_rope" or "full_layers" in variant or "local_theta" in variant:
        tolerance = 3e-5
    expected = reference.forward(weights, ids, reference_config(model), documents=DOCUMENTS)[
        "logits"
    ]
    logits = built(ids, documents=DOCUMENTS)
    torch.testing.assert_close(logits, expected, atol=tolerance, rtol=tolerance)
    direction = torch.randn_like(logits)
    (logits * direction).sum().backward()
    (expected * direction).sum().backward()
    for key, parameter in built.named_parameters():
        for weight_name, gradient in from_megatron(key, parameter.grad, model).items():
            expected_gradient = weights[weight_name].grad
            if (
                weight_name.endswith("token_mixing.weight")
                and model.position.token_mixing == "per_head"
            ):
                gradient = gradient.diag()
                expected_gradient = expected_gradient.diag()
            assert (gradient - expected_gradient).norm() <= tolerance * expected_gradient.norm(), (
                weight_name
            )
            assert gradient.norm() > 0, weight_name
    with torch.no_grad():
        evaluated = reference.forward(weights, ids, reference_config(model))["logits"]
        torch.testing.assert_close(
            built.eval()(ids),
            evaluated,
            atol=tolerance,
            rtol=tolerance,
        )
    assert sum(p.numel() for p in built.parameters()) == parameter_count(model)


@pytest.mark.parametrize("variant", VARIANTS)
def test_whole_shapes_match_the_converted_megatron_weights(variant):
    model = small_model(**VARIANTS[variant])
    parts = {}
    for name, shape in parameter_shapes(model).items():
        parts |= from_megatron(name, torch.empty(shape, device="meta"), model)
    assert hugging_face_shapes(model) == {
        name: tuple(tensor.shape) for name, tensor in parts.items()
    }


@pytest.mark.parametrize("variant", ["plain", "scaled", "llama3", "yarn", "tape_swan"])
def test_a_new_tape_model_equals_the_rope_model_of_the_same_seed(variant):
    ids = random_tokens()
    changes = (VARIANTS | WINDOWS)[variant]
    tape, _ = build(small_model(attention_backend="torch", **changes), randomize=False)
    rope, _ = build(
        small_model(position_encoding="rope", attention_backend="torch", **changes), randomize=False
    )
    assert torch.equal(tape(ids), rope(ids))
    nope, _ = build(small_model(position_encoding="nope"), randomize=False)
    assert (nope(ids) - rope(ids)).abs().max() > 1e-4


@pytest.mark.parametrize("variant", ["plain", "yarn", *WINDOWS])
def test_shifting_positions_changes_no_logit(variant):
    ids = random_tokens()
    built, _ = build(small_model(**(VARIANTS | WINDOWS)[variant]))
    torch.testing.assert_close(
        built(ids), built(ids, positions=torch.arange(16) + 500), atol=2e-4, rtol=1e-3
    )
    assert (built(ids) - built(ids, positions=torch.arange(16) * 2)).abs().max() > 1e-2


@pytest.mark.parametrize("encoding", ["rope", "tape"])
@pytest.mark.parametrize("same", [{"rope_scaling_layers": "full"}, {"rope_local_theta": 1e4}])
def test_equal_frequencies_in_layers_with_a_window_change_no_bit(encoding, same):
    """Until an extension scales the full layers, all layers have the same frequencies."""
    ids = random_tokens()
    changes = WINDOWS["tape_window"] | {"position_encoding": encoding}
    expected, _ = build(small_model(**changes))
    built, _ = build(small_model(**changes, **same))
    assert torch.equal(built(ids), expected(ids))
    assert built.encoding.exports_to == expected.encoding.exports_to


@pytest.mark.parametrize("encoding", [encoding.name for encoding in BUILT_IN])
def test_a_window_of_all_tokens_gives_the_bits_of_no_window(encoding):
    ids = random_tokens()
    gradients = []
    for window in (None, 16, 40):
        model = small_model(position_encoding=encoding, sliding_window=window)
        built, _ = build(model)
        logits = built(ids, documents=DOCUMENTS)
        logits.square().sum().backward()
        gradients.append([logits, *(parameter.grad for parameter in built.parameters())])
    for with_window in gradients[1:]:
        assert all(map(torch.equal, with_window, gradients[0]))

    # A shorter window does change them.
    shorter, _ = build(small_model(position_encoding=encoding, sliding_window=15))
    whole, _ = build(small_model(position_encoding=encoding))
    assert not torch.equal(shorter(ids), whole(ids))


def test_the_loss_is_cross_entropy_per_token_averaged_or_weighted():
    ids = random_tokens(seed=1)
    labels = random_tokens(seed=2)
    built, _ = build(small_model())
    losses = F.cross_entropy(built(ids).transpose(1, 2), labels, reduction="none")
    torch.testing.assert_close(built(ids, labels, by_token=True), losses)
    torch.testing.assert_close(built(ids, labels), losses.mean())
    weights = (
        (torch.arange(16) % 3 == 0)
        .float()
        .expand(
            2,
            -1,
        )
    )
    torch.testing.assert_close(
        built(ids, labels, weights / weights.sum()),
        losses[:, ::3].mean(),
    )


def norms_of(built):
    """Return the root mean squares of the states and of their updates, by layer and group."""
    for update in built.updating_encodings():
        update.record_norms = True
    built(random_tokens())
    sums = torch.stack([update.norms for update in built.updating_encodings()])
    return (
        (sums[:, :2] / sums[:, 2:])
        .sqrt()
        .transpose(
            0,
            1,
        )
    )


@pytest.mark.parametrize(
    "variant, factor",
    [("plain", 1.0), ("yarn", 0.1 * math.log(4) + 1)],
)
def test_position_norms_equal_rope_at_first_and_include_updates_later(variant, factor):
    model = small_model(**VARIANTS[variant])
    states, updates = norms_of(build(model, randomize=False)[0])
    assert states.shape == (2, 2)
    assert not updates.any()
    torch.testing.assert_close(
        states,
        torch.full_like(states, factor),
        atol=1e-5,
        rtol=0,
    )
    assert (norms_of(build(model)[0])[1] > 0).all()


@pytest.mark.parametrize("encoding, learned", [("rope", False), ("tape", True)])
def test_fixed_phases_need_no_gradient_under_activation_checkpointing(
    monkeypatch, encoding, learned
):
    requires_grad = []
    enter = layers.LayerEncoding.enter

    def recorded(self, state, hidden_states):
        state, inputs = enter(self, state, hidden_states)
        requires_grad.append(inputs.z_TBGD.requires_grad)
        return state, inputs

    monkeypatch.setattr(layers.LayerEncoding, "enter", recorded)
    built, _ = build(small_model(position_encoding=encoding), recompute="full")
    built(random_tokens(), random_tokens(seed=2)).backward()
    assert any(requires_grad) is learned
    assert len(requires_grad) == 6
