"""Tables, pictures and sentences that show a comparison of variants over seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from megatron_tape.evaluation import figures
from megatron_tape.evaluation.comparison_file import TRAINING, Comparison, VariantResult, results_by_metric
from megatron_tape.evaluation.report import tables
from megatron_tape.evaluation.report.tables import Cell, Table, enumerated, number
from megatron_tape.evaluation.results import Score
from megatron_tape.evaluation.statistics import PairedTest, t_quantile
from megatron_tape.evaluation.task import Picture
from megatron_tape.evaluation.tasks import title_of
from megatron_tape.huggingface.export import markdown as markdown_text
from megatron_tape.text import counted

ByMetric = dict[Score, list[VariantResult]]
"""Results of one task: for each metric (see `Score.subject`), the results of all variants."""
SIGNIFICANT = 0.05
"""Differences with a smaller p value are bold."""
_SMALLEST_P = 0.0001
"""Smaller p values are shown as `< 0.0001`."""


def by_task(comparison: Comparison) -> dict[str, ByMetric]:
    """Return the results of all variants by task and metric; the training comes last."""
    tasks: dict[str, ByMetric] = {}
    for metric, results in sorted(results_by_metric(comparison).items(), key=lambda item: item[0].task == TRAINING):
        tasks.setdefault(metric.task, {})[metric] = results
    return tasks


def task_title(task: str) -> str:
    """Return the heading of a task, or of the scores of the training itself."""
    return "Loss and cost of training" if task == TRAINING else title_of(task)


def metrics_tables(by_metric: ByMetric, baseline: str) -> list[Table]:
    """Return a table for each metric, with a row for each variant; `summary` is set if all runs have the same value."""
    made: list[Table] = []
    for metric, results in by_metric.items():
        numbers = _values(results)
        decimals = tables.decimals_for(numbers)
        decimals = decimals and decimals + 1
        several = any(len(result.values) > 1 for result in results)
        columns = ["variant", "seeds", "mean" if several else "value", "standard deviation"]
        columns += [f"difference from {baseline}", "95 % interval", "p"]
        cells = [_cells(result, decimals) for result in results]
        if not several:
            del columns[1]
            for row in cells:
                del row[1]
        name = tables.subject_name(metric)
        equal = len(numbers) > 1 and len(set(numbers)) == 1
        summary = f"{name}: {tables.shown_number(numbers[0], None)} in all {len(numbers)} runs." if equal else ""
        made += tables.table(name, columns, cells, summary)
    return made


def _cells(result: VariantResult, decimals: int | None) -> list[Cell]:
    test = result.difference
    cells = [tables.text(result.variant), number(len(result.values), 0)]
    cells += [number(value, decimals) for value in (result.mean, result.spread, test and test.mean)]
    if test is None or test.p is None:
        return [*cells, number(None), number(None)]
    cells[-1] = replace(cells[-1], strong=test.p < SIGNIFICANT)
    return [*cells, Cell(tables.interval(test.low, test.high, decimals), test.mean), Cell(shown_p(test.p), test.p)]


def shown_p(p: float) -> str:
    """Return a p value as text."""
    return f"< {_SMALLEST_P}" if p < _SMALLEST_P else f"{p:.{2 if p >= 0.1 else 4}f}"


def picture(by_metric: ByMetric, variants: Sequence[str]) -> list[Picture]:
    """Return a picture with a panel for each metric that varies: a point for each seed, and a line at the mean.

    Panels of the same metric, such as at several lengths, have the same limits. Returns no picture if no metric varies.
    """
    shown = [metric for metric in by_metric if metric.better != "neither"] or list(by_metric)
    shown = [metric for metric in shown if len(set(_values(by_metric[metric]))) > 1][: figures.MOST_PANELS]
    if not shown:
        return []
    labels = list(variants)
    figure, drawn = figures.panels(len(shown), 2, width=5.4, height=0.9 + 0.28 * len(labels), sharey=True)
    looks, descriptions = figures.variant_styles(labels), []
    for axes, metric in zip(drawn, shown):
        title = tables.subject_name(metric)
        for result in by_metric[metric]:
            y, values, look = labels.index(result.variant), list(result.values.values()), looks[result.variant]
            axes.plot(values, [y] * len(values), **look | {"linestyle": "none", "alpha": 0.7})
            if len(values) > 1:
                axes.plot([result.mean] * 2, [y - 0.35, y + 0.35], color=look["color"], linewidth=2)
        axes.set_yticks(range(len(labels)), [looks[label]["label"] for label in labels], fontsize=8)
        axes.set_ylim(len(labels) - 0.5, -0.5)
        axes.set_xlabel(figures.plain(title, 60), fontsize=9)
        same = [value for other in shown if other.metric == metric.metric for value in _values(by_metric[other])]
        axes.set_xlim(*figures.limits(same, fraction=metric.is_fraction))
        axes.ticklabel_format(axis="x", useOffset=False)
        axes.locator_params(axis="x", nbins=6)
        means = (f"{result.variant} {result.mean:.4g}" for result in by_metric[metric])
        descriptions.append(f"{title}: {', '.join(means)}")
    several = any(len(result.values) > 1 for metric in shown for result in by_metric[metric])
    what = "Each point is a seed, and each line a mean" if several else "One run of each variant"
    return [Picture("comparison", f"{what}. {'; '.join(descriptions)}.", figure)]


def _values(results: Sequence[VariantResult]) -> list[float]:
    return [value for result in results for value in result.values.values()]


def headline(comparison: Comparison) -> tuple[str, list[str]]:
    """Return a title, and sentences: what was compared, and what the tests show."""
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
        f"compared by {evaluated}."
    )
    return f"Comparison of {enumerated(variants, 4)}", [compared, _outcome(comparison)]


def _outcome(comparison: Comparison) -> str:
    """Return a sentence about the significance of differences in the first metric whose `better` is not `neither`."""
    baseline = comparison.baseline
    tasks = by_task(comparison)
    ranking = [metric for by_metric in tasks.values() for metric in by_metric if metric.better != "neither"]
    if not ranking:
        return "None of the measured metrics ranks variants."
    first = ranking[0]
    in_others = any(metric.metric == first.metric and metric.task != first.task for metric in ranking)
    name = f"{first.metric} ({task_title(first.task)})" if in_others else first.metric
    by_metric = tasks[first.task]
    metrics = [metric for metric in by_metric if metric.metric == first.metric and metric.better != "neither"]
    tests: dict[str, list[tuple[Score, PairedTest]]] = {}
    for metric in metrics:
        for result in by_metric[metric]:
            if result.difference is not None and result.difference.p is not None:
                tests.setdefault(result.variant, []).append((metric, result.difference))
    if not tests:
        return (
            f"No difference in {name} can be tested, so the variants are not ranked. A test requires at least two "
            "seeds of both variants, and differences that vary."
        )
    method = "paired t tests over the seeds"
    significant = {variant: [one for one in of if one[1].p < SIGNIFICANT] for variant, of in tests.items()}
    if not any(significant.values()):
        variant, one = max(((v, one) for v, of in tests.items() for one in of), key=lambda x: abs(x[1][1].mean))
        return (
            f"No difference in {name} from {baseline} is significant ({method}, p < {SIGNIFICANT}); the largest "
            f"that can be tested is that of {_difference(variant, [one])}, p = {shown_p(one[1].p)}."
        )
    sign = 1 if first.better == "higher" else -1
    parts = []
    for word, side in (("better", sign), ("worse", -sign)):
        of_side = {variant: [one for one in of if one[1].mean * side > 0] for variant, of in significant.items()}
        if names := [_difference(variant, of) for variant, of in of_side.items() if of]:
            parts.append(f"significantly {word} than {baseline} for {enumerated(names, 4)}")
    others = f"; no other difference in {name} is significant" if len(significant) > 1 or len(metrics) > 1 else ""
    return f"{name[:1].upper()}{name[1:]} is {', and '.join(parts)} ({method}, p < {SIGNIFICANT}){others}."


def _difference(variant: str, tests: Sequence[tuple[Score, PairedTest]]) -> str:
    """Return the name of a variant with its largest difference, and the number of its other differences."""
    metric, test = max(tests, key=lambda one: abs(one[1].mean))
    decimals = tables.decimals_for([test.mean, test.low, test.high])
    signed = ("+" if test.mean > 0 else "") + tables.shown_number(test.mean, decimals)
    low, high = (tables.shown_number(end, decimals) for end in (test.low, test.high))
    where = f" on {tables.location(metric)}" if tables.location(metric) else ""
    others = f"; also in {counted(len(tests) - 1, 'other score')}" if len(tests) > 1 else ""
    return f"{variant} ({signed}{where}, 95 % interval {low} to {high}{others})"


def notes(comparison: Comparison, missing: Sequence[str] = ()) -> list[str]:
    """Return sentences on how to read the tables and what is incomplete; `missing` names runs that are not finished."""
    seeds = {label: sum(run.variant == label for run in comparison.runs) for label in comparison.variants}
    most = max(seeds.values(), default=0)
    machines = list(dict.fromkeys(run.hardware for run in comparison.runs))
    found = [f"{counted(len(seeds), 'variant')} on {enumerated(machines)}."]
    if most < 2:
        found.append("There is one seed, so the spread is unknown and differences are not tested.")
    else:
        found += [
            "Each point is one run. A seed sets the order of the data and the initial weights that variants share, so "
            "differences are taken between runs of the same seed.",
            "p is that of a two-sided paired t test, corrected by Holm's method for the number of variants, but not "
            f"for the number of metrics. Bold differences have p < {SIGNIFICANT}. A test needs differences that vary.",
            f"With {most} seeds, a single difference reaches p < {SIGNIFICANT} only if it is more than "
            f"{t_quantile(most - 1) / math.sqrt(most):.2g} times the standard deviation of the differences: a large p "
            "does not show that there is no difference.",
        ]
    if len({score.length for run in comparison.runs for score in run.scores} - {None}) > 1:
        found.append("Compare variants at the same length. Scores at different lengths answer different questions.")
    if fewer := [f"{label} ({count})" for label, count in seeds.items() if count < most]:
        found.append(f"Fewer seeds than the others: {enumerated(fewer)}.")
    if missing:
        found.append(f"Not finished: {enumerated(missing)}.")
    return found


def warnings(comparison: Comparison) -> list[str]:
    """Return a warning if hardware, versions or data differ between runs, else an empty list."""
    facts: dict[str, set[str]] = {}
    for run in comparison.runs:
        for name, value in {"the hardware": run.hardware, **run.versions, **run.data}.items():
            facts.setdefault(name, set()).add(value)
    changed = [name for name, values in facts.items() if len(values) > 1]
    return [f"These differ between the runs, which may not be comparable: {', '.join(changed)}."] if changed else []


def markdown(comparison: Comparison, missing: Sequence[str] = (), escape: Callable[[str], str] | None = None) -> str:
    """Return the headline, the tables and the notes as Markdown, with columns that are aligned in a terminal.

    `escape` escapes text from files, by default for Markdown. `missing` names runs that are not finished.
    """
    escape = escape or partial(markdown_text.plain, longest=10_000)
    title, sentences = headline(comparison)
    lines = [f"# {escape(title)}", "", escape(" ".join(sentences)), ""]
    for task, by_metric in by_task(comparison).items():
        lines += [f"## {escape(task_title(task))}", ""]
        for shown in metrics_tables(by_metric, comparison.baseline):
            caption = [] if shown.summary else [f"{escape(shown.caption)}:", ""]
            lines += [*caption, *tables.markdown(shown, escape), ""]
    remarks = warnings(comparison) + notes(comparison, missing)
    return "\n".join([*lines, *(f"- {escape(sentence)}" for sentence in remarks), ""])
