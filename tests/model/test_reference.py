import pytest
import torch
import torch.nn.functional as F
from released import load

from megatron_tape.model.reference import ReferenceConfig, forward, from_released


def reference_config(config, **changes):
    return ReferenceConfig(
        num_attention_heads=config["num_attention_heads"],
        num_query_groups=config["num_key_value_heads"],
        rope_theta=config["rope_theta"],
        rope_scaling_factor=(config["rope_scaling"] or {}).get("factor", 1.0),
        norm_epsilon=config["rms_norm_eps"],
        **changes,
    )


def run_released(name):
    config, weights, gradients, recorded = load(name)
    weights = {
        key: value.requires_grad_(value.is_floating_point()) for key, value in weights.items()
    }
    output = forward(from_released(weights), recorded["input_ids"], reference_config(config))
    return config, weights, gradients, recorded, output


@pytest.mark.parametrize("name", ["adape", "adape_interp", "rope"])
def test_logits_and_states_equal_the_released_code(name):
    config, _, _, recorded, output = run_released(name)
    torch.testing.assert_close(output["logits"], recorded["logits"], atol=1e-5, rtol=0)
    for layer in range(config["num_hidden_layers"]):
        if f"hidden_states.{layer}" in recorded:
            torch.testing.assert_close(
                output["hidden_states"][layer],
                recorded[f"hidden_states.{layer}"],
                atol=1e-5,
                rtol=1e-5,
            )
    if name.startswith("adape"):
        for layer in range(config["num_hidden_layers"]):
            real, imaginary = (
                output["position_states"][layer]
                .transpose(1, 2)
                .chunk(
                    2,
                    dim=-1,
                )
            )
            for half, key in ((real, "cos"), (imaginary, "sin")):
                released = recorded[f"position_states.{layer}.{key}"]
                torch.testing.assert_close(
                    torch.cat([half, half], dim=-1), released, atol=1e-5, rtol=1e-5
                )


@pytest.mark.parametrize("name", ["adape", "adape_interp"])
def test_gradients_equal_the_released_code(name):
    _, weights, gradients, recorded, output = run_released(name)
    logits = output["logits"][:, :-1].flatten(0, 1)
    loss = F.cross_entropy(logits, recorded["input_ids"][:, 1:].flatten())
    torch.testing.assert_close(loss, recorded["loss"], atol=1e-6, rtol=0)
    loss.backward()
    assert len(gradients) > 15
    for key, released in gradients.items():
        assert (weights[key].grad - released).norm() <= 1e-5 * released.norm(), key
