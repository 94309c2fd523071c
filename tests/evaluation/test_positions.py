"""Positions: planted changes show up in the expected places, and all other values are exactly
zero.
"""

import math

import numpy as np
import pytest
import torch
from evaluation.loss_cases import run, write_jsonl

from megatron_tape.evaluation.task import ModelInfo
from megatron_tape.evaluation.tasks import position_probes as probes
from megatron_tape.evaluation.tasks.position_states import (
    PositionPictures,
    PositionSettings,
    distances_of,
)
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

    tokenizer = bos = None

    def __init__(self, model, label):
        self.model = model.eval()
        self.device = torch.device("cpu")
        self.bos = []
        self.info = ModelInfo(
            label, 256, LENGTH, {**model.config.to_dict(), "model_type": "tape"}, True
        )

    def encode(self, text):
        return list(text.encode())


@pytest.fixture(scope="module")
def models():
    """A model that equals RoPE, and one whose layer PLANTED alone changes head group 1 of the
    state.
    """
    made = {}
    for label in ("rope-equal", "planted"):
        torch.manual_seed(0)
        made[label] = Bytes(TapeForCausalLM(TapeConfig(**SIZES)), label)
    with torch.no_grad():
        made["planted"].model.model.layers[PLANTED].position.token_mixing.weight[1] = 2.0
    return made


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    texts = [
        "too short",
        *("".join(chr(97 + (i * i + j) % 26) for i in range(50)) for j in range(4)),
    ]
    return write_jsonl(tmp_path_factory.mktemp("data") / "texts.jsonl", texts)


@pytest.fixture(scope="module")
def results(models, data):
    """The entries of both models in `results.json`."""
    found = {
        label: run(PositionPictures, model, data=data, documents=3, map_tokens=16)
        for label, model in models.items()
    }
    for result in found.values():
        assert list(result.examples) == ["document/0", "document/1", "document/2", "maps"]
    return found


def by_group(result, metric):
    return {score.group: score.value for score in result.scores if score.metric == metric}


def test_a_model_equal_to_rope_has_zero_distance_and_no_loss_change(results):
    result = results["rope-equal"]
    assert np.all(np.array(result.details["distance"]) == 0)
    assert set(by_group(result, "state_distance").values()) == {0.0}
    assert (
        set(by_group(result, "loss_increase").values()) == {0.0}
        and len(by_group(result, "loss_increase")) == 6
    )
    assert np.all(np.array(result.details["maps"]["change"]) == 0)


def test_a_changed_matrix_affects_only_its_group_and_later_layers(results):
    distance = np.array(results["planted"].details["distance"])
    assert distance.shape == (LAYERS, GROUPS)
    assert np.all(distance[PLANTED + 1 :, 1] > 0.5)
    distance[PLANTED + 1 :, 1] = 0
    assert np.all(distance == 0)
    change = np.array(results["planted"].details["maps"]["change"])
    assert np.all(change[PLANTED + 1 :, 2:] > 1e-3), "heads 2 and 3 read head group 1"
    change[PLANTED + 1 :, 2:] = 0
    assert np.all(change == 0)
    shown = results["planted"].details["maps"]["shown"]
    assert len(shown) == 3 and all(one["layer"] > PLANTED and one["head"] >= 2 for one in shown)
    for one in shown:
        assert [len(row) for row in one["state"]] == list(range(1, 17))
        assert all(sum(row) == pytest.approx(1, abs=0.01) for row in one["state"] + one["phases"])


def test_ablating_a_layer_raises_the_loss_if_its_state_differs_from_rope(results, models):
    increases = by_group(results["planted"], "loss_increase")
    assert all(increases[f"layer {layer}"] == 0 for layer in range(PLANTED + 1))
    assert all(abs(increases[f"layer {layer}"]) > 1e-5 for layer in range(PLANTED + 1, LAYERS))
    # With RoPE's phases in all layers the planted model is the other one.
    own = [by_group(result, "loss")[""] for result in results.values()]
    assert increases["all layers"] == pytest.approx(own[0] - own[1], abs=1e-6)


def test_hooks_do_not_change_the_model(models, data):
    model = models["planted"]
    tokens = torch.arange(LENGTH)[None]
    before = model.model(tokens).logits
    task = PositionPictures(PositionSettings(data=data, documents=1))
    for unit in task.units(model):
        task.evaluate(unit, model)
    assert torch.equal(model.model(tokens).logits, before)
    assert model.model.config._attn_implementation == "sdpa"


def test_the_loss_is_that_of_transformers(models):
    model = models["planted"].model
    tokens = torch.randint(256, (1, LENGTH))
    assert probes.losses(model, tokens).mean() == pytest.approx(
        model(tokens, labels=tokens).loss.item(), abs=1e-5
    )


def test_similarity_of_ropes_phases_is_the_known_sum(results):
    details = results["rope-equal"].details
    assert details["distances"] == distances_of(LENGTH) and details["distances"][0] == 1
    assert details["distances"][-1] == LENGTH - 1
    D = SIZES["hidden_size"] // HEADS
    angles = 10000.0 ** (-torch.arange(0, D, 2) / D)
    for distance, value in zip(details["distances"], details["similarity"][0]):
        expected = torch.polar(torch.ones(D // 2), distance * angles).mean().abs().item()
        assert value == pytest.approx(expected, abs=1e-5)
    assert all(
        math.isclose(a, b) for a, b in zip(details["similarity"][0], details["similarity"][-1])
    )


def test_pictures_show_both_models(results):
    pictures = PositionPictures.draw(results)
    names = [picture.name for picture in pictures]
    assert names[:4] == [
        "positions-distance",
        "positions-along",
        "positions-similarity",
        "positions-ablation",
    ]
    assert names[4:] == ["positions-attention", "positions-maps-0", "positions-maps-1"]
    assert "planted: at most" in pictures[0].alternative_text
