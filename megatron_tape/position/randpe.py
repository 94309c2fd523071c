"""Randomized positions (Ruoss et al., 2023): RoPE on positions drawn from a range longer than the sequence.

A model that was trained on far positions meets no unknown ones in sequences longer than those it was trained on.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_tape.errors import refuse
from megatron_tape.position.rope import RotaryPosition, RotarySettings

if TYPE_CHECKING:
    import numpy as np

_LARGEST_RANGE = 2**24
"""Angles are computed from float32, which does not tell all larger positions apart."""


@dataclass(kw_only=True)
class RandomizedSettings(RotarySettings):
    """From which range positions are drawn."""

    randpe_range: int | None = None
    """randpe: number of positions from which those of a training sequence are drawn, at least the tokens of the longest
    sequence the model will be used on; null means 4 * seq_length."""

    @property
    def position_range(self) -> int:
        """Number of positions from which those of a training sequence are drawn."""
        return 4 * self.seq_length if self.randpe_range is None else self.randpe_range


class RandomizedPosition(RotaryPosition):
    """Training draws each step's positions from 0 to R - 1 without replacement, and sorts them.

    All sequences of a step have the same ones, and documents of a pack as many of the first as they have tokens.
    Outside training, the S tokens of a sequence are spread evenly: token i is at floor(i R / max(S, L)), where L is
    `seq_length`. A sequence of more than R tokens is at 0, 1, ..., S - 1.
    """

    name = "randpe"
    settings = RandomizedSettings
    exports_to = "code"
    extended_by = frozenset({"randpe_range"})
    counts_in_documents = True

    def check(self) -> None:
        """Reject ranges shorter than a sequence or too long for float32, and scaled positions."""
        super().check()
        model = self.model
        refuse(
            model.position_increments != "fixed",
            f"model.position_increments {model.position_increments} does not apply to randpe, which draws positions; "
            "set it to fixed",
        )
        refuse(
            model.position_range < model.seq_length,
            f"model.randpe_range is {model.position_range}, less than the {model.seq_length} tokens of "
            "model.seq_length; set it to several times as many",
        )
        refuse(
            model.position_range > _LARGEST_RANGE,
            f"model.randpe_range is {model.position_range:,}, but float32 holds only positions up to "
            f"{_LARGEST_RANGE:,} exactly; set it to at most that",
        )
        refuse(
            model.rope_scaling_factor != 1 or model.rope_scaling_type != "linear",
            f"model.rope_scaling_type {model.rope_scaling_type} with model.rope_scaling_factor "
            f"{model.rope_scaling_factor} does not apply to randpe, which learns all positions of model.randpe_range; "
            "leave both at their defaults",
        )

    def token_positions(self, length: int, random: "np.random.Generator | None") -> "np.ndarray":
        """Return positions drawn from `random`; without it, evenly spaced ones."""
        import numpy as np

        whole = max(self.model.position_range, length)
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
