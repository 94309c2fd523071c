"""The results of a ladder by point: losses, scores of tasks, their differences from the baseline,
and the trends of these differences with model size and tokens. Imports no torch.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatron_tape.evaluation.comparison_file import (
    LOSS,
    TRAINING,
    Comparison,
    VariantResult,
    paired_differences,
    results_by_metric,
)
from megatron_tape.evaluation.ladder_file import Ladder, LadderPoint, tuned_loss
from megatron_tape.evaluation.report.comparison_tables import by_task
from megatron_tape.evaluation.report.tables import location
from megatron_tape.evaluation.results import Score
from megatron_tape.evaluation.statistics import Estimate, linear_fit, paired_t, pooled_t
from megatron_tape.evaluation.tasks.perplexity import Perplexity

MULTIPLES = (1, 2, 4)
"""Multiples of the trained length at which losses are compared."""
PLACES = {
    1: "at the trained length",
    2: "at 2 times the trained length",
    4: "at 4 times the trained length",
}
"""What readers call these lengths."""
Values = dict[str, dict[str, dict[int, float]]]
"""Values of one metric by name of the point, by variant and by seed."""


@dataclass(frozen=True)
class Axis:
    """A quantity in which the points of a ladder differ."""

    name: str
    """Name in sentences."""
    doubled: str
    """What doubles in one step of the base-2 logarithm, for tables."""
    value: Callable[[LadderPoint], float | None]
    """Returns the value of a point, None for a task without one."""


AXES = (
    Axis("size", "parameters", lambda point: point.parameters),
    Axis("tokens per parameter", "tokens per parameter", lambda point: point.tokens_per_parameter),
)


@dataclass(frozen=True)
class Trend:
    """The difference of a variant from the baseline over the points, as a linear function of the
    base-2 logarithms of parameters and of tokens per parameter.
    """

    mean: Estimate
    """The mean difference over the runs."""
    slopes: dict[str, Estimate] = field(default_factory=dict)
    """By name of the axis, the change of the difference with each doubling. Without axes that do
    not vary, and empty if the points do not determine it.
    """
    at_largest: dict[str, Estimate] = field(default_factory=dict)
    """By name of the axis, the difference at its largest value and the mean of the other one."""
    doublings: dict[str, float] = field(default_factory=dict)
    """By name of the axis, how often its smallest value doubles up to its largest."""


@dataclass(frozen=True)
class Series:
    """The values of one metric at the points of a ladder, under one condition such as a length."""

    condition: str
    """Such as `at 4 times the trained length`; empty if the metric has only one condition."""
    subject: Score
    """A score without its value, which says what was measured."""
    ladder: Ladder
    values: Values = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Metric and condition as text."""
        return f"{self.subject.metric} {self.condition}".rstrip()

    @property
    def points(self) -> list[LadderPoint]:
        """The points with a value, in the order of the ladder."""
        return [point for point in self.ladder.points if point.name in self.values]

    @property
    def variants(self) -> list[str]:
        """The variants with a value, in the order of the ladder."""
        known = {variant for by_variant in self.values.values() for variant in by_variant}
        return [variant for variant in self.ladder.variants if variant in known]

    @property
    def compared(self) -> list[str]:
        """The variants with a value, without the baseline."""
        return [variant for variant in self.variants if variant != self.ladder.baseline]

    def differences(self, variant: str) -> dict[str, list[float]]:
        """Return the differences of a variant from the baseline with the same seeds, by name of the
        point. Points without common seeds are left out.
        """
        by_point = {}
        for point in self.points:
            values = self.values[point.name]
            differences = paired_differences(
                values.get(variant, {}), values.get(self.ladder.baseline, {})
            )
            if differences:
                by_point[point.name] = differences
        return by_point

    def results(self) -> dict[str, dict[str, VariantResult]]:
        """Return the results by name of the point and by variant.

        The variance of a variant's differences is pooled over its points. Intervals and p values
        are corrected for the number of compared variants.
        """
        compared = self.compared
        estimates = {point.name: {} for point in self.points}  # then by variant
        for variant in compared:
            differences = self.differences(variant)
            pooled = pooled_t(list(differences.values()), len(compared))
            for point, estimate in zip(differences, pooled):
                estimates[point][variant] = estimate

        return {
            point: {
                variant: VariantResult(variant, self.values[point][variant], tests.get(variant))
                for variant in self.variants
                if variant in self.values[point]
            }
            for point, tests in estimates.items()
        }

    def trends(self) -> dict[str, Trend]:
        """Return the trend of each variant that has common seeds with the baseline. Intervals and p
        values are corrected for the number of compared variants.
        """
        trends = {}
        for variant in self.compared:
            differences = self.differences(variant)
            if differences:
                trends[variant] = self._trend(differences)
        return trends

    def _trend(self, differences: Mapping[str, Sequence[float]]) -> Trend:
        """Return the trend of the differences of one variant, given by name of the point."""
        points = {point.name: point for point in self.points}
        comparisons = len(self.compared)
        # The values of all runs, and the point of each.
        values = [value for of_point in differences.values() for value in of_point]
        at = [points[name] for name, of_point in differences.items() for _ in of_point]

        # By name of the axis, the base-2 logarithm for each run.
        logarithms = {}
        for axis in AXES:
            known = [axis.value(point) for point in at]
            if all(value is not None and value > 0 for value in known) and len(set(known)) > 1:
                logarithms[axis.name] = [math.log2(value) for value in known]
        # The constant of a fit is the value where all predictors are 0: here, at their means.
        centers = {name: sum(of_axis) / len(of_axis) for name, of_axis in logarithms.items()}
        fit = linear_fit(values, _predictors(logarithms, centers), comparisons)
        if fit is None:
            return Trend(paired_t(values, comparisons))

        mean, *slopes = fit
        at_largest = {}
        for name, exponents in logarithms.items():
            # The fit is the same; only its constant is that at the largest value.
            at_end = centers | {name: max(exponents)}
            moved = linear_fit(values, _predictors(logarithms, at_end), comparisons)
            if moved is not None:
                at_largest[name] = moved[0]
        doublings = {name: max(of_axis) - min(of_axis) for name, of_axis in logarithms.items()}
        return Trend(mean, dict(zip(logarithms, slopes)), at_largest, doublings)


def _predictors(
    logarithms: Mapping[str, Sequence[float]], centers: Mapping[str, float]
) -> list[list[float]]:
    """Return the values of each axis minus its center."""
    return [[value - centers[name] for value in of_axis] for name, of_axis in logarithms.items()]


def language_points(ladder: Ladder) -> list[LadderPoint]:
    """Return the points that were trained on text."""
    return [point for point in ladder.points if point.tokens_per_parameter is not None]


def loss_series(ladder: Ladder) -> list[Series]:
    """Return the losses of the task perplexity at 1, 2 and 4 times the trained length, by source of
    the text and by length.

    Without any of them, returns the validation loss if it was measured.
    """
    found = {}  # a subject and its values, by source and multiple
    for point in language_points(ladder):
        for subject, values in _subjects(ladder, point):
            multiple = _multiple(point, subject)
            if multiple is not None:
                key = (subject.group, multiple)
                _, by_point = found.setdefault(key, (replace(subject, length=None), {}))
                by_point[point.name] = values
    if not found:
        return _validation_series(ladder)

    # The sources in the order of their first scores.
    sources = list(dict.fromkeys(source for source, _ in found))
    result = []
    for source, multiple in sorted(found, key=lambda key: (sources.index(key[0]), key[1])):
        subject, values = found[source, multiple]
        condition = PLACES[multiple]
        # Readers need the name of the source only if there are several.
        if len(sources) > 1:
            condition += f", {source}"
        result.append(Series(condition, subject, ladder, values))
    return result


def _multiple(point: LadderPoint, subject: Score) -> int | None:
    """Return the length of a loss as one of `MULTIPLES` of the trained length; None if the subject
    is not such a loss.
    """
    trained = point.comparison.settings.get("model", {}).get("seq_length")
    if subject.task != Perplexity.name or subject.metric != "loss":
        return None
    for multiple in MULTIPLES:
        if trained is not None and subject.length == multiple * trained:
            return multiple
    return None


def _validation_series(ladder: Ladder) -> list[Series]:
    """Return the validation loss, if a point on text has one."""
    values = {}
    found = None
    for point in language_points(ladder):
        for subject, by_variant in _subjects(ladder, point):
            if (subject.task, subject.metric) == (TRAINING, LOSS):
                found = subject
                values[point.name] = by_variant
    if found is None:
        return []
    return [Series("", found, ladder, values)]


def task_series(ladder: Ladder) -> dict[str, list[Series]]:
    """Return the first metric that ranks variants of each task, by task and by condition, such as a
    length or a number of blanks. The losses of `loss_series` are left out.
    """
    # By task and condition: a subject and its values.
    found = {}
    for point in ladder.points:
        for task, by_metric in by_task(point.comparison).items():
            is_text = point.tokens_per_parameter is not None
            if task == TRAINING or (task == Perplexity.name and is_text):
                continue
            ranking = [subject for subject in by_metric if subject.better != "neither"]
            for subject in ranking:
                if subject.metric == ranking[0].metric:
                    conditions = found.setdefault(task, {})
                    _, values = conditions.setdefault(location(subject), (subject, {}))
                    values[point.name] = _by_variant(ladder, by_metric[subject])
    return {
        task: [Series(name, subject, ladder, values) for name, (subject, values) in of.items()]
        for task, of in found.items()
    }


def _subjects(
    ladder: Ladder, point: LadderPoint
) -> Iterator[tuple[Score, dict[str, dict[int, float]]]]:
    """Yield what was measured at a point, with the values by variant and seed."""
    for subject, results in results_by_metric(point.comparison).items():
        yield subject, _by_variant(ladder, results)


def _by_variant(ladder: Ladder, results: Sequence[VariantResult]) -> dict[str, dict[int, float]]:
    """Return the values of the ladder's variants by variant and seed."""
    return {
        result.variant: result.values for result in results if result.variant in ladder.variants
    }


def tuned_losses(comparison: Comparison) -> dict[float, float]:
    """Return the mean validation loss of each learning rate that was tried, by rate in ascending
    order. It is infinite if the training diverged with any seed.
    """
    values = {}
    for run in comparison.runs:
        rate = _as_rate(run.variant)
        if rate is not None:
            values.setdefault(rate, []).append(tuned_loss(run))
    return {rate: sum(losses) / len(losses) for rate, losses in sorted(values.items())}


def _as_rate(name: str) -> float | None:
    """Return a learning rate given as text; None if the text is no finite number."""
    try:
        rate = float(name)
    except ValueError:
        return None
    return rate if math.isfinite(rate) else None
