"""Read settings from recipes (`--config`) and options (`--section.key value`). Errors name file and
line, or option.
"""

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
from megatron_tape.config.sections import (
    Setting,
    merge,
    settings_of,
    unflatten,
    unknown_key,
    validate_as,
)
from megatron_tape.config.values import format_value
from megatron_tape.errors import ConfigError
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
_BOUNDS = {
    "minimum": "of at least",
    "exclusiveMinimum": "above",
    "maximum": "up to",
    "exclusiveMaximum": "below",
}


@dataclass
class ParsedCommandLine:
    """The settings and options of a command line."""

    options: argparse.Namespace
    """Options that are not settings, such as `print_config`."""
    values: dict[str, Any] = field(default_factory=dict)
    """Settings of all files and options, as nested dictionaries. They are not validated yet."""
    places: dict[str, str] = field(default_factory=dict)
    """Where each setting was given, by dotted key: file and line, such as `recipe.yaml:12`, or the
    option.
    """
    files: list[str] = field(default_factory=list)
    """Paths of the recipes, in order."""

    @contextmanager
    def add_places_to_errors(self) -> Iterator[None]:
        """Within the context, add to a ConfigError the file and line of its settings, if one is
        from a recipe.
        """
        try:
            yield
        except ConfigError as error:
            places = list(dict.fromkeys(filter(None, map(self._place, error.subjects))))
            in_file = any(not place.startswith("--") for place in places)
            raise error.at(" and ".join(places) if in_file else "") from None

    def _place(self, key: str) -> str:
        # For an item of a list or a mapping, use the place of the list or mapping.
        while key not in self.places and (
            whole := re.fullmatch(r"(.*\..*)(\[\d+\]|\.[^.]*)", key, re.DOTALL)
        ):
            key = whole[1]
        return self.places.get(key, "")


def read_settings(
    parser: argparse.ArgumentParser, section: type, argv: list[str] | None
) -> ParsedCommandLine:
    """Parse a command line with a parser from `settings_parser`.

    Later options and recipes override earlier ones. Raises ConfigError for an unknown option or an
    unreadable recipe.
    """
    options, unknown = parser.parse_known_args(argv)
    known: dict[str, list[Setting]] = {}
    for setting in settings_of(section):
        known.setdefault(setting.key, []).append(setting)
    if unknown:
        name = unknown[0].partition("=")[0]
        if not name.startswith("--"):
            raise ConfigError(
                name,
                "is not an option",
                "give settings as --section.key value, and files after --config",
            )
        name = name.removeprefix("--")
        if name in known:
            raise ConfigError(
                name, "is a section of settings", f"give its settings as --{name}.key value"
            )
        raise unknown_key(name, [*(key for key in known if "." in key), "print_config"])
    parsed = ParsedCommandLine(options)
    for is_file, group in itertools.groupby(options.given, lambda item: item[0] == "config"):
        if is_file:
            for _, text in group:
                file = find_recipe(text)
                values, places = read_recipe(file)
                parsed.files.append(file)
                parsed.values = merge(section, parsed.values, values)
                parsed.places.update(places)
            continue
        changed = {key: _from_text(text, known[key]) for key, text in group}
        parsed.values = merge(section, parsed.values, unflatten(changed))
        for key in changed:
            within = [place for place in parsed.places if place.startswith(f"{key}.")]
            parsed.places.update(dict.fromkeys([key, *within], f"--{key}"))
    return parsed


def _from_text(text: str, settings: list[Setting]) -> Any:
    """Parse the value of an option as YAML if the result has the type of one of `settings`,
    otherwise as plain text.

    `settings` are the settings with the option's key, one per section that may contain it.
    """
    try:
        parsed = parse_value(text)
    except ValueError:
        return text
    if isinstance(parsed, str):
        return text  # YAML would truncate it at a #, and strip quotes and spaces
    types = [
        schema.get("type")
        for each in settings
        for schema in each.schema.get("anyOf", [each.schema])
    ]
    if {"{": "object", "[": "array"}.get(text.lstrip()[:1]) in types:
        return parsed  # Even if it is invalid: as text, it would be used as a path.
    return next(
        (
            value
            for value in (parsed, text)
            if any(_is_valid(value, each.kind) for each in settings)
        ),
        parsed,
    )


def _is_valid(value: Any, kind: Any) -> bool:
    try:
        validate_as(kind, value)
    except ValueError:  # pydantic's ValidationError, or UnicodeEncodeError
        return False
    return True


def settings_parser(section: type, usage: str, description: str) -> argparse.ArgumentParser:
    """Return a parser with an option for each setting of `section`, and `--config`,
    `--print_config` and `--help`.

    Parsing collects settings and recipes in the list `given`, as (key, text) in the order of the
    command line, and raises ConfigError if it fails. `--help SECTION` shows only the settings of a
    section such as `train.spikes`.
    """
    sections = ", ".join(setting.key for setting in settings_of(section) if "." not in setting.key)
    epilog = (
        f"Sections of settings: {sections}. --help SECTION shows only the settings of that section."
    )
    parser = Parser(usage=usage, description=description, epilog=epilog, add_help=False)
    about = "Print this help, or only the settings of a section such as train.spikes, and exit."
    parser.add_argument(
        "-h", "--help", nargs="?", metavar="SECTION", action=_Help, section=section, help=about
    )
    about = (
        "YAML file with settings, or the name of a recipe in pretrain/recipes, such as tape_demo."
        " May be repeated."
    )
    _add_setting(parser, "config", "RECIPE", about)
    parser.add_argument(
        "--print_config", action="store_true", help="Print the resulting configuration and exit."
    )
    _add_settings(parser, settings_of(section))
    return parser


class _Help(argparse.Action):
    """Print the help of a program, or of one section of its settings, and exit."""

    def __init__(self, section: type, **options: Any):
        super().__init__(**options)
        self._section = section

    def __call__(
        self, parser: Any, namespace: Any, value: Any, option_string: str | None = None
    ) -> NoReturn:
        if value is not None:
            shown = [
                setting
                for setting in settings_of(self._section)
                if f"{setting.key}.".startswith(f"{value}.")
            ]
            if not shown:
                raise unknown_key(value, (setting.key for setting in settings_of(self._section)))
            parser = argparse.ArgumentParser(
                usage=argparse.SUPPRESS,
                add_help=False,
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
            _add_settings(parser, shown)
        parser.print_help()
        parser.exit()


def _add_settings(parser: argparse.ArgumentParser, settings: Iterable[Setting]) -> None:
    """Add an option for each setting, and a group of options for each top-level section."""
    group = None
    added = set()
    for setting in settings:
        key = setting.key
        default = setting.default
        if group is None or "." not in key:
            title = key if setting.sections else key.rpartition(".")[0]
            kinds = setting.sections or (setting.within,)
            group = parser.add_argument_group(
                title, inspect.getdoc(kinds[0]) if len(kinds) == 1 else None
            )
        if "." in key and key not in added:
            added.add(key)
            if default is None:
                of_section = "null or the settings below; default: null"
            else:
                of_section = "the settings below"
            if default is MISSING:
                required = "required"
            else:
                required = f"default: {format_value(default)}"
            if setting.sections:
                allowed = of_section
            else:
                allowed = f"{describe(setting.schema)}; {required}"
            about = f"{setting.schema.get('description', '')} ({allowed})"
            _add_setting(group, key, key.rpartition(".")[2].upper(), about)


def _add_setting(group: Any, key: str, metavar: str, description: str) -> None:
    group.add_argument(
        f"--{key}",
        dest="given",
        action="append",
        default=[],
        type=lambda text: (key, text),
        metavar=metavar,
        help=description.replace("%", "%%"),
    )


def describe(schema: dict[str, Any]) -> str:
    """Describe the values that a JSON schema allows, such as `a whole number of at least 1 or
    null`.
    """
    if "anyOf" in schema:
        return " or ".join(map(describe, schema["anyOf"]))
    if "enum" in schema:
        return f"one of {', '.join(map(str, schema['enum']))}"
    bounds = (f"{words} {schema[name]:,}" for name, words in _BOUNDS.items() if name in schema)
    return f"{_TYPES.get(schema.get('type', ''), 'a value')} {' and '.join(bounds)}".rstrip()
