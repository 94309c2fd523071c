"""Sentences that say which variant or model has the best values of a metric, and which values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from megatron_tape.evaluation.report.tables import decimals_for, enumerated, location, shown_number
from megatron_tape.evaluation.results import Score

MOST_LISTED = 4
"""Maximum number of names or values in a list."""


@dataclass(frozen=True)
class Measured:
    """The values of one metric under several conditions, such as context lengths, for variants or
    models.

    Two fractions, such as accuracies, count as equal if they round to the same whole percentage.
    Other values count as equal if they look the same in a table.
    """

    name: str
    """Name of the metric in a sentence, such as `mean accuracy`."""
    better: Literal["lower", "higher", "neither"]
    values: Mapping[str, Mapping[str, float]]
    """Values by condition and label. A score without group and length has the condition ""."""

    @cached_property
    def all_labels(self) -> list[str]:
        """The labels that have a value under at least one condition."""
        return list(dict.fromkeys(label for values in self.values.values() for label in values))

    @cached_property
    def labels(self) -> list[str]:
        """The labels that have a value under every condition."""
        return [
            label
            for label in self.all_labels
            if all(label in values for values in self.values.values())
        ]

    @cached_property
    def _flat_values(self) -> list[float]:
        """All values, of every condition and label."""
        return [value for values in self.values.values() for value in values.values()]

    @cached_property
    def _are_fractions(self) -> bool:
        """Whether the values are fractions such as accuracies, which are shown as percentages."""
        return self.better == "higher" and all(0 <= value <= 1 for value in self._flat_values)

    def _shown(self, value: float) -> str:
        """Return a value as text: a percentage, or a number as in a table of all values."""
        if self._are_fractions:
            return _percent(value)
        return shown_number(value, decimals_for(self._flat_values))

    def best(self, condition: str) -> list[str]:
        """Return the labels with the best value under a condition, or with one that counts as
        equal to it.
        """

        def rounded(label: str) -> str:
            """Return the value of a label as the text by which it is compared."""
            value = self.values[condition][label]
            if self._are_fractions:
                return f"{value:.0%}"
            return self._shown(value)

        ascending = sorted(self.labels, key=lambda label: self.values[condition][label])
        best = ascending[-1] if self.better == "higher" else ascending[0]
        # Labels whose rounded values are the same share the first place.
        return [label for label in self.labels if rounded(label) == rounded(best)]

    def describe(self, labels: Sequence[str], conditions: Sequence[str] = ()) -> str:
        """Return the values of `labels` as text, such as `99 to 100 % at 16 blanks and 22 % at 8
        blanks`.

        More than `MOST_LISTED` conditions share one range of values. By default, `conditions` are
        all.
        """
        conditions = conditions or list(self.values)
        if len(conditions) > MOST_LISTED:
            shown = self._range(labels, conditions)
            if _are_sizes(conditions):
                return f"{shown} from {conditions[0]} to {conditions[-1]}"
            return shown + _phrase_of(conditions)

        # Conditions with the same range of values share a phrase.
        by_range = {}
        for condition in conditions:
            by_range.setdefault(self._range(labels, [condition]), []).append(condition)
        return enumerated([shown + _phrase_of(sharing) for shown, sharing in by_range.items()])

    def _range(self, labels: Sequence[str], conditions: Sequence[str]) -> str:
        """Return the values of `labels` under `conditions` as one range, such as `97 to 99 %`."""
        values = [self.values[condition][label] for condition in conditions for label in labels]
        low = self._shown(min(values))
        high = self._shown(max(values))
        if low == high:
            return low
        return f"{low.removesuffix(' %')} to {high}"


def first_measured(
    scores: Mapping[Score, Mapping[str, float]], prefix: str = ""
) -> Measured | None:
    """Return the values of the first metric in `scores`.

    `scores` has the values of a task by subject (a score without its value) and by label. `prefix`,
    such as `mean`, precedes the metric's name in sentences. Returns None without a metric, or if no
    label has a value under every condition.
    """
    if not scores:
        return None
    first = next(iter(scores))
    subjects = [subject for subject in scores if subject.metric == first.metric]
    # If all subjects have a length and the same group, conditions are named by their lengths only.
    if all(subject.length is not None and subject.group == first.group for subject in subjects):
        values = {location(replace(subject, group="")): scores[subject] for subject in subjects}
    else:
        values = {location(subject): scores[subject] for subject in subjects}

    result = Measured(f"{prefix} {first.metric}".strip(), first.better, values)
    if result.labels:
        return result
    return None


def finding(measured: Measured, reference: str = "") -> str:
    """Return sentences with the labels that have the best values, their values, and those of
    `reference`.

    Without a `reference`, or if it is always among the best, the values of all others are given as
    ranges. If exactly the variants with one setting are the best, as in `tape+increments=signed`,
    the sentence names the setting.
    """
    sentence = _sentence(measured, reference)
    # A missing score would make a label look better or worse than it is.
    incomplete = [label for label in measured.all_labels if label not in measured.labels]
    if incomplete:
        sentence += f" Without a value everywhere: {enumerated(incomplete, MOST_LISTED)}."
    return sentence


def _sentence(measured: Measured, reference: str) -> str:
    """Return a sentence with the labels that have the best values, their values, and those of
    `reference` or of all others. Labels without a value under every condition are left out.
    """
    name = measured.name
    labels = measured.labels
    best = {condition: measured.best(condition) for condition in measured.values}
    always_best = [label for label in labels if all(label in leaders for leaders in best.values())]
    others = [label for label in labels if label not in always_best]
    if len(labels) == 1:
        return f"{labels[0]} has the {name} {measured.describe(labels)}."
    if not others:
        names = enumerated(labels, MOST_LISTED)
        return f"{names} have about the same {name}: {measured.describe(labels)}."

    # A setting such as `increments=signed`, if exactly the variants with it are best everywhere.
    setting = _common_setting(always_best, labels)
    if setting:
        return (
            f"With {setting}, the {name} is {measured.describe(always_best)};"
            f" without, it is {measured.describe(others)}."
        )

    extreme = "highest" if measured.better == "higher" else "lowest"
    # Some labels are among the best under every condition.
    if always_best:
        compared = _compared(measured, others, reference)
        verb = "has" if len(always_best) == 1 else "have"
        subject = f"{enumerated(always_best, MOST_LISTED)} {verb} the {extreme} {name}"
        return f"{subject}: {measured.describe(always_best)}{compared}."

    # No label is among the best everywhere. The conditions, by the labels that are best under them.
    conditions_led = {}
    for condition, leaders in best.items():
        conditions_led.setdefault(tuple(leaders), []).append(condition)
    parts = [
        f"that of {enumerated(leaders, MOST_LISTED)} with {measured.describe(leaders, conditions)}"
        for leaders, conditions in conditions_led.items()
    ]
    # The labels that are best under no condition.
    others = [label for label in labels if not any(label in leaders for leaders in conditions_led)]
    # The values of the reference are given even if it is sometimes the best.
    if reference in labels:
        others.append(reference)
    compared = _compared(measured, others, reference)
    return f"The {extreme} {name} is {enumerated(parts, MOST_LISTED)}{compared}."


def _compared(measured: Measured, others: Sequence[str], reference: str) -> str:
    """Return a clause with the values of `reference` if it is among `others`, or else of all
    `others`; empty without any.
    """
    if not others:
        return ""
    if reference in others:
        others = [reference]
    subject = "the others have"
    if len(others) == 1:
        subject = f"{others[0]} has"
    return f"; {subject} {measured.describe(others)}"


def _common_setting(chosen: Sequence[str], labels: Sequence[str]) -> str:
    """Return the part of a variant's name, such as `increments=signed`, that all of `chosen` have
    and no other label has; empty if there is none.
    """
    # A single variant is called by its name, not by one of its settings.
    if len(chosen) < 2:
        return ""
    # A variant's name is its encoding and its settings, such as `tape+increments=signed`.
    for part in chosen[0].split("+"):
        if [label for label in labels if part in label.split("+")] == list(chosen):
            return part
    return ""


def _phrase_of(conditions: Sequence[str]) -> str:
    """Return a phrase for conditions, such as ` at 8 blanks and 16 blanks` or ` for books`."""
    if conditions == [""]:  # a score without group and length, whose condition has no name
        return ""
    preposition = "at" if _are_sizes(conditions) else "for"
    return f" {preposition} {enumerated(conditions, MOST_LISTED)}"


def _are_sizes(conditions: Sequence[str]) -> bool:
    """Return whether conditions are sizes, such as `512 tokens`, and not names."""
    return conditions[0][:1].isdigit()


def _percent(fraction: float) -> str:
    """Return a fraction as percent. Only 0 and 1 are shown as 0 % and 100 %."""
    decimals = 0
    # 0.999 becomes 99.9 %, since 100 % would say that nothing was wrong.
    while fraction not in (0, 1) and float(f"{100 * fraction:.{decimals}f}") in (0, 100):
        decimals += 1
    return f"{100 * fraction:.{decimals}f} %"
