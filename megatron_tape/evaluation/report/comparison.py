"""The section of a comparison: what several variants of a recipe came to over several seeds, as tables and pictures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress

from megatron_tape.evaluation.base import Picture
from megatron_tape.evaluation.comparison import TRAINING, Comparison, Row, rows
from megatron_tape.evaluation.figures import MOST_MODELS, MOST_PANELS, panels, plain, styles
from megatron_tape.evaluation.report.models import clean
from megatron_tape.evaluation.report.scores import DECIMALS_OF_SHARES
from megatron_tape.evaluation.report.tables import (
    Cell,
    Column,
    Table,
    capitalized,
    decimals_for,
    enumerated,
    heading,
    interval,
    metric_title,
    number,
    text,
)
from megatron_tape.evaluation.results import Score
from megatron_tape.evaluation.statistics import t_quantile
from megatron_tape.huggingface.export import markdown as markdown_text
from megatron_tape.text import counted

MOST_TASKS = 50
"""Tasks that are drawn."""
_LONGEST_TICK = 36
_FOR_MARKDOWN = partial(markdown_text.plain, longest=10_000)
_MOST_TOGETHER = 8
"""Metrics that fit into one table."""
_MARKED = 0.05
_SMALLEST_P = 0.0001
"""Smaller p values are shown as less than this."""
_BETTER, _ARROWS = {"higher": " (higher is better)", "lower": " (lower is better)"}, {"higher": " ↑", "lower": " ↓"}
_SIZES = (
    ("model.num_layers", "layers"),
    ("model.hidden_size", "wide"),
    ("model.num_attention_heads", "heads"),
    ("model.seq_length", "tokens"),
    ("train.steps", "steps"),
    ("train.global_batch_size", "sequences each"),
)


def tasks_of(comparison: Comparison) -> list[str]:
    """Return the tasks that there are figures of; the training comes last."""
    return sorted(comparison.metrics_by_task, key=lambda task: task == TRAINING)


def metric_tables(comparison: Comparison, task: str) -> list[Table]:
    """Return a table of all metrics of a task if they are few, then one for each, with a row for each variant.

    With one seed there are no spreads and tests, which the tables of single metrics are for: the first one suffices.
    """
    shown = comparison.metrics_by_task[task]
    compared = [metric for metric in shown if metric.better != "neither"]
    if not 1 < len(compared) <= _MOST_TOGETHER:
        return [_table(comparison, metric) for metric in shown]
    seeds = len({run.seed for run in comparison.runs})
    single = [_table(comparison, metric) for metric in shown if seeds > 1 or metric.better == "neither"]
    return [_overview(comparison, compared), *single]


def _overview(comparison: Comparison, shown: Sequence[Score]) -> Table:
    cells: dict[str, list[Cell]] = {variant: [text(clean(variant))] for variant in comparison.variants}
    for metric in shown:
        found = {row.variant: row for row in rows(comparison, metric)}
        decimals = _decimals(metric, list(found.values()))
        decimals = decimals and decimals - 1
        for variant, of_variant in cells.items():
            of_variant.append(_short(found[variant], decimals) if variant in found else number(None))
    columns = [Column("variant"), *(Column(_caption(metric, _ARROWS), "number") for metric in shown)]
    how = f"Mean ± standard deviation over the seeds; * where p < {_MARKED} in the paired test"
    return Table(how, columns, list(cells.values()))


def _short(row: Row, decimals: int | None) -> Cell:
    spread = "" if row.spread is None else f" ± {number(row.spread, decimals).text}"
    marked = row.difference is not None and row.difference.p is not None and row.difference.p < _MARKED
    return Cell(f"{number(row.mean, decimals).text}{spread}{'*' if marked else ''}", row.mean, kind="number")


def _table(comparison: Comparison, metric: Score) -> Table:
    found = rows(comparison, metric)
    decimals = _decimals(metric, found)
    titles = ["seeds", "mean", "deviation", "difference", "95 % interval", "p"]
    columns = [Column("variant"), *(Column(title, "number") for title in titles)]
    made = [_row(row, decimals) for row in found]
    known = [any(row[index].sort is not None or not index for row in made) for index in range(len(columns))]
    caption = f"{_caption(metric, _BETTER)}; differences from {clean(comparison.baseline)}"
    return Table(caption, list(compress(columns, known)), [list(compress(row, known)) for row in made])


def _caption(metric: Score, directions: dict[str, str]) -> str:
    named = capitalized(metric_title(clean(metric.metric), metric.task))
    group = f", {clean(metric.group)}" if metric.group else ""
    length = f", {metric.length:,} tokens" if metric.length is not None else ""
    unit = f", {clean(metric.unit)}" if metric.unit else ""
    return named + group + length + unit + directions.get(metric.better, "")


def _decimals(metric: Score, found: Sequence[Row]) -> int | None:
    values = [value for row in found for value in row.values.values()]
    if metric.unit == "" and all(0 <= value <= 1 for value in values):
        return DECIMALS_OF_SHARES + 1
    decimals = decimals_for(values)
    return decimals if decimals in (None, 0) else decimals + 1


def _row(row: Row, decimals: int | None) -> list[Cell]:
    test = row.difference
    cells = [text(clean(row.variant)), number(len(row.values), 0), number(row.mean, decimals)]
    cells += [number(row.spread, decimals), number(test and test.mean, decimals)]
    if test is None or test.p is None:
        return [*cells, number(None), number(None)]
    shown = f"< {_SMALLEST_P}" if test.p < _SMALLEST_P else f"{test.p:.{2 if test.p >= 0.1 else 4}f}"
    between = Cell(interval(test.low, test.high, decimals), test.mean, kind="number")
    return [*cells, between, Cell(shown, test.p, kind="number")]


def limits(comparison: Comparison) -> list[str]:
    """Return a sentence for each limit that keeps something from being drawn."""
    tasks = tasks_of(comparison)
    metrics = max((len(_drawn_metrics(comparison, task)) for task in tasks), default=0)
    found = ((MOST_TASKS, len(tasks), "tasks"), (MOST_MODELS, len(comparison.variants), "variants"))
    found += ((MOST_PANELS, metrics, "metrics of a task"),)
    return [f"Pictures show the first {most} of {count:,} {what}." for most, count, what in found if count > most]


def _drawn_metrics(comparison: Comparison, task: str) -> list[Score]:
    of_task = comparison.metrics_by_task[task]
    return [metric for metric in of_task if metric.better != "neither"] or of_task


def picture(comparison: Comparison, task: str) -> Picture:
    """Return a picture of a task with a panel for each metric: a point for each seed and a line at the mean."""
    shown, labels = _drawn_metrics(comparison, task), comparison.variants[:MOST_MODELS]
    figure, drawn = panels(min(len(shown), MOST_PANELS), 2, width=5.4, height=0.9 + 0.28 * len(labels), sharey=True)
    looks, told, places = styles(labels), [], {label: place for place, label in enumerate(labels)}
    for axes, metric in zip(drawn, shown):
        found = [row for row in rows(comparison, metric) if row.variant in places]
        for row in found:
            place, color = places[row.variant], looks[row.variant]["color"]
            values, marker = list(row.values.values()), looks[row.variant]["marker"]
            axes.plot(values, [place] * len(values), color=color, marker=marker, linestyle="none", alpha=0.7)
            axes.plot([row.mean] * 2, [place - 0.35, place + 0.35], color=color, linewidth=2)
        axes.set_yticks(range(len(labels)), [_tick(clean(label)) for label in labels], fontsize=8)
        axes.set_ylim(len(labels) - 0.5, -0.5)
        axes.set_xlabel(plain(_caption(metric, _BETTER), 60), fontsize=9)
        means = (f"{clean(row.variant)} {row.mean:.4g}" for row in found)
        told.append(f"{_caption(metric, _BETTER)}: {', '.join(means)}")
    return Picture(f"comparison-{task}", f"Means over the seeds. {'; '.join(told)}.", figure)


def _tick(label: str) -> str:
    """Return a variant's name on lines that fit beside a panel."""
    first, *others = label.split("+")
    lines = [first]
    for other in others:
        if len(f"{lines[-1]}+{other}") > _LONGEST_TICK:
            lines.append("")
        lines[-1] += f"+{other}"
    return "\n".join(plain(line, _LONGEST_TICK) for line in lines)


def notes(comparison: Comparison, missing: Sequence[str] = ()) -> list[str]:
    """Return what a reader must know before reading the tables; `missing` names runs that are not finished."""
    seeds = {label: sum(run.variant == label for run in comparison.runs) for label in comparison.variants}
    most = max(seeds.values(), default=0)
    found = [
        _setup(comparison),
        "Each point is one run. The (standard) deviation is that over the seeds of a variant. A seed decides the order "
        "of the data and the initial weights that variants have in common, so differences are taken between runs of "
        "the same seed, and p is that of a two-sided paired t test on them.",
    ]
    if most < 2:
        found.append("There is one seed: nothing is known of the spread, and there is no test.")
    else:
        reach = t_quantile(most - 1) / math.sqrt(most)
        found.append(
            f"With {counted(most, 'seed')}, a single difference gets p < 0.05 only if it is more than {reach:.2g} "
            "times the standard deviation of the differences: such a comparison cannot show small ones, and a large p "
            "does not mean that there is none."
        )
        found.append(
            "The p values of a metric are corrected for the number of variants by Holm's method; those of several "
            "metrics are not. Where all differences are equal, as at a score of 1, there is no p."
        )
    if fewer := [f"{clean(label)} ({count})" for label, count in seeds.items() if count < most]:
        found.append(f"Fewer seeds than the others: {enumerated(fewer)}.")
    if missing:
        found.append(f"Not finished: {enumerated([clean(name) for name in missing])}.")
    return found


def _setup(comparison: Comparison) -> str:
    def value(key: str) -> str | None:
        section, _, name = key.partition(".")
        found = comparison.settings.get(section, {}).get(name)
        return None if found is None else clean(str(found))

    seeds = {run.seed for run in comparison.runs}
    made = [f"{counted(len(comparison.variants), 'variant')} with {counted(len(seeds), 'seed')}"]
    made += [f"{value(key)} {what}" for key, what in _SIZES if value(key) is not None]
    if (rate := value("optimizer.lr")) is not None:
        own = any("+optimizer.lr=" in label for label in comparison.variants)
        made.append(f"learning rate {rate}{' where a variant names no other' if own else ''}")
    commits = dict.fromkeys(clean(run.versions.get("commit", "unknown")) for run in comparison.runs)
    return f"{', '.join(made)}; on {enumerated(_machines(comparison))}, commit {enumerated(list(commits))}."


def _machines(comparison: Comparison) -> list[str]:
    return list(dict.fromkeys(clean(run.hardware) for run in comparison.runs))


def warnings(comparison: Comparison) -> list[str]:
    """Return a sentence for what was not the same for all runs."""
    found, machines = [], _machines(comparison)
    if len(machines) > 1:
        found.append(f"The runs were made on {enumerated(machines)}; their times cannot be compared.")
    keys = dict.fromkeys(key for run in comparison.runs for key in run.versions)
    different = [key for key in keys if len({run.versions.get(key) for run in comparison.runs}) > 1]
    if different:
        found.append(f"The runs were made with different versions of {enumerated(list(map(clean, different)))}.")
    contents: dict[str, set[str]] = {}
    for run in comparison.runs:
        for file, content in run.data.items():
            contents.setdefault(file, set()).add(content)
    if changed := [clean(file) for file, found_in in contents.items() if len(found_in) > 1]:
        found.append(f"{enumerated(changed)} changed between the runs, whose scores cannot be compared.")
    return found


def markdown(comparison: Comparison, missing: Sequence[str] = (), escape: Callable[[str], str] = _FOR_MARKDOWN) -> str:
    """Return the tables and notes as Markdown, whose columns are aligned for terminals.

    `escape` makes plain text of what a file says; for a terminal alone, `str` will do.
    """
    lines = ["# Comparison", ""]
    for task in tasks_of(comparison):
        lines += [f"## {escape(heading(clean(task)))}", ""]
        for table in metric_tables(comparison, task):
            lines += [f"{escape(table.caption)}:", "", *_markdown_table(table, escape), ""]
    sentences = warnings(comparison) + notes(comparison, missing)
    return "\n".join([*lines, *(f"- {escape(sentence)}" for sentence in sentences), ""])


def _markdown_table(table: Table, escape: Callable[[str], str]) -> list[str]:
    cells = [[column.title for column in table.columns], *([cell.text for cell in row] for row in table.rows)]
    cells = [[escape(text).replace("|", "\\|") for text in row] for row in cells]
    widths = [max(3, *(len(row[index]) for row in cells)) for index in range(len(table.columns))]
    sides = ["<" if column.kind == "text" else ">" for column in table.columns]
    lines = ["| " + " | ".join(f"{t:{s}{w}}" for t, s, w in zip(row, sides, widths)) + " |" for row in cells]
    rule = ["-" * width if side == "<" else "-" * (width - 1) + ":" for side, width in zip(sides, widths)]
    return [lines[0], "| " + " | ".join(rule) + " |", *lines[1:]]
