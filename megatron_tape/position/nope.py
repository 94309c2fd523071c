"""No positional encoding: only causal attention conveys the order."""

from megatron_tape.position.encoding import PositionEncoding


class NoPosition(PositionEncoding):
    """Does nothing (NoPE; Kazemnejad et al., 2023).

    A model that was trained with RoPE can be recalibrated without it, after which it reads longer contexts (DroPE,
    Gelberg et al., 2025).
    """

    name = "nope"
    replaces = frozenset({"rope"})
