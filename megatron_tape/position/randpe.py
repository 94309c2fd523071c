"""Randomized positions (Ruoss et al., 2023): RoPE on positions drawn from a range longer than the
sequence.

Training covers the whole range, so that sequences longer than those of training have no unseen
positions.
"""

from dataclasses import dataclass

from megatron_tape.errors import ConfigError
from megatron_tape.position.encoding import Count
from megatron_tape.position.rope import FrequencySettings, RotaryPosition

_LARGEST_RANGE = 2**24
"""Angles are computed from float32 positions, which are not exact beyond this."""


@dataclass(frozen=True, kw_only=True)
class RandomizedSettings(FrequencySettings):
    """The range from which positions are drawn."""

    randpe_range: Count | None = None
    """randpe: number of positions R; training draws the positions of a sequence from 0 to R - 1.
    Set it to at least the length of the longest sequence that the model will process. Default: 4 *
    seq_length."""


class RandomizedPosition(RotaryPosition):
    """RoPE on sorted positions, drawn from 0 to R - 1 without replacement in each training step.

    All sequences of a step have the same positions, and a packed document of n tokens has the first
    n of them. Outside training, token i of a sequence of S tokens has position floor(i R / max(S,
    L)), where L is `seq_length`. A sequence of more than R tokens has positions 0, 1, ..., S - 1.
    """

    name = "randpe"
    Settings = RandomizedSettings
    # Architectures of transformers cannot draw positions.
    exports_to = "code"
    extended_by = frozenset({"randpe_range"})
    restarts_in_documents = True

    def check(self):
        """Raise ConfigError if the range is shorter than a sequence, or too long for float32."""
        super().check()
        length = self.model.seq_length
        if self.position_range < length:
            raise ConfigError(
                ("model.position.randpe_range", "model.seq_length"),
                f"is {self.position_range}, less than the {length} tokens of model.seq_length",
                "set it to a multiple of model.seq_length",
            )
        if self.position_range > _LARGEST_RANGE:
            raise ConfigError(
                "model.position.randpe_range",
                f"is {self.position_range:,}, but float32 positions are exact only up to"
                f" {_LARGEST_RANGE:,}",
                f"set it to at most {_LARGEST_RANGE}",
            )

    @property
    def position_range(self) -> int:
        """Number of positions from which a training sequence's positions are drawn (R)."""
        return self.settings.randpe_range or 4 * self.model.seq_length

    def token_positions(self, length, random):
        """Return sorted positions, drawn with `random` in training and evenly spaced outside."""
        import numpy as np

        # A sequence longer than the range has the positions 0, 1, ...
        position_range = max(self.position_range, length)
        if random is None:
            return np.arange(length) * position_range // max(length, self.model.seq_length)
        return np.sort(random.choice(position_range, length, replace=False, shuffle=False))

    def check_cached(self, length):
        """Raise NotImplementedError beyond `seq_length` tokens, where each new token changes all
        cached positions.
        """
        if length > self.model.seq_length:
            raise NotImplementedError(
                f"randpe cannot use a cache for {length} tokens with the prompt: beyond the"
                f" {self.model.seq_length} of training, each new token changes the positions of all"
                " cached tokens; generate without a cache (use_cache=False)"
            )
