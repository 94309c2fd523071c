"""Addition of two numbers, digit by digit, with the lowest digit first.

As in "Transformers Can Do Arithmetic with the Right Embeddings" (McLeish et al., 2024), which the TAPE paper follows:
every pair of operand lengths is equally likely, and the highest digit is not zero.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from megatron_tape.errors import refuse
from megatron_tape.synthetic.generator import Generator


@dataclass(frozen=True, kw_only=True)
class Addition(Generator):
    """Sequences `a+b=c` with an end token; the answer is the sum with the end token.

    Tokens: the digits 0 to 9, then `+`, `=`, the end token, and the index hints.
    """

    task: Literal["addition"] = "addition"
    """The name of the task."""
    digits: int = 40
    """Digits of the longest operand."""
    hints: int = 0
    """Number of index hints (Zhou et al., 2023); 0 disables them. Every digit follows the hint of its place, which all
    three numbers share. The hints of a sum are consecutive from a random one on, modulo this number. With hints, models
    can extrapolate even if their encoding does not."""

    PLUS: ClassVar[int] = 10
    EQUALS: ClassVar[int] = 11
    END: ClassVar[int] = 12

    def check(self) -> None:
        refuse(self.digits < 1, "digits", f"is {self.digits}", "set it to at least 1")
        places = self.digits + 1
        too_few = self.hints != 0 and self.hints < places
        problem = f"is {self.hints}, but sums have up to {places} digits"
        refuse(too_few, "hints", problem, f"set it to at least {places}, or to 0")

    @property
    def vocab_size(self) -> int:
        return self.END + 1 + self.hints

    @property
    def length(self) -> int:
        digits = 3 * self.digits + 1
        return (2 * digits if self.hints else digits) + 3

    def sequence(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draw a sum; every pair of operand lengths is equally likely."""
        first, second = random.integers(1, self.digits + 1, size=2)
        return self.problem(random, int(first), int(second))

    def problem(self, random: np.random.Generator, first: int, second: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw a sum whose operands have `first` and `second` digits; return tokens and answers as `sequence` does."""
        a, b = _number(random, first), _number(random, second)
        start = int(random.integers(self.hints)) if self.hints else 0
        written = [self._with_hints(number, start) for number in (a, b, add(a, b))]
        prompt = np.concatenate([written[0], [self.PLUS], written[1], [self.EQUALS]])
        tokens = np.concatenate([prompt, written[2], [self.END]])
        return tokens, np.arange(len(tokens)) >= len(prompt)

    def _with_hints(self, number: np.ndarray, start: int) -> np.ndarray:
        if not self.hints:
            return number
        hints = self.END + 1 + (start + np.arange(len(number))) % self.hints
        return np.stack([hints, number], axis=1).reshape(-1)


def _number(random: np.random.Generator, digits: int) -> np.ndarray:
    """Draw a number with exactly this many digits, lowest first."""
    number = random.integers(10, size=digits)
    number[-1] = random.integers(1, 10)
    return number


def add(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the digits of the sum of two numbers; all digits are lowest first."""
    columns = np.zeros(max(len(a), len(b)) + 1, dtype=np.int64)
    columns[: len(a)] += a
    columns[: len(b)] += b
    # A column carries if it is 10 or more, or if it is 9 and receives a carry: the last column up to it that is not 9
    # decides.
    decides = np.maximum.accumulate(np.where(columns != 9, np.arange(len(columns)), -1))
    carries = (decides >= 0) & (columns[decides] > 9)
    columns[1:] += carries[:-1]
    total = columns % 10
    return total if total[-1] else total[:-1]
