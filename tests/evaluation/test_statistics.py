import math

import numpy as np
import pytest
from scipy.stats import binomtest

from megatron_tape.evaluation.statistics import (
    PairedTest,
    bootstrap_ratio,
    holm,
    paired_t,
    t_quantile,
    wilson,
)


def test_wilson_agrees_with_scipy_and_accepts_fractional_successes():
    for successes, count in ((81, 263), (15, 148), (0, 20), (29, 29), (1000, 1000)):
        expected = binomtest(successes, count).proportion_ci(method="wilson")
        assert wilson(successes, count) == pytest.approx(tuple(expected), abs=1e-12)
    # Rounding must not change the ends of the range.
    assert wilson(0, 0) == (0, 1)
    assert wilson(0, 1000)[0] == 0
    assert wilson(1000, 1000)[1] == 1
    assert wilson(4, 20) < wilson(4.5, 20) < wilson(5, 20)


def test_the_interval_of_a_mean_is_that_of_the_normal_distribution():
    values = np.random.default_rng(1).normal(3, 2, 2000)
    low, high = bootstrap_ratio(values, np.ones(2000))
    spread = 1.96 * values.std() / math.sqrt(2000)
    assert low == pytest.approx(values.mean() - spread, abs=0.01)
    assert high == pytest.approx(values.mean() + spread, abs=0.01)


@pytest.mark.parametrize(
    "numerators, denominators, interval",
    [
        # Documents count by their tokens: the means of either document alone.
        ([10, 9000], [10, 3000], (1, 3)),
        ([3.0], [1], (None, None)),
        # Of two documents, one has a token that counts.
        ([2.0, 0.0], [1, 0], (None, None)),
        # Resamples without tokens are left out.
        ([2.0, 4.0, 0.0], [1, 1, 0], (2, 4)),
    ],
)
def test_an_interval_needs_two_documents_with_nonzero_weight(numerators, denominators, interval):
    assert bootstrap_ratio(numerators, denominators) == interval


def test_the_paired_t_test_equals_students_example():
    """The hours of sleep of Student (1908): mean 1.58, t = 4.0621 with 9 degrees of freedom, p =
    0.002833.
    """
    first = [
        0.7,
        -1.6,
        -0.2,
        -1.2,
        -0.1,
        3.4,
        3.7,
        0.8,
        0.0,
        2.0,
    ]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    test = paired_t([b - a for a, b in zip(first, second)])
    assert (test.count, test.mean) == (10, pytest.approx(1.58))
    assert test.p == pytest.approx(0.002833, abs=5e-7)
    assert [test.low, test.high] == pytest.approx([0.7001142, 2.4598858], abs=1e-6)
    assert t_quantile(2) == pytest.approx(4.30265, rel=2e-6)


@pytest.mark.parametrize(
    "differences",
    [[0.5], [0.0, 0.0, 0.0], [0.1 + 0.2, 0.3]],
)
def test_there_is_no_p_value_without_spread(differences):
    test = paired_t(differences)
    assert test.mean == pytest.approx(differences[0])
    assert test.low is test.high is test.p is None


def test_p_values_are_corrected_by_holms_method():
    """The p-values in ascending order times 4, 3, ..., made monotonic and capped at 1."""

    def corrected(*values):
        return [test.p for test in holm([PairedTest(3, 0.0, p=p) for p in values])]

    assert corrected(0.01, 0.04, None, 0.03, 0.5) == [
        pytest.approx(0.04),
        pytest.approx(0.09),
        None,
        pytest.approx(0.09),
        0.5,
    ]
    assert corrected(0.7, 0.7) == [1, 1]
