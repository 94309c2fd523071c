"""Sentences that say what a ladder shows: whether variants differ from the baseline, and whether
their difference grows or shrinks with model size and tokens. Imports no torch.
"""

import math
from collections import Counter
from collections.abc import Sequence

from megatron_tape.evaluation.ladder_file import Ladder, LadderPoint
from megatron_tape.evaluation.report.comparison_tables import (
    SIGNIFICANT,
    shown_difference,
    shown_p,
    task_title,
)
from megatron_tape.evaluation.report.ladder_results import (
    AXES,
    Axis,
    Series,
    Trend,
    loss_series,
    task_series,
    tuned_losses,
)
from megatron_tape.evaluation.report.tables import decimals_for, enumerated, shown_number
from megatron_tape.evaluation.statistics import Estimate
from megatron_tape.text import counted

STABLE = 0.5
"""A difference counts as stable if all changes within the interval, over the measured range, are
smaller than this fraction of it."""


def headline(ladder: Ladder) -> tuple[str, list[str]]:
    """Return a title, and paragraphs: which learning rates were not tuned, what was found for each
    variant and task, and what was compared.
    """
    points = [point for point in ladder.points if point.comparison.runs]
    if not points:
        return "Comparison over model sizes", ["No run is finished."]

    # What follows may be due to the learning rates, so readers are told about these first.
    paragraphs = [_rates_paragraph(ladder)]
    longest = _longest_series(loss_series(ladder))
    if longest is not None:
        trends = longest.trends()
        paragraphs += [_trend_paragraph(longest, name, trend) for name, trend in trends.items()]
        if not trends:
            paragraphs.append(
                f"No variant has runs with the seeds of {ladder.baseline} yet, so no difference is"
                " known."
            )
        paragraphs += _undetermined_axes(ladder, longest, list(trends.values()))
    paragraphs += [_task_paragraph(task, series) for task, series in task_series(ladder).items()]

    sizes = list(dict.fromkeys(point.size for point in points))
    trainings = list(dict.fromkeys(point.training for point in points))
    variants = [
        variant
        for variant in ladder.variants
        if any(variant in point.comparison.variants for point in points)
    ]
    compared = (
        f"Compared: {counted(len(variants), 'variant')} ({enumerated(variants, most=6)}) at"
        f" {counted(len(points), 'point')}: {counted(len(sizes), 'size')} ({enumerated(sizes)}),"
        f" trained on {enumerated(trainings)}."
    )
    title = f"Comparison of {enumerated(variants, most=4)} over {counted(len(sizes), 'model size')}"
    # There may be nothing to say about rates, and a task may have no common seeds.
    return title, [*filter(None, paragraphs), compared]


def _rates_paragraph(ladder: Ladder) -> str:
    """Return sentences on the points with runs whose learning rates were taken from a smaller size
    or from less text, and on what checks of these rates show; empty if all were tuned.
    """
    by_name = {point.name: point for point in ladder.points}
    # By size, the points whose rates are those of a smaller size.
    taken = {}
    has_rates_of_less_text = False
    for point in ladder.points:
        names = {rate.taken_from for rate in point.learning_rates.values()}
        sources = [by_name[name] for name in names if name in by_name]
        if not point.comparison.runs:
            continue
        if any(source.size != point.size for source in sources):
            taken.setdefault(point.size, []).append(point)
        if any(source.training != point.training for source in sources):
            has_rates_of_less_text = True

    sentences = []
    unchecked = []
    for size, points in taken.items():
        checks = [*filter(None, map(_check_sentence, points))]
        sentences += checks
        if not checks:
            unchecked.append(size)
    if taken:
        sizes = enumerated(list(taken))
        sentences.insert(0, f"Learning rates at {sizes} were taken from a smaller size.")
    if unchecked:
        where = "there"
        if len(unchecked) < len(taken):
            where = f"at {enumerated(unchecked)}"
        sentences.append(
            f"They were not checked {where}, so these differences, and changes with size, may come"
            " from rates that suit some variants less."
        )
    if has_rates_of_less_text:
        sentences.append("Rates for more text were taken from less text, and not checked.")
    return " ".join(sentences)


def _check_sentence(point: LadderPoint) -> str:
    """Return a sentence on whether half or twice the learning rate, which was taken from another
    point, has a lower validation loss; empty if they were not tried.
    """
    findings = []
    best = []
    for variant, tuned in point.tuning.items():
        chosen = point.learning_rates.get(variant)
        losses = tuned_losses(tuned)
        if chosen is None or chosen.taken_from is None or chosen.rate not in losses:
            continue
        lowest = min(losses, key=losses.__getitem__)
        if len(losses) < 3 or losses[lowest] == math.inf:
            continue
        if losses[chosen.rate] == losses[lowest]:
            best.append(variant)
            continue
        multiple = "half" if lowest < chosen.rate else "twice"
        gain = losses[chosen.rate] - losses[lowest]
        reason = "the rate itself diverged"
        if gain < math.inf:
            reason = f"by {shown_number(gain, decimals_for([gain]))} nats per token"
        findings.append(f"{multiple} the rate was better for {variant} ({reason})")
    if best:
        findings.append(f"the rate was the best of three for {enumerated(best)}")
    if not findings:
        return ""
    return f"Checked at {point.name}: {'; '.join(findings)}."


def _longest_series(found: Sequence[Series]) -> Series | None:
    """Return the losses at the longest length of the first source; None without losses."""
    first_source = [series for series in found if series.subject == found[0].subject]
    return first_source[-1] if first_source else None


def _trend_paragraph(series: Series, variant: str, trend: Trend) -> str:
    """Return sentences on the mean difference of a variant's loss from that of the baseline, and on
    its change with size and tokens.
    """
    mean = trend.mean
    baseline = series.ladder.baseline
    amount = shown_number(abs(mean.value), decimals_for([mean.value]))
    direction = "lower" if mean.value < 0 else "higher"
    comparison = (
        f"the {series.name} is {amount} {series.subject.unit} {direction} than that of {baseline}"
        " on average"
    )
    if mean.p is None:
        lead = f"{comparison}, without an interval, since the runs are too few or do not vary"
    elif mean.p < SIGNIFICANT:
        lead = f"{comparison} ({_interval(mean)})"
    else:
        lead = (
            f"whether the {series.name} differs from that of {baseline} cannot be decided: on"
            f" average by {_undecided(mean)}"
        )
    sentences = [
        _axis_sentence(baseline, trend, axis, trend.slopes[axis.name])
        for axis in AXES
        if axis.name in trend.slopes
    ]
    return " ".join([f"{variant}: {lead}.", *sentences])


def _axis_sentence(baseline: str, trend: Trend, axis: Axis, slope: Estimate) -> str:
    """Return a sentence on how a difference from the baseline changes along an axis."""
    mean = trend.mean
    is_certain = mean.p is not None and mean.p < SIGNIFICANT
    noun = "difference"
    if is_certain:
        noun = "advantage" if mean.value < 0 else "disadvantage"
    undecided = f"Whether this {noun} changes with {axis.name} cannot be decided"
    if slope.p is None:
        return f"{undecided}, since the runs are too few or do not vary."

    if slope.p >= SIGNIFICANT:
        # The largest change over the measured range that the interval allows.
        steepest = max(abs(slope.low or 0), abs(slope.high or 0))
        if is_certain and steepest * trend.doublings[axis.name] < STABLE * abs(mean.value):
            return (
                f"This {noun} stays about the same with {axis.name}: the difference changes by"
                f" {_undecided(slope)} for each doubling."
            )
        return f"{undecided}: the difference changes by {_undecided(slope)} for each doubling."

    change = f"the difference changes by {_shown(slope)} for each doubling"
    if not is_certain:
        verb = "falls" if slope.value < 0 else "rises"
        return f"Compared with {baseline}, the loss {verb} with {axis.name}: {change}."
    if slope.value * mean.value > 0:
        return f"This {noun} grows with {axis.name}: {change}."

    # The value of the fitted line at its end.
    end = trend.at_largest[axis.name]
    if end.p is None or end.p >= SIGNIFICANT:
        at_end = f"At the upper end, no difference is certain any more: it is {_undecided(end)}"
        return f"This {noun} shrinks with {axis.name}: {change}. {at_end}."
    verb = "shrinks" if end.value * mean.value > 0 else "turns into its opposite"
    return f"This {noun} {verb} with {axis.name}: {change}, to {_shown(end)} at the upper end."


def _undetermined_axes(ladder: Ladder, series: Series, trends: Sequence[Trend]) -> list[str]:
    """Return sentences on why nothing is said about size or tokens."""
    sentences = []
    for axis in AXES:
        values = {axis.value(point) for point in series.points}
        if len(values) == 1:
            sentences.append(
                f"All points with losses have the same {axis.name}, so changes with it are not"
                " known."
            )
        elif any(axis.name not in trend.slopes for trend in trends):
            sentences.append(
                f"For some variants, the points are too few to tell changes with {axis.name} from"
                " others."
            )
    return sentences


def _task_paragraph(task: str, all_series: Sequence[Series]) -> str:
    """Return a sentence on how often each variant is better and worse than the baseline in a task;
    empty if no variant has seeds in common with the baseline.
    """
    # For each variant, the verdict at each point and under each condition.
    verdicts = {}
    for series in all_series:
        for by_variant in series.results().values():
            for variant, result in by_variant.items():
                if result.difference is not None:
                    verdict = _verdict(result.difference, series.subject.better)
                    verdicts.setdefault(variant, Counter())[verdict] += 1
    if not verdicts:
        return ""
    parts = [
        f"{variant} is better in {counts['better']}, worse in {counts['worse']} and undecided in"
        f" {counts['undecided']}"
        for variant, counts in verdicts.items()
    ]
    first = all_series[0]
    return (
        f"{task_title(task)}, {first.subject.metric} compared with {first.ladder.baseline}, in"
        f" numbers of points and conditions: {'; '.join(parts)}."
    )


def _verdict(difference: Estimate, better: str) -> str:
    """Return whether a difference from the baseline is certainly `better` or `worse`, else
    `undecided`.
    """
    if difference.p is None or difference.p >= SIGNIFICANT:
        return "undecided"
    is_higher = difference.value > 0
    return "better" if is_higher == (better == "higher") else "worse"


def _shown(estimate: Estimate) -> str:
    """Return a difference with its sign and its interval as text."""
    return f"{_difference(estimate)} ({_interval(estimate)})"


def _undecided(estimate: Estimate) -> str:
    """Return a difference that is not significant as text with its interval and p value."""
    if estimate.p is None:
        return f"{_difference(estimate)} (no interval)"
    return f"{_difference(estimate)} ({_interval(estimate)}, p {shown_p(estimate.p)})"


def _difference(estimate: Estimate) -> str:
    """Return the value of an estimate as text with its sign."""
    return shown_difference(estimate.value, _decimals(estimate))


def _interval(estimate: Estimate) -> str:
    """Return the interval of an estimate as text."""
    low, high = [
        shown_difference(end, _decimals(estimate))
        for end in (estimate.low, estimate.high)
        if end is not None
    ]
    return f"95 % interval {low} to {high}"


def _decimals(estimate: Estimate) -> int | None:
    """Return the number of decimals for an estimate and its interval."""
    known = [estimate.value, estimate.low, estimate.high]
    return decimals_for([value for value in known if value is not None])
