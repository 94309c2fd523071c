"""A `~` in any setting that is a path is the home directory, in recipes, overrides and tasks of evaluations."""

import re
from pathlib import Path
from typing import get_type_hints

import pytest

from megatron_tape.checks.arguments import parse_run_config
from megatron_tape.config.schema import RunConfig, config_dict, to_yaml
from megatron_tape.config.sections import settings_of
from megatron_tape.config.stages import stages_of
from megatron_tape.errors import ConfigError
from megatron_tape.evaluation.tasks import TASKS
from pretrain.evaluate import read_command

RECIPE = Path(__file__).parents[2] / "pretrain" / "recipes" / "tape_demo.yaml"
SETTINGS = {
    "data.prefix": ("{~/a: 0.5, b: 0.5}", {"HOME/a": 0.5, "b": 0.5}),
    "data.stages": ("[{prefix: {~/a: 1, ~/b: 2}, share: 0.1}]", [{"prefix": {"HOME/a": 1, "HOME/b": 2}, "share": 0.1}]),
    "data.tokenizer": ("~/t.model", "HOME/t.model"),
    "data.cache_directory": ("~/cache", "HOME/cache"),
    "checkpoint.directory": ("~/saved", "HOME/saved"),
    "checkpoint.resume": ("~/saved/step-1", "HOME/saved/step-1"),
    "extension.from": ("~/llama", "HOME/llama"),
    "evaluation.perplexity": ("{every: 5, data: ~/a.jsonl}", {"every": 5, "data": "HOME/a.jsonl"}),
    "evaluation.context_gain": (
        "{every: 5, data: {a: ~/a}, key_tokens_from: ~/other}",
        {"every": 5, "data": {"a": "HOME/a"}, "key_tokens_from": "HOME/other"},
    ),
    "logging.directory": ("~/run", "HOME/run"),
}
EXAMPLES = "{path: ~/train.jsonl, validation: ~/held_out.jsonl, template: '~ {input}'}"
WITHOUT_PATHS = ["data.split", "logging.sample_prompt", "model.position_encoding", "data.examples.template"]
WITHOUT_PATHS += [
    f"evaluation.{task}.{key}" for task in ("perplexity", "context_gain") for key in ("text_key", "split")
]
WITHOUT_PATHS += [f"logging.wandb.{key}" for key in ("project", "entity", "name")]
"""Settings that are texts, but no paths."""
OF_TASKS = {
    "perplexity": {"data": "~/a"},
    "context_gain": {"data": "{a: ~/a}", "key_tokens_from": "~/other"},
    "positions": {"data": "~/a"},
    "scrolls": {"data": "{qasper: ~/a}"},
    "lm_eval": {"tasks": "[~/task.yaml]", "include_path": "~/a", "before": "~/b"},
    "ruler": {"haystack": "~/a", "squad": "~/b", "hotpotqa": "~/c"},
}
TEXTS = ("text_key", "split", "template")
"""Settings of tasks that are texts, but no paths."""


@pytest.fixture(autouse=True)
def home(monkeypatch):
    monkeypatch.setenv("HOME", "HOME")


def parsed(*overrides):
    return parse_run_config(["--config", str(RECIPE), *overrides])


@pytest.mark.parametrize("key", SETTINGS)
@pytest.mark.parametrize("spelling", ["--{}={}", "recipe"])
def test_a_path_in_the_home_directory_is_whole_in_the_configuration(key, spelling, tmp_path):
    given, expected = SETTINGS[key]
    section, _, name = key.partition(".")
    if spelling == "recipe":
        (tmp_path / "mine.yaml").write_text(f"{section}:\n  {name}: {given}\n")
        config = parsed("--config", str(tmp_path / "mine.yaml"))
    else:
        config = parsed(spelling.format(key, given))
    found = config_dict(config)[section][name]
    assert (found if not isinstance(expected, dict) else {key: found[key] for key in expected}) == expected
    assert "~" not in to_yaml(config)


@pytest.mark.parametrize("character", [r"\n", r"\e", r"\0", r"\x85"])
@pytest.mark.parametrize("key", SETTINGS)
def test_a_control_character_in_a_path_is_refused(key, character, tmp_path):
    section, _, name = key.partition(".")
    given = re.sub(r"~([\w./-]+)", rf'"a\{character}b\1"', SETTINGS[key][0])
    (tmp_path / "mine.yaml").write_text(f"{section}:\n  {name}: {given}\n")
    with pytest.raises(ConfigError, match="it holds a control character, such as a line break; rename it") as caught:
        parsed("--config", str(tmp_path / "mine.yaml"))
    assert re.sub(r"\[0\]", "", caught.value.key).startswith(key)


def test_a_control_character_in_an_override_is_refused():
    with pytest.raises(ConfigError, match="it holds a control character") as caught:
        parsed("--logging.directory=a\nb")
    assert caught.value.key == "logging.directory"


def test_examples_have_paths_and_texts():
    settings = parsed("--data.prefix=null", f"--data.examples={EXAMPLES}").data.examples
    assert (settings.path, settings.validation) == ("HOME/train.jsonl", "HOME/held_out.jsonl")
    assert settings.template == "~ {input}"


def test_stages_and_what_follows_from_a_path_are_in_the_home_directory():
    config = parsed("--data.prefix=~/a", "--data.stages=[{prefix: ~/b, share: 0.5}]", "--logging.directory=~/run")
    assert [stage.config.data.prefix for stage in stages_of(config)] == ["HOME/a", "HOME/b"]
    assert config.data.cache_directory == "HOME/index_cache" and config.checkpoint.directory == "HOME/run/checkpoints"


def test_the_home_directory_of_nobody_is_refused_with_the_setting(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("data:\n  tokenizer: ~no-such-user/t\n")
    for arguments in (["--data.tokenizer=~no-such-user/t"], ["--config", str(recipe)]):
        with pytest.raises(ConfigError, match="there is no user no-such-user; write the whole path") as caught:
            parsed(*arguments)
        assert caught.value.key == "data.tokenizer"
    with pytest.raises(ConfigError) as caught:
        parse_run_config(["--config=~no-such-user/recipe.yaml"])
    assert caught.value.key == "--config"


def test_a_list_with_the_home_directory_of_nobody_is_not_taken_for_a_path():
    with pytest.raises(ConfigError, match="there is no user no-such-user") as caught:
        parsed("--data.prefix=[~no-such-user/x, ~/b]")
    assert caught.value.key == "data.prefix"


@pytest.mark.parametrize("of_stage", [False, True])
def test_the_same_path_twice_in_a_mapping_is_refused(of_stage):
    given = "{~/a: 0.3, HOME/a: 0.7}"
    setting = f"--data.stages=[{{prefix: {given}, share: 0.1}}]" if of_stage else f"--data.prefix={given}"
    with pytest.raises(ConfigError, match="~/a and HOME/a are the same path; keep one of them") as caught:
        parsed(setting)
    assert caught.value.key == ("data.stages[0].prefix" if of_stage else "data.prefix")


def test_names_of_texts_are_no_paths():
    config = parsed("--evaluation.perplexity={every: 5, data: {~mine: ~/a, ~/b: ~/b}}")
    assert config.evaluation.perplexity.data == {"~mine": "HOME/a", "~/b": "HOME/b"}


def plain_texts(section):
    """The settings of a section that may be a text, but no path."""
    kinds = get_type_hints(section, include_extras=True)
    return {name for name, kind in kinds.items() if kind is str or (kind == str | None)}


def test_every_setting_that_is_no_path_is_known():
    found = {setting.key for setting in settings_of(RunConfig) if setting.kind is str or setting.kind == str | None}
    assert found == set(WITHOUT_PATHS)
    assert {key for task in TASKS.values() for key in plain_texts(task.Settings)} == set(TEXTS)


@pytest.mark.parametrize("name", OF_TASKS)
def test_paths_of_tasks_are_in_the_home_directory(name):
    given = [f"--{name}.{key}={value}" for key, value in OF_TASKS[name].items()]
    options, (task,) = read_command([name, "--model=~/model", "--output=~/results", "--trust-remote-code", *given])
    assert (options.model, options.output) == ("HOME/model", "HOME/results")
    for key in OF_TASKS[name]:
        value = getattr(task.settings, key)
        values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
        assert all(item.startswith("HOME/") for item in values), key
