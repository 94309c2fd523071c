import os
import re
import shutil
import threading

import pytest
import yaml
from configurations import MINIMAL, MODEL, make, model_config

from megatron_tape.checks.arguments import parse_run_config, with_directories
from megatron_tape.checks.combinations import validate
from megatron_tape.command_line import status_of
from megatron_tape.config import foreign_keys, schema
from megatron_tape.config.data import blend
from megatron_tape.config.recipes import find_recipe
from megatron_tape.config.schema import OptimizerConfig, RunConfig, config_dict, to_yaml
from megatron_tape.config.sections import as_dict, settings_of
from megatron_tape.config.train import SpikeSettings, TrainConfig
from megatron_tape.position import ENCODINGS
from megatron_tape.synthetic import Recall


@pytest.fixture
def parse(tmp_path):
    """Return a function that parses a recipe, MINIMAL with some sections replaced, and
    arguments.
    """

    def run(*argv, **changes):
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(MINIMAL | changes))
        return parse_run_config(["--config", str(path), *argv])

    return run


def refusal(capsys, call, *args, **kwargs):
    """Return the line that is printed if `call` raises an error, and check that it is the only
    one.
    """
    assert status_of(lambda: call(*args, **kwargs)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.endswith("\n")
    assert error.count("\n") == 1
    return error


def test_settings_that_are_not_in_the_recipe_have_defaults(parse):
    config = parse()
    assert config_dict(config)["model"] == as_dict(model_config(**MODEL))
    assert config.train == TrainConfig(steps=100, global_batch_size=8)
    validate(config, world_size=1)


def test_later_recipes_and_options_override_earlier_recipes(parse, tmp_path):
    (tmp_path / "later.yaml").write_text("train: {steps: 7}\noptimizer: {lr: 2e-3}\n")
    config = parse("--config", str(tmp_path / "later.yaml"), "--model.hidden_size", "128")
    assert (config.train.steps, config.train.global_batch_size) == (7, 8)
    assert (config.optimizer.lr, config.model.hidden_size) == (2e-3, 128)


def test_default_directories_contain_the_name_of_the_recipe(parse):
    config = parse()
    assert config.logging.directory == "runs/recipe"
    assert config.checkpoint.directory == "runs/recipe/checkpoints"
    assert config.data.cache_directory == "somewhere/index_cache"
    assert config.to_start_another_run == "start another run with --logging.directory NEW"
    config = parse("--logging.directory=here", "--data.cache_directory=there")
    assert config.checkpoint.directory == "here/checkpoints"
    assert config.data.cache_directory == "there"
    config = parse("--checkpoint.directory=there")
    assert config.checkpoint.directory == "there"
    assert config.to_start_another_run.endswith(" --checkpoint.directory NEW")


def test_the_output_of_print_config_is_a_recipe_for_the_same_run(parse, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        parse("--print_config", "--optimizer.lr", "3e-4")
    assert ended.value.code == 0
    shown = tmp_path / "shown.yaml"
    shown.write_text(capsys.readouterr().out)
    assert parse_run_config([str(shown)]) == parse("--optimizer.lr", "3e-4")
    other = parse_run_config([str(shown), "--logging.directory=runs/other"])
    assert other.checkpoint.directory == "runs/other/checkpoints"


def test_an_error_about_incompatible_settings_names_file_and_line(parse, tmp_path, capsys):
    place = rf"{tmp_path}/recipe.yaml:\d+"
    error = refusal(capsys, parse, model=MODEL | {"hidden_size": 65})
    assert re.match(rf"error: {place} and {place}: model.hidden_size 65 is not divisible", error)
    error = refusal(capsys, parse, "--model.num_attention_heads=7")
    both = rf"{place} and --model.num_attention_heads"
    assert re.match(rf"error: {both}: model.hidden_size 64 is not divisible", error)


@pytest.mark.parametrize(
    "text",
    [
        "def é:\n ",
        "1e-3",
        "08",
        "1:30",
        "2024-01-01",
        "null",
        "yes",
        "*a",
        "&b",
        "",
        " ",
    ],
)
def test_settings_are_equal_after_writing_and_reading_yaml(tmp_path, text):
    config = make(
        data__prefix={"a/b.c": 0.5, "d": 2.0}, logging__sample_prompt=text, optimizer__lr=1e-5
    )
    config = with_directories(config, text.replace("\n", ""))  # paths contain no line breaks
    (tmp_path / "written.yaml").write_text(to_yaml(config))
    assert parse_run_config(["--config", str(tmp_path / "written.yaml")]) == config
    assert yaml.safe_load(to_yaml(config)) == config_dict(config)


def test_help_shows_every_setting_with_its_description(capsys):
    with pytest.raises(SystemExit):
        parse_run_config(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for setting in settings_of(RunConfig):
        if "." in setting.key:
            assert f"--{setting.key} " in shown
            assert setting.schema.get("description"), setting.key
    assert "Sections of settings: model, data, optimizer, " in shown
    assert "MISSING" not in shown
    assert "(a list; default: ['validation_loss', " in shown
    with open(schema.__file__) as file:
        assert '"""Width of the hidden states (C)."""' in file.read()
    assert "Width of the hidden states (C)." in shown


@pytest.mark.parametrize(
    "section, text, first, included",
    [
        ("train.spikes", SpikeSettings.__doc__, "train.spikes", "train.spikes.action"),
        ("optimizer", OptimizerConfig.__doc__, "optimizer.kind", "optimizer.lr_scale_of"),
        ("data.generator", "data.generator:", "data.generator", "data.generator.digits"),
        ("train.steps", TrainConfig.__doc__, "train.steps", "train.steps"),
    ],
)
def test_help_of_a_section_shows_only_its_settings(capsys, section, text, first, included):
    with pytest.raises(SystemExit) as ended:
        parse_run_config(["--help", section])
    shown = capsys.readouterr().out
    options = re.findall(r"^  --(\S+)", shown, re.MULTILINE)
    assert ended.value.code == 0
    assert options[0] == first
    assert included in options
    assert all(f"{option}.".startswith(f"{section}.") for option in options)
    assert " ".join(text.split()) in " ".join(shown.split())


def test_help_of_an_unknown_section_is_refused(capsys):
    error = refusal(capsys, parse_run_config, ["--help", "optimiser"])
    assert "optimiser is an unknown key; did you mean optimizer?" in error


@pytest.mark.parametrize(
    "argument, words",
    [
        ("--model.hiden_size=3", "model.hiden_size is an unknown key; did you mean model.hidden_s"),
        ("--hidden_size=3", "hidden_size is an unknown key; did you mean model.hidden_size?"),
        ("--train.lr=3", "train.lr is an unknown key; did you mean optimizer.lr?"),
        ("--train.spikes.actoin=skip", "did you mean train.spikes.action?"),
        ("--train.action=skip", "did you mean train.spikes.action?"),
        ("--model.window_size=[127,0]", "set model.sliding_window to its first number + 1: it"),
        ("--window-size=127,0", "window-size is an unknown key; set model.sliding_window to its"),
        ("--model.window_attn_skip_freq=4", "set model.full_attention_every to the same number"),
        ("--model.no_rope_freq=4", "set model.layers_without_positions to the same number"),
        ("--model.layer_types=[full_attention]", "and model.full_attention_every to N if layers N"),
        ("--model.use_sliding_window=true", "set model.sliding_window to the number of tokens"),
        ("--model.sliding_window_size=128", "set model.sliding_window to the same number"),
        ("--model.sliding_window_indices=[1,0]", "set model.full_attention_every to N if every"),
        ("--model.sliding_window_layer_stride=2", "also set model.full_attention_every to 2"),
        ("--model.rope_local_base_freq=1e4", "set model.position.rope_local_theta to the same"),
        ("--model.local_rope_theta=1e4", "set model.position.rope_local_theta to the same"),
        ("--model.global_rope_theta=1e6", "set model.position.rope_theta to the same"),
        ("--model.position.floor_scale=8192", "set model.temperature_floor_scale to the same"),
        ("--model.full_attention_evry=4", "did you mean model.full_attention_every?"),
        ("--model.rope_scaling_layers=full", "did you mean model.position.rope_scaling_layers?"),
        ("--data.generator.name=recall", "; choose from the keys of data.generator: task, "),
        ("--data.stages=[{prefix: a, shar: 1}]", "data.stages[0].shar is an unknown key; correct"),
        ("--optimizer.weight_decay_of.position=0", " a mapping, such as {position: "),
        ("stray", "stray is not an option; give settings as --section.key value"),
        ("--train=3", "train is a section of settings; give its settings as --train.key value"),
        ("--train.spikes=skip", "train.spikes is 'skip'; give a mapping or null"),
        ("--train.spikes.action=stop", "action is 'stop'; give 'warn', 'skip' or 'rewind'"),
        ("--train.average.decay=0.9", "train.average.kind must be set"),
        ("--data.stages=[{prefix: a, share: 0.1}, 3]", "data.stages[1] is 3"),
        ("--data.generator={digits: 3}", "; give a task or null"),
        ("--data.generator={task: subtraction}", "; give a task: 'addition', "),
        ("--model.position=3", "model.position is 3; give a mapping"),
        ("--data.prefix={a: 1, b: null}", "data.prefix.b is null; give a number"),
        ("--data.prefix={}", "data.prefix is {}; give at least 1 items"),
        ("--optimizer.lr_scale_of={position: x}", "optimizer.lr_scale_of.position is 'x'"),
        ("--checkpoint.keep_every=0", "is 0; give a number of at least 1 or null"),
        ("--train.hang_timeout=0", "is 0; give a number above 0 or null"),
        ("--data.tokenizer=\udcff", "a setting is not UTF-8 text"),
        ("--train.steps", "--train.steps: expected one argument"),
        ("--train.steps=5.0", "train.steps is 5.0; give a whole number"),
        ("--optimizer.lr=1" + 400 * "0", "0...; give a finite number"),
        ("--model.position_encoding=sine", "'sine', which is not a positional encoding; choose"),
        ("--data.prefix=null", "data.prefix must be set; "),
        ("--config=nowhere.yaml", "nowhere.yaml does not exist; give the path of a YAML file"),
        ("--config=tape_155M", "did you mean tape_155m or "),
    ],
)
def test_an_error_about_an_invalid_argument_is_one_line(parse, capsys, argument, words):
    assert words in refusal(capsys, parse, argument)


NESTED_ALIASES = "".join(
    f"a{n}: &a{n} [{', '.join(9 * [f'*a{n - 1}']) if n else 'x'}]\n" for n in range(12)
).encode()


@pytest.mark.parametrize(
    "content, words",
    [
        (b"\nmodel: {num_layers: wide}", ":2: model.num_layers is 'wide'"),
        (b"model: {\n layers: 3}", ":2: model.layers is an unknown key; did you mean model.num_l"),
        (b"model:\n  position:\n    mlp_size: wide", ":3: model.position.mlp_size is 'wide'"),
        (b"train:\n  profile:\n    ranks: [x]", ":3: train.profile.ranks[0] is 'x'"),
        (b"data: {prefix: {a: b}}", ":1: data.prefix.a is 'b'"),
        (b"model.num_layers: 3", ":1: model.num_layers is not a section"),
        (b"model:", ":1: model is null; give a mapping"),
        (b"model: {position_encoding: [rope]}", ":1: model.position_encoding is ['rope']"),
        (b"train:\n  steps: 3\n  steps: 4", ":3 cannot be read: steps is given twice, first in"),
        (b"train: {steps: 1" + 5000 * b"0" + b"}", " cannot be read: Exceeds the limit (4300 dig"),
        (b"train: {steps: !!python/object:os.system {}}", ":1 cannot be read: anchors, aliases"),
        (NESTED_ALIASES, ":1 cannot be read: anchors, aliases and tags"),
        (b"model: " + 1500 * b"[", " is nested too deeply to be read"),
        (b"#" * 1_000_001, " is larger than 1,000,000 bytes"),
        (b"model: {", ":1 cannot be read: it is not valid YAML; check the indentation"),
        (b"\nmodel: {num_layers: \xff}", ":2 is not UTF-8 text"),
        (b"qqqq: {}", ":1: qqqq is an unknown key; choose from the keys model, "),
        (b"model: {1: 2}", ":1: model.1 is an unknown key"),
        (b"? [a]\n: 3", ":1 cannot be read: "),
        (b"- 3", " must contain sections such as model: and data:"),
    ],
)
def test_an_error_in_one_of_two_recipes_names_file_and_line(tmp_path, capsys, content, words):
    invalid = tmp_path / "invalid.yaml"
    valid = tmp_path / "valid.yaml"
    invalid.write_bytes(content)
    valid.write_text(yaml.safe_dump(MINIMAL | {"logging": {"sample_prompt": "2024-13-45"}}))
    arguments = ["--config", str(valid), "--config", str(invalid), "--data.tokenizer", "x"]
    error = refusal(capsys, parse_run_config, arguments)
    assert error.startswith(f"error: {invalid}{words}"), error


def test_an_error_on_the_command_line_names_no_file(parse, capsys):
    train = MINIMAL["train"] | {"profile": {"ranks": [1]}}
    error = refusal(capsys, parse, "--train.profile.ranks=[]", train=train)
    assert error.startswith("error: train.profile.ranks is []; ")


VERBATIM = ["runs/tape #2", " The ", '"Hi"', "'x'", "a\nb", "--- a", "[unclosed", "a: b"]


def test_numbers_are_decimal_and_text_needs_no_quotes_on_the_command_line(parse):
    config = parse("--optimizer.lr=1e-3", "--train.seed=010", "--train.steps=1_000")
    assert (config.optimizer.lr, config.train.seed, config.train.steps) == (1e-3, 10, 1000)
    config = parse("--data.tokenizer=null", "--train.hang_timeout=null")
    assert config.data.tokenizer is None
    assert config.train.hang_timeout is None
    for text in ("3", "null", "yes", "2024-01-01", "", "1:30", *VERBATIM):
        assert parse("--logging.sample_prompt", text).logging.sample_prompt == text
        path = f"/d/{text}".replace("\n", "")  # paths contain no line breaks
        assert parse(f"--data.prefix={path}").data.prefix == path
    config = parse(logging={"sample_prompt": "3"}, optimizer={"lr": 1})
    assert isinstance(config.optimizer.lr, float)
    assert config.logging.sample_prompt == "3"


def test_settings_of_a_section_are_merged_with_earlier_ones(parse):
    train = MINIMAL["train"] | {"spikes": {"window": 50, "limit": 3}}
    spikes = parse("--train.spikes.action=skip", train=train).train.spikes
    assert spikes == SpikeSettings(action="skip", window=50, limit=3)
    assert parse("--train.spikes={window: 9}", train=train).train.spikes.limit == 3
    assert parse("--train.spikes=null", train=train).train.spikes is None
    changed = parse("--train.spikes=null", "--train.spikes.window=7").train.spikes
    assert changed == SpikeSettings(window=7)


def test_a_later_encoding_keeps_the_earlier_settings_that_it_has(parse):
    model = MODEL | {"position": {"rope_theta": 5e5, "token_mixing": "per_head"}}
    position = parse("--model.position_encoding=rope", model=model).model.position
    assert position == ENCODINGS["rope"].Settings(rope_theta=5e5)


def test_a_setting_of_another_encoding_is_refused(parse, capsys):
    model = MODEL | {"position_encoding": "nope", "position": {"increments": "signed"}}
    error = refusal(capsys, parse, model=model)
    assert "recipe.yaml:" in error
    assert "model.position.increments does not apply to the selected task" in error


def test_a_later_task_of_a_generator_keeps_no_earlier_settings(parse):
    data = {"generator": {"task": "addition", "digits": 3}}
    changed = [
        "--data.generator={task: recall, keys: 64}",
        "--model.vocab_size=999",
        "--model.seq_length=999",
    ]
    assert parse(*changed, data=data).data.generator == Recall(keys=64)


def test_a_recipe_can_be_read_from_a_pipe(tmp_path):
    pipe = tmp_path / "recipe.yaml"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(yaml.safe_dump(MINIMAL),))
    writer.start()
    assert parse_run_config(["--config", str(pipe)]).train.steps == 100
    writer.join()


def test_without_a_recipe_the_error_says_where_to_find_one(capsys):
    assert "give --config RECIPE, such as --config tape_demo" in refusal(
        capsys, parse_run_config, []
    )


def test_a_first_argument_without_dashes_is_the_recipe(tmp_path, capsys):
    recipe = "tape_demo"
    assert parse_run_config([recipe]) == parse_run_config(["--config", recipe])
    error = refusal(capsys, parse_run_config, ["train.steps=3", recipe])
    assert "train.steps is not an option" in error
    copy = tmp_path / "lr=0.1" / "config.yaml"
    copy.parent.mkdir()
    shutil.copy(find_recipe(recipe), copy)
    assert parse_run_config([str(copy)]) == parse_run_config(["--config", str(copy)])


def test_a_recipe_is_found_by_name_unless_a_file_has_this_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tape_demo").mkdir()
    assert parse_run_config(["--config", "tape_demo"]).logging.directory == "runs/tape_demo"
    assert parse_run_config(["--config=tape_demo.yaml"]).logging.directory == "runs/tape_demo"
    assert find_recipe("extend/tiny_tape").endswith("pretrain/recipes/extend/tiny_tape.yaml")
    (tmp_path / "rope_demo").write_text(yaml.safe_dump(MINIMAL))
    assert parse_run_config(["--config", "rope_demo"]).train.steps == MINIMAL["train"]["steps"]


@pytest.mark.parametrize(
    "name, words",
    [
        ("ladder", "recipe ladder does not exist; did you mean compare/ladder? Or give the path"),
        ("extend/yarm", "did you mean extend/yarn or "),
        ("quite_different", "or the name of a recipe in "),
    ],
)
def test_a_mistyped_recipe_is_answered_with_similar_names(capsys, name, words):
    error = refusal(capsys, parse_run_config, ["--config", name])
    assert words in error
    assert len(error) < 400


def test_an_error_names_all_missing_settings(parse, capsys):
    sentence = "error: train.steps must be set (also missing: train.global_batch_size); "
    assert sentence in refusal(capsys, parse, train={"seed": 1})


@pytest.mark.parametrize(
    "prefix, expected",
    [
        ("a/b", (["a/b"], None)),
        (["a", "b", "c"], (["a", "b", "c"], None)),
        ({"a": 0.3, "b": 2}, (["a", "b"], [0.3, 2.0])),
    ],
)
def test_datasets_can_be_a_path_a_list_or_a_mapping(parse, prefix, expected):
    assert blend(prefix) == expected
    assert blend(parse(data={"prefix": prefix}).data.prefix) == expected


def test_a_path_that_looks_like_a_number_is_not_changed(parse):
    assert parse("--data.prefix={1.10: 2, null: 1}").data.prefix == {"1.10": 2.0, "null": 1.0}


def test_null_removes_a_window(parse):
    window = ["--model.sliding_window=8", "--model.full_attention_every=2"]
    assert parse(*window).model.window_of(0) == 8
    removed = ["--model.sliding_window", "null", "--model.full_attention_every=null"]
    assert parse(*window, *removed).model == parse().model


def test_settings_named_for_users_of_other_programs_exist():
    known = {setting.key for setting in settings_of(RunConfig)}
    names = {
        name for fix in foreign_keys.FIXES.values() for name in re.findall(r"model[.\w]+\w", fix)
    }
    assert {"model.sliding_window", "model.full_attention_every"} < names <= known
    assert not {key.rpartition(".")[2] for key in known} & foreign_keys.FIXES.keys()
