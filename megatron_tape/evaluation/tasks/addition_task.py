"""The task `addition`: exact match of sums, for every pair of operand lengths up to twice the trained one.

The sums are those of `synthetic.addition`, on which `data.generator: {task: addition}` trains: all digits reversed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_tape.config.evaluation import AdditionSettings
from megatron_tape.errors import refuse
from megatron_tape.evaluation.results import Score, TaskResult
from megatron_tape.evaluation.score_pictures import share_maps
from megatron_tape.evaluation.statistics import wilson
from megatron_tape.evaluation.task import LanguageModel, ModelInfo, Picture, Summary, Unit
from megatron_tape.evaluation.tasks.synthetic_tasks import SyntheticTask, right_answers
from megatron_tape.synthetic import EVALUATION, random_of
from megatron_tape.synthetic import Addition as Sums

MOST = 10**6
"""Digits and samples are below this, so that every sum has a number of its own."""


class Addition(SyntheticTask):
    """Exact match of sums, all digits reversed, by the lengths of their operands."""

    name = "addition"
    Settings = AdditionSettings

    def check(self, info: ModelInfo) -> None:
        self.refuse_below(digits=1, longest=1, step=1, samples=1, batch_size=1)
        self.check_seed()
        for name in ("digits", "longest", "samples"):
            value = getattr(self.settings, name)
            refuse(value is not None and value >= MOST, self.key(name), f"is {value}", f"set it to less than {MOST}")
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
    def sums(self) -> Sums:
        return Sums(digits=self.longest, hints=self.settings.hints)

    @property
    def lengths(self) -> list[int]:
        return list(range(self.settings.step, self.longest + 1, self.settings.step))

    def units(self, model: LanguageModel) -> list[Unit]:
        # The work grows with the tokens: two operands, and a sum as long as the longer of them.
        return [
            Unit(str(first), sum(first + second + max(first, second) for second in self.lengths))
            for first in self.lengths
        ]

    def evaluate(self, unit: Unit, model: LanguageModel) -> dict[str, Any]:
        """Return which sums are right, by the length of the second operand: `right`, a list of lists of 0 and 1."""
        first, sums = int(unit.key), self.sums
        right = []
        for second in self.lengths:
            numbers = [(first * MOST + second) * MOST + sample for sample in range(self.settings.samples)]
            problems = [
                sums.problem(random_of(self.settings.seed, EVALUATION, number), first, second) for number in numbers
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
        return share_maps(results, lambda result: result.details["accuracy"], names, cls.name, title, labels)
