"""Settings by dotted keys, such as `train.spikes.action`: nested dataclasses that pydantic builds from mappings.

A field whose type is a dataclass is a section. If several dataclasses are possible, another key selects one: `task`
inside the section, or the field that `chosen_by` names, such as `model.position_encoding`.
"""

import dataclasses
import difflib
import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from megatron_tape.config.other_names import OTHER_NAMES, WITHOUT_COUNTERPART
from megatron_tape.config.values import UNIONS, format_value
from megatron_tape.errors import ConfigError, UserError
from megatron_tape.io.records import place_in

Section = TypeVar("Section")
_STRICT = ConfigDict(
    strict=True,
    extra="forbid",
    allow_inf_nan=False,
    use_attribute_docstrings=True,
    alias_generator=lambda field: field.removesuffix("_"),  # of fields such as from_, since `from` is Python's
)


def chosen_by(field: str, among: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata for a field with the `Settings` of the entry of `among` that another `field` names."""
    return {"chosen_by": field, "among": among}


@dataclass(frozen=True)
class Setting:
    """A setting, or a nested section."""

    key: str
    kind: Any
    """The type of its field."""
    default: Any
    """MISSING if it is required."""
    sections: tuple[type, ...]
    """The possible dataclasses, if it is a section."""
    within: type
    """The section that contains it."""

    @property
    def schema(self) -> dict[str, Any]:
        """Its JSON schema; `description` is the docstring of its field."""
        return _schemas(self.within)[self.key.rpartition(".")[2]]


def settings_of(section: type, name: str = "") -> Iterator[Setting]:
    """Yield all settings of a section and its nested sections, once for each dataclass that has them."""
    for item in dataclasses.fields(section):
        key, inner = f"{name}.{_key(item)}" if name else _key(item), _sections_in(section, item)
        default = item.default if item.default_factory is MISSING else item.default_factory()
        yield Setting(key, _hints(section)[item.name], default, inner, section)
        for one in inner:
            yield from settings_of(one, key)


def _sections_in(section: type, item: dataclasses.Field) -> tuple[type, ...]:
    """Return the possible dataclasses of a field that is a section; empty for other fields."""
    if "among" in item.metadata:
        return tuple(chosen.Settings for chosen in item.metadata["among"].values())
    return tuple(kind for kind in _options(_hints(section)[item.name]) if dataclasses.is_dataclass(kind))


def _options(kind: Any) -> Iterator[Any]:
    """Yield the types that a value of type `kind` may have."""
    if get_origin(kind) is Annotated or get_origin(kind) in UNIONS:
        options = get_args(kind)[:1] if get_origin(kind) is Annotated else get_args(kind)
        for option in options:
            yield from _options(option)
    else:
        yield kind


def build(section: type[Section], given: Mapping[str, Any], name: str = "", fix: str = "add it") -> Section:
    """Return a section, itself `name`, with the values that nested mappings give for its keys.

    Raises ConfigError for a key that is unknown or must be given and is not, and for a value of the wrong type.
    """
    try:
        return validate_as(section, given)
    except ValidationError as error:
        raise _refusal(error, section, given, name, fix) from None
    except UnicodeEncodeError:  # bytes of the command line, which Python reads as surrogates
        raise ConfigError(name or "a setting", "is not UTF-8 text", "correct it, or rename the file") from None


def validate_as(kind: Any, value: Any) -> Any:
    """Convert a value, whose sections may be mappings, to type `kind`. Raises pydantic's ValidationError."""
    # Use JSON, since pydantic's strict mode does not accept mappings for dataclasses otherwise.
    return _adapter(kind).validate_json(json.dumps([value], default=as_dict, ensure_ascii=False).encode())[0]


@functools.cache
def _adapter(kind: Any) -> TypeAdapter:
    # A dataclass itself has no settings of pydantic, but takes those of what it is in.
    return TypeAdapter(tuple[kind], config=_STRICT)


def _refusal(error: ValidationError, section: type, given: Any, name: str, fix: str) -> ConfigError:
    """Return the error for the first invalid value, or for the missing values if none is invalid."""
    errors = error.errors(include_url=False)
    found = [(place_in(given, one["loc"][1:], name, one["type"] == "missing"), one) for one in errors]
    wrong = [(key, one) for key, one in found if one["type"] != "missing"]
    if not wrong:
        missing = tuple(key for key, _ in found)
        others = f", as must {', '.join(missing[1:])}" if missing[1:] else ""
        return ConfigError(missing, f"must be set{others}", fix)
    # For a union, there is an error for each of its types; report the one with the longest path.
    key = max((key for key, _ in wrong if key.startswith(wrong[0][0])), key=len)
    same = [one for other, one in wrong if other == key]
    same = [one for one in same if not one["type"].endswith("_type")] or same  # of a type that the value has
    first = same[0]
    if first["type"] == "unexpected_keyword_argument":
        return unknown_key(key, (setting.key for setting in settings_of(section, name)))
    if first["type"] == "union_tag_not_found":
        return ConfigError(f"{key}.task", "must be set", fix)
    if first["type"] == "union_tag_invalid":
        tags = first["ctx"]["expected_tags"].replace("'", "")
        return ConfigError(f"{key}.task", f"is {format_value(first['input']['task'])}", f"choose one of {tags}")
    if isinstance(reason := first.get("ctx", {}).get("error"), UserError):
        return ConfigError(key, f"is {format_value(first['input'])}, which {reason.problem}", reason.fix)
    messages = " or ".join(dict.fromkeys(one["msg"] for one in same)).replace(" or Input should be", " or")
    fix = re.sub("^(Input|List|Dictionary|String) ", "it ", messages).partition(" after validation")[0]
    fix = fix.replace("an object", "a mapping").replace("valid array", "list")
    return ConfigError(key, f"is {format_value(first['input'])}", fix)


def merge(section: type, values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nested `values` of a section, updated with those that are `given` later.

    Nested sections keep the values that are not given, unless null is given. If another dataclass is selected, values
    of common keys are kept if a key outside the section selects it, and none if a key inside it does.
    """
    merged = {**values, **given}
    for item in dataclasses.fields(section):
        key, inner, chooser = _key(item), _sections_in(section, item), item.metadata.get("chosen_by")
        old, new = values.get(key), given.get(key, {})
        if not inner or not isinstance(old, dict) or not isinstance(new, dict):
            continue
        if len(inner) == 1:
            merged[key] = merge(inner[0], old, new)
        elif new.get("task", old.get("task")) != old.get("task"):
            merged[key] = new
        else:
            chosen = item.metadata["among"].get(given.get(chooser)) if chooser else None
            kept = old if chosen is None else {name: old[name] for name in old if name in keys_of(chosen.Settings)}
            merged[key] = kept | new
    return merged


def as_dict(section: Any) -> dict[str, Any]:
    """Return a section as nested dictionaries, with the keys of recipes."""
    return _adapter(type(section)).dump_python((section,), by_alias=True, warnings=False)[0]


def unflatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert settings by dotted keys to nested mappings; later ones override earlier ones."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        *outer, last = key.split(".")
        inner = found
        for part in outer:
            if not isinstance(inner.get(part), dict):
                inner[part] = {}
            inner = inner[part]
        old = inner.get(last)
        inner[last] = old | value if isinstance(old, dict) and isinstance(value, dict) else value
    return found


def unknown_key(key: str, known: Iterable[str]) -> ConfigError:
    """Return the error for a key that does not exist, with the `known` key that was probably meant.

    That is the counterpart of another training stack's setting, a similar key of the same section, or the same key of
    another section, in this order.
    """
    known = list(dict.fromkeys(known))
    if key in known:
        return ConfigError(key, "does not belong to what its section is set to", "remove it")
    whole, _, name = key.rpartition(".")
    if whole in known and not any(other.startswith(f"{whole}.") for other in known):
        return ConfigError(key, "is an unknown key", f"give {whole} a mapping, such as {{{name}: ...}}")
    names = {other.rpartition(".")[2]: other for other in known if other.rpartition(".")[0] == whole}
    other_name = name.lower().replace("-", "_") if "." not in whole else ""
    if other_name in WITHOUT_COUNTERPART and "train.steps" in known:
        return ConfigError(key, "is an unknown key", WITHOUT_COUNTERPART[other_name])
    close = [other for other in OTHER_NAMES.get(other_name, ()) if other in known]
    close = close or [names[other] for other in difflib.get_close_matches(name, names, n=1)]
    close = close or [other for other in known if other.rpartition(".")[2] == name][:1]
    if not whole or not (names or "[" in key):  # the section is missing or misspelled
        close = close or difflib.get_close_matches(key, known, n=1)
    fix = f"did you mean {' or '.join(close)}?" if close else "correct or remove it"
    return ConfigError(key, "is an unknown key", fix)


def keys_of(section: type) -> set[str]:
    """Return the keys of a section, without those of nested sections."""
    return {_key(item) for item in dataclasses.fields(section)}


def _key(item: dataclasses.Field) -> str:
    return item.name.removesuffix("_")


@functools.cache
def _hints(section: type) -> dict[str, Any]:
    return get_type_hints(section, include_extras=True)


@functools.cache
def _schemas(section: type) -> dict[str, Any]:
    """Return the JSON schema of every setting of a section."""
    found: dict[str, Any] = {}
    for kind in reversed(section.__mro__):  # only the class that has a field has the text after it
        if dataclasses.is_dataclass(kind):
            whole = _adapter(kind).json_schema()
            properties = whole["$defs"][whole["prefixItems"][0]["$ref"].rpartition("/")[2]]["properties"]
            found |= {key: found.get(key, {}) | schema for key, schema in properties.items()}
    return found
