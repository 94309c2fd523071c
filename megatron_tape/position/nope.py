"""No positional encoding: causal attention alone tells the order."""

from megatron_tape.position.base import PositionEncoding


class NoPosition(PositionEncoding):
    """Does nothing (NoPE; Kazemnejad et al., 2023)."""

    name = "nope"
