"""A synthetic task as it was trained, and in variants that the training did not show: accuracy by variant."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_tape.evaluation.answers import check_generator, check_sizes, right_answers
from megatron_tape.evaluation.base import LanguageModel, ModelInfo, Picture, Score, Summary, Task, Unit
from megatron_tape.synthetic import EVALUATION, Generator, random_of

PER_UNIT = 100
"""Sequences."""


class Variants(Task):
    """A subclass says which generators it compares; `settings` has `samples`, `seed` and `batch_size`."""

    needs_tokenizer = False

    def generators(self) -> dict[str, Generator]:
        """Return the generator of each variant by its name; the first is that of the training."""
        raise NotImplementedError

    def check(self, info: ModelInfo) -> None:
        """Raise ConfigError for settings that cannot work."""
        check_sizes(self.name, self.settings, {"samples": 1, "batch_size": 1})
        for generator in self.generators().values():
            check_generator(self.name, generator, info)

    def units(self, model: LanguageModel) -> list[Unit]:
        """Return units of up to `PER_UNIT` sequences of one variant."""
        return [
            Unit(f"{name}/{start}", generator.length * (min(self.settings.samples, start + PER_UNIT) - start))
            for name, generator in self.generators().items()
            for start in range(0, self.settings.samples, PER_UNIT)
        ]

    def evaluate(self, unit: Unit, model: LanguageModel) -> dict[str, Any]:
        """Return, for every sequence, how many answers are `right` of how many `answers`; and `blanks` among these."""
        name, _, start = unit.key.rpartition("/")
        generators = self.generators()
        # Every variant has numbers of its own, so that no two variants draw from the same stream.
        numbers = range(int(start), min(self.settings.samples, int(start) + PER_UNIT))
        offset = list(generators).index(name) << 40
        sequences = [
            generators[name].sequence(random_of(self.settings.seed, EVALUATION, offset + number)) for number in numbers
        ]
        found = right_answers(model, sequences, self.settings.batch_size)
        return {
            "right": [int(right.sum()) for right in found],
            "answers": [len(right) for right in found],
            "blanks": int(sum((tokens[answers] == generators[name].blank).sum() for tokens, answers in sequences)),
        }

    def summarize(self, values: dict[str, dict[str, Any]], info: ModelInfo) -> Summary:
        """Return by variant the share of right answers and that of sequences whose answers are all right.

        The answers of a sequence depend on each other, so the interval of the former resamples whole sequences.
        """
        from megatron_tape.evaluation.statistics import bootstrap_ratio, wilson

        scores, blanks = [], {}
        for name in self.generators():
            parts = [value for key, value in values.items() if key.rpartition("/")[0] == name]
            right = np.concatenate([part["right"] for part in parts])
            answers = np.concatenate([part["answers"] for part in parts])
            total, whole = max(1, int(answers.sum())), int((right == answers).sum())
            blanks[name] = sum(part["blanks"] for part in parts) / total
            low, high = bootstrap_ratio(right, answers)
            both = {"better": "higher", "group": name, "count": len(right)}
            scores.append(Score("accuracy", int(right.sum()) / total, low=low, high=high, **both))
            low, high = wilson(whole, len(right))
            scores.append(Score("exact match", whole / len(right), low=low, high=high, **both))
        return Summary(scores, {"blanks": blanks} if any(blanks.values()) else {}, self.notes(blanks))

    def notes(self, blanks: dict[str, float]) -> list[str]:
        """Return what a reader must know, given the share of blanks among the answers by variant."""
        return []

    @classmethod
    def draw(cls, results: dict[str, dict[str, Any]]) -> list[Picture]:
        """Return a picture of the accuracy by variant."""
        from megatron_tape.evaluation.figures import curve, legend, new_figure, styles

        names = list(dict.fromkeys(score["group"] for result in results.values() for score in result["scores"]))
        if not names:
            return []
        figure, (axes,) = new_figure(width=5.2, height=3.4)
        looks, told = styles(results), []
        for number, (label, result) in enumerate(results.items()):
            of = {score["group"]: score for score in result["scores"] if score["metric"] == "accuracy"}
            places = [names.index(name) + 0.12 * (number - (len(results) - 1) / 2) for name in of]
            look = {**looks[label], "linestyle": "none"}
            low, high = ([score[key] for score in of.values()] for key in ("low", "high"))
            curve(axes, look, places, [score["value"] for score in of.values()], low, high)
            shares = (f"{score['value']:.1%} {name}" for name, score in of.items())
            told.append(f"{label}: {', '.join(shares)}")
        axes.set_xticks(range(len(names)), names)
        axes.set(ylim=(-0.03, 1.03), xlim=(-0.5, len(names) - 0.5), ylabel="accuracy")
        axes.set_title(f"{cls.name.replace('_', ' ')}: share of right answers", fontsize=10)
        legend(figure)
        text = f"Share of right answers in {cls.name.replace('_', ' ')}, by variant. {'; '.join(told)}."
        return [Picture(cls.name, text, figure)]
