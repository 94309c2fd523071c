"""Positions: planted changes show up in the expected places, and all other values are exactly
zero.
"""

import numpy as np
import pytest
import torch
from evaluation.loss_cases import run, write_jsonl

from megatron_tape.evaluation.task import ModelInfo
from megatron_tape.evaluation.tasks import position_probes as probes
from megatron_tape.evaluation.tasks.position_states import PositionPictures, distances_of
from megatron_tape.huggingface.modeling.configuration_tape import TapeConfig
from megatron_tape.huggingface.modeling.modeling_tape import TapeForCausalLM

LAYERS = 5
HEADS = 4
GROUPS = 2
LENGTH = 32
SIZES = dict(
    vocab_size=256,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=GROUPS,
    max_position_embeddings=LENGTH,
    initializer_range=0.3,
)
PLANTED = 2


class Bytes:
    """A model under evaluation whose tokens are bytes."""

    bos = ()
    device = torch.device("cpu")

    def __init__(self):
        torch.manual_seed(0)
        self.model = TapeForCausalLM(TapeConfig(**SIZES)).eval()
        config = {**self.model.config.to_dict(), "model_type": "tape"}
        self.info = ModelInfo("model", 256, LENGTH, config, has_tokenizer=True)

    def encode(self, text):
        return list(text.encode())


@pytest.fixture(scope="module")
def models():
    """A model that equals RoPE, and one whose layer PLANTED alone changes head group 1 of the
    state.
    """
    made = {"rope-equal": Bytes(), "planted": Bytes()}
    with torch.no_grad():
        made["planted"].model.model.layers[PLANTED].position.token_mixing.weight[1] = 2.0
    return made


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    texts = ["".join(chr(97 + (i * i + j) % 26) for i in range(50)) for j in range(4)]
    return write_jsonl(tmp_path_factory.mktemp("data") / "texts.jsonl", ["too short", *texts])


@pytest.fixture(scope="module")
def results(models, data):
    """The entries of both models in `results.json`."""
    return {
        label: run(PositionPictures, model, data=data, documents=3, map_tokens=16)
        for label, model in models.items()
    }


def by_group(result, metric):
    return {score.group: score.value for score in result.scores if score.metric == metric}


def test_a_model_equal_to_rope_has_zero_distance_and_no_loss_change(results):
    result = results["rope-equal"]
    assert list(result.examples) == ["document/0", "document/1", "document/2", "maps"]
    assert set(by_group(result, "state_distance").values()) == {0.0}
    assert list(by_group(result, "loss_increase").values()) == [0.0] * 6
    assert np.all(np.array(result.details["maps"]["change"]) == 0)


def test_a_changed_matrix_affects_only_its_group_and_later_layers(results):
    details = results["planted"].details
    distance = np.array(details["distance"])
    assert distance.shape == (LAYERS, GROUPS)
    assert np.all(distance[PLANTED + 1 :, 1] > 0.5)
    distance[PLANTED + 1 :, 1] = 0
    assert np.all(distance == 0)
    change = np.array(details["maps"]["change"])
    assert np.all(change[PLANTED + 1 :, 2:] > 1e-3), "heads 2 and 3 read head group 1"
    change[PLANTED + 1 :, 2:] = 0
    assert change.shape == (LAYERS, HEADS)
    assert np.all(change == 0)


def test_ablating_a_layer_raises_the_loss_if_its_state_differs_from_rope(results):
    increases = by_group(results["planted"], "loss_increase")
    for layer in range(LAYERS):
        assert (abs(increases[f"layer {layer}"]) > 1e-5) == (layer > PLANTED)
    # With RoPE's phases in all layers the planted model is the other one.
    own = [by_group(result, "loss")[""] for result in results.values()]
    assert increases["all layers"] == pytest.approx(own[0] - own[1], abs=1e-6)


def test_hooks_do_not_change_the_model(models, data):
    model = models["planted"]
    tokens = torch.arange(LENGTH)[None]
    before = model.model(tokens).logits
    run(PositionPictures, model, data=data, documents=1)
    assert torch.equal(model.model(tokens).logits, before)
    assert model.model.config._attn_implementation == "sdpa"


def test_the_loss_is_that_of_transformers(models):
    model = models["planted"].model
    tokens = torch.randint(256, (1, LENGTH))
    expected = model(tokens, labels=tokens).loss.item()
    assert probes.losses(model, tokens).mean() == pytest.approx(expected, abs=1e-5)


def test_similarity_of_ropes_phases_is_the_known_sum(results):
    details = results["rope-equal"].details
    distances = details["distances"]
    assert distances == distances_of(LENGTH)
    assert (distances[0], distances[-1]) == (1, LENGTH - 1)
    D = SIZES["hidden_size"] // HEADS
    angles = 10000.0 ** (-torch.arange(0, D, 2) / D) * torch.tensor(distances)[:, None]
    expected = torch.polar(torch.ones_like(angles), angles).mean(1).abs().tolist()
    for layer in (0, -1):
        assert details["similarity"][layer] == pytest.approx(expected, abs=1e-5)


def test_pictures_show_both_models(results):
    pictures = {
        picture.name.removeprefix("positions-"): picture
        for picture in PositionPictures.draw(results)
    }
    assert list(pictures) == ["distance", "along", "similarity", "ablation", "attention"]
    assert "planted: at most" in pictures["distance"].alternative_text
