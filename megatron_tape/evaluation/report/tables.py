"""Tables as data, of which the page and Markdown are made: what a cell shows, and by what it is sorted. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress

from megatron_tape.evaluation.results import Score

MISSING = "\N{EN DASH}"
SUBJECT = ("metric", "group", "length (tokens)")
"""The columns of `subject`."""
_ARROWS = {"higher": " \N{UPWARDS ARROW}", "lower": " \N{DOWNWARDS ARROW}", "neither": ""}


@dataclass(frozen=True)
class Cell:
    """A cell; a number is sorted as one, other texts by their letters, and None comes last."""

    text: str
    sort: float | str | None = None
    detail: str = ""
    """Smaller, below the text."""
    best: bool = False


@dataclass(frozen=True)
class Table:
    """A table."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    @property
    def are_numbers(self) -> list[bool]:
        """Whether the cells of each column are numbers."""
        return [all(not isinstance(cell.sort, str) for cell in column) for column in zip(*self.rows)]


def table(caption: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[Table]:
    """Return a table without the columns that have no value in any row; none without rows."""
    known = [any(cell.sort not in (None, "") for cell in column) for column in zip(*rows)]
    shown = Table(caption, list(compress(columns, known)), [list(compress(row, known)) for row in rows])
    return [shown] if rows else []


def markdown(shown: Table, escape: Callable[[str], str]) -> list[str]:
    """Return the lines of a table in Markdown, aligned for terminals. `escape` makes plain text of what files say."""
    cells = [[escape(text).replace("|", "\\|") for text in shown.columns]]
    for row in shown.rows:
        texts = (f"{cell.text} ({cell.detail})" if cell.detail else cell.text for cell in row)
        cells.append([escape(text).replace("|", "\\|") for text in texts])
    widths = [max(3, *map(len, column)) for column in zip(*cells)]
    sides = [">" if number else "<" for number in shown.are_numbers]
    rule = ["-" * (width - (side == ">")) + ":" * (side == ">") for side, width in zip(sides, widths)]
    aligned = [[f"{text:{side}{width}}" for text, side, width in zip(row, sides, widths)] for row in cells]
    return [f"| {' | '.join(row)} |" for row in (aligned[0], rule, *aligned[1:])]


def subject(score: Score) -> list[Cell]:
    """Return the cells that say what a score is about."""
    unit = f" ({score.unit})" if score.unit else ""
    return [text(score.metric + unit + _ARROWS[score.better]), text(score.group), number(score.length, 0)]


def text(value: str) -> Cell:
    """Return the cell of a text."""
    return Cell(value, value)


def number(value: float | None, decimals: int | None = None, detail: str = "", best: bool = False) -> Cell:
    """Return the cell of a number with so many decimals, by default as many as its size calls for."""
    if value is None:
        return Cell(MISSING)
    shown = shown_number(value, decimals_for([value]) if decimals is None else decimals)
    return Cell(shown, float(value), detail, best)


def decimals_for(values: Iterable[float]) -> int | None:
    """Return the decimals with which the numbers of a metric are shown, None for so many significant digits."""
    values = list(values)
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0) or 0.1
    if all(float(value).is_integer() for value in values) and largest >= 2:
        return 0 if largest < 1e12 else None
    if largest >= 1e5:
        return None
    return next((decimals for limit, decimals in ((100, 1), (10, 2), (0.1, 3), (0.01, 4)) if largest >= limit), 5)


def shown_number(value: float, decimals: int | None) -> str:
    """Return a number with thousands separators and a real minus sign."""
    shown = f"{value:,.4g}" if decimals is None else f"{value:,.{decimals}f}"
    return shown.replace("-", "\N{MINUS SIGN}") if value < 0 else shown


def interval(low: float | None, high: float | None, decimals: int | None) -> str:
    """Return an interval as text; nothing if it is not known."""
    return "" if None in (low, high) else f"{shown_number(low, decimals)} {MISSING} {shown_number(high, decimals)}"


def enumerated(items: Sequence[str]) -> str:
    """Return `a, b and c`."""
    return ", ".join(items[:-1]) + " and " + items[-1] if len(items) > 1 else "".join(items)
