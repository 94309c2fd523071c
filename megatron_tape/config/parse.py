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
from typing import Any

from megatron_tape.command_line import Parser
from megatron_tape.config.recipes import find_recipe
from megatron_tape.config.sections import (
    Setting,
    is_valid,
    merge,
    settings_of,
    unflatten,
    unknown_key,
)
from megatron_tape.config.values import format_value
from megatron_tape.errors import ConfigError
from megatron_tape.io.strict_yaml import parse_value, read_recipe

# Words with which `describe` renders the types and the bounds in a JSON schema.
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
        """Within the context, add the `places` of the settings that a ConfigError is about to its
        message, such as `recipe.yaml:12 and --train.steps`.

        If none of these settings is from a recipe, the error is not changed: its message names the
        key, which is also the name of the option.
        """
        try:
            yield
        except ConfigError as error:
            # An error's subjects are the keys of the settings, or other names without a place.
            known_places = filter(None, map(self._place_of, error.subjects))
            places = list(dict.fromkeys(known_places))
            if all(place.startswith("--") for place in places):
                raise
            raise error.at(" and ".join(places)) from None

    def _place_of(self, key: str) -> str:
        """Return the place where the setting `key` was given, or "" if it was not given.

        An item of a list or a mapping, such as `data.stages[0].share`, has the place of the
        innermost setting around it that has a place.
        """
        while key not in self.places:
            # Remove the last index or name: `data.stages[0].share` becomes `data.stages[0]`, and
            # then `data.stages`. A section alone, such as `data`, is never left.
            outer = re.fullmatch(r"(.*\..*)(\[\d+\]|\.[^.]*)", key, re.DOTALL)
            if outer is None:
                return ""
            key = outer[1]
        return self.places[key]


def read_settings(
    parser: argparse.ArgumentParser, section: type, argv: list[str] | None
) -> ParsedCommandLine:
    """Parse a command line with a parser from `settings_parser`.

    Later options and recipes override earlier ones. Prints the help and exits if it is asked for.
    Raises ConfigError for an unknown option or an unreadable recipe.

    Args:
        parser: the parser that `settings_parser` returned for `section`.
        section: the dataclass of all settings, such as `RunConfig`.
        argv: the arguments. None reads those of the process.
    """
    options, unknown = parser.parse_known_args(argv)
    # Lists, since several sections, such as those of the encodings, may have a setting with the
    # same key.
    settings_by_key = {}
    for setting in settings_of(section):
        settings_by_key.setdefault(setting.key, []).append(setting)
    # None without --help, and "" for --help without a section.
    if options.help is not None:
        _print_help(parser, section, options.help)
    if unknown:
        raise _unknown_option(unknown[0], settings_by_key)

    parsed = ParsedCommandLine(options)
    # `in_order` has tuples (key, text). Alternate between groups of consecutive recipes and groups
    # of consecutive settings.
    for is_recipe, group in itertools.groupby(options.in_order, lambda item: item[0] == "config"):
        if is_recipe:
            for _, path_or_name in group:
                file = find_recipe(path_or_name)
                values, places = read_recipe(file)
                parsed.files.append(file)
                parsed.values = merge(section, parsed.values, values)
                parsed.places.update(places)
            continue

        # Merge all settings of a group at once: --model.position_encoding decides which settings
        # of model.position are kept, even of those that come before it on the command line.
        changed = {key: _parse_value(text, settings_by_key[key]) for key, text in group}
        parsed.values = merge(section, parsed.values, unflatten(changed))
        for key in changed:
            # An option whose value is a mapping also gives the settings inside it, so their places
            # are no longer in a recipe.
            inner_keys = [inner for inner in parsed.places if inner.startswith(f"{key}.")]
            parsed.places.update(dict.fromkeys([key, *inner_keys], f"--{key}"))
    return parsed


def _unknown_option(argument: str, known: Iterable[str]) -> ConfigError:
    """Return the error for an argument that is not an option. `known` has the keys of all settings
    and sections.
    """
    name = argument.partition("=")[0]
    key = name.removeprefix("--")

    # The argument does not begin with dashes.
    if key == name:
        return ConfigError(
            name,
            "is not an option",
            "give settings as --section.key value, and files after --config",
        )
    if key in known:
        return ConfigError(
            key, "is a section of settings", f"give its settings as --{key}.key value"
        )
    # Suggest no keys without a dot: they are sections, which are not options.
    return unknown_key(key, [setting for setting in known if "." in setting])


def _parse_value(text: str, settings: list[Setting]) -> Any:
    """Return the value of an option: `text` parsed as YAML, or `text` itself if only that is valid.

    `settings` are the settings with the option's key, one per section that may contain it. The
    value must be valid for one of them. If neither is valid, the parsed value is returned, and
    `build` reports it later.
    """
    try:
        value = parse_value(text)
    except ValueError:
        return text
    if isinstance(value, str):
        return text  # YAML would truncate it at a #, and strip quotes and spaces

    # A setting that allows several types lists them in `anyOf`.
    types = [
        option.get("type")
        for setting in settings
        for option in setting.schema.get("anyOf", [setting.schema])
    ]
    # If the setting takes a mapping or a list, text that begins like one is never used as a path,
    # even if it is invalid.
    if {"{": "object", "[": "array"}.get(text[:1]) in types:
        return value
    # A number is text for a setting that only takes text, such as a name.
    for candidate in (value, text):
        if any(is_valid(candidate, setting.kind) for setting in settings):
            return candidate
    return value


def settings_parser(section: type, usage: str, description: str) -> argparse.ArgumentParser:
    """Return a parser with an option for each setting of `section`, and `--config`,
    `--print_config` and `--help`.

    Parsing raises ConfigError if it fails. It collects settings and recipes in the list `in_order`
    of the result: tuples (key, text) in the order of the command line, since later ones override
    earlier ones. The key of a recipe is `config`.
    """
    settings = list(settings_of(section))
    # `settings_of` also yields the sections, whose keys have no dot.
    sections = ", ".join(setting.key for setting in settings if "." not in setting.key)
    parser = Parser(
        usage=usage,
        description=description,
        epilog=(
            f"Sections of settings: {sections}. --help SECTION shows only those of that section."
        ),
        add_help=False,
    )

    # Instead of argparse's own --help, which takes no section.
    parser.add_argument(
        "-h",
        "--help",
        nargs="?",
        const="",
        type=str,
        metavar="SECTION",
        help="Print this help, or only the settings of a section such as train.spikes, and exit.",
    )

    _add_setting(
        parser,
        "config",
        metavar="RECIPE",
        description=(
            "YAML file with settings, or the name of a recipe in pretrain/recipes, such as"
            " tape_demo. May be repeated."
        ),
    )
    parser.add_argument(
        "--print_config", action="store_true", help="Print the resulting configuration and exit."
    )
    _add_settings(parser, settings)
    return parser


def _print_help(parser: argparse.ArgumentParser, section: type, key: str) -> None:
    """Print the help of the section or setting `key`, or of the whole program if `key` is empty,
    and exit. Raises ConfigError if there is no such key.
    """
    if key:
        settings = list(settings_of(section))
        # The appended dots make this a comparison of whole names: `train` selects `train.steps`,
        # but `train.step` does not.
        shown = [setting for setting in settings if f"{setting.key}.".startswith(f"{key}.")]
        if not shown:
            raise unknown_key(key, (setting.key for setting in settings))
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
        outer, _, name = key.rpartition(".")
        # A top-level section begins a group. The first of `settings` need not be a section: `--help
        # train.steps` shows one setting, in a group titled `train`.
        if group is None or not outer:
            title = outer
            if setting.sections:
                title = key
            sections = setting.sections or (setting.within,)
            about = None
            # No docstring describes all of several possible sections.
            if len(sections) == 1:
                about = inspect.getdoc(sections[0])
            group = parser.add_argument_group(title, about)

        # Of several settings with the same key, the help shows the first.
        if outer and key not in added:
            added.add(key)
            description = f"{setting.schema.get('description', '')} ({_allowed(setting)})"
            _add_setting(group, key, name.upper(), description)


def _allowed(setting: Setting) -> str:
    """Describe the values and the default of a setting or a section, for its help."""
    if setting.sections and setting.default is None:
        return "null or the settings below; default: null"
    if setting.sections:
        return "the settings below"
    if setting.default is MISSING:
        return f"{describe(setting.schema)}; required"
    return f"{describe(setting.schema)}; default: {format_value(setting.default)}"


def _add_setting(group: Any, key: str, metavar: str, description: str) -> None:
    """Add the option `--KEY` to a parser or to a group of its options. Its values are appended to
    the list `in_order` of the parsed arguments, as tuples (key, text).
    """
    # All options share one list, which keeps their order. argparse formats the help with `%`, so
    # that a literal % must be doubled.
    group.add_argument(
        f"--{key}",
        dest="in_order",
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
    kind = _TYPES.get(schema.get("type", ""), "a value")
    bounds = [f"{words} {schema[name]:,}" for name, words in _BOUNDS.items() if name in schema]
    return f"{kind} {' and '.join(bounds)}".rstrip()
