"""Intervals in which scores lie with 95 % confidence, and a test of differences between pairs."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Interval = tuple[float | None, float | None]
"""Low and high; None where the data says nothing about the spread."""
TAIL = 2.5
"""Per cent of resampled values below an interval, and as many above it."""
_NORMAL_QUANTILE = 1.959963984540054


def bootstrap_ratio(
    numerators: Sequence[float], denominators: Sequence[float], samples: int = 1000, seed: int = 0
) -> Interval:
    """Return the percentile interval of sum(`numerators`) / sum(`denominators`) over resampled documents.

    Both have one entry per document, such as nats and tokens, which are drawn together. One document shows no spread,
    so its interval is (None, None); so is that of documents whose denominators are all 0.
    """
    pairs = np.stack([np.asarray(numerators, np.float64), np.asarray(denominators, np.float64)], axis=1)
    if len(pairs) < 2 or not pairs[:, 1].any():
        return None, None
    random = np.random.default_rng(seed)
    sums = np.stack([pairs[random.integers(len(pairs), size=len(pairs))].sum(axis=0) for _ in range(samples)])
    sums = sums[sums[:, 1] != 0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # percentiles of values that are not finite
        low, high = np.percentile(sums[:, 0] / sums[:, 1], [TAIL, 100 - TAIL])
    return float(low), float(high)


def bootstrap_mean(values: Sequence[float], samples: int = 1000, seed: int = 0) -> Interval:
    """Return the percentile interval of the mean of resampled `values`; (None, None) for fewer than two."""
    return bootstrap_ratio(values, np.ones(len(values)), samples, seed)


def wilson(successes: float, count: int) -> tuple[float, float]:
    """Return Wilson's score interval of a share, which also holds near 0 and 1 and for few samples."""
    if count == 0:
        return 0.0, 1.0
    share, z = successes / count, _NORMAL_QUANTILE
    center = share + z * z / (2 * count)
    spread = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    low, high = ((center + sign * spread) / (1 + z * z / count) for sign in (-1, 1))
    # Rounding would leave a tiny number in place of these.
    return 0.0 if successes == 0 else low, 1.0 if successes == count else high


@dataclass(frozen=True)
class PairedTest:
    """Differences between pairs: their mean, its 95 % interval, and Student's paired t test.

    Without at least two pairs whose differences vary, nothing is known of the spread: `low`, `high` and `p` are None.
    """

    count: int
    mean: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    """The probability of a mean difference at least this large, on either side, if there is none in truth and
    differences are normally distributed."""


def paired_t(differences: Sequence[float]) -> PairedTest:
    """Test whether the mean of differences, at least one, is zero."""
    count, mean = len(differences), float(np.mean(differences))
    error = float(np.std(differences, ddof=1)) / math.sqrt(count) if count > 1 else 0.0
    # Differences of equal values differ by rounding alone.
    if error <= 1e-12 * max(map(abs, differences)):
        return PairedTest(count, mean)
    reach = t_quantile(count - 1) * error
    return PairedTest(count, mean, mean - reach, mean + reach, t_tails(mean / error, count - 1))


def t_tails(t: float, freedom: int) -> float:
    """Return the probability that |T| >= |t| for Student's T with `freedom` degrees of freedom.

    The finite series of Abramowitz and Stegun (1964), 26.7.3 and 26.7.4.
    """
    angle = math.atan2(abs(t), math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= cosine * cosine * k / (k + 1)
    inside = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return min(1.0, max(0.0, 1.0 - inside))


def t_quantile(freedom: int) -> float:
    """Return the t between whose two signs Student's T lies with 95 % probability."""
    low, high = 0.0, 100.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if t_tails(middle, freedom) > 2 * TAIL / 100 else (low, middle)
    return low
