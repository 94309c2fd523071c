"""Tasks on the sequences of `synthetic`, named like the generators, for models trained with `data.generator`.

Answers are scored with one forward pass over the whole sequence, including the right answers: a token is right if it is
the most likely one after the right tokens before it. Greedy decoding gives the whole answer exactly if all its tokens
are right, so exact match is the same as with generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_tape import synthetic
from megatron_tape.config.evaluation import (
    AdditionSettings,
    GridNavigationSettings,
    RecallSettings,
    SelectiveCopySettings,
)
from megatron_tape.errors import ConfigError, refuse
from megatron_tape.evaluation.results import Score, TaskResult
from megatron_tape.evaluation.score_pictures import by_group, fraction_maps
from megatron_tape.evaluation.statistics import bootstrap_ratio, wilson
from megatron_tape.evaluation.task import LanguageModel, ModelInfo, Picture, Summary, Task, Unit
from megatron_tape.synthetic import EVALUATION, Generator, sample_random

SEQUENCES_PER_UNIT = 100
MOST = 10**6
"""Upper limit of digits and samples of sums (see the settings), so that every sum has its own number."""


def right_answers(
    model: LanguageModel, sequences: Sequence[tuple[np.ndarray, np.ndarray]], batch_size: int
) -> list[np.ndarray]:
    """Return a mask of the right answers of each sequence, given as `Generator.sequence` returns it."""
    import torch

    found = []
    for start in range(0, len(sequences), batch_size):
        part = sequences[start : start + batch_size]
        padded = np.zeros((len(part), max(len(tokens) for tokens, _ in part)), dtype=np.int64)
        for row, (tokens, _) in zip(padded, part):
            row[: len(tokens)] = tokens
        # Padding after a sequence does not change the logits before it.
        likeliest = model.logits(torch.from_numpy(padded[:, :-1])).argmax(-1).numpy()
        for row, (tokens, answers) in zip(likeliest, part):
            found.append((row[: len(tokens) - 1] == tokens[1:])[answers[1:]])
    return found


class SyntheticTask(Task):
    """Base class: settings have `samples`, `seed` and `batch_size`, and the model needs no tokenizer."""

    needs_tokenizer = False

    def check_generator(self, generator: Generator, info: ModelInfo) -> None:
        """Raise ConfigError if a generator's settings are invalid, or its vocabulary is larger than the model's."""
        try:
            generator.check()
        except ConfigError as error:
            raise ConfigError(self.key(error.subject), error.problem, error.fix) from None
        refuse(
            generator.vocab_size > info.vocab_size,
            self.section,
            f"uses {generator.vocab_size} different tokens, but {info.label} has {info.vocab_size}",
            "give the settings of its training, or a model trained on this task",
        )


class Addition(SyntheticTask):
    """Exact match of sums, with digits reversed, by the lengths of the operands."""

    name = "addition"
    Settings = AdditionSettings

    def check(self, info: ModelInfo) -> None:
        step = self.settings.step
        refuse(
            not self.lengths,
            self.key("step"),
            f"is {step}, but the longest operand has {self.longest} digits",
            "lower it",
        )
        self.check_generator(self.sums, info)

    @property
    def longest(self) -> int:
        return self.settings.longest or 2 * self.settings.digits

    @property
    def sums(self) -> synthetic.Addition:
        return synthetic.Addition(digits=self.longest, hints=self.settings.hints)

    @property
    def lengths(self) -> list[int]:
        return list(range(self.settings.step, self.longest + 1, self.settings.step))

    def units(self, model: LanguageModel) -> list[Unit]:
        # The work is proportional to the tokens: two operands, and a sum as long as the longer one.
        return [
            Unit(str(first), sum(first + second + max(first, second) for second in self.lengths))
            for first in self.lengths
        ]

    def evaluate(self, unit: Unit, model: LanguageModel) -> dict[str, Any]:
        """Return `right`, a list of 0 and 1 for each length of the second operand."""
        first, sums = int(unit.key), self.sums
        right = []
        for second in self.lengths:
            numbers = [(first * MOST + second) * MOST + sample for sample in range(self.settings.samples)]
            problems = [
                sums.problem(sample_random(self.settings.seed, EVALUATION, number), first, second) for number in numbers
            ]
            right.append([int(found.all()) for found in right_answers(model, problems, self.settings.batch_size)])
        return {"right": right}

    def summarize(self, values: dict[str, dict[str, Any]], info: ModelInfo) -> Summary:
        lengths, trained = np.array(self.lengths), self.settings.digits
        right = np.array([values[str(first)]["right"] for first in self.lengths])
        within = np.maximum(lengths[:, None], lengths) <= trained
        groups = {
            f"up to {self.longest} digits": np.ones_like(within),
            f"up to {trained} digits": within,
            f"beyond {trained} digits": ~within,
        }
        scores = []
        for group, cells in groups.items():
            if not cells.any() or (cells.all() and scores):
                continue
            correct, count = int(right[cells].sum()), right[cells].size
            share = correct / count
            scores.append(Score("exact match", share, "higher", *wilson(correct, count), group=group, count=count))
        accuracy = right.mean(-1).tolist()
        return Summary(scores, {"digits": trained, "lengths": self.lengths, "accuracy": accuracy})

    @classmethod
    def draw(cls, results: dict[str, TaskResult]) -> list[Picture]:
        def names(result: TaskResult) -> tuple[list[int], list[int]]:
            return (result.details["lengths"],) * 2

        trained = " and ".join(dict.fromkeys(str(result.details["digits"]) for result in results.values()))
        labels, title = ("digits of the first operand", "digits of the second"), f"Sums; trained up to {trained} digits"
        return fraction_maps(results, lambda result: result.details["accuracy"], names, cls.name, title, labels)


class Variants(SyntheticTask):
    """Base class: accuracy of a synthetic task as in training, and in variants not seen in training."""

    def generators(self) -> dict[str, Generator]:
        """Return the generators by name of the variant; the first is that of the training."""
        raise NotImplementedError

    def check(self, info: ModelInfo) -> None:
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
        """Return the numbers of `right` and of all `answers` per sequence, and of `blanks` among the answers."""
        name, _, start = unit.key.rpartition("/")
        generators = self.generators()
        # Each variant has its own numbers, so that variants never share random streams.
        numbers = range(int(start), min(self.settings.samples, int(start) + SEQUENCES_PER_UNIT))
        offset = list(generators).index(name) << 40
        sequences = [
            generators[name].sequence(sample_random(self.settings.seed, EVALUATION, offset + number))
            for number in numbers
        ]
        found = right_answers(model, sequences, self.settings.batch_size)
        blank = generators[name].blank  # type: ignore[attr-defined]
        return {
            "right": [int(right.sum()) for right in found],
            "answers": [len(right) for right in found],
            "blanks": int(sum((tokens[answers] == blank).sum() for tokens, answers in sequences)),
        }

    def summarize(self, values: dict[str, dict[str, Any]], info: ModelInfo) -> Summary:
        """Return the share of right answers, and of sequences with only right answers, by variant.

        The answers of a sequence depend on each other, so the first interval resamples whole sequences.
        """
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
        return by_group(results, lambda score: score.metric == "accuracy", cls.name, "share of correct answers")


class SelectiveCopy(Variants):
    """Selective copying with the number of blanks in training, and with fewer and more."""

    name = "selective_copy"
    Settings = SelectiveCopySettings

    def check(self, info: ModelInfo) -> None:
        refuse(not self.settings.blanks, self.key("blanks"), "is empty", "name a variant, such as {IID: 128}")
        super().check(info)

    def generators(self) -> dict[str, Generator]:
        sizes = {"copied": self.settings.copied, "symbols": self.settings.symbols}
        return {name: synthetic.SelectiveCopy(blanks=blanks, **sizes) for name, blanks in self.settings.blanks.items()}


class Recall(Variants):
    """Multi-query associative recall at several lengths; longer sequences have more pairs."""

    name = "recall"
    Settings = RecallSettings

    def check(self, info: ModelInfo) -> None:
        refuse(not self.settings.lengths, self.key("lengths"), "is empty", "name a length, such as [256]")
        super().check(info)

    def generators(self) -> dict[str, Generator]:
        sizes = {"keys": self.settings.keys, "tokens_per_pair": self.settings.tokens_per_pair}
        return {f"{length} tokens": synthetic.Recall(tokens=length, **sizes) for length in self.settings.lengths}


class GridNavigation(Variants):
    """Grid navigation as in training, and on denser and sparser maps. Only revisited cells are scored."""

    name = "grid_navigation"
    Settings = GridNavigationSettings

    def check(self, info: ModelInfo) -> None:
        key, variants = self.key("variants"), self.settings.variants
        refuse(not variants, key, "is empty", "name a variant, such as {IID: [128, 64, 0.5]}")
        for name, values in variants.items():
            whole = len(values) == 3 and all(float(value).is_integer() for value in values[:2])
            fix = "give steps, width and share of blanks, such as [128, 64, 0.5]"
            refuse(not whole, f"{key}.{name}", f"is {values}", fix)
        super().check(info)

    def generators(self) -> dict[str, Generator]:
        settings = self.settings
        same = {key: getattr(settings, key) for key in ("dimensions", "objects", "longest_run")}
        return {
            name: synthetic.GridNavigation(steps=int(steps), width=int(width), blank_probability=blanks, **same)
            for name, (steps, width, blanks) in settings.variants.items()
        }

    def notes(self, blanks: dict[str, float]) -> list[str]:
        shares = ", ".join(f"{share:.1%} ({name})" for name, share in blanks.items())
        return [f"Accuracy of always answering blank: {shares}."]
