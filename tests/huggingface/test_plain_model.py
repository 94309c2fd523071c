"""The model in plain torch, with which engines are compared, against the training model."""

import dataclasses

import pytest
import torch
from exported_models import CHANGES
from models import (
    INCREMENTS,
    LLAMA3,
    SOME_LAYERS,
    WINDOWS,
    YARN,
    build,
    move_positions,
    small_model,
    whole_weights,
)
from torch.testing import assert_close

from megatron_tape.huggingface.verification.plain_model import PlainModel
from megatron_tape.huggingface.verification.sequences import (
    every_token,
    groups_of_tokens,
)
from megatron_tape.position import BUILT_IN

ROPE = {"position_encoding": "rope"}
MODELS = {
    **{
        encoding.name: {"position_encoding": encoding.name, **CHANGES.get(encoding.name, {})}
        for encoding in BUILT_IN
    },
    **INCREMENTS,
    **SOME_LAYERS,
    **WINDOWS,
    "rope_yarn": ROPE | YARN,
    "rope_llama3": ROPE | LLAMA3,
    "rope_share": ROPE | {"rope_share": 0.5},
    "biases": ROPE | {"qkv_bias": True, "tie_embeddings": True},
    "norms_and_gate": {"qk_norm": True, "attention_output_gate": True},
    "released": {"token_mixing": "per_head", "num_query_groups": 4, "mlp_zero": "up"},
}
CLOSE = dict(atol=1e-5, rtol=1e-5)


def built_and_plain(changes, **options):
    model = small_model(**changes)
    built, _ = build(model)
    move_positions(built)
    return built.eval(), PlainModel(model, whole_weights(built, model), **options)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_the_training_model(name):
    built, plain = built_and_plain(MODELS[name])
    sequence = every_token([0, 7, 15, 16, 40], 64)
    found = plain.run(sequence)
    assert_close(found.logits.float(), built(sequence.ids[None])[0, [0, 7, 15, 16, 40]], **CLOSE)
    assert found.hidden_states.shape == (plain.model.num_layers, 5, 32)


@torch.no_grad()
def test_a_long_sequence_is_computed_in_blocks():
    built, plain = built_and_plain(WINDOWS["tape_window"])
    sequence = every_token([0, 300, 599], 64)
    assert_close(
        plain.run(sequence).logits.float(), built(sequence.ids[None])[0, [0, 300, 599]], **CLOSE
    )


@torch.no_grad()
@pytest.mark.parametrize("name", ["rope", "xpos", "tape", "tape_share", *SOME_LAYERS, *WINDOWS])
def test_the_results_of_some_tokens_equal_those_of_all(name):
    _, plain = built_and_plain(MODELS[name])
    sequence = every_token([0, 3, 16, 40], 64)
    compared = list(sequence.compared)
    x, state, shared = plain.embedded(sequence)
    for layer in range(plain.model.num_layers):
        of_some, state_of_some = plain.run_layer(layer, x, state, shared, compared)
        x, state = plain.run_layer(layer, x, state, shared)
        assert_close(of_some, x[compared], atol=1e-12, rtol=1e-12)
        if layer > 0 or plain.encoding.updates(layer):
            assert_close(state_of_some, state[compared], atol=1e-12, rtol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize(
    "name", ["rope", "tape", "rope_yarn", "rope_llama3", "tape_window", "xpos"]
)
def test_positions_may_have_gaps(name):
    built, plain = built_and_plain(MODELS[name])
    sequence = groups_of_tokens([0, 30, 200], 64)
    assert sequence.has_gaps
    expected = built(sequence.ids[None], positions=sequence.positions)
    assert_close(plain.run(sequence).logits.float(), expected[0, list(sequence.compared)], **CLOSE)


@torch.no_grad()
def test_weights_are_rounded_first():
    built, plain = built_and_plain(ROPE, rounded_to=torch.bfloat16)
    sequence = groups_of_tokens([0, 40], 64)
    weights = whole_weights(built, plain.model)
    rounded = {name: weight.bfloat16() for name, weight in weights.items()}
    assert torch.equal(
        plain.run(sequence).logits, PlainModel(plain.model, rounded).run(sequence).logits
    )
    exact = PlainModel(plain.model, weights).run(sequence).logits
    assert (exact - plain.run(sequence).logits).abs().max() > 1e-3


@torch.no_grad()
def test_tied_embeddings_and_padded_vocabularies():
    model = small_model(position_encoding="rope", tie_embeddings=True, unpadded_vocab_size=50)
    built, _ = build(model)
    plain = PlainModel(dataclasses.replace(model), whole_weights(built, model))
    sequence = every_token([9], 50)
    assert_close(
        plain.run(sequence).logits.float(), built.eval()(sequence.ids[None])[0, 9:], **CLOSE
    )
