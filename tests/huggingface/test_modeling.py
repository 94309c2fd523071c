"""TAPE's classes for transformers, compared with the reference, the released code and Llama."""

import pytest
import torch
from small_models import SMALL, build, tokens
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from megatron_tape.huggingface.modeling.configuration_tape import TapeConfig
from megatron_tape.huggingface.modeling.modeling_tape import TapeForCausalLM
from megatron_tape.model.reference import ReferenceConfig, forward


def reference_logits(model, input_ids, weights=None, **options):
    config = model.config
    rope = config.rope_parameters
    reference = ReferenceConfig(
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        rope_theta=rope["rope_theta"],
        rope_scaling_factor=rope.get("factor", 1.0),
        norm_epsilon=config.rms_norm_eps,
        gate_input=config.gate_input,
    )
    return forward(weights or dict(model.named_parameters()), input_ids, reference, **options)[
        "logits"
    ]


VARIANTS = {
    "mha": dict(num_key_value_heads=4),
    "gqa": {},
    "one_group": dict(num_key_value_heads=1),
    "gate_attention": dict(gate_input="attention"),
    "scaled": dict(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}),
    "tied": dict(tie_word_embeddings=True),
    "wide_heads": dict(head_dim=12),
}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_gradients_equal_the_reference(variant, attention):
    model = build(attn_implementation=attention, **VARIANTS[variant])
    input_ids = tokens()
    cotangent = torch.randn(*input_ids.shape, SMALL["vocab_size"])
    logits = model(input_ids).logits
    logits.mul(cotangent).sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    model.zero_grad()
    expected = reference_logits(model, input_ids)
    expected.mul(cotangent).sum().backward()
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 0, name
        scale = parameter.grad.abs().max().item()
        torch.testing.assert_close(
            gradients[name], parameter.grad, rtol=1e-4, atol=1e-5 * max(scale, 1.0)
        )


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_bf16_error_is_at_most_twice_that_of_the_reference(attention):
    model = build(attn_implementation=attention)
    input_ids = tokens(4, 63)
    exact = reference_logits(model, input_ids)
    rounded = {name: parameter.bfloat16() for name, parameter in model.named_parameters()}
    plain = (reference_logits(model, input_ids, rounded) - exact).abs().mean()
    assert (model.bfloat16()(input_ids).logits - exact).abs().mean() <= 2 * plain


def test_shifting_positions_changes_no_logit():
    model = build()
    input_ids = tokens()
    expected = model(input_ids).logits
    shifted = model(
        input_ids, position_ids=torch.arange(17)[None] + torch.tensor([[5], [100]])
    ).logits
    torch.testing.assert_close(shifted, expected, rtol=1e-4, atol=2e-5)


def test_loading_weights_without_tape_starts_as_rope(tmp_path):
    theirs = LlamaForCausalLM(LlamaConfig(**SMALL)).eval()
    theirs.save_pretrained(tmp_path)
    model = TapeForCausalLM.from_pretrained(tmp_path, config=TapeConfig(**SMALL))
    position = model.model.layers[0].position
    assert not position.token_mixing.weight.any()
    assert not position.down_proj.weight.any()
    assert position.x_proj.weight.std() > 0
    assert position.up_proj.weight.std() > 0
    torch.testing.assert_close(
        model(tokens()).logits, theirs(tokens()).logits, rtol=1e-5, atol=1e-5
    )


def test_phases_stay_in_float32(tmp_path):
    model = build(head_dim=16)
    exact = model.model.phases.inv_freq.clone()
    model.save_pretrained(tmp_path)
    for moved in (
        TapeForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16),
        model.bfloat16(),
    ):
        assert moved.dtype == torch.bfloat16
        assert torch.equal(moved.model.phases.inv_freq, exact)


def test_invalid_configurations_are_refused():
    nested = {"full_attention": {"rope_type": "linear", "factor": 2.0}}
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    for settings, named in (
        ({"gate_input": "both"}, "gate_input"),
        ({"sliding_window": 16}, "attend to all tokens"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "num_key_value_heads"),
        ({"rope_parameters": nested}, "full_attention"),
        ({"rope_parameters": dynamic}, "dynamic"),
    ):
        with pytest.raises(ValueError, match=named):
            TapeConfig(**settings)


def moved_state(directory, dtype, precision):
    """Return the change of a model's position state by small updates."""
    model = TapeForCausalLM.from_pretrained(
        directory, dtype=dtype, position_state_precision=precision
    ).eval()
    states = []
    for layer in model.model.layers[:-1]:
        layer.position.token_mixing.weight.data.mul_(0.001)
        layer.position.down_proj.weight.data.mul_(0.001)
        layer.position.register_forward_hook(lambda _module, _input, state: states.append(state))
    with torch.no_grad():
        model(torch.arange(3, 40)[None])
        start = model.model.phases(torch.arange(37)[None])[:, :, None]
    return states[-1].double() - (start if precision == "fp32" else start.to(dtype)).double()


def test_an_fp32_state_keeps_small_updates_in_a_bf16_model(exports):
    directory = exports["tape"].directory
    assert (
        AutoConfig.from_pretrained(directory, trust_remote_code=True).position_state_precision
        == "fp32"
    )
    exact = moved_state(directory, torch.float64, "bf16")
    fp32, bf16 = (
        moved_state(directory, torch.bfloat16, precision) for precision in ("fp32", "bf16")
    )
    assert (fp32 - exact).norm() < 0.1 * exact.norm()
    assert (bf16 - exact).norm() > 0.5 * exact.norm()


@pytest.mark.parametrize(
    "given",
    [dict(tp_plan="auto"), dict(distributed_config={"pp_size": 2})],
)
def test_transformers_parallelism_is_refused(exports, given):
    with pytest.raises(NotImplementedError, match="use device_map"):
        TapeForCausalLM.from_pretrained(exports["tape"].directory, **given)
