"""Texts that hide a passkey, of an exact number of tokens or as published."""

from __future__ import annotations

import bisect
import random
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatron_tape.errors import ConfigError

TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz you "
    "about the important information there."
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
QUESTION = "What is the pass key? The pass key is"
PUBLISHED_TOKENS = 10
"""What the published form generates."""
_SEARCHED = 60
"""Characters around the estimated end of the filler among which one is sought that gives the exact length."""
_WORD = 16
"""How many characters farther away a place after a word may be than one within a word, and is tried before."""
_COMPLETED = 20
_ENDINGS = (".", "..", "...", " .", " a", " on", " and", " green", " blue.", "!", ", and", " x", " .. .", " a a", ":")
"""What may follow the filler where no end of it gives the exact length, and how many of its ends are tried with it."""


@dataclass(frozen=True)
class Hidden:
    """A prompt, and the key that the model has to find in it."""

    prompt: str
    key: str


class ExactPrompts:
    """Prompts that a tokenizer turns into an exact number of tokens, with the key at a set depth of the filler.

    The filler ends within a sentence, in most cases after a word, where that gives the length: what is counted is the
    whole text's tokens, so that merging across the cut cannot change the number.
    """

    def __init__(self, count_tokens: Callable[[str], int], tokens: int):
        """`count_tokens` counts the tokens of a text as the model gets it; prompts have `tokens` of them."""
        self._count, self._tokens = count_tokens, tokens
        repeats = 2 + tokens * 32 // len(FILLER)
        self._filler = " ".join([FILLER] * repeats)
        self._starts = [0, *(match.end() for match in re.finditer(r"\. ", self._filler))]
        self._characters = 4 * tokens
        """Where the last prompt's filler ended, which is close to where the next one's has to."""

    def smallest(self, key: str) -> int:
        return self._count(self._build(0, 0.0, key))

    def make(self, depth: float, key: str) -> Hidden:
        """Return the prompt with the key behind the share `depth`, 0 to 1, of the filler's sentences.

        Raises ConfigError if no text of the exact length is found.
        """
        end, best = self._characters, 4.0
        for _ in range(8):
            missing = self._tokens - self._count(self._build(end, depth, key))
            if abs(missing) <= 2:
                break
            moved = min(max(0, end + round(missing * best)), len(self._filler))
            if moved == end:
                break
            gained = self._count(self._build(moved, depth, key)) - (self._tokens - missing)
            best = max(0.25, (moved - end) / gained) if gained else best
            end = moved
        near = range(max(0, end - _SEARCHED), min(end + _SEARCHED, len(self._filler)) + 1)
        short: dict[int, int] = {}
        for candidate in sorted(near, key=lambda place: abs(place - end) + self._within_word(place) * _WORD):
            prompt = self._build(candidate, depth, key)
            missing = self._tokens - self._count(prompt)
            if missing == 0:
                self._characters = candidate
                return Hidden(prompt, key)
            if missing > 0:
                short[candidate] = missing
        # No end of the filler gives every length: a word may have two tokens in whatever way it is cut.
        for candidate in sorted(short, key=short.__getitem__)[:_COMPLETED]:
            for ending in _ENDINGS:
                prompt = self._build(candidate, depth, key, ending)
                if self._count(prompt) == self._tokens:
                    return Hidden(prompt, key)
        problem = f"need a text of exactly {self._tokens:,} tokens, and none is found with this model's tokenizer"
        raise ConfigError("passkey.lengths", problem, "choose another length")

    def _within_word(self, end: int) -> bool:
        return end > 0 and (self._filler[end - 1] == " " or self._filler[end : end + 1].isalpha())

    def _build(self, end: int, depth: float, key: str, ending: str = "") -> str:
        sentences = bisect.bisect_right(self._starts, end) - 1
        split = self._starts[round(depth * sentences)]
        parts = [TASK, self._filler[:split].rstrip(), _information(key), self._filler[split:end] + ending, QUESTION]
        return "\n".join(part for part in parts if part)


def random_key(source: random.Random, digits: int) -> str:
    """Return a number of exactly so many digits."""
    return str(source.randrange(10 ** (digits - 1), 10**digits))


def published_filler(length: int) -> int:
    """Return how many characters of filler LongLoRA takes for a context of `length` tokens."""
    return int(3.75 * length // 1024 * 1024)


def published_prompt(length: int, seed: int) -> tuple[Hidden, float]:
    """Return the prompt of Landmark attention as LongLoRA's script makes it, and the key's depth, 0 to 1.

    Its length in tokens is only near `length`, its key has one to five digits, and its depth is random.

    Sources: Mohtashami and Jaggi, Landmark Attention (2023), `llama/run_test.py`; Chen et al., LongLoRA (2023),
    `passkey_retrivial.py`, whose draws from NumPy's generator these are.
    """
    source, characters = np.random.RandomState(seed), published_filler(length)
    before = int(source.randint(0, characters))
    filler = " ".join([FILLER] * (1 + characters // len(FILLER)))
    key = str(source.randint(1, 50000))
    parts = [TASK, filler[:before], _information(key), filler[: characters - before], QUESTION]
    return Hidden("\n".join(parts), key), before / characters


def is_right(answer: str, key: str) -> bool:
    """Return whether the first number in a generated text is the key."""
    number = re.search(r"\d+", answer)
    return number is not None and number.group() == key


def _information(key: str) -> str:
    return f"The pass key is {key}. Remember it. {key} is the pass key."
