"""Read a run's settings and logged metrics from its files. Does not import torch."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_tape.errors import FileError
from megatron_tape.io.records import parse_record, read_yaml
from megatron_tape.run.metrics import (
    LEARNING_RATE,
    LOSS,
    TFLOPS_PER_SECOND,
    TOKENS_PER_SECOND,
    VALIDATION_LOSS,
    Row,
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


@dataclass(frozen=True)
class Curve:
    """The logged values of a metric by step; for long runs, an evenly spaced subset of them."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    last: tuple[int, float] | None = None
    """The last logged step and its value, even if the subset does not contain it."""

    @classmethod
    def thinned(cls, points: list[tuple[int, float]]) -> Curve:
        """Return the curve of at most MOST_POINTS of the `points`, a list of (step, value) that is
        not empty.
        """
        last = points[-1]
        while len(points) > MOST_POINTS:
            points = points[::2]
        return cls([step for step, _ in points], [value for _, value in points], last)

    @property
    def median(self) -> float | None:
        """Median of the points, or None if there are none."""
        if not self.values:
            return None
        return statistics.median(self.values)

    @property
    def recent(self) -> float | None:
        """Mean of the last twentieth of the points, or None if there are none."""
        if not self.values:
            return None
        count = max(1, len(self.values) // 20)
        return statistics.fmean(self.values[-count:])


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
    """Read the settings and metrics of the run in the directory `path`, which may still be running.

    Raises FileError if a file is damaged, and OSError if one cannot be read.
    """
    settings: dict[str, dict[str, Any]] = {}
    if (path / SETTINGS).exists():
        settings = read_yaml(path / SETTINGS, dict[str, dict[str, Any]])

    file = path / METRICS
    points: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
    row: dict[str, float] = {}
    for number, line in enumerate(read_lines(file), start=1):
        if not line.endswith(b"\n"):
            break  # the run is still writing this line
        try:
            values = parse_record(line, Row)
        except ValueError as error:
            raise FileError(str(file), f"cannot be used: line {number}: {error}") from None
        # Keep only the numbers, since texts and null are no points of a curve. Unlike isinstance,
        # this test excludes booleans, which are integers in Python.
        row = {name: value for name, value in values.items() if type(value) in (int, float)}
        for metric, value in row.items():
            if metric in METRICS_READ or metric.startswith(DURING):
                points[metric].append((int(row["step"]), value))

    curves = {metric: Curve.thinned(logged) for metric, logged in points.items()}
    return Run(settings, curves, row)
