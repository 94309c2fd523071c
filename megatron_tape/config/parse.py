"""Read settings from `--config` files and `--section.key value`, and report in one line what is wrong with them."""

import argparse
import dataclasses
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from megatron_tape.command_line import Parser
from megatron_tape.config.datasets import with_datasets
from megatron_tape.config.schema import RunConfig
from megatron_tape.config.sections import build, merge, nested, settings_of, unknown_key
from megatron_tape.config.values import UNIONS, PathSettingError, PathText, accept, describe, shown
from megatron_tape.errors import ConfigError, refuse
from megatron_tape.io.strict_yaml import parse_value, read_recipe

Complete = Callable[[dict[str, Any]], dict[str, Any]]
"""Returns the settings given, nested, together with others that follow from them; may raise ConfigError."""
_SECTION = dict[str, Any]
"""The type of a section before it is built."""


def read_run_config(
    argv: list[str] | None, check: Callable[[RunConfig], None], complete: Complete = dict, purpose: str = ""
) -> tuple[RunConfig, bool]:
    """Read `--config` files and overrides from `argv` (`sys.argv` if None); later ones override earlier ones.

    `check` raises ConfigError for settings that cannot work. `complete` may add settings that neither gives, such as
    those of the model that a run extends. `purpose` begins the text of `--help`, after which the process ends.
    Directories that are not set get defaults from the recipe's name.

    Returns the configuration, and whether it is only to be printed. Raises ConfigError, with file and line, if a key is
    unknown, missing or of the wrong type, or for what `check` refuses.
    """
    parser = settings_parser(
        RunConfig,
        usage="%(prog)s --config RECIPE.yaml [--section.key value ...]",
        description=f"{purpose} Settings come from --config and --section.key; later ones override earlier ones.",
    )
    given = read_settings(parser, RunConfig, argv)
    name = Path(given.files[-1]).stem if given.files else "unnamed"
    directory = given.values.get("logging", {}).get("directory") or f"runs/{name}"
    given.values = merge(RunConfig, given.values, {"logging": {"directory": directory}})
    fix = f"add to {' or '.join(given.files)}, or give --section.key value"
    if not given.files:
        fix = "give --config RECIPE.yaml, such as pretrain/recipes/tape_demo.yaml"
    with given.placing_errors():
        config = build(RunConfig, complete(given.values), fix=fix)
        _ = config.data.source
        config = with_directories(with_datasets(config), name)
        check(config)
    return config, given.options.print_config


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


@dataclass
class Given:
    """What a command line gives."""

    options: argparse.Namespace
    values: dict[str, Any] = field(default_factory=dict)
    """Nested settings."""
    places: dict[str, str] = field(default_factory=dict)
    """In which file and line settings were given, if they were in one."""
    files: list[str] = field(default_factory=list)

    @contextmanager
    def placing_errors(self) -> Iterator[None]:
        """Add the place where its subject was given to a ConfigError."""
        try:
            yield
        except ConfigError as error:
            raise error.at(next(filter(None, map(self._place, error.subjects)), "")) from None

    def read(self, section: type, file: str, kinds: dict[str, Any]) -> None:
        """Add the settings of a recipe."""
        self.files.append(file)
        given, places = read_recipe(file)
        self.places.update(places)
        with self.placing_errors():
            self.values = merge(section, self.values, _checked("", given, kinds))

    def _place(self, key: str) -> str:
        # What an item of a list, or a part of a mapping, is in.
        while key not in self.places and (whole := re.fullmatch(r"(.*\..*)(\[\d+\]|\.[^.]*)", key, re.DOTALL)):
            key = whole[1]
        return self.places.get(key, "")


def read_settings(parser: argparse.ArgumentParser, section: type, argv: list[str] | None) -> Given:
    """Read a command line that `settings_parser` has made the parser of. Raises ConfigError."""
    kinds = _kinds(section)
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        name = unknown[0].partition("=")[0]
        refuse(not name.startswith("--"), name, "is not expected here", "give settings as --section.key value")
        key = name.removeprefix("--")
        refuse(key in kinds, key, "is a section", f"give its settings as --{key}.key value")
        raise _unknown_key(key, kinds)
    given = Given(options)
    for is_file, group in itertools.groupby(options.given, lambda item: item[0] == "config"):
        if is_file:
            for _, text in group:
                given.read(section, accept("--config", text, PathText), kinds)
            continue
        options_given = {key: _from_text(key, text, kinds) for key, text in group}
        given.values = merge(section, given.values, nested(options_given))
        for key in options_given:
            within = [place for place in given.places if place.startswith(f"{key}.")]
            given.places.update(dict.fromkeys([key, *within], ""))
    return given


def _kinds(section: type) -> dict[str, Any]:
    """Return the type of every setting by its key, a union where several sections have one, and dict for a section."""
    kinds: dict[str, Any] = {}
    for setting in settings_of(section):
        kind = setting.kind
        if setting.sections:
            kind = _SECTION | None if type(None) in get_args(kind) else _SECTION
        known = kinds.setdefault(setting.key, kind)
        if known != kind:
            literals = get_origin(known) is get_origin(kind) is Literal
            kinds[setting.key] = Literal[(*get_args(known), *get_args(kind))] if literals else known | kind
    return kinds


def _checked(name: str, value: Any, kinds: dict[str, Any]) -> Any:
    """Return a value as the type of the setting `name` has it. A list of sections is checked when they are built."""
    if name and name not in kinds:
        raise _unknown_key(name, kinds)
    kind = kinds.get(name, _SECTION)
    if kind in (_SECTION, _SECTION | None) and isinstance(value, dict):
        return {key: _checked(f"{name}.{key}" if name else str(key), item, kinds) for key, item in value.items()}
    of_sections = isinstance(value, list) and any(isinstance(item, dict) for item in value)
    return value if of_sections else accept(name, value, kind)


def _from_text(key: str, text: str, kinds: dict[str, Any]) -> Any:
    """Return what the text of an option means: YAML of the right type, or else the text as it stands."""
    # YAML would end text at a #, or take its quotes and spaces away.
    try:
        reading = parse_value(text)
    except ValueError:
        reading = text
    readings = [reading, text] if not isinstance(reading, str) else [text]
    # Without braces, what YAML takes for a mapping may be a path with a colon.
    if isinstance(reading, dict) and text.lstrip().startswith("{") and _takes(kinds[key], dict):
        readings = readings[:1]
    for value in readings[1:]:
        try:
            return _checked(key, readings[0], kinds)
        except PathSettingError:
            raise  # as text, a list would be one path
        except ConfigError:
            with suppress(ConfigError):
                return _checked(key, value, kinds)
    return _checked(key, readings[0], kinds)


def _takes(kind: Any, origin: type) -> bool:
    """Return whether a value of type `kind` may be of a generic type such as dict."""
    if get_origin(kind) in UNIONS:
        return any(_takes(option, origin) for option in get_args(kind))
    return get_origin(get_args(kind)[0] if get_origin(kind) is Annotated else kind) is origin


def _unknown_key(key: str, kinds: Mapping[str, Any]) -> ConfigError:
    whole, _, part = key.rpartition(".")
    if kinds.get(whole, _SECTION) not in (_SECTION, _SECTION | None) and _takes(kinds[whole], dict):
        return ConfigError(key, "is an unknown key", f"give {whole} a mapping, such as {{{part}: ...}}")
    tasks = [known.removeprefix("evaluation.") for known in kinds if re.fullmatch(r"evaluation\.\w+", known)]
    if tasks and key.startswith("evaluation.") and key.split(".")[1] not in tasks:
        others = "python -m pretrain.evaluate does the other tasks, such as those that generate text"
        fix = f"a run evaluates {', '.join(tasks)} while it trains, and {others}"
        return ConfigError(key, "is an unknown key", fix)
    return unknown_key(key, [*kinds, "print_config"])


def settings_parser(section: type, usage: str, description: str) -> argparse.ArgumentParser:
    """Return a command line that collects settings and recipes in `given`, in order; it raises ConfigError."""
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
    kinds, groups, added = _kinds(section), {}, set()
    for setting in settings_of(section):
        key, default, what = setting.key, setting.default, "the settings below"
        section_name, _, short = key.partition(".")
        if not short:
            groups[key] = parser.add_argument_group(key, inspect.getdoc(setting.sections[0]))
        elif key not in added:
            added.add(key)
            if not setting.sections:
                what = f"{describe(kinds[key])}; {'required' if default is MISSING else f'default: {shown(default)}'}"
            elif default is None:
                what = "null or the settings below; default: null"
            metavar = short.rpartition(".")[2].upper()
            add(groups[section_name], key, metavar, f"{setting.explanation} ({what})")
    return parser
