"""95 % confidence intervals of scores, and tests of paired differences and of their trends.

scipy is imported inside functions, since the import takes longer than all checks of a command.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_tape.evaluation.results import Score

Numbers = Sequence[float] | np.ndarray
Interval = tuple[float | None, float | None]
"""Low and high end of a confidence interval; None if the data does not determine them."""
TAIL = 2.5
"""Percentage of resampled values on each side of a 95 % interval."""
RESAMPLINGS = 1000
"""Number of bootstrap samples of an interval."""
NORMAL_QUANTILE = 1.959963984540054
"""Half the width of a 95 % interval in standard errors."""


def bootstrap_ratio(numerators: Numbers, denominators: Numbers) -> Interval:
    """Return the bootstrap interval of sum(`numerators`) / sum(`denominators`), such as of nats per
    token.

    Both arguments have one number for each document. Documents are drawn with replacement
    `RESAMPLINGS` times. Returns (None, None) if fewer than two documents have a nonzero
    denominator.
    """
    if np.count_nonzero(denominators) < 2:
        return None, None
    pairs = np.column_stack((numerators, denominators)).astype(np.float64)
    count = len(pairs)
    # The seed is fixed, so that the same values always have the same interval.
    random = np.random.default_rng(0)
    ratios = []
    for _ in range(RESAMPLINGS):
        drawn = random.integers(count, size=count)
        numerator, denominator = pairs[drawn].sum(axis=0)
        # The denominators of all drawn documents may be 0, such as their numbers of key tokens.
        if denominator != 0:
            ratios.append(numerator / denominator)
    return percentiles(ratios)


def percentiles(resampled: Numbers) -> Interval:
    """Return the interval in which 95 % of resampled values lie."""
    low, high = np.percentile(resampled, [TAIL, 100 - TAIL])
    return float(low), float(high)


def ratio_score(
    metric: str,
    numerators: Numbers,
    denominators: Numbers,
    better: Any,
    **fields: Any,
) -> Score:
    """Return sum(`numerators`) / sum(`denominators`), with its bootstrap interval, as a score.

    Both arguments have one number for each document; denominators are whole numbers. `fields` are
    other fields of `Score`.
    """
    # If there is nothing to measure, both sums are 0, and the ratio is 0.
    ratio = float(sum(numerators)) / max(1, int(sum(denominators)))
    interval = bootstrap_ratio(numerators, denominators)
    return Score(metric, ratio, better, *interval, **fields)


def fraction_score(metric: str, successes: float, count: int, **fields: Any) -> Score:
    """Return `successes` / `count`, with Wilson's interval, as a score. `fields` are other fields
    of `Score`.
    """
    interval = wilson(successes, count)
    return Score(metric, successes / count, "higher", *interval, count=count, **fields)


def wilson(successes: float, count: int) -> tuple[float, float]:
    """Return Wilson's score interval of the fraction `successes` / `count`.

    It is accurate near 0 and 1 and for few samples. `successes` may be fractional, such as for
    samples with several answers, which `scipy.stats.binomtest` does not support.
    """
    if count == 0:
        # Nothing is known about the fraction.
        return 0.0, 1.0
    fraction = successes / count
    z = NORMAL_QUANTILE
    variance = fraction * (1 - fraction) / count
    center = fraction + z * z / (2 * count)
    spread = z * math.sqrt(variance + z * z / (4 * count * count))
    scale = 1 + z * z / count
    low = (center - spread) / scale
    high = (center + spread) / scale
    # These ends are exactly 0 and 1, but rounding may give numbers slightly off.
    if successes == 0:
        low = 0.0
    if successes == count:
        high = 1.0
    return low, high


@dataclass(frozen=True)
class Estimate:
    """An estimated number, such as a mean or a slope, with its 95 % interval and the p value of
    Student's t test.

    `low`, `high` and `p` are None if there are too few values, or if they vary only by rounding.
    Functions with an argument `comparisons` correct both the interval and the p value for that
    number of comparisons by Bonferroni's method: p is below 0.05 exactly if the interval excludes
    0, and all intervals contain their true numbers with a probability of at least 95 %.
    """

    count: int
    """Number of values behind the estimate."""
    value: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    """Two-sided p value: the probability of an estimate at least this far from 0 if the true number
    is 0 and the values are normally distributed."""


def paired_t(differences: Sequence[float], comparisons: int = 1) -> Estimate:
    """Return the mean of `differences` (at least one), with Student's t test of whether it is
    zero, corrected for a number of `comparisons`.
    """
    (estimate,) = pooled_t([differences], comparisons)
    return estimate


def pooled_t(groups: Sequence[Sequence[float]], comparisons: int = 1) -> list[Estimate]:
    """Return the mean of each group of differences (at least one in each), with Student's t test of
    whether it is zero, corrected for a number of `comparisons`.

    The variance is assumed to be the same in all groups, and estimated from all of them. So a group
    of two differences has a useful interval if there are several groups.
    """
    freedom = sum(len(group) - 1 for group in groups)
    squares = sum(float(np.var(group)) * len(group) for group in groups)
    # Without degrees of freedom, `squares` is 0, and no estimate has an interval.
    deviation = math.sqrt(squares / max(1, freedom))
    largest = max((abs(value) for group in groups for value in group), default=0.0)
    return [
        _estimate(
            len(group),
            float(np.mean(group)),
            deviation / math.sqrt(len(group)),
            freedom,
            largest,
            comparisons,
        )
        for group in groups
    ]


def linear_fit(
    values: Numbers, predictors: Sequence[Numbers], comparisons: int = 1
) -> list[Estimate] | None:
    """Fit `values` (N,) as a constant plus a multiple of each of the `predictors`, (N,) each, by
    ordinary least squares. The estimates are corrected for a number of `comparisons`.

    Returns the constant, which is the value where all predictors are 0, and then the slopes.
    Returns None if the predictors do not determine them, such as if two are proportional or one
    does not vary.
    """
    observed = np.asarray(values, dtype=np.float64)
    design = np.column_stack((np.ones(len(observed)), *predictors))
    if np.linalg.matrix_rank(design) < design.shape[1]:
        return None
    inverse = np.linalg.pinv(design)
    coefficients = inverse @ observed
    residuals = observed - design @ coefficients
    freedom = len(observed) - design.shape[1]
    deviation = math.sqrt(float(residuals @ residuals) / max(1, freedom))
    # Of each coefficient, in multiples of the deviation of a value.
    standard_errors = np.sqrt((inverse**2).sum(axis=1))
    largest = float(np.abs(observed).max())
    return [
        _estimate(
            len(observed),
            float(coefficient),
            float(error * deviation),
            freedom,
            largest,
            comparisons,
        )
        for coefficient, error in zip(coefficients, standard_errors)
    ]


def _estimate(
    count: int,
    value: float,
    standard_error: float,
    freedom: int,
    largest: float,
    comparisons: int,
) -> Estimate:
    """Return an estimate with its interval and p value, corrected for a number of `comparisons`.
    `freedom` are the degrees of freedom of the standard error, and `largest` is the largest
    absolute value of the data.
    """
    from scipy.special import stdtr

    # Values that vary only by rounding count as equal.
    if freedom < 1 or standard_error <= 1e-12 * largest:
        return Estimate(count, value)
    half_width = t_quantile(freedom, comparisons) * standard_error
    # Both tails of the distribution.
    p = 2 * float(stdtr(freedom, -abs(value / standard_error)))
    corrected = min(1.0, p * comparisons)
    return Estimate(count, value, value - half_width, value + half_width, corrected)


def holm(tests: Sequence[Estimate]) -> list[Estimate]:
    """Return the tests with p values corrected for multiple comparisons by Holm's method (1979).
    Tests without a p value stay as they are.
    """
    known = sorted((test.p, index) for index, test in enumerate(tests) if test.p is not None)
    corrected = list(tests)
    largest = 0.0  # corrected p value of the previous test
    for rank, (p, index) in enumerate(known):
        # The smallest p value is multiplied by the number of tests, the next by one less. A product
        # below the previous one is raised to it, so that the order of the values stays.
        largest = max(largest, min(1.0, p * (len(known) - rank)))
        corrected[index] = replace(tests[index], p=largest)
    return corrected


def t_quantile(freedom: int, comparisons: int = 1) -> float:
    """Return half the width of a 95 % interval in standard errors: a quantile of Student's t
    distribution with `freedom` degrees of freedom, the 97.5 % quantile for one comparison.
    """
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 1 - TAIL / 100 / comparisons))
