"""Which values a setting accepts: check values against the types of the dataclasses' fields, described in words."""

import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from megatron_tape.config.schema import is_positive, keys_of
from megatron_tape.errors import ConfigError, refuse

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


LARGEST = {
    "model.num_layers": 10_000,
    "model.hidden_size": 2**20,
    "model.ffn_hidden_size": 2**24,
    "model.num_attention_heads": 2**16,
    "model.kv_channels": 2**16,
    "model.position_mlp_size": 2**20,
    "model.seq_length": 2**30,
    "model.vocab_size": 2**28,
    "parallel.tensor_model_parallel_size": 2**16,
    "train.steps": 10**8,
    "train.global_batch_size": 10**6,
    "train.micro_batch_size": 10**6,
    "train.eval_steps": 10**6,
    "train.seed": 2**32 - 1,
}
"""No run comes near these sizes, and arithmetic with larger ones takes minutes; numpy accepts no larger seed."""


def check_section(name: str, section: Any, positive: tuple[str, ...] = (), not_negative: tuple[str, ...] = ()) -> None:
    """Check types, choices, signs and sizes of one section; None is allowed if it stands for a derived value."""
    kinds = get_type_hints(type(section))
    for key in (item.name for item in keys_of(type(section))):
        value, kind = getattr(section, key), kinds[key]
        accept(f"{name}.{key}", value, kind)
        if value is None:
            continue
        if key in positive:
            refuse(not is_positive(value), f"{name}.{key} is {shown(value)}; set it to a number above 0")
        if key in not_negative:
            wrong = value != 0 and not is_positive(value)
            refuse(wrong, f"{name}.{key} is {shown(value)}; set it to 0 or a positive number")
        if (largest := LARGEST.get(f"{name}.{key}")) is not None:
            refuse(value > largest, f"{name}.{key} is {shown(value)}; set it to at most {largest}")


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
