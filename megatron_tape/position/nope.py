"""No positional encoding: only causal attention conveys the order."""

from megatron_tape.position.encoding import PositionEncoding


class NoPosition(PositionEncoding):
    """No positional encoding (NoPE; Kazemnejad et al., 2023).

    An extension can remove RoPE from a trained model, to handle longer contexts (DroPE; Gelberg et
    al., 2025).
    """

    name = "nope"
    replaces = frozenset({"rope"})
