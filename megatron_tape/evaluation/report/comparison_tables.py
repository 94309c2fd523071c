"""A comparison as tables, pictures and sentences: what several variants of a recipe came to over several seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from megatron_tape.evaluation import figures
from megatron_tape.evaluation.comparison_file import TRAINING, Comparison, Row, rows
from megatron_tape.evaluation.report import tables
from megatron_tape.evaluation.report.tables import Cell, Table, enumerated, number
from megatron_tape.evaluation.results import Score
from megatron_tape.evaluation.statistics import t_quantile
from megatron_tape.evaluation.task import Picture
from megatron_tape.evaluation.tasks import title_of
from megatron_tape.huggingface.export import markdown as markdown_text
from megatron_tape.text import counted

Found = dict[Score, list[Row]]
"""What the variants came to in each metric of a task."""
_SMALLEST_P = 0.0001
"""Smaller p values are shown as less than this."""
_COLUMNS = (*tables.SUBJECT, "variant", "seeds", "mean", "deviation", "difference", "95 % interval", "p")


def by_task(comparison: Comparison) -> dict[str, Found]:
    """Return what there are figures of, by task; the training comes last."""
    found: dict[str, Found] = {}
    for metric, of_metric in sorted(rows(comparison).items(), key=lambda item: item[0].task == TRAINING):
        found.setdefault(metric.task, {})[metric] = of_metric
    return found


def metrics_table(found: Found, baseline: str) -> list[Table]:
    """Return the table of a task, with a row for each metric and variant."""
    cells = []
    for metric, of_metric in found.items():
        decimals = tables.decimals_for(value for row in of_metric for value in row.values.values())
        cells += [tables.subject(metric) + _cells(row, decimals and decimals + 1) for row in of_metric]
    return tables.table(f"Differences from {baseline}", _COLUMNS, cells)


def _cells(row: Row, decimals: int | None) -> list[Cell]:
    test = row.difference
    cells = [tables.text(row.variant), number(len(row.values), 0)]
    cells += [number(value, decimals) for value in (row.mean, row.spread, test and test.mean)]
    if test is None or test.p is None:
        return [*cells, number(None), number(None)]
    shown = f"< {_SMALLEST_P}" if test.p < _SMALLEST_P else f"{test.p:.{2 if test.p >= 0.1 else 4}f}"
    return [*cells, Cell(tables.interval(test.low, test.high, decimals), test.mean), Cell(shown, test.p)]


def picture(found: Found, variants: Sequence[str]) -> list[Picture]:
    """Return a picture with a panel for each of the first metrics: a point for each seed and a line at the mean."""
    shown = ([metric for metric in found if metric.better != "neither"] or list(found))[: figures.MOST_PANELS]
    labels = list(variants)
    figure, drawn = figures.panels(len(shown), 2, width=5.4, height=0.9 + 0.28 * len(labels), sharey=True)
    looks, told = figures.variant_styles(labels), []
    for axes, metric in zip(drawn, shown):
        title = ", ".join(cell.text for cell in tables.subject(metric) if cell.sort not in (None, ""))
        for row in found[metric]:
            place, values, look = labels.index(row.variant), list(row.values.values()), looks[row.variant]
            axes.plot(values, [place] * len(values), **look | {"linestyle": "none", "alpha": 0.7})
            axes.plot([row.mean] * 2, [place - 0.35, place + 0.35], color=look["color"], linewidth=2)
        axes.set_yticks(range(len(labels)), [looks[label]["label"] for label in labels], fontsize=8)
        axes.set_ylim(len(labels) - 0.5, -0.5)
        axes.set_xlabel(figures.plain(title, 60), fontsize=9)
        told.append(f"{title}: {', '.join(f'{row.variant} {row.mean:.4g}' for row in found[metric])}")
    return [Picture("comparison", f"Means over the seeds. {'; '.join(told)}.", figure)]


def notes(comparison: Comparison, missing: Sequence[str] = ()) -> list[str]:
    """Return what a reader must know before reading the tables; `missing` names runs that are not finished."""
    seeds = {label: sum(run.variant == label for run in comparison.runs) for label in comparison.variants}
    most = max(seeds.values(), default=0)
    machines = list(dict.fromkeys(run.hardware for run in comparison.runs))
    found = [
        f"{counted(len(seeds), 'variant')} on {enumerated(machines)}.",
        "Each point is one run. The (standard) deviation is that over the seeds of a variant. A seed decides the order "
        "of the data and the initial weights that variants have in common, so differences are taken between runs of "
        "the same seed, and p is that of a two-sided paired t test on them, corrected for the number of variants by "
        "Holm's method, and not for that of metrics. Where all differences are equal, there is none.",
        "There is one seed: nothing is known of the spread, and there is no test."
        if most < 2
        else f"With {most} seeds, a single difference gets p < 0.05 only if it is more than "
        f"{t_quantile(most - 1) / math.sqrt(most):.2g} times the standard deviation of the differences: a large p does "
        "not mean that there is none.",
    ]
    if fewer := [f"{label} ({count})" for label, count in seeds.items() if count < most]:
        found.append(f"Fewer seeds than the others: {enumerated(fewer)}.")
    if missing:
        found.append(f"Not finished: {enumerated(missing)}.")
    return found


def warnings(comparison: Comparison) -> list[str]:
    """Return a sentence for what was not the same for all runs."""
    facts: dict[str, set[str]] = {}
    for run in comparison.runs:
        for name, value in {"the hardware": run.hardware, **run.versions, **run.data}.items():
            facts.setdefault(name, set()).add(value)
    changed = [name for name, values in facts.items() if len(values) > 1]
    return [f"These differ between the runs, which may not be comparable: {', '.join(changed)}."] if changed else []


def markdown(comparison: Comparison, missing: Sequence[str] = (), escape: Callable[[str], str] | None = None) -> str:
    """Return the tables and notes as Markdown, whose columns are aligned for terminals.

    `escape` makes plain text of what a file says, by default for Markdown.
    """
    escape = escape or partial(markdown_text.plain, longest=10_000)
    lines = ["# Comparison", ""]
    for task, found in by_task(comparison).items():
        lines += [f"## {escape(title_of(task))}", ""]
        for shown in metrics_table(found, comparison.baseline):
            lines += [f"{escape(shown.caption)}:", "", *tables.markdown(shown, escape), ""]
    sentences = warnings(comparison) + notes(comparison, missing)
    return "\n".join([*lines, *(f"- {escape(sentence)}" for sentence in sentences), ""])
