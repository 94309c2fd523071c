"""Tables of scores, length by model, and pictures of scores of tasks that draw none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from megatron_tape.evaluation.base import Drawing, Picture
from megatron_tape.evaluation.pictures_of_losses import by_length
from megatron_tape.evaluation.report.models import Model, clean
from megatron_tape.evaluation.report.tables import (
    Cell,
    Column,
    Table,
    capitalized,
    decimals_for,
    interval,
    metric_title,
    number,
    text,
)
from megatron_tape.evaluation.results import Score, TaskResult

Kind = tuple[str, str, str]
"""Metric, unit and direction of scores that one table holds."""
Place = tuple[str, int | None]
"""The group and length that a row is about."""
DECIMALS_OF_SHARES = 3
_MOST_DRAWN = 50
"""Metrics of a task that are drawn."""


def score_tables(models: Sequence[Model], task: str, comparable: Callable[[Score], bool]) -> list[Table]:
    """Return a table for each metric of a task: a row per group and length, a column per model.

    The best value of a row is marked if all its scores are `comparable` and none lacks the interval that says how far
    it can be trusted.
    """
    # A column keeps its model's number, so that it has the same colour everywhere.
    shown = [(index, model) for index, model in enumerate(models) if task in model.tasks]
    kinds: dict[Kind, dict[Place, dict[int, Score]]] = {}
    for index, model in shown:
        for score in model.tasks[task].scores:
            kinds.setdefault(kind_of(score), {}).setdefault(place_of(score), {})[index] = score
    return [_table(shown, task, kind, found, comparable) for kind, found in kinds.items()]


def kind_of(score: Score) -> Kind:
    """Return which table a score belongs to."""
    return clean(score.metric), clean(score.unit), score.better


def place_of(score: Score) -> Place:
    """Return which row a score belongs to."""
    return clean(score.group), score.length


def ordered(places: Mapping[Place, Any]) -> list[Place]:
    """Return places by group, in the order in which groups come up, and then by length."""
    groups = {group: number for number, group in enumerate(dict.fromkeys(group for group, _ in places))}
    return sorted(places, key=lambda place: (groups[place[0]], place[1] is None, place[1] or 0))


def place_columns(places: Sequence[Place]) -> tuple[list[Column], list[list[Cell]]]:
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


def _table(
    shown: Sequence[tuple[int, Model]],
    task: str,
    kind: Kind,
    found: Mapping[Place, Mapping[int, Score]],
    comparable: Callable[[Score], bool],
) -> Table:
    scores = [score for row in found.values() for score in row.values()]
    values = [value for score in scores for value in (score.value, score.low, score.high) if value is not None]
    is_share = not kind[1] and all(0 <= value <= 1 for value in values)
    decimals = DECIMALS_OF_SHARES if is_share else decimals_for(values)
    places = ordered(found)
    groups = {group for group, _ in places}
    # A single group is said once, above the table.
    only = groups.pop() if len(groups) == 1 and places[0][1] is not None else ""
    columns, rows = place_columns([("" if only else group, length) for group, length in places])
    names = len(columns)
    columns += [Column(model.label, "number", index) for index, model in shown]
    counts = {_count(score) for score in scores}
    for row, place in zip(rows, places):
        best = _best(list(found[place].values()), comparable)
        row += [_cell(found[place].get(index), decimals, len(counts) > 1, best) for index, _ in shown]
    return Table(_caption(task, kind, only, scores), columns, rows, names)


def _best(row: Sequence[Score], comparable: Callable[[Score], bool]) -> float | None:
    """Return the value to be marked as the best of a row, None if there is none."""
    values = [score.value for score in row]
    known = all(comparable(score) and (score.count is None or score.low is not None) for score in row)
    if not known or row[0].better == "neither" or len(set(values)) < 2:
        return None
    return max(values) if row[0].better == "higher" else min(values)


def _count(score: Score) -> str:
    return clean(score.shown_count).replace(" ", "\N{NO-BREAK SPACE}")


def _cell(score: Score | None, decimals: int | None, with_count: bool, best: float | None) -> Cell:
    if score is None:
        return number(None)
    known = score.low is not None and score.high is not None
    details = [interval(score.low, score.high, decimals)] if known else []
    details += [_count(score)] if with_count and score.shown_count else []
    return number(score.value, decimals, " \N{MIDDLE DOT} ".join(details), score.value == best)


def _caption(task: str, kind: Kind, group: str, scores: Sequence[Score]) -> str:
    metric, unit, better = kind
    named = _named(task, metric, unit)
    parts = [(named if task == "lm_eval" else capitalized(named)) + (f", {group}" if group else "")]
    if better in ("higher", "lower"):
        parts.append(f"{better} is better")
    counts = {_count(score) for score in scores}
    below = ["its 95 % interval"] if any(score.low is not None for score in scores) else []
    below += ["what it is measured on"] if len(counts) > 1 else []
    if below:
        parts.append(f"below each value {' and '.join(below)}")
    if len(counts) == 1 and counts != {""}:
        parts.append(f"each value is measured on {counts.pop()}")
    return "; ".join(parts)


def _named(task: str, metric: str, unit: str) -> str:
    name = metric_title(metric, task)
    return f"{name} ({unit})" if unit and unit != name else name


def draw_scores(task: str, results: Mapping[str, TaskResult]) -> tuple[list[Drawing], list[str]]:
    """Return a drawing for each metric of a task that has scores at several lengths, and whether some are left out."""
    lengths: dict[tuple[str, str], set[int]] = {}
    for score in (score for result in results.values() for score in result.scores if score.length is not None):
        lengths.setdefault((score.metric, score.unit), set()).add(score.length)
    curves = [kind for kind, several in lengths.items() if len(several) > 1]
    names = [(metric, clean(_named(task, metric, unit))) for metric, unit in curves[:_MOST_DRAWN]]
    drawings = [(name, partial(_by_length, dict(results), metric, name)) for metric, name in names]
    left_out = len(curves) > _MOST_DRAWN
    return drawings, [f"Pictures show the first {_MOST_DRAWN} of {len(curves):,} metrics."] if left_out else []


def _by_length(results: dict[str, TaskResult], metric: str, name: str) -> Picture:
    (picture,) = by_length(results, metric, "scores", name)
    return picture
