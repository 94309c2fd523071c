"""What a report is made from: runs and results, gathered by model. Imports no torch.

Labels and texts come from files that others may have written: they are data, cleaned here of what no page can show and
escaped where they are shown.
"""

from __future__ import annotations

import math
import os
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import TypedDict

from megatron_tape.command_line import Progress
from megatron_tape.errors import FileError
from megatron_tape.evaluation.figures import MOST_MODELS, clean
from megatron_tape.evaluation.results import NAME, EvaluatedModel, Results, TaskResult, read_results
from megatron_tape.io.records import parse_record, read_yaml
from megatron_tape.run.metrics import LINE_BYTES, read_lines

METRICS, SETTINGS = "metrics.jsonl", "config.yaml"
Settings = dict[str, dict[str, Any]]
METRICS_READ = ("loss", "validation_loss", "lr", "tokens_per_second", "tflops_per_second")
"""What is read of a row, besides the phases of a step and what evaluations found."""
_OF_MEDIANS = ("tokens_per_second", "tflops_per_second")
"""Metrics whose median is shown."""
PHASES = ("data", "forward", "backward", "forward_backward", "communication", "optimizer", "save")
"""In the order of a step."""
_SECONDS = tuple(f"seconds/{phase}" for phase in PHASES)
DURING = "evaluation/"
"""How metrics begin that an evaluation during training found."""
MOST_CURVES = 200
"""Metrics of a run that are read."""
MOST_POINTS = 1 << 14
"""Points of a metric that are kept: of more, means over two, four, ... consecutive ones."""
LONGEST_LABEL = 200


class _Row(TypedDict):
    step: int


@dataclass
class Curve:
    """A metric of a run: its points, or the means of equally long blocks of points, and statistics over all points."""

    steps: array = field(default_factory=lambda: array("d"))
    """The step of the first point in each block."""
    tokens: array | None = field(default_factory=lambda: array("d"))
    """Tokens that training had seen at these points; None if a row lacks them."""
    values: array = field(default_factory=lambda: array("d"))
    count: int = 0
    total: float = 0.0
    last: tuple[int, float] | None = None
    """The last step and its value."""
    lowest: tuple[float, int] | None = None
    """The lowest value and its step."""
    highest: float = -math.inf
    median: float | None = None
    """The median, for metrics added with `of_median`."""
    recent: float | None = None
    """The mean over the last twentieth of the blocks."""
    _block: int = 1
    """Points of a block; the last one may have fewer."""
    _all: array = field(default_factory=lambda: array("d"))
    """All values, kept until the median is computed."""

    def add(self, step: int, tokens: float | None, value: float, of_median: bool = False) -> None:
        """Add the next point."""
        if of_median:
            self._all.append(value)
        if in_block := self.count % self._block:
            # Not the difference, which may be too large for a number.
            self.values[-1] += value / (in_block + 1) - self.values[-1] / (in_block + 1)
        else:
            if len(self.steps) == MOST_POINTS:
                self._halve()
            self.steps.append(step)
            self.values.append(value)
            if tokens is None:
                self.tokens = None
            elif self.tokens is not None:
                self.tokens.append(tokens)
        self.count, self.total, self.last = self.count + 1, self.total + value, (step, value)
        self.highest = max(self.highest, value)
        if self.lowest is None or value < self.lowest[0]:
            self.lowest = value, step

    def end(self, drawn: bool) -> None:
        """Find what depends on all points. Remove the points unless the curve will be `drawn`."""
        recent = self.values[-max(1, len(self.values) // 20) :]
        self.recent = sum(recent) / len(recent)
        if self._all:
            with np.errstate(over="ignore"):  # of the mean of the two values in the middle
                self.median = float(np.median(self._all))
            self._all = array("d")
        if not drawn:
            self.steps, self.tokens, self.values = array("d"), None, array("d")

    def _halve(self) -> None:
        """Join each two blocks to one."""
        self._block *= 2
        self.steps = self.steps[::2]
        self.tokens = None if self.tokens is None else self.tokens[::2]
        self.values = array("d", (one / 2 + next_one / 2 for one, next_one in zip(self.values[::2], self.values[1::2])))


_NOTHING = Curve()


@dataclass(frozen=True)
class Run:
    """A training run: its settings, empty if it has not written any, and what it has logged."""

    path: Path
    settings: Settings
    curves: dict[str, Curve] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    """The numbers of the last row; empty if there is none."""
    drawn: bool = True
    """Whether pictures show it. If not, its curves have no points."""
    all_metrics: bool = True
    """Whether all metrics of its evaluations were read: not if there are more than MOST_CURVES."""

    def setting(self, key: str) -> Any:
        """Return the value of a setting such as `train.steps`, None if there is none."""
        section, _, name = key.partition(".")
        return self.settings.get(section, {}).get(name)

    def curve(self, metric: str) -> Curve:
        """Return the curve of a metric, which is empty if the metric was never logged."""
        return self.curves.get(metric, _NOTHING)


@dataclass
class Model:
    """A model of the report: a checkpoint's evaluations, the run that made it, or both."""

    label: str
    tasks: dict[str, TaskResult] = field(default_factory=dict)
    """Its results by task, without examples."""
    evaluated: EvaluatedModel | None = None
    """What `results.json` says of the model; None if it was not evaluated."""
    run: Run | None = None
    source: Path = Path()
    """Where the run or the first results lie; tells models of one label apart."""
    created: dict[str, float] = field(default_factory=dict)
    """When the results of each task were written."""

    @property
    def settings(self) -> Settings:
        """The settings of the run that made the model, as far as they are known."""
        settings = self._recorded.get("settings")
        if isinstance(settings, dict) and all(isinstance(section, dict) for section in settings.values()):
            return settings
        return self.run.settings if self.run else {}

    @property
    def step(self) -> int | None:
        step = self._recorded.get("step")
        return step if type(step) is int else None

    @property
    def _recorded(self) -> dict[str, Any]:
        return self.evaluated.run or {} if self.evaluated else {}


def read_models(paths: Iterable[str | Path]) -> list[Model]:
    """Read runs, results files and directories of such files; return the models in that order.

    Results of the same label and weights are one model. A run belongs to the newest of its checkpoints that is given.
    Labels that several models have are told apart by step or directory.

    Raises:
        FileError: if something is neither a run nor results, or is damaged.
        OSError: if a file cannot be read.
    """
    models: list[Model] = []
    known: dict[tuple[str, str], list[Model]] = {}
    seen: set[Path] = set()
    runs: list[Run] = []
    progress = Progress(None)
    for path in map(Path, paths):
        is_run, files = _files_of(path)
        if is_run and (source := path.resolve()) not in seen:
            seen.add(source)
            runs.append(read_run(path, len(runs) < MOST_MODELS, progress))
            models.append(Model(clean(source.name, LONGEST_LABEL), run=runs[-1], source=source))
        for file in files:
            if file.resolve() not in seen:
                seen.add(file.resolve())
                _add(models, known, read_results(file), file)
        progress.update(0, lambda _: f"reading {path}")  # noqa: B023
    progress.end()
    models = _joined(models, runs)
    for model, label in zip(models, distinct([(m.label, m.step, m.source) for m in models])):
        model.label = label
    return models


def distinct(models: Sequence[tuple[str, int | None, Path]]) -> list[str]:
    """Return labels that all differ: a clash is resolved by the step, else by directories, else by a number."""
    labels = [label or "model" for label, _, _ in models]
    for label in [label for label, count in Counter(labels).items() if count > 1]:
        clashing = [index for index, other in enumerate(labels) if other == label]
        steps = [models[index][1] for index in clashing]
        hints = [f"step {step:,}" for step in steps if step is not None]
        for depth in range(1, 1 + max(len(models[index][2].parts) for index in clashing)):
            if len(set(hints)) == len(clashing):
                break
            hints = [clean("/".join(models[index][2].parts[-depth:])) for index in clashing]
        for number, (index, hint) in enumerate(zip(clashing, hints), 1):
            labels[index] = f"{label} ({hint if len(set(hints)) == len(clashing) else number})"
    for index, label in enumerate(labels):  # a suffix may be a part of somebody's own label
        number = 2
        while labels[index] in labels[:index]:
            labels[index] = f"{label} ({number})"
            number += 1
    return labels


def _files_of(path: Path) -> tuple[bool, list[Path]]:
    """Return whether a path is a run, and the results files in it."""
    if not path.exists():
        raise FileError(str(path), "does not exist", f"give a run, a {NAME}, or a directory that holds one")
    if not path.is_dir():
        return False, [path]
    files = [path / NAME] if (path / NAME).exists() else []
    if any((path / name).exists() for name in (METRICS, SETTINGS)):
        return True, files + sorted(path.glob(f"evaluation/*/{NAME}"))
    if not files:
        fix = "give a training run, or the directory into which pretrain.evaluate wrote"
        raise FileError(str(path), f"holds neither {METRICS} nor {NAME}", fix)
    return False, files


def read_run(path: Path, drawn: bool = True, progress: Progress | None = None) -> Run:
    """Read a run's settings and metrics, as far as they are written; FileError or OSError for damaged files.

    `drawn` says whether pictures will show it (see `Run.drawn`).
    """
    settings = read_yaml(path / SETTINGS, Settings) if (path / SETTINGS).exists() else {}
    file, curves, row, all_metrics = path / METRICS, defaultdict(Curve), {}, True
    for number, line in enumerate(read_lines(file) if file.exists() else (), 1):
        if not line.endswith(b"\n"):
            break  # it is still being written
        try:
            if len(line) > LINE_BYTES:
                raise ValueError(f"it has more than {LINE_BYTES:,} bytes")
            row = parse_record(line, _Row)
        except ValueError as error:
            raise FileError(str(file), f"cannot be used: line {number}: {error}") from None
        row = {key: value for key, value in row.items() if _is_number(value)}
        all_metrics = _add_row(curves, row) and all_metrics
        if progress is not None and number % 1000 == 0:
            progress.update(0, lambda _: f"reading {file}: {number:,} rows")  # noqa: B023
    for curve in curves.values():
        curve.end(drawn)
    return Run(path, settings, dict(curves), row, drawn, all_metrics)


def _add_row(curves: defaultdict[str, Curve], row: dict[str, float]) -> bool:
    """Add a row to the curves of its metrics; return whether there is room for all of them."""
    step, tokens = row["step"], row.get("tokens")
    for key in METRICS_READ:
        if key in row:
            curves[key].add(step, tokens, row[key], key in _OF_MEDIANS)
    if not row.keys().isdisjoint(_SECONDS):
        for key in _SECONDS:
            curves[key].add(step, tokens, row.get(key, 0.0))
    room = True
    for key, value in row.items():
        if not key.startswith(DURING):
            continue
        if key in curves or len(curves) < MOST_CURVES:
            curves[key].add(step, tokens, value)
        else:
            room = False
    return room


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _add(models: list[Model], known: dict[tuple[str, str], list[Model]], results: Results, file: Path) -> None:
    """Add results to the model of their label and weights; `known` has the models by these."""
    label = clean(results.label, LONGEST_LABEL)
    tasks = {clean(name, LONGEST_LABEL): replace(task, examples={}) for name, task in results.tasks.items()}
    alike = known.setdefault((label, results.model.digest), [])
    for model in alike:
        if all(_comparable(model.tasks[name], tasks[name]) for name in tasks.keys() & model.tasks.keys()):
            break
    else:
        model = Model(label, evaluated=results.model, source=file.resolve().parent)
        models.append(model)
        alike.append(model)
    for name, task in tasks.items():
        if results.created >= model.created.get(name, 0.0):
            model.tasks[name], model.created[name] = task, results.created


def _comparable(one: TaskResult, other: TaskResult) -> bool:
    return (one.settings, one.data, one.dtype) == (other.settings, other.data, other.dtype)


def _joined(models: list[Model], runs: Iterable[Run]) -> list[Model]:
    """Give each run to the newest of the evaluated models that it made, if there are any; return the models."""
    made: dict[Path, list[Model]] = {}
    for model in models:
        if model.evaluated is not None:
            # The path of the weights comes from a file: it is compared, and not looked up.
            weights = Path(os.path.abspath(model.evaluated.path))
            for place in dict.fromkeys((*model.source.parents, weights, *weights.parents)):
                made.setdefault(place, []).append(model)
    given = set()
    for run in runs:
        if own := [model for model in made.get(run.path.resolve(), ()) if model.run is None]:
            max(own, key=lambda model: model.step or 0).run = run
            given.add(id(run))
    return [model for model in models if model.evaluated is not None or id(model.run) not in given]
