"""A comparison of variants over seeds as tables, pictures and sentences."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from megatron_tape.evaluation import figures
from megatron_tape.evaluation.comparison_file import TRAINING, Comparison, Row, rows
from megatron_tape.evaluation.report import tables
from megatron_tape.evaluation.report.tables import Cell, Table, enumerated, number
from megatron_tape.evaluation.results import Score
from megatron_tape.evaluation.statistics import PairedTest, t_quantile
from megatron_tape.evaluation.task import Picture
from megatron_tape.evaluation.tasks import title_of
from megatron_tape.huggingface.export import markdown as markdown_text
from megatron_tape.text import counted

Found = dict[Score, list[Row]]
"""The rows of the variants for each metric of a task (see `Score.subject`)."""
SIGNIFICANT = 0.05
"""Differences with a smaller p value are bold."""
_SMALLEST_P = 0.0001
"""Smaller p values are shown as less than this."""


def by_task(comparison: Comparison) -> dict[str, Found]:
    """Return the rows of all variants by task and metric; the training comes last."""
    found: dict[str, Found] = {}
    for metric, of_metric in sorted(rows(comparison).items(), key=lambda item: item[0].task == TRAINING):
        found.setdefault(metric.task, {})[metric] = of_metric
    return found


def task_title(task: str) -> str:
    """Return the heading of a task, or that of the training's own figures."""
    return "Loss and cost of training" if task == TRAINING else title_of(task)


def metrics_tables(found: Found, baseline: str) -> list[Table]:
    """Return a table for each metric, with a row for each variant. A metric with one value everywhere is a summary."""
    made: list[Table] = []
    for metric, of_metric in found.items():
        numbers = [value for row in of_metric for value in row.values.values()]
        decimals = tables.decimals_for(numbers)
        decimals = decimals and decimals + 1
        several = any(len(row.values) > 1 for row in of_metric)
        columns = ["variant", "seeds", "mean" if several else "value", "standard deviation"]
        columns += [f"difference from {baseline}", "95 % interval", "p"]
        cells = [_cells(row, decimals) for row in of_metric]
        if not several:
            del columns[1]
            for row in cells:
                del row[1]
        name = tables.subject_name(metric)
        equal = len(numbers) > 1 and len(set(numbers)) == 1
        summary = f"{name}: {tables.shown_number(numbers[0], None)} in all {len(numbers)} runs." if equal else ""
        made += tables.table(name, columns, cells, summary)
    return made


def _cells(row: Row, decimals: int | None) -> list[Cell]:
    test = row.difference
    cells = [tables.text(row.variant), number(len(row.values), 0)]
    cells += [number(value, decimals) for value in (row.mean, row.spread, test and test.mean)]
    if test is None or test.p is None:
        return [*cells, number(None), number(None)]
    cells[-1] = replace(cells[-1], strong=test.p < SIGNIFICANT)
    return [*cells, Cell(tables.interval(test.low, test.high, decimals), test.mean), Cell(shown_p(test.p), test.p)]


def shown_p(p: float) -> str:
    """Return a p value as text."""
    return f"< {_SMALLEST_P}" if p < _SMALLEST_P else f"{p:.{2 if p >= 0.1 else 4}f}"


def picture(found: Found, variants: Sequence[str]) -> list[Picture]:
    """Return a picture with a panel for each metric that varies: a point for each seed and a line at the mean.

    Panels of one metric, such as those of several lengths, have the same limits. Empty if no metric varies.
    """
    shown = [metric for metric in found if metric.better != "neither"] or list(found)
    shown = [metric for metric in shown if len(set(_values(found[metric]))) > 1][: figures.MOST_PANELS]
    if not shown:
        return []
    labels = list(variants)
    figure, drawn = figures.panels(len(shown), 2, width=5.4, height=0.9 + 0.28 * len(labels), sharey=True)
    looks, descriptions = figures.variant_styles(labels), []
    for axes, metric in zip(drawn, shown):
        title = tables.subject_name(metric)
        for row in found[metric]:
            place, values, look = labels.index(row.variant), list(row.values.values()), looks[row.variant]
            axes.plot(values, [place] * len(values), **look | {"linestyle": "none", "alpha": 0.7})
            if len(values) > 1:
                axes.plot([row.mean] * 2, [place - 0.35, place + 0.35], color=look["color"], linewidth=2)
        axes.set_yticks(range(len(labels)), [looks[label]["label"] for label in labels], fontsize=8)
        axes.set_ylim(len(labels) - 0.5, -0.5)
        axes.set_xlabel(figures.plain(title, 60), fontsize=9)
        same = [value for other in shown if other.metric == metric.metric for value in _values(found[other])]
        axes.set_xlim(*figures.limits(same, share=metric.is_fraction))
        axes.ticklabel_format(axis="x", useOffset=False)
        axes.locator_params(axis="x", nbins=6)
        descriptions.append(f"{title}: {', '.join(f'{row.variant} {row.mean:.4g}' for row in found[metric])}")
    several = any(len(row.values) > 1 for metric in shown for row in found[metric])
    what = "Each seed as a point and the mean as a line" if several else "One run of each variant"
    return [Picture("comparison", f"{what}. {'; '.join(descriptions)}.", figure)]


def _values(of_metric: Sequence[Row]) -> list[float]:
    return [value for row in of_metric for value in row.values.values()]


def headline(comparison: Comparison) -> tuple[str, list[str]]:
    """Return a title, and sentences: what was compared, and what the tests allow to say."""
    variants = comparison.variants
    if not variants:
        return "Comparison", ["No run is finished."]
    seeds = sorted({sum(run.variant == variant for run in comparison.runs) for variant in variants})
    tasks = list(by_task(comparison))
    how_many = " to ".join(str(count) for count in dict.fromkeys((seeds[0], seeds[-1])))
    each = f"{how_many} seed{'' if seeds == [1] else 's'}"
    evaluated = enumerated([task_title(task) for task in tasks if task != TRAINING] or ["the validation loss"])
    compared = (
        f"{counted(len(variants), 'variant')} of one recipe ({enumerated(variants, 6)}), trained with {each} each, are "
        f"compared by: {evaluated}."
    )
    return f"Comparison of {enumerated(variants, 4)}", [compared, _outcome(comparison)]


def _outcome(comparison: Comparison) -> str:
    """Return a sentence about the first metric of the first task that ranks variants."""
    baseline = comparison.baseline
    judged = [metric for found in by_task(comparison).values() for metric in found if metric.better != "neither"]
    if not judged:
        return "Nothing that was measured ranks the variants."
    first = judged[0]
    others = any(metric.metric == first.metric and metric.task != first.task for metric in judged)
    name = f"{first.metric} ({task_title(first.task)})" if others else first.metric
    found = by_task(comparison)[first.task]
    metrics = [metric for metric in found if metric.metric == first.metric and metric.better != "neither"]
    tests: dict[str, list[tuple[Score, PairedTest]]] = {}
    for metric in metrics:
        for row in found[metric]:
            if row.difference is not None and row.difference.p is not None:
                tests.setdefault(row.variant, []).append((metric, row.difference))
    if not tests:
        return (
            f"No difference in {name} can be tested: that takes at least two seeds of both variants, with "
            "differences that vary. This ranks no variant."
        )
    by = "paired t tests over the seeds"
    clear = {variant: [one for one in of if one[1].p < SIGNIFICANT] for variant, of in tests.items()}
    if not any(clear.values()):
        variant, one = max(((v, one) for v, of in tests.items() for one in of), key=lambda x: abs(x[1][1].mean))
        return (
            f"No difference in {name} from {baseline} is significant ({by}, p < {SIGNIFICANT}); the largest that can "
            f"be tested is that of {_difference(variant, [one])}, p = {shown_p(one[1].p)}."
        )
    sign = 1 if first.better == "higher" else -1
    parts = []
    for word, side in (("better", sign), ("worse", -sign)):
        those = {variant: [one for one in of if one[1].mean * side > 0] for variant, of in clear.items()}
        if names := [_difference(variant, of) for variant, of in those.items() if of]:
            parts.append(f"significantly {word} than {baseline} for {enumerated(names, 4)}")
    rest = f"; no other difference in {name} is significant" if len(clear) > 1 or len(metrics) > 1 else ""
    return f"{name[:1].upper()}{name[1:]} is {', and '.join(parts)} ({by}, p < {SIGNIFICANT}){rest}."


def _difference(variant: str, tests: Sequence[tuple[Score, PairedTest]]) -> str:
    """Return a variant with the largest of its differences, and how many others there are."""
    metric, test = max(tests, key=lambda one: abs(one[1].mean))
    decimals = tables.decimals_for([test.mean, test.low, test.high])
    signed = ("+" if test.mean > 0 else "") + tables.shown_number(test.mean, decimals)
    low, high = (tables.shown_number(end, decimals) for end in (test.low, test.high))
    where = f" on {tables.location(metric)}" if tables.location(metric) else ""
    others = f"; also in {len(tests) - 1} more" if len(tests) > 1 else ""
    return f"{variant} ({signed}{where}, 95 % interval {low} to {high}{others})"


def notes(comparison: Comparison, missing: Sequence[str] = ()) -> list[str]:
    """Return how to read the tables, and what is incomplete; `missing` names runs that are not finished."""
    seeds = {label: sum(run.variant == label for run in comparison.runs) for label in comparison.variants}
    most = max(seeds.values(), default=0)
    machines = list(dict.fromkeys(run.hardware for run in comparison.runs))
    found = [f"{counted(len(seeds), 'variant')} on {enumerated(machines)}."]
    if most < 2:
        found.append("There is one seed: the spread is unknown, and there is no test.")
    else:
        found += [
            "Each point is one run. A seed sets the order of the data and the initial weights that variants share, so "
            "differences are taken between runs of the same seed.",
            "p is that of a two-sided paired t test, corrected by Holm's method for the number of variants, but not "
            f"for the number of metrics. Bold differences have p < {SIGNIFICANT}. Equal differences have no p.",
            f"With {most} seeds, a single difference reaches p < {SIGNIFICANT} only if it is more than "
            f"{t_quantile(most - 1) / math.sqrt(most):.2g} times the standard deviation of the differences: a large p "
            "does not show that there is no difference.",
        ]
    if len({score.length for run in comparison.runs for score in run.scores} - {None}) > 1:
        found.append("Compare variants at one length. Scores at different lengths answer different questions.")
    if fewer := [f"{label} ({count})" for label, count in seeds.items() if count < most]:
        found.append(f"Fewer seeds than the others: {enumerated(fewer)}.")
    if missing:
        found.append(f"Not finished: {enumerated(missing)}.")
    return found


def warnings(comparison: Comparison) -> list[str]:
    """Return a warning if hardware, versions or data differ between runs."""
    facts: dict[str, set[str]] = {}
    for run in comparison.runs:
        for name, value in {"the hardware": run.hardware, **run.versions, **run.data}.items():
            facts.setdefault(name, set()).add(value)
    changed = [name for name, values in facts.items() if len(values) > 1]
    return [f"These differ between the runs, which may not be comparable: {', '.join(changed)}."] if changed else []


def markdown(comparison: Comparison, missing: Sequence[str] = (), escape: Callable[[str], str] | None = None) -> str:
    """Return the tables and notes as Markdown, with columns that are aligned in a terminal.

    `escape` turns text from files into plain text, by default for Markdown.
    """
    escape = escape or partial(markdown_text.plain, longest=10_000)
    title, sentences = headline(comparison)
    lines = [f"# {escape(title)}", "", escape(" ".join(sentences)), ""]
    for task, found in by_task(comparison).items():
        lines += [f"## {escape(task_title(task))}", ""]
        for shown in metrics_tables(found, comparison.baseline):
            caption = [] if shown.summary else [f"{escape(shown.caption)}:", ""]
            lines += [*caption, *tables.markdown(shown, escape), ""]
    remarks = warnings(comparison) + notes(comparison, missing)
    return "\n".join([*lines, *(f"- {escape(sentence)}" for sentence in remarks), ""])
