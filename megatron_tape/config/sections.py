"""Sections of settings: nested dataclasses, which pydantic validates and builds from nested
mappings.

A setting has a dotted key such as `train.spikes.action`. A field whose type is a dataclass is a
section. If several dataclasses are possible, another setting selects one: the key `task` inside the
section, or the field that `chosen_by` names, such as `model.position_encoding` for
`model.position`.
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
from megatron_tape.io.records import path_of_error

Section = TypeVar("Section")
_STRICT = ConfigDict(
    strict=True,
    extra="forbid",
    allow_inf_nan=False,
    use_attribute_docstrings=True,
    alias_generator=lambda field: field.removesuffix(
        "_"
    ),  # The key `from`, a keyword of Python, has the field from_.
)


def chosen_by(field: str, among: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a field whose type depends on another field of the same section.

    The value of the other `field` is a key of `among`; the type is the attribute `Settings` of that
    entry.
    """
    return {"chosen_by": field, "among": among}


@dataclass(frozen=True)
class Setting:
    """A setting or a nested section, as a field of a dataclass."""

    key: str
    """Dotted key, such as `train.spikes.action`."""
    kind: Any
    """Type of the field."""
    default: Any
    """Default value; `dataclasses.MISSING` if a value is required."""
    sections: tuple[type, ...]
    """The possible dataclasses of a nested section; empty for a setting."""
    within: type
    """The dataclass that has the field."""

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema of the field. Its `description` is the text after the field."""
        return _schemas(self.within)[self.key.rpartition(".")[2]]


def settings_of(section: type, name: str = "") -> Iterator[Setting]:
    """Yield a Setting for each field of `section`, whose key is `name`, and for the fields of its
    nested sections.

    If a nested section can be one of several dataclasses, a key that several of them have is
    yielded for each.
    """
    for item in dataclasses.fields(section):
        key = f"{name}.{_key(item)}" if name else _key(item)
        inner = _sections_in(section, item)
        if item.default_factory is MISSING:
            default = item.default
        else:
            default = item.default_factory()
        yield Setting(key, _hints(section)[item.name], default, inner, section)
        for one in inner:
            yield from settings_of(one, key)


def _sections_in(section: type, item: dataclasses.Field) -> tuple[type, ...]:
    """Return the possible dataclasses of a field that is a section, or an empty tuple for other
    fields.
    """
    if "among" in item.metadata:
        return tuple(chosen.Settings for chosen in item.metadata["among"].values())
    return tuple(
        kind for kind in _options(_hints(section)[item.name]) if dataclasses.is_dataclass(kind)
    )


def _options(kind: Any) -> Iterator[Any]:
    """Yield the members of a type that may be a union or `Annotated`, such as int and None for
    `Count | None`.
    """
    if get_origin(kind) is Annotated or get_origin(kind) in UNIONS:
        if get_origin(kind) is Annotated:
            options = get_args(kind)[:1]
        else:
            options = get_args(kind)
        for option in options:
            yield from _options(option)
    else:
        yield kind


def build(
    section: type[Section], values: Mapping[str, Any], name: str = "", fix: str = "add it"
) -> Section:
    """Build the dataclass `section` from its settings by key; a nested section is a mapping.

    Error messages contain the section's own key `name` ("" for all settings of a run) and, for a
    missing setting, `fix`, in which {key} is replaced by the setting's key. Raises ConfigError if a
    key is unknown, a required setting is missing or a value is invalid.
    """
    try:
        return validate_as(section, values)
    except ValidationError as error:
        raise _refusal(error, section, values, name, fix) from None
    except UnicodeEncodeError:  # Python decodes other bytes of the command line as surrogates.
        raise ConfigError(
            name or "a setting", "is not UTF-8 text", "correct it, or rename the file"
        ) from None


def validate_as(kind: Any, value: Any) -> Any:
    """Validate `value` as the type `kind` and return it; mappings become dataclasses. Raises
    ValidationError.
    """
    # Use JSON, since pydantic's strict mode does not accept mappings for dataclasses otherwise.
    return _adapter(kind).validate_json(
        json.dumps([value], default=as_dict, ensure_ascii=False).encode()
    )[0]


@functools.cache
def _adapter(kind: Any) -> TypeAdapter:
    # TypeAdapter accepts no config for a dataclass, but applies the config of a tuple to a
    # dataclass inside it.
    return TypeAdapter(tuple[kind], config=_STRICT)


def _refusal(
    error: ValidationError, section: type, values: Any, name: str, fix: str
) -> ConfigError:
    """Return a ConfigError for the first invalid value, or for all missing values if none is
    invalid (see `build`).
    """
    errors = error.errors(include_url=False)
    by_key = [
        (path_of_error(values, one["loc"][1:], name, one["type"] == "missing"), one)
        for one in errors
    ]
    invalid = [(key, one) for key, one in by_key if one["type"] != "missing"]
    if not invalid:
        missing = tuple(key for key, _ in by_key)
        if missing[1:]:
            others = f" (also missing: {', '.join(missing[1:])})"
        else:
            others = ""
        return ConfigError(missing, f"must be set{others}", fix.replace("{key}", missing[0]))
    # A value of a union has an error for each member of the union. Report those with the longest
    # path.
    key = max((key for key, _ in invalid if key.startswith(invalid[0][0])), key=len)
    same = [one for other, one in invalid if other == key]
    same = [
        one for one in same if not one["type"].endswith("_type")
    ] or same  # prefer members of the value's type
    first = same[0]
    if first["type"] == "unexpected_keyword_argument":
        return unknown_key(key, (setting.key for setting in settings_of(section, name)))
    if first["type"] == "union_tag_not_found":
        return ConfigError(f"{key}.task", "must be set", fix.replace("{key}", f"{key}.task"))
    if first["type"] == "union_tag_invalid":
        tags = first["ctx"]["expected_tags"].replace("'", "")
        return ConfigError(
            f"{key}.task", f"is {format_value(first['input']['task'])}", f"choose one of {tags}"
        )
    if isinstance(reason := first.get("ctx", {}).get("error"), UserError):
        return ConfigError(
            key, f"is {format_value(first['input'])}, which {reason.problem}", reason.fix
        )
    messages = " or ".join(dict.fromkeys(one["msg"] for one in same)).replace(
        " or Input should be", " or"
    )
    fix = re.sub("^(Input|List|Dictionary|String) ", "it ", messages).partition(
        " after validation"
    )[0]
    fix = fix.replace("an object", "a mapping").replace("valid array", "list")
    if first["input"] in (0, -1):  # values that disable a setting in other programs
        fix += _how_to_disable(
            next((one for one in settings_of(section, name) if one.key == key), None)
        )
    return ConfigError(key, f"is {format_value(first['input'])}", fix)


def _how_to_disable(setting: Setting | None) -> str:
    """Return how to disable a setting, as the end of a sentence; empty if it is neither optional
    nor an interval.
    """
    if setting is None:
        return ""
    description = setting.schema.get("description", "")
    if setting.default is None and "isabled by" in description:
        return "; remove it, or set it to null, to disable it"
    if "null disables" in description:
        return "; set it to null to disable it"
    interval = setting.key.endswith(".interval")
    if interval:
        return "; it cannot be disabled; to use the longest interval, set it to train.steps"
    return ""


def merge(section: type, values: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nested `values` of a section, overridden by those in `later`.

    Nested sections are merged too, unless `later` sets them to None. If `later` selects another
    dataclass for a nested section, its old values are dropped: all of them if the selecting key is
    inside the section (`task`), otherwise only those that the new dataclass does not have.
    """
    merged = {**values, **later}
    for item in dataclasses.fields(section):
        key = _key(item)
        inner = _sections_in(section, item)
        chooser = item.metadata.get("chosen_by")
        old = values.get(key)
        new = later.get(key, {})
        if not inner or not isinstance(old, dict) or not isinstance(new, dict):
            continue
        if len(inner) == 1:
            merged[key] = merge(inner[0], old, new)
        elif new.get("task", old.get("task")) != old.get("task"):
            merged[key] = new
        else:
            if chooser:
                chosen = item.metadata["among"].get(later.get(chooser))
            else:
                chosen = None
            if chosen is None:
                kept = old
            else:
                kept = {name: old[name] for name in old if name in keys_of(chosen.Settings)}
            merged[key] = kept | new
    return merged


def as_dict(section: Any) -> dict[str, Any]:
    """Return a section as nested dictionaries, with the keys of recipes."""
    return _adapter(type(section)).dump_python((section,), by_alias=True, warnings=False)[0]


def unflatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert `{"train.steps": 3}` to `{"train": {"steps": 3}}`; later items override earlier
    ones.
    """
    nested: dict[str, Any] = {}
    for key, value in values.items():
        *outer, last = key.split(".")
        inner = nested
        for part in outer:
            if not isinstance(inner.get(part), dict):
                inner[part] = {}
            inner = inner[part]
        old = inner.get(last)
        inner[last] = old | value if isinstance(old, dict) and isinstance(value, dict) else value
    return nested


def unknown_key(key: str, known: Iterable[str]) -> ConfigError:
    """Return the error for an unknown key. It suggests one of the `known` keys, or what to do
    instead.

    The suggestion is the counterpart of another training stack's setting, a similar key of the same
    section, or a key with the same last part, in this order. The last part alone does not connect
    nested sections of two top-level sections, such as `data.generator` and `logging.wandb`. Without
    a suggestion, the keys of the section are listed.
    """
    known = list(dict.fromkeys(known))
    if key in known:
        return ConfigError(
            key, "does not apply to the selected task or positional encoding", "remove it"
        )
    section, _, name = key.rpartition(".")
    if section in known and not any(other.startswith(f"{section}.") for other in known):
        return ConfigError(
            key, "is an unknown key", f"give {section} a mapping, such as {{{name}: ...}}"
        )
    names = {
        other.rpartition(".")[2]: other for other in known if other.rpartition(".")[0] == section
    }
    if "." not in section:
        other_name = name.lower().replace("-", "_")
    else:
        other_name = ""
    if other_name in WITHOUT_COUNTERPART and "train.steps" in known:
        return ConfigError(key, "is an unknown key", WITHOUT_COUNTERPART[other_name])
    close = [other for other in OTHER_NAMES.get(other_name, ()) if other in known]
    close = close or [names[other] for other in difflib.get_close_matches(name, names, n=1)]
    for other in known:
        related = (
            not section
            or other.split(".")[0] == key.split(".")[0]
            or other.count(".") == key.count(".") == 1
        )
        if related and other.rpartition(".")[2] == name:
            close = close or [other]
    if not section or not (names or "[" in key):  # The section is missing or misspelled.
        close = close or difflib.get_close_matches(key, known, n=1)
    if section and names:
        fix = f"choose from the keys of {section}: {', '.join(names)}"
    else:
        fix = "correct or remove it"
    fix = f"did you mean {' or '.join(close)}?" if close else fix
    return ConfigError(key, "is an unknown key", fix)


def keys_of(section: type) -> set[str]:
    """Return the keys of a section, such as `steps`. The keys inside nested sections are not
    included.
    """
    return {_key(item) for item in dataclasses.fields(section)}


def _key(item: dataclasses.Field) -> str:
    return item.name.removesuffix("_")


@functools.cache
def _hints(section: type) -> dict[str, Any]:
    return get_type_hints(section, include_extras=True)


@functools.cache
def _schemas(section: type) -> dict[str, Any]:
    """Return the JSON schema of every setting of a section, by key."""
    schemas: dict[str, Any] = {}
    for kind in reversed(
        section.__mro__
    ):  # pydantic reads the text after a field only in the class that declares it.
        if dataclasses.is_dataclass(kind):
            schema = _adapter(kind).json_schema()
            properties = schema["$defs"][schema["prefixItems"][0]["$ref"].rpartition("/")[2]][
                "properties"
            ]
            schemas |= {key: schemas.get(key, {}) | added for key, added in properties.items()}
    return schemas
