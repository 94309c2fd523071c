"""Register positional encodings, so that `model.position_encoding` can select them by name."""

import dataclasses

from megatron_tape.config.encodings import ENCODINGS
from megatron_tape.position.encoding import FROM_POSITIONS, PositionEncoding


def register(encoding: type[PositionEncoding]) -> type[PositionEncoding]:
    """Register and return an encoding.

    Raises ValueError if its `name` is taken, a setting has no default, or `restarts_in_documents`
    must be set.
    """
    if ENCODINGS.get(encoding.name, encoding) is not encoding:
        raise ValueError(
            f"there is already a positional encoding named {encoding.name}; choose another name"
        )
    for item in dataclasses.fields(encoding.Settings):
        if item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            raise ValueError(
                f"setting {item.name} of positional encoding {encoding.name} has no default;"
                " add one"
            )
    # The declaration of a base class is about that class's methods.
    for kind in encoding.__mro__[: encoding.__mro__.index(PositionEncoding)]:
        if "restarts_in_documents" in vars(kind):
            break
        if methods := [name for name in FROM_POSITIONS if name in vars(kind)]:
            raise ValueError(
                f"positional encoding {encoding.name} defines {' and '.join(methods)}, but not"
                " restarts_in_documents; set it to True if the encoding depends on absolute"
                " positions, or to False if only on distances"
            )
    ENCODINGS[encoding.name] = encoding
    return encoding
