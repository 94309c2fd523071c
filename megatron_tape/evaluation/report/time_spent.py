"""Where the time of runs went: phases of a step, attempts on a time line, and the share that became steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice

from megatron_tape.evaluation.base import Drawing, Picture
from megatron_tape.evaluation.figures import COLORS, LONGEST_LABEL, MOST_MODELS, legend, new_figure, panels, plain
from megatron_tape.evaluation.report.models import PHASES, Curve, Model, Run
from megatron_tape.evaluation.report.tables import Cell, Column, Table, enumerated, number
from megatron_tape.evaluation.report.training_curves import thinned
from megatron_tape.run.goodput import BETWEEN, KINDS, START, Spent, spent, totals
from megatron_tape.run.judging import AttemptRecord, read_attempts
from megatron_tape.text import counted, duration

BAR = (START, *(kind for kind in KINDS if kind not in (START, BETWEEN)))
"""Kinds of time as an attempt's bar shows them."""
MOST_ATTEMPTS = 60
"""Attempts that a time line shows: the last ones."""
MOST_SPIKES = 20
"""Spikes of a run that are shown: the last ones."""
_UNITS = ((86_400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds"))


def phases(models: Sequence[Model]) -> Iterator[Drawing]:
    """Yield the drawing of the seconds of a step by phase, with a panel for each run that has logged them twice."""
    runs = {model.label: model.run for model in models if model.run is not None and model.run.drawn}
    if found := {label: curves for label, run in runs.items() if (curves := _phases(run))}:
        yield "seconds of a step", partial(_draw_phases, found)


def _draw_phases(found: dict[str, dict[str, Curve]]) -> Picture:
    figure, shown = panels(len(found), width=4.6)
    means = []
    for axes, (label, curves) in zip(shown, found.items()):
        parts = {phase: thinned(curve.steps, curve.values) for phase, curve in curves.items()}
        colors = [COLORS[PHASES.index(phase)] for phase in parts]
        names = [phase.replace("_", " and ") for phase in parts]
        x = next(iter(parts.values()))[0]
        axes.stackplot(x, [y for _, y in parts.values()], colors=colors, labels=names, linewidth=0)
        axes.set(xlabel="step", ylabel="seconds of a step")
        axes.set_title(plain(label, LONGEST_LABEL), fontsize=10)
        of_phases = [f"{name} {curve.total / curve.count:.3g}" for name, curve in zip(names, curves.values())]
        means.append(f"{label}: {enumerated(of_phases)}")
    legend(figure)
    return Picture("phases", f"Seconds of a step by phase, on rank 0; means of {'; '.join(means)}.", figure)


def _phases(run: Run) -> dict[str, Curve]:
    """Return the seconds of each phase, 0 where a row has none of it but of others; nothing of a single row."""
    curves = {phase: run.curve(f"seconds/{phase}") for phase in PHASES}
    return {phase: curve for phase, curve in curves.items() if curve.count > 1 and curve.total}


def attempts_of(models: Sequence[Model]) -> dict[str, list[AttemptRecord]]:
    """Return the attempts of each run by its label."""
    return {model.label: read_attempts(model.run.path) for model in models if model.run is not None}


def spent_by(runs: Mapping[str, Sequence[AttemptRecord]]) -> dict[str, list[Spent]]:
    """Return how each run's attempts spent their time, of runs that have records of it."""
    found = {label: spent(attempts) for label, attempts in runs.items()}
    return {label: attempts for label, attempts in found.items() if sum(totals(attempts).values()) > 0}


def goodput(runs: dict[str, list[Spent]]) -> Table | None:
    """Return a table of the shares of each run's time since its first attempt."""
    if not runs:
        return None
    seconds = {label: totals(attempts) for label, attempts in runs.items()}
    kinds = [kind for kind in KINDS if any(of_run[kind] for of_run in seconds.values())]
    rows = []
    for label, of_run in seconds.items():
        whole = sum(of_run.values())
        attempts = counted(len(runs[label]), "attempt")
        shares = [number(100 * of_run[kind] / whole, 1) for kind in kinds]
        rows.append([Cell(label, label), Cell(duration(whole), whole, attempts, "number"), *shares])
    columns = [Column("run"), *(Column(name, "number") for name in ("time", *(f"{kind}, %" for kind in kinds)))]
    return Table("What the time since the first attempt became", columns, rows)


def spikes(runs: Mapping[str, Sequence[AttemptRecord]]) -> Table | None:
    """Return a table of the last spikes of each run."""
    rows, some = [], ""
    for label, attempts in runs.items():
        found = [(attempt.number, spike) for attempt in attempts for spike in attempt.spikes]
        if len(found) > MOST_SPIKES:
            some = f", the last {MOST_SPIKES} of each run"
        for attempt, spike in found[-MOST_SPIKES:]:
            step, loss, norm = number(spike["step"], 0), number(spike["loss"], 4), number(spike["grad_norm"], 4)
            rows.append([Cell(label, label), number(attempt, 0), step, loss, norm, Cell(spike["action"])])
    names = ("attempt", "step", "loss", "gradient norm")
    columns = [Column("run"), *(Column(name, "number") for name in names), Column("what was done")]
    return Table(f"Spikes (train.spikes){some}", columns, rows) if rows else None


def time_lines(runs: Mapping[str, list[Spent]]) -> Iterator[Drawing]:
    """Yield the drawing of each run's attempts on a time line; a bar's colours are shares, not moments."""
    for label, attempts in islice(runs.items(), MOST_MODELS):
        yield f"attempts of {label}", partial(_time_line, label, attempts)


def _time_line(label: str, attempts: Sequence[Spent]) -> Picture:
    shown, begin = attempts[-MOST_ATTEMPTS:], attempts[0].started
    size, unit = next((size, unit) for size, unit in _UNITS if attempts[-1].ended - begin >= size or size == 1)
    figure, (axes,) = new_figure(width=9.2, height=1.4 + 0.22 * len(shown))
    numbers = [str(attempt.number) for attempt in shown]
    left = [(attempt.started - begin) / size for attempt in shown]
    for kind in BAR:
        widths = [attempt.seconds[kind] / size for attempt in shown]
        if any(widths):
            axes.barh(numbers, widths, left=left, color=COLORS[KINDS.index(kind)], label=kind, height=0.7)
            left = [place + width for place, width in zip(left, widths)]
    axes.invert_yaxis()
    axes.set(xlabel=f"{unit} since the first attempt began", ylabel="attempt")
    some = f", the last {MOST_ATTEMPTS} of {len(attempts):,} attempts" if len(shown) < len(attempts) else ""
    axes.set_title(plain(label, LONGEST_LABEL) + some, fontsize=10)
    legend(figure)
    ends = [f"{one.number} from {duration(one.started - begin)} to {duration(one.ended - begin)}" for one in shown]
    return Picture("attempts", f"Attempts of {label} on a time line{some}: {enumerated(ends)}.", figure)
