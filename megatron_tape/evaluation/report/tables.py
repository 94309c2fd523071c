"""Tables for the page and for Markdown, such as that of a task's scores by model. Imports no
torch.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, groupby
from typing import Any

from megatron_tape.evaluation.results import Results, Score, TaskResult

MISSING = "\N{EN DASH}"
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
    group_heading: str = "metric"
    """Heading of that column."""

    @property
    def grouped_rows(self) -> list[tuple[str, list[Sequence[Cell]]]]:
        """The names of groups, and their rows; without groups, all rows with an empty name."""
        # `groupby` calls its key function once for each row, in order. So the function can ignore
        # the row and return the next name.
        names = iter(self.row_groups or [""] * len(self.rows))
        return [(name, list(rows)) for name, rows in groupby(self.rows, lambda _: next(names))]

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
    row_groups: Sequence[str] = (),
    group_heading: str = "metric",
) -> Table:
    """Return a table without the columns that are empty in every row."""
    # A column such as the group or the length is empty if no score has one.
    filled = [any(cell.sort not in (None, "") for cell in column) for column in zip(*rows)]
    kept = [list(compress(row, filled)) for row in rows]
    return Table(caption, list(compress(columns, filled)), kept, row_groups, group_heading)


def markdown(shown: Table, escape: Callable[[str], str]) -> list[str]:
    """Return the lines of a table in Markdown, with aligned columns.

    `escape` escapes text from files.
    """
    if any(shown.row_groups):
        rows = [[text(name), *row] for name, row in zip(shown.row_groups, shown.rows)]
        shown = Table(shown.caption, [shown.group_heading, *shown.columns], rows)
    cells = [list(shown.columns)]
    for row in shown.rows:
        cells.append([_in_one_line(cell) for cell in row])

    # Each column has its heading, a rule, and its values.
    columns = []
    for column, is_number in zip(zip(*cells), shown.are_numbers):
        # A bar would end the cell.
        texts = [escape(shown_cell).replace("|", "\\|") for shown_cell in column]
        # A rule has at least three characters.
        width = max(3, *map(len, texts))
        align = str.ljust
        rule = "-" * width
        if is_number:
            align = str.rjust
            rule = f"{rule[1:]}:"  # a colon at the end of a rule aligns the column on the right
        heading, *values = [align(text, width) for text in texts]
        columns.append([heading, rule, *values])
    return [f"| {' | '.join(line)} |" for line in zip(*columns)]


def _in_one_line(cell: Cell) -> str:
    """Return the text of a cell, with its detail in brackets."""
    if not cell.detail:
        return cell.text
    return f"{cell.text} ({', '.join(cell.detail.splitlines())})"


def subject_name(score: Score) -> str:
    """Return the metric, group and length of a score as text."""
    return ", ".join(filter(None, (metric_name(score), location(score))))


def location(score: Score) -> str:
    """Return the group and length of a score as text, such as `books, 1,024 tokens`."""
    if score.length is None:
        return score.group
    return ", ".join(filter(None, (score.group, f"{score.length:,} tokens")))


def metric_name(score: Score) -> str:
    """Return the name of a metric with its unit, and an arrow that points to better values."""
    name = score.metric
    if score.unit:
        name += f" ({score.unit})"
    return name + _ARROWS[score.better]


def text(value: str) -> Cell:
    """Return a cell that contains a text."""
    return Cell(value, value)


def number(value: float | None, decimals: int | None = None, detail: str = "") -> Cell:
    """Return a cell that contains a number, or a dash for None. By default, `decimals` depends on
    the size of the number."""
    if value is None:
        return Cell(MISSING)
    if decimals is None:
        decimals = decimals_for([value])
    return Cell(shown_number(value, decimals), float(value), detail)


def decimals_for(values: Iterable[float]) -> int | None:
    """Return the number of decimals with which to show values of one metric; None means four
    significant digits.
    """
    values = list(values)
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    # Whole numbers, such as numbers of parameters, have no decimals.
    if largest >= 2 and all(float(value).is_integer() for value in values):
        return 0
    if largest >= 1e5:
        return None
    if largest >= 100:
        return 1
    if largest >= 10:
        return 2
    if largest >= 0.1 or largest == 0:
        return 3
    if largest >= 0.01:
        return 4
    return 5


def shown_number(value: float, decimals: int | None) -> str:
    """Return a number as text with thousands separators and a minus sign. If `decimals` is None, it
    has four significant digits.
    """
    if decimals is None:
        shown = f"{value:z,.4g}"
    else:
        shown = f"{value:z,.{decimals}f}"  # z: a value that rounds to 0 has no sign
    return shown.replace("-", "\N{MINUS SIGN}")


def interval(low: float | None, high: float | None, decimals: int | None) -> str:
    """Return an interval as text; empty if an end is None."""
    if low is None or high is None:
        return ""
    return f"{shown_number(low, decimals)} {MISSING} {shown_number(high, decimals)}"


def enumerated(items: Sequence[str], most: int = 1000) -> str:
    """Return `a, b and c`, or `a, b and 5 others` if there are more than `most` items."""
    if len(items) > most:
        items = [*items[: most - 1], f"{len(items) - most + 1} others"]
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} and {items[-1]}"


def score_tables(tasks: Mapping[str, TaskResult], comparable: bool = True) -> list[Table]:
    """Return a table of a task's scores, or an empty list without scores: a row for each metric,
    group and length, and a column for each model.

    The best value of a row is bold if its interval overlaps none of the others and the models are
    `comparable`.
    """
    subjects = by_subject(tasks)
    values = {}
    for subject, scores in subjects.items():
        for score in scores.values():
            # All values of a metric decide on the number of decimals in its rows.
            known = {score.value, score.low, score.high} - {None}
            values.setdefault(subject.metric, []).extend(known)

    rows = []
    # All lengths and groups of a metric follow each other.
    order = list(values)  # the metrics, in the order of their first scores
    for subject in sorted(subjects, key=lambda subject: order.index(subject.metric)):
        scores = subjects[subject]
        best = None
        # A bold value would rank models that cannot be compared.
        if comparable:
            best = leader(scores)
        decimals = decimals_for(values[subject.metric])
        row = [text(metric_name(subject)), text(subject.group), number(subject.length, decimals=0)]
        for label in tasks:
            row.append(_score_cell(scores.get(label), decimals, strong=label == best))
        rows.append(row)

    caption = "Below each value: its 95 % interval, and the number of samples."
    if any(cell.strong for row in rows for cell in row):
        caption += (
            " Bold: the best value, if its interval does not overlap those of the other models."
        )
    if not rows:
        return []
    return [table(caption, ["metric", "group", "length (tokens)", *tasks], rows)]


def _score_cell(score: Score | None, decimals: int | None, strong: bool) -> Cell:
    """Return a cell with a score, its interval and its number of samples; a dash for None."""
    if score is None:
        return Cell(MISSING)
    details = (interval(score.low, score.high, decimals), score.shown_count)
    shown = shown_number(score.value, decimals)
    # Both details may be empty.
    return Cell(shown, score.value, "\n".join(filter(None, details)), strong)


def by_subject(tasks: Mapping[str, TaskResult]) -> dict[Score, dict[str, Score]]:
    """Return the scores of a task by subject (a score without its value) and model label."""
    scores = {}
    for label, task in tasks.items():
        for score in task.scores:
            scores.setdefault(score.subject, {})[label] = score
    return scores


def leader(scores: Mapping[str, Score]) -> str | None:
    """Return the label of the best model if its 95 % interval does not overlap that of any other,
    else None.
    """
    if len(scores) < 2 or any(None in (score.low, score.high) for score in scores.values()):
        return None
    for label, best in scores.items():
        others = [score for other, score in scores.items() if other != label]
        if best.better == "higher" and all(score.high < best.low for score in others):
            return label
        if best.better == "lower" and all(score.low > best.high for score in others):
            return label
    return None


def comparison_warnings(results: Sequence[Results], name: str) -> list[str]:
    """Return warnings if the scores of the task `name` cannot be compared between models."""
    tasks = [result.tasks[name] for result in results]
    warnings = []

    # The values of each setting in the results, by its key.
    settings = {}
    for task in tasks:
        # Earlier versions of passkey had other prompts. Their results have the setting `form`. All
        # other results get the value None for it, so that the two differ.
        for key, value in {"form": None, **task.settings}.items():
            if key not in _NOT_COMPARED:
                settings.setdefault(key, []).append(value)
    # The contents of the files matter, not their paths.
    settings["data"] = [sorted(task.data.values()) for task in tasks]
    settings["dtype"] = [task.dtype for task in tasks]
    changed = [key for key, values in settings.items() if _differ(values)]
    if changed:
        warnings.append(f"These differ, and scores may not be comparable: {', '.join(changed)}.")

    # For each model with scores per token: digests of the scored tokens or, for tasks without
    # digests, the size of the vocabulary.
    scored = []
    for task, result in zip(tasks, results):
        tokens = task.details.get("scored") or result.model.config.get("vocab_size")
        if tokens is not None and any(map(_is_per_token, task.scores)):
            scored.append(tokens)
    if _differ(scored):
        warnings.append(
            "The models did not score the same tokens, so losses, gains and perplexities, which are"
            " per token, cannot be compared. Compare bits per byte instead, which the task"
            " perplexity measures on texts."
        )
    if _differ([task.details.get("key_tokens") for task in tasks]):
        warnings.append(
            "Each model was measured on its own key tokens, so scores on key tokens cannot be"
            " compared."
        )
    return warnings


def _differ(values: Iterable[Any]) -> bool:
    """Return whether not all values are equal, as JSON."""
    return len({json.dumps(value, sort_keys=True) for value in values}) > 1


def _is_per_token(score: Score) -> bool:
    """Return whether a score is an average over tokens, which depends on the tokenizer."""
    return score.unit == "nats per token" or score.metric in ("perplexity", "key_perplexity")
