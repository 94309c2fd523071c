"""What the sequences of synthetic tasks consist of."""

import numpy as np
import pytest

from megatron_tape.errors import ConfigError
from megatron_tape.synthetic import (
    EVALUATION,
    GENERATORS,
    TRAINING,
    Addition,
    GridNavigation,
    Recall,
    SelectiveCopy,
    sample_random,
)
from megatron_tape.synthetic.addition import add

SMALL = [
    Addition(digits=5),
    Addition(digits=3, hints=6),
    SelectiveCopy(copied=6, blanks=9, symbols=4),
    GridNavigation(dimensions=1, steps=20, width=6),
    GridNavigation(dimensions=2, steps=20, width=4, longest_run=2),
    Recall(tokens=64, shortest=16, tokens_per_pair=8, keys=8),
]


def draw(generator, count, seed=0):
    return [generator.sequence(sample_random(seed, TRAINING, i)) for i in range(count)]


@pytest.mark.parametrize("generator", SMALL)
def test_a_sample_depends_only_on_seed_purpose_and_index(generator):
    def tokens(*place):
        return generator.sequence(sample_random(*place))[0].tolist()

    first = tokens(1, TRAINING, 7)
    draw(generator, 3)
    assert tokens(1, TRAINING, 7) == first
    others = [tokens(*place) for place in ((2, TRAINING, 7), (1, EVALUATION, 7), (1, TRAINING, 8))]
    assert first not in others
    assert len(set(map(tuple, others))) == 3


@pytest.mark.parametrize("generator", SMALL)
def test_sequences_keep_to_their_length_and_vocabulary(generator):
    drawn = draw(generator, 300)
    used = np.unique(np.concatenate([tokens for tokens, _ in drawn]))
    assert used.tolist() == list(range(generator.vocab_size))
    assert max(len(tokens) for tokens, _ in drawn) == generator.length
    for tokens, answers in drawn:
        assert tokens.dtype == np.int64
        assert answers.dtype == bool
        assert tokens.shape == answers.shape


def test_sums_are_right_and_all_numbers_reversed():
    lengths = set()
    for tokens, answers in draw(Addition(digits=4), 2000):
        text = "".join("0123456789+=."[token] for token in tokens)
        prompt, total = text.removesuffix(".").split("=")
        numbers = prompt.split("+")
        assert sum(int(number[::-1]) for number in numbers) == int(total[::-1])
        assert not any(number.endswith("0") for number in [*numbers, total])
        assert answers.sum() == len(total) + 1
        assert answers[-len(total) - 1 :].all()
        lengths.add(tuple(map(len, numbers)))
    assert len(lengths) == 16


@pytest.mark.parametrize(
    "a, b",
    [
        (999, 999),
        (5, 95),
        (909, 191),
        (10**40 - 1, 1),
    ],
)
def test_carries_run_through(a, b):
    digits = [np.array([int(digit) for digit in str(number)[::-1]]) for number in (a, b)]
    assert "".join(map(str, add(*digits)))[::-1] == str(a + b)


def test_pairs_of_operand_lengths_are_equally_likely():
    pairs = []
    for tokens, _ in draw(Addition(digits=2), 4000):
        plus, equals = (int(np.flatnonzero(tokens == token)[0]) for token in (10, 11))
        pairs.append((plus, equals - plus - 1))
    counts = np.unique(pairs, axis=0, return_counts=True)[1]
    assert len(counts) == 4
    assert (abs(counts - 1000) < 5 * np.sqrt(750)).all()


def test_equal_places_have_equal_hints():
    starts = set()
    for tokens, answers in draw(Addition(digits=4, hints=6), 500):
        ends = np.flatnonzero((tokens > 9) & (tokens < 13))
        parts = [part[:-1] for part in np.split(tokens, ends + 1)[:-1]]
        first, second, total = (int("".join(map(str, part[:0:-2]))) for part in parts)
        assert first + second == total
        start = parts[0][0] - 13
        for part in parts:
            hints = part[::2] - 13
            assert hints.tolist() == [(start + place) % 6 for place in range(len(hints))]
        assert answers.sum() == len(parts[2]) + 1
        assert answers[ends[1] + 1 :].all()
        starts.add(int(start))
    assert starts == set(range(6))


def test_keys_are_repeated_with_their_values_and_only_values_are_scored():
    task = Recall(tokens=256, shortest=64, tokens_per_pair=16, keys=64)
    lengths = []
    for tokens, answers in draw(task, 300):
        slots = tokens.reshape(-1, 2)
        scored = answers.reshape(-1, 2)
        pairs = len(tokens) // 16
        values = dict(slots[:pairs].tolist())
        assert len(values) == pairs
        assert all(64 <= value < task.blank for value in values.values())
        assert not scored[:, 0].any()
        assert not scored[:pairs].any()
        assert sorted(slots[scored[:, 1]].tolist()) == sorted(slots[:pairs].tolist())
        assert (slots[pairs:][~scored[pairs:, 1]] == task.blank).all()
        lengths.append(len(tokens))
    assert set(lengths) == {64, 128, 256}
    assert min(map(lengths.count, set(lengths))) > 70


def test_symbols_are_copied_in_order_without_blanks():
    task = SelectiveCopy(copied=6, blanks=9, symbols=4)
    for tokens, answers in draw(task, 500):
        among = tokens[:15]
        mark = tokens[15]
        copy = tokens[16:]
        assert mark == task.separator
        assert (among == task.blank).sum() == 9
        assert among[among != task.blank].tolist() == copy.tolist()
        assert np.flatnonzero(answers).tolist() == list(range(16, 22))


@pytest.mark.parametrize("dimensions", [1, 2])
def test_revisited_cells_keep_their_content_and_only_they_are_scored(dimensions):
    task = GridNavigation(dimensions=dimensions, steps=40, width=5, objects=7, longest_run=3)
    scored = 0
    for tokens, answers in draw(task, 200):
        assert not answers[::2].any()
        place = [0] * dimensions
        seen = {}
        for action, observation, scored_here in zip(tokens[::2], tokens[1::2], answers[1::2]):
            axis, back = divmod(action - task.blank - 1, 2)
            place[axis] = (place[axis] + (-1 if back else 1)) % 5
            assert scored_here == (tuple(place) in seen)
            assert seen.setdefault(tuple(place), observation) == observation
        scored += answers.sum()
    assert 0.3 < scored / (200 * 40) < 1


def test_runs_keep_their_direction_and_blanks_have_the_set_frequency():
    task = GridNavigation(dimensions=2, steps=400, width=32, blank_probability=0.8, longest_run=3)
    drawn = draw(task, 100)
    held = np.concatenate([tokens[1::2] for tokens, _ in drawn])
    assert (held == task.blank).mean() == pytest.approx(0.8, abs=0.03)
    assert len(np.unique(held)) == 17
    # Runs last 2 steps on average, and a quarter of the time the next goes on in the same
    # direction.
    same = np.concatenate([tokens[2::2] == tokens[:-2:2] for tokens, _ in drawn])
    assert same.mean() == pytest.approx(0.5 + 0.5 * 0.25, abs=0.02)


@pytest.mark.parametrize(
    "task, settings",
    [
        ("addition", {"hints": 40}),
        ("selective_copy", {"copied": 0}),
        ("grid_navigation", {"dimensions": 3}),
        ("recall", {"tokens_per_pair": 3}),
    ],
)
def test_invalid_sizes_are_rejected(task, settings):
    ((key, value),) = settings.items()
    with pytest.raises(ConfigError) as error:
        GENERATORS[task](**settings).check()
    assert error.value.key == key
    assert error.value.problem.startswith(f"is {value}")
