"""Small JSON and YAML files that programs exchange: written atomically, and validated when they are
read.

A record may be truncated, edited by hand, written by another version, or a different file
altogether, so its size and its type (`shape`) are checked before use. Does not import torch;
imports PyYAML only to read a YAML file.
"""

import functools
import json
import math
import stat
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from megatron_tape.errors import FileError
from megatron_tape.io.files import write_whole

RECORD_BYTES = 64 << 20
"""Maximum size of a record in bytes, more than that of a manifest of 100,000 files."""
_RESTORE = "restore it, or remove it if it is not needed"
"""The fix in errors about records."""


def write_record(path: str | Path, value: Any, *, durable: bool = True) -> None:
    """Write `value` as JSON atomically, synced if `durable`. Raises ValueError if it contains a
    non-finite number.
    """
    text = json.dumps(value, indent=1, allow_nan=False)
    write_whole(path, [f"{text}\n".encode()], durable=durable)


def read_record(path: str | Path, shape: Any, limit: int = RECORD_BYTES) -> Any:
    """Read a JSON file and check that its value has the type `shape` (see `parse_record`).

    Raises:
        OSError: if the file does not exist or cannot be read.
        FileError: if it has more than `limit` bytes, is not JSON, or has another type.
    """
    try:
        return parse_record(read_small(path, limit), shape)
    except ValueError as error:
        raise FileError(str(path), f"cannot be used: {error}", _RESTORE) from None


def read_yaml(path: str | Path, shape: Any) -> Any:
    """Read a YAML file as strictly as a recipe, and check the type of its value like
    `read_record`.

    Raises OSError if the file cannot be read, and FileError if it has more than 1 MiB, is not valid
    YAML, or has another type.
    """
    try:
        value = parse_yaml(read_small(path, 1 << 20), shape)
        # Reject NaN and infinity, which YAML knows, since callers could not write them as JSON.
        json.dumps(value, allow_nan=False)
        return value
    except (TypeError, ValueError) as error:
        raise FileError(str(path), f"cannot be used: {error}", _RESTORE) from None


def parse_yaml(text: str | bytes, shape: Any) -> Any:
    """Parse YAML with `io.strict_yaml`, and check the type of its value like `parse_record`. Raises
    ValueError with the problem.
    """
    # Importing PyYAML takes time, and most programs read no YAML.
    from megatron_tape.io.strict_yaml import parse_value

    try:
        value = parse_value(text)
    except ValueError as error:
        raise ValueError(f"it is not YAML ({' '.join(str(error).split())})") from None
    check_shape(value, shape)
    return value


def read_small(path: str | Path, limit: int) -> bytes:
    """Return a file's contents. Raises ValueError if it has more than `limit` bytes or is not a
    regular file.
    """
    # Opening a named pipe would wait forever for a writer.
    if not stat.S_ISREG(Path(path).stat().st_mode):
        raise ValueError("it is not a regular file")

    # The file may grow while it is read, so its size does not limit what is read.
    with open(path, "rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"it is larger than {limit:,} bytes")
    return content


def parse_record(text: str | bytes, shape: Any) -> Any:
    """Parse JSON and check that its value has the type `shape`. Raises ValueError with the problem.

    `shape` is a TypedDict (other keys are allowed too), `dict[str, T]`, `list[T]`, a union, a
    Literal, `int`, `float`, `str`, `bool`, `None` or `Any`. pydantic checks it strictly. NaN and
    Infinity are not JSON.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8-sig")  # editors on Windows add a byte order mark
        # Python's parser instead of pydantic's, which rejects lone surrogates. Text that a model
        # has generated may contain them.
        value = json.loads(text, parse_constant=_finite, parse_float=_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error})") from None
    check_shape(value, shape)
    return value


def _finite(text: str) -> float:
    """Convert a number in JSON to a float. Raises ValueError if the result is not finite, as for
    1e999.
    """
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is not a finite number")
    return value


@functools.cache
def validator(shape: Any) -> TypeAdapter:
    """Return pydantic's validator of the type `shape`, which is slow to build and therefore
    cached.
    """
    return TypeAdapter(shape)


def check_shape(value: Any, shape: Any, path: str = "") -> None:
    """Raise ValueError if `value`, as parsed from JSON or YAML, does not have the type `shape` (see
    `parse_record`).

    The message begins with the path of the wrong item, such as `files[3].bytes`; `path` is the path
    of `value` itself.
    """
    try:
        validator(shape).validate_python(value, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        missing = first["type"] == "missing"
        where = path_of_error(value, first["loc"], path, missing) or "it"
        # Do not show the error's input: for a missing key, it is the whole mapping that lacks it.
        if missing:
            raise ValueError(f"{where} is missing") from None
        kinds: dict[type, str] = {dict: "an object", list: "a list"}
        shown = kinds.get(type(first["input"])) or repr(first["input"])[:40]
        raise ValueError(f"{where} is {shown}: {first['msg']}") from None


def path_of_error(value: Any, loc: tuple[int | str, ...], path: str, missing: bool) -> str:
    """Return the path, such as `files[3].bytes`, of the item of `value` that a pydantic error is
    about.

    Args:
        value: the value that was validated.
        loc: the location in pydantic's error: list indices, keys, and names of types in a union.
            The names of types are skipped.
        path: the path of `value` itself, which the result begins with.
        missing: whether the error is about a missing key. The last part of `loc` is then this key,
            although `value` does not contain it.
    """
    for index, part in enumerate(loc):
        if isinstance(value, list) and isinstance(part, int):
            path = f"{path}[{part}]"
            value = value[part]
        elif isinstance(value, dict) and (part in value or (missing and index == len(loc) - 1)):
            # Only the beginning of the key: an unknown key may be as long as the file.
            path = f"{path}.{str(part)[:40]}".removeprefix(".")
            value = value.get(part)
    return path
