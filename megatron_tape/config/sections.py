"""Sections of settings: nested dataclasses, which pydantic validates and builds from nested
mappings.

A setting has a dotted key such as `train.spikes.action`. A field whose type is a dataclass is a
section. If several dataclasses are possible, another setting selects one: the key `task` inside the
section, or the field that the metadata `chosen_by` names, such as `model.position_encoding` for
`model.position`. In the second case, the metadata `among` maps the values of that field to classes
with the dataclass as their attribute `Settings`.
"""

import dataclasses
import difflib
import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from megatron_tape.config import foreign_keys
from megatron_tape.config.values import UNIONS, format_value
from megatron_tape.errors import ConfigError, UserError
from megatron_tape.io.records import path_of_error

Section = TypeVar("Section")
_STRICT = ConfigDict(
    strict=True,
    extra="forbid",
    allow_inf_nan=False,
    use_attribute_docstrings=True,
    # The key `from`, a keyword of Python, has the field from_.
    alias_generator=lambda field: field.removesuffix("_"),
)
_ALLOWED = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a mapping",
    "dataclass_type": "a mapping",
    "greater_than": "a number above {gt:.10g}",
    "greater_than_equal": "a number of at least {ge:.10g}",
    "less_than": "a number below {lt:.10g}",
    "less_than_equal": "a number up to {le:.10g}",
    "literal_error": "{expected}",
    "union_tag_invalid": "a task: {expected_tags}",
    "union_tag_not_found": "a task",
    "too_short": "at least {min_length} items",
    "too_long": "at most {max_length} items",
    "string_too_short": "at least {min_length} characters",
}
"""What a setting must be, by the type of pydantic's error."""


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
    """Yield a Setting for each field of `section`, and after a nested section those of its fields.

    `name` is the key of `section` itself, or "" for all settings of a run. If a nested section can
    be one of several dataclasses, a key that several of them have is yielded for each.
    """
    for field in dataclasses.fields(section):
        key = ".".join(filter(None, (name, _key(field))))
        default = field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        sections = _sections_in(section, field)
        kind = _hints(section)[field.name]
        yield Setting(key, kind, default, sections=sections, within=section)
        for nested in sections:
            yield from settings_of(nested, name=key)


def _sections_in(section: type, field: dataclasses.Field) -> tuple[type, ...]:
    """Return the possible dataclasses of a field that is a nested section, or an empty tuple for
    other fields.
    """
    # The metadata come first: the type of such a field is Any.
    if "among" in field.metadata:
        return tuple(chosen.Settings for chosen in field.metadata["among"].values())
    members = _union_members(_hints(section)[field.name])
    return tuple(kind for kind in members if dataclasses.is_dataclass(kind))


def _union_members(kind: Any) -> Iterator[Any]:
    """Yield the members of a union, such as int and None for `Count | None`, or the type itself if
    it is not a union. `Annotated` types are unwrapped.
    """
    if get_origin(kind) is Annotated:
        yield from _union_members(get_args(kind)[0])
    elif get_origin(kind) in UNIONS:
        for member in get_args(kind):
            yield from _union_members(member)
    else:
        yield kind


def build(
    section: type[Section], values: Mapping[str, Any], name: str = "", fix: str = "add it"
) -> Section:
    """Build the dataclass `section` from its settings by key; a nested section is a mapping.

    Args:
        section: the dataclass.
        values: the settings that are given; others have their defaults.
        name: the key of `section` itself, with which keys in errors begin. "" for all settings of a
            run.
        fix: the fix in an error about a missing setting. {key} in it is replaced by the setting's
            key.

    Raises:
        ConfigError: if a key is unknown, a required setting is missing or a value is invalid.
    """
    try:
        return validate_as(section, values)
    except ValidationError as error:
        raise _refusal(error, section, values, name, fix) from None
    except UnicodeEncodeError:
        # Bytes of the command line that are not UTF-8 arrive as surrogates, which JSON in UTF-8
        # cannot contain.
        raise ConfigError(
            name or "a setting", "is not UTF-8 text", "correct it, or rename the file"
        ) from None


def validate_as(kind: Any, value: Any) -> Any:
    """Validate `value` as the type `kind` and return it; mappings become dataclasses. Raises
    ValidationError.
    """
    # pydantic's strict mode accepts a mapping for a dataclass only in JSON. A value that is a
    # section already is converted back to a mapping. The adapter takes a tuple of one value, which
    # is a list in JSON.
    text = json.dumps([value], default=as_dict, ensure_ascii=False)
    return _adapter(kind).validate_json(text.encode())[0]


def is_valid(value: Any, kind: Any) -> bool:
    """Return whether `value` is valid for the type `kind`."""
    try:
        validate_as(kind, value)
    except ValueError:  # pydantic's ValidationError, or UnicodeEncodeError
        return False
    return True


@functools.cache
def _adapter(kind: Any) -> TypeAdapter:
    """Return pydantic's validator of a tuple that contains one value of the type `kind`."""
    # TypeAdapter accepts no config for a dataclass, but applies the config of a tuple to a
    # dataclass inside it.
    return TypeAdapter(tuple[kind], config=_STRICT)


def _refusal(
    error: ValidationError, section: type, values: Any, name: str, fix: str
) -> ConfigError:
    """Convert pydantic's error to a ConfigError about the first invalid value, or about all missing
    settings if no value is invalid.

    `values` were validated as the dataclass `section`, whose key is `name`. `fix` is the advice
    about missing settings, in which {key} is replaced by the first missing key.
    """
    settings = list(settings_of(section, name))
    # The key of each invalid or missing setting, and pydantic's description of the error.
    keyed_errors = []
    for item in error.errors(include_url=False):
        # The first part of the location is the index in the tuple of `_adapter`.
        location = item["loc"][1:]
        is_missing = item["type"] == "missing"
        keyed_errors.append((path_of_error(values, location, name, is_missing), item))

    # A missing setting may be a consequence of an invalid one, such as a misspelled key.
    invalid = [(key, item) for key, item in keyed_errors if item["type"] != "missing"]
    if not invalid:
        missing = tuple(key for key, _ in keyed_errors)
        problem = "must be set"
        if len(missing) > 1:
            problem += f" (also missing: {', '.join(missing[1:])})"
        return ConfigError(missing, problem, fix.replace("{key}", missing[0]))

    # For a value of a union, pydantic has an error for each member of the union. Inside the member
    # that fits best, the error has the longest key: for {prefix: {a: -1}}, it is that of
    # data.prefix.a, not of data.prefix. Of several errors with this key, those about a wrong type,
    # such as int_type, say less than the others.
    first_key, _ = invalid[0]
    key = max((key for key, _ in invalid if key.startswith(first_key)), key=len)
    same_key = [item for other, item in invalid if other == key]
    errors = [item for item in same_key if not item["type"].endswith("_type")] or same_key
    first = errors[0]
    shown = format_value(first["input"])

    if first["type"] == "unexpected_keyword_argument":
        return unknown_key(key, (setting.key for setting in settings))
    # A validator of this project, such as `expand_path`, has raised its own error.
    reason = first.get("ctx", {}).get("error")
    if isinstance(reason, UserError):
        return ConfigError(key, f"is {shown}, which {reason.problem}", reason.fix)

    allowed = []
    for item in errors:
        words = _ALLOWED.get(item["type"], item["msg"])
        allowed.append(words.format(**item.get("ctx", {})))
    # pydantic's errors do not say that null is allowed.
    if any(
        {"type": "null"} in setting.schema.get("anyOf", ())
        for setting in settings
        if setting.key == key
    ):
        allowed.append("null")
    return ConfigError(key, f"is {shown}", f"give {' or '.join(dict.fromkeys(allowed))}")


def merge(section: type, values: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nested `values` of a section, overridden by those in `later`.

    Nested sections are merged too, unless `later` sets them to None. If `later` selects another
    dataclass for a nested section, its old values are dropped: all of them if the selecting key is
    inside the section (`task`), otherwise only those that the new dataclass does not have.
    """
    # The nested sections of `later` replace the old ones, unless they are merged below.
    merged = {**values, **later}
    for field in dataclasses.fields(section):
        key = _key(field)
        old = values.get(key)
        new = later.get(key, {})
        sections = _sections_in(section, field)
        if not sections or not isinstance(old, dict) or not isinstance(new, dict):
            continue

        if len(sections) == 1:
            merged[key] = merge(sections[0], old, new)
        # The task stays the same, or there is none since another setting selects the dataclass.
        elif new.get("task", old.get("task")) == old.get("task"):
            among = field.metadata.get("among", {})
            # None unless `later` contains the field that selects the dataclass.
            chosen = among.get(later.get(field.metadata.get("chosen_by")))
            # Drop the old values that the selected dataclass does not have.
            if chosen is not None:
                old = {name: old[name] for name in old if name in keys_of(chosen.Settings)}
            merged[key] = old | new
    return merged


def as_dict(section: Any) -> dict[str, Any]:
    """Return a section as nested dictionaries, with the keys of recipes."""
    kind: Any = type(section)
    # Values of the wrong type are reported when settings are validated, not here. The adapter takes
    # a tuple of one value.
    return _adapter(kind).dump_python((section,), by_alias=True, warnings=False)[0]


def unflatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert `{"train.steps": 3}` to `{"train": {"steps": 3}}`; later items override earlier
    ones.
    """
    nested = {}
    for key, value in values.items():
        *outer, last = key.split(".")
        inner = nested
        for part in outer:
            if not isinstance(inner.get(part), dict):
                inner[part] = {}
            inner = inner[part]
        # A mapping is merged with single settings of the same section that come before it.
        if isinstance(value, dict) and isinstance(inner.get(last), dict):
            value = inner[last] | value
        inner[last] = value
    return nested


def unknown_key(key: str, known: Iterable[str]) -> ConfigError:
    """Return the error for an unknown key. It suggests one of the `known` keys, or what to do
    instead.

    The suggestion is the first of these that exists: the setting that another program calls by this
    name; a similar key of the same section; a key with the same last part, unless the unknown key
    is in a nested section; a similar key of all, if the section is unknown. Without a suggestion,
    the keys of the section are listed.
    """
    known = list(dict.fromkeys(known))
    section, _, name = key.rpartition(".")
    # The keys of the same section by their last part.
    siblings = {
        other.rpartition(".")[2]: other for other in known if other.rpartition(".")[0] == section
    }

    # `known` has the settings of all tasks and encodings, also of those that are not selected.
    if key in known:
        return ConfigError(
            key, "does not apply to the selected task or positional encoding", "remove it"
        )
    # Megatron's options have dashes, its settings underscores.
    foreign = name.replace("-", "_")
    if foreign in foreign_keys.FIXES:
        return ConfigError(key, "is an unknown key", foreign_keys.FIXES[foreign])
    # The key is inside a setting that is not a section, such as `train.steps`.
    if section in known and not siblings:
        return ConfigError(
            key, "is an unknown key", f"give {section} a mapping, such as {{{name}: ...}}"
        )

    suggestions = [siblings[other] for other in difflib.get_close_matches(name, siblings)]
    if "." not in section:
        suggestions += [other for other in known if other.rpartition(".")[2] == name]
    # The section is missing or unknown, and it is not an item of a list such as `data.stages[0]`,
    # which is never in `known`.
    if not section or not (siblings or "[" in section):
        suggestions += difflib.get_close_matches(key, known)
    fix = "correct or remove it"
    if suggestions:
        fix = f"did you mean {suggestions[0]}?"
    elif siblings and section:
        fix = f"choose from the keys of {section}: {', '.join(siblings)}"
    elif siblings:
        fix = f"choose from the keys {', '.join(siblings)}"
    return ConfigError(key, "is an unknown key", fix)


def keys_of(section: type) -> set[str]:
    """Return the keys of a section, such as `steps`. The keys inside nested sections are not
    included.
    """
    return {_key(field) for field in dataclasses.fields(section)}


def _key(field: dataclasses.Field) -> str:
    """Return the key of a field in recipes: `from` for `from_`, for others the name."""
    return field.name.removesuffix("_")


@functools.cache
def _hints(section: type) -> dict[str, Any]:
    """Return the types of a section's fields by name."""
    return get_type_hints(section, include_extras=True)


@functools.cache
def _schemas(section: type) -> dict[str, Any]:
    """Return the JSON schema of every setting of a section, by key."""
    schemas = {}
    # pydantic reads the text after a field only in the class that declares it, so the schemas of
    # the base classes are merged with that of the class itself.
    for kind in reversed(section.__mro__):
        if dataclasses.is_dataclass(kind):
            # The schema of the tuple refers to the schema of the dataclass in `$defs`.
            schema = _adapter(kind).json_schema()
            name = schema["prefixItems"][0]["$ref"].rpartition("/")[2]
            for key, added in schema["$defs"][name]["properties"].items():
                schemas[key] = schemas.get(key, {}) | added
    return schemas
