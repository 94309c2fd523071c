"""Tests of models with shifted sparse attention in training mode."""

from types import SimpleNamespace

import pytest
import torch
from configurations import make_alone
from models import begin, build, random_batch, random_tokens, small_model

from megatron_tape.config.schema import replace_settings
from megatron_tape.data.batches import documents_from_tokens
from megatron_tape.parallel.layout import initialize_distributed
from megatron_tape.training.engine import Engine
from megatron_tape.training.model_building import build_model

SETTINGS = {
    "tape": {},
    "rope": {"position_encoding": "rope"},
    "repo": {"position_encoding": "repo"},
    "selective_rope": {"position_encoding": "selective_rope"},
    "three_groups": {"num_query_groups": 3, "kv_channels": 8},
    "tape_window": {"sliding_window": 3, "full_attention_every": 2},
    "selective_rope_fox_window": {
        "position_encoding": "selective_rope_fox",
        "sliding_window": 3,
        "full_attention_every": 2,
    },
}


def shifted(name, window=None, **changes):
    settings = {"sliding_window": window} | SETTINGS[name]
    if name == "three_groups":
        settings["num_attention_heads"] = 9
    return build(small_model(**settings), shifted_sparse=True, **changes)[0]


@pytest.mark.parametrize("name", SETTINGS)
def test_attention_is_causal(name):
    built = shifted(name)
    ids = random_tokens()
    assert built.training
    logits = built(ids)
    for token in (1, 7, 8, 9, 15):
        changed = ids.clone()
        changed[:, token] = (changed[:, token] + 1) % 64
        different = (built(changed) - logits).abs().amax((0, 2))
        assert not different[:token].any()
        assert different[token] > 0


@pytest.mark.parametrize("window, last", [(None, 7), (1, 5), (2, 6), (3, 7)])
def test_tokens_attend_only_within_their_segment_and_window(window, last):
    built = shifted("rope", window)
    for later in list(built.layers)[1:]:
        del built.layers[later]
    ids = random_tokens()
    changed = ids.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 64
    # For half of the heads, token 5 is in the segment of tokens 4 to 7, for the other half in that
    # of tokens 2 to 5.
    moved = (built(changed) - built(ids)).abs().amax((0, 2))
    assert moved.nonzero().flatten().tolist() == [*range(5, last + 1)]


@pytest.mark.parametrize(
    "name, packed",
    [
        ("tape", False),
        ("tape", True),
        ("repo", True),
        ("selective_rope", True),
        ("three_groups", True),
        ("tape_window", True),
        ("selective_rope_fox_window", True),
    ],
)
def test_recomputation_uses_the_same_segments(name, packed):
    ids = random_tokens(seed=1)
    labels = random_tokens(seed=2)
    documents = documents_from_tokens(ids, 7) if packed else None
    gradients = []
    for recompute in ("none", "selective", "full"):
        built = shifted(name, recompute=recompute)
        loss = built(ids, labels, documents=documents)
        built.eval()  # recomputation must use the mode of the forward pass
        loss.backward()
        gradients.append({name: parameter.grad for name, parameter in built.named_parameters()})
    for again in gradients[1:]:
        assert all(torch.equal(gradients[0][name], again[name]) for name in gradients[0])


def test_a_run_evaluates_with_full_attention():
    model = small_model(init_std=0.5)
    config = make_alone(model)
    layout = initialize_distributed(1)
    batch = random_batch(3, batch=2)
    tokens = batch["tokens"]
    losses = {}
    for attention in ("full", "shifted_sparse"):
        config = replace_settings(config, {"extension.attention": attention})
        built = build_model(config, layout, SimpleNamespace(progress=lambda *_: None))
        engine = Engine(begin(built, model, layout), config, layout)
        evaluated = engine.evaluate([batch])
        trained = engine.train_step([batch], lr=0.0).loss
        assert torch.equal(
            engine.logits(tokens[:, :13]),
            engine.module.eval()(tokens[:, :13]),
        )
        losses[attention] = (evaluated, trained, engine.evaluate([batch]))
    evaluations = [loss for before, _, after in losses.values() for loss in (before, after)]
    assert len(set(evaluations)) == 1
    assert abs(losses["full"][1] - losses["shifted_sparse"][1]) > 1e-4
