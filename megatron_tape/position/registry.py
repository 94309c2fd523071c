"""Register positional encodings, so that `model.position_encoding` can select them by name."""

import dataclasses

from megatron_tape.config.encodings import ENCODINGS
from megatron_tape.position.encoding import PositionEncoding


def register(encoding: type[PositionEncoding]) -> type[PositionEncoding]:
    """Register and return an encoding. Raises ValueError if its `name` is taken or a setting has no default."""
    if ENCODINGS.get(encoding.name, encoding) is not encoding:
        raise ValueError(f"there is already a positional encoding named {encoding.name}; choose another name")
    for item in dataclasses.fields(encoding.Settings):
        if item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            raise ValueError(f"setting {item.name} of positional encoding {encoding.name} has no default; add one")
    ENCODINGS[encoding.name] = encoding
    return encoding
