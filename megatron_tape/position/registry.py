"""How an encoding joins those that `model.position_encoding` chooses from."""

import dataclasses

from megatron_tape.config.encodings import ENCODINGS
from megatron_tape.position.encoding import PositionEncoding


def register(encoding: type[PositionEncoding]) -> type[PositionEncoding]:
    """Add an encoding; raises ValueError if its name is taken or a setting has no default."""
    if ENCODINGS.get(encoding.name, encoding) is not encoding:
        raise ValueError(f"there already is a positional encoding {encoding.name}; choose another name")
    for item in dataclasses.fields(encoding.Settings):
        if item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            raise ValueError(f"the setting {item.name} of the positional encoding {encoding.name} has no default")
    ENCODINGS[encoding.name] = encoding
    return encoding
