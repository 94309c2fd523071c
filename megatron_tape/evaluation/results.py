"""Scores, and the file `results.json`: the scores of a model, and the settings, data and versions
behind them.

Imports no torch.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Strict, ValidationError

from megatron_tape.errors import FileError
from megatron_tape.io.records import RECORD_BYTES, parse_record, read_small, validator, write_record
from megatron_tape.text import counted

NAME = "results.json"
_MOST_BYTES = 1 << 28
"""Maximum size of the file, which contains the values of all units."""
Number = Annotated[float, Strict()]
Whole = Annotated[int, Strict()]
"""Types of numbers in files. Strings and booleans are refused instead of converted."""


@dataclass(frozen=True)
class Score:
    """One measured value. Tasks return scores; result files, pages, model cards and comparisons
    show them.
    """

    metric: str
    """The name of the metric, such as `perplexity` or `accuracy`."""
    value: Number
    better: Literal["lower", "higher", "neither"]
    """Which values are better; `neither` for a metric that describes models without ranking them.
    """
    low: Number | None = None
    """Lower end of the 95 % confidence interval."""
    high: Number | None = None
    length: Whole | None = None
    """Context length in tokens; None if the score is not about one length."""
    group: str = ""
    """The dataset, subtask or variant that the score is about; empty if the task has only one."""
    count: Whole | None = None
    """Number of samples behind the value, in the unit `counted`."""
    unit: str = ""
    """Unit of the value, such as `nats per token`; empty if it has none, such as for a fraction."""
    counted: str = "sample"
    """What `count` counts, in the singular, such as document or token."""
    task: str = ""
    """Name of the task; set by the runner."""

    @property
    def subject(self) -> Score:
        """The score without value, interval and count. Scores with equal subjects can be compared
        between models.
        """
        return replace(self, value=0.0, low=None, high=None, count=None, counted="sample")

    @property
    def is_fraction(self) -> bool:
        """Whether the value is a fraction between 0 and 1, such as an accuracy."""
        return self.better == "higher" and not self.unit and 0 <= self.value <= 1

    @property
    def shown_value(self) -> str:
        """The value as text with its unit, in four significant digits."""
        return f"{self.value:.4g} {self.unit}".rstrip()

    @property
    def shown_count(self) -> str:
        """The number of samples as text, such as `32 documents`; empty if unknown."""
        if self.count is None:
            return ""
        return counted(self.count, self.counted)

    @property
    def shown_interval(self) -> str:
        """The 95 % confidence interval as text; empty if there is none."""
        if self.low is None or self.high is None:
            return ""
        return f"{self.low:.4g} to {self.high:.4g}"


@dataclass(frozen=True)
class ModelRecord:
    """The evaluated model in `results.json`."""

    path: str
    digest: str
    parameters: Whole
    trained_length: Whole | None
    """Context length in tokens; `rope_scaling` has multiplied it."""
    config: dict[str, Any]
    run: dict[str, Any] | None = None
    """The `settings` and the `step` of a checkpoint; None for a model in transformers format."""
    rope_scaling: str | None = None
    """The scaling given by --rope-scaling, such as `yarn-x4`; `config` contains it, too."""


@dataclass(frozen=True)
class TaskResult:
    """Results of one task in `results.json`."""

    settings: dict[str, Any]
    data: dict[str, str]
    """SHA-256 of the files that were read, by path."""
    seconds: Number
    processes: Whole
    scores: list[Score]
    details: dict[str, Any]
    notes: list[str]
    examples: dict[str, Any]
    """The return values of `Task.evaluate`, by unit key."""
    dtype: str
    hardware: str
    versions: dict[str, str]
    identity: str = ""
    """Digest of everything that the results depend on."""
    parts_before: Whole = 0
    """Number of units finished before an interruption; their time is not in `seconds`."""


@dataclass(frozen=True)
class Results:
    """The contents of `results.json`."""

    label: str
    model: ModelRecord
    created: Number
    """Time when the last task finished, in seconds since 1970."""
    tasks: dict[str, TaskResult] = field(default_factory=dict)
    format: Literal[1] = 1


def results_file(path: str | Path) -> Path:
    """Return the path of `results.json`, given this path or that of its directory."""
    path = Path(path)
    if path.is_dir():
        return path / NAME
    return path


def read_results(path: str | Path) -> Results:
    """Read `results.json`, given its path or its directory. Raises OSError, or FileError if it is
    invalid.
    """
    results = read_dataclass(results_file(path), Results, _MOST_BYTES)
    # A score belongs to the task under which the file lists it, whatever its own `task` says.
    tasks = {
        name: replace(task, scores=[replace(score, task=name) for score in task.scores])
        for name, task in results.tasks.items()
    }
    return replace(results, tasks=tasks)


def read_dataclass(file: str | Path, cls: type, limit: int = RECORD_BYTES) -> Any:
    """Read a JSON file of at most `limit` bytes as a dataclass `cls`. Raises OSError, or FileError
    if it is invalid.
    """
    try:
        value = parse_record(read_small(file, limit), dict[str, Any])
    except ValueError as error:
        raise FileError(file, f"cannot be used: {error}") from None
    try:
        return validator(cls).validate_python(value)
    except ValidationError as error:
        # The message names the first problem only. Keys of a damaged file may be long.
        problem = error.errors()[0]
        key = ".".join(str(part)[:40] for part in problem["loc"]) or "the whole file"
        raise FileError(file, f"cannot be used: {key}: {problem['msg']}") from None


def write_results(directory: Path, results: Results) -> None:
    """Write `results.json` into a directory, replacing an earlier one atomically."""
    write_record(directory / NAME, asdict(results))


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock the results in a directory within the context, so that other processes of this project
    wait.
    """
    # Closing the descriptor releases the lock, also if the process is killed.
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
