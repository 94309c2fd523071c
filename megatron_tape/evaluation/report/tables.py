"""Tables of the report, as data: what a cell shows, and by what it is sorted; and how tasks and numbers are written."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_tape.evaluation.report.models import Model, clean
from megatron_tape.evaluation.tasks import TASKS

MISSING = "\N{EN DASH}"
LONGEST_VALUE = 120
_NAMES = {"lm_eval": "lm-evaluation-harness", "ruler": "RULER", "scrolls": "SCROLLS"}
"""Tasks whose owners write them in another way than our settings do."""


@dataclass(frozen=True)
class Cell:
    """A cell; `sort` is a number, or a text, by which its column is sorted, and None is sorted last."""

    text: str
    sort: float | str | None = None
    detail: str = ""
    """Smaller, below the text."""
    kind: Literal["number", "text", "code"] = "text"
    best: bool = False


@dataclass(frozen=True)
class Column:
    """A column; those of models have the model's number, by which its colour is chosen."""

    title: str
    kind: Literal["number", "text", "code"] = "text"
    model: int | None = None


@dataclass(frozen=True)
class Table:
    """A table; the first `names` cells of every row say what the row is about."""

    caption: str
    columns: list[Column]
    rows: list[list[Cell]] = field(default_factory=list)
    names: int = 1


def number(value: float | None, decimals: int | None = None, detail: str = "", best: bool = False) -> Cell:
    """Return the cell of a number with that many decimals, by default as many as its size calls for."""
    if value is None:
        return Cell(MISSING, kind="number")
    shown = shown_number(value, decimals_for([value]) if decimals is None else decimals)
    return Cell(shown, float(value), detail, "number", best)


def text(value: str) -> Cell:
    """Return the cell of a text, which is sorted by it."""
    return Cell(value, value)


def setting(value: Any, known: bool = True) -> Cell:
    """Return the cell of a setting's value, as JSON; `known` is whether there is one."""
    if not known:
        return Cell(MISSING)
    shown = clean(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    if len(shown) > LONGEST_VALUE:
        shown = shown[: LONGEST_VALUE - 1] + "\N{HORIZONTAL ELLIPSIS}"
    is_number = type(value) in (int, float) and math.isfinite(value)
    return Cell(shown, float(value) if is_number else shown, kind="code")


def decimals_for(values: Iterable[float]) -> int | None:
    """Return the decimals with which numbers of one table are shown, None for so many significant digits."""
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


def interval(low: float, high: float, decimals: int | None) -> str:
    """Return an interval as text."""
    return f"{shown_number(low, decimals)} \N{EN DASH} {shown_number(high, decimals)}"


def enumerated(items: Sequence[str]) -> str:
    """Return `a, b and c`."""
    return ", ".join(items[:-1]) + " and " + items[-1] if len(items) > 1 else "".join(items)


def task_names(models: Sequence[Model]) -> list[str]:
    """Return the tasks of all models: known ones in the order of their registry, then others."""
    found = {name for model in models for name in model.tasks}
    return [name for name in TASKS if name in found] + sorted(found - TASKS.keys())


def task_title(name: str) -> str:
    """Return the name of a task as it is read."""
    return _NAMES.get(name, name.replace("_", " "))


def heading(name: str) -> str:
    """Return the name of a task as it is read in a heading."""
    return _NAMES.get(name) or capitalized(task_title(name))


def capitalized(text: str) -> str:
    """Return a text whose first letter is a capital one."""
    return text[:1].upper() + text[1:]


def metric_title(metric: str, task: str) -> str:
    """Return the name of a metric as it is read; those of lm-evaluation-harness are known by their identifiers."""
    return metric if task == "lm_eval" else metric.replace("_", " ")
