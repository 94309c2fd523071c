"""No positional encoding: only causal attention conveys the order."""

from megatron_tape.position.base import PositionEncoding


class NoPosition(PositionEncoding):
    """Does nothing (NoPE; Kazemnejad et al., 2023)."""

    name = "nope"
