import math

import numpy as np
import pytest

from megatron_tape.evaluation.statistics import bootstrap_mean, bootstrap_ratio, paired_t, t_quantile, t_tails, wilson


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


def test_students_distribution_has_the_values_of_its_tables():
    """Critical values of 5 % on both sides, from printed tables, and probabilities with closed forms."""
    table = {1: 12.7062, 2: 4.30265, 3: 3.18245, 4: 2.77645, 5: 2.57058, 9: 2.26216, 30: 2.04227}
    for freedom, quantile in table.items():
        assert t_quantile(freedom) == pytest.approx(quantile, rel=2e-6)
        assert t_tails(quantile, freedom) == t_tails(-quantile, freedom) == pytest.approx(0.05, rel=2e-5)
    assert t_tails(1, 1) == pytest.approx(0.5) and t_tails(0, 3) == 1
    assert t_tails(2**0.5, 2) == pytest.approx(1 - 0.5**0.5)


def test_a_paired_t_test_is_students():
    """The hours of sleep of Student (1908): mean 1.58, t = 4.0621 with 9 degrees of freedom, p = 0.002833."""
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    found = paired_t([b - a for a, b in zip(first, second)])
    assert (found.count, found.mean) == (10, pytest.approx(1.58))
    assert found.p == pytest.approx(0.002833, abs=5e-7)
    assert (found.low, found.high) == (pytest.approx(0.7001142, abs=1e-6), pytest.approx(2.4598858, abs=1e-6))


@pytest.mark.parametrize("differences", [[0.5], [0.0, 0.0, 0.0], [0.1 + 0.2, 0.3]])
def test_nothing_is_tested_where_there_is_no_spread(differences):
    found = paired_t(differences)
    assert found.mean == pytest.approx(differences[0]) and (found.low, found.high, found.p) == (None, None, None)
