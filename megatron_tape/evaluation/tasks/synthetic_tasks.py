"""Tasks on the sequences of the generators in `synthetic`, for models trained with
`data.generator`.

A task has the name of its generator. One forward pass reads the whole sequence, including the
correct answers. A predicted token is correct if it is the answer, given the correct tokens before
it. Greedy decoding generates a correct answer exactly if all its tokens are correct here, so exact
match is the same as with generation.
"""

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
from megatron_tape.evaluation.results import TaskResult
from megatron_tape.evaluation.score_pictures import fraction_maps, pictures_by_group
from megatron_tape.evaluation.statistics import fraction_score, ratio_score
from megatron_tape.evaluation.task import (
    EvaluatedModel,
    ModelInfo,
    Picture,
    Summary,
    Task,
    TaskResults,
    Unit,
    Value,
    Values,
)
from megatron_tape.synthetic import EVALUATION, Generator, sample_random
from megatron_tape.text import counted

SEQUENCES_PER_UNIT = 100
"""Maximum number of sequences of a unit of `Variants`."""
TRAINED = "as trained"
"""Marks the group with the sizes of the training in names for readers."""
INDEX_FACTOR = 10**6
"""Factor that makes the sample index of every sum unique. The number of digits of an operand and
the number of samples are smaller than the factor.
"""


def correct_answers(
    model: EvaluatedModel, sequences: Sequence[tuple[np.ndarray, np.ndarray]], batch_size: int
) -> list[np.ndarray]:
    """Return for each sequence a mask (A,) of its A answer tokens that the model predicts
    correctly.

    `sequences` are pairs of token ids (N,) and a mask (N,) of the answers among them.
    """
    import torch

    masks = []
    for start in range(0, len(sequences), batch_size):
        batch = sequences[start : start + batch_size]
        # Sequences of a batch may have different lengths, such as sums with and without a carry.
        padded = np.zeros((len(batch), max(len(tokens) for tokens, _ in batch)), dtype=np.int64)
        for row, (tokens, _) in zip(padded, batch):
            row[: len(tokens)] = tokens
        # Padding after a sequence does not change the logits before it. The model does not read the
        # last token, since no token follows that it could predict.
        likeliest = model.logits(torch.from_numpy(padded[:, :-1])).argmax(-1).numpy()
        for predicted, (tokens, answers) in zip(likeliest, batch):
            # The logits at position i predict token i + 1.
            is_correct = predicted[: len(tokens) - 1] == tokens[1:]
            masks.append(is_correct[answers[1:]])
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

    def random(self, index: int) -> Any:
        """Return the random generator of a sample, which differs from those of training."""
        return sample_random(self.settings.seed, EVALUATION, index)


class Addition(SyntheticTask):
    """Exact match of sums for each pair of operand lengths."""

    name = "addition"
    Settings = AdditionSettings

    def check(self, info: ModelInfo) -> None:
        """Raise ConfigError if no length is tested, or if the model's vocabulary is too small."""
        if not self.lengths:
            raise ConfigError(
                self.key("step"),
                f"is {self.settings.step}, but the longest operand has {self.longest} digits",
                f"set it to at most {self.longest}",
            )
        self.check_generator(self.sums, info)

    @property
    def longest(self) -> int:
        """Number of digits of the longest operand."""
        return self.settings.longest or 2 * self.settings.digits

    @property
    def sums(self) -> synthetic.Addition:
        """The generator of sums."""
        return synthetic.Addition(digits=self.longest, hints=self.settings.hints)

    @property
    def lengths(self) -> list[int]:
        """Evaluated numbers of digits of an operand."""
        return list(range(self.settings.step, self.longest + 1, self.settings.step))

    def group_names(self) -> dict[str, str]:
        """Return names with the sizes of the sequences, from small to large."""
        trained = self.settings.digits
        longest = self.longest
        names = {f"up to {trained} digits": f"operands up to {trained} digits ({TRAINED})"}
        if longest > trained:
            names[f"beyond {trained} digits"] = f"operands beyond {trained} digits"
            names[f"up to {longest} digits"] = f"all operands up to {longest} digits"
        return names

    def units(self, model: EvaluatedModel) -> list[Unit]:
        """Return a unit for each length of the first operand."""
        # The cost is the number of tokens: two operands, and a sum as long as the longer one.
        return [
            Unit(str(first), sum(first + second + max(first, second) for second in self.lengths))
            for first in self.lengths
        ]

    def evaluate(self, unit: Unit, model: EvaluatedModel) -> Value:
        """Return `right`: for each length of the second operand, a list with 1 for each correct
        sum, else 0.
        """
        first = int(unit.key)
        sums = self.sums
        right = []
        for second in self.lengths:
            # Every pair of lengths and every sample has its own index, so its own random numbers.
            offset = (first * INDEX_FACTOR + second) * INDEX_FACTOR
            problems = [
                sums.problem(self.random(offset + sample), first, second)
                for sample in range(self.settings.samples)
            ]
            masks = correct_answers(model, problems, self.settings.batch_size)
            # A sum is correct if all its digits are.
            right.append([int(mask.all()) for mask in masks])
        return {"right": right}

    def summarize(self, values: Values, info: ModelInfo) -> Summary:
        """Return the fraction of correct sums within and beyond the lengths of training."""
        trained = self.settings.digits
        lengths = np.array(self.lengths)
        # 0 or 1 for each length of the first operand, length of the second operand, and sample.
        right = np.array([values[str(first)]["right"] for first in self.lengths])
        # Whether both operands are within the trained length: a row for each length of the first
        # operand, a column for each length of the second.
        within = np.maximum.outer(lengths, lengths) <= trained
        # The pairs of lengths that belong to each group, as such matrices of booleans.
        groups = {f"up to {self.longest} digits": np.ones_like(within)}
        # If all operands are within the trained length, or all beyond it, there is only one group.
        if within.any() and not within.all():
            groups |= {f"up to {trained} digits": within, f"beyond {trained} digits": ~within}

        scores = []
        for group, cells in groups.items():
            correct = int(right[cells].sum())
            scores.append(fraction_score("exact match", correct, right[cells].size, group=group))
        accuracy = right.mean(-1).tolist()
        return Summary(scores, {"digits": trained, "lengths": self.lengths, "accuracy": accuracy})

    @classmethod
    def draw(cls, results: TaskResults) -> list[Picture]:
        """Return pictures of the fractions of correct answers."""

        def accuracy(result: TaskResult) -> tuple[list, list, list]:
            """Return the fractions of correct sums, and the lengths of both operands."""
            lengths = result.details["lengths"]
            return result.details["accuracy"], lengths, lengths

        digits = dict.fromkeys(str(result.details["digits"]) for result in results.values())
        title = f"Sums; trained up to {' and '.join(digits)} digits"
        labels = ("digits of the first operand", "digits of the second operand")
        return fraction_maps(results, accuracy, cls.name, title, labels)


class Variants(SyntheticTask):
    """Base class of tasks with variants: accuracy with the generator settings of training, and with
    others.
    """

    variants: str
    """Name of the setting with the variants."""
    example: str
    """A value of this setting for error messages."""

    def generators(self) -> dict[str, Generator]:
        """Return the generators by name of the variant. The first one has the settings of the
        training.
        """
        raise NotImplementedError

    def check(self, info: ModelInfo) -> None:
        """Raise ConfigError without variants, or if a generator does not fit to the model."""
        if not getattr(self.settings, self.variants):
            raise ConfigError(
                self.key(self.variants), "is empty", f"give a variant, such as {self.example}"
            )
        for generator in self.generators().values():
            self.check_generator(generator, info)

    def units(self, model: EvaluatedModel) -> list[Unit]:
        """Return units of at most `SEQUENCES_PER_UNIT` sequences of a variant; their keys are
        `VARIANT/FIRST INDEX`.
        """
        return [
            Unit(f"{name}/{start}", generator.length * len(self._indices(start)))
            for name, generator in self.generators().items()
            for start in range(0, self.settings.samples, SEQUENCES_PER_UNIT)
        ]

    def _indices(self, start: int) -> range:
        """Return the indices of the sequences of the unit that begins at `start`."""
        return range(start, min(self.settings.samples, start + SEQUENCES_PER_UNIT))

    def evaluate(self, unit: Unit, model: EvaluatedModel) -> Value:
        """Return the numbers of `right` and of all `answers` of each sequence, and of `blanks`
        among all answers.
        """
        name, _, start = unit.key.rpartition("/")
        generators = self.generators()
        generator: Any = generators[name]
        # Sample indices of different variants are 2**40 apart, so that no two samples have the same
        # random numbers.
        offset = list(generators).index(name) << 40
        sequences = [
            generator.sequence(self.random(offset + number)) for number in self._indices(int(start))
        ]
        masks = correct_answers(model, sequences, self.settings.batch_size)
        # The number of answers that are blank, which a model that always answers blank gets right.
        blanks = sum((tokens[answers] == generator.blank).sum() for tokens, answers in sequences)
        return {
            "right": [int(mask.sum()) for mask in masks],
            "answers": [len(mask) for mask in masks],
            "blanks": int(blanks),
        }

    def summarize(self, values: Values, info: ModelInfo) -> Summary:
        """Return the fractions of correct answers and of sequences with only correct answers, by
        variant.

        The answers of a sequence depend on each other, so the interval of the accuracy resamples
        whole sequences.
        """
        scores = []
        blanks = {}
        for name in self.generators():
            parts = [value for key, value in values.items() if key.rpartition("/")[0] == name]
            # The numbers of correct answers and of all answers, by sequence.
            right = np.concatenate([part["right"] for part in parts])
            answers = np.concatenate([part["answers"] for part in parts])
            count = len(right)
            faultless = int((right == answers).sum())  # sequences without an error
            scores += [
                ratio_score(
                    "accuracy",
                    right,
                    answers,
                    "higher",
                    group=name,
                    count=count,
                ),
                fraction_score("exact match", faultless, count, group=name),
            ]
            blanks[name] = sum(part["blanks"] for part in parts) / max(1, int(answers.sum()))
        if any(blanks.values()):
            return Summary(scores, {"blanks": blanks}, self.notes(blanks))
        return Summary(scores)

    def notes(self, blanks: dict[str, float]) -> list[str]:
        """Return sentences for the results, given the fraction of blank answers by variant."""
        return []

    @classmethod
    def draw(cls, results: TaskResults) -> list[Picture]:
        """Return pictures of the fractions of correct answers."""
        return pictures_by_group(
            results,
            lambda score: score.metric == "accuracy",
            cls.name,
            x_label="fraction of correct answers",
        )


class SelectiveCopy(Variants):
    """Selective copying with the number of blanks in training, with fewer blanks, and with more."""

    name = "selective_copy"
    Settings = SelectiveCopySettings
    variants = "blanks"
    example = "{IID: 128}"

    def group_names(self) -> dict[str, str]:
        """Return names with the sizes of the sequences, from small to large."""
        blanks = self.settings.blanks
        shown = sorted(blanks, key=blanks.__getitem__)
        names = {name: counted(blanks[name], "blank") for name in shown}
        # The first variant is that of the training. Before `check`, there may be no variant, so
        # that the loop does nothing.
        for trained in list(blanks)[:1]:
            names[trained] += f" ({TRAINED})"
        return names

    def generators(self) -> dict[str, Generator]:
        """Return the generator of each variant."""
        settings = self.settings
        return {
            name: synthetic.SelectiveCopy(
                copied=settings.copied, symbols=settings.symbols, blanks=blanks
            )
            for name, blanks in settings.blanks.items()
        }


class Recall(Variants):
    """Multi-query associative recall at several lengths; longer sequences have more pairs."""

    name = "recall"
    Settings = RecallSettings
    variants = "lengths"
    example = "[256]"

    def group_names(self) -> dict[str, str]:
        """Return names with the sizes of the sequences, from small to large."""
        return {
            f"{length} tokens": f"{length:,} tokens" for length in sorted(self.settings.lengths)
        }

    def generators(self) -> dict[str, Generator]:
        """Return the generator of each variant."""
        settings = self.settings
        return {
            f"{length} tokens": synthetic.Recall(
                keys=settings.keys, tokens_per_pair=settings.tokens_per_pair, tokens=length
            )
            for length in settings.lengths
        }


class GridNavigation(Variants):
    """Grid navigation as in training, and on denser and sparser maps. Only revisited cells are
    scored.
    """

    name = "grid_navigation"
    Settings = GridNavigationSettings
    variants = "variants"
    example = "{IID: [128, 64, 0.5]}"

    def check(self, info: ModelInfo) -> None:
        """Raise ConfigError if a variant does not consist of three valid numbers."""
        for name, values in self.settings.variants.items():
            # The first two, steps and width, must be whole numbers.
            if len(values) != 3 or any(value % 1 for value in values[:2]):
                raise ConfigError(
                    self.key(f"variants.{name}"),
                    f"is {values}",
                    "give steps, width and fraction of blank cells, such as [128, 64, 0.5]",
                )
        super().check(info)

    def group_names(self) -> dict[str, str]:
        """Return names with the sizes of the sequences, from small to large."""
        variants = self.settings.variants
        trained = next(iter(variants), "")
        names = {}
        # The values of variants are lists, so they are sorted by steps, then by width and blanks.
        for name in sorted(variants, key=variants.__getitem__):
            steps, width, blanks = variants[name]
            cells = " \N{MULTIPLICATION SIGN} ".join([f"{width:g}"] * self.settings.dimensions)
            trained_note = ""
            if name == trained:
                trained_note = f", {TRAINED}"
            blank = f"{100 * blanks:g} % blank{trained_note}"
            names[name] = f"{steps:g} steps on {cells} cells ({blank})"
        return names

    def generators(self) -> dict[str, Generator]:
        """Return the generator of each variant."""
        settings = self.settings
        return {
            name: synthetic.GridNavigation(
                steps=int(steps),
                width=int(width),
                blank_probability=blanks,
                dimensions=settings.dimensions,
                objects=settings.objects,
                longest_run=settings.longest_run,
            )
            for name, (steps, width, blanks) in settings.variants.items()
        }

    def notes(self, blanks: dict[str, float]) -> list[str]:
        """Return how often the answer blank would be correct."""
        fractions = [
            f"{100 * blanks[name]:.1f} % for {shown}" for name, shown in self.group_names().items()
        ]
        return [f"Accuracy of always answering blank: {'; '.join(fractions)}."]
