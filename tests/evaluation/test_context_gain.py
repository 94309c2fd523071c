"""Gains of longer contexts: known answers for models that copy, and key tokens."""

import math

import numpy as np
import pytest
from evaluation.loss_cases import ByteModel, copies, run, score, uniform, write_jsonl

from megatron_tape.evaluation.tasks.context_gain import ContextGain

RANDOM = np.random.default_rng(0)
SURE = -math.log(0.99)
LARGE = -math.log(0.01 / 255)


@pytest.fixture
def periodic(tmp_path):
    """Two documents that repeat 40 letters each."""
    texts = ["".join(map(chr, RANDOM.permutation(np.arange(32, 127))[:40])) * 8 for _ in range(2)]
    return {"data": write_jsonl(tmp_path / "periodic.jsonl", texts), "short": 16, "stride": 8}


def gains(loss, **settings):
    return run(ContextGain, ByteModel(loss), **{"lengths": [64], **settings})


def test_a_copying_model_gains_only_if_the_copy_is_in_the_context(periodic):
    result = gains(copies(40), lengths=[32, 64], **periodic)
    for length, gain in ((32, 0), (64, math.log(256) - SURE)):
        # Every token becomes predictable, so all are key tokens.
        for metric in ("gain", "key_gain"):
            of_length = score(result, metric, length)
            ends = [of_length.value, of_length.low, of_length.high]
            assert ends == pytest.approx([gain] * 3, abs=1e-5)
            assert of_length.count == 2 * 64
    assert score(result, "key_perplexity", 32).value == pytest.approx(256, rel=1e-4)
    assert score(result, "key_perplexity", 64).value == pytest.approx(1 / 0.99, rel=1e-4)
    assert result.notes[0].endswith("128 of 128 tokens of 2 documents are key tokens.")


def test_a_model_without_memory_gains_nothing_and_has_no_key_tokens(periodic):
    result = gains(uniform(256), **periodic)
    assert score(result, "gain").value == 0
    assert [one.metric for one in result.scores] == ["gain"]


def test_key_tokens_are_those_that_gain_and_are_predicted_well(tmp_path):
    """Every fourth letter of a copy differs, so the model gives it the lowest probability."""
    text = np.tile(RANDOM.integers(97, 123, 40), 8)
    text[4::4] = 33 + np.arange(79) % 31
    data = write_jsonl(tmp_path / "t.jsonl", ["".join(map(chr, text))])
    settings = {"data": data, "short": 16, "stride": 8}
    result = gains(copies(40), **settings)
    first = 65 - 8
    expected = [i for i in range(64) if (first + i) % 4]
    assert result.details["key_tokens"]["t/0"] == expected
    loss = (48 * SURE + 16 * LARGE) / 64
    assert score(result, "gain").value == pytest.approx(math.log(256) - loss, abs=1e-5)
    assert score(result, "key_gain").value == pytest.approx(math.log(256) - SURE, abs=1e-5)
    # The model's gain is 5.5 nats and its loss 0.01.
    for changed in ({"alpha": 5.6}, {"beta": -0.005}):
        assert gains(copies(40), **settings, **changed).details["key_tokens"]["t/0"] == []
