"""Multi-query associative recall ("Zoology", Arora et al., 2023): pairs of keys and values, then queries.

A query is a key of one of the pairs, followed by its value. Every sequence has its own pairs, so they cannot be
memorized.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatron_tape.errors import refuse
from megatron_tape.synthetic.generator import Generator

_GAP_POWER = 0.01
"""Zoology's value. Slot x (from 0) holds a query with a probability proportional to (x + 1) ** (this - 1), so most
queries come soon after the pairs."""


@dataclass(frozen=True, kw_only=True)
class Recall(Generator):
    """Pairs of a key and its value, then queries in another order with blanks between; their values are the answers.

    Tokens: the keys from 0 on, then the same number of values, then the blank.
    """

    task: Literal["recall"] = "recall"
    """The name of the task."""
    tokens: int = 256
    """Tokens of the longest sequence."""
    shortest: int | None = None
    """Tokens of the shortest sequence. Lengths are this times a power of two, at most `tokens`, each equally likely. By
    default, all sequences have `tokens`."""
    tokens_per_pair: int = 16
    """Tokens of a sequence per pair."""
    keys: int = 128
    """Number of distinct keys, and of distinct values."""

    def check(self) -> None:
        refuse(self.tokens_per_pair < 4, "tokens_per_pair", f"is {self.tokens_per_pair}", "set it to at least 4")
        least = self.tokens_per_pair
        refuse(self.tokens < least, "tokens", f"is {self.tokens}", f"set it to at least {least}, which is one pair")
        shortest, fix = self.shortest, f"set it to at least {least} and at most tokens, {self.tokens}"
        refuse(shortest is not None and not least <= shortest <= self.tokens, "shortest", f"is {shortest}", fix)
        pairs = self.tokens // self.tokens_per_pair
        refuse(
            self.keys < pairs,
            "keys",
            f"is {self.keys}, but the longest sequence has {pairs} pairs",
            f"set it to {pairs}",
        )

    @property
    def vocab_size(self) -> int:
        return 2 * self.keys + 1

    @property
    def length(self) -> int:
        return self.tokens // 2 * 2

    @property
    def blank(self) -> int:
        """The token between queries."""
        return 2 * self.keys

    def sequence(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draw a sequence of one of the lengths; the values after queries are the answers."""
        length = self.tokens
        if self.shortest is not None:
            doublings = (self.tokens // self.shortest).bit_length()
            length = self.shortest << int(random.integers(doublings))
        pairs = length // self.tokens_per_pair
        known = np.stack([random.permutation(self.keys)[:pairs], self.keys + random.integers(self.keys, size=pairs)], 1)
        slots = np.full((length // 2, 2), self.blank)
        slots[:pairs] = known
        likely = np.arange(1, len(slots) - pairs + 1) ** (_GAP_POWER - 1)
        queries = pairs + random.choice(len(likely), pairs, replace=False, p=likely / likely.sum())
        slots[queries] = known
        answers = np.zeros(slots.shape, dtype=bool)
        answers[queries, 1] = True
        return slots.reshape(-1), answers.reshape(-1)
