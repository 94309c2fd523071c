"""Multi-query associative recall ("Zoology", Arora et al., 2023): key-value pairs, then queries.

A query repeats the key of a pair, followed by the value that the model has to recall. Every
sequence has new pairs, so they cannot be memorized.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatron_tape.errors import ConfigError
from megatron_tape.synthetic.generator import Generator

_GAP_POWER = 0.01
"""Zoology's constant for the positions of queries. The tokens after the pairs form slots of two.
Slot x (from 0) holds a query with a probability proportional to (x + 1) ** (_GAP_POWER - 1), so
most queries come soon after the pairs."""


@dataclass(frozen=True, kw_only=True)
class Recall(Generator):
    """Sequences of key-value pairs, then queries in random order, separated by blanks.

    The values in the queries are the answers. Token ids: the keys from 0 on, then as many values,
    then the blank.
    """

    task: Literal["recall"] = "recall"
    """The name of the task."""
    tokens: int = 256
    """Number of tokens of the longest sequence."""
    shortest: int | None = None
    """Number of tokens of the shortest sequence. Sequence lengths are this number times 1, 2, 4 and
    so on up to `tokens`, all equally likely. Default: all sequences have `tokens` tokens."""
    tokens_per_pair: int = 16
    """Number of tokens of a sequence divided by its number of pairs; at least 4."""
    keys: int = 128
    """Number of distinct keys, and of distinct values."""

    def check(self) -> None:
        self._require_at_least(tokens_per_pair=4)
        least = self.tokens_per_pair
        self._require_at_least(tokens=least)
        shortest = self.shortest
        if shortest is not None and not least <= shortest <= self.tokens:
            raise ConfigError(
                "shortest",
                f"is {shortest}",
                f"set it to a number from {least} (tokens_per_pair) to {self.tokens} (tokens)",
            )
        pairs = self.tokens // self.tokens_per_pair
        if self.keys < pairs:
            raise ConfigError(
                "keys",
                f"is {self.keys}, but each of the {pairs} pairs of the longest sequence needs a"
                " different key",
                f"set it to at least {pairs}",
            )

    @property
    def vocab_size(self) -> int:
        return 2 * self.keys + 1

    @property
    def length(self) -> int:
        return self.tokens // 2 * 2  # all tokens are in slots of two

    @property
    def blank(self) -> int:
        """Id of the token between queries."""
        return 2 * self.keys

    def sequence(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draw a sequence of one of the lengths."""
        length = self.tokens
        if self.shortest is not None:
            # The number of lengths `shortest` times 1, 2, 4, ... up to `tokens`. The shift below
            # multiplies `shortest` by one of these powers of 2.
            length_count = (self.tokens // self.shortest).bit_length()
            length = self.shortest << int(random.integers(length_count))

        # All keys of a sequence differ, so that each query has one answer.
        pairs = length // self.tokens_per_pair
        keys = random.permutation(self.keys)[:pairs]
        values = self.keys + random.integers(self.keys, size=pairs)
        key_values = np.stack([keys, values], axis=1)

        # One row per slot of two tokens.
        slots = np.full((length // 2, 2), self.blank)
        slots[:pairs] = key_values
        # Each pair is queried once, in a random slot after the pairs; see _GAP_POWER.
        weights = np.arange(1, len(slots) - pairs + 1) ** (_GAP_POWER - 1)
        weights /= weights.sum()
        queries = pairs + random.choice(len(weights), pairs, replace=False, p=weights)
        slots[queries] = key_values
        answers = np.zeros(slots.shape, dtype=bool)
        answers[queries, 1] = True
        return slots.reshape(-1), answers.reshape(-1)
