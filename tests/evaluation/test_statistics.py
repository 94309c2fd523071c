import math

import numpy as np
import pytest
from scipy.stats import binomtest, linregress

from megatron_tape.evaluation.statistics import (
    Estimate,
    bootstrap_ratio,
    holm,
    linear_fit,
    paired_t,
    pooled_t,
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
    assert (test.count, test.value) == (10, pytest.approx(1.58))
    assert test.p == pytest.approx(0.002833, abs=5e-7)
    assert [test.low, test.high] == pytest.approx([0.7001142, 2.4598858], abs=1e-6)
    assert t_quantile(2) == pytest.approx(4.30265, rel=2e-6)


@pytest.mark.parametrize(
    "differences",
    [[0.5], [0.0, 0.0, 0.0], [0.1 + 0.2, 0.3]],
)
def test_there_is_no_p_value_without_spread(differences):
    test = paired_t(differences)
    assert test.value == pytest.approx(differences[0])
    assert test.low is test.high is test.p is None


def contains(estimate, value):
    """Whether the interval of an estimate contains a value."""
    return estimate.low <= value <= estimate.high


# A ladder of three sizes and two budgets with two seeds each: its points, and the base-2 logarithms
# of size and budget of each run.
SIZES = np.repeat([20.0, 22.0, 24.0], 4)
BUDGETS = np.tile([2.0, 2.0, 4.0, 4.0], 3)


def simulated(seed, size_slope=0.0, budget_slope=0.0, constant=0.0):
    """Return the differences of the runs of a ladder, with noise of standard deviation 0.1. Slopes
    are those with the distance from the mean size and budget.
    """
    noise = np.random.default_rng(seed).normal(0, 0.1, len(SIZES))
    trend = size_slope * (SIZES - 22) + budget_slope * (BUDGETS - 3)
    return constant + trend + noise


def fitted(differences):
    return linear_fit(differences, [SIZES - 22, BUDGETS - 3])


def test_the_pooled_interval_uses_the_variance_of_all_groups():
    # Deviations of 1 in one group, and of 2 in the other: the pooled variance is (2 + 8) / 2.
    first, second, single = pooled_t([[0.0, 2.0], [5.0, 9.0], [3.0]])
    half_width = 4.302653 * math.sqrt(5)
    for estimate, count, mean in ((first, 2, 1), (second, 2, 7), (single, 1, 3)):
        assert (estimate.count, estimate.value) == (count, mean)
        expected = half_width / math.sqrt(count)
        assert estimate.high - mean == pytest.approx(expected, rel=1e-6)
        assert mean - estimate.low == pytest.approx(expected, rel=1e-6)


def test_95_percent_of_pooled_intervals_contain_the_true_difference():
    points = [pooled_t(simulated(seed).reshape(6, 2)) for seed in range(100)]
    for index in range(6):
        assert 88 <= sum(contains(estimates[index], 0) for estimates in points) <= 100
    # Not because the intervals are too wide.
    covered = sum(contains(estimate, 0) for estimates in points for estimate in estimates)
    assert 550 <= covered <= 590
    # The point of pooling: two differences alone have an interval that is several times as wide.
    alone = [paired_t(simulated(seed)[:2]) for seed in range(100)]
    widths = [
        np.median([estimate.high - estimate.low for estimate in estimates])
        for estimates in (alone, [estimates[0] for estimates in points])
    ]
    assert widths[0] > 3 * widths[1]


def test_a_planted_difference_is_found_at_every_point():
    estimates = pooled_t(simulated(1, constant=0.5).reshape(6, 2))
    assert all(contains(estimate, 0.5) and not contains(estimate, 0) for estimate in estimates)


def test_95_percent_of_the_intervals_of_slopes_contain_the_true_slope():
    """Without any effect, and with a constant difference, which is no slope."""
    for constant in (0.0, 0.7):
        fits = [fitted(simulated(seed, constant=constant)) for seed in range(100)]
        for index, truth in enumerate((constant, 0, 0)):
            assert 88 <= sum(contains(fit[index], truth) for fit in fits) <= 99


def test_planted_slopes_are_found_jointly():
    mean, size, budget = fitted(simulated(3, size_slope=-0.2, budget_slope=0.3, constant=1.0))
    for estimate, truth in ((mean, 1.0), (size, -0.2), (budget, 0.3)):
        assert contains(estimate, truth)
        assert not contains(estimate, 0)
        assert estimate.p < 0.01
        assert estimate.count == 12
    # A slope with one predictor is not taken for one with the other.
    _, size, budget = fitted(simulated(3, size_slope=-0.2))
    assert not contains(size, 0)
    assert contains(budget, 0)


def test_one_slope_is_that_of_scipy():
    differences = simulated(5, size_slope=0.1)
    expected = linregress(SIZES, differences)
    constant, slope = linear_fit(differences, [SIZES])
    assert constant.value == pytest.approx(expected.intercept)
    assert slope.value == pytest.approx(expected.slope)
    assert slope.p == pytest.approx(expected.pvalue)
    assert slope.high - slope.value == pytest.approx(t_quantile(10) * expected.stderr)


@pytest.mark.parametrize(
    "values, predictors",
    [
        # One size; size and budget that cannot be told apart; fewer values than coefficients.
        ([1.0, 2.0, 3.0], [[0.3, 0.3, 0.3]]),
        ([1.0, 2.0, 3.0, 5.0], [[1, 2, 3, 4], [2, 4, 6, 8]]),
        ([1.0, 2.0], [[1, 2], [1, 3]]),
    ],
)
def test_slopes_that_the_data_does_not_determine_are_none(values, predictors):
    assert linear_fit(values, predictors) is None


@pytest.mark.parametrize("values", [[1.0, 3.0], [0.1, 0.1, 0.1, 0.1], [0.1, 0.2, 0.1 + 0.2, 0.4]])
def test_a_slope_without_residuals_has_no_interval(values):
    *_, slope = linear_fit(values, [range(len(values))])
    assert slope.value == pytest.approx((values[-1] - values[0]) / (len(values) - 1))
    assert slope.low is slope.high is slope.p is None


@pytest.mark.parametrize("groups", [[[0.5], [0.7]], [[0.2, 0.2], [0.7, 0.7]], [[0.1 + 0.2, 0.3]]])
def test_groups_without_spread_have_no_intervals(groups):
    for estimate, group in zip(pooled_t(groups), groups):
        assert estimate.value == pytest.approx(group[0])
        assert estimate.low is estimate.high is estimate.p is None


def test_p_values_are_corrected_by_holms_method():
    """The p-values in ascending order times 4, 3, ..., made monotonic and capped at 1."""

    def corrected(*values):
        return [test.p for test in holm([Estimate(3, 0.0, p=p) for p in values])]

    assert corrected(0.01, 0.04, None, 0.03, 0.5) == [
        pytest.approx(0.04),
        pytest.approx(0.09),
        None,
        pytest.approx(0.09),
        0.5,
    ]
    assert corrected(0.7, 0.7) == [1, 1]
