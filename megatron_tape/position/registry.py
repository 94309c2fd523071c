"""The positional encodings by name."""

import dataclasses

from megatron_tape.position.base import PositionEncoding

ENCODINGS: dict[str, type[PositionEncoding]] = {}
"""Those of this package, and those that a program of a user has registered."""


def register(encoding: type[PositionEncoding]) -> type[PositionEncoding]:
    """Add an encoding; raises ValueError if its name, or that of a setting, is taken, or a setting has no default."""
    if ENCODINGS.get(encoding.name, encoding) is not encoding:
        raise ValueError(f"there already is a positional encoding {encoding.name}; choose another name")
    taken = {item.name: item for other in ENCODINGS.values() for item in dataclasses.fields(other.Settings)}
    for item in dataclasses.fields(encoding.Settings):
        if item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            raise ValueError(f"the setting {item.name} of the positional encoding {encoding.name} has no default")
        if taken.get(item.name, item) is not item:
            raise ValueError(
                f"the positional encoding {encoding.name} has a setting {item.name}, but another encoding has one of "
                "that name; choose another name, or inherit the other encoding's settings"
            )
    ENCODINGS[encoding.name] = encoding
    return encoding
