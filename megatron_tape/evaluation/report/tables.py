"""Tables for the page and for Markdown, such as that of a task's scores by model. Imports no
torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress, groupby
from operator import itemgetter
from typing import Any

from megatron_tape.evaluation.results import Results, Score, TaskResult

MISSING = "\N{EN DASH}"
SUBJECT = ("metric", "group", "length (tokens)")
"""Columns of the cells that `subject` returns."""
_NOT_COMPARED = ("data", "batch_size", "trained_length")
"""Settings that may differ between compared scores. For `data`, the contents of the files are
compared instead.
"""
_ARROWS = {"higher": " \N{UPWARDS ARROW}", "lower": " \N{DOWNWARDS ARROW}", "neither": ""}


@dataclass(frozen=True)
class Cell:
    """A cell of a table."""

    text: str
    sort: float | str | None = None
    """Key for sorting the rows by this column: numbers by value, texts by letters; None comes last.
    """
    detail: str = ""
    """Smaller text below `text`, in one or more lines."""
    strong: bool = False
    """Whether the text is bold. Only significant differences and best scores with separate
    intervals are bold.
    """


@dataclass(frozen=True)
class Table:
    """A table with a caption; `columns` are its headings."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    row_groups: Sequence[str] = ()
    """For each row the name of its group, such as a metric, or nothing. Markdown shows it in a
    column.
    """
    summary: str = ""
    """A sentence if all values are equal. It replaces the table in Markdown; the page collapses the
    table under it.
    """

    @property
    def grouped_rows(self) -> list[tuple[str, list[Sequence[Cell]]]]:
        """The groups of consecutive rows, with their names; without groups, one that has no
        name.
        """
        named = zip(self.row_groups or [""] * len(self.rows), self.rows)
        return [(name, [row for _, row in of]) for name, of in groupby(named, key=itemgetter(0))]

    @property
    def are_numbers(self) -> list[bool]:
        """Whether the cells of each column are numbers."""
        return [
            all(not isinstance(cell.sort, str) for cell in column) for column in zip(*self.rows)
        ]


def table(
    caption: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    summary: str = "",
    row_groups: Sequence[str] = (),
) -> list[Table]:
    """Return a list of one table, without columns that are empty in every row; an empty list if
    there are no rows.
    """
    known = [any(cell.sort not in (None, "") for cell in column) for column in zip(*rows)]
    kept = [list(compress(row, known)) for row in rows]
    shown = Table(caption, list(compress(columns, known)), kept, row_groups, summary)
    if rows:
        return [shown]
    return []


def markdown(shown: Table, escape: Callable[[str], str]) -> list[str]:
    """Return the lines of a table in Markdown, with aligned columns, or its summary if it has one.

    `escape` escapes text from files.
    """
    if shown.summary:
        return [escape(shown.summary)]
    if shown.row_groups:
        rows = [[text(name), *row] for name, row in zip(shown.row_groups, shown.rows)]
        shown = Table(shown.caption, ["metric", *shown.columns], rows)
    cells = [[escape(text).replace("|", "\\|") for text in shown.columns]]
    for row in shown.rows:
        details = (cell.detail.replace("\n", ", ") for cell in row)
        texts = (
            f"{cell.text} ({detail})" if detail else cell.text for cell, detail in zip(row, details)
        )
        cells.append([escape(text).replace("|", "\\|") for text in texts])
    widths = [max(3, *map(len, column)) for column in zip(*cells)]
    sides = [">" if number else "<" for number in shown.are_numbers]
    rule = [
        "-" * (width - (side == ">")) + ":" * (side == ">") for side, width in zip(sides, widths)
    ]
    aligned = [
        [f"{text:{side}{width}}" for text, side, width in zip(row, sides, widths)] for row in cells
    ]
    return [f"| {' | '.join(row)} |" for row in (aligned[0], rule, *aligned[1:])]


def subject(score: Score) -> list[Cell]:
    """Return the cells for the metric, group and length of a score."""
    return [text(metric_name(score)), text(score.group), number(score.length, 0)]


def subject_name(score: Score) -> str:
    """Return the metric, group and length of a score as text."""
    return ", ".join(filter(None, (metric_name(score), location(score))))


def location(score: Score) -> str:
    """Return the group and length of a score as text, such as `books, 1,024 tokens`."""
    length = "" if score.length is None else f"{score.length:,} tokens"
    return ", ".join(filter(None, (score.group, length)))


def metric_name(score: Score) -> str:
    """Return the name of a metric with its unit, and an arrow that points to better values."""
    return score.metric + (f" ({score.unit})" if score.unit else "") + _ARROWS[score.better]


def text(value: str) -> Cell:
    """Return a cell that contains a text."""
    return Cell(value, value)


def number(value: float | None, decimals: int | None = None, detail: str = "") -> Cell:
    """Return a cell that contains a number, or a dash for None. By default, `decimals` depends on
    the size of the number."""
    if value is None:
        return Cell(MISSING)
    shown = shown_number(value, decimals_for([value]) if decimals is None else decimals)
    return Cell(shown, float(value), detail)


def decimals_for(values: Iterable[float]) -> int | None:
    """Return the number of decimals with which to show values of one metric; None means four
    significant digits.
    """
    values = list(values)
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0) or 0.1
    if all(float(value).is_integer() for value in values) and largest >= 2:
        if largest < 1e12:
            return 0
        return None
    if largest >= 1e5:
        return None
    return next(
        (
            decimals
            for limit, decimals in ((100, 1), (10, 2), (0.1, 3), (0.01, 4))
            if largest >= limit
        ),
        5,
    )


def shown_number(value: float, decimals: int | None) -> str:
    """Return a number as text with thousands separators and a minus sign; see `decimals_for` for
    `decimals`.
    """
    # A value that rounds to 0 has no sign.
    value = value if decimals is None or round(value, decimals) else 0.0
    if decimals is None:
        shown = f"{value:,.4g}"
    else:
        shown = f"{value:,.{decimals}f}"
    if value < 0:
        return shown.replace("-", "\N{MINUS SIGN}")
    return shown


def interval(low: float | None, high: float | None, decimals: int | None) -> str:
    """Return an interval as text; empty if an end is None."""
    if None in (low, high):
        return ""
    return f"{shown_number(low, decimals)} {MISSING} {shown_number(high, decimals)}"


def enumerated(items: Sequence[str], most: int = 1000) -> str:
    """Return `a, b and c`, or `a, b and 5 others` if there are more than `most` items."""
    if len(items) > most:
        items = [*items[: most - 1], f"{len(items) - most + 1} others"]
    if len(items) > 1:
        return ", ".join(items[:-1]) + " and " + items[-1]
    return "".join(items)


def score_table(tasks: Mapping[str, TaskResult], comparable: bool = True) -> list[Table]:
    """Return the scores of a task: a row for each metric, group and length, and a column for each
    model.

    The best value of a row is bold if its interval overlaps none of the others and the models are
    `comparable`. Rows in which every model has 0 form a second table, which has a summary.
    """
    values: dict[str, list[float]] = {}
    for score in (score for task in tasks.values() for score in task.scores):
        values.setdefault(score.metric, []).extend({score.value, score.low, score.high} - {None})
    decimals = {metric: decimals_for(numbers) for metric, numbers in values.items()}
    rows: list[list[Cell]] = []
    zeros: list[list[Cell]] = []
    zeros_of: dict[str, list[str]] = {}
    # All lengths and groups of a metric follow each other.
    order = list(values)
    for what, scores in sorted(
        by_subject(tasks).items(), key=lambda item: order.index(item[0].metric)
    ):
        best = leader(scores) if comparable else None
        cells = [
            _score_cell(scores.get(label), decimals[what.metric], label == best) for label in tasks
        ]
        if any(score.value for score in scores.values()):
            rows.append(subject(what) + cells)
        else:
            zeros.append(subject(what) + cells)
            zeros_of.setdefault(metric_name(what), []).extend(filter(None, [location(what)]))
    caption = "Below each value: its 95 % interval, and the number of samples."
    if any(cell.strong for row in rows for cell in row):
        caption += (
            " Bold: the best value, if its interval does not overlap those of the other models."
        )
    columns = [*SUBJECT, *tasks]
    shown = [f"{metric} ({enumerated(of, 6)})" if of else metric for metric, of in zeros_of.items()]
    if len(tasks) > 1:
        summary = f"Every model has 0 in {enumerated(shown, 6)}."
    else:
        summary = f"0 in {enumerated(shown, 6)}."
    return table(caption, columns, rows) + table("", columns, zeros, summary)


def by_subject(tasks: Mapping[str, TaskResult]) -> dict[Score, dict[str, Score]]:
    """Return the scores of a task by subject (see `Score.subject`) and model label."""
    found: dict[Score, dict[str, Score]] = {}
    for label, task in tasks.items():
        for score in task.scores:
            found.setdefault(score.subject, {})[label] = score
    return found


def leader(scores: Mapping[str, Score]) -> str | None:
    """Return the label of the best model if its 95 % interval does not overlap that of any other,
    else None.
    """
    some = next(iter(scores.values()))
    if len(scores) < 2 or some.better == "neither":
        return None
    ends = {label: (score.low, score.high) for label, score in scores.items()}
    if any(end is None for interval in ends.values() for end in interval):
        return None
    sign = 1 if some.better == "higher" else -1
    best = max(scores, key=lambda label: sign * scores[label].value)
    nearest = min(sign * end for end in ends[best])
    separate = all(
        max(sign * end for end in ends[label]) < nearest for label in scores if label != best
    )
    if separate:
        return best
    return None


def _score_cell(score: Score | None, decimals: int | None, strong: bool) -> Cell:
    if score is None:
        return number(None)
    between = interval(score.low, score.high, decimals)
    detail = "\n".join(filter(None, (between, score.shown_count)))
    return replace(number(score.value, decimals, detail), strong=strong)


def comparison_warnings(results: Sequence[Results], name: str) -> list[str]:
    """Return warnings if the scores of the task `name` cannot be compared between models."""
    tasks = [one.tasks[name] for one in results]
    settings = dict.fromkeys(
        key for task in tasks for key in task.settings if key not in _NOT_COMPARED
    )
    changed = [
        key
        for key in settings
        if _differ(task.settings[key] for task in tasks if key in task.settings)
    ]
    # The contents of the files matter, not their paths.
    changed += ["data"] if _differ(sorted(task.data.values()) for task in tasks) else []
    changed += ["dtype"] if _differ(task.dtype for task in tasks) else []
    if changed:
        warnings = [f"These differ, and scores may not be comparable: {', '.join(changed)}."]
    else:
        warnings = []
    per_token = [one for one in results if any(map(_is_per_token, one.tasks[name].scores))]
    # Digests of the scored tokens or, for tasks without digests, the size of the vocabulary.
    tokens = [
        one.tasks[name].details.get("scored") or one.model.config.get("vocab_size")
        for one in per_token
    ]
    if _differ(one for one in tokens if one is not None):
        warnings.append(
            "The models did not score the same tokens, so losses, gains and perplexities, which are"
            " per token, cannot be compared. Compare bits per byte instead, which the task"
            " perplexity measures on texts."
        )
    if _differ(task.details.get("key_tokens") for task in tasks):
        warnings.append(
            "Each model was measured on its own key tokens, so scores on key tokens cannot be"
            " compared."
        )
    return warnings


def _differ(values: Iterable[Any]) -> bool:
    return len({json.dumps(value, sort_keys=True) for value in values}) > 1


def _is_per_token(score: Score) -> bool:
    """Return whether a score is an average over tokens, which depends on the tokenizer."""
    return score.unit == "nats per token" or score.metric in ("perplexity", "key_perplexity")
