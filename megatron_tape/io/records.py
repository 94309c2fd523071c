"""Small JSON and YAML files that programs leave for each other: written whole, and checked when they are read.

A record may be truncated, edited by hand, written by another version, or a different file altogether. Nothing in it is
used before its size and shape have been checked. torch is not imported, and PyYAML only when a YAML file is read.
"""

import functools
import json
import math
import os
import stat
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import SchemaValidator

from megatron_tape.errors import FileError
from megatron_tape.io.files import write_whole

RECORD_BYTES = 64 << 20
"""Maximum size of a record in bytes; a manifest of 100,000 files is smaller."""


_RESTORE = "restore it, or remove it if nothing needs it"


def write_record(path: str | Path, value: Any, *, durable: bool = True) -> None:
    """Write `value` as JSON atomically. Raises ValueError if it contains a number that is not finite."""
    write_whole(path, [(json.dumps(value, indent=1, allow_nan=False) + "\n").encode()], durable=durable)


def read_record(path: str | Path, shape: Any, limit: int = RECORD_BYTES) -> Any:
    """Return the JSON value in a file, after checking that it has `shape`, a type that `parse_record` accepts.

    Raises:
        OSError: if the file does not exist or cannot be read.
        FileError: if it has more than `limit` bytes, is not JSON, or does not have `shape`.
    """
    try:
        return parse_record(read_small(path, limit), shape)
    except ValueError as error:
        raise FileError(str(path), f"cannot be used: {error}", _RESTORE) from None


def read_yaml(path: str | Path, shape: Any, limit: int = 1 << 20) -> Any:
    """Return the YAML value in a file, read as strictly as a recipe, and checked as `read_record` checks JSON."""
    try:
        value = parse_yaml(read_small(path, limit), shape)
        json.dumps(value, allow_nan=False)  # fails for a number that is not finite, and for what JSON does not have
        return value
    except (TypeError, ValueError) as error:
        raise FileError(str(path), f"cannot be used: {error}", _RESTORE) from None


def parse_yaml(text: str | bytes, shape: Any) -> Any:
    """Parse YAML as `io.strict_yaml` does, and check its shape, as `parse_record` does with JSON."""
    from megatron_tape.io.strict_yaml import parse_value

    try:
        value = parse_value(text)
    except ValueError as error:
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
    """Parse JSON and check its shape. Raises ValueError with the problem.

    `shape` is a type that pydantic checks, strictly: a TypedDict (other keys are allowed too), `dict[str, T]`,
    `list[T]`, a union, a Literal, `int`, `float`, `str`, `bool`, `None` or `Any`. Numbers are finite. A whole
    number of more than 64 bits is read as a float, which is refused where an `int` belongs.
    """
    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        if "\0" in text:
            raise ValueError("it holds NUL characters, as after a power cut")
        value = json.loads(text, parse_constant=_number, parse_float=_number, parse_int=_whole_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text (byte {error.start})") from None
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error})") from None
    check_shape(value, shape)
    return value


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is not a finite number")
    return value


def _whole_number(text: str) -> int | float:
    # Hugging Face's tokenizers have a largest length of 10^30. Where a whole number belongs, a float is refused.
    value = int(text)
    return value if -(2**63) <= value < 2**63 else _number(text)


@functools.cache
def validator(shape: Any) -> SchemaValidator:
    """Return pydantic's validator of a type, which stops at the first wrong item of a list or mapping.

    Otherwise a list of millions of wrong items would take gigabytes for as many errors.
    """
    schema = TypeAdapter(shape).core_schema
    parts = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            if part.get("type") in ("list", "dict", "tuple", "set"):
                part["fail_fast"] = True
            parts += part.values()
        elif isinstance(part, (list, tuple)):
            parts += part
    return SchemaValidator(schema)


def check_shape(value: Any, shape: Any, place: str = "") -> None:
    """Raise ValueError if `value`, as parsed from JSON or YAML, does not have `shape` (see `parse_record`)."""
    try:
        validator(shape).validate_python(value, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = place_in(value, first["loc"], place, first["type"] == "missing")
        if first["type"] == "missing":
            raise ValueError(f"{where} is missing") from None
        kinds: dict[type, str] = {dict: "an object", list: "a list"}
        shown = kinds.get(type(first["input"])) or repr(first["input"])[:40]
        raise ValueError(f"{where or 'it'} is {shown}: {first['msg']}") from None


def place_in(value: Any, parts: tuple[int | str, ...], place: str, missing: bool) -> str:
    """Return where in `value`, itself `place`, pydantic found something wrong, without its names of a union's types.

    If it is `missing`, the last part is the key that is not in `value`.
    """
    for index, part in enumerate(parts):
        if isinstance(value, list) and isinstance(part, int):
            place, value = f"{place}[{part}]", value[part]
        elif isinstance(value, dict) and (part in value or (missing and index == len(parts) - 1)):
            place, value = f"{place}.{str(part)[:40]}" if place else str(part)[:40], value.get(part)
    return place
