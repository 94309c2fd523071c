"""What the tasks on sequences of `synthetic` share.

They are for models that `data.generator` has trained on them. Answers are read from one forward pass over the whole
sequence, right answers included. Each token is counted by whether it is the likeliest one after the right tokens before
it. Greedy decoding gives a whole answer exactly if that holds for all its tokens: up to the first wrong token it sees
the same tokens. So exact match is the same number either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_tape.errors import ConfigError, refuse
from megatron_tape.evaluation.base import LanguageModel, ModelInfo, Picture, Summary, Task, Unit
from megatron_tape.evaluation.results import Score, TaskResult
from megatron_tape.synthetic import EVALUATION, Generator, random_of

LARGEST_SEED = 2**32 - 1
SEQUENCES_PER_UNIT = 100


def right_answers(
    model: LanguageModel, sequences: Sequence[tuple[np.ndarray, np.ndarray]], batch_size: int
) -> list[np.ndarray]:
    """Return for every sequence, given as `Generator.sequence` returns it, which of its answers are right, bool."""
    import torch

    found = []
    for start in range(0, len(sequences), batch_size):
        part = sequences[start : start + batch_size]
        padded = np.zeros((len(part), max(len(tokens) for tokens, _ in part)), dtype=np.int64)
        for row, (tokens, _) in zip(padded, part):
            row[: len(tokens)] = tokens
        # What follows a sequence does not change the logits before it.
        likeliest = model.logits(torch.from_numpy(padded[:, :-1])).argmax(-1).numpy()
        for row, (tokens, answers) in zip(likeliest, part):
            found.append((row[: len(tokens) - 1] == tokens[1:])[answers[1:]])
    return found


class SyntheticTask(Task):
    """A task whose settings have `samples`, `seed` and `batch_size`, on a model without a tokenizer."""

    needs_tokenizer = False

    def check_seed(self) -> None:
        seed, fix = self.settings.seed, f"set it to at least 0 and at most {LARGEST_SEED}"
        refuse(not 0 <= seed <= LARGEST_SEED, self.key("seed"), f"is {seed}", fix)

    def check_generator(self, generator: Generator, info: ModelInfo) -> None:
        """Raise ConfigError if a generator's settings cannot work, or it makes tokens that the model does not know."""
        try:
            generator.check()
        except ConfigError as error:
            raise ConfigError(self.key(error.subject), error.problem, error.fix) from None
        refuse(
            generator.vocab_size > info.vocab_size,
            self.section,
            f"uses {generator.vocab_size} different tokens, but {info.label} knows {info.vocab_size}",
            "give the settings with which it was trained, or a model that was trained on this task",
        )


class Variants(SyntheticTask):
    """A synthetic task as it was trained, and in variants that the training did not show: accuracy by variant."""

    def generators(self) -> dict[str, Generator]:
        """Return the generator of each variant by its name; the first is that of the training."""
        raise NotImplementedError

    def check(self, info: ModelInfo) -> None:
        self.refuse_below(samples=1, batch_size=1)
        self.check_seed()
        for generator in self.generators().values():
            self.check_generator(generator, info)

    def units(self, model: LanguageModel) -> list[Unit]:
        """Return units of up to `SEQUENCES_PER_UNIT` sequences of one variant."""
        samples, step = self.settings.samples, SEQUENCES_PER_UNIT
        return [
            Unit(f"{name}/{start}", generator.length * (min(samples, start + step) - start))
            for name, generator in self.generators().items()
            for start in range(0, samples, step)
        ]

    def evaluate(self, unit: Unit, model: LanguageModel) -> dict[str, Any]:
        """Return, for every sequence, how many answers are `right` of how many `answers`; and `blanks` among these."""
        name, _, start = unit.key.rpartition("/")
        generators = self.generators()
        # Every variant has numbers of its own, so that no two variants draw from the same stream.
        numbers = range(int(start), min(self.settings.samples, int(start) + SEQUENCES_PER_UNIT))
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
            total, whole, count = max(1, int(answers.sum())), int((right == answers).sum()), len(right)
            blanks[name] = sum(part["blanks"] for part in parts) / total
            share, common = int(right.sum()) / total, {"group": name, "count": count}
            scores.append(Score("accuracy", share, "higher", *bootstrap_ratio(right, answers), **common))
            scores.append(Score("exact match", whole / count, "higher", *wilson(whole, count), **common))
        return Summary(scores, {"blanks": blanks} if any(blanks.values()) else {}, self.notes(blanks))

    def notes(self, blanks: dict[str, float]) -> list[str]:
        return []

    @classmethod
    def draw(cls, results: dict[str, TaskResult]) -> list[Picture]:
        from megatron_tape.evaluation.figures import legend, new_figure, plain, score_curve, styles

        names = list(dict.fromkeys(score.group for result in results.values() for score in result.scores))
        if not names:
            return []
        figure, (axes,) = new_figure(width=5.2, height=3.4)
        looks, told = styles(results), []
        for number, (label, result) in enumerate(results.items()):
            shown = [score for score in result.scores if score.metric == "accuracy"]
            places = [names.index(score.group) + 0.12 * (number - (len(results) - 1) / 2) for score in shown]
            score_curve(axes, {**looks[label], "linestyle": "none"}, places, shown)
            told.append(f"{label}: " + ", ".join(f"{score.value:.1%} {score.group}" for score in shown))
        axes.set_xticks(range(len(names)), list(map(plain, names)))
        axes.set(ylim=(-0.03, 1.03), xlim=(-0.5, len(names) - 0.5), ylabel="accuracy")
        title = cls.name.replace("_", " ")
        axes.set_title(f"{title}: share of right answers", fontsize=10)
        legend(figure)
        return [Picture(cls.name, f"Share of right answers in {title}, by variant. {'; '.join(told)}.", figure)]


@dataclass(kw_only=True)
class VariantSettings:
    """What the tasks have in common that have variants."""

    samples: int = 1000
    """Sequences per variant."""
    seed: int = 0
    """Seed of the sequences. They are never those of training."""
    batch_size: int = 50
    """Sequences that the model reads at once."""
