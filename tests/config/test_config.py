import dataclasses
import subprocess
import sys
import tokenize

import pytest
import yaml

from megatron_tape.checkpoint.settings import model_differences
from megatron_tape.config import schema as config_module
from megatron_tape.config.checks import validate, validate_model
from megatron_tape.config.parse import parse_run_config
from megatron_tape.config.schema import (
    DataConfig,
    ModelConfig,
    RunConfig,
    TrainConfig,
    blend,
    config_dict,
    split_shares,
    to_yaml,
)
from megatron_tape.data.inputs import check_inputs
from megatron_tape.errors import ConfigError

MODEL = dict(num_layers=3, hidden_size=64, ffn_hidden_size=96, num_attention_heads=8, seq_length=32, vocab_size=128)
MINIMAL = {
    "model": MODEL,
    "data": {"prefix": "somewhere/corpus"},
    "train": {"steps": 100, "global_batch_size": 8},
}


def make(**changes):
    """A valid configuration with `section__key=value` changed."""
    config = RunConfig(
        model=ModelConfig(**MODEL),
        data=DataConfig(prefix="somewhere/corpus", tokenizer="somewhere/tokenizer.model"),
        train=TrainConfig(steps=100, global_batch_size=16, micro_batch_size=2, eval_interval=50),
    )
    for name, value in changes.items():
        section, key = name.split("__")
        assert hasattr(getattr(config, section), key)
        setattr(getattr(config, section), key, value)
    return config


@pytest.fixture
def parse(tmp_path):
    """Parse MINIMAL, some changes to it, and arguments."""

    def run(*argv, **changes):
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(MINIMAL | changes))
        return parse_run_config(["--config", str(path), *argv])

    return run


def refusal(capsys, call, *args, **kwargs):
    """The one line that parsing ends with."""
    with pytest.raises(SystemExit) as ended:
        call(*args, **kwargs)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.endswith("\n") and error.count("\n") == 1
    return error


def test_importing_takes_neither_torch_nor_the_parser():
    code = "import sys, megatron_tape.config; assert not {'torch', 'jsonargparse', 'yaml'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_file_fills_what_it_names_and_the_rest_has_defaults(parse):
    config = parse()
    assert config_dict(config)["model"] == dataclasses.asdict(ModelConfig(**MODEL))
    assert config.train == TrainConfig(steps=100, global_batch_size=8)
    validate(config, world_size=1)


def test_the_command_line_overrides_the_file_and_a_later_file_an_earlier_one(parse, tmp_path):
    (tmp_path / "later.yaml").write_text("train: {steps: 7}\noptimizer: {lr: 2e-3}\n")
    config = parse("--config", str(tmp_path / "later.yaml"), "--model.hidden_size", "128")
    assert (config.train.steps, config.train.global_batch_size) == (7, 8)
    assert (config.optimizer.lr, config.model.hidden_size) == (2e-3, 128)


def test_directories_left_open_follow_the_recipes_name(parse):
    config = parse()
    assert (config.logging.directory, config.checkpoint.directory) == ("runs/recipe", "runs/recipe/checkpoints")
    assert config.data.cache_directory == "somewhere/index_cache"
    config = parse("--logging.directory", "here", "--data.cache_directory", "there")
    assert (config.logging.directory, config.checkpoint.directory) == ("here", "here/checkpoints")
    assert config.data.cache_directory == config.data.resolved_cache_directory == "there"
    assert parse("--checkpoint.directory", "there").checkpoint.directory == "there"


def test_what_print_config_shows_runs_the_same_again(parse, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        parse("--print_config", "--optimizer.lr", "3e-4")
    assert ended.value.code == 0
    shown = tmp_path / "shown.yaml"
    shown.write_text(capsys.readouterr().out)
    config = parse_run_config(["--config", str(shown)])
    assert config == parse("--optimizer.lr", "3e-4")
    assert config.logging.directory == "runs/recipe"


def test_print_config_refuses_what_would_not_run(parse, capsys):
    assert "train.steps is 0" in refusal(capsys, parse, "--print_config", "--train.steps", "0")


def test_yaml_keeps_every_setting(tmp_path):
    config = make(data__prefix={"a/b.c": 0.5, "d": 2.0}, logging__sample_prompt="def é:\n ", optimizer__lr=1e-5)
    config_module.fill_directories(config, "name")
    (tmp_path / "written.yaml").write_text(to_yaml(config))
    assert parse_run_config(["--config", str(tmp_path / "written.yaml")]) == config


def test_help_shows_every_key_with_its_explanation(capsys):
    with pytest.raises(SystemExit):
        parse_run_config(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    with open(config_module.__file__, "rb") as file:
        strings = [token.string for token in tokenize.tokenize(file.readline) if token.type == tokenize.STRING]
    for section in dataclasses.fields(RunConfig):
        for item in dataclasses.fields(section.type):
            assert f"--{section.name}.{item.name} " in shown
    explanation = '"""Share one matrix between the input and the output embedding."""'
    assert explanation in strings and explanation.strip('"') in shown


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--model.hiden_size", "3"], "model.hiden_size"),
        (["--hidden_size", "3"], "--hidden_size"),
        (["--model.hidden", "3"], "model.hidden"),
        (["stray"], "stray"),
        (["--model.hidden_size", "wide"], "model.hidden_size: expected int, not wide"),
        (["--model.num_query_groups", "two"], "model.num_query_groups: expected int, null, not two"),
        (["--model.position_encoding", "sine"], "model.position_encoding: expected one of 'tape', 'rope', 'nope'"),
        (["--deepspeed.zero_stage", "4"], "deepspeed.zero_stage: expected one of 0, 1, 2, 3, not 4"),
        (["--logging.tensorboard", "maybe"], "logging.tensorboard: expected bool, not maybe"),
        (["--data.prefix", ""], "data.prefix is ''"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (["--config", "train: {steps: 3}"], "--config takes the path of a YAML file"),
    ],
)
def test_an_argument_that_cannot_be_is_named_in_one_line(parse, capsys, argv, message):
    assert message in refusal(capsys, parse, *argv)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"model: {num_layers: wide}", "model.num_layers: expected int, not wide"),
        (b"model: {heads: 3}", "unknown key model.heads"),
        (b"model: {", "while parsing a flow node"),
        (b"model: {num_layers: \xff}", "'utf-8' codec can't decode"),
        (b"- 3", "expected sections such as model: and data:"),
        (b"model:", "expected sections such as model: and data:"),
        (b"model: {num_layers: 2024-13-45}", "model.num_layers: expected int, not 2024-13-45"),
        (b"", "expected sections such as model: and data:"),
    ],
)
def test_a_mistake_in_one_of_two_files_names_the_file(tmp_path, capsys, content, message):
    wrong, right = tmp_path / "wrong.yaml", tmp_path / "right.yaml"
    wrong.write_bytes(content)
    right.write_text("train: {steps: 3}\nmodel: {num_layers: 3}\nlogging: {sample_prompt: 2024-13-45}")
    for files in ([wrong, right], [right, wrong]):
        with pytest.raises(SystemExit):
            parse_run_config([word for file in files for word in ("--config", str(file))])
        told = capsys.readouterr().err
        assert told.startswith(f"error: {wrong}: ") and message in told and told.count("\n") == 1
    for words in (["--train.steps=wide", f"--config={wrong}"], [f"--config={right}", "--train.steps=wide"]):
        with pytest.raises(SystemExit):
            parse_run_config(words)
        assert capsys.readouterr().err.startswith("error: train.steps: expected int")


def test_an_unknown_key_in_a_file_is_named(parse, capsys):
    assert "unknown key model.heads" in refusal(capsys, parse, model=MODEL | {"heads": 3})
    assert "unknown key modell" in refusal(capsys, parse, modell={"num_layers": 3})


@pytest.mark.parametrize("nothing", [None, {}])
def test_an_unknown_key_that_holds_nothing_is_named_too(parse, capsys, nothing):
    assert "unknown key modell" in refusal(capsys, parse, modell=nothing)
    assert "unknown key model.heads" in refusal(capsys, parse, model=MODEL | {"heads": nothing})


@pytest.mark.parametrize("value", [None, 5, [], "text"])
def test_a_section_that_is_no_mapping_is_named(parse, capsys, value):
    assert "optimizer" in refusal(capsys, parse, optimizer=value)
    assert "train" in refusal(capsys, parse, train=value)


def test_a_misspelt_key_is_told_its_neighbour_and_no_recipe_where_to_find_one(capsys):
    for argv, told in ((["--train.step=3"], "did you mean train.steps?"), ([], "give --config RECIPE.yaml")):
        with pytest.raises(SystemExit):
            parse_run_config(argv)
        assert told in capsys.readouterr().err


@pytest.mark.parametrize("section, key", [("model", "num_layers"), ("data", "prefix"), ("train", "steps")])
def test_a_missing_key_is_named(parse, capsys, section, key):
    rest = {name: value for name, value in MINIMAL[section].items() if name != key}
    assert f"{section}.{key}" in refusal(capsys, parse, **{section: rest})


@pytest.mark.parametrize(
    "prefix, expected",
    [
        ("a/b", (["a/b"], None)),
        (["a", "b", "c"], (["a", "b", "c"], None)),
        ({"a": 0.3, "b": 2}, (["a", "b"], [0.3, 2.0])),
        ([0.3, "a", 0.7, "b"], (["a", "b"], [0.3, 0.7])),
        ([1, "a"], (["a"], [1.0])),
    ],
)
def test_a_blend_may_be_spelled_in_four_ways(parse, prefix, expected):
    assert blend(prefix) == expected
    assert blend(parse(data={"prefix": prefix}).data.prefix) == expected


@pytest.mark.parametrize(
    "prefix",
    ["", [], {}, ["a", 0.3], [0.3], [0.3, "a", 0.7], [0.3, "a", "b"], ["a", "b", 0.5], [0.0, "a"], [-1.0, "a"],
     {"a": float("nan")}, {"a": 0}, [""], [0.1, 0.2]],
)  # fmt: skip
def test_a_malformed_blend_is_refused(prefix):
    with pytest.raises(ConfigError, match="^data.prefix is "):
        blend(prefix)


def test_split_shares_sum_to_one():
    assert split_shares("969,30,1") == pytest.approx((0.969, 0.03, 0.001))
    assert split_shares("1, 0, 0") == (1.0, 0.0, 0.0)


@pytest.mark.parametrize(
    "split", ["", "1", "969,30", "1,2,3,4", "a,b,c", "1,-1,0", "0,1,1", "0,0,0", "inf,1,1", "nan,1,1"]
)
def test_a_malformed_split_is_refused(split):
    with pytest.raises(ConfigError, match="^data.split is "):
        split_shares(split)
    with pytest.raises(ConfigError, match="^data.split is "):
        validate(make(data__split=split), 1)


@pytest.mark.parametrize(
    "world_size, changes",
    [
        (1, {}),
        (8, {}),
        (2, {"parallel__tensor_model_parallel_size": 2}),
        (8, {"parallel__tensor_model_parallel_size": 2, "parallel__sequence_parallel": True}),
        (2, {"parallel__tensor_model_parallel_size": 2, "parallel__sequence_parallel": False,
             "model__position_encoding": "rope", "model__seq_length": 31}),
        (1, {"train__precision": "fp32", "deepspeed__zero_stage": 0}),
        (1, {"schedule__kind": "wsd", "schedule__warmup_steps": 50, "schedule__decay_steps": 50}),
        (1, {"schedule__warmup_steps": 100}),
        (1, {"model__token_mixing": "per_head"}),
        (1, {"model__num_query_groups": 2, "model__gate_input": "attention", "model__tie_embeddings": True}),
        (1, {"data__split": "1,0,0", "train__eval_interval": None}),
        (1, {"data__tokenizer": None, "train__eval_interval": None}),
        (1, {"data__tokenizer": None, "logging__sample_tokens": 0}),
        (1, {"data__reset_attention_mask": True, "deepspeed__offload_optimizer": True}),
        (1, {"optimizer__clip_grad": 0.0, "optimizer__weight_decay": 0.0, "optimizer__min_lr": 1e-4}),
    ],
)  # fmt: skip
def test_what_can_run_is_accepted(world_size, changes):
    validate(make(**changes), world_size)


@pytest.mark.parametrize(
    "message, world_size, changes",
    [
        ("model.hidden_size 60 is not divisible by model.num_attention_heads 8", 1, {"model__hidden_size": 60}),
        ("heads of odd width 9", 1, {"model__hidden_size": 72}),
        ("model.num_attention_heads 8 is not divisible by model.num_query_groups 3", 1, {"model__num_query_groups": 3}),
        ("model.token_mixing per_head", 1, {"model__token_mixing": "per_head", "model__num_query_groups": 2}),
        ("model.position_encoding is 'sine'; choose one of tape, rope, nope", 1, {"model__position_encoding": "sine"}),
        ("model.gate_input is 'both'", 1, {"model__gate_input": "both"}),
        ("train.precision is 'fp16'", 1, {"train__precision": "fp16"}),
        ("deepspeed.zero_stage is 4", 1, {"deepspeed__zero_stage": 4}),
        ("schedule.kind is 'step'", 1, {"schedule__kind": "step"}),
        ("number of processes, 3, is not divisible by parallel.tensor_model_parallel_size 2", 3,
         {"parallel__tensor_model_parallel_size": 2}),
        ("number of processes, 0,", 0, {}),
        ("model.num_attention_heads 8 is not divisible by parallel.tensor_model_parallel_size 3", 3,
         {"parallel__tensor_model_parallel_size": 3}),
        ("model.num_query_groups 2 is not divisible by parallel.tensor_model_parallel_size 4", 4,
         {"parallel__tensor_model_parallel_size": 4, "model__num_query_groups": 2}),
        ("model.ffn_hidden_size 97", 2, {"parallel__tensor_model_parallel_size": 2, "model__ffn_hidden_size": 97}),
        ("model.vocab_size 129", 2, {"parallel__tensor_model_parallel_size": 2, "model__vocab_size": 129}),
        ("model.seq_length 31", 2, {"parallel__tensor_model_parallel_size": 2, "model__seq_length": 31}),
        ("parallel.sequence_parallel is true", 1, {"parallel__sequence_parallel": True}),
        ("tape with parallel.tensor_model_parallel_size 2 needs parallel.sequence_parallel", 2,
         {"parallel__tensor_model_parallel_size": 2, "parallel__sequence_parallel": False}),
        ("model.qk_norm with parallel.tensor_model_parallel_size 2 needs parallel.sequence_parallel", 2,
         {"parallel__tensor_model_parallel_size": 2, "parallel__sequence_parallel": False, "model__qk_norm": True,
          "model__position_encoding": "rope"}),
        ("train.global_batch_size 16 is not divisible by train.micro_batch_size 2 times 3 data-parallel", 3, {}),
        ("train.precision bf16 with deepspeed.zero_stage 0", 1, {"deepspeed__zero_stage": 0}),
        ("attention_backend is flash_attn, which computes in bf16, and train.precision is fp32", 1,
         {"model__attention_backend": "flash_attn", "train__precision": "fp32"}),
        ("deepspeed.offload_optimizer is true with deepspeed.zero_stage 0", 1,
         {"deepspeed__zero_stage": 0, "train__precision": "fp32", "deepspeed__offload_optimizer": True}),
        ("schedule.warmup_steps 101 exceeds train.steps 100", 1, {"schedule__warmup_steps": 101}),
        ("schedule.warmup_steps 60 and schedule.decay_steps 50 together", 1,
         {"schedule__kind": "wsd", "schedule__warmup_steps": 60, "schedule__decay_steps": 50}),
        ("schedule.decay_steps 50 has no meaning for schedule.kind cosine", 1, {"schedule__decay_steps": 50}),
        ("optimizer.min_lr 0.1 exceeds optimizer.lr 0.0001", 1, {"optimizer__min_lr": 0.1}),
        ("optimizer.lr is nan", 1, {"optimizer__lr": float("nan")}),
        ("optimizer.beta2 is 1.0", 1, {"optimizer__beta2": 1.0}),
        ("train.eval_interval is 50, but data.split 1,0,0", 1, {"data__split": "1,0,0"}),
        ("data.reset_attention_mask is true", 1,
         {"data__reset_attention_mask": True, "data__tokenizer": None, "train__eval_interval": None}),
        ("logging.sample_tokens is 64", 1, {"data__tokenizer": None}),
        ("checkpoint.keep is 0", 1, {"checkpoint__keep": 0}),
        ("checkpoint.resume is empty", 1, {"checkpoint__resume": ""}),
        ("data.prefix is []", 1, {"data__prefix": []}),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_in_one_sentence(message, world_size, changes):
    with pytest.raises(ConfigError) as refused:
        validate(make(**changes), world_size)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value) and ". " not in str(refused.value)


POSITIVE = [
    "model num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups seq_length vocab_size",
    "model kv_channels unpadded_vocab_size position_mlp_size rope_theta rope_scaling_factor norm_epsilon init_std",
    "model rope_low_freq_factor rope_high_freq_factor rope_original_seq_length",
    "optimizer lr eps",
    "schedule power",
    "parallel tensor_model_parallel_size",
    "deepspeed reduce_bucket_size",
    "train steps micro_batch_size global_batch_size eval_interval eval_steps max_bad_steps",
    "checkpoint interval keep",
    "logging interval",
]


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize("key", [f"{line.split()[0]}__{key}" for line in POSITIVE for key in line.split()[1:]])
def test_a_size_that_is_not_positive_is_refused_by_name(key, value):
    with pytest.raises(ConfigError, match=f"^{key.replace('__', '.')} is {value}; "):
        validate(make(**{key: value}), 1)


@pytest.mark.parametrize(
    "key",
    ["optimizer__min_lr", "optimizer__weight_decay", "optimizer__clip_grad", "schedule__warmup_steps", "train__seed",
     "data__num_workers", "logging__sample_tokens"],
)  # fmt: skip
def test_a_negative_number_is_refused_by_name(key):
    with pytest.raises(ConfigError, match=f"^{key.replace('__', '.')} is -1; "):
        validate(make(**{key: -1}), 1)


def test_inputs_that_do_not_exist_are_named_one_by_one(tmp_path):
    config = make(data__prefix=[0.5, str(tmp_path / "a"), 0.5, str(tmp_path / "b")], checkpoint__resume="auto")
    config.data.tokenizer = str(tmp_path / "tokenizer.model")
    for name in ("a.idx", "a.bin", "b.idx", "b.bin", "tokenizer.model"):
        with pytest.raises(ConfigError, match=f"{name} does not exist"):
            check_inputs(config)
        (tmp_path / name).write_text("")
    check_inputs(config)
    config.checkpoint.resume = str(tmp_path / "step-00000001")
    with pytest.raises(ConfigError, match="checkpoint.resume .*step-00000001 is not a directory"):
        check_inputs(config)
    (tmp_path / "step-00000001").mkdir()
    check_inputs(config)


def test_differences_between_models_are_named_with_both_values():
    saved = dataclasses.asdict(ModelConfig(**MODEL))
    assert model_differences(saved, dict(saved)) == []
    assert model_differences(saved, saved | {"hidden_size": 512, "token_mixing": "per_head"}) == [
        "model.hidden_size: checkpoint 64, configuration 512",
        "model.token_mixing: checkpoint full, configuration per_head",
    ]
    assert model_differences(saved, saved | {"new": 1}) == ["model.new: checkpoint absent, configuration 1"]
    assert model_differences(saved | {"old": None}, saved) == ["model.old: checkpoint None, configuration absent"]


def test_a_default_spelled_out_is_no_difference():
    saved = dataclasses.asdict(ModelConfig(**MODEL))
    assert model_differences(saved, saved | {"num_query_groups": 8, "position_mlp_size": 32, "kv_channels": 8}) == []
    assert model_differences(saved, saved | {"num_query_groups": 4}) == [
        "model.num_query_groups: checkpoint 8, configuration 4"
    ]


def test_parameters_are_counted_matrix_by_matrix():
    sizes = dict(num_layers=3, hidden_size=8, ffn_hidden_size=5, num_attention_heads=4, seq_length=6, vocab_size=11)
    model = ModelConfig(**sizes, num_query_groups=2, position_mlp_size=7)
    layer = 8 * (4 + 2 * 2) * 2 + 8 * 8 + 3 * 8 * 5 + 2 * 8
    tape = 2 * 4 + 7 * 8 + 7 * 2 + 2 * 7
    assert model.parameter_count() == 2 * 11 * 8 + 3 * layer + 2 * tape + 8
    for change, expected in (
        ({"position_encoding": "rope"}, -2 * tape),
        ({"tie_embeddings": True}, -11 * 8),
        ({"num_layers": 1}, -2 * (layer + tape)),
        ({"kv_channels": 6}, 3 * (8 * (4 + 2 * 2) + 4 * 8) * (6 - 2)),
        ({"qkv_bias": True}, 3 * (4 + 2 * 2) * 2),
        ({"qk_norm": True}, 3 * 2 * 2),
    ):
        assert dataclasses.replace(model, **change).parameter_count() - model.parameter_count() == expected
    per_head = ModelConfig(**sizes, position_mlp_size=7, token_mixing="per_head")
    assert per_head.parameter_count() - dataclasses.replace(per_head, token_mixing="full").parameter_count() == 2 * (
        4 - 16
    )


def test_flops_are_counted_matmul_by_matmul():
    sizes = dict(num_layers=3, hidden_size=8, ffn_hidden_size=5, num_attention_heads=4, seq_length=6, vocab_size=11)
    model = ModelConfig(**sizes, num_query_groups=2, position_mlp_size=7)
    matrices = 8 * (4 + 2 * 2) * 2 + 8 * 8 + 3 * 8 * 5
    rope_pairs, tape_pairs = 3 * 4 * (2 + 2), 3 * 4 * (2 + 4)
    update = 7 * 8 + 2 * 2 * 7 + 2 * 2 * 2 + 4 * 2 * 2
    assert model.flops_per_token() == 6 * (3 * matrices + 2 * (tape_pairs + update) + rope_pairs + 8 * 11)
    rope = dataclasses.replace(model, position_encoding="rope")
    assert rope.flops_per_token() == 6 * (3 * matrices + 3 * rope_pairs + 8 * 11)


def test_sizes_that_do_not_fit_are_refused_for_a_model_alone():
    validate_model(ModelConfig(**MODEL))
    with pytest.raises(ConfigError, match="model.hidden_size 65"):
        validate_model(ModelConfig(**MODEL | {"hidden_size": 65}))
    validate_model(ModelConfig(**MODEL | {"hidden_size": 65, "kv_channels": 8}))
    for changes, message in (
        ({"kv_channels": 7}, "model.kv_channels 7 is odd"),
        ({"unpadded_vocab_size": 1000}, "model.unpadded_vocab_size 1000 exceeds model.vocab_size"),
        ({"rope_low_freq_factor": 4.0}, "model.rope_low_freq_factor 4.0 is not below"),
    ):
        with pytest.raises(ConfigError, match=message):
            validate_model(ModelConfig(**MODEL | changes))
