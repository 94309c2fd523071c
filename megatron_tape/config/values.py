"""Which values a setting accepts: check values against the types of the dataclasses' fields, described in words."""

import types
from typing import Any, Literal, Union, get_args, get_origin

from megatron_tape.errors import ConfigError

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
_SHOWN_CHARACTERS = 200


def accept(name: str, value: Any, kind: Any) -> Any:
    """Return `value` converted to `kind`: whole numbers become floats if `kind` is float.

    Raises `ConfigError`, which names the setting, the value and what is accepted.
    """
    try:
        return _converted(value, kind)
    except (TypeError, OverflowError):
        _accept_parts(name, value, kind)
        choices = get_origin(kind) is Literal
        fix = f"choose {describe(kind)}" if choices else f"set it to {describe(kind)}"
        raise ConfigError(f"{name} is {shown(value)}; {fix}") from None


def _accept_parts(name: str, value: Any, kind: Any) -> None:
    """Raise `ConfigError` for the first part of a list or a mapping that is of the wrong type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is list and isinstance(value, list):
        for i, item in enumerate(value):
            accept(f"{name}[{i}]", item, arguments[0])
    if origin is dict and isinstance(value, dict):
        for key, item in value.items():
            accept(f"{name}.{key}", item, arguments[1])


def describe(kind: Any) -> str:
    """Describe in words what a setting of type `kind` may be."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        words = [describe(option) for option in arguments]
        return " or ".join([", ".join(words[:-1]), words[-1]])
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin is dict and arguments[1] in (float, int | float):
        return "a mapping of names to numbers"
    if origin is list and arguments[0] is int:
        return "a list of whole numbers, such as [1024, 2048]"
    return {list: "a list", dict: "a mapping"}.get(origin or kind) or _WORDS.get(kind, "a value")


def shown(value: Any) -> str:
    """Return a value as messages show it: in YAML's spelling, and shortened if it is long."""
    text = (
        {None: "null", True: "true", False: "false"}[value] if value is None or value is True or value is False else ""
    )
    text = text or repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _converted(value: Any, kind: Any) -> Any:
    """Return `value` as `kind`; raises TypeError if that is not possible."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        for option in arguments:
            try:
                return _converted(value, option)
            except (TypeError, OverflowError):
                continue
    elif origin is Literal:
        # In Python, True == 1.
        if any(value == choice and type(value) is type(choice) for choice in arguments):
            return value
    elif origin is list and isinstance(value, list):
        return [_converted(item, arguments[0]) for item in value]
    elif origin is dict and isinstance(value, dict):
        return {_converted(key, arguments[0]): _converted(item, arguments[1]) for key, item in value.items()}
    elif origin is None and isinstance(value, (int, float) if kind is float else kind):
        if kind is bool or not isinstance(value, bool):
            return float(value) if kind is float else value
    raise TypeError
