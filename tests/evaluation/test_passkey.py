"""Pass keys: exact lengths and depths, and scores of models that always, never or sometimes find
the key.
"""

import re
from collections import Counter

import numpy as np
import pytest
from evaluation.loss_cases import run
from harness_cases import (
    Answering,
    bpe_tokenizer,
    finds_the_key,
    random_llama,
    sentencepiece_tokenizer,
)

from megatron_tape.errors import ConfigError
from megatron_tape.evaluation.results import Score
from megatron_tape.evaluation.statistics import wilson
from megatron_tape.evaluation.tasks.passkey import (
    FILLER,
    ExactPrompts,
    Passkey,
    PasskeySettings,
    is_correct,
    published_prompt,
)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    sentencepiece = sentencepiece_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return {
        "sentencepiece": sentencepiece,
        "bpe": bpe_tokenizer(bos=False),
        "bpe with bos": bpe_tokenizer(bos=True),
    }


SETTINGS = {"lengths": [160, 300], "depths": 3, "samples": 2}


def settings(**given):
    return PasskeySettings(**{**SETTINGS, **given})


def evaluated(model, **given):
    return run(Passkey, model, **{**SETTINGS, **given})


@pytest.mark.parametrize("kind", ["sentencepiece", "bpe", "bpe with bos"])
def test_prompt_and_answer_have_exactly_the_length(tokenizers, kind):
    model = Answering(tokenizers[kind], finds_the_key)
    for key, value in evaluated(model, lengths=[160, 301, 1024], samples=3).examples.items():
        assert value["tokens"] == [int(key.split("/")[0]) - 8] * 3
    # What the model got, encoded as the harness encodes it.
    lengths = Counter(len(tokenizers[kind](prompt).input_ids) + 8 for prompt in model.prompts)
    assert lengths == {160: 9, 301: 9, 1024: 9} and len(set(model.prompts)) == 27
    assert Counter(model.max_lengths) == {160: 3, 301: 3, 1024: 3}


def test_the_key_is_at_the_given_depth(tokenizers):
    tokenizer = tokenizers["bpe"]
    prompts = ExactPrompts(lambda text: len(tokenizer(text).input_ids), 1000)
    for depth in (0.0, 0.25, 0.5, 0.75, 1.0):
        hidden = prompts.make(depth, "71385")
        before, after = re.split(
            "The pass key is 71385. Remember it. 71385 is the pass key.", hidden.prompt
        )
        count = [part.count(".") - 3 * (part is before) for part in (before, after)]
        assert count[0] / sum(count) == pytest.approx(depth, abs=0.02), depth
        assert hidden.prompt.endswith("What is the pass key? The pass key is")
    # All but the last sentence of the filler is whole and in order.
    filler = " ".join(
        re.findall(
            r"(?s)quiz you about the important information there\.\n(.*)\nThe pass key",
            hidden.prompt,
        )
    )
    assert filler == " ".join([FILLER] * 99)[: len(filler)] and filler.endswith(".")


def test_a_model_that_finds_the_key_scores_1_and_one_that_says_nothing_0(tokenizers):
    for answer, expected in ((finds_the_key, 1.0), (lambda prompt: " I do not know.", 0.0)):
        result = evaluated(Answering(tokenizers["bpe"], answer))
        low, high = wilson(6 * expected, 6)
        assert result.scores == [
            Score("accuracy", expected, "higher", low, high, n, count=6) for n in (160, 300)
        ]
        assert result.details["accuracy"] == [[expected] * 2] * 3


def test_a_failure_in_one_cell_changes_only_that_cell(tokenizers):
    def fails_at_depth_half_of_300(prompt):
        depth = prompt.index("The pass key") / len(prompt)
        long = len(tokenizers["bpe"](prompt).input_ids) > 200
        if long and 0.4 < depth < 0.7:
            return "0"
        return finds_the_key(prompt)

    result = evaluated(Answering(tokenizers["bpe"], fails_at_depth_half_of_300))
    assert result.details["lengths"] == [160, 300] and result.details["depths"] == [0, 0.5, 1]
    assert result.details["accuracy"] == [[1, 1], [1, 0], [1, 1]]
    assert [score.value for score in result.scores] == [1, pytest.approx(2 / 3)]
    maps, curves = Passkey.draw({"a": result, "b": result})
    assert "a: from 0.00 (50%, 300) to 1.00" in maps.alternative_text
    panels = [axes for axes in maps.figure.axes if axes.images]
    for panel in panels:
        assert np.array_equal(panel.images[0].get_array(), [[1, 1], [1, 0], [1, 1]])
        assert [text.get_text() for text in panel.get_yticklabels()] == ["0%", "50%", "100%"]
        assert [text.get_text() for text in panel.get_xticklabels()] == ["160", "300"]
    assert (
        len(panels) == 2 and "a: 1 at 160 tokens, 0.6667 at 300 tokens" in curves.alternative_text
    )


def test_a_model_of_transformers_gets_every_token(tokenizers):
    model = random_llama(tokenizers["sentencepiece"], 160)
    result = evaluated(model, lengths=[160], batch_size=2)
    assert [score.value for score in result.scores] == [0.0]
    seen = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"]), with_kwargs=True
    )
    again = Passkey(settings(lengths=[160], batch_size=2))
    value = again.evaluate(again.units(model)[1], model)
    assert value == result.examples["160/1"]
    first = seen[0]
    assert first.shape == (2, 152)
    texts = [model.tokenizer.decode(ids, skip_special_tokens=True) for ids in first]
    assert {finds_the_key(text).split(".")[0].strip() for text in texts} == set(value["keys"])
    assert all(text.endswith("What is the pass key? The pass key is") for text in texts)
    assert all(isinstance(answer, str) for answer in value["answers"])


def test_keys_depend_only_on_the_unit(tokenizers):
    model = Answering(tokenizers["bpe"], finds_the_key)
    task = Passkey(settings())
    units = task.units(model)
    forwards = {unit.key: task.evaluate(unit, model) for unit in units}
    backwards = {unit.key: Passkey(settings()).evaluate(unit, model) for unit in reversed(units)}
    assert forwards == backwards
    keys = [key for value in forwards.values() for key in value["keys"]]
    assert len(set(keys)) == len(keys) and {len(key) for key in keys} == {5}
    other = Passkey(settings(seed=1)).evaluate(units[0], model)
    assert not set(other["keys"]) & set(keys)


def test_the_published_prompt_equals_that_of_longlora(tokenizers):
    """The first draws of `generate_prompt_landmark(n_garbage=3072, seed=0)` of LongLoRA's
    script.
    """
    state = np.random.RandomState(0)
    before = int(state.randint(0, 3072))
    key = str(state.randint(1, 50000))
    hidden, depth = published_prompt(1024, 0)
    assert hidden.key == key and depth == before / 3072
    lines = hidden.prompt.split("\n")
    assert [len(lines[1]), len(lines[3])] == [before, 3072 - before] and len(lines) == 5
    assert lines[2] == f"The pass key is {key}. Remember it. {key} is the pass key."

    model = Answering(tokenizers["bpe"], finds_the_key)
    result = evaluated(model, form="landmark", lengths=[300], samples=4)
    assert [(score.value, score.count) for score in result.scores] == [(1, 12)]
    assert sorted(model.prompts) == sorted(
        published_prompt(300, seed)[0].prompt for seed in range(12)
    )
    tokens = [number for value in result.examples.values() for number in value["tokens"]]
    assert (
        f"{sum(tokens) / 12:,.0f} for 300" in result.notes[0]
        and "compared as text" in result.notes[0]
    )


@pytest.mark.parametrize(
    "answer, right",
    [
        (" 12345", True),
        ("12345. Remember", True),
        ("\n\n12345", True),
        (" is 12345", True),
        (" 123456", False),
        (" 1234", False),
        ("", False),
        (" 54321 12345", False),
    ],
)
def test_the_first_number_counts(answer, right):
    assert is_correct(answer, "12345") == right


def test_a_length_that_truncated_filler_cannot_give_is_reached_by_appending_text():
    def count(text):
        return 2 * len(text.split()) + text.count("!")

    prompts = ExactPrompts(count, 301)
    for depth in (0.0, 0.5, 1.0):
        hidden = prompts.make(depth, "12345")
        assert count(hidden.prompt) == 301 and hidden.prompt.count("!") == 1
        assert hidden.prompt.count("12345") == 2
    with pytest.raises(ConfigError, match="a prompt of exactly 301 tokens"):
        ExactPrompts(lambda text: 2 * len(text), 301).make(0.0, "12345")
