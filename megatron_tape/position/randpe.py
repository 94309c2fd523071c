"""Randomized positions (Ruoss et al., 2023): RoPE on positions drawn from a range longer than the sequence.

A model that was trained on far positions meets no unknown ones in sequences longer than those it was trained on.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_tape.errors import refuse
from megatron_tape.position.rope import FrequencySettings, RotaryPosition

if TYPE_CHECKING:
    import numpy as np

_LARGEST_RANGE = 2**24
"""Angles are computed from float32, which does not tell all larger positions apart."""


@dataclass(frozen=True, kw_only=True)
class RandomizedSettings(FrequencySettings):
    """From which range positions are drawn."""

    randpe_range: int | None = None
    """randpe: number of positions from which those of a training sequence are drawn, at least the tokens of the longest
    sequence the model will be used on; null means 4 * seq_length."""


class RandomizedPosition(RotaryPosition):
    """Training draws each step's positions from 0 to R - 1 without replacement, and sorts them.

    All sequences of a step have the same ones, and documents of a pack as many of the first as they have tokens.
    Outside training, the S tokens of a sequence are spread evenly: token i is at floor(i R / max(S, L)), where L is
    `seq_length`. A sequence of more than R tokens is at 0, 1, ..., S - 1.
    """

    name = "randpe"
    Settings = RandomizedSettings
    # It draws positions, and learns all of its range.
    exports_to = "code"
    extended_by = frozenset({"randpe_range"})
    restarts_in_documents = True

    def check(self) -> None:
        super().check()
        length = self.model.seq_length
        refuse(
            self.position_range < length,
            ("model.position.randpe_range", "model.seq_length"),
            f"is {self.position_range}, less than the {length} tokens of model.seq_length",
            "set it to several times as many",
        )
        refuse(
            self.position_range > _LARGEST_RANGE,
            "model.position.randpe_range",
            f"is {self.position_range:,}, but float32 holds only positions up to {_LARGEST_RANGE:,} exactly",
            "set it to at most that",
        )

    @property
    def position_range(self) -> int:
        """Number of positions from which those of a training sequence are drawn."""
        chosen = self.settings.randpe_range
        return 4 * self.model.seq_length if chosen is None else chosen

    def token_positions(self, length: int, random: "np.random.Generator | None") -> "np.ndarray":
        import numpy as np

        whole = max(self.position_range, length)
        if random is None:
            return np.arange(length) * whole // max(length, self.model.seq_length)
        return np.sort(random.choice(whole, length, replace=False, shuffle=False))

    def check_cached(self, length: int) -> None:
        """Refuse more than `seq_length` tokens, since each further token would move all tokens before it."""
        if length > self.model.seq_length:
            raise NotImplementedError(
                f"randpe spreads the tokens of a sequence over its whole range, so that a sequence of {length} tokens, "
                f"more than the {self.model.seq_length} of training, changes the positions of tokens that the cache "
                "holds already; generate without a cache (use_cache=False)"
            )
