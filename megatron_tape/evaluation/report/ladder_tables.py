"""Tables and notes that show a ladder: encodings compared over model sizes and tokens."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from megatron_tape.evaluation.comparison_file import (
    TRAINING,
    Comparison,
    VariantResult,
    results_by_metric,
)
from megatron_tape.evaluation.ladder_file import Ladder, LadderPoint
from megatron_tape.evaluation.report import comparison_tables, tables
from megatron_tape.evaluation.report.comparison_tables import (
    SIGNIFICANT,
    TIMES,
    result_cell,
    shown_difference,
    shown_p,
    task_title,
)
from megatron_tape.evaluation.report.ladder_findings import STABLE, headline
from megatron_tape.evaluation.report.ladder_pictures import PICTURE_AXES, picture
from megatron_tape.evaluation.report.ladder_results import (
    AXES,
    Series,
    loss_series,
    task_series,
    tuned_losses,
)
from megatron_tape.evaluation.report.tables import Cell, Table, enumerated, number, text
from megatron_tape.evaluation.statistics import Estimate
from megatron_tape.evaluation.task import Picture
from megatron_tape.huggingface.export.markdown import escape_markdown
from megatron_tape.text import counted

_COSTS = ("parameters", "arithmetic", "seconds per step")
"""The metrics of the training that are costs, in the order of their columns."""


@dataclass(frozen=True)
class Part:
    """A part of the page: its title, tables, drawings (what they show, and a function that draws
    them), warnings and notes.
    """

    title: str
    tables: list[Table] = field(default_factory=list)
    drawings: Sequence[tuple[str, Callable[[], list[Picture]]]] = ()
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def parts(ladder: Ladder, missing: Sequence[str] = ()) -> list[Part]:
    """Return the parts of the page about a ladder. `missing` names runs that are not finished."""
    found = []
    losses = loss_series(ladder)
    if losses:
        slopes = slopes_table(losses)
        drawings = [
            (f"losses by {axis.name}", partial(picture, losses, axis)) for axis in PICTURE_AXES
        ]
        # Without any slopes, no differences are known.
        if slopes.rows:
            drawings += [
                (f"differences by {axis.name}", partial(picture, losses, axis, differences=True))
                for axis in PICTURE_AXES
            ]
        found.append(Part("Loss by size and tokens", [results_table(losses)], drawings))
        if slopes.rows:
            found.append(Part("Changes of the difference with size and tokens", [slopes]))
    for task, series in task_series(ladder).items():
        found.append(Part(task_title(task), [results_table(series)]))
    rates = rates_table(ladder)
    if rates.rows:
        found.append(Part("Learning rates", [rates], warnings=rate_warnings(ladder)))
    if any(point.comparison.runs for point in ladder.points):
        found.append(Part("Points and cost", [points_table(ladder), cost_table(ladder)]))
    found.append(Part("How to read the comparison", notes=notes(ladder, missing)))
    # Warnings about the runs concern all parts, and come before the first table.
    found[0].warnings.extend(comparison_tables.warnings(_all_runs(ladder)))
    return found


def _all_runs(ladder: Ladder) -> Comparison:
    """Return a comparison with the runs of all points, without settings."""
    runs = [run for point in ladder.points for run in point.comparison.runs]
    return Comparison({}, {}, "", runs)


def results_table(all_series: Sequence[Series]) -> Table:
    """Return a table with a row for each point and variant, and a column for each condition. All
    series have the same metric.
    """
    ladder = all_series[0].ladder
    metric = tables.metric_name(all_series[0].subject)
    results = [series.results() for series in all_series]
    values = [
        value
        for by_point in results
        for by_variant in by_point.values()
        for result in by_variant.values()
        for value in result.values.values()
    ]
    # Means over seeds have one more decimal than values. `and` keeps 0 and None.
    decimals = tables.decimals_for(values)
    decimals = decimals and decimals + 1

    # For each row, its point, its variant, and its result in each column.
    rows = []
    for point in ladder.points:
        for variant in ladder.variants:
            cells = [by_point.get(point.name, {}).get(variant) for by_point in results]
            if any(cells):
                rows.append((point, variant, cells))
    seeds = [_seed_count(cells) for _, _, cells in rows]
    shown = []
    for (_, variant, cells), count in zip(rows, seeds):
        label = text(variant)
        # If all rows have the same number of seeds, only the notes say it.
        if len(set(seeds)) > 1:
            label = replace(label, detail=counted(count, "seed"))
        shown.append([label, *(result_cell(result, decimals) for result in cells)])

    caption = f"{metric}. Below each value: the difference from {ladder.baseline}."
    if max(seeds) > 1:
        caption = (
            f"{metric}, mean \N{PLUS-MINUS SIGN} standard deviation over the seeds. Below it: the"
            f" difference from {ladder.baseline}, its 95 % interval and p, both corrected for the"
            f" number of variants (bold: p < {SIGNIFICANT})."
        )
    caption = caption[:1].upper() + caption[1:]
    columns = [series.condition or metric for series in all_series]
    groups = [point.name for point, _, _ in rows]
    return tables.table(caption, ["variant", *columns], shown, groups, "point")


def _seed_count(cells: Sequence[VariantResult | None]) -> int:
    """Return the largest number of seeds that a result has."""
    return max(len(result.values) for result in cells if result is not None)


def slopes_table(all_series: Sequence[Series]) -> Table:
    """Return a table of the trends: for each loss and variant the mean difference from the
    baseline, its changes with each doubling, and the difference at the largest size and training.
    """
    baseline = all_series[0].ladder.baseline
    columns = ["variant", "paired runs", "mean difference"]
    columns += [f"per doubling of the {axis.doubled}" for axis in AXES]
    columns += [f"at the most {axis.doubled}" for axis in AXES]

    rows = []
    groups = []
    for series in all_series:
        for variant, trend in series.trends().items():
            estimates = [trend.mean]
            estimates += [trend.slopes.get(axis.name) for axis in AXES]
            estimates += [trend.at_largest.get(axis.name) for axis in AXES]
            cells = [_estimate_cell(estimate) for estimate in estimates]
            rows.append([text(variant), number(trend.mean.count, decimals=0), *cells])
            groups.append(tables.metric_name(replace(series.subject, metric=series.name)))
    caption = (
        f"Difference from {baseline}: mean, change with each doubling, and value of the fitted line"
        " at its end. Below each: its 95 % interval and p, both corrected for the number of"
        f" variants (bold: p < {SIGNIFICANT})."
    )
    return tables.table(caption, columns, rows, groups, "loss")


def _estimate_cell(estimate: Estimate | None) -> Cell:
    """Return a cell with an estimated difference, its interval and its p value; a dash for None."""
    if estimate is None:
        return number(None)
    known = [value for value in (estimate.value, estimate.low, estimate.high) if value is not None]
    decimals = tables.decimals_for(known)
    shown = shown_difference(estimate.value, decimals)
    if estimate.p is None:
        return Cell(shown, estimate.value)
    interval = tables.interval(estimate.low, estimate.high, decimals)
    detail = f"{interval}\np {shown_p(estimate.p)}"
    return Cell(shown, estimate.value, detail, strong=estimate.p < SIGNIFICANT)


def rates_table(ladder: Ladder) -> Table:
    """Return a table of the learning rates: for each point and variant the rate that was used, and
    the mean validation loss of each rate that was tried.
    """
    losses = {
        (point.name, variant): tuned_losses(tuned)
        for point in ladder.points
        for variant, tuned in point.tuning.items()
    }
    rates = sorted({rate for by_rate in losses.values() for rate in by_rate})
    decimals = tables.decimals_for(
        [loss for by_rate in losses.values() for loss in by_rate.values() if math.isfinite(loss)]
    )
    # Means over seeds have one more decimal than values. `and` keeps 0 and None.
    decimals = decimals and decimals + 1

    rows = []
    groups = []
    for point in ladder.points:
        for variant in ladder.variants:
            chosen = point.learning_rates.get(variant)
            by_rate = losses.get((point.name, variant), {})
            is_taken = chosen is None or chosen.taken_from is not None
            # The table of points says where a point without tuning takes its rates from.
            if is_taken and not by_rate:
                continue
            used = number(None)
            if chosen is not None:
                origin = "tuned here" if by_rate else ""
                if chosen.taken_from is not None:
                    origin = f"from {chosen.taken_from}"
                used = Cell(_shown_rate(chosen.rate), chosen.rate, origin)
            row = [text(variant), used]
            for rate in rates:
                is_chosen = chosen is not None and chosen.rate == rate
                detail = "chosen" if is_chosen and chosen.taken_from is None else ""
                loss = by_rate.get(rate)
                if loss == math.inf:
                    # Sorted after all losses. JavaScript cannot read `inf`.
                    row.append(Cell("diverged", sys.float_info.max, detail))
                else:
                    row.append(number(loss, decimals, detail))
            rows.append(row)
            groups.append(point.name)

    caption = (
        "The learning rate of each variant, and the mean validation loss of each rate that was"
        " tried, with seeds that are not compared."
    )
    columns = ["variant", "rate", *map(_shown_rate, rates)]
    return tables.table(caption, columns, rows, groups, "point")


def _shown_rate(rate: float) -> str:
    """Return a learning rate as text, such as 0.002."""
    return f"{rate:g}".replace("-", "\N{MINUS SIGN}")


def rate_warnings(ladder: Ladder) -> list[str]:
    """Return a warning if a chosen rate is the lowest or the highest that was tried, else an empty
    list.
    """
    at_ends = []
    for point in ladder.points:
        for variant, tuned in point.tuning.items():
            chosen = point.learning_rates.get(variant)
            rates = list(tuned_losses(tuned))
            if chosen is not None and rates and chosen.rate in (rates[0], rates[-1]):
                at_ends.append(f"{variant} at {point.name}")
    if at_ends:
        return [
            "The chosen learning rate is the lowest or the highest that was tried, so a better one"
            f" may exist outside: {'; '.join(at_ends)}."
        ]
    return []


def points_table(ladder: Ladder) -> Table:
    """Return a table of the points: parameters, tokens and finished runs."""
    rows = [
        [
            text(point.size),
            text(point.training),
            number(point.parameters, decimals=0),
            number(point.tokens, decimals=0),
            text(_origin_of_rates(point)),
            number(len(point.comparison.runs), decimals=0),
        ]
        for point in ladder.points
    ]
    caption = (
        f"The points. Parameters are those of {ladder.baseline} without the embedding and the"
        " output layer; tokens are those of the training. A point without tuning takes the learning"
        " rates of the largest tuned size that is not larger and, there, of the largest tuned"
        " amount of text that is not larger."
    )
    columns = ["size", "training", "parameters", "tokens", "learning rates", "finished runs"]
    return tables.table(caption, columns, rows)


def _origin_of_rates(point: LadderPoint) -> str:
    """Return where a point's learning rates come from, such as `from small, copying`."""
    for rate in point.learning_rates.values():
        if rate.taken_from is not None:
            return f"from {rate.taken_from}"
    if point.tuning:
        return "tuned here"
    return ""


def cost_table(ladder: Ladder) -> Table:
    """Return a table of the cost of each variant at each point: parameters, floating-point
    operations and time, as means over the seeds.
    """
    # The heading of each cost, by metric.
    headings = {}
    rows = []
    groups = []
    for point in ladder.points:
        costs = _costs(point.comparison, headings)
        for variant in ladder.variants:
            if variant not in point.comparison.variants:
                continue
            row = [text(variant)]
            for metric in (*_COSTS, "seconds"):
                by_variant = costs.get(metric, {})
                row.append(_cost_cell(by_variant, variant, ladder.baseline))
            rows.append(row)
            groups.append(point.name)
    caption = (
        f"Cost of a run, mean over the seeds. Below it: the multiple of {ladder.baseline}."
        f" {TIMES} Seconds of a run include the evaluation."
    )
    columns = [headings.get(metric, metric) for metric in _COSTS]
    return tables.table(caption, ["variant", *columns, "seconds of a run"], rows, groups, "point")


def _costs(comparison: Comparison, headings: dict[str, str]) -> dict[str, dict[str, float]]:
    """Return the mean costs of a run by metric and variant. Sets the heading of each metric in
    `headings`.
    """
    costs = {}
    for subject, results in results_by_metric(comparison).items():
        if subject.task == TRAINING and subject.metric in _COSTS:
            headings[subject.metric] = tables.metric_name(subject)
            costs[subject.metric] = {result.variant: result.mean for result in results}
    seconds = {}
    for run in comparison.runs:
        seconds.setdefault(run.variant, []).append(run.seconds)
    costs["seconds"] = {variant: sum(times) / len(times) for variant, times in seconds.items()}
    return costs


def _cost_cell(by_variant: Mapping[str, float], variant: str, baseline: str) -> Cell:
    """Return a cell with a variant's cost, and below it the multiple of that of the baseline."""
    cost = by_variant.get(variant)
    reference = by_variant.get(baseline)
    if cost is None or not reference or variant == baseline:
        return number(cost)
    multiple = f"{cost / reference:.3f}"
    if multiple == "1.000":
        return number(cost)
    return number(cost, detail=f"\N{MULTIPLICATION SIGN} {multiple}")


def notes(ladder: Ladder, missing: Sequence[str] = ()) -> list[str]:
    """Return sentences on how to read the tables and what is incomplete; `missing` names runs that
    are not finished.
    """
    runs = _all_runs(ladder).runs
    if not runs:
        return [f"Not finished: {enumerated(missing)}."] if missing else []

    machines = list(dict.fromkeys(run.hardware for run in runs))
    seeds = sorted({run.seed for run in runs})
    sentences = [
        f"{counted(len(runs), 'run')} with {counted(len(seeds), 'seed')}"
        f" ({enumerated(list(map(str, seeds)), most=10)}) on {enumerated(machines)}.",
        (
            "A seed sets the order of the data and the initial weights that variants share, so"
            " differences are taken between runs of the same seed at the same point. A negative"
            " difference in a loss is an advantage."
        ),
        (
            "The intervals of differences pool the variance: that of a variant's differences is"
            " assumed to be the same at all points, and estimated from all of them. With few seeds"
            " for each point, this is what makes an interval useful; where some points vary more"
            " than others, their intervals are too narrow."
        ),
        (
            "Slopes are fitted to the differences of all runs by ordinary least squares, jointly"
            " with the base-2 logarithms of parameters and of tokens per parameter. They assume"
            " straight lines, and runs with independent errors: what the runs of one point have in"
            " common, such as a learning rate that suits a variant less, is not in the intervals."
        ),
        (
            "A difference is said to stay about the same if its slope is not significant, and the"
            f" interval of the slope allows no change of {100 * STABLE:.0f} % of the difference"
            " over the measured range. If it allows more, nothing is decided: a large p does not"
            " show that nothing changes. At the upper end, a difference is that of the fitted line."
        ),
        (
            "Intervals and p values are corrected by Bonferroni's method for the number of"
            f" variants: p is below {SIGNIFICANT}, and a difference bold, exactly if the interval"
            " excludes 0. They are not corrected for the numbers of points, lengths and tasks."
        ),
        (
            "Variants are compared after the same number of tokens, and cost different amounts of"
            " time and arithmetic."
        ),
    ]
    without_runs = [point.name for point in ladder.points if not point.comparison.runs]
    if without_runs:
        # Names of points contain commas.
        sentences.append(f"Points without runs: {'; '.join(without_runs)}.")
    if missing:
        sentences.append(f"Not finished: {enumerated(missing)}.")
    return sentences


def markdown(
    ladder: Ladder,
    missing: Sequence[str] = (),
    escape: Callable[[str], str] = escape_markdown,
) -> str:
    """Return the headline, the tables and the notes as Markdown, with columns that are aligned in a
    terminal.

    `escape` escapes text from files, by default for Markdown. `missing` names runs that are not
    finished.
    """
    title, paragraphs = headline(ladder)
    lines = [f"# {escape(title)}", ""]
    for paragraph in paragraphs:
        lines += [escape(paragraph), ""]
    for part in parts(ladder, missing):
        lines += [f"## {escape(part.title)}", ""]
        for table in part.tables:
            lines += [escape(table.caption), "", *tables.markdown(table, escape), ""]
        remarks = part.warnings + part.notes
        if remarks:
            lines += [*(f"- {escape(sentence)}" for sentence in remarks), ""]
    return "\n".join(lines)
