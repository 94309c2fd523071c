"""Small JSON and YAML files that programs leave for each other: written whole, and checked when they are read.

A record may be truncated, edited by hand, written by another version, or a different file altogether. Nothing in it is
used before its size and shape have been checked. torch is not imported, and PyYAML only when a YAML file is read.
"""

import json
import math
import os
import stat
import types
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

from megatron_tape.errors import FileError
from megatron_tape.io.files import write_whole

RECORD_BYTES = 64 << 20
"""The largest record that is read; a manifest of 100,000 files is smaller."""


def write_record(path: str | Path, value: Any, *, durable: bool = True) -> None:
    """Write `value` as JSON, whole or not at all. Raises ValueError if it contains a number that is not finite."""
    write_whole(path, [(json.dumps(value, indent=1, allow_nan=False) + "\n").encode()], durable=durable)


def read_record(path: str | Path, shape: Any, limit: int = RECORD_BYTES) -> Any:
    """Return the JSON value in a file, after checking that it has `shape`, a type that `parse_record` accepts.

    Raises:
        OSError: if the file does not exist or cannot be read.
        FileError: if it has more than `limit` bytes, is not JSON, or does not
            have `shape`.
    """
    try:
        return parse_record(read_small(path, limit), shape)
    except ValueError as error:
        raise FileError(str(path), f"cannot be used: {error}") from None


def read_yaml(path: str | Path, shape: Any, limit: int = 1 << 20) -> Any:
    """Return the YAML value in a file that `yaml.safe_dump` wrote; like `read_record`, and aliases are refused."""
    try:
        return parse_yaml(read_small(path, limit), shape)
    except ValueError as error:
        raise FileError(str(path), f"cannot be used: {error}") from None


def parse_yaml(text: str | bytes, shape: Any) -> Any:
    """Parse YAML without aliases and check its shape, as `parse_record` does with JSON."""
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            # A few nested aliases can stand for billions of nodes.
            if self.check_event(yaml.AliasEvent):
                raise ValueError("it has aliases")
            return super().compose_node(parent, index)

    try:
        value = yaml.load(text, Loader)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except yaml.YAMLError as error:
        raise ValueError(f"it is not YAML ({' '.join(str(error).split())})") from None
    check_shape(value, shape)
    return value


def read_small(path: str | Path, limit: int) -> bytes:
    """Return a file's contents. Raises ValueError if it has more than `limit` bytes or is not a regular file."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError("it is not a regular file")
    with open(path, "rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"it is larger than {limit:,} bytes")
    return content


def parse_record(text: str | bytes, shape: Any) -> Any:
    """Parse JSON and check its shape. Raises ValueError that says what is wrong.

    `shape` is a type: a TypedDict (other keys are allowed too), `dict[str, T]`, `list[T]`, a union, a Literal, `int`
    (64 bits), `float` (any finite number), `str`, `bool`, `None` or `Any`.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error})") from None
    check_shape(value, shape)
    return value


def check_shape(value: Any, shape: Any, place: str = "") -> None:
    """Raise ValueError if `value`, as parsed from JSON or YAML, does not have `shape` (see `parse_record`)."""
    arguments = get_args(shape)
    inside = f"{place}." if place else ""
    if is_typeddict(shape) and isinstance(value, dict):
        for key in sorted(shape.__required_keys__ - value.keys()):
            raise ValueError(f"{inside}{key} is missing")
        for key, kind in get_type_hints(shape).items():
            if key in value:
                check_shape(value[key], kind, f"{inside}{key}")
    elif get_origin(shape) is dict and isinstance(value, dict):
        for key, item in value.items():
            check_shape(key, arguments[0], f"{inside}{str(key)[:40]}")
            check_shape(item, arguments[1], f"{inside}{str(key)[:40]}")
    elif get_origin(shape) is list and isinstance(value, list):
        for index, item in enumerate(value):
            check_shape(item, arguments[0], f"{place}[{index}]")
    elif get_origin(shape) in (Union, types.UnionType) and _is_one_of(value, arguments):
        pass
    elif not _is_plain(value, shape):
        raise ValueError(f"{place or 'it'} is {_shown(value)}, where {_kind(shape)} belongs")


def _is_one_of(value: Any, shapes: tuple) -> bool:
    for shape in shapes:
        with suppress(ValueError):
            check_shape(value, shape)
            return True
    return False


def _is_plain(value: Any, shape: Any) -> bool:
    if get_origin(shape) is Literal:
        return any(type(value) is type(choice) and value == choice for choice in get_args(shape))
    if shape in (int, float):
        number = type(value) is int or (shape is float and type(value) is float and math.isfinite(value))
        return number and -(2**63) <= value < 2**63
    if shape in (None, types.NoneType):
        return value is None
    return shape is Any or (shape in (str, bool, dict, list) and isinstance(value, shape))


def _shown(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    shown = repr(value)
    return shown if len(shown) <= 40 else shown[:37] + "..."


def _kind(shape: Any) -> str:
    if get_origin(shape) is Literal:
        return "one of " + ", ".join(map(str, get_args(shape)))
    if get_origin(shape) in (Union, types.UnionType):
        return " or ".join(_kind(member) for member in get_args(shape))
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", list: "a list"}
    return names.get(get_origin(shape) or shape, "null" if shape in (None, types.NoneType) else "an object")
