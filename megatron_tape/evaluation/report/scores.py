"""Tables of scores, length by model, and pictures of scores of tasks that this version does not know."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_tape.evaluation.base import Picture
from megatron_tape.evaluation.figures import legend, length_axis, new_figure, plain, score_curve, styles
from megatron_tape.evaluation.report.inputs import Model, clean
from megatron_tape.evaluation.report.tables import (
    Cell,
    Column,
    Table,
    decimals_for,
    enumerated,
    interval,
    number,
    shown_number,
    text,
)
from megatron_tape.evaluation.results import Score, TaskResult
from megatron_tape.evaluation.tasks import TASKS

Kind = tuple[str, str, str]
"""Metric, unit and direction of scores that one table holds."""
_NAMES = {"lm_eval": "lm-evaluation-harness", "ruler": "RULER", "scrolls": "SCROLLS"}
"""Tasks whose owners write them in another way than our settings do."""
SHARE = 3
"""Decimals of shares between 0 and 1."""


def task_names(models: Sequence[Model]) -> list[str]:
    """Return the tasks of all models: known ones in the order of their registry, then others."""
    found = {name for model in models for name in model.tasks}
    return [name for name in TASKS if name in found] + sorted(found - TASKS.keys())


def title(name: str) -> str:
    """Return the name of a task as it is read."""
    return _NAMES.get(name, name.replace("_", " "))


def heading(name: str) -> str:
    """Return the name of a task as it is read in a heading."""
    return _NAMES.get(name) or capitalized(title(name))


def capitalized(text: str) -> str:
    """Return a text whose first letter is a capital one."""
    return text[:1].upper() + text[1:]


def metric_title(metric: str, task: str) -> str:
    """Return the name of a metric as it is read; those of lm-evaluation-harness are known by their identifiers."""
    return metric if task == "lm_eval" else metric.replace("_", " ")


def score_tables(models: Sequence[Model], task: str, comparable: Callable[[Score], bool]) -> list[Table]:
    """Return a table for each metric of a task: a row per group and length, a column per model.

    The best values are marked in tables of scores that are `comparable`.
    """
    # A column keeps its model's number, so that it has the same colour everywhere.
    shown = [(index, model) for index, model in enumerate(models) if task in model.tasks]
    kinds = dict.fromkeys(kind_of(score) for _, model in shown for score in model.tasks[task].scores)
    return [_table(shown, task, kind, comparable) for kind in kinds]


def kind_of(score: Score) -> Kind:
    """Return which table a score belongs to."""
    return clean(score.metric), clean(score.unit), score.better


def place_of(score: Score) -> tuple[str, int | None]:
    """Return which row a score belongs to: its group and length."""
    return clean(score.group), score.length


def ordered(places: Mapping[tuple[str, int | None], Any]) -> list[tuple[str, int | None]]:
    """Return places by group, in the order in which groups come up, and then by length."""
    groups = list(dict.fromkeys(group for group, _ in places))
    return sorted(places, key=lambda place: (groups.index(place[0]), place[1] is None, place[1] or 0))


def place_columns(places: Sequence[tuple[str, int | None]]) -> tuple[list[Column], list[list[Cell]]]:
    """Return the first columns of a table with these rows, and their cells: groups and lengths, if there are any."""
    columns, rows = [], [[] for _ in places]
    if any(group for group, _ in places) or all(length is None for _, length in places):
        columns.append(Column("group"))
        for row, (group, _) in zip(rows, places):
            row.append(text(group or "overall"))
    if any(length is not None for _, length in places):
        columns.append(Column("length (tokens)", "number"))
        for row, (_, length) in zip(rows, places):
            row.append(number(length, 0))
    return columns, rows


def _table(shown: Sequence[tuple[int, Model]], task: str, kind: Kind, comparable: Callable[[Score], bool]) -> Table:
    found: dict[tuple[str, int | None], dict[int, Score]] = {}
    for index, model in shown:
        for score in model.tasks[task].scores:
            if kind_of(score) == kind:
                found.setdefault(place_of(score), {})[index] = score
    scores = [score for row in found.values() for score in row.values()]
    values = [value for score in scores for value in (score.value, score.low, score.high) if value is not None]
    decimals = SHARE if not kind[1] and all(0 <= value <= 1 for value in values) else decimals_for(values)
    counts = {score.count for score in scores}
    places = ordered(found)
    groups = {group for group, _ in places}
    # A single group is said once, above the table.
    only = groups.pop() if len(groups) == 1 and places[0][1] is not None else ""
    columns, rows = place_columns([("" if only else group, length) for group, length in places])
    names = len(columns)
    columns += [Column(model.label, "number", index) for index, model in shown]
    best = max if kind[2] == "higher" else min
    judged = kind[2] in ("higher", "lower") and all(map(comparable, scores))
    for row, place in zip(rows, places):
        values = [score.value for score in found[place].values()]
        winner = best(values) if judged and len(set(values)) > 1 else None
        for index, _ in shown:
            row.append(_cell(found[place].get(index), decimals, len(counts) > 1, winner))
    return Table(_caption(task, kind, only, scores, counts), columns, rows, names)


def _cell(score: Score | None, decimals: int | None, with_count: bool, winner: float | None) -> Cell:
    if score is None:
        return number(None)
    details = []
    if score.low is not None and score.high is not None:
        details.append(interval(score.low, score.high, decimals))
    if with_count and score.count is not None:
        details.append(f"n\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}{score.count:,}")
    return number(score.value, decimals, " \N{MIDDLE DOT} ".join(details), score.value == winner)


def _caption(task: str, kind: Kind, group: str, scores: Sequence[Score], counts: set[int | None]) -> str:
    metric, unit, better = kind
    named = _named(task, metric, unit)
    parts = [(named if task == "lm_eval" else capitalized(named)) + (f", {group}" if group else "")]
    if better in ("higher", "lower"):
        parts.append(f"{better} is better")
    if any(score.low is not None for score in scores):
        parts.append("below each value its 95 % interval" + (" and the number of samples n" if len(counts) > 1 else ""))
    elif len(counts) > 1:
        parts.append("below each value the number of samples n")
    if len(counts) == 1 and counts != {None}:
        count = next(iter(counts))
        parts.append(f"n\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}{count:,} for each value")
    return "; ".join(parts)


def _named(task: str, metric: str, unit: str) -> str:
    name = metric_title(metric, task)
    return f"{name} ({unit})" if unit and unit != name else name


def draw_scores(task: str, results: Mapping[str, TaskResult]) -> list[Picture]:
    """Return a picture for each metric of a task that has scores at several lengths, as `Task.draw` returns them."""
    pictures = []
    look = styles(results)
    kinds = dict.fromkeys(kind_of(score) for result in results.values() for score in result.scores)
    for number_of_kind, kind in enumerate(kinds, 1):
        points = {label: _points(result.scores, kind) for label, result in results.items()}
        lengths = {score.length for found in points.values() for score in found}
        if len(lengths) < 2:
            continue
        figure, (axes,) = new_figure()
        for label, found in points.items():
            if found:
                score_curve(axes, look[label], [score.length for score in found], found)
        length_axis(axes, lengths)
        axes.set_ylabel(plain(_named(task, *kind[:2])))
        legend(figure)
        pictures.append(Picture(f"scores-{number_of_kind}", _alternative(task, kind, points), figure))
    return pictures


def _points(scores: Sequence[Score], kind: Kind) -> list[Score]:
    """Return the scores of a kind by length, without those of subgroups where there are scores of the whole."""
    found = [score for score in scores if kind_of(score) == kind and score.length is not None]
    groups = list(dict.fromkeys(place_of(score)[0] for score in found))
    chosen = "" if "" in groups else groups[0] if groups else ""
    return sorted((s for s in found if place_of(s)[0] == chosen), key=lambda score: score.length)


def _alternative(task: str, kind: Kind, points: Mapping[str, Sequence[Score]]) -> str:
    last = [
        f"{label} {shown_number(found[-1].value, decimals_for([found[-1].value]))} at {found[-1].length:,}"
        for label, found in points.items()
        if found
    ]
    return f"{capitalized(metric_title(kind[0], task))} by context length; at the longest, {enumerated(last)} tokens."
