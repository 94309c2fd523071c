"""Tests that the plain torch modules compute the same results and gradients as the reference."""

import re
import subprocess
import sys

import pytest
import torch

from megatron_tape import (
    PositionUpdate,
    TapeAttention,
    TapeLayer,
    TapeModel,
    initial_position_state,
    plot_position_states,
)
from megatron_tape.model import reference

IDS = torch.randint(0, 50, (2, 37), generator=torch.Generator().manual_seed(1))


def small_model(groups=2, trained=True, head_dim=8, **settings):
    """Return a model of three layers. `trained` makes attention uneven, and the position matrices
    nonzero.
    """
    torch.manual_seed(0)
    model = TapeModel(50, 4 * head_dim, 3, 4, groups, ffn_hidden_size=48, **settings)
    for weight in model.parameters():
        if trained and weight.dim() == 2:
            torch.nn.init.normal_(weight, std=(4 * head_dim) ** -0.5)
    return model


def reference_of(model, groups=2, positions=None, **settings):
    config = reference.ReferenceConfig(num_attention_heads=4, num_query_groups=groups, **settings)
    weights = {
        name: weight.detach().clone().requires_grad_()
        for name, weight in model.state_dict().items()
    }
    return weights, reference.forward(weights, IDS, config, positions)


@pytest.mark.parametrize(
    "groups, gate_input, backend",
    [(2, "mlp", "auto"), (4, "attention", "auto"), (1, "mlp", "auto"), (2, "mlp", "triton")],
)
def test_logits_states_and_gradients_equal_the_reference(groups, gate_input, backend):
    head_dim = 32 if backend == "triton" else 8  # smallest that the kernel supports
    model = small_model(
        groups, head_dim=head_dim, gate_input=gate_input, rope_theta=500.0, backend=backend
    )
    weights, expected = reference_of(model, groups, gate_input=gate_input, rope_theta=500.0)
    output = model(IDS)
    torch.testing.assert_close(output.logits, expected["logits"], atol=1e-5, rtol=1e-5)
    for states, expected_states in (
        (output.hidden_states[1:], expected["hidden_states"]),
        (output.position_states[1:], expected["position_states"][:-1]),
    ):
        for state, expected_state in zip(states, expected_states, strict=True):
            torch.testing.assert_close(state, expected_state, atol=1e-5, rtol=1e-5)
    direction = torch.randn(output.logits.shape, generator=torch.Generator().manual_seed(2))
    (output.logits * direction).sum().backward()
    (expected["logits"] * direction).sum().backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    assert gradients.keys() == weights.keys()
    for name, gradient in gradients.items():
        scale = weights[name].grad.abs().max()
        torch.testing.assert_close(
            gradient / scale, weights[name].grad / scale, atol=1e-5, rtol=0, msg=name
        )


def test_a_new_model_equals_rope():
    model = small_model(trained=False)
    weights = {
        name: weight for name, weight in model.state_dict().items() if ".position." not in name
    }
    rope = reference.forward(
        weights, IDS, reference.ReferenceConfig(num_attention_heads=4, num_query_groups=2)
    )
    output = model(IDS)
    torch.testing.assert_close(output.logits, rope["logits"], atol=1e-5, rtol=1e-5)
    for state in output.position_states:
        torch.testing.assert_close(state, output.position_states[0], atol=0, rtol=0)


def test_shifting_all_positions_changes_no_logit_but_changing_their_order_does():
    model = small_model()
    positions = torch.arange(37)
    expected = model(IDS).logits
    torch.testing.assert_close(model(IDS, positions + 100).logits, expected, atol=1e-4, rtol=1e-4)
    assert (model(IDS, positions.flip(0)).logits - expected).abs().max() > 1e-2


def test_positions_of_every_sequence_equal_the_reference():
    model = small_model()
    positions = torch.randint(0, 99, (2, 37), generator=torch.Generator().manual_seed(3))
    _, expected = reference_of(model, positions=positions)
    torch.testing.assert_close(
        model(IDS, positions).logits, expected["logits"], atol=1e-5, rtol=1e-5
    )


def test_the_state_stays_in_fp32_if_the_layer_computes_in_bf16():
    model = small_model()
    exact = model(IDS).logits
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = model(IDS)
    under_autocast.logits.float().sum().backward()
    in_bf16 = model.bfloat16()(IDS)
    for output in (under_autocast, in_bf16):
        assert {state.dtype for state in output.position_states} == {torch.float32}
        assert output.logits.dtype == torch.bfloat16
        assert (output.logits.float() - exact).abs().max() < 0.05 * exact.abs().max()


def test_a_layer_equals_the_sequence_of_its_modules():
    torch.manual_seed(0)
    x = torch.randn(2, 9, 32)
    z = initial_position_state(torch.arange(9), 2, 8)
    assert z.shape == (1, 9, 2, 8)
    layer = TapeLayer(32, 4, 2, gate_input="attention")
    torch.nn.init.normal_(layer.position.token_mixing.weight)
    attention = TapeAttention(32, 4, 2)
    update = PositionUpdate(32, 4, 2)
    attention.load_state_dict(layer.self_attn.state_dict())
    update.load_state_dict(layer.position.state_dict())
    output, averaged = attention(layer.input_layernorm(x), z)
    assert output.shape == (2, 9, 32) and averaged.shape == (2, 9, 4, 8)
    _, expected = layer(x, z)
    assert expected.shape == (2, 9, 2, 8)
    torch.testing.assert_close(update(z, averaged, output), expected)


def test_inputs_of_another_shape_or_dtype_are_refused_with_what_is_expected():
    model = small_model()
    x = torch.randn(2, 9, 32)
    z = initial_position_state(torch.arange(9), 2, 8)
    attention = TapeAttention(32, 4, 2)
    update = PositionUpdate(32, 4, 2)
    u = torch.randn(2, 9, 4, 8)
    for call, words in (
        (lambda: model(IDS[0]), "input_ids has the shape (37,); expected (B, S)"),
        (
            lambda: model(IDS.float()),
            "input_ids has the dtype torch.float32; expected torch.int64 or torch.int32",
        ),
        (lambda: model(IDS + 13), "; expected ids of at least 0 and below vocab_size 50"),
        (lambda: model(IDS, torch.arange(36)), "positions has the shape (36,); expected (37)"),
        (
            lambda: model(IDS, torch.zeros(3, 37)),
            "positions has the shape (3, 37); expected (2, 37)",
        ),
        (lambda: attention(x[0], z), "hidden_states has the shape (9, 32); expected (B, S, 32)"),
        (
            lambda: attention(x, z[:, 1:]),
            "position_state has the shape (1, 8, 2, 8); expected (1, 9, 2, 8)",
        ),
        (
            lambda: update(z, u[:, :, 1:], x),
            "averaged has the shape (2, 9, 3, 8); expected (B, S, 4, D)",
        ),
        (
            lambda: update(z[0], u, x),
            "position_state has the shape (9, 2, 8); expected (2, 9, 2, 8)",
        ),
        (lambda: update(z, u, x[:1]), "gate_input has the shape (1, 9, 32); expected (2, 9, 32)"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            call()


@pytest.mark.parametrize("sizes", [(32, 3, 3), (36, 4, 4), (32, 4, 3)])
def test_sizes_that_do_not_fit_are_refused(sizes):
    with pytest.raises(ValueError, match=f"num_attention_heads {sizes[1]}"):
        TapeAttention(*sizes)


def test_the_plot_shows_the_distance_from_rope_of_every_layer_but_the_first():
    states = small_model()(IDS).position_states
    figure = plot_position_states(states, tokens=[str(token) for token in IDS[0].tolist()])
    (image,) = figure.axes[0].images
    z_0 = states[0][0].flatten(1)
    z_2 = states[2][0].flatten(1)
    expected = (z_2 - z_0).norm(dim=1) / z_0.norm(dim=1)
    assert image.get_array().shape == (2, 37)
    torch.testing.assert_close(torch.tensor(image.get_array()[1]), expected)


def test_a_model_of_one_layer_has_no_updated_state_to_plot():
    states = TapeModel(50, 32, 1, 4)(IDS).position_states
    with pytest.raises(ValueError, match="at least two layers"):
        plot_position_states(states)


def test_importing_the_package_imports_no_torch():
    code = (
        "import sys, megatron_tape; print(megatron_tape.__version__); assert 'torch' not in"
        " sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
