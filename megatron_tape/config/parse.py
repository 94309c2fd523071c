"""Reads settings from `--config` files and `--section.key value`, and says in one line what is wrong with them."""

import dataclasses
import difflib
import re
import sys
from pathlib import Path
from typing import Any

from megatron_tape.config.schema import RunConfig, to_yaml
from megatron_tape.errors import ConfigError, refuse


def parse_run_config(argv: list[str] | None = None) -> RunConfig:
    """Read `--config` files and overrides from `argv` (`sys.argv` if None).

    Ends the process with one line `error: ...` and status 2 where a key is unknown, missing or of the wrong type,
    and with status 0 after `--help` or `--print_config`. Directories left open are filled from the recipe's name.
    """
    import jsonargparse

    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = jsonargparse.ArgumentParser(
        description="Train one model. Settings come from --config and then from --section.key overrides.",
        exit_on_error=False,
        allow_abbrev=False,
        print_config=None,
    )
    parser.add_argument("--config", action="config", help="YAML file; may be given more than once, later files win.")
    parser.add_argument("--print_config", action="store_true", help="Print the configuration that would run, and exit.")
    parser.add_class_arguments(RunConfig)
    try:
        parsed = parser.parse_args(argv)
        print_only, files = parsed.pop("print_config"), parsed.pop("config")
        files = files or []
        refuse(None in files, "--config takes the path of a YAML file; give settings as --section.key value")
        for file in files:
            _check_sections(str(file))
        config = RunConfig(**vars(parser.instantiate(parsed)))
        fill_directories(config, Path(str(files[-1])).stem if files else "unnamed")
        if print_only:
            from megatron_tape.config.checks import validate

            validate(config, world_size=config.parallel.tensor_model_parallel_size)
    except (jsonargparse.ArgumentError, ConfigError, UnicodeDecodeError) as error:
        words = [str(word) for word in (sys.argv[1:] if argv is None else argv)]
        message = _one_sentence(str(error))
        file = _file_of(message, parser, words)
        print(f"error: {f'{file}: ' if file else ''}{_advised(message, words)}", file=sys.stderr)
        raise SystemExit(2) from None
    if print_only:
        print(f"# {config.model.parameter_count():,} parameters, {config.model.flops_per_token():,} FLOPs per token")
        print(to_yaml(config), end="")
        raise SystemExit(0)
    return config


def fill_directories(config: RunConfig, name: str) -> None:
    """Give every directory left open its place under `runs/<name>`, or beside the data."""
    config.logging.directory = config.logging.directory or f"runs/{name}"
    config.checkpoint.directory = config.checkpoint.directory or f"{config.logging.directory}/checkpoints"
    config.data.cache_directory = config.data.resolved_cache_directory


def _check_sections(path: str) -> None:
    """Refuse sections and keys that the parser lets pass because they hold nothing."""
    import yaml

    sections = {item.name: item.type for item in dataclasses.fields(RunConfig)}
    # Only names matter here, so nothing is read as a number or a date.
    for name, keys in yaml.load(Path(path).read_text(encoding="utf-8"), Loader=yaml.BaseLoader).items():
        refuse(name not in sections, f"unknown key {name} in {path}; remove it")
        refuse(not isinstance(keys, dict), f"{name} is {keys!r} in {path}; give it keys, or remove it for its defaults")
        for key in keys:
            known = key in {item.name for item in dataclasses.fields(sections[name])}
            refuse(not known, f"unknown key {name}.{key} in {path}; remove it")


def _one_sentence(message: str) -> str:
    """Turn the parser's messages, which span lines and name Python types, into one line that starts with the key."""
    message = " ".join(message.split())
    for pattern, replacement in (
        (r"^Group '([^']*)' does not accept option '([^']*)'$", r"unknown key \1.\2"),
        (r"^Option '([^']*)' is not accepted$", r"unknown key \1"),
        (r"^unrecognized arguments:", "unknown key or argument"),
        (r"^Unexpected config:.*", "expected sections such as model: and data:, each with keys"),
        (r"^Parser key \"([^\"]*)\":", r"\1:"),
        (r"Does not validate against any .*?Subtypes: \[(.*?)\] Errors: .* Given value: ", r"Expected \1. Got value: "),
        (r"(?:typing\.)?Literal\[([^\]]*)\]", r"one of \1"),
        (r"<class '(\w+)'>", r"\1"),
        ("NoneType", "null"),
        (r"Expected (?:a )?", "expected "),
        (r"\. Got value: ", ", not "),
    ):
        message = re.sub(pattern, replacement, message)
    return message


def _file_of(message: str, parser: Any, argv: list[str]) -> str | None:
    """Return the `--config` file of which alone the parser says `message`, if there is one."""
    import jsonargparse

    files = [following for word, following in zip(argv, [*argv[1:], ""]) if word == "--config"]
    files += [word.removeprefix("--config=") for word in argv if word.startswith("--config=")]
    for file in files:
        try:
            parser.parse_args([f"--config={file}"])
        except (jsonargparse.ArgumentError, UnicodeDecodeError) as error:
            if _one_sentence(str(error)) == message and "required" not in message and file not in message:
                return file
    return None


def _advised(message: str, argv: list[str]) -> str:
    """Add what helps with the two most usual mistakes: a misspelt key, and no recipe."""
    if "arguments are required" in message and not any(word.startswith("--config") for word in argv):
        return (
            "settings without a default are missing; give --config RECIPE.yaml, such as pretrain/recipes/tape_demo.yaml"
        )
    found = re.search(r"unknown key (?:or argument )?(?:--)?([\w.]+)", message)
    if found is None:
        return message
    sections = {item.name: item.type for item in dataclasses.fields(RunConfig)}
    keys = [f"{section}.{item.name}" for section, kind in sections.items() for item in dataclasses.fields(kind)]
    close = difflib.get_close_matches(found[1], keys, n=1)
    return f"{message}; did you mean {close[0]}?" if close else message
