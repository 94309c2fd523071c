"""How much computed numbers differ, and which differences rounding explains.

Axes: P compared tokens, V vocabulary, N numbers of a token.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
_FLOORS = {torch.float32: 1e-5, torch.bfloat16: 1e-3}
"""Smallest allowed error by the precision of the computation, as a share of the largest logit."""
_ERROR_FACTOR = 2.0
"""An engine may have this many times the error of plain torch."""


class Precision(NamedTuple):
    """The precision of an engine."""

    computation: torch.dtype
    weights: torch.dtype
    """The dtype to which the trained weights were rounded."""


def logits_or_logprobs(logits: Tensor, is_normalized: bool) -> Tensor:
    """Return logits (P, V), or the logarithms of their probabilities, in float64."""
    logits = logits.double()
    if is_normalized:
        logits = logits.log_softmax(-1)
    return logits


def allowed_error(plain_error: float, precision: Precision) -> float:
    """Return the largest error that rounding explains, given that of plain torch."""
    return max(_ERROR_FACTOR * plain_error, _FLOORS[precision.computation])


def relative_errors(found: Tensor, expected: Tensor) -> list[float]:
    """Return the error of each row of `found` (P, N), as a share of the largest expected number.

    Rows may have padding at the end. The error of a row with NaN or infinite numbers is infinite.
    """
    width = min(found.shape[-1], expected.shape[-1])
    expected = expected[..., :width].double()
    found = found[..., :width].double()
    differences = (found - expected).abs()
    scale = expected.abs().max().clamp(min=1e-30)
    errors = differences.amax(-1) / scale
    # NaN would be neither larger nor smaller than what is allowed.
    return errors.nan_to_num(nan=math.inf, posinf=math.inf).tolist()
