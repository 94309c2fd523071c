"""What a report is made from: runs and results, gathered by model. Imports no torch.

Labels and texts come from files that others may have written: they are data, cleaned here of what no page can show and
escaped where they are shown.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from megatron_tape.errors import FileError
from megatron_tape.evaluation.results import NAME, EvaluatedModel, Results, TaskResult, read_results
from megatron_tape.io.records import parse_record, read_yaml

METRICS, SETTINGS = "metrics.jsonl", "config.yaml"
Settings = dict[str, dict[str, Any]]
# Control characters, lone surrogates, and marks that turn the direction of the text around them.
_UNSHOWABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069\ufffe\uffff]")


class _Row(TypedDict):
    step: int


@dataclass(frozen=True)
class Run:
    """A training run: its settings, empty if it has not written any, and the rows of its metrics."""

    path: Path
    settings: Settings
    rows: list[dict[str, float]]

    def setting(self, key: str) -> Any:
        """Return the value of a setting such as `train.steps`, None if there is none."""
        section, _, name = key.partition(".")
        return self.settings.get(section, {}).get(name)

    def curve(self, metric: str, by: str = "step") -> tuple[list[float], list[float]]:
        """Return the steps, or the tokens of the training so far, at which a metric was logged, and its values."""
        found = [(row[by], row[metric]) for row in self.rows if metric in row]
        return [place for place, _ in found], [value for _, value in found]


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
    seen: set[Path] = set()
    runs: list[Run] = []
    for path in map(Path, paths):
        run, files = _files_of(path)
        if run is not None and run.path.resolve() not in seen:
            seen.add(run.path.resolve())
            runs.append(run)
            models.append(Model(clean(run.path.resolve().name), run=run, source=run.path.resolve()))
        for file in files:
            if file.resolve() not in seen:
                seen.add(file.resolve())
                _add(models, read_results(file), file)
    for run in runs:
        _join(models, run)
    for model, label in zip(models, distinct([(m.label, m.step, m.source) for m in models])):
        model.label = label
    return models


def clean(text: str) -> str:
    """Return a text on one line without the characters that neither a page nor a picture can show."""
    return " ".join(_UNSHOWABLE.sub("\N{REPLACEMENT CHARACTER}", text).split())


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


def _files_of(path: Path) -> tuple[Run | None, list[Path]]:
    if not path.exists():
        raise FileError(str(path), "does not exist", f"give a run, a {NAME}, or a directory that holds one")
    if path.is_file():
        return None, [path]
    files = [path / NAME] if (path / NAME).is_file() else []
    if any((path / name).is_file() for name in (METRICS, SETTINGS)):
        return read_run(path), files + sorted(path.glob(f"evaluation/*/{NAME}"))
    if not files:
        fix = "give a training run, or the directory into which pretrain.evaluate wrote"
        raise FileError(str(path), f"holds neither {METRICS} nor {NAME}", fix)
    return None, files


def read_run(path: Path) -> Run:
    """Read a run's settings and metrics, as far as they are written; FileError or OSError for damaged files."""
    settings = read_yaml(path / SETTINGS, Settings) if (path / SETTINGS).is_file() else {}
    file, rows = path / METRICS, []
    lines = file.read_bytes().split(b"\n") if file.is_file() else [b""]
    for number, line in enumerate(lines[:-1], 1):  # what follows the last line's end is still being written
        try:
            row = parse_record(line, _Row)
        except ValueError as error:
            raise FileError(str(file), f"cannot be used: line {number}: {error}") from None
        rows.append({key: value for key, value in row.items() if _is_number(value)})
    return Run(path, settings, rows)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _add(models: list[Model], results: Results, file: Path) -> None:
    label = clean(results.label)
    tasks = {clean(name): replace(task, examples={}) for name, task in results.tasks.items()}
    for model in models:
        same = model.evaluated is not None and (model.label, model.evaluated.digest) == (label, results.model.digest)
        if same and all(_comparable(model.tasks[name], tasks[name]) for name in tasks.keys() & model.tasks.keys()):
            break
    else:
        model = Model(label, evaluated=results.model, source=file.resolve().parent)
        models.append(model)
    for name, task in tasks.items():
        if results.created >= model.created.get(name, 0.0):
            model.tasks[name], model.created[name] = task, results.created


def _comparable(one: TaskResult, other: TaskResult) -> bool:
    return (one.settings, one.data, one.dtype) == (other.settings, other.data, other.dtype)


def _join(models: list[Model], run: Run) -> None:
    """Give a run to the newest of the evaluated models that it made, if there are any."""
    root = run.path.resolve()
    made = [model for model in models if model.evaluated is not None and model.run is None and _made(root, model)]
    if made:
        newest = max(made, key=lambda model: model.step or 0)
        newest.run = run
        models[:] = [model for model in models if model.run is not run or model is newest]


def _made(root: Path, model: Model) -> bool:
    # The path comes from a file: it is compared, and not looked up.
    weights = Path(os.path.abspath(model.evaluated.path))
    return root in (*model.source.parents, weights, *weights.parents)
