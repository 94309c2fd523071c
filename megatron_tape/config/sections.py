"""Settings by dotted keys, such as `train.spikes.action`, and the nested dataclasses that are built from their values.

A field whose type is a dataclass is a section. Where it may be one of several, another key chooses: a union's `task`,
or the field that `chosen_by` names, such as `model.position_encoding`. pydantic checks the types of all other fields.
"""

import ast
import dataclasses
import difflib
import functools
import inspect
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from megatron_tape.config.values import UNIONS, accept, shown
from megatron_tape.errors import ConfigError, refuse

Section = TypeVar("Section")


def chosen_by(field: str, among: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a field that holds the `Settings` of what another field chooses `among` these by name."""
    return {"chosen_by": field, "among": among}


@dataclass(frozen=True)
class Setting:
    """A setting, or a section that is within another."""

    key: str
    kind: Any
    default: Any
    """MISSING if it must be given."""
    explanation: str
    sections: tuple[type, ...]
    """What it may be if it is a section."""


def settings_of(section: type, name: str = "") -> Iterator[Setting]:
    """Yield every setting of a section and of those within it, once for each section that may have it."""
    for item in dataclasses.fields(section):
        key, kind, inner = _dotted(name, item), _hints(section)[item.name], choices(section, item)
        yield Setting(key, kind, default_of(item), _explanations(section).get(item.name, ""), tuple(inner.values()))
        for one in inner.values():
            yield from settings_of(one, key)


def choices(section: type, item: dataclasses.Field) -> dict[str, type]:
    """Return the sections that a field may hold, by what chooses one, or by "" if it is one; none for a setting."""
    if "among" in item.metadata:
        return {name: chosen.Settings for name, chosen in item.metadata["among"].items()}
    return _typed_choices(section, item.name)


@functools.cache
def _typed_choices(section: type, field: str) -> dict[str, type]:
    kind = _hints(section)[field]
    options = get_args(kind) if get_origin(kind) in UNIONS else (kind,)
    found = [option for option in options if dataclasses.is_dataclass(option)]
    return {option.task if len(found) > 1 else "": option for option in found}  # type: ignore[union-attr]


def build(section: type[Section], given: Mapping[str, Any], name: str = "", fix: str = "add it") -> Section:
    """Return a section, itself `name`, with the values that nested mappings give for its keys.

    Raises ConfigError for a key that is unknown or must be given and is not, and for a value of the wrong type.
    """
    missing: list[str] = []
    built = _build(section, given, name, missing)
    others = f", as must {', '.join(missing[1:])}" if missing[1:] else ""
    refuse(bool(missing), tuple(missing) or "", f"must be set{others}", fix)
    return built


def _build(section: type, given: Mapping[str, Any], name: str, missing: list[str]) -> Any:
    arguments, rest = {}, dict(given)
    for item in dataclasses.fields(section):
        key, kind, inner = _dotted(name, item), _hints(section)[item.name], choices(section, item)
        value = rest.pop(_key(item), MISSING)
        if value is MISSING and default_of(item) is not MISSING:
            continue
        if inner and not (value is None and type(None) in get_args(kind)):
            value = {} if value is MISSING else accept(key, value, dict[str, Any])
            chosen = _chosen(section, item, key, given, value)
            elsewhere = _keys_of(*inner.values()) - _keys_of(chosen)
            problem = f"is an unknown key with this {_chooser(section, item, key)[0]}"
            for other in value:
                refuse(other in elsewhere, f"{key}.{other}", problem, "remove it, or choose another")
            value = _build(chosen, value, key, missing)
        elif value is MISSING:
            missing.append(key)
        elif not inner:
            value = _checked(key, value, kind, missing)
        arguments[item.name] = value
    if rest:
        unknown = f"{name}.{next(iter(rest))}" if name else next(iter(rest))
        raise unknown_key(unknown, (setting.key for setting in settings_of(section, name)))
    return None if missing else section(**arguments)


def _chosen(section: type, item: dataclasses.Field, key: str, outer: Mapping[str, Any], value: dict[str, Any]) -> type:
    """Return the section that `value` is for; raises ConfigError if what chooses it is none of the choices."""
    inner, (chooser, default) = choices(section, item), _chooser(section, item, key)
    if "" in inner:
        return inner[""]
    name = (value if chooser.startswith(f"{key}.") else outer).get(chooser.rpartition(".")[2], default)
    if isinstance(name, str) and name in inner:
        return inner[name]
    close = difflib.get_close_matches(str(name).lower(), inner, n=1)
    fix = f"{f'did you mean {close[0]}? There are' if close else 'choose one of'} {', '.join(inner)}"
    raise ConfigError(chooser, f"is {shown(name)}" if name else "must be set", fix)


def _chooser(section: type, item: dataclasses.Field, key: str) -> tuple[str, Any]:
    """Return the key that chooses which section the field `key` holds, and its default."""
    field = item.metadata.get("chosen_by")
    return (f"{key}.task", None) if field is None else (f"{key.rpartition('.')[0]}.{field}", getattr(section, field))


def _checked(key: str, value: Any, kind: Any, missing: list[str]) -> Any:
    """Return a value converted to the type of its setting; the items of a list may be sections."""
    of_lists = [option for option in get_args(kind) if get_origin(option) is list]
    sections = [get_args(option)[0] for option in of_lists if dataclasses.is_dataclass(get_args(option)[0])]
    if not sections or not isinstance(value, list):
        return accept(key, value, kind)
    built = []
    for i, item in enumerate(value):
        place = f"{key}[{i}]"
        is_section = isinstance(item, sections[0])
        built.append(item if is_section else _build(sections[0], accept(place, item, dict[str, Any]), place, missing))
    return built


def merge(section: type, values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested `values` of a section with those that are `given` later.

    A section within it keeps what is not given, unless null is. Where another one is chosen, it keeps the keys that
    both have if a key beside it chooses, and none if one within it does.
    """
    merged = {**values, **given}
    for item in dataclasses.fields(section):
        key, inner, sibling = _key(item), choices(section, item), item.metadata.get("chosen_by")
        old, new = values.get(key), given.get(key, {})
        if not inner or not isinstance(old, dict) or not isinstance(new, dict):
            continue
        if "" in inner:
            merged[key] = merge(inner[""], old, new)
            continue
        if sibling is None and new.get("task", old.get("task")) != old.get("task"):
            old = {}
        elif given.get(sibling) in inner:
            old = {name: value for name, value in old.items() if name in _keys_of(inner[given[sibling]])}
        merged[key] = old | new
    return merged


def as_dict(section: Any) -> dict[str, Any]:
    """Return a section as nested plain dictionaries, by the keys that recipes use."""
    return {_key(item): _plain(getattr(section, item.name)) for item in dataclasses.fields(section)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return as_dict(value)
    return [_plain(item) for item in value] if isinstance(value, list) else value


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings that are given by dotted keys as nested mappings; later ones override earlier ones."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        *outer, last = key.split(".")
        inner = found
        for part in outer:
            if not isinstance(inner.get(part), dict):
                inner[part] = {}
            inner = inner[part]
        value, old = _plain(value), inner.get(last)
        inner[last] = old | value if isinstance(old, dict) and isinstance(value, dict) else value
    return found


def with_values(section: Section, values: Mapping[str, Any], name: str) -> Section:
    """Return a section, itself `name`, with other values of these settings, by dotted keys. Raises as `build` does."""
    return build(type(section), merge(type(section), as_dict(section), nested(values)[name]), name)


def unknown_key(key: str, known: Iterable[str]) -> ConfigError:
    """Return the error for a key that does not exist, with the `known` one that has its name or is most similar."""
    known = [other for other in dict.fromkeys(known) if not key.startswith(f"{other}.")]
    section, _, name = key.rpartition(".")
    beside = [other.rpartition(".")[2] for other in known if other.rpartition(".")[0] == section]
    close = [f"{section}.{other}" for other in difflib.get_close_matches(name, beside, n=1) if section]
    close += [other for other in known if other.rpartition(".")[2] == name]
    close += difflib.get_close_matches(key, known, n=1)
    return ConfigError(key, "is an unknown key", f"did you mean {close[0]}?" if close else "correct or remove it")


def default_of(item: dataclasses.Field) -> Any:
    """Return the default of a field, or MISSING."""
    return item.default if item.default_factory is MISSING else item.default_factory()


def _key(item: dataclasses.Field) -> str:
    """Return the key of a field in recipes: Python's keywords have an underscore as fields."""
    return item.name.removesuffix("_")


def _keys_of(*sections: type) -> set[str]:
    return {_key(item) for section in sections for item in dataclasses.fields(section)}


def _dotted(name: str, item: dataclasses.Field) -> str:
    return f"{name}.{_key(item)}" if name else _key(item)


@functools.cache
def _hints(section: type) -> dict[str, Any]:
    return get_type_hints(section, include_extras=True)


@functools.cache
def _explanations(section: type) -> dict[str, str]:
    """Return the text that follows every field of a dataclass."""
    found = {}
    for kind in reversed(section.__mro__):
        with suppress(OSError):  # of a class that is made by a call
            source = inspect.getsource(kind) if "__dataclass_fields__" in vars(kind) else "class Other: pass"
            definition: Any = ast.parse(textwrap.dedent(source)).body[0]
            for field, text in zip(definition.body, definition.body[1:]):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    found[ast.unparse(field.target)] = inspect.cleandoc(ast.literal_eval(text.value))
    return found
