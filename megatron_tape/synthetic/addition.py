"""Addition of two numbers, written with the lowest digit first.

This is the task of "Transformers Can Do Arithmetic with the Right Embeddings" (McLeish et al.,
2024), which the TAPE paper follows: every pair of operand lengths is equally likely, and the
highest digit of an operand is not zero.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from megatron_tape.errors import ConfigError
from megatron_tape.synthetic.generator import Generator


@dataclass(frozen=True, kw_only=True)
class Addition(Generator):
    """Sequences `a+b=c` followed by an end token. All tokens after `=` are answers.

    Token ids: 0 to 9 for the digits, 10 for `+`, 11 for `=`, 12 for the end token, and from 13 on
    the index hints.
    """

    task: Literal["addition"] = "addition"
    """The name of the task."""
    digits: int = 40
    """Maximum number of digits of an operand."""
    hints: int = 0
    """Number of distinct index hints (Zhou et al., 2023); 0 disables them. An index hint is a token
    before each digit. Digits of equal place value in a, b and c have the same hint. In each
    sequence, the lowest digits have a random hint, and each higher digit has the next hint, modulo
    this number. With hints, models can extrapolate to longer numbers even if their positional
    encoding does not."""

    PLUS: ClassVar[int] = 10
    EQUALS: ClassVar[int] = 11
    END: ClassVar[int] = 12

    def check(self) -> None:
        self._require_at_least(digits=1)
        # Each digit of a sum needs a hint of its own.
        longest = self.digits + 1
        if self.hints and self.hints < longest:
            raise ConfigError(
                "hints",
                f"is {self.hints}, but sums have up to {longest} digits",
                f"set it to at least {longest}, or to 0 for no hints",
            )

    @property
    def vocab_size(self) -> int:
        return self.END + 1 + self.hints

    @property
    def length(self) -> int:
        # The sum has one digit more than the operands.
        digits = 3 * self.digits + 1
        if self.hints:
            digits *= 2
        return digits + 3  # +, = and the end token

    def sequence(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draw a sum; every pair of operand lengths is equally likely."""
        a_digits, b_digits = random.integers(1, self.digits + 1, size=2)
        return self.problem(random, int(a_digits), int(b_digits))

    def problem(
        self, random: np.random.Generator, a_digits: int, b_digits: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw a sum of two numbers with `a_digits` and `b_digits` digits. Return its N token ids
        (N,), int64, and a mask (N,), bool, which is true after `=`.
        """
        a = _number(random, a_digits)
        b = _number(random, b_digits)
        first_hint = 0
        if self.hints:
            first_hint = int(random.integers(self.hints))
        a_tokens = self._with_hints(a, first_hint)
        b_tokens = self._with_hints(b, first_hint)
        sum_tokens = self._with_hints(add(a, b), first_hint)

        prompt = np.concatenate([a_tokens, [self.PLUS], b_tokens, [self.EQUALS]])
        tokens = np.concatenate([prompt, sum_tokens, [self.END]])
        return tokens, np.arange(len(tokens)) >= len(prompt)

    def _with_hints(self, number: np.ndarray, first_hint: int) -> np.ndarray:
        """Return the tokens of a number: its digits (D,), lowest first, each after its index hint
        if hints are enabled. The lowest digit has the hint `first_hint`, counted from 0.
        """
        if not self.hints:
            return number
        hints = self.END + 1 + (first_hint + np.arange(len(number))) % self.hints
        # Rows (hint, digit), then flat: hint, digit, hint, digit, ...
        return np.stack([hints, number], axis=1).reshape(-1)


def _number(random: np.random.Generator, digits: int) -> np.ndarray:
    """Draw a number with `digits` digits; return them (`digits`,), lowest first."""
    number = random.integers(10, size=digits)
    # The highest digit is not 0, so that the number has `digits` digits.
    number[-1] = random.integers(1, 10)
    return number


def add(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Add two numbers; arguments and result are 1-D arrays of digits, lowest first."""
    # The sums of the digits of each place value. The result may have one digit more.
    columns = np.zeros(max(len(a), len(b)) + 1, dtype=np.int64)
    columns[: len(a)] += a
    columns[: len(b)] += b
    # Carry from the lowest digit to the highest.
    digits = []
    carry = 0
    for column in columns.tolist():
        carry, digit = divmod(column + carry, 10)
        digits.append(digit)
    # Remove the highest digit if it is 0, that is, if no 1 was carried into it.
    if digit == 0:
        digits.pop()
    return np.array(digits)
