"""Read settings from `--config` files and `--section.key value`, and locate errors by file and line."""

import argparse
import inspect
import itertools
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field
from typing import Any, NoReturn

from megatron_tape.command_line import Parser
from megatron_tape.config.recipes import find_recipe
from megatron_tape.config.sections import Setting, merge, settings_of, unflatten, unknown_key, validate_as
from megatron_tape.config.values import format_value
from megatron_tape.errors import ConfigError, refuse
from megatron_tape.io.strict_yaml import parse_value, read_recipe

_TYPES = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "string": "text",
    "null": "null",
    "array": "a list",
    "object": "a mapping",
}
_BOUNDS = {"minimum": "of at least", "exclusiveMinimum": "above", "maximum": "up to", "exclusiveMaximum": "below"}


@dataclass
class Given:
    """The settings and options of a command line."""

    options: argparse.Namespace
    values: dict[str, Any] = field(default_factory=dict)
    """Nested settings."""
    places: dict[str, str] = field(default_factory=dict)
    """File and line of the settings that were given in a file."""
    files: list[str] = field(default_factory=list)

    @contextmanager
    def add_places_to_errors(self) -> Iterator[None]:
        """Add the file and line of its subject to a ConfigError."""
        try:
            yield
        except ConfigError as error:
            raise error.at(next(filter(None, map(self._place, error.subjects)), "")) from None

    def _place(self, key: str) -> str:
        # For an item of a list or a mapping, use the place of the list or mapping.
        while key not in self.places and (whole := re.fullmatch(r"(.*\..*)(\[\d+\]|\.[^.]*)", key, re.DOTALL)):
            key = whole[1]
        return self.places.get(key, "")


def read_settings(parser: argparse.ArgumentParser, section: type, argv: list[str] | None) -> Given:
    """Read a command line that `settings_parser` has made the parser of. Raises ConfigError."""
    options, unknown = parser.parse_known_args(argv)
    known: dict[str, list[Setting]] = {}
    for setting in settings_of(section):
        known.setdefault(setting.key, []).append(setting)
    if unknown:
        name = unknown[0].partition("=")[0]
        refuse(not name.startswith("--"), name, "is not expected here", "give settings as --section.key value")
        name = name.removeprefix("--")
        refuse(name in known, name, "is a section", f"give its settings as --{name}.key value")
        raise unknown_key(name, [*(key for key in known if "." in key), "print_config"])
    given = Given(options)
    for is_file, group in itertools.groupby(options.given, lambda item: item[0] == "config"):
        if is_file:
            for _, text in group:
                file = find_recipe(text)
                values, places = read_recipe(file)
                given.files.append(file)
                given.values = merge(section, given.values, values)
                given.places.update(places)
            continue
        changed = {key: _from_text(text, known[key]) for key, text in group}
        given.values = merge(section, given.values, unflatten(changed))
        for key in changed:
            within = [place for place in given.places if place.startswith(f"{key}.")]
            given.places.update(dict.fromkeys([key, *within], ""))
    return given


def _from_text(text: str, settings: list[Setting]) -> Any:
    """Parse the text of an option: as YAML if that fits a setting of its name, otherwise as plain text."""
    try:
        reading = parse_value(text)
    except ValueError:
        return text
    if isinstance(reading, str):
        return text  # YAML would truncate it at a #, and strip quotes and spaces
    types = [one.get("type") for each in settings for one in each.schema.get("anyOf", [each.schema])]
    if {"{": "object", "[": "array"}.get(text.lstrip()[:1]) in types:
        return reading  # even if it does not fit: as text, it would be used as a path
    return next((value for value in (reading, text) if any(_fits(value, each.kind) for each in settings)), reading)


def _fits(value: Any, kind: Any) -> bool:
    try:
        validate_as(kind, value)
    except ValueError:  # pydantic's, or that for text that is not UTF-8
        return False
    return True


def settings_parser(section: type, usage: str, description: str) -> argparse.ArgumentParser:
    """Return a command line that collects settings and recipes in `given`, in order; it raises ConfigError.

    `--help SECTION` shows only the settings of a section such as `train.spikes`.
    """
    sections = ", ".join(setting.key for setting in settings_of(section) if "." not in setting.key)
    about = f"Sections of settings: {sections}. --help SECTION shows only that section's."
    parser = Parser(usage=usage, description=description, epilog=about, add_help=False)
    short = "Print this help, or that of a section of settings, and exit."
    parser.add_argument("-h", "--help", nargs="?", metavar="SECTION", action=_Help, section=section, help=short)
    _add_setting(parser, "config", "RECIPE", "YAML file, or a name in pretrain/recipes such as tape_demo; repeatable.")
    parser.add_argument("--print_config", action="store_true", help="Print the resulting configuration and exit.")
    _add_settings(parser, settings_of(section))
    return parser


class _Help(argparse.Action):
    """Print the help of a program, or of one section of its settings, and exit."""

    def __init__(self, section: type, **options: Any):
        super().__init__(**options)
        self._section = section

    def __call__(self, parser: Any, namespace: Any, value: Any, option_string: str | None = None) -> NoReturn:
        if value is not None:
            found = [one for one in settings_of(self._section) if f"{one.key}.".startswith(f"{value}.")]
            if not found:
                raise unknown_key(value, (setting.key for setting in settings_of(self._section)))
            parser = argparse.ArgumentParser(
                usage=argparse.SUPPRESS, add_help=False, formatter_class=argparse.RawDescriptionHelpFormatter
            )
            _add_settings(parser, found)
        parser.print_help()
        parser.exit()


def _add_settings(parser: argparse.ArgumentParser, settings: Iterable[Setting]) -> None:
    """Add an option for each setting, in a group for each section; the first may be within a section."""
    group, added = None, set()
    for setting in settings:
        key, default = setting.key, setting.default
        if group is None or "." not in key:
            title = key if setting.sections else key.rpartition(".")[0]
            kinds = setting.sections or (setting.within,)
            group = parser.add_argument_group(title, inspect.getdoc(kinds[0]) if len(kinds) == 1 else None)
        if "." in key and key not in added:
            added.add(key)
            of_section = "null or the settings below; default: null" if default is None else "the settings below"
            required = "required" if default is MISSING else f"default: {format_value(default)}"
            what = of_section if setting.sections else f"{describe(setting.schema)}; {required}"
            explanation = f"{setting.schema.get('description', '')} ({what})"
            _add_setting(group, key, key.rpartition(".")[2].upper(), explanation)


def _add_setting(group: Any, key: str, metavar: str, explanation: str) -> None:
    group.add_argument(
        f"--{key}",
        dest="given",
        action="append",
        default=[],
        type=lambda text: (key, text),
        metavar=metavar,
        help=explanation.replace("%", "%%"),
    )


def describe(schema: dict[str, Any]) -> str:
    """Describe in words what a JSON schema allows."""
    if "anyOf" in schema:
        return " or ".join(map(describe, schema["anyOf"]))
    if "enum" in schema:
        return f"one of {', '.join(map(str, schema['enum']))}"
    bounds = (f"{words} {schema[name]:,}" for name, words in _BOUNDS.items() if name in schema)
    return " ".join([_TYPES.get(schema.get("type", ""), "a value"), *bounds])
