"""Tasks on the sequences of the generators in `synthetic`, for models trained with
`data.generator`.

A task has the name of its generator. One forward pass reads the whole sequence, including the
correct answers. A predicted token is correct if it is the answer, given the correct tokens before
it. Greedy decoding generates a correct answer exactly if all its tokens are correct here, so exact
match is the same as with generation.
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
from megatron_tape.errors import ConfigError
from megatron_tape.evaluation.results import Score, TaskResult
from megatron_tape.evaluation.score_pictures import by_group, fraction_maps
from megatron_tape.evaluation.statistics import bootstrap_ratio, wilson
from megatron_tape.evaluation.task import EvaluatedModel, ModelInfo, Picture, Summary, Task, Unit
from megatron_tape.synthetic import EVALUATION, Generator, sample_random
from megatron_tape.text import counted

SEQUENCES_PER_UNIT = 100
TRAINED = "as trained"
"""Marks the group with the sizes of the training in names for readers."""
MOST = 10**6
"""More than the numbers of digits and samples can be: the factor that makes the sample index of
every sum unique.
"""


def correct_answers(
    model: EvaluatedModel, sequences: Sequence[tuple[np.ndarray, np.ndarray]], batch_size: int
) -> list[np.ndarray]:
    """Return for each sequence a mask (A,) of its A answer tokens that the model predicts
    correctly.

    `sequences` are pairs of token ids and mask, as `Generator.sequence` returns them.
    """
    import torch

    masks = []
    for start in range(0, len(sequences), batch_size):
        part = sequences[start : start + batch_size]
        padded = np.zeros((len(part), max(len(tokens) for tokens, _ in part)), dtype=np.int64)
        for row, (tokens, _) in zip(padded, part):
            row[: len(tokens)] = tokens
        # Padding after a sequence does not change the logits before it.
        likeliest = model.logits(torch.from_numpy(padded[:, :-1])).argmax(-1).numpy()
        for row, (tokens, answers) in zip(likeliest, part):
            masks.append((row[: len(tokens) - 1] == tokens[1:])[answers[1:]])
    return masks


class SyntheticTask(Task):
    """Base class of tasks for models without a tokenizer. The settings have `samples`, `seed` and
    `batch_size`.
    """

    needs_tokenizer = False

    def check_generator(self, generator: Generator, info: ModelInfo) -> None:
        """Raise ConfigError if a generator's settings are invalid, or its vocabulary is larger than
        the model's.
        """
        try:
            generator.check()
        except ConfigError as error:
            raise ConfigError(self.key(error.subject), error.problem, error.fix) from None
        if generator.vocab_size > info.vocab_size:
            raise ConfigError(
                self.section,
                f"uses {generator.vocab_size} token ids, but the vocabulary of {info.label} has"
                f" {info.vocab_size}",
                "set the same values as in its training, or evaluate a model trained on this task",
            )


class Addition(SyntheticTask):
    """Exact match of sums for each pair of operand lengths."""

    name = "addition"
    Settings = AdditionSettings

    def check(self, info: ModelInfo) -> None:
        step = self.settings.step
        if not self.lengths:
            raise ConfigError(
                self.key("step"),
                f"is {step}, but the longest operand has {self.longest} digits",
                f"set it to at most {self.longest}",
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

    def group_names(self) -> dict[str, str]:
        trained = self.settings.digits
        longest = self.longest
        names = {f"up to {trained} digits": f"operands up to {trained} digits ({TRAINED})"}
        if longest > trained:
            names[f"beyond {trained} digits"] = f"operands beyond {trained} digits"
            names[f"up to {longest} digits"] = f"all operands up to {longest} digits"
        return names

    def units(self, model: EvaluatedModel) -> list[Unit]:
        # The cost is the number of tokens: two operands, and a sum as long as the longer one.
        return [
            Unit(str(first), sum(first + second + max(first, second) for second in self.lengths))
            for first in self.lengths
        ]

    def evaluate(self, unit: Unit, model: EvaluatedModel) -> dict[str, Any]:
        """Return `right`: for each length of the second operand, a list with 1 for each correct
        sum, else 0.
        """
        first = int(unit.key)
        sums = self.sums
        right = []
        for second in self.lengths:
            numbers = [
                (first * MOST + second) * MOST + sample for sample in range(self.settings.samples)
            ]
            problems = [
                sums.problem(sample_random(self.settings.seed, EVALUATION, number), first, second)
                for number in numbers
            ]
            right.append(
                [
                    int(mask.all())
                    for mask in correct_answers(model, problems, self.settings.batch_size)
                ]
            )
        return {"right": right}

    def summarize(self, values: dict[str, dict[str, Any]], info: ModelInfo) -> Summary:
        lengths = np.array(self.lengths)
        trained = self.settings.digits
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
            correct = int(right[cells].sum())
            count = right[cells].size
            fraction = correct / count
            scores.append(
                Score(
                    "exact match",
                    fraction,
                    "higher",
                    *wilson(correct, count),
                    group=group,
                    count=count,
                )
            )
        accuracy = right.mean(-1).tolist()
        return Summary(scores, {"digits": trained, "lengths": self.lengths, "accuracy": accuracy})

    @classmethod
    def draw(cls, results: dict[str, TaskResult]) -> list[Picture]:
        def names(result: TaskResult) -> tuple[list[int], list[int]]:
            return (result.details["lengths"],) * 2

        trained = " and ".join(
            dict.fromkeys(str(result.details["digits"]) for result in results.values())
        )
        labels = ("digits of the first operand", "digits of the second operand")
        title = f"Sums; trained up to {trained} digits"
        return fraction_maps(
            results, lambda result: result.details["accuracy"], names, cls.name, title, labels
        )


class Variants(SyntheticTask):
    """Base class of tasks with variants: accuracy with the generator settings of training, and with
    others.
    """

    def generators(self) -> dict[str, Generator]:
        """Return the generators by name of the variant. The first one has the settings of the
        training.
        """
        raise NotImplementedError

    def check(self, info: ModelInfo) -> None:
        for generator in self.generators().values():
            self.check_generator(generator, info)

    def units(self, model: EvaluatedModel) -> list[Unit]:
        """Return units of at most `SEQUENCES_PER_UNIT` sequences of a variant; their keys are
        `VARIANT/FIRST INDEX`.
        """
        samples = self.settings.samples
        step = SEQUENCES_PER_UNIT
        return [
            Unit(f"{name}/{start}", generator.length * (min(samples, start + step) - start))
            for name, generator in self.generators().items()
            for start in range(0, samples, step)
        ]

    def evaluate(self, unit: Unit, model: EvaluatedModel) -> dict[str, Any]:
        """Return the numbers of `right` and of all `answers` of each sequence, and of `blanks`
        among all answers.
        """
        name, _, start = unit.key.rpartition("/")
        generators = self.generators()
        # Variants use different sample indices, and so different random numbers.
        numbers = range(int(start), min(self.settings.samples, int(start) + SEQUENCES_PER_UNIT))
        offset = list(generators).index(name) << 40
        sequences = [
            generators[name].sequence(
                sample_random(self.settings.seed, EVALUATION, offset + number)
            )
            for number in numbers
        ]
        masks = correct_answers(model, sequences, self.settings.batch_size)
        blank = generators[name].blank  # type: ignore[attr-defined]
        return {
            "right": [int(mask.sum()) for mask in masks],
            "answers": [len(mask) for mask in masks],
            "blanks": int(sum((tokens[answers] == blank).sum() for tokens, answers in sequences)),
        }

    def summarize(self, values: dict[str, dict[str, Any]], info: ModelInfo) -> Summary:
        """Return the fractions of correct answers and of sequences with only correct answers, by
        variant.

        The answers of a sequence depend on each other, so the interval of the accuracy resamples
        whole sequences.
        """
        scores = []
        blanks = {}
        for name in self.generators():
            parts = [value for key, value in values.items() if key.rpartition("/")[0] == name]
            right = np.concatenate([part["right"] for part in parts])
            answers = np.concatenate([part["answers"] for part in parts])
            total = max(1, int(answers.sum()))
            whole = int((right == answers).sum())
            count = len(right)
            blanks[name] = sum(part["blanks"] for part in parts) / total
            fraction = int(right.sum()) / total
            common = {"group": name, "count": count}
            scores.append(
                Score("accuracy", fraction, "higher", *bootstrap_ratio(right, answers), **common)
            )
            scores.append(
                Score("exact match", whole / count, "higher", *wilson(whole, count), **common)
            )
        return Summary(
            scores, {"blanks": blanks} if any(blanks.values()) else {}, self.notes(blanks)
        )

    def notes(self, blanks: dict[str, float]) -> list[str]:
        return []

    @classmethod
    def draw(cls, results: dict[str, TaskResult]) -> list[Picture]:
        return by_group(
            results,
            lambda score: score.metric == "accuracy",
            cls.name,
            "fraction of correct answers",
        )


class SelectiveCopy(Variants):
    """Selective copying with the number of blanks in training, with fewer blanks, and with more."""

    name = "selective_copy"
    Settings = SelectiveCopySettings

    def check(self, info: ModelInfo) -> None:
        if not self.settings.blanks:
            raise ConfigError(self.key("blanks"), "is empty", "give a variant, such as {IID: 128}")
        super().check(info)

    def group_names(self) -> dict[str, str]:
        blanks = self.settings.blanks
        trained = next(iter(blanks), "")
        names = {
            name: counted(blanks[name], "blank") for name in sorted(blanks, key=blanks.__getitem__)
        }
        return {
            name: f"{shown} ({TRAINED})" if name == trained else shown
            for name, shown in names.items()
        }

    def generators(self) -> dict[str, Generator]:
        sizes = {"copied": self.settings.copied, "symbols": self.settings.symbols}
        return {
            name: synthetic.SelectiveCopy(blanks=blanks, **sizes)
            for name, blanks in self.settings.blanks.items()
        }


class Recall(Variants):
    """Multi-query associative recall at several lengths; longer sequences have more pairs."""

    name = "recall"
    Settings = RecallSettings

    def check(self, info: ModelInfo) -> None:
        if not self.settings.lengths:
            raise ConfigError(
                self.key("lengths"), "is empty", "give at least one length, such as [256]"
            )
        super().check(info)

    def group_names(self) -> dict[str, str]:
        return {
            f"{length} tokens": f"{length:,} tokens" for length in sorted(self.settings.lengths)
        }

    def generators(self) -> dict[str, Generator]:
        sizes = {"keys": self.settings.keys, "tokens_per_pair": self.settings.tokens_per_pair}
        return {
            f"{length} tokens": synthetic.Recall(tokens=length, **sizes)
            for length in self.settings.lengths
        }


class GridNavigation(Variants):
    """Grid navigation as in training, and on denser and sparser maps. Only revisited cells are
    scored.
    """

    name = "grid_navigation"
    Settings = GridNavigationSettings

    def check(self, info: ModelInfo) -> None:
        key = self.key("variants")
        variants = self.settings.variants
        if not variants:
            raise ConfigError(
                key, "is empty", "give at least one variant, such as {IID: [128, 64, 0.5]}"
            )
        for name, values in variants.items():
            valid = len(values) == 3 and all(float(value).is_integer() for value in values[:2])
            if not valid:
                raise ConfigError(
                    f"{key}.{name}",
                    f"is {values}",
                    "give steps, width and fraction of blank cells, such as [128, 64, 0.5]",
                )
        super().check(info)

    def group_names(self) -> dict[str, str]:
        variants = self.settings.variants
        trained = next(iter(variants), "")
        names = {}
        for name, (steps, width, blanks) in sorted(variants.items(), key=lambda item: item[1]):
            if self.settings.dimensions == 2:
                cells = f"{width:g} \N{MULTIPLICATION SIGN} {width:g}"
            else:
                cells = f"{width:g}"
            mark = f", {TRAINED}" if name == trained else ""
            names[name] = f"{steps:g} steps on {cells} cells ({100 * blanks:g} % blank{mark})"
        return names

    def generators(self) -> dict[str, Generator]:
        settings = self.settings
        same = {key: getattr(settings, key) for key in ("dimensions", "objects", "longest_run")}
        return {
            name: synthetic.GridNavigation(
                steps=int(steps), width=int(width), blank_probability=blanks, **same
            )
            for name, (steps, width, blanks) in settings.variants.items()
        }

    def notes(self, blanks: dict[str, float]) -> list[str]:
        names = self.group_names()
        fractions = "; ".join(
            f"{100 * blanks[name]:.1f} % for {shown}" for name, shown in names.items()
        )
        return [f"Accuracy of always answering blank: {fractions}."]
