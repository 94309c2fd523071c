"""The encodings that TAPE is compared with, beside the golden files: their equations, packs, recomputation, costs."""

import pytest
import torch
from models import build, random_tokens, small_model
from test_costs import counted, on_cpu
from torch.nn.functional import linear

from megatron_tape.config.checks import validate_model
from megatron_tape.costs import flops_per_token
from megatron_tape.errors import ConfigError
from megatron_tape.parameters import parameter_count
from megatron_tape.position import encoding_of
from megatron_tape.position.alibi import alibi_slopes

# With settings that make each of their branches count in 16 tokens.
CHANGES = {
    "alibi": {},
    "t5": {"t5_num_buckets": 6, "t5_max_distance": 9},
    "fire": {"fire_threshold": 3.0},
}


def model_of(name, **changes):
    return small_model(position_encoding=name, **(CHANGES[name] | changes))


def built_and_moved(name, **settings):
    """Build a model whose position parameters are far from their start."""
    built, _ = build(model_of(name, **settings.pop("changes", {})), **settings)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for key, parameter in built.named_parameters():
            if ".position." in key:
                parameter.add_(torch.randn(parameter.shape, generator=generator))
    return built


def whole_bias(built, layer=1, tokens=40):
    """The bias of every pair, (H, S, S), and the layer's parameters."""
    position = built.gpt.decoder.layers[layer].position
    state = built.encoding.initial_state(torch.arange(tokens)[:, None], torch.float32)
    with torch.no_grad():
        bias = position.positions(state, torch.zeros(tokens, 1, 32)).bias
        assert torch.equal(
            bias.of(slice(9, 30), slice(4, 17)), bias.of(slice(0, tokens), slice(0, tokens))[:, :, 9:30, 4:17]
        )
        return bias.of(slice(0, tokens), slice(0, tokens))[0], dict(position.named_parameters())


def causal(bias):
    return bias.tril()


def test_alibi_lowers_scores_by_the_papers_slopes():
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
        expected = T5Attention._relative_position_bucket(-torch.arange(300), False, buckets, farthest)
        assert torch.equal(encoding_of(model).buckets(torch.arange(300)), expected)
    expected = T5Attention._relative_position_bucket(at - at[:, None], False, 6, 9)
    table = parameters["table"].detach()
    torch.testing.assert_close(causal(bias), causal(table[expected].permute(2, 0, 1)))


def test_fire_is_the_papers_equation():
    bias, w = whole_bias(built_and_moved("fire"))
    at = torch.arange(40.0)
    c, threshold = w["log_scale"].abs(), (w["threshold_scale"] * 3.0).abs()
    assert 0 < threshold < 20
    ratio = torch.log(c * (at[:, None] - at).clamp(min=0) + 1) / torch.log(c * at[:, None].clamp(min=threshold) + 1)
    expected = linear(torch.relu(ratio[..., None] * w["up_weight"] + w["up_bias"]), w["down_weight"])
    torch.testing.assert_close(causal(bias), causal(expected.detach().permute(2, 0, 1)), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("name", CHANGES)
def test_documents_of_a_pack_are_as_if_alone(name, recompute):
    built = built_and_moved(name, recompute=recompute)
    ids = random_tokens(2)
    packed = built(ids, documents=torch.tensor([[0] * 5 + [1] * 11, [0] * 16]))
    for rows, columns in ((slice(0, 1), slice(0, 5)), (slice(0, 1), slice(5, 16)), (slice(1, 2), slice(0, 16))):
        torch.testing.assert_close(packed[rows, columns], built(ids[rows, columns]), atol=1e-4, rtol=1e-4)
    assert (built(ids) - packed)[0, 5:].abs().max() > 1e-3


@pytest.mark.parametrize("name", CHANGES)
def test_tiles_recomputation_and_whole_scores_give_the_same_gradients(name):
    """Across the edges of the tiles of 128 queries and 256 keys."""
    ids, gradients, sizes = random_tokens(1, 300), [], {"num_layers": 2, "seq_length": 300}
    for backend, recompute in (("tiled", "none"), ("tiled", "full"), ("naive", "none")):
        built = built_and_moved(name, changes={"attention_backend": backend, **sizes}, recompute=recompute)
        built(ids, ids.roll(-1, 1)).backward()
        gradients.append({key: parameter.grad for key, parameter in built.named_parameters()})
    tiled, recomputed, naive = gradients
    for key, expected in naive.items():
        assert torch.equal(tiled[key], recomputed[key]), key
        assert expected.norm() > 0 and (tiled[key] - expected).norm() <= 1e-4 * expected.norm(), key


@pytest.mark.parametrize("name", CHANGES)
def test_costs_are_those_of_the_model(name):
    model, nope = model_of(name), small_model(position_encoding="nope")
    for recompute in ("none", "full"):
        built, _ = build(model, recompute=recompute)
        assert on_cpu(model, 2, "fp32", recompute) == pytest.approx(counted(built, model), rel=0.02)
    assert parameter_count(model) == sum(parameter.numel() for parameter in built.parameters())
    added = sum(encoding_of(model).multiply_adds(layer) for layer in range(model.num_layers))
    assert added > 0 and flops_per_token(model) == flops_per_token(nope) + 6 * added


@pytest.mark.parametrize(
    "name, changes, refusal",
    [
        ("t5", {"t5_num_buckets": 1}, "t5_num_buckets is 1"),
        ("t5", {"t5_max_distance": 3}, "t5_max_distance 3"),
        ("fire", {"fire_mlp_size": 0}, "fire_mlp_size is 0"),
        ("fire", {"fire_threshold": 0.0}, "fire_threshold is 0.0"),
    ],
)
def test_settings_that_cannot_work_are_refused(name, changes, refusal):
    with pytest.raises(ConfigError, match=refusal):
        validate_model(model_of(name, **changes))
