"""Training curves of runs side by side, and how fast runs and evaluations were."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from megatron_tape.evaluation.base import Picture
from megatron_tape.evaluation.figures import legend, new_figure, panels, plain, shorten, styles
from megatron_tape.evaluation.report.models import Model, Run, clean
from megatron_tape.evaluation.report.tables import Cell, Column, Table, enumerated, number, task_names, task_title
from megatron_tape.evaluation.results import TaskResult
from megatron_tape.text import counted, duration

MOST_POINTS = 300
"""Points of a curve; a longer one is drawn as means over consecutive points."""
DURING = "evaluation/"
"""How metrics begin that an evaluation during training found."""
_HIDDEN = 0.05
_WITH_MARKERS = 16
_UNITS = ((1e9, "billions of tokens"), (1e6, "millions of tokens"), (1e3, "thousands of tokens"), (1, "tokens"))


def curves(models: Sequence[Model]) -> list[Picture]:
    """Return pictures of losses and learning rates, by step and, where all runs have logged them, by tokens.

    What no run has logged twice is left out.
    """
    runs = {model.label: model.run for model in models if model.run is not None}
    pictures = []
    for metric, name in (("loss", "training loss"), ("validation_loss", "validation loss")):
        drawn = {label: run for label, run in runs.items() if run.curve(metric)[0]}
        if not _is_curve(drawn, metric):
            continue
        pictures.append(_losses(drawn, metric, name, "step", "step"))
        if all("tokens" in row for run in drawn.values() for row in run.rows if metric in row):
            most = max(run.curve(metric, "tokens")[0][-1] for run in drawn.values())
            size, unit = next((size, unit) for size, unit in _UNITS if most >= size or size == 1)
            pictures.append(_losses(drawn, metric, name, "tokens", unit, size))
    return pictures + _learning_rates(runs) + _evaluations(runs)


def _is_curve(runs: dict[str, Run], metric: str) -> bool:
    return any(len(run.curve(metric)[0]) > 1 for run in runs.values())


def _losses(runs: dict[str, Run], metric: str, name: str, by: str, x_label: str, size: float = 1) -> Picture:
    figure, (axes,) = new_figure()
    look = styles(runs)
    last, tops, highest = [], [], []
    for label, run in runs.items():
        places, values = run.curve(metric, by)
        last.append(f"{label} {values[-1]:.4g}")
        x, y = thinned(places, values)
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


def _learning_rates(runs: dict[str, Run]) -> list[Picture]:
    """Return a picture of the learning rates, in which runs of the same rates share a curve."""
    if not _is_curve(runs, "lr"):
        return []
    shared: dict[tuple, list[str]] = {}
    for label, run in runs.items():
        steps, rates = run.curve("lr")
        if steps:
            shared.setdefault((tuple(steps), tuple(rates)), []).append(label)
    figure, (axes,) = new_figure()
    look, highest = styles(runs), []
    for (steps, rates), labels in shared.items():
        style = {**look[labels[0]], "marker": "", "label": plain(shorten(enumerated(labels), 48))}
        axes.plot(*thinned(steps, rates), **style)
        highest.append(f"{enumerated(labels)} up to {max(rates):.3g}")
    axes.set(xlabel="step", ylabel="learning rate", ylim=(0, None))
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    legend(figure)
    return [Picture("lr-by-step", f"Learning rate by step; {'; '.join(highest)}.", figure)]


def _evaluations(runs: dict[str, Run]) -> list[Picture]:
    """Return pictures of what tasks found during training, with a panel for each length.

    Their metrics are called `evaluation/TASK/METRIC`, and then by group and length, if there are such.
    """
    found: dict[str, list[str]] = {}
    for key in sorted({key for run in runs.values() for row in run.rows for key in row if key.startswith(DURING)}):
        if _is_curve(runs, key):
            head, _, tail = key.rpartition("/")
            found.setdefault(head if tail.isdecimal() else key, []).append(key)
    pictures = []
    for stem, keys in found.items():
        keys.sort(key=_length_of)
        figure, shown = panels(len(keys), width=4.2)
        look, last = styles(runs), []
        name = ", ".join(task_title(clean(part)) for part in stem.removeprefix(DURING).split("/"))
        for axes, key in zip(shown, keys):
            at = f" at {_length_of(key):,} tokens" if key != stem else ""
            for label, run in runs.items():
                steps, values = run.curve(key)
                if steps:
                    axes.plot(*thinned(steps, values), **look[label])
                    last.append(f"{label} {values[-1]:.4g}{at}")
            axes.set(xlabel="step", ylabel=plain(name))
            axes.set_title(at.strip(), fontsize=10)
        legend(figure)
        text = f"During training, {name} by step; at the end, {enumerated(last)}."
        pictures.append(Picture("during-training", text, figure))
    return pictures


def _length_of(key: str) -> int:
    tail = key.rpartition("/")[2]
    return int(tail) if tail.isdecimal() else 0


def thinned(x: Sequence[float], y: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Return a curve of at most `MOST_POINTS` points, each the mean over consecutive ones."""
    parts = np.array_split(np.arange(len(x)), min(len(x), MOST_POINTS))
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    return np.array([x[part].mean() for part in parts]), np.array([y[part].mean() for part in parts])


def runs_table(models: Sequence[Model]) -> Table | None:
    """Return a table of how far each run is and how low its losses are."""
    rows = []
    for model, run in _with_rows(models):
        losses, (steps, evaluated) = run.curve("loss")[1], run.curve("validation_loss")
        lowest = min(zip(evaluated, steps), default=(None, 0))
        done, planned = run.rows[-1]["step"], run.setting("train.steps")
        of = f"of {planned:,}" if type(planned) is int and planned != done else ""
        recent = losses[-max(1, len(losses) // 20) :]
        rows.append(
            [
                Cell(model.label, model.label),
                number(done, 0, of),
                number(run.rows[-1].get("tokens"), 0),
                number(statistics.fmean(recent) if recent else None, 4),
                number(evaluated[-1] if evaluated else None, 4),
                number(lowest[0], 4, f"at step {lowest[1]:,}"),
            ]
        )
    last = "training loss, last 5\N{NO-BREAK SPACE}%"
    numbers = ["steps", "tokens", last, "validation loss, last", "validation loss, lowest"]
    columns = [Column("run"), *(Column(name, "number") for name in numbers)]
    return Table("How far each run is; losses in nats per token", columns, rows) if rows else None


def _with_rows(models: Sequence[Model]) -> list[tuple[Model, Run]]:
    return [(model, model.run) for model in models if model.run is not None and model.run.rows]


def training_speeds(models: Sequence[Model]) -> Table | None:
    """Return a table of the runs' speeds: medians over the logged steps."""
    rows = []
    for model, run in _with_rows(models):
        speeds = [run.curve(metric)[1] for metric in ("tokens_per_second", "tflops_per_second")]
        medians = [number(statistics.median(values) if values else None) for values in speeds]
        rows.append([Cell(model.label, model.label), *medians, number(len(speeds[0]), 0)])
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
