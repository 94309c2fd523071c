"""Passkey retrieval: a number hidden in irrelevant text, by context length and depth."""

import random
import re

import numpy as np

from megatron_tape.config.evaluation import PasskeySettings
from megatron_tape.errors import ConfigError
from megatron_tape.evaluation.results import TaskResult
from megatron_tape.evaluation.score_pictures import fraction_maps, pictures_by_length
from megatron_tape.evaluation.statistics import fraction_score
from megatron_tape.evaluation.task import (
    HuggingFaceModel,
    ModelInfo,
    Picture,
    Summary,
    Task,
    TaskResults,
    Unit,
    Value,
    Values,
)

TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them."
    " I will quiz you about the important information there.\n"
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
QUESTION = "\nWhat is the pass key? The pass key is"
REPEATS = 100
"""Number of repetitions of the filler that are encoded as one text."""
MORE_THAN_DIGITS = 3
"""Number of generated tokens in addition to one per digit, such as for a space before the number.
"""


class Passkey(Task):
    """The fraction of prompts for which the model generates the key, by length and depth.

    Values of units contain, for each prompt: the `keys`, the generated `answers`, and whether they
    are `right` (0 or 1).
    """

    name = "passkey"
    Settings = PasskeySettings
    generates = True
    # A prompt without filler and its answer have about 90 tokens.
    shortest = 128

    def check(self, info: ModelInfo) -> None:
        """Raise ConfigError for invalid lengths."""
        self.context_lengths(info)

    def units(self, model: HuggingFaceModel) -> list[Unit]:
        """Return a unit for each length and depth, with the key `LENGTH/INDEX OF THE DEPTH`."""
        lengths = self.context_lengths(model.info)
        # Raises ConfigError before any unit runs if the shortest length has no room for a key.
        self.prompt(model, lengths[0], depth=0.0, key="9" * self.settings.digits)
        # The cost is the number of tokens.
        return [
            Unit(f"{length}/{index}", self.settings.samples * length)
            for length in lengths
            for index in range(self.settings.depths)
        ]

    def evaluate(self, unit: Unit, model: HuggingFaceModel) -> Value:
        """Let the model answer the prompts of one length and depth."""
        length, index = map(int, unit.key.split("/"))
        depth = self._depths()[index]
        digits = self.settings.digits
        # Keys do not depend on other units, so that an evaluation can continue anywhere.
        generator = random.Random(f"{self.settings.seed} {unit.key}")
        keys = []
        answers = []
        for _ in range(self.settings.samples):
            # A key of 5 digits is at least 10000, so that its first digit is not 0.
            key = str(generator.randrange(10 ** (digits - 1), 10**digits))
            answer, _ = model.answer(self.prompt(model, length, depth, key), self._answer_tokens)
            keys.append(key)
            answers.append(answer)
        right = [int(is_correct(answer, key)) for answer, key in zip(answers, keys)]
        return {"keys": keys, "answers": answers, "right": right}

    def prompt(self, model: HuggingFaceModel, length: int, depth: float, key: str) -> list[int]:
        """Return the token ids of a prompt that has `length` tokens together with its answer.

        The key comes after a fraction `depth` (0 to 1) of the filler. The parts are encoded
        separately, and the filler is cut between tokens, so that the length is exact with any
        tokenizer.
        """
        task = [*model.bos, *model.encode(TASK)]
        information = model.encode(
            f"\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
        )
        question = model.encode(QUESTION)
        shortest = len(task) + len(information) + len(question) + self._answer_tokens
        if length < shortest:
            raise ConfigError(
                self.key("lengths"),
                f"has {length}, but a prompt without filler and its answer have {shortest} tokens",
                f"set lengths of at least {shortest}",
            )
        # `np.resize` repeats or cuts the tokens to this number. Encoding a text of a million tokens
        # would take long.
        encoded = model.encode(" ".join([FILLER] * REPEATS))
        filler = np.resize(encoded, length - shortest).tolist()
        before = round(depth * len(filler))  # the number of filler tokens before the key
        return [*task, *filler[:before], *information, *filler[before:], *question]

    def summarize(self, values: Values, info: ModelInfo) -> Summary:
        """Return the accuracy by length, and by length and depth."""
        lengths = self.context_lengths(info)
        samples = self.settings.samples
        scores = []
        # Accuracies by depth, for each length.
        columns = []
        for length in lengths:
            right = [
                sum(values[f"{length}/{index}"]["right"]) for index in range(self.settings.depths)
            ]
            columns.append([count / samples for count in right])
            total = samples * len(right)
            scores.append(fraction_score("accuracy", sum(right), total, length=length))
        details = {
            "lengths": lengths,
            "depths": self._depths(),
            "accuracy": [list(row) for row in zip(*columns)],  # a row for each depth
        }
        note = (
            "Prompt and answer together have exactly as many tokens as the length,"
            f" {self._answer_tokens} of them for the answer. The first generated number counts. A"
            f" random guess is correct in 1 of {9 * 10 ** (self.settings.digits - 1):,} cases."
        )
        return Summary(scores, details, [note])

    @classmethod
    def draw(cls, results: TaskResults) -> list[Picture]:
        """Return a heat map by depth and length, and curves by length."""

        def accuracy(result: TaskResult) -> tuple[list, list, list]:
            """Return the accuracies by depth and length, and the names of depths and lengths."""
            rows = [f"{depth:.0%}" for depth in result.details["depths"]]
            columns = [f"{length:,}" for length in result.details["lengths"]]
            return result.details["accuracy"], rows, columns

        return [
            *fraction_maps(
                results,
                accuracy,
                cls.name,
                title="Passkey retrieval by depth and length",
                axes_labels=("depth of the key", "context length (tokens)"),
            ),
            *pictures_by_length(
                results, "accuracy", file_name="passkey-lengths", y_label="accuracy"
            ),
        ]

    @property
    def _answer_tokens(self) -> int:
        """Number of generated tokens."""
        return self.settings.digits + MORE_THAN_DIGITS

    def _depths(self) -> list[float]:
        """Return the depths of the key, from 0 to 1."""
        if self.settings.depths == 1:
            return [0.5]
        return np.linspace(0, 1, self.settings.depths).tolist()


def is_correct(answer: str, key: str) -> bool:
    """Return whether the first number in a generated text equals the key."""
    number = re.search(r"\d+", answer)
    return number is not None and number.group() == key
