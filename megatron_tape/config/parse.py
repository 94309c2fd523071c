"""Read settings from `--config` files and `--section.key value`, and report in one line what is wrong with them."""

import argparse
import ast
import dataclasses
import difflib
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_type_hints

from megatron_tape.command_line import Parser
from megatron_tape.config.datasets import with_datasets
from megatron_tape.config.schema import ModelConfig, RunConfig, build_model, default_of, key_of, keys_of
from megatron_tape.config.values import PathSettingError, PathText, accept, describe, shown, takes_mapping
from megatron_tape.errors import ConfigError, refuse
from megatron_tape.io.strict_yaml import Given, parse_value, read_recipe

Section = type | tuple[type, ...]
"""A documented dataclass of settings, or several; settings that they share are listed once."""
Sections = Mapping[str, Section]
"""Sections by their names."""

Complete = Callable[[dict[str, Any]], dict[str, Any]]
"""Returns the settings given, by `section.key`, together with others that follow from them; may raise ConfigError."""


def read_run_config(
    argv: list[str] | None,
    encodings: Mapping[str, type],
    check: Callable[[RunConfig], None],
    complete: Complete = dict,
    purpose: str = "",
) -> tuple[RunConfig, bool]:
    """Read `--config` files and overrides from `argv` (`sys.argv` if None); later ones override earlier ones.

    `encodings` has the settings of each positional encoding, a dataclass, by the encoding's name. `check` raises
    ConfigError for settings that cannot work. `complete` may add settings that neither gives, such as those of the
    model that a run extends. `purpose` begins the text of `--help`, after which the process ends. Directories that are
    not set get defaults from the recipe's name.

    Returns the configuration, and whether it is only to be printed. Raises ConfigError, with file and line, if a key is
    unknown, missing or of the wrong type, or for what `check` refuses.
    """
    sections: dict[str, Section] = {section.name: section.type for section in dataclasses.fields(RunConfig)}
    sections["model"] = (ModelConfig, *encodings.values())
    parser = settings_parser(
        sections,
        usage="%(prog)s --config RECIPE.yaml [--section.key value ...]",
        description=f"{purpose} Settings come from --config and --section.key; later ones override earlier ones.",
    )
    arguments, values, places, files = read_settings(parser, sections, argv)
    name = Path(files[-1]).stem if files else "unnamed"
    values["logging.directory"] = values.get("logging.directory") or f"runs/{name}"
    try:
        fix = f"add to {' or '.join(files)}, or give --section.key value"
        if not files:
            fix = "give --config RECIPE.yaml, such as pretrain/recipes/tape_demo.yaml"
        refuse_missing(sections, completed := complete(values), fix)
        built = {name: build_section(name, sections[name], completed) for name in sections if name != "model"}
        config = RunConfig(model=build_model(encodings, _of_section("model", completed)), **built)
        _ = config.data.source
        config = with_directories(with_datasets(config), name)
        check(config)
    except ConfigError as error:
        given = (known for key in error.subjects for known in (key, key.rpartition(".")[0]) if known in places)
        raise error.at(places.get(next(given, ""), "")) from None
    return config, arguments.print_config


def with_directories(config: RunConfig, name: str) -> RunConfig:
    """Return `config` with every directory that is not set at its default under `runs/<name>` or beside the data."""
    logging = dataclasses.replace(config.logging, directory=config.logging.directory or f"runs/{name}")
    config = dataclasses.replace(config, logging=logging)
    directory = config.checkpoint.directory or config.default_checkpoint_directory
    return dataclasses.replace(
        config,
        checkpoint=dataclasses.replace(config.checkpoint, directory=directory),
        data=dataclasses.replace(config.data, cache_directory=config.data.resolved_cache_directory),
    )


def _of_section(name: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values that are given for a section, by their keys without its name."""
    prefix = f"{name}."
    return {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}


def read_settings(
    parser: argparse.ArgumentParser, sections: Sections, argv: list[str] | None
) -> tuple[argparse.Namespace, dict[str, Any], dict[str, str], list[str]]:
    """Read a command line that `settings_parser` has made the parser of.

    Returns the arguments; the settings given, by `section.key`; in which file and line each was given, if it was in
    one; and the files. Raises ConfigError.
    """
    kinds = _kinds(sections)
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        name = unknown[0].partition("=")[0]
        refuse(not name.startswith("--"), name, "is not expected here", "give settings as --section.key value")
        raise _unknown_key(name.removeprefix("--"), kinds)
    values, places, files = {}, {}, []
    for key, text in arguments.given:
        if key != "config":
            # Text is taken as it stands: YAML would end it at a #, or take its quotes and spaces away.
            readings = [*(value for value in _as_yaml(text) if not isinstance(value, str)), text]
            # Without braces, what YAML takes for a mapping may be a path with a colon.
            if isinstance(readings[0], dict) and text.lstrip().startswith("{") and takes_mapping(kinds[key]):
                readings = readings[:1]
            values[key] = _first_accepted(key, readings, kinds[key])
            places.pop(key, None)
            continue
        file = accept("--config", text, PathText)
        files.append(file)
        for given in read_recipe(file):
            values[given.key], places[given.key] = _from_recipe(given, kinds, sections), given.place
    return arguments, values, places, files


def _items(section: Section) -> Iterator[tuple[str, dataclasses.Field, type]]:
    """Yield each key of a section, without the section's name, its field, and the dataclass that has it."""
    seen = set()
    for kind in section if isinstance(section, tuple) else (section,):
        for item in keys_of(kind):
            if item.name not in seen:
                seen.add(item.name)
                yield key_of(item.name), item, kind


def _kinds(sections: Sections) -> dict[str, Any]:
    """Return the type of every `section.key`."""
    return {
        f"{name}.{key}": get_type_hints(kind, include_extras=True)[item.name]
        for name, section in sections.items()
        for key, item, kind in _items(section)
    }


def _from_recipe(given: Given, kinds: dict[str, Any], sections: Sections) -> Any:
    """Return the value of a recipe's key, or None for a section without keys."""
    try:
        if given.key in kinds:
            return _first_accepted(given.key, [given.value, *_as_yaml(given.value)], kinds[given.key])
        if given.key not in sections:
            raise _unknown_key(given.key, kinds)
        fix = "give it keys, or remove it to use the defaults"
        refuse(given.value != {}, given.key, f"is {shown(given.value)}", fix)
    except ConfigError as error:
        raise error.at(given.place) from None


def _as_yaml(text: Any) -> list[Any]:
    """Return text, such as a number in quotes, read as YAML; an empty list for what is not text or not YAML."""
    try:
        return [parse_value(text)] if isinstance(text, str) else []
    except ValueError:
        return []


def _first_accepted(key: str, readings: list[Any], kind: Any) -> Any:
    """Return the first of several readings of a setting that has the right type; an error shows the first reading."""
    for value in readings:
        try:
            return accept(key, value, kind)
        except PathSettingError:
            raise  # as text, a list would be one path
        except ConfigError:
            continue
    return accept(key, readings[0], kind)


def refuse_missing(sections: Sections, values: dict[str, Any], fix: str) -> None:
    """Raise ConfigError, which names every `section.key` that must be given and is not."""
    missing = [
        f"{name}.{key}"
        for name, section in sections.items()
        for key, item, _ in _items(section)
        if default_of(item) is dataclasses.MISSING and f"{name}.{key}" not in values
    ]
    others = f", as must {', '.join(missing[1:])}" if missing[1:] else ""
    refuse(bool(missing), tuple(missing) or "", f"must be set{others}", fix)


def build_section(name: str, section: type, values: dict[str, Any]) -> Any:
    """Return a section with the `values` that are given for it, by `section.key`."""
    fields = {key: item.name for key, item, _ in _items(section)}
    return section(**{fields[key]: value for key, value in _of_section(name, values).items()})


def read_section(name: str, section: type, given: dict[str, Any]) -> Any:
    """Return a section with what a mapping, itself the value of the setting `name`, gives; checks keys and types."""
    kinds, values = _kinds({name: section}), {}
    for key, value in given.items():
        setting, choices = f"{name}.{key}", [known.removeprefix(f"{name}.") for known in kinds]
        close = difflib.get_close_matches(key, choices, n=1)
        fix = f"did you mean {close[0]}?" if close else f"choose from {', '.join(choices)}"
        refuse(setting not in kinds, setting, "is an unknown key", fix)
        values[setting] = accept(setting, value, kinds[setting])
    refuse_missing({name: section}, values, f"add it to {name}")
    return build_section(name, section, values)


def _unknown_key(key: str, kinds: dict[str, Any]) -> ConfigError:
    """Return the error for a key that does not exist, with the existing key that it is a part of or most similar to."""
    whole, _, part = key.rpartition(".")
    if whole in kinds and takes_mapping(kinds[whole]):
        return ConfigError(key, "is an unknown key", f"give {whole} a mapping, such as {{{part}: ...}}")
    tasks = [known.partition(".")[2] for known in kinds if known.startswith("evaluation.")]
    if key.startswith("evaluation.") and tasks:
        others = "python -m pretrain.evaluate does the other tasks, such as those that generate text"
        fix = f"a run evaluates {', '.join(tasks)} while it trains, and {others}"
        return ConfigError(key, "is an unknown key", fix)
    same_name = [known for known in kinds if known.rpartition(".")[2] == key.rpartition(".")[2]]
    close = same_name or difflib.get_close_matches(key, [*kinds, "print_config"], n=1)
    return ConfigError(key, "is an unknown key", f"did you mean {close[0]}?" if close else "correct or remove it")


def settings_parser(sections: Sections, usage: str, description: str) -> argparse.ArgumentParser:
    """Return a command line that collects settings and recipes in `given`, in order; it raises ConfigError."""
    kinds = _kinds(sections)
    parser = Parser(usage=usage, description=description)

    def add(group: Any, key: str, metavar: str, explanation: str) -> None:
        group.add_argument(
            f"--{key}",
            dest="given",
            action="append",
            default=[],
            type=lambda text: (key, text),
            metavar=metavar,
            help=explanation.replace("%", "%%"),
        )

    add(parser, "config", "RECIPE.yaml", "YAML file; may be given more than once.")
    parser.add_argument("--print_config", action="store_true", help="Print the resulting configuration and exit.")
    for name, section in sections.items():
        first = section[0] if isinstance(section, tuple) else section
        group = parser.add_argument_group(name, inspect.getdoc(first))
        for short, item, kind in _items(section):
            key, value = f"{name}.{short}", default_of(item)
            default = "required" if value is dataclasses.MISSING else f"default: {shown(value)}"
            explanation = _explanations(kind).get(item.name, "")
            add(group, key, short.upper(), f"{explanation} ({describe(kinds[key])}; {default})")
    return parser


@functools.cache
def _explanations(section: type) -> dict[str, str]:
    """Return the text that follows every field of a dataclass."""
    found = {}
    for kind in reversed(section.__mro__):
        if dataclasses.is_dataclass(kind):
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
            for field, text in zip(definition.body, definition.body[1:]):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    found[field.target.id] = inspect.cleandoc(text.value.value)
    return found
