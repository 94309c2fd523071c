"""Which values a setting accepts: those of its field's type, as pydantic checks it, described in words."""

import dataclasses
import functools
import operator
import re
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from megatron_tape.errors import ConfigError
from megatron_tape.home import PathError, expand_home

Count = Annotated[int, Field(ge=1)]
NotNegativeInt = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Decay = Annotated[float, Field(ge=0, lt=1)]


def whole_path(path: str) -> str:
    """Return a path with its `~` expanded. Raises PathError for control characters, with which lists of paths break."""
    if re.search(r"[\x00-\x1f\x7f-\x9f]", path):
        raise PathError("it holds a control character, such as a line break", "rename it")
    return expand_home(path)


PathText = Annotated[str, AfterValidator(whole_path)]
"""A path, whose `~` becomes the home directory."""


class PathSettingError(ConfigError):
    """A setting of the right type, with paths that cannot be expanded."""


def expand_keys(mapping: dict[Any, Any]) -> dict[Any, Any]:
    """Return a mapping of paths to numbers with whole paths; raises PathError if two keys are the same path."""
    expanded: dict[Any, Any] = {}
    for path in mapping:
        whole = whole_path(path)
        if whole in expanded:
            raise PathError(f"{expanded[whole]} and {path} are the same path", "keep one of them")
        expanded[whole] = path
    return {whole: mapping[path] for whole, path in expanded.items()}


Weighted = Annotated[dict[str, float], AfterValidator(expand_keys)]
"""A mapping of paths to numbers."""


_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
_BOUNDS = {"ge": "of at least", "gt": "above", "le": "up to", "lt": "below"}
_SHOWN_CHARACTERS = 200
UNIONS = (Union, types.UnionType)


@functools.cache
def _adapter(kind: Any) -> TypeAdapter:
    return TypeAdapter(kind)


def accept(key: str, value: Any, kind: Any) -> Any:
    """Return `value` converted to `kind`: whole numbers become floats if `kind` is float.

    Raises `ConfigError`, which names the setting, or the item of a list or mapping that is wrong, the value and what is
    accepted.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    try:
        accepted = _adapter(kind).validate_python(value, strict=True)
        if origin is not Literal or type(value) in map(type, arguments):  # in Python, True == 1
            return accepted
    except PathError as error:
        raise PathSettingError(key, f"is {shown(value)}, but {error.problem}", error.fix) from None
    except ValidationError:
        for option in arguments if origin in UNIONS else (kind,):
            option = get_args(option)[0] if get_origin(option) is Annotated else option
            if get_origin(option) is list and isinstance(value, list):
                for i, item in enumerate(value):
                    accept(f"{key}[{i}]", item, get_args(option)[0])
            if get_origin(option) is dict and isinstance(value, dict):
                for name, item in value.items():
                    accept(f"{key}.{name}", item, get_args(option)[1])
    fix = f"{'choose' if origin is Literal else 'set it to'} {describe(kind)}"
    raise ConfigError(key, f"is {shown(value)}", fix)


def describe(kind: Any) -> str:
    """Describe in words what a setting of type `kind` may be."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        if kind == PathText:
            return "a path"
        metadata = getattr(arguments[1], "metadata", ())
        bounds = {name: getattr(item, name) for item in metadata for name in _BOUNDS if hasattr(item, name)}
        return " ".join([describe(arguments[0]), *(f"{_BOUNDS[name]} {bound:,}" for name, bound in bounds.items())])
    if origin in UNIONS:
        words = [describe(option) for option in arguments]
        return " or ".join([", ".join(words[:-1]), words[-1]])
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin is dict and float in (arguments[1], *get_args(arguments[1])):
        return "a mapping of names to numbers"
    if origin is list and int in (arguments[0], *get_args(arguments[0])):
        return "a list of whole numbers, such as [1024, 2048]"
    if dataclasses.is_dataclass(kind):
        return "a mapping"
    return {list: "a list", dict: "a mapping"}.get(origin or kind) or _WORDS.get(kind, "a value")


def shown(value: Any) -> str:
    """Return a value as messages show it: in YAML's spelling, and shortened if it is long."""
    if dataclasses.is_dataclass(value):
        return "set"
    constants = {None: "null", True: "true", False: "false"}
    text = constants[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def clashes(config: Any, refused: bool, keys: str, fix: str, why: str = "") -> None:
    """Raise ConfigError if the settings `keys` cannot work together; the sentence gives their values, then `why`."""
    if refused:
        subjects = tuple(keys.split())
        first, *others = (shown(operator.attrgetter(key)(config)) for key in subjects)
        but = " and ".join(f"{key} is {value}" for key, value in zip(subjects[1:], others))
        raise ConfigError(subjects, f"is {first}, but {but}{why and ', '}{why}", fix)
