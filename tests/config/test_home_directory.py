"""A leading `~` is expanded in every setting that is a path, in recipes, overrides and settings of
evaluation tasks.
"""

from pathlib import Path

import pytest
import yaml

from megatron_tape.checks.arguments import parse_run_config
from megatron_tape.config.schema import config_dict, to_yaml
from megatron_tape.config.stages import stages_of
from megatron_tape.errors import ConfigError, UserError
from pretrain.evaluate import read_command

RECIPE = Path(__file__).parents[2] / "pretrain" / "recipes" / "tape_demo.yaml"
SETTINGS = {
    "data.prefix": ("{~/a: 0.5, b: 0.5}", {"HOME/a": 0.5, "b": 0.5}),
    "data.stages": (
        "[{prefix: {~/a: 1, ~/b: 2}, share: 0.1}]",
        [{"prefix": {"HOME/a": 1, "HOME/b": 2}, "share": 0.1}],
    ),
    "data.tokenizer": ("~/t.model", "HOME/t.model"),
    "data.cache_directory": ("~/cache", "HOME/cache"),
    "checkpoint.directory": ("~/saved", "HOME/saved"),
    "checkpoint.resume": ("~/saved/step-1", "HOME/saved/step-1"),
    "extension.from": ("~/llama", "HOME/llama"),
    "logging.directory": ("~/run", "HOME/run"),
}
EXAMPLES = "{path: ~/train.jsonl, validation: ~/held_out.jsonl, template: '~ {input}'}"
TASK_SETTINGS = {
    "perplexity": {"data": "~/a"},
    "context_gain": {"data": "{a: ~/a}"},
    "positions": {"data": "~/a"},
    "scrolls": {"data": "{qasper: ~/a}"},
    "lm_eval": {"tasks": "[~/task.yaml]", "include_path": "~/a"},
    "ruler": {"haystack": "~/a", "squad": "~/b", "hotpotqa": "~/c"},
}


@pytest.fixture(autouse=True)
def home(monkeypatch):
    monkeypatch.setenv("HOME", "HOME")


def parsed(*overrides):
    return parse_run_config(["--config", str(RECIPE), *overrides])


@pytest.mark.parametrize("key", SETTINGS)
def test_a_tilde_is_expanded_in_every_setting_that_is_a_path(key):
    text, expected = SETTINGS[key]
    config = parsed(f"--{key}={text}")
    section, _, name = key.partition(".")
    assert config_dict(config)[section][name] == expected
    assert "~" not in to_yaml(config)


@pytest.mark.parametrize("character", [r"\n", r"\x85"])
def test_a_control_character_in_a_path_is_refused(character, tmp_path):
    (tmp_path / "mine.yaml").write_text(f'logging: {{directory: "a{character}b"}}\n')
    with pytest.raises(ConfigError, match="control character") as error_info:
        parsed("--config", str(tmp_path / "mine.yaml"))
    assert error_info.value.key == "logging.directory"


def test_a_tilde_is_expanded_in_paths_of_examples_but_not_in_their_template():
    settings = parsed("--data.prefix=null", f"--data.examples={EXAMPLES}").data.examples
    assert (settings.path, settings.validation) == ("HOME/train.jsonl", "HOME/held_out.jsonl")
    assert settings.template == "~ {input}"


def test_a_tilde_is_expanded_in_stages_and_in_default_directories():
    config = parsed(
        "--data.prefix=~/a",
        "--data.stages=[{prefix: ~/b, share: 0.5}]",
        "--logging.directory=~/run",
    )
    assert [stage.config.data.prefix for stage in stages_of(config)] == ["HOME/a", "HOME/b"]
    assert config.data.cache_directory == "HOME/index_cache"
    assert config.checkpoint.directory == "HOME/run/checkpoints"


def test_the_home_directory_of_an_unknown_user_is_refused():
    with pytest.raises(ConfigError, match="no home directory was found for this user") as refused:
        parsed("--data.tokenizer=~no-such-user/t")
    assert refused.value.key == "data.tokenizer"
    with pytest.raises(UserError):
        parse_run_config(["--config=~no-such-user/recipe.yaml"])


@pytest.mark.parametrize("name", TASK_SETTINGS)
def test_a_tilde_is_expanded_in_paths_of_evaluation_tasks(name):
    settings = [f"--{name}.{key}={value}" for key, value in TASK_SETTINGS[name].items()]
    options, (task,) = read_command(
        [name, "--model=~/model", "--output=~/results", "--trust-remote-code", *settings]
    )
    assert (options.model, options.output) == ("HOME/model", "HOME/results")
    for key, text in TASK_SETTINGS[name].items():
        expected = yaml.safe_load(text.replace("~", "HOME"))
        assert getattr(task.settings, key) == expected
