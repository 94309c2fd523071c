"""The positional encodings by name."""

from megatron_tape.position.base import PositionEncoding

ENCODINGS: dict[str, type[PositionEncoding]] = {}
"""Those of this package, and those that a program of a user has registered."""


def register(encoding: type[PositionEncoding]) -> type[PositionEncoding]:
    """Add an encoding without settings of its own; raises ValueError for a name that is taken."""
    if ENCODINGS.setdefault(encoding.name, encoding) is not encoding:
        raise ValueError(f"there already is a positional encoding {encoding.name}; choose another name")
    return encoding
