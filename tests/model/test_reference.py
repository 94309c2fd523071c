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
    config, weights, gradients, rest = load(name)
    weights = {key: value.requires_grad_(value.is_floating_point()) for key, value in weights.items()}
    output = forward(from_released(weights), rest["input_ids"], reference_config(config))
    return config, weights, gradients, rest, output


@pytest.mark.parametrize("name", ["adape", "adape_interp", "rope"])
def test_logits_and_states_equal_the_released_code(name):
    config, _, _, rest, output = run_released(name)
    torch.testing.assert_close(output["logits"], rest["logits"], atol=1e-5, rtol=0)
    for layer in range(config["num_hidden_layers"]):
        if f"hidden_states.{layer}" in rest:
            torch.testing.assert_close(
                output["hidden_states"][layer], rest[f"hidden_states.{layer}"], atol=1e-5, rtol=1e-5
            )
    if name.startswith("adape"):
        for layer in range(config["num_hidden_layers"]):
            real, imaginary = output["position_states"][layer].transpose(1, 2).chunk(2, dim=-1)
            for half, key in ((real, "cos"), (imaginary, "sin")):
                released = rest[f"position_states.{layer}.{key}"]
                torch.testing.assert_close(torch.cat([half, half], dim=-1), released, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["adape", "adape_interp"])
def test_gradients_equal_the_released_code(name):
    _, weights, gradients, rest, output = run_released(name)
    logits = output["logits"][:, :-1].flatten(0, 1)
    loss = F.cross_entropy(logits, rest["input_ids"][:, 1:].flatten())
    torch.testing.assert_close(loss, rest["loss"], atol=1e-6, rtol=0)
    loss.backward()
    assert len(gradients) > 15
    for key, released in gradients.items():
        assert (weights[key].grad - released).norm() <= 1e-5 * released.norm(), key


def random_tape(heads=4, groups=2, head_dim=8, layers=3, width=5, vocabulary=31, seed=0):
    """Random weights in double precision, TAPE matrices far from zero."""
    generator = torch.Generator().manual_seed(seed)
    hidden = heads * head_dim

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5

    weights = {"model.embed_tokens.weight": draw(vocabulary, hidden), "lm_head.weight": draw(vocabulary, hidden)}
    weights["model.norm.weight"] = 1 + draw(hidden)
    for layer in range(layers):
        shapes = {
            "self_attn.q_proj.weight": (hidden, hidden),
            "self_attn.k_proj.weight": (groups * head_dim, hidden),
            "self_attn.v_proj.weight": (groups * head_dim, hidden),
            "self_attn.o_proj.weight": (hidden, hidden),
            "mlp.gate_proj.weight": (2 * hidden, hidden),
            "mlp.up_proj.weight": (2 * hidden, hidden),
            "mlp.down_proj.weight": (hidden, 2 * hidden),
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "position.token_mixing.weight": (groups, heads),
            "position.x_proj.weight": (width, hidden),
            "position.up_proj.weight": (width, groups),
            "position.down_proj.weight": (groups, width),
        }
        weights |= {f"model.layers.{layer}.{name}": draw(*shape) for name, shape in shapes.items()}
    return weights, ReferenceConfig(num_attention_heads=heads, num_query_groups=groups)


def tokens(batch=2, length=13, vocabulary=31):
    return torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(1))


def test_shifting_all_positions_changes_no_logit():
    weights, config = random_tape()
    ids = tokens()
    here = forward(weights, ids, config)["logits"]
    there = forward(weights, ids, config, positions=torch.arange(ids.shape[1]) + 1000)["logits"]
    torch.testing.assert_close(here, there, atol=1e-4, rtol=0)  # the phases themselves are computed in float32
    moved = forward(weights, ids, config, positions=torch.arange(ids.shape[1]) * 2)["logits"]
    assert (here - moved).abs().max() > 1e-2


@pytest.mark.parametrize("zero", ["down_proj", "up_proj"])
def test_zero_tape_matrices_make_it_rope(zero):
    weights, config = random_tape()
    for name in weights:
        if name.endswith(("token_mixing.weight", f"position.{zero}.weight")):
            weights[name] = torch.zeros_like(weights[name])
    rope = {name: value for name, value in weights.items() if ".position." not in name}
    assert torch.equal(forward(weights, tokens(), config)["logits"], forward(rope, tokens(), config)["logits"])
