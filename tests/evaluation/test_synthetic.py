"""Synthetic tasks on models with known answers: all right, wrong in one place, blank, or random."""

import numpy as np
import pytest
import torch
from evaluation.loss_cases import run
from training_cases import RECIPE
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_tape.evaluation.results import read_results
from megatron_tape.evaluation.task import ModelInfo
from megatron_tape.evaluation.tasks import Addition, GridNavigation, Recall, SelectiveCopy
from megatron_tape.evaluation.tasks.synthetic_tasks import correct_answers
from megatron_tape.evaluation.transformers_model import HFModel
from megatron_tape.synthetic import Addition as Sums
from megatron_tape.synthetic import GridNavigation as Walks
from megatron_tape.synthetic import SelectiveCopy as Copies
from megatron_tape.synthetic import sample_random
from megatron_tape.synthetic.addition import add
from pretrain import evaluate, train

INFO = ModelInfo("model", vocab_size=32, trained_length=64, config={}, has_tokenizer=False)


class Answering:
    """A model that predicts `answer(prefix)` after each prefix with probability 1."""

    info = INFO

    def __init__(self, answer):
        self.answer = answer

    def logits(self, tokens):
        logits = torch.zeros(*tokens.shape, INFO.vocab_size)
        for row, sequence in zip(logits, tokens.tolist()):
            for i in range(len(sequence)):
                row[i, self.answer(sequence[: i + 1])] = 1
        return logits


def next_of_sum(prefix):
    """Add correctly. Predictions before `=` do not matter."""
    if Sums.EQUALS not in prefix:
        return 0
    plus = prefix.index(Sums.PLUS)
    equals = prefix.index(Sums.EQUALS)
    total = add(
        np.array(prefix[:plus]),
        np.array(prefix[plus + 1 : equals]),
    )
    return [*total, Sums.END, *[0] * 20][len(prefix) - equals - 1]


def fails_at(first, second):
    """Add correctly, except for operands of these lengths, where the second-to-last digit is
    wrong.
    """

    def answer(prefix):
        right = next_of_sum(prefix)
        equals = first + 1 + second
        here = len(prefix) == equals + max(first, second) - 1
        if here and prefix[first] == Sums.PLUS and prefix[equals] == Sums.EQUALS:
            return (right + 1) % 10
        return right

    return answer


def next_of_copy(prefix):
    task = Copies(symbols=4)
    if task.separator not in prefix:
        return 0
    mark = prefix.index(task.separator)
    copied = [token for token in prefix[:mark] if token != task.blank]
    return [*copied, *[0] * 20][len(prefix) - mark - 1]


def next_on_walk(prefix, task, width):
    """Track the cell, and answer with its previous value, or blank if it is new."""
    if len(prefix) % 2 == 0:
        return 0
    place = np.zeros(task.dimensions, dtype=int)
    held = {}
    for i in range(0, len(prefix), 2):
        axis, back = divmod(prefix[i] - task.blank - 1, 2)
        if not 0 <= axis < task.dimensions:  # padding
            return 0
        place[axis] = (place[axis] + (-1 if back else 1)) % width
        if i + 1 < len(prefix):
            held[tuple(place)] = prefix[i + 1]
    return held.get(tuple(place), task.blank)


def by_group(results, metric):
    return {score.group: score for score in results.scores if score.metric == metric}


def values(results, metric):
    return {group: score.value for group, score in by_group(results, metric).items()}


def addition(answer, **settings):
    return run(Addition, Answering(answer), **{"digits": 3, "samples": 8, **settings})


def test_a_failure_at_one_pair_of_lengths_changes_only_that_score():
    results = addition(fails_at(5, 2))
    expected = np.ones((6, 6))
    expected[4, 1] = 0
    assert results.details["accuracy"] == expected.tolist()
    scores = by_group(results, "exact match")
    assert {group: (score.value, score.count) for group, score in scores.items()} == {
        "up to 6 digits": (pytest.approx(35 / 36), 36 * 8),
        "up to 3 digits": (1, 9 * 8),
        "beyond 3 digits": (pytest.approx(26 / 27), 27 * 8),
    }
    (picture,) = Addition.draw({"model": results, "other": addition(next_of_sum, step=2)})
    assert picture.figure.axes[0].images[0].get_array().tolist() == expected.tolist()
    assert "model: from 0.00 (5, 2) to 1.00" in picture.alternative_text


def test_hints_equal_those_of_training():
    task = Addition(Addition.Settings(digits=1, hints=3))
    assert task.sums == Sums(digits=2, hints=3)


def test_only_the_chosen_lengths_are_tested_and_samples_do_not_depend_on_them():
    some = addition(fails_at(4, 4), samples=2, digits=4, step=4).examples
    every = addition(fails_at(4, 4), samples=2, digits=4).examples
    assert list(some) == ["4", "8"]
    assert list(every) == list("12345678")
    right = every["4"]["right"]
    assert some["4"]["right"] == [right[3], right[7]] == [[0, 0], [1, 1]]


def copies(answer, samples):
    blanks = {"IID": 5, "dense": 2, "sparse": 9}
    model = Answering(answer)
    return run(SelectiveCopy, model, copied=6, symbols=4, blanks=blanks, samples=samples)


def test_a_model_that_copies_among_few_blanks_only_fails_with_more():
    results = copies(
        lambda prefix: next_of_copy(prefix) if prefix.count(4) < 6 else 5,
        120,
    )
    for metric in ("accuracy", "exact match"):
        assert values(results, metric) == {"IID": 1, "dense": 1, "sparse": 0}
    assert {score.count for score in results.scores} == {120}
    assert results.notes == []
    assert results.details == {}
    (picture,) = SelectiveCopy.draw({"model": results, "other": results})
    assert "0 sparse accuracy" in picture.alternative_text
    assert picture.figure.axes[0].lines[0].get_xdata().tolist() == [1, 1, 0]


def walks(answer, **settings):
    return run(GridNavigation, Answering(answer), objects=7, **settings)


@pytest.mark.parametrize("dimensions", [1, 2])
def test_a_model_that_keeps_track_of_its_place_scores_100_percent(dimensions):
    task = Walks(dimensions=dimensions, objects=7)
    settings = {
        "dimensions": dimensions,
        "samples": 30,
        "variants": {"IID": [20, 6, 0.5]},
    }
    results = walks(lambda prefix: next_on_walk(prefix, task, 6), **settings)
    assert [score.value for score in results.scores] == [1, 1]


def test_a_model_that_always_answers_blank_has_the_score_in_the_note():
    variants = {
        "IID": [20, 6, 0.5],
        "dense": [10, 4, 0.2],
        "sparse": [30, 8, 0.8],
    }
    results = walks(lambda prefix: 7, samples=200, variants=variants)
    accuracy = values(results, "accuracy")
    assert accuracy == results.details["blanks"]
    assert accuracy == pytest.approx(
        {"IID": 0.5, "dense": 0.2, "sparse": 0.8},
        abs=0.06,
    )
    dense = f"{100 * accuracy['dense']:.1f} % for 10 steps on 4 × 4 cells (20 % blank);"
    assert dense in results.notes[0]


def next_of_pair(prefix):
    return dict(zip(prefix[:-1:2], prefix[1::2])).get(
        prefix[-1],
        0,
    )


def test_a_model_that_recalls_few_pairs_fails_with_more():
    settings = {"keys": 15, "tokens_per_pair": 4, "lengths": [16, 32], "samples": 30}
    forgetful = Answering(lambda prefix: next_of_pair(prefix[-17:]))
    accuracy = values(run(Recall, forgetful, **settings), "accuracy")
    assert accuracy["16 tokens"] == 1
    assert accuracy["32 tokens"] < 0.7


def test_padding_and_batches_do_not_change_results_of_a_real_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.3,
    )
    model = HFModel(INFO, LlamaForCausalLM(config), None)
    sequences = [Sums(digits=9).sequence(sample_random(0, 2, i)) for i in range(7)]
    for (tokens, answers), mask in zip(sequences, correct_answers(model, sequences, 4)):
        greedy = [
            int(model.logits(torch.from_numpy(tokens[None, :i]))[0, -1].argmax())
            for i in np.flatnonzero(answers)
        ]
        assert mask.tolist() == (tokens[answers] == greedy).tolist()


def test_a_checkpoint_of_a_run_without_tokenizer_is_evaluated(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(evaluate.signal, "signal", lambda *_: None)
    settings = [
        "--data.prefix=null",
        "--data.generator={task: selective_copy, copied: 5, blanks: 4, symbols: 3}",
        "--train.steps=2",
        "--schedule.warmup_steps=0",
        "--model.vocab_size=6",
        "--logging.directory=run",
    ]
    assert train.main(["--config", str(RECIPE), *settings]) == 0
    (tmp_path / "tasks.yaml").write_text(
        "selective_copy: {samples: 5, copied: 5, symbols: 3, blanks: {IID: 4, sparse: 40}}"
    )
    places = ["--model=run", "--output=out", "--device=cpu"]
    assert evaluate.main(["--config=tasks.yaml", *places]) == 0
    results = read_results(tmp_path / "out")
    assert results.model.run["settings"]["data"]["generator"]["copied"] == 5
    assert values(results.tasks["selective_copy"], "accuracy").keys() == {"IID", "sparse"}
    assert (tmp_path / "out" / "selective_copy.png").is_file()
    assert evaluate.main(["addition", *places]) == 2
    assert "was trained on selective_copy; give a model that" in capfd.readouterr().err
