"""Intervals in which scores lie with 95 % confidence."""

import math
import warnings
from collections.abc import Sequence

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
