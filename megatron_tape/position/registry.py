"""Register positional encodings, so that `model.position_encoding` can select them by name."""

from megatron_tape.config.encodings import ENCODINGS
from megatron_tape.position.encoding import FROM_POSITIONS, PositionEncoding


def register(encoding: type[PositionEncoding]) -> type[PositionEncoding]:
    """Register and return an encoding.

    Raises ValueError if its `name` is taken, or `restarts_in_documents` must be set.
    """
    # Registering the same class twice does no harm.
    if ENCODINGS.get(encoding.name, encoding) is not encoding:
        raise ValueError(
            f"there is already a positional encoding named {encoding.name}; choose another name"
        )
    # Look through the class, then its bases. A class that overrides a method must set the attribute
    # itself, as a base class's value holds only for the base class's own methods.
    for cls in encoding.__mro__[: encoding.__mro__.index(PositionEncoding)]:
        if "restarts_in_documents" in vars(cls):
            break
        if methods := [name for name in FROM_POSITIONS if name in vars(cls)]:
            raise ValueError(
                f"positional encoding {encoding.name} defines {' and '.join(methods)}, but not"
                " restarts_in_documents; set it to True if the encoding depends on absolute"
                " positions, or to False if only on distances"
            )
    ENCODINGS[encoding.name] = encoding
    return encoding
