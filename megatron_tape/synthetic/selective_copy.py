"""Selective copying (Gu and Dao, 2023, section 4.1): symbols among blanks, then the symbols."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatron_tape.synthetic.generator import Generator


@dataclass(frozen=True, kw_only=True)
class SelectiveCopy(Generator):
    """Sequences of `copied` symbols among blanks, a separator, and the symbols again as answers.

    Token ids: the symbols from 0 on, then the blank, then the separator.
    """

    task: Literal["selective_copy"] = "selective_copy"
    """The name of the task."""
    copied: int = 128
    """Number of symbols to copy."""
    blanks: int = 128
    """Number of blanks among the symbols."""
    symbols: int = 16
    """Number of distinct symbols."""

    def check(self) -> None:
        self._require_at_least(copied=1, symbols=1, blanks=0)

    @property
    def vocab_size(self) -> int:
        return self.symbols + 2

    @property
    def length(self) -> int:
        return 2 * self.copied + self.blanks + 1

    @property
    def blank(self) -> int:
        """Id of the token that is not copied."""
        return self.symbols

    @property
    def separator(self) -> int:
        """Id of the separator, after which the copy begins."""
        return self.symbols + 1

    def sequence(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draw symbols, blanks and the copy."""
        symbols = random.integers(self.symbols, size=self.copied)
        source = np.full(self.copied + self.blanks, self.blank)
        # The positions of the symbols, sorted so that the source and the copy have the same order.
        positions = np.sort(random.permutation(len(source))[: self.copied])
        source[positions] = symbols
        tokens = np.concatenate([source, [self.separator], symbols])
        return tokens, np.arange(self.length) >= self.length - self.copied
