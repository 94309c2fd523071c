"""Tables, pictures and sentences that show a comparison of variants over seeds."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_tape.evaluation import figures
from megatron_tape.evaluation.comparison_file import (
    TRAINING,
    Comparison,
    VariantResult,
    results_by_metric,
)
from megatron_tape.evaluation.report import tables
from megatron_tape.evaluation.report.findings import finding, first_measured
from megatron_tape.evaluation.report.tables import Cell, Table, enumerated, number
from megatron_tape.evaluation.results import Score
from megatron_tape.evaluation.statistics import Estimate, t_quantile
from megatron_tape.evaluation.task import Picture
from megatron_tape.evaluation.tasks import named_scores, title_of
from megatron_tape.huggingface.export.markdown import escape_markdown
from megatron_tape.text import counted

ByMetric = dict[Score, list[VariantResult]]
"""Results of all variants in one task. A key is a `Score.subject`: a score without its value, which
says what was measured (metric, group and length).
"""
SIGNIFICANT = 0.05
"""Differences with a smaller p value are bold."""
TIMES = (
    "Times depend on what else the machine did: compare them only if runs were executed with"
    " --jobs 1 on an idle machine."
)


def by_task(comparison: Comparison) -> dict[str, ByMetric]:
    """Return the results of all variants by task and metric; the training comes last.

    Groups of scores have their names for readers, and are in the order that the task declares
    (`Task.group_names`).
    """
    tasks = {}
    for subject, results in results_by_metric(comparison).items():
        tasks.setdefault(subject.task, {})[subject] = results
    # Readers look for the scores of tasks first, and for the cost of training afterwards.
    if TRAINING in tasks:
        tasks[TRAINING] = tasks.pop(TRAINING)
    return {
        task: _with_group_names(task, by_metric, comparison.evaluation.get(task, {}))
        for task, by_metric in tasks.items()
    }


def _with_group_names(task: str, by_metric: ByMetric, settings: Mapping[str, Any]) -> ByMetric:
    """Return results whose groups have their names for readers, given the task's settings."""
    # Pairs of each subject and the same subject with the name of its group.
    pairs = named_scores(task, settings, by_metric)
    return {named: by_metric[subject] for subject, named in pairs}


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
    # Subjects by the names of their row and column.
    rows = {}
    for subject in by_metric:
        # By default, a metric is a row and its group a column.
        row = tables.metric_name(subject)
        column = subject.group
        if subject.length is not None:
            row = ", ".join(filter(None, (row, subject.group)))
            column = f"{subject.length:,} tokens"
        elif not column:
            column = row
            row = ""
        rows.setdefault(row, {})[column] = subject

    # Rows with the same columns, by the names of these columns. Each group becomes a table.
    shared = {}
    for row, by_column in rows.items():
        shared.setdefault(tuple(by_column), {})[row] = by_column
    return [_task_table(by_metric, same_columns, baseline) for same_columns in shared.values()]


def _task_table(
    by_metric: ByMetric, rows: Mapping[str, Mapping[str, Score]], baseline: str
) -> Table:
    """Return a table of the metrics in `rows`, which has their subjects by the names of row and
    column. All rows have the same columns. A row is shown once for each variant.
    """
    # For each variant, the largest number of seeds that it has in one of the metrics.
    seeds = Counter()
    for by_column in rows.values():
        for subject in by_column.values():
            # `|=` of two counters keeps the larger count of each variant.
            seeds |= Counter({result.variant: len(result.values) for result in by_metric[subject]})

    cells = []
    row_groups = []
    for row, by_column in rows.items():
        for variant, count in seeds.items():
            label = tables.text(variant)
            # If all variants have the same number of seeds, only the headline says it.
            if len(set(seeds.values())) > 1:
                label = replace(label, detail=counted(count, "seed"))
            values = [_cell(by_metric, subject, variant) for subject in by_column.values()]
            cells.append([label, *values])
            row_groups.append(row)

    caption = f"Below each value: the difference from {baseline}."
    if max(seeds.values()) > 1:
        caption = (
            "Mean \N{PLUS-MINUS SIGN} standard deviation over the seeds. Below it: the difference"
            f" from {baseline}, its 95 % interval and p (bold: p < {SIGNIFICANT})."
        )
    # `by_column` is that of the last row; the columns of all rows have the same names.
    return tables.table(caption, ["variant", *by_column], cells, row_groups)


def _decimals(by_metric: ByMetric, subject: Score) -> int | None:
    """Return the number of decimals for all values of a subject's metric, at all lengths and in all
    groups.
    """
    values = []
    for other, results in by_metric.items():
        if (other.metric, other.unit) == (subject.metric, subject.unit):
            values += _values(results)
    decimals = tables.decimals_for(values)
    # Means over seeds have one more decimal than values. `and` keeps 0, for whole numbers, and
    # None, which means four significant digits.
    return decimals and decimals + 1


def _cell(by_metric: ByMetric, subject: Score, variant: str) -> Cell:
    """Return the cell of a variant's result in a metric."""
    by_variant = {result.variant: result for result in by_metric[subject]}
    decimals = _decimals(by_metric, subject)
    return result_cell(by_variant.get(variant), decimals, ranks=subject.better != "neither")


def result_cell(result: VariantResult | None, decimals: int | None, ranks: bool = True) -> Cell:
    """Return a cell with the mean and the standard deviation of a variant, and below them the test
    of its difference from the baseline; a dash for None.

    `ranks` says whether the metric ranks variants.
    """
    if result is None:
        return number(None)

    shown = tables.shown_number(result.mean, decimals)
    # A spread of 0 is left out for metrics that rank no variant, such as the number of parameters,
    # which does not depend on the seed.
    if result.spread is not None and (result.spread > 0 or ranks):
        shown += f" \N{PLUS-MINUS SIGN} {tables.shown_number(result.spread, decimals)}"

    test = result.difference
    if test is None:
        return Cell(shown, result.mean)
    is_significant = test.p is not None and test.p < SIGNIFICANT
    return Cell(shown, result.mean, shown_estimate(test, decimals), strong=is_significant)


def shown_estimate(estimate: Estimate, decimals: int | None) -> str:
    """Return an estimated difference as text with its interval and, in a line of its own, its p
    value. Interval and p value are left out if they are unknown.
    """
    shown = shown_difference(estimate.value, decimals)
    if estimate.p is None:
        return shown
    interval = tables.interval(estimate.low, estimate.high, decimals)
    return f"{shown} ({interval})\np {shown_p(estimate.p)}"


def shown_difference(value: float, decimals: int | None) -> str:
    """Return a difference as text with its sign."""
    shown = tables.shown_number(value, decimals)
    # A positive difference has a plus sign, unless it is shown as 0, such as 0.00.
    if value > 0 and shown.strip("0."):
        return f"+{shown}"
    return shown


def shown_p(p: float) -> str:
    """Return what follows `p` in a table, such as `= 0.03`."""
    if p < 0.0001:
        return "< 0.0001"
    if p < 0.1:
        return f"= {p:.4f}"
    return f"= {p:.2f}"


def picture(by_metric: ByMetric, variants: Sequence[str]) -> list[Picture]:
    """Return a picture with a panel for each metric that varies: a point for each seed, and a line
    at the mean.

    Panels of the same metric, such as at several lengths, have the same limits. Returns no picture
    if no metric varies.
    """
    ranking = [subject for subject in by_metric if subject.better != "neither"]
    # If no metric ranks variants, the others are shown.
    varying = [
        subject for subject in ranking or by_metric if len(set(_values(by_metric[subject]))) > 1
    ]
    shown = varying[: figures.MOST_PANELS]
    if not shown:
        return []

    labels = list(variants)
    looks = figures.variant_styles(labels)

    # In inches: room for the axis and its label, and a line of text for each variant.
    height = 0.9 + 0.28 * len(labels)
    figure, panels = figures.panels(
        len(shown),
        columns=2,
        width=5.4,
        height=height,
        sharey=True,
    )
    point_meaning = "One run of each variant"
    descriptions = []
    for axes, subject in zip(panels, shown):
        means = []
        for result in by_metric[subject]:
            y = labels.index(result.variant)
            values = list(result.values.values())
            look = looks[result.variant]
            axes.plot(values, [y] * len(values), **look | {"linestyle": "none", "alpha": 0.7})
            if len(values) > 1:
                point_meaning = "Each point is a seed, and each line a mean"
                axes.plot(
                    [result.mean] * 2,
                    [y - 0.35, y + 0.35],
                    color=look["color"],
                    linewidth=2,
                )
            means.append(f"{result.variant} {result.mean:.4g}")

        title = tables.subject_name(subject)
        descriptions.append(f"{title}: {', '.join(means)}")
        axes.set_yticks(range(len(labels)), [looks[label]["label"] for label in labels], fontsize=8)
        # The first variant is at the top.
        axes.set_ylim(len(labels) - 0.5, -0.5)
        axes.set_xlabel(figures.plain(title, longest=60), fontsize=9)
        values = [
            value
            for other in shown
            if other.metric == subject.metric
            for value in _values(by_metric[other])
        ]
        axes.set_xlim(*figures.limits(values, fraction=subject.is_fraction))
        # Readers would overlook an offset such as +3.2 at the end of an axis.
        axes.ticklabel_format(axis="x", useOffset=False)
        axes.locator_params(axis="x", nbins=6)
    return [Picture("comparison", f"{point_meaning}. {'; '.join(descriptions)}.", figure)]


def _values(results: Sequence[VariantResult]) -> list[float]:
    """Return the values of all variants and seeds."""
    return [value for result in results for value in result.values.values()]


def headline(comparison: Comparison) -> tuple[str, list[str]]:
    """Return a title, and paragraphs: what was found, what the tests show, and what was
    compared.
    """
    variants = comparison.variants
    if not variants:
        return "Comparison", ["No run is finished."]

    counts = [len(seeds) for seeds in _seeds(comparison).values()]
    shown_seeds = counted(max(counts), "seed")
    if min(counts) < max(counts):
        shown_seeds = f"{min(counts)} to {shown_seeds}"
    evaluated = [task_title(task) for task in by_task(comparison) if task != TRAINING]
    compared = (
        f"Compared: {counted(len(variants), 'variant')} of one recipe"
        f" ({enumerated(variants, most=6)}), trained with {shown_seeds} each, by"
        f" {enumerated(evaluated) or 'the validation loss'}."
    )

    findings = _findings(comparison)
    test_sentence, is_significant = _test_sentence(comparison)
    if is_significant is False:
        # The findings may be due to chance, so readers are told first what the tests show.
        paragraphs = [test_sentence, *findings, compared]
    else:
        paragraphs = [*findings, f"{test_sentence} {compared}"]
    return f"Comparison of {enumerated(variants, most=4)}", paragraphs


def _seeds(comparison: Comparison) -> dict[str, set[int]]:
    """Return the seeds of each variant."""
    seeds = {}
    for run in comparison.runs:
        seeds.setdefault(run.variant, set()).add(run.seed)
    return seeds


def _findings(comparison: Comparison) -> list[str]:
    """Return a sentence for each evaluated task about its first metric; without tasks, a sentence
    about the first metric of the training, such as the validation loss.

    The sentences are about the seeds that all variants have, if there are any: a seed that only
    some variants have would make these look better or worse than the others.
    """
    seeds = _seeds(comparison).values()
    # If no seed is shared, all seeds count.
    shared = set.intersection(*seeds) or set.union(*seeds)
    runs = [run for run in comparison.runs if run.seed in shared]
    tasks = by_task(replace(comparison, runs=runs))
    evaluated = [task for task in tasks if task != TRAINING] or list(tasks)

    sentences = []
    for task in evaluated:
        means = {
            subject: {result.variant: result.mean for result in results}
            for subject, results in tasks[task].items()
            if subject.better != "neither"
        }
        values = first_measured(means, prefix="mean" if len(shared) > 1 else "")
        if values is not None:
            title = f"{task_title(task)}: " if len(evaluated) > 1 else ""
            sentences.append(title + finding(values, comparison.baseline))
    # The tables have means over all seeds, so readers are told which seeds the sentences count.
    if len(runs) < len(comparison.runs):
        names = ", ".join(map(str, sorted(shared)))
        sentences.append(f"This counts only the seeds that all variants have: {names}.")
    return sentences


def _test_sentence(comparison: Comparison) -> tuple[str, bool | None]:
    """Return a sentence on the tests of the first metric that ranks variants, and whether a
    difference is significant (None if nothing is tested).
    """
    tasks = by_task(comparison)
    ranking = [
        subject
        for by_metric in tasks.values()
        for subject in by_metric
        if subject.better != "neither"
    ]
    if not ranking:
        return "None of the measured metrics ranks variants.", None

    first = ranking[0]
    # For each variant, the smallest p of the first metric at any length and in any group.
    p_values = {}
    for subject, results in tasks[first.task].items():
        for result in results:
            test = result.difference
            if subject.metric == first.metric and test is not None and test.p is not None:
                smallest = min(test.p, p_values.get(result.variant, 1.0))
                p_values[result.variant] = smallest

    name = first.metric
    # One of `tasks` is the training. With two of them, only one task was evaluated, and the
    # sentence need not name it.
    if len(tasks) > 2:
        name += f" ({task_title(first.task)})"
    if not p_values:
        return (
            f"No difference in {name} is tested, so any may come from the seed. A test needs at"
            " least two seeds of both variants, and differences that vary. Add seeds with --seeds.",
            None,
        )
    method = f"paired t tests over the seeds, p < {SIGNIFICANT}"
    baseline = comparison.baseline
    significant = [variant for variant, p in p_values.items() if p < SIGNIFICANT]
    if not significant:
        return f"No difference in {name} from {baseline} is significant ({method}).", False
    return (
        f"In {name}, these differ significantly from {baseline} (bold in the table; {method}):"
        f" {enumerated(significant, most=8)}.",
        True,
    )


def notes(comparison: Comparison, missing: Sequence[str] = ()) -> list[str]:
    """Return sentences on how to read the tables and what is incomplete; `missing` names runs that
    are not finished.
    """
    variants = comparison.variants
    machines = list(dict.fromkeys(run.hardware for run in comparison.runs))
    sentences = [f"{counted(len(variants), 'variant')} on {enumerated(machines)}."]
    most = max(map(len, _seeds(comparison).values()), default=0)
    if most > 1:
        # Half the width of the 95 % interval of a mean difference, in standard deviations of the
        # differences.
        half_width = t_quantile(most - 1) / math.sqrt(most)
        sentences += [
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
                f" more than {half_width:.2g} times the standard deviation of the differences: a"
                " large p does not show that there is no difference."
            ),
        ]
    # The training has a column of seconds per step.
    if TRAINING in by_task(comparison):
        sentences.append(TIMES)
    if missing:
        sentences.append(f"Not finished: {enumerated(missing)}.")
    return sentences


def warnings(comparison: Comparison) -> list[str]:
    """Return a warning if hardware, versions or data differ between runs, else an empty list."""
    # The different values of each fact, such as the hardware, the version of torch or the
    # fingerprint of a file.
    values_of_facts = {}
    for run in comparison.runs:
        facts = {"the hardware": run.hardware, **run.versions, **run.data}
        for name, value in facts.items():
            values_of_facts.setdefault(name, set()).add(value)
    changed = [name for name, values in values_of_facts.items() if len(values) > 1]
    if changed:
        return [
            f"These differ between the runs, which may not be comparable: {', '.join(changed)}."
        ]
    return []


def markdown(
    comparison: Comparison,
    missing: Sequence[str] = (),
    escape: Callable[[str], str] = escape_markdown,
) -> str:
    """Return the headline, the tables and the notes as Markdown, with columns that are aligned in a
    terminal.

    `escape` escapes text from files, by default for Markdown. `missing` names runs that are not
    finished.
    """
    title, sentences = headline(comparison)
    lines = [f"# {escape(title)}", "", escape(" ".join(sentences)), ""]
    for task, by_metric in by_task(comparison).items():
        lines += [f"## {escape(task_title(task))}", ""]
        for table in task_tables(by_metric, comparison.baseline):
            lines += [escape(table.caption), "", *tables.markdown(table, escape), ""]
    remarks = warnings(comparison) + notes(comparison, missing)
    return "\n".join([*lines, *(f"- {escape(sentence)}" for sentence in remarks), ""])
