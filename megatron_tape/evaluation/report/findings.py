"""Sentences that say which variant or model has the best values of a metric, and which values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from megatron_tape.evaluation.report.tables import decimals_for, enumerated, location, shown_number
from megatron_tape.evaluation.results import Score

MOST_NAMES = 4
"""Maximum number of names in a list."""
MOST_CONDITIONS = 4
"""Up to this number of conditions, a sentence has the values of each."""


@dataclass(frozen=True)
class Measured:
    """The values of one metric under several conditions, such as context lengths, for variants or
    models.

    Values count as equal if they have the same whole percentage, or the same text in a table if
    they are no fractions.
    """

    name: str
    """Name of the metric in a sentence, such as `mean accuracy`."""
    better: Literal["lower", "higher"]
    values: Mapping[str, Mapping[str, float]]
    """Values by condition and label. A score without group and length has the condition ""."""

    @property
    def labels(self) -> list[str]:
        """The labels that have a value under every condition."""
        first, *others = self.values.values()
        return [label for label in first if all(label in of for of in others)]

    @property
    def incomplete_labels(self) -> list[str]:
        """The labels that have a value under some conditions only."""
        found = dict.fromkeys(label for of in self.values.values() for label in of)
        return [label for label in found if label not in self.labels]

    def best(self, condition: str) -> list[str]:
        """Return the labels with the best value under a condition, or with one that counts as
        equal.
        """
        values = {label: self.values[condition][label] for label in self.labels}
        if self.better == "higher":
            best = max(values.values())
        else:
            best = min(values.values())
        return [
            label for label, value in values.items() if self._rounded(value) == self._rounded(best)
        ]

    @cached_property
    def _are_fractions(self) -> bool:
        values = (value for of in self.values.values() for value in of.values())
        return self.better == "higher" and all(0 <= value <= 1 for value in values)

    @cached_property
    def _decimals(self) -> int | None:
        return decimals_for(value for of in self.values.values() for value in of.values())

    def _rounded(self, value: float) -> str:
        if self._are_fractions:
            return f"{value:.0%}"
        return shown_number(value, self._decimals)

    def shown(self, value: float) -> str:
        """Return a value as text."""
        if self._are_fractions:
            return _percent(value)
        return shown_number(value, self._decimals)

    @property
    def in_order(self) -> bool:
        """Whether the conditions are sizes, such as lengths, and not names."""
        return all(condition[:1].isdigit() for condition in self.values)

    def describe(self, labels: Sequence[str], conditions: Sequence[str] | None = None) -> str:
        """Return the values of `labels` as text, such as `99 to 100 % at 16 blanks and 22 % at 8
        blanks`.

        If the metric has more than `MOST_CONDITIONS` conditions, three or more consecutive ones
        share a description.
        """
        conditions = list(self.values) if conditions is None else conditions
        parts: list[str] = []
        by_text: dict[str, list[str]] = {}
        for consecutive in self._consecutive(conditions):
            if len(self.values) > MOST_CONDITIONS and len(consecutive) > 2:
                parts.append(self._describe_together(labels, consecutive))
                continue
            for condition in consecutive:
                by_text.setdefault(self._range(labels, [condition]), []).append(condition)
        parts += [f"{text}{at(of)}" for text, of in by_text.items()]
        return enumerated(parts)

    def _consecutive(self, conditions: Sequence[str]) -> list[list[str]]:
        """Split `conditions` where the metric has others in between. The order of names has no
        meaning.
        """
        order = list(self.values)
        found: list[list[str]] = []
        for condition in conditions:
            follows = bool(found) and order.index(condition) == order.index(found[-1][-1]) + 1
            if follows or (found and not self.in_order):
                found[-1].append(condition)
            else:
                found.append([condition])
        return found

    def _describe_together(self, labels: Sequence[str], conditions: Sequence[str]) -> str:
        """Return the values at the first and the last condition, or the range of all if they rise
        and fall.
        """
        if not self.in_order:
            return f"{self._range(labels, conditions)} for {enumerated(conditions, MOST_NAMES)}"

        first = conditions[0]
        last = conditions[-1]
        at_first = self._range(labels, [first])
        at_last = self._range(labels, [last])
        if at_first != at_last and all(self._is_monotonic(label, conditions) for label in labels):
            return f"{at_first}{at([first])} to {at_last}{at([last])}"
        return f"{self._range(labels, conditions)} from {first} to {last}"

    def _is_monotonic(self, label: str, conditions: Sequence[str]) -> bool:
        values = [self.values[condition][label] for condition in conditions]
        return values in (sorted(values), sorted(values, reverse=True))

    def _range(self, labels: Sequence[str], conditions: Sequence[str]) -> str:
        values = [self.values[condition][label] for condition in conditions for label in labels]
        low = self.shown(min(values))
        high = self.shown(max(values))
        if low == high:
            return low
        return f"{low.removesuffix(' %')} to {high}"


def measured(
    metric: str, scores: Mapping[Score, Mapping[str, float]], prefix: str = ""
) -> Measured | None:
    """Return the values of `metric`, given the values of a task by subject (see `Score.subject`)
    and label.

    `prefix`, such as `mean`, precedes the name in sentences. Returns None if no label has a value
    under every condition, or if the metric does not rank models.
    """
    found = {subject: values for subject, values in scores.items() if subject.metric == metric}
    found = {subject: values for subject, values in found.items() if subject.better != "neither"}
    if not found:
        return None
    better = next(iter(found)).better
    names = conditions(list(found))
    made = Measured(
        f"{prefix} {metric}".strip(), better, {names[one]: values for one, values in found.items()}
    )
    if made.labels:
        return made
    return None


def conditions(metrics: Sequence[Score]) -> dict[Score, str]:
    """Return the names of the conditions of metrics; without the group if it is the same at all
    lengths.
    """
    groups = {metric.group for metric in metrics}
    only_length = len(groups) == 1 and all(metric.length is not None for metric in metrics)
    return {
        metric: location(replace(metric, group="") if only_length else metric) for metric in metrics
    }


def finding(measured: Measured, reference: str = "") -> str:
    """Return sentences with the labels that have the best values, their values, and those of
    `reference`.

    Without a `reference`, or if it is always among the best, the values of all others are given as
    ranges. If exactly the variants with one setting are the best, as in `tape+increments=signed`,
    the sentence names the setting.
    """
    incomplete = measured.incomplete_labels
    if not incomplete:
        return _sentence(measured, reference)
    lack = "lacks" if len(incomplete) == 1 else "lack"
    left_out = f"{enumerated(incomplete, MOST_NAMES)}, which {lack} some of these scores"
    return f"{_sentence(measured, reference)} This leaves out {left_out}."


def _sentence(measured: Measured, reference: str) -> str:
    labels = measured.labels
    best = {condition: measured.best(condition) for condition in measured.values}
    always = [label for label in labels if all(label in of for of in best.values())]
    others = [label for label in labels if label not in always]
    if len(labels) == 1:
        return f"{labels[0]} has the {measured.name} {measured.describe(labels)}."
    if not others:
        all_of = "both" if len(labels) == 2 else f"all {len(labels)}"
        return f"The {measured.name} is about the same for {all_of}: {measured.describe(labels)}."

    setting = _common_setting(always, labels)
    if setting:
        with_it = measured.describe(always)
        without = measured.describe(others)
        return f"With {setting}, the {measured.name} is {with_it}; without, it is {without}."

    best_name = f"the {'highest' if measured.better == 'higher' else 'lowest'} {measured.name}"
    if always:
        compared = _compared(measured, others, reference if reference in others else "")
        have = "has" if len(always) == 1 else "have"
        leaders = f"{enumerated(always, MOST_NAMES)} {have} {best_name}"
        return f"{leaders}: {measured.describe(always)}{compared}."

    led: dict[tuple[str, ...], list[str]] = {}
    for condition, of in best.items():
        led.setdefault(tuple(of), []).append(condition)
    parts = []
    if len(best) > MOST_CONDITIONS and not measured.in_order:
        parts = [
            f"that of {enumerated(of, MOST_NAMES)} in {len(of_it)}" for of, of_it in led.items()
        ]
        return f"T{best_name[1:]} is {enumerated(parts, MOST_NAMES)} of {len(best)} scores."
    for of, of_it in led.items():
        parts.append(f"that of {enumerated(of, MOST_NAMES)} with {measured.describe(of, of_it)}")
    never = [label for label in labels if not any(label in of for of in led)]
    compared = _compared(measured, never, reference if reference in labels else "")
    return f"T{best_name[1:]} is {enumerated(parts, MOST_NAMES)}{compared}."


def _compared(measured: Measured, others: Sequence[str], reference: str) -> str:
    """Return a clause with the values of `reference` or else of `others`; empty without any."""
    compared = [reference] if reference else others
    if not compared:
        return ""
    has = f"{compared[0]} has" if len(compared) == 1 else "the others have"
    return f"; {has} {measured.describe(compared)}"


def _common_setting(chosen: Sequence[str], labels: Sequence[str]) -> str:
    """Return the part of variants' names that all of `chosen` have and no other label has; empty
    without one.
    """
    if len(chosen) < 2:
        return ""
    for part in chosen[0].split("+"):
        if [label for label in labels if part in label.split("+")] == list(chosen):
            return part
    return ""


def at(conditions: Sequence[str]) -> str:
    """Return a phrase for conditions, such as ` at 8 blanks and 16 blanks` or ` for books`."""
    if conditions == [""]:
        return ""
    preposition = "at" if conditions[0][:1].isdigit() else "for"
    return f" {preposition} {enumerated(conditions)}"


def _percent(fraction: float) -> str:
    """Return a fraction as percent. Only 0 and 1 are shown as 0 % and 100 %."""
    for decimals in range(6):
        text = f"{100 * fraction:.{decimals}f}"
        if float(text) not in (0, 100) or fraction in (0, 1):
            break
    return f"{text} %"
