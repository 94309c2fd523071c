"""Types of settings, which pydantic validates, and helpers for error messages about settings."""

import dataclasses
import json
import re
import types
from typing import Annotated, Any, Union

from pydantic import AfterValidator, Field

from megatron_tape.errors import UserError
from megatron_tape.home import expand_home, refuse_address

Count = Annotated[int, Field(ge=1)]
# The bound refuses absurd sizes in one sentence, before torch or numpy fail.
Size = Annotated[int, Field(ge=1, le=2**30)]
NotNegativeInt = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]
UNIONS = (Union, types.UnionType)
"""Origins (`typing.get_origin`) of types such as `Union[int, None]` and `int | None`."""
_SHOWN_CHARACTERS = 200
"""Maximum number of characters of a value in an error message."""


def expand_path(path: str) -> str:
    """Return a path with a leading `~` expanded. Raises UserError for an address, a path with a
    control character, or a user without a home directory.
    """
    # A control character in a path would break the lines of logs and of records that list paths.
    if re.search(r"[\x00-\x1f\x7f-\x9f]", path):
        raise UserError(path, "contains a control character, such as a line break", "rename it")
    refuse_address(path)
    return expand_home(path)


PathText = Annotated[str, Field(min_length=1), AfterValidator(expand_path)]
"""A path. A leading `~` becomes the home directory. Addresses such as `s3://bucket/run` are
refused.
"""
Prefixes = (
    Annotated[dict[PathText, Positive], Field(min_length=1)]
    | Annotated[list[PathText], Field(min_length=1)]
    | PathText
)
"""Datasets by path without `.idx` and `.bin`: one path, a list of paths, or a mapping from paths to
weights.
"""


def format_value(value: Any) -> str:
    """Format a value for an error message, spelled as in YAML and truncated. A section is formatted
    as `set`, since the message `is set` says enough about it.
    """
    if dataclasses.is_dataclass(value):
        return "set"
    # These values are spelled alike in JSON and YAML.
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    text = repr(value)
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    return f"{text[:_SHOWN_CHARACTERS]}..."
