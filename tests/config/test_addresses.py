"""An address such as `s3://bucket/run` is refused in every setting and option that is a path."""

import argparse
import importlib
import re
from pathlib import Path
from unittest import mock

import pytest
from pydantic import ValidationError

from megatron_tape import command_line
from megatron_tape.checks.arguments import parse_run_config
from megatron_tape.config.schema import RunConfig
from megatron_tape.config.sections import settings_of, validate_as
from megatron_tape.errors import ConfigError
from megatron_tape.evaluation.tasks import TASKS

ADDRESS = "s3://bucket/run"
ROOT = Path(__file__).parents[2]
SECTIONS = {"": RunConfig} | {f"{name}: ": task.Settings for name, task in TASKS.items()}
SETTINGS = [
    (task + setting.key, setting)
    for task, kind in SECTIONS.items()
    for setting in settings_of(kind)
]
TEXT = set(
    "split text_key template sample_prompt evaluations project entity name weight_decay_of"
    " lr_scale_of blanks tasks".split()
)
"""Settings that contain text or names instead of paths."""
PROGRAMS = [
    f"{folder}.{path.stem}"
    for folder in ("pretrain", "tools")
    for path in sorted((ROOT / folder).glob("*.py"))
    if path.stem not in ("__init__", "console_scripts")
]
TEXT_OPTIONS = set(
    "--base-model --config-name --encodings --label --prompt --revision --split --suffixes"
    " --text-key arguments in_order help".split()
)
"""Options that are text, recipes with settings, or the settings."""


def outcome(kind, value):
    """Return `accepted`, `refused` if the reason is that the value is an address, or `invalid` for
    other reasons.
    """
    try:
        validate_as(kind, value)
    except ValidationError as error:
        reasons = (str(one.get("ctx", {}).get("error", "")) for one in error.errors())
        if any("is an address" in reason for reason in reasons):
            return "refused"
        return "invalid"
    return "accepted"


@pytest.mark.parametrize(
    "key, setting", [pytest.param(*item, id=item[0]) for item in SETTINGS if not item[1].sections]
)
def test_no_path_setting_accepts_an_address(key, setting):
    values = (ADDRESS, [ADDRESS], {"name": ADDRESS}, {ADDRESS: 1.0}, {ADDRESS: 1})
    outcomes = {outcome(setting.kind, value) for value in values}
    assert "accepted" not in outcomes or re.split(r"[.: ]", key)[-1] in TEXT


def test_every_path_setting_says_why(tmp_path):
    refused = {
        key
        for key, setting in SETTINGS
        if not setting.sections and outcome(setting.kind, ADDRESS) == "refused"
    }
    assert refused >= {"data.prefix", "data.examples.path", "checkpoint.resume", "extension.from"}
    assert refused >= {"perplexity: data", "ruler: haystack", "lm_eval: include_path"}
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"logging:\n  directory: {ADDRESS}\n")
    for option in (f"--logging.directory={ADDRESS}", f"--config={recipe}"):
        with pytest.raises(ConfigError, match=r"object stores .*; .* aws s3 sync") as error_info:
            parse_run_config(["tape_demo", option])
        assert error_info.value.key == "logging.directory"


class Captured(Exception):
    pass


def parsers_of(program):
    """Return the parser of a program and those of its subcommands."""

    def capture(parser, *arguments, **options):
        raise Captured(parser)

    main = importlib.import_module(program).main
    with (
        mock.patch.object(argparse.ArgumentParser, "parse_known_args", capture),
        mock.patch("sys.argv", [program]),
    ):
        with pytest.raises(Captured) as captured:
            main(*[[]] * bool(main.__code__.co_argcount))
    parsers = [captured.value.args[0]]
    for parser in parsers:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
    return parsers


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_path_option_accepts_an_address(program):
    for parser in parsers_of(program):
        assert isinstance(parser, command_line.Parser)
        for action in parser._actions:
            name = (action.option_strings or [action.dest])[-1]
            takes_value = action.nargs != 0 and not isinstance(action, argparse._SubParsersAction)
            is_text = action.choices or {name, action.dest} & TEXT_OPTIONS
            if is_text or not takes_value:
                continue
            with pytest.raises((argparse.ArgumentError, ConfigError)):
                parser._get_value(action, ADDRESS)
