"""How SCROLLS scores a prediction, as its official evaluator does: F1, exact match and ROUGE without stemming.

Each is the highest over an example's references, in per cent. A dataset's score is the mean over its examples; of
ROUGE, the geometric mean of the means of ROUGE-1, ROUGE-2 and ROUGE-L.
"""

from __future__ import annotations

import functools
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

METRICS = {
    "qasper": "f1",
    "contract_nli": "exact_match",
    "narrative_qa": "f1",
    "quality": "exact_match",
    "qmsum": "rouge",
    "summ_screen_fd": "rouge",
    "gov_report": "rouge",
}
"""The datasets of SCROLLS, in the order of the TAPE paper's table."""
PARTS = {"f1": ("f1",), "exact_match": ("exact_match",), "rouge": ("rouge1", "rouge2", "rougeL")}
"""What is computed for every example, by metric."""
SHOWN = {"f1": "f1", "exact_match": "exact_match", "rouge": "rouge_geometric_mean"}
"""What a dataset's score is called, by metric."""


def score(metric: str, prediction: str, references: Sequence[str]) -> list[float]:
    """Return the `PARTS` of a metric for a prediction, each the highest over the references."""
    every = [_FUNCTIONS[metric](prediction, reference) for reference in references]
    return [100.0 * max(values) for values in zip(*every)]


def combine(means: np.ndarray) -> np.ndarray:
    """Return the score of a dataset (...) from the means over its examples of the parts (..., parts)."""
    return means.prod(axis=-1) ** (1.0 / means.shape[-1])


def normalize(text: str) -> str:
    """Return a text as SQuAD compares it: lower case, without punctuation, articles and extra white space."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _f1(prediction: str, reference: str) -> tuple[float]:
    predicted, wanted = normalize(prediction).split(), normalize(reference).split()
    common = sum((Counter(predicted) & Counter(wanted)).values())
    return (2 * common / (len(predicted) + len(wanted)) if common else 0.0,)


def _exact_match(prediction: str, reference: str) -> tuple[float]:
    return (float(normalize(prediction) == normalize(reference)),)


def _rouge(prediction: str, reference: str) -> tuple[float, ...]:
    scores = _scorer().score(reference, prediction)
    return tuple(scores[part].fmeasure for part in PARTS["rouge"])


@functools.cache
def _scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(list(PARTS["rouge"]), use_stemmer=False)


_FUNCTIONS: dict[str, Callable[[str, str], tuple[float, ...]]] = {
    "f1": _f1,
    "exact_match": _exact_match,
    "rouge": _rouge,
}
