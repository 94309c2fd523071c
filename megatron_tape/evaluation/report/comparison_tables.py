"""Tables, pictures and sentences that show a comparison of variants over seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from megatron_tape.evaluation import figures
from megatron_tape.evaluation.comparison_file import (
    TRAINING,
    Comparison,
    VariantResult,
    results_by_metric,
)
from megatron_tape.evaluation.report import tables
from megatron_tape.evaluation.report.findings import at, conditions, finding, measured
from megatron_tape.evaluation.report.tables import Cell, Table, enumerated, number
from megatron_tape.evaluation.results import Score
from megatron_tape.evaluation.statistics import PairedTest, t_quantile
from megatron_tape.evaluation.task import Picture
from megatron_tape.evaluation.tasks import group_names, title_of
from megatron_tape.huggingface.export import markdown as markdown_text
from megatron_tape.text import counted

ByMetric = dict[Score, list[VariantResult]]
"""Results of one task: for each metric (see `Score.subject`), the results of all variants."""
SIGNIFICANT = 0.05
"""Differences with a smaller p value are bold."""
_SMALLEST_P = 0.0001
"""Smaller p values are shown as `< 0.0001`."""


def by_task(comparison: Comparison) -> dict[str, ByMetric]:
    """Return the results of all variants by task and metric; the training comes last.

    Groups of scores have their names for readers, and are in the order that the task declares
    (`Task.group_names`).
    """
    tasks: dict[str, ByMetric] = {}
    for metric, results in sorted(
        results_by_metric(comparison).items(), key=lambda item: item[0].task == TRAINING
    ):
        tasks.setdefault(metric.task, {})[metric] = results
    return {
        task: _with_group_names(metrics, comparison.evaluation.get(task, {}))
        for task, metrics in tasks.items()
    }


def _with_group_names(by_metric: ByMetric, settings: Mapping[str, Any]) -> ByMetric:
    names = group_names(next(iter(by_metric)).task, settings)
    order = list(names)

    def position(metric: Score) -> int:
        if metric.group in names:
            return order.index(metric.group)
        return len(order)

    ordered = sorted(by_metric, key=position)
    return {
        replace(metric, group=names.get(metric.group, metric.group)): by_metric[metric]
        for metric in ordered
    }


def task_title(task: str) -> str:
    """Return the heading of a task, or of the scores of the training itself."""
    if task == TRAINING:
        return "Loss and cost of training"
    return title_of(task)


def task_tables(by_metric: ByMetric, baseline: str) -> list[Table]:
    """Return tables with a row for each metric and variant, and a column for each condition (length
    or group).

    Metrics without conditions, such as those of the training, are columns. Metrics with the same
    columns share a table.
    """
    rows: dict[str, dict[str, Score]] = {}
    for metric in by_metric:
        row, column = _place(metric)
        rows.setdefault(row, {})[column] = metric
    shared: dict[tuple[str, ...], dict[str, dict[str, Score]]] = {}
    for row, cells in rows.items():
        shared.setdefault(tuple(cells), {})[row] = cells
    return [one for of in shared.values() for one in _task_table(by_metric, of, baseline)]


def _place(metric: Score) -> tuple[str, str]:
    """Return the names of the row and of the column of a metric."""
    name = tables.metric_name(metric)
    if metric.length is not None:
        return ", ".join(filter(None, (name, metric.group))), f"{metric.length:,} tokens"
    if metric.group:
        return (name, metric.group)
    return ("", name)


def _task_table(
    by_metric: ByMetric, rows: Mapping[str, Mapping[str, Score]], baseline: str
) -> list[Table]:
    """Return a list of one table with the metrics in `rows`, by the names of row and column."""
    metrics = [metric for of in rows.values() for metric in of.values()]
    results = {
        metric: {result.variant: result for result in by_metric[metric]} for metric in metrics
    }
    variants = list(dict.fromkeys(variant for of in results.values() for variant in of))
    seeds = {
        label: max(len(of[label].values) for of in results.values() if label in of)
        for label in variants
    }
    shown_seeds = {label: counted(count, "seed") for label, count in seeds.items()}
    if len(set(seeds.values())) == 1:
        shown_seeds = {}

    decimals = {metric: _decimals(by_metric, metric) for metric in metrics}
    made: list[list[Cell]] = []
    for by_column in rows.values():
        for variant in variants:
            cells = [
                _cell(metric, results[metric].get(variant), decimals[metric])
                for metric in by_column.values()
            ]
            made.append([Cell(variant, variant, shown_seeds.get(variant, "")), *cells])

    columns = ["variant", *next(iter(rows.values()))]
    caption = f"Below each value: the difference from {baseline}"
    if max(seeds.values()) > 1:
        caption = (
            f"Mean \N{PLUS-MINUS SIGN} standard deviation over the seeds. {caption}, its 95 %"
            " interval and p"
        )
        if any(cell.strong for row in made for cell in row):
            caption += f" (bold: p < {SIGNIFICANT})"
    if any(rows):
        row_groups = [row for row in rows for _ in variants]
    else:
        row_groups = ()
    return tables.table(f"{caption}.", columns, made, row_groups=row_groups)


def _decimals(by_metric: ByMetric, metric: Score) -> int | None:
    """Return the number of decimals for all values of a metric, at all lengths and in all
    groups.
    """
    same = [
        of
        for other, of in by_metric.items()
        if (other.metric, other.unit) == (metric.metric, metric.unit)
    ]
    decimals = tables.decimals_for(value for results in same for value in _values(results))
    return decimals and decimals + 1


def _cell(metric: Score, result: VariantResult | None, decimals: int | None) -> Cell:
    """Return a cell with the mean and the standard deviation of a variant, and below them its
    test.
    """
    if result is None:
        return number(None)
    shown = tables.shown_number(result.mean, decimals)
    # The number of parameters and the like does not depend on the seed.
    if result.spread is not None and (result.spread > 0 or metric.better != "neither"):
        shown += f" \N{PLUS-MINUS SIGN} {tables.shown_number(result.spread, decimals)}"
    test = result.difference
    if test is None:
        return Cell(shown, result.mean)
    difference = _signed(test.mean, decimals)
    if test.p is None:
        return Cell(shown, result.mean, difference)
    equal = "" if test.p < _SMALLEST_P else "= "
    detail = (
        f"{difference} ({tables.interval(test.low, test.high, decimals)})\np"
        f" {equal}{shown_p(test.p)}"
    )
    return Cell(shown, result.mean, detail, strong=test.p < SIGNIFICANT)


def _signed(value: float, decimals: int | None) -> str:
    """Return a difference as text, with its sign unless it is shown as 0."""
    shown = tables.shown_number(value, decimals)
    if value > 0 and any(digit in shown for digit in "123456789"):
        return f"+{shown}"
    return shown


def shown_p(p: float) -> str:
    """Return a p value as text."""
    if p < _SMALLEST_P:
        return f"< {_SMALLEST_P}"
    return f"{p:.{2 if p >= 0.1 else 4}f}"


def picture(by_metric: ByMetric, variants: Sequence[str]) -> list[Picture]:
    """Return a picture with a panel for each metric that varies: a point for each seed, and a line
    at the mean.

    Panels of the same metric, such as at several lengths, have the same limits. Returns no picture
    if no metric varies.
    """
    shown = [metric for metric in by_metric if metric.better != "neither"] or list(by_metric)
    shown = [metric for metric in shown if len(set(_values(by_metric[metric]))) > 1][
        : figures.MOST_PANELS
    ]
    if not shown:
        return []
    labels = list(variants)
    figure, drawn = figures.panels(
        len(shown), 2, width=5.4, height=0.9 + 0.28 * len(labels), sharey=True
    )
    looks = figures.variant_styles(labels)
    descriptions = []
    for axes, metric in zip(drawn, shown):
        title = tables.subject_name(metric)
        for result in by_metric[metric]:
            y = labels.index(result.variant)
            values = list(result.values.values())
            look = looks[result.variant]
            axes.plot(values, [y] * len(values), **look | {"linestyle": "none", "alpha": 0.7})
            if len(values) > 1:
                axes.plot([result.mean] * 2, [y - 0.35, y + 0.35], color=look["color"], linewidth=2)
        axes.set_yticks(range(len(labels)), [looks[label]["label"] for label in labels], fontsize=8)
        axes.set_ylim(len(labels) - 0.5, -0.5)
        axes.set_xlabel(figures.plain(title, 60), fontsize=9)
        same = [
            value
            for other in shown
            if other.metric == metric.metric
            for value in _values(by_metric[other])
        ]
        axes.set_xlim(*figures.limits(same, fraction=metric.is_fraction))
        axes.ticklabel_format(axis="x", useOffset=False)
        axes.locator_params(axis="x", nbins=6)
        means = (f"{result.variant} {result.mean:.4g}" for result in by_metric[metric])
        descriptions.append(f"{title}: {', '.join(means)}")
    several = any(len(result.values) > 1 for metric in shown for result in by_metric[metric])
    if several:
        what = "Each point is a seed, and each line a mean"
    else:
        what = "One run of each variant"
    return [Picture("comparison", f"{what}. {'; '.join(descriptions)}.", figure)]


def _values(results: Sequence[VariantResult]) -> list[float]:
    return [value for result in results for value in result.values.values()]


def headline(comparison: Comparison) -> tuple[str, list[str]]:
    """Return a title, and paragraphs: what was found, what the tests show, and what was
    compared.
    """
    variants = comparison.variants
    if not variants:
        return "Comparison", ["No run is finished."]
    seeds = sorted({sum(run.variant == variant for run in comparison.runs) for variant in variants})
    tasks = list(by_task(comparison))
    how_many = " to ".join(str(count) for count in dict.fromkeys((seeds[0], seeds[-1])))
    each = "one seed" if seeds == [1] else f"{how_many} seeds"
    evaluated = enumerated(
        [task_title(task) for task in tasks if task != TRAINING] or ["the validation loss"]
    )
    compared = (
        f"{counted(len(variants), 'variant')} of one recipe ({enumerated(variants, 6)}), trained"
        f" with {each} each, are compared by {evaluated}."
    )
    found = _findings(comparison)
    by_chance, outcome = _outcome(comparison)
    if by_chance:
        paragraphs = [outcome, *found, compared]
    else:
        paragraphs = [*found, f"{outcome} {compared}"]
    return f"Comparison of {enumerated(variants, 4)}", paragraphs


def _findings(comparison: Comparison) -> list[str]:
    """Return a sentence for each evaluated task about its first metric, or about the validation
    loss without tasks.

    If variants have different seeds, the sentences are about the seeds that all have, and another
    one says so: a seed that only some variants have would make them look better or worse than the
    others.
    """
    seeds = [
        {run.seed for run in comparison.runs if run.variant == variant}
        for variant in comparison.variants
    ]
    shared = set.intersection(*seeds)
    only_shared = ""
    if shared and shared != set.union(*seeds):
        comparison = replace(
            comparison, runs=[run for run in comparison.runs if run.seed in shared]
        )
        names = enumerated([str(seed) for seed in sorted(shared)], 6)
        only_shared = (
            f"This counts only {'seed' if len(shared) == 1 else 'seeds'} {names}, which all"
            " variants have."
        )

    tasks = by_task(comparison)
    evaluated = [task for task in tasks if task != TRAINING] or list(tasks)
    sentences = []
    for task in evaluated:
        by_metric = tasks[task]
        ranking = [metric.metric for metric in by_metric if metric.better != "neither"]
        means = {
            metric: {one.variant: one.mean for one in results}
            for metric, results in by_metric.items()
        }
        several = any(len(one.values) > 1 for results in by_metric.values() for one in results)
        if ranking:
            made = measured(ranking[0], means, "mean" if several else "")
        else:
            made = None
        if made is not None:
            title = f"{task_title(task)}: " if len(evaluated) > 1 else ""
            sentences.append(title + finding(made, comparison.baseline))
    if sentences and only_shared:
        sentences.append(only_shared)
    return sentences


def _outcome(comparison: Comparison) -> tuple[bool, str]:
    """Return a sentence on the tests of the first metric that ranks variants, and before it whether
    none succeeded.

    Then all differences may be due to chance.
    """
    baseline = comparison.baseline
    tasks = by_task(comparison)
    ranking = [
        metric for by_metric in tasks.values() for metric in by_metric if metric.better != "neither"
    ]
    if not ranking:
        return False, "None of the measured metrics ranks variants."
    if all(len(result.values) < 2 for metric in ranking for result in tasks[metric.task][metric]):
        return (
            False,
            (
                "One seed of each variant was run: a difference may come from the seed, and none is"
                " tested. Add seeds with --seeds."
            ),
        )
    first = ranking[0]
    in_others = any(
        metric.metric == first.metric and metric.task != first.task for metric in ranking
    )
    if in_others:
        name = f"{first.metric} ({task_title(first.task)})"
    else:
        name = first.metric
    by_metric = tasks[first.task]
    metrics = [
        metric
        for metric in by_metric
        if metric.metric == first.metric and metric.better != "neither"
    ]
    tests: dict[str, list[tuple[Score, PairedTest]]] = {}
    for metric in metrics:
        for result in by_metric[metric]:
            if result.difference is not None and result.difference.p is not None:
                tests.setdefault(result.variant, []).append((metric, result.difference))
    if not tests:
        return (
            False,
            (
                f"No difference in {name} can be tested, so the variants are not ranked. A test"
                " requires at least two seeds of both variants, and differences that vary."
            ),
        )
    method = "paired t tests over the seeds"
    named = conditions(metrics)
    significant = {
        variant: [one for one in of if one[1].p < SIGNIFICANT] for variant, of in tests.items()
    }
    if not any(significant.values()):
        variant, one = max(
            ((v, one) for v, of in tests.items() for one in of), key=lambda x: abs(x[1][1].mean)
        )
        return (
            True,
            (
                f"No difference in {name} from {baseline} is significant ({method}, p <"
                f" {SIGNIFICANT}); the largest that can be tested is that of"
                f" {_difference(variant, *one, named)}, p = {shown_p(one[1].p)}."
            ),
        )
    sign = 1 if first.better == "higher" else -1
    parts = []
    for word, side in (("better", sign), ("worse", -sign)):
        of_side = {
            variant: [one for one in of if one[1].mean * side > 0]
            for variant, of in significant.items()
        }
        if len(metrics) == 1:
            names = [_difference(variant, *of[0], named) for variant, of in of_side.items() if of]
        else:
            names = [
                f"{variant} ({len(of)} of {len(metrics)} conditions)"
                for variant, of in of_side.items()
                if of
            ]
        if names:
            parts.append(f"significantly {word} with {enumerated(names, 4)}")
    if len(significant) > 1 or len(metrics) > 1:
        others = "; no other difference is significant"
    else:
        others = ""
    return (
        False,
        (
            f"Compared with {baseline}, {name} is {', and '.join(parts)} ({method}, p <"
            f" {SIGNIFICANT}){others}."
        ),
    )


def _difference(variant: str, metric: Score, test: PairedTest, named: Mapping[Score, str]) -> str:
    """Return the name of a variant with its difference; `named` has the names of conditions by
    metric.
    """
    return (
        f"{variant} ({_signed(test.mean, tables.decimals_for([test.mean]))}{at([named[metric]])})"
    )


def notes(comparison: Comparison, missing: Sequence[str] = ()) -> list[str]:
    """Return sentences on how to read the tables and what is incomplete; `missing` names runs that
    are not finished.
    """
    seeds = {
        label: sum(run.variant == label for run in comparison.runs) for label in comparison.variants
    }
    most = max(seeds.values(), default=0)
    machines = list(dict.fromkeys(run.hardware for run in comparison.runs))
    found = [f"{counted(len(seeds), 'variant')} on {enumerated(machines)}."]
    if most < 2:
        found.append(
            "There is one seed of each variant, so the spread is unknown and differences are not"
            " tested."
        )
    else:
        found += [
            (
                "Each point is one run. A seed sets the order of the data and the initial weights"
                " that variants share, so differences are taken between runs of the same seed."
            ),
            (
                "p is that of a two-sided paired t test, corrected by Holm's method for the number"
                " of variants, but not for the number of metrics. Bold differences have p <"
                f" {SIGNIFICANT}. A test needs differences that vary."
            ),
            (
                f"With {most} seeds, a single difference reaches p < {SIGNIFICANT} only if it is"
                f" more than {t_quantile(most - 1) / math.sqrt(most):.2g} times the standard"
                " deviation of the differences: a large p does not show that there is no"
                " difference."
            ),
        ]
    if len({score.length for run in comparison.runs for score in run.scores} - {None}) > 1:
        found.append(
            "Compare variants at the same length. Scores at different lengths answer different"
            " questions."
        )
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
    if changed:
        return [
            f"These differ between the runs, which may not be comparable: {', '.join(changed)}."
        ]
    return []


def markdown(
    comparison: Comparison, missing: Sequence[str] = (), escape: Callable[[str], str] | None = None
) -> str:
    """Return the headline, the tables and the notes as Markdown, with columns that are aligned in a
    terminal.

    `escape` escapes text from files, by default for Markdown. `missing` names runs that are not
    finished.
    """
    escape = escape or partial(markdown_text.plain, longest=10_000)
    title, sentences = headline(comparison)
    lines = [f"# {escape(title)}", "", escape(" ".join(sentences)), ""]
    for task, by_metric in by_task(comparison).items():
        lines += [f"## {escape(task_title(task))}", ""]
        for shown in task_tables(by_metric, comparison.baseline):
            lines += [escape(shown.caption), "", *tables.markdown(shown, escape), ""]
    remarks = warnings(comparison) + notes(comparison, missing)
    return "\n".join([*lines, *(f"- {escape(sentence)}" for sentence in remarks), ""])
