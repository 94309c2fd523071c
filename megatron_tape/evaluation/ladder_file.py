"""The file `ladder.json`: encodings compared at several model sizes and amounts of training, each
with learning rates of its own.

The file is small enough to be committed to a repository. This module imports no torch.
"""

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from megatron_tape.errors import FileError
from megatron_tape.evaluation.comparison_file import (
    LOSS,
    TRAINING,
    Comparison,
    FinishedRun,
    as_content,
)
from megatron_tape.evaluation.results import Number, Whole, read_dataclass
from megatron_tape.io.records import write_record

NAME = "ladder.json"


@dataclass(frozen=True)
class LearningRate:
    """The learning rate with which a variant was trained at a point of the ladder."""

    rate: Number
    taken_from: str | None = None
    """Name of the point whose best rate this is derived from; None if it was tuned at this
    point.
    """


@dataclass(frozen=True)
class LadderPoint:
    """A model size, trained on an amount of text or on a synthetic task."""

    size: str
    training: str
    """Such as `5 tokens per parameter`, or the name of a task."""
    tokens_per_parameter: Number | None
    """None for a task."""
    parameters: Whole
    """Parameters of the baseline without the embedding and the output layer."""
    tokens: Whole
    """Tokens that a run is trained on."""
    learning_rates: dict[str, LearningRate]
    """By variant; variants without a rate yet are missing."""
    comparison: Comparison
    """The reported runs. Their variants have the names of `Ladder.variants`."""
    tuning: dict[str, Comparison] = field(default_factory=dict)
    """By variant, the runs that its rate was chosen from: a comparison whose variants are the
    learning rates as text, such as `0.002`. Other seeds than those of the reported runs. See
    `tuned_loss`."""

    @property
    def name(self) -> str:
        """Size and training, which identify a point."""
        return f"{self.size}, {self.training}"


@dataclass(frozen=True)
class Ladder:
    """The contents of `ladder.json`."""

    variants: dict[str, str]
    """By name, the variants as in `--encodings`, such as `tape+increments=signed`. The first one is
    the baseline."""
    points: list[LadderPoint] = field(default_factory=list)
    """In the order of the recipe: by size, and for each size by training, tasks last."""
    format: Literal[1] = 1

    @property
    def baseline(self) -> str:
        """The name of the variant to which the others are compared."""
        return next(iter(self.variants))


def tuned_loss(run: FinishedRun) -> float:
    """Return the validation loss of a run of a tuning. It is infinite if there is none: then the
    training diverged.
    """
    for score in run.scores:
        if score.task == TRAINING and score.metric == LOSS:
            return score.value
    return math.inf


def read_ladder(path: str | Path) -> Ladder:
    """Read a ladder. Raises OSError, or FileError if the file is invalid."""
    ladder = read_dataclass(path, Ladder)
    named = set()
    for point in ladder.points:
        named |= {*point.learning_rates, *point.tuning, *point.comparison.variants}
    unknown = sorted(named - set(ladder.variants))
    if unknown:
        raise FileError(path, f"cannot be used: variants lacks {unknown[0][:40]}")
    if not ladder.variants:
        raise FileError(path, "cannot be used: variants is empty")
    return ladder


def write_ladder(path: Path, ladder: Ladder) -> None:
    """Write the file, replacing an earlier one atomically."""
    content = asdict(ladder)
    for point, saved in zip(ladder.points, content["points"]):
        saved["comparison"] = as_content(point.comparison)
        saved["tuning"] = {name: as_content(tuned) for name, tuned in point.tuning.items()}
    write_record(path, content)
