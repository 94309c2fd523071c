"""Training curves of runs side by side, and how fast runs and evaluations were."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import numpy as np

from megatron_tape.evaluation.base import Drawing, Picture
from megatron_tape.evaluation.figures import LONGEST_AXIS_LABEL, legend, new_figure, panels, plain, styles
from megatron_tape.evaluation.report.models import DURING, MOST_CURVES, Curve, Model, Run, clean
from megatron_tape.evaluation.report.tables import Cell, Column, Table, enumerated, number, task_names, task_title
from megatron_tape.evaluation.results import TaskResult
from megatron_tape.text import counted, duration

_SHOWN_POINTS = 300
"""Points of a curve; a longer one is drawn as means over consecutive points."""
_MOST_DURING = 100
"""Metrics of evaluations during training that are drawn: the first ones by name."""
_HIDDEN = 0.05
_WITH_MARKERS = 16
_LENGTH = re.compile("[0-9]{1,12}")
_UNITS = ((1e9, "billions of tokens"), (1e6, "millions of tokens"), (1e3, "thousands of tokens"), (1, "tokens"))


def curves(models: Sequence[Model]) -> Iterator[Drawing]:
    """Yield drawings of losses and learning rates, by step and, where all runs have logged them, by tokens.

    What no run has logged twice is left out.
    """
    runs = _drawn(models)
    for metric, name in (("loss", "training loss"), ("validation_loss", "validation loss")):
        drawn = {label: run.curve(metric) for label, run in runs.items() if run.curve(metric).count}
        if not _is_curve(drawn.values()):
            continue
        yield f"{name} by step", partial(_losses, drawn, metric, name, "step", "step")
        if all(curve.tokens is not None for curve in drawn.values()):
            most = max(curve.tokens[-1] for curve in drawn.values())
            size, unit = next((size, unit) for size, unit in _UNITS if most >= size or size == 1)
            yield f"{name} by tokens", partial(_losses, drawn, metric, name, "tokens", unit, size)
    rates = {label: run.curve("lr") for label, run in runs.items() if run.curve("lr").count}
    if _is_curve(rates.values()):
        yield "learning rate", partial(_learning_rates, rates)
    yield from _evaluations(runs)


def limits(models: Sequence[Model]) -> list[str]:
    """Return a sentence for each limit that keeps something of the runs from being shown."""
    runs = [model.run for model in models if model.run is not None]
    drawn, metrics, found = _drawn(models), _metrics(_drawn(models)), []
    if len(drawn) < len(runs):
        found.append(f"Pictures show the first {len(drawn)} of {len(runs):,} runs.")
    if cut := [label for label, run in drawn.items() if not run.all_metrics]:
        found.append(f"Of {enumerated(cut)}, only the first {MOST_CURVES} metrics are read.")
    if len(metrics) > _MOST_DURING:
        found.append(f"Pictures show the first {_MOST_DURING} of {len(metrics):,} metrics of evaluations.")
    return found


def _drawn(models: Sequence[Model]) -> dict[str, Run]:
    return {model.label: model.run for model in models if model.run is not None and model.run.drawn}


def _metrics(runs: dict[str, Run]) -> list[str]:
    """Return the metrics of evaluations during training that some run has logged more than once."""
    keys = sorted({key for run in runs.values() for key in run.curves if key.startswith(DURING)})
    return [key for key in keys if _is_curve(run.curve(key) for run in runs.values())]


def _is_curve(found: Iterable[Curve]) -> bool:
    return any(curve.count > 1 for curve in found)


def _losses(runs: dict[str, Curve], metric: str, name: str, by: str, x_label: str, size: float = 1) -> Picture:
    figure, (axes,) = new_figure()
    look = styles(runs)
    last, tops, highest = [], [], []
    for label, curve in runs.items():
        last.append(f"{label} {curve.last[1]:.4g}")
        x, y = thinned(curve.tokens if by == "tokens" else curve.steps, curve.values)
        style = {**look[label], "marker": look[label]["marker"] if len(x) <= _WITH_MARKERS else ""}
        axes.plot(x / size, y, **style)
        tops.append(y[int(len(y) * _HIDDEN) :].max())
        highest.append(y.max())
    axes.set(xlabel=x_label, ylabel=f"{name} (nats per token)")
    bottom, top = axes.get_ylim()
    if max(tops) < bottom + 0.7 * (max(highest) - bottom):
        # The first steps, at the loss of a random model, would leave no room for the others.
        axes.set_ylim(bottom, max(tops) + 0.05 * (max(tops) - bottom))
        axes.set_title("the first steps lie above", fontsize=8, loc="left")
    legend(figure)
    text = f"{name.capitalize()} (nats per token) by {by}; at the end, {enumerated(last)}."
    return Picture(f"{metric}-by-{by}", text, figure)


def _learning_rates(runs: dict[str, Curve]) -> Picture:
    """Return a picture of the learning rates, in which runs of the same rates share a curve."""
    shared: dict[tuple, list[str]] = {}
    for label, curve in runs.items():
        shared.setdefault((curve.count, curve.steps.tobytes(), curve.values.tobytes()), []).append(label)
    figure, (axes,) = new_figure()
    look, highest = styles(runs), []
    for labels in shared.values():
        curve = runs[labels[0]]
        style = {**look[labels[0]], "marker": "", "label": plain(enumerated(labels), 48)}
        axes.plot(*thinned(curve.steps, curve.values), **style)
        highest.append(f"{enumerated(labels)} up to {curve.highest:.3g}")
    axes.set(xlabel="step", ylabel="learning rate", ylim=(0, None))
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    legend(figure)
    return Picture("lr-by-step", f"Learning rate by step; {'; '.join(highest)}.", figure)


def _evaluations(runs: dict[str, Run]) -> Iterator[Drawing]:
    """Yield drawings of what tasks found during training, with a panel for each length.

    Their metrics are called `evaluation/TASK/METRIC`, and then by group and length, if there are such.
    """
    found: dict[str, list[str]] = {}
    for key in _metrics(runs)[:_MOST_DURING]:
        head, _, tail = key.rpartition("/")
        found.setdefault(head if _LENGTH.fullmatch(tail) else key, []).append(key)
    for stem, keys in found.items():
        name = ", ".join(task_title(clean(part)) for part in stem.removeprefix(DURING).split("/"))
        yield name, partial(_evaluation, runs, name, {key: _length_of(key) for key in sorted(keys, key=_length_of)})


def _evaluation(runs: dict[str, Run], name: str, lengths: dict[str, int]) -> Picture:
    figure, shown = panels(len(lengths), width=4.2)
    look, last = styles(runs), []
    for axes, (key, length) in zip(shown, lengths.items()):
        at = f" at {length:,} tokens" if length else ""
        for label, run in runs.items():
            curve = run.curve(key)
            if curve.count:
                axes.plot(*thinned(curve.steps, curve.values), **look[label])
                last.append(f"{label} {curve.last[1]:.4g}{at}")
        axes.set(xlabel="step", ylabel=plain(name, LONGEST_AXIS_LABEL))
        axes.set_title(at.strip(), fontsize=10)
    legend(figure)
    text = f"During training, {name} by step; at the end, {enumerated(last)}."
    return Picture("during-training", text, figure)


def _length_of(key: str) -> int:
    tail = key.rpartition("/")[2]
    return int(tail) if _LENGTH.fullmatch(tail) else 0


def thinned(x: Sequence[float], y: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Return a curve of at most `_SHOWN_POINTS` points, each the mean over consecutive ones."""
    parts = np.array_split(np.arange(len(x)), min(len(x), _SHOWN_POINTS))
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    return np.array([x[part].mean() for part in parts]), np.array([y[part].mean() for part in parts])


def runs_table(models: Sequence[Model]) -> Table | None:
    """Return a table of how far each run is and how low its losses are."""
    rows = []
    for model, run in _with_rows(models):
        loss, validation = run.curve("loss"), run.curve("validation_loss")
        done, planned = run.last["step"], run.setting("train.steps")
        of = f"of {planned:,}" if type(planned) is int and planned != done else ""
        lowest, at = validation.lowest or (None, 0)
        rows.append(
            [
                Cell(model.label, model.label),
                number(done, 0, of),
                number(run.last.get("tokens"), 0),
                number(loss.recent, 4),
                number(validation.last and validation.last[1], 4),
                number(lowest, 4, f"at step {at:,}"),
            ]
        )
    last = "training loss, last 5\N{NO-BREAK SPACE}%"
    numbers = ["steps", "tokens", last, "validation loss, last", "validation loss, lowest"]
    columns = [Column("run"), *(Column(name, "number") for name in numbers)]
    return Table("How far each run is; losses in nats per token", columns, rows) if rows else None


def _with_rows(models: Sequence[Model]) -> list[tuple[Model, Run]]:
    return [(model, model.run) for model in models if model.run is not None and model.run.last]


def training_speeds(models: Sequence[Model]) -> Table | None:
    """Return a table of the runs' speeds: medians over the logged steps."""
    rows = []
    for model, run in _with_rows(models):
        speeds = [run.curve(metric) for metric in ("tokens_per_second", "tflops_per_second")]
        medians = [number(curve.median) for curve in speeds]
        rows.append([Cell(model.label, model.label), *medians, number(speeds[0].count, 0)])
    columns = [Column("run"), *(Column(name, "number") for name in ("tokens/s", "TFLOP/s", "logged steps"))]
    return Table("Training: medians over logged steps, of all processes together", columns, rows) if rows else None


def evaluation_seconds(models: Sequence[Model]) -> Table | None:
    """Return a table of how long each task took with each model, and on what."""
    shown = [(index, model) for index, model in enumerate(models) if model.tasks]
    rows = []
    for name in task_names(models):
        cells = [_seconds(model.tasks[name]) if name in model.tasks else number(None) for _, model in shown]
        rows.append([Cell(task_title(name), task_title(name)), *cells])
    columns = [Column("task"), *(Column(model.label, "number", index) for index, model in shown)]
    return Table("Evaluation: time taken; below it, processes and precision", columns, rows) if rows else None


def _seconds(task: TaskResult) -> Cell:
    detail = f"{counted(task.processes, 'process', 'processes')} \N{MIDDLE DOT} {clean(task.dtype)}"
    if task.parts_before:
        detail += f" \N{MIDDLE DOT} without {counted(task.parts_before, 'part')} done before an interruption"
    shown = f"{task.seconds:.1f} s" if task.seconds < 60 else duration(task.seconds)
    return Cell(shown, task.seconds, detail, "number")
