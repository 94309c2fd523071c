"""Pass keys: exact lengths and depths, and scores of models that always, never or sometimes find
the key.
"""

import re
from collections import Counter

import numpy as np
import pytest
from evaluation.loss_cases import run
from harness_cases import bpe_tokenizer, random_llama, training_texts
from transformers import AutoTokenizer

from megatron_tape.data.tokenizer import load_tokenizer
from megatron_tape.errors import ConfigError
from megatron_tape.evaluation.results import Score
from megatron_tape.evaluation.statistics import wilson
from megatron_tape.evaluation.tasks.passkey import QUESTION, Passkey, is_correct
from megatron_tape.huggingface.tokenizer_files import write_tokenizer


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    from tools.train_tokenizer import train

    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "tokenizer.model").write_bytes(train(training_texts(), 600))
    (folder / "exported").mkdir()
    reader = load_tokenizer(folder / "tokenizer.model")
    write_tokenizer(reader, folder / "exported", 512, "tokenizer.model")
    return {
        "sentencepiece": AutoTokenizer.from_pretrained(folder / "exported"),
        "bpe": bpe_tokenizer(bos=False),
        "bpe with bos": bpe_tokenizer(bos=True),
    }


def answering(tokenizer, answer):
    """A model whose answer is a function of the prompt's text, and which records prompts."""
    model = random_llama(tokenizer, 512)
    model.prompts = []

    def answer_ids(prompt, count):
        model.prompts.append(prompt)
        return answer(tokenizer.decode(prompt)), True

    model.answer = answer_ids
    return model


def finds_the_key(prompt):
    return " " + re.search(r"The pass key is (\d+)\. Remember", prompt).group(1) + ". The grass"


SETTINGS = {"lengths": [160, 300], "depths": 3, "samples": 2}


def evaluated(model, **given):
    return run(Passkey, model, **{**SETTINGS, **given})


@pytest.mark.parametrize("kind", ["sentencepiece", "bpe", "bpe with bos"])
def test_prompt_and_answer_have_exactly_the_length(tokenizers, kind):
    tokenizer = tokenizers[kind]
    model = answering(tokenizer, finds_the_key)
    evaluated(model, lengths=[160, 301, 1024], samples=3)
    assert Counter(len(ids) + 8 for ids in model.prompts) == {160: 9, 301: 9, 1024: 9}
    assert len(set(map(tuple, model.prompts))) == 27
    assert {ids[0] == tokenizer.bos_token_id for ids in model.prompts} == {kind == "bpe with bos"}


def test_the_key_is_at_the_given_depth(tokenizers):
    model = random_llama(tokenizers["bpe"], 512)
    task = Passkey(Passkey.Settings())
    for depth in (0.0, 0.25, 0.5, 0.75, 1.0):
        text = model.decode(task.prompt(model, 1000, depth, "71385"))
        opening, before, information, after = text.removesuffix(QUESTION).split("\n")
        assert opening.startswith("There is an important info")
        assert information == "The pass key is 71385. Remember it. 71385 is the pass key."
        assert len(before) / len(before + after) == pytest.approx(depth, abs=0.01)
        assert (before + after).startswith("The grass is green. The sky is blue. The sun")


def test_default_lengths_have_room_for_a_prompt(tokenizers):
    info = random_llama(tokenizers["bpe"], 256).info
    assert Passkey(Passkey.Settings()).context_lengths(info) == [128, 256]
    info = random_llama(tokenizers["bpe"], 1024).info
    assert Passkey(Passkey.Settings()).context_lengths(info) == [256, 512, 1024]


def test_a_length_without_room_for_the_key_is_refused(tokenizers):
    with pytest.raises(ConfigError) as error:
        evaluated(random_llama(tokenizers["bpe"], 512), lengths=[30])
    assert error.value.key == "passkey.lengths"
    assert error.value.fix


def test_a_failure_in_one_cell_changes_only_that_cell(tokenizers):
    def fails_at_depth_half_of_300(prompt):
        depth = prompt.index("The pass key") / len(prompt)
        if len(prompt) > 800 and 0.4 < depth < 0.7:
            return "0"
        return finds_the_key(prompt)

    result = evaluated(answering(tokenizers["bpe"], fails_at_depth_half_of_300))
    assert result.details["depths"] == [0, 0.5, 1]
    assert result.details["accuracy"] == [[1, 1], [1, 0], [1, 1]]
    perfect, failing = result.scores
    assert perfect == Score(
        "accuracy",
        1,
        "higher",
        *wilson(6, 6),
        160,
        count=6,
    )
    assert failing.value == pytest.approx(2 / 3)

    maps, curves = Passkey.draw({"a": result, "b": result})
    assert "a: from 0.00 (50%, 300) to 1.00" in maps.alternative_text
    images = [axes.images[0].get_array() for axes in maps.figure.axes if axes.images]
    assert np.array_equal(
        images,
        [[[1, 1], [1, 0], [1, 1]]] * 2,
    )
    assert "a: 1 at 160 tokens, 0.6667 at 300 tokens" in curves.alternative_text


def test_a_model_of_transformers_gets_every_token(tokenizers):
    model = random_llama(tokenizers["sentencepiece"], 160)
    read = []
    layer = model.model.model.embed_tokens
    layer.register_forward_pre_hook(lambda module, inputs: read.append(inputs[0].tolist()))
    result = evaluated(model, lengths=[160], depths=1, samples=1)
    (key,) = result.examples["160/0"]["keys"]
    assert read[0] == [
        Passkey(Passkey.Settings()).prompt(
            model,
            160,
            0.5,
            key,
        )
    ]
    assert result.scores[0].value == 0


def test_keys_depend_only_on_the_unit_and_the_seed(tokenizers):
    def keys(**given):
        examples = evaluated(answering(tokenizers["bpe"], finds_the_key), **given).examples
        return {unit: value["keys"] for unit, value in examples.items()}

    by_unit = keys()
    assert keys(lengths=[300, 400])["300/1"] == by_unit["300/1"]
    every = sum(by_unit.values(), [])
    assert len(set(every)) == len(every)
    assert {len(key) for key in every} == {5}
    assert not set(every) & set(sum(keys(seed=1).values(), []))


@pytest.mark.parametrize(
    "answer, right",
    [
        (" is\n\n12345. Remember", True),
        (" 123456", False),
        ("", False),
        (" 54321 12345", False),
    ],
)
def test_the_first_number_counts(answer, right):
    assert is_correct(answer, "12345") == right
