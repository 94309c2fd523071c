"""95 % confidence intervals of scores, and a test of paired differences.

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
class PairedTest:
    """Result of Student's paired t test: number and mean of the differences, 95 % interval of the
    mean, p value.

    `low`, `high` and `p` are None if there are fewer than two differences, or if all are equal.
    """

    count: int
    mean: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    """Two-sided p value: the probability of a mean at least this far from 0 if the true mean is 0
    and differences are normally distributed."""


def paired_t(differences: Sequence[float]) -> PairedTest:
    """Return Student's t test of whether the mean of `differences` (at least one) is zero."""
    from scipy.special import stdtr

    count = len(differences)
    mean = float(np.mean(differences))
    # Differences that vary only by rounding count as equal.
    if count < 2 or np.std(differences) <= 1e-12 * max(map(abs, differences)):
        return PairedTest(count, mean)
    standard_error = float(np.std(differences, ddof=1)) / math.sqrt(count)
    half_width = t_quantile(count - 1) * standard_error
    # Both tails of the distribution.
    p = 2 * float(stdtr(count - 1, -abs(mean / standard_error)))
    return PairedTest(count, mean, mean - half_width, mean + half_width, p)


def holm(tests: Sequence[PairedTest]) -> list[PairedTest]:
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


def t_quantile(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution with `freedom` degrees of freedom."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 1 - TAIL / 100))
