"""Register positional encodings for `model.position_encoding`."""

import dataclasses

from megatron_tape.config.encodings import ENCODINGS
from megatron_tape.position.encoding import PositionEncoding


def register(encoding: type[PositionEncoding]) -> type[PositionEncoding]:
    """Register an encoding. Raises ValueError if its name is taken or a setting has no default."""
    if ENCODINGS.get(encoding.name, encoding) is not encoding:
        raise ValueError(f"there is already a positional encoding named {encoding.name}; choose another name")
    for item in dataclasses.fields(encoding.Settings):
        if item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            raise ValueError(f"the setting {item.name} of the positional encoding {encoding.name} has no default")
    ENCODINGS[encoding.name] = encoding
    return encoding
