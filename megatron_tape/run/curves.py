"""Read a run's settings and logged metrics from its files. Does not import torch."""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import TypedDict

from megatron_tape.errors import FileError
from megatron_tape.io.records import parse_record, read_yaml
from megatron_tape.run.metrics import (
    LEARNING_RATE,
    LOSS,
    TFLOPS_PER_SECOND,
    TOKENS_PER_SECOND,
    VALIDATION_LOSS,
    read_lines,
)

METRICS = "metrics.jsonl"
SETTINGS = "config.yaml"
METRICS_READ = (LOSS, VALIDATION_LOSS, LEARNING_RATE, TOKENS_PER_SECOND, TFLOPS_PER_SECOND)
"""Metrics that `read_run` reads, in addition to those with the prefix `DURING`."""
DURING = "evaluation/"
"""Prefix of the metrics of tasks that run during training (section `evaluation`)."""
MOST_POINTS = 1 << 12
"""Maximum number of points per curve. Longer curves keep every second, fourth, ... point."""


class _Row(TypedDict):
    step: int


@dataclass
class Curve:
    """The logged values of a metric by step; for long runs, an evenly spaced subset of them."""

    steps: array = field(default_factory=lambda: array("d"))
    values: array = field(default_factory=lambda: array("d"))
    last: tuple[int, float] | None = None
    """The last logged step and its value, even if the subset does not contain it."""
    _count: int = 0
    _every: int = 1

    def add(self, step: int, value: float) -> None:
        """Add the value of the next logged step."""
        if self._count % self._every == 0:
            self.steps.append(step)
            self.values.append(value)
        self._count = self._count + 1
        self.last = (step, value)
        if len(self.steps) > MOST_POINTS:
            self._every = 2 * self._every
            self.steps = self.steps[::2]
            self.values = self.values[::2]

    @property
    def median(self) -> float | None:
        if self.values:
            return float(np.median(self.values))
        return None

    @property
    def recent(self) -> float | None:
        """Mean of the last twentieth of the points."""
        if self.values:
            return float(np.mean(self.values[-max(1, len(self.values) // 20) :]))
        return None


@dataclass(frozen=True)
class Run:
    """A training run, read from its files."""

    settings: dict[str, dict[str, Any]]
    """Settings by section and key; empty if they are not written yet."""
    curves: dict[str, Curve]
    """Curves by metric, such as `train/loss`."""
    last: dict[str, float]
    """Values by metric in the last row of `metrics.jsonl`; empty if there is no row."""

    def curve(self, metric: str) -> Curve:
        """Return the curve of a metric, or an empty curve if the metric was never logged."""
        return self.curves.get(metric) or Curve()


def read_run(path: Path) -> Run:
    """Read the settings and metrics of the run in the directory `path`. Raises FileError or
    OSError.
    """
    if (path / SETTINGS).exists():
        settings = read_yaml(path / SETTINGS, dict[str, dict[str, Any]])
    else:
        settings = {}
    file = path / METRICS
    curves = defaultdict(Curve)
    row = {}
    for number, line in enumerate(read_lines(file), 1):
        if not line.endswith(b"\n"):
            break  # The run is still writing this line.
        try:
            row = parse_record(line, _Row)
        except ValueError as error:
            raise FileError(str(file), f"cannot be used: line {number}: {error}") from None
        row = {
            key: value
            for key, value in row.items()
            if type(value) in (int, float) and math.isfinite(value)
        }
        for key, value in row.items():
            if key in METRICS_READ or key.startswith(DURING):
                curves[key].add(row["step"], value)
    return Run(settings, dict(curves), row)
