"""Passkey retrieval: a number hidden in irrelevant text, by context length and depth."""

from __future__ import annotations

import bisect
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from megatron_tape.config.values import Count
from megatron_tape.errors import ConfigError
from megatron_tape.evaluation.results import Score, TaskResult
from megatron_tape.evaluation.score_pictures import by_length, fraction_maps
from megatron_tape.evaluation.statistics import wilson
from megatron_tape.evaluation.task import HuggingFaceModel, ModelInfo, Picture, Summary, Task, Unit
from megatron_tape.evaluation.tasks.text_sources import chosen_lengths

TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them."
    " I will quiz you about the important information there."
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
QUESTION = "What is the pass key? The pass key is"
PUBLISHED_TOKENS = 10
"""Number of generated tokens with form landmark."""
_SEARCHED = 60
"""Number of characters before and after the estimated end of the filler that are tried as its end.
"""
_WORD = 16
"""Penalty in characters for ending the filler within a word, so that ends after words are tried
first.
"""
_COMPLETED = 20
"""Number of ends of the filler at which `_ENDINGS` are tried."""
_ENDINGS = (
    ".",
    "..",
    "...",
    " .",
    " a",
    " on",
    " and",
    " green",
    " blue.",
    "!",
    ", and",
    " x",
    " .. .",
    " a a",
    ":",
)
"""Texts appended to the filler if cutting it anywhere does not give the exact number of tokens."""
MORE_THAN_DIGITS = 3
"""Number of generated tokens in addition to one per digit, such as for a space before the number.
"""


@dataclass(kw_only=True)
class PasskeySettings:
    """Accuracy of repeating a number that is hidden in irrelevant text, by context length and
    depth.
    """

    lengths: list[int] | None = None
    """Context lengths in tokens, including prompt and answer. Default: the training length, half of
    it and a quarter of it."""
    depths: Count = 10
    """Number of depths of the key, evenly spaced from the beginning of the filler (0) to its end
    (1). With form landmark, depths are random, and this is the number of equal ranges of depths in
    the heat map."""
    samples: Count = 10
    """Number of prompts for each length and depth."""
    digits: Annotated[int, Field(ge=1, le=18)] = 5
    """Number of digits of the key. With form landmark, keys have one to five digits instead."""
    form: Literal["exact", "landmark"] = "exact"
    """exact makes prompts with exact lengths and depths. landmark makes the prompts of Landmark
    attention and LongLoRA, with lengths in characters and random depths, for comparison with tables
    in these papers."""
    seed: int = 0
    """Seed of the keys and, with form landmark, of the depths."""
    batch_size: Count = 1
    """Number of prompts per batch."""


class Passkey(Task):
    """The fraction of prompts for which the model generates the key, by length and depth.

    Values of units contain, for each prompt: the `keys`, the generated `answers`, whether they are
    `right` (0 or 1), and the numbers of `tokens` of the prompts.
    """

    name = "passkey"
    Settings = PasskeySettings
    generates = True

    def check(self, info: ModelInfo) -> None:
        settings = self.settings
        self.require("lm_eval")
        shortest = self._lengths(info)[0]
        if settings.form == "landmark" and not published_filler(shortest):
            raise ConfigError(
                (self.key("lengths"), self.key("form")),
                f"has {shortest}, but form landmark requires at least 274 tokens",
                "remove that length, or set form to exact",
            )

    def units(self, model: HuggingFaceModel) -> list[Unit]:
        settings = self.settings
        lengths = self._lengths(model.info)
        if settings.form == "exact":
            shortest = self._prompts(model, lengths[0]).smallest("9" * settings.digits) + self._room
            if lengths[0] < shortest:
                raise ConfigError(
                    self.key("lengths"),
                    f"has {lengths[0]}, but a prompt without filler and its answer have {shortest}"
                    " tokens",
                    f"set lengths of at least {shortest}",
                )
            keys = [(length, depth) for length in lengths for depth in range(settings.depths)]
            return [
                Unit(f"{length}/{depth}", cost=settings.samples * length) for length, depth in keys
            ]
        self._published = self._sorted_into_depths(lengths)
        return [
            Unit(key, cost=int(key.split("/")[0]) * len(prompts))
            for key, prompts in sorted(self._published.items())
        ]

    def evaluate(self, unit: Unit, model: HuggingFaceModel) -> dict[str, Any]:
        from megatron_tape.evaluation.tasks.harness import own_task, run

        if self.settings.form == "exact":
            length, depth = (int(part) for part in unit.key.split("/"))
            prompts = self._prompts(model, length)
            source = random.Random(f"{self.settings.seed} {unit.key}")
            depths = self._depths()
            hidden = [
                prompts.make(depths[depth], random_key(source, self.settings.digits))
                for _ in range(self.settings.samples)
            ]
        else:
            hidden = self._published[unit.key]
        tokens = [_count(model, one.prompt) for one in hidden]
        task = own_task(_configuration(hidden, self._room))
        # The longest prompt fits exactly. With form exact, this is the length of the unit.
        (outcome,) = run(
            model.harness(self.settings.batch_size, max(tokens) + self._room), task, seed=unit.key
        )
        return {
            "keys": [one.key for one in hidden],
            "answers": outcome["responses"],
            "right": [int(right) for right in outcome["values"]["right,none"]],
            "tokens": tokens,
        }

    def summarize(self, values: dict[str, dict[str, Any]], info: ModelInfo) -> Summary:
        lengths = self._lengths(info)
        depths = range(self.settings.depths)
        scores = []
        columns = []
        for length in lengths:
            cells = [
                values[key]["right"] if (key := f"{length}/{depth}") in values else []
                for depth in depths
            ]
            columns.append([sum(right) / len(right) if right else None for right in cells])
            right = sum(cells, [])
            fraction = sum(right) / len(right)
            interval = wilson(sum(right), len(right))
            scores.append(
                Score("accuracy", fraction, "higher", *interval, length, count=len(right))
            )
        accuracy = [list(row) for row in zip(*columns)]
        details = {"lengths": lengths, "depths": self._depths(), "accuracy": accuracy}
        return Summary(scores, details, self._notes(lengths, values))

    @classmethod
    def draw(cls, results: dict[str, TaskResult]) -> list[Picture]:
        def names(result: TaskResult) -> tuple[list[str], list[str]]:
            details = result.details
            return [f"{depth:.0%}" for depth in details["depths"]], [
                f"{length:,}" for length in details["lengths"]
            ]

        labels = "depth of the key", "context length (tokens)"
        title = "Passkey retrieval by depth and length"
        return [
            *fraction_maps(
                results, lambda result: result.details["accuracy"], names, cls.name, title, labels
            ),
            *by_length(results, "accuracy", "passkey-lengths", "accuracy"),
        ]

    @property
    def _room(self) -> int:
        """Number of generated tokens."""
        if self.settings.form == "landmark":
            return PUBLISHED_TOKENS
        return self.settings.digits + MORE_THAN_DIGITS

    def _lengths(self, info: ModelInfo) -> list[int]:
        return chosen_lengths(self.settings.lengths, info, self.key("lengths"))

    def _depths(self) -> list[float]:
        """Return the depths (0 to 1) of the heat map's rows. With form landmark, these are the
        starts of ranges.
        """
        count = self.settings.depths
        if self.settings.form == "landmark":
            return [index / count for index in range(count)]
        if count > 1:
            return [index / (count - 1) for index in range(count)]
        return [0.5]

    def _prompts(self, model: HuggingFaceModel, length: int) -> ExactPrompts:
        return ExactPrompts(lambda text: _count(model, text), length - self._room)

    def _sorted_into_depths(self, lengths: list[int]) -> dict[str, list[Hidden]]:
        """Return the prompts of form landmark by unit key, `LENGTH/RANGE`: ranges of depths are
        counted from 0.
        """
        found: dict[str, list[Hidden]] = {}
        count = self.settings.depths * self.settings.samples
        first = self.settings.seed
        for length in lengths:
            for seed in range(first, first + count):
                hidden, depth = published_prompt(length, seed)
                found.setdefault(f"{length}/{int(depth * self.settings.depths)}", []).append(hidden)
        return found

    def _notes(self, lengths: list[int], values: dict[str, dict[str, Any]]) -> list[str]:
        settings = self.settings
        if settings.form == "exact":
            keys = 9 * 10 ** (settings.digits - 1)
            return [
                "Prompt and answer together have exactly as many tokens as the length,"
                f" {self._room} of them for the answer. The first generated number counts. A random"
                f" guess is correct in 1 of {keys:,} cases."
            ]
        means = []
        for length in lengths:
            tokens = [
                number
                for key, value in values.items()
                if key.startswith(f"{length}/")
                for number in value["tokens"]
            ]
            means.append(f"{sum(tokens) / len(tokens):,.0f} for {length:,}")
        return [
            "Form landmark (Landmark attention, LongLoRA): lengths are in characters, 3.75 per"
            f" token, so the mean number of tokens differs from the length: {', '.join(means)}."
            " Depths are random. Keys have one to five digits and are compared as text, while"
            " LongLoRA compares token ids."
        ]


def _configuration(hidden: list[Hidden], room: int) -> dict[str, Any]:
    def documents(**_: Any) -> dict[str, Any]:
        import datasets

        rows = [{"prompt": one.prompt, "key": one.key} for one in hidden]
        return {"test": datasets.Dataset.from_list(rows)}

    return {
        "task": "passkey",
        "custom_dataset": documents,
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "prompt",
        "doc_to_target": "key",
        "generation_kwargs": {"until": [], "max_gen_toks": room, "do_sample": False},
        "process_results": lambda document, answers: {
            "right": int(is_correct(answers[0], document["key"]))
        },
        "metric_list": [{"metric": "right", "aggregation": "mean", "higher_is_better": True}],
    }


def _count(model: HuggingFaceModel, text: str) -> int:
    """Return the number of tokens of a text, including the beginning-of-text token."""
    return len(model.tokenizer(text, verbose=False)["input_ids"])


@dataclass(frozen=True)
class Hidden:
    """A prompt, and the key that is hidden in it."""

    prompt: str
    key: str


class ExactPrompts:
    """Makes prompts with an exact number of tokens, and with the key at a given depth of the
    filler.

    The end of the filler is chosen so that the number of tokens is exact, in most cases after a
    word. The whole prompt is tokenized for that, since tokens may extend across the end of the
    filler.
    """

    def __init__(self, count_tokens: Callable[[str], int], tokens: int):
        """Prepare prompts of `tokens` tokens; `count_tokens` returns the number of tokens of a text
        as model input.
        """
        self._count = count_tokens
        self._tokens = tokens
        repeats = 2 + tokens * 32 // len(FILLER)
        self._filler = " ".join([FILLER] * repeats)
        self._starts = [0, *(match.end() for match in re.finditer(r"\. ", self._filler))]
        self._characters = 4 * tokens
        """End of the filler in the last prompt, in characters: the first guess for the next prompt.
        """

    def smallest(self, key: str) -> int:
        return self._count(self._build(0, 0.0, key))

    def make(self, depth: float, key: str) -> Hidden:
        """Return a prompt with the key after a fraction `depth` (0 to 1) of the filler's sentences.

        Raises ConfigError if no text of the exact length is found.
        """
        end = self._characters
        characters_per_token = 4.0
        for _ in range(8):
            missing = self._tokens - self._count(self._build(end, depth, key))
            if abs(missing) <= 2:
                break
            next_end = min(max(0, end + round(missing * characters_per_token)), len(self._filler))
            if next_end == end:
                break
            gained = self._count(self._build(next_end, depth, key)) - (self._tokens - missing)
            if gained:
                characters_per_token = max(0.25, (next_end - end) / gained)
            end = next_end
        near = range(max(0, end - _SEARCHED), min(end + _SEARCHED, len(self._filler)) + 1)
        short: dict[int, int] = {}
        for candidate in sorted(near, key=lambda at: abs(at - end) + self._within_word(at) * _WORD):
            prompt = self._build(candidate, depth, key)
            missing = self._tokens - self._count(prompt)
            if missing == 0:
                self._characters = candidate
                return Hidden(prompt, key)
            if missing > 0:
                short[candidate] = missing
        # Cutting cannot give every length: each end of a word may change the number of tokens by
        # two.
        for candidate in sorted(short, key=short.__getitem__)[:_COMPLETED]:
            for ending in _ENDINGS:
                prompt = self._build(candidate, depth, key, ending)
                if self._count(prompt) == self._tokens:
                    return Hidden(prompt, key)
        problem = (
            f"require a prompt of exactly {self._tokens:,} tokens, but none was found for this"
            " model's tokenizer"
        )
        raise ConfigError("passkey.lengths", problem, "choose other lengths")

    def _within_word(self, end: int) -> bool:
        return end > 0 and (self._filler[end - 1] == " " or self._filler[end : end + 1].isalpha())

    def _build(self, end: int, depth: float, key: str, ending: str = "") -> str:
        sentences = bisect.bisect_right(self._starts, end) - 1
        split = self._starts[round(depth * sentences)]
        parts = [
            TASK,
            self._filler[:split].rstrip(),
            _information(key),
            self._filler[split:end] + ending,
            QUESTION,
        ]
        return "\n".join(part for part in parts if part)


def random_key(source: random.Random, digits: int) -> str:
    """Return a random number with exactly `digits` digits, as text."""
    return str(source.randrange(10 ** (digits - 1), 10**digits))


def published_filler(length: int) -> int:
    """Return the number of characters of filler in LongLoRA for a context of `length` tokens."""
    return int(3.75 * length // 1024 * 1024)


def published_prompt(length: int, seed: int) -> tuple[Hidden, float]:
    """Return the prompt of Landmark attention as LongLoRA's script makes it, and the depth (0 to 1)
    of the key.

    The prompt has about `length` tokens, the key has one to five digits, and the depth is random.

    Sources: Mohtashami and Jaggi, Landmark Attention (2023), `llama/run_test.py`; Chen et al.,
    LongLoRA (2023), `passkey_retrivial.py`, which draws the same numbers from NumPy's generator.
    """
    source = np.random.RandomState(seed)
    characters = published_filler(length)
    before = int(source.randint(0, characters))
    filler = " ".join([FILLER] * (1 + characters // len(FILLER)))
    key = str(source.randint(1, 50000))
    parts = [TASK, filler[:before], _information(key), filler[: characters - before], QUESTION]
    return Hidden("\n".join(parts), key), before / characters


def is_correct(answer: str, key: str) -> bool:
    """Return whether the first number in a generated text equals the key."""
    number = re.search(r"\d+", answer)
    return number is not None and number.group() == key


def _information(key: str) -> str:
    return f"The pass key is {key}. Remember it. {key} is the pass key."
