import math

import numpy as np
import pytest

from megatron_tape.evaluation.statistics import bootstrap_mean, bootstrap_ratio, wilson


def test_wilson_agrees_with_worked_examples():
    # Newcombe (1998), table I, method 3.
    for successes, count, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0, 0.1611)):
        assert wilson(successes, count) == pytest.approx((low, high), abs=1e-4)
    assert wilson(29, 29) == pytest.approx((0.8830, 1), abs=1e-4) and wilson(0, 0) == (0, 1)
    assert wilson(0, 1000)[0] == 0 and wilson(1000, 1000)[1] == 1


def test_the_interval_of_a_mean_is_that_of_the_normal_distribution():
    values = np.random.default_rng(1).normal(3, 2, 2000)
    low, high = bootstrap_mean(values)
    spread = 1.96 * values.std() / math.sqrt(2000)
    assert (low, high) == pytest.approx((values.mean() - spread, values.mean() + spread), abs=0.01)
    assert bootstrap_mean(values) == (low, high), "the same values give the same interval"


def test_the_interval_of_a_ratio_covers_the_truth_as_often_as_it_says():
    random = np.random.default_rng(2)
    covered = 0
    for _ in range(200):
        tokens = random.integers(50, 500, 60)
        nats = tokens * random.normal(2.5, 0.4, 60)
        low, high = bootstrap_ratio(nats, tokens, samples=200)
        covered += low <= 2.5 <= high
    assert 180 <= covered <= 198


def test_documents_count_by_their_tokens():
    low, high = bootstrap_ratio([10, 9000], [10, 3000])
    assert (low, high) == (1, 3)  # the means of either document alone


def test_one_document_has_no_interval():
    assert bootstrap_ratio([3.0], [1]) == (None, None)
    assert bootstrap_ratio([0.0, 0.0], [0, 0]) == (None, None)
    assert bootstrap_ratio([2.0, 0.0], [1, 0]) == (2, 2), "resamples without tokens say nothing"
