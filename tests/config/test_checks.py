"""Incompatible settings are refused with an error about one of their keys, and compatible ones are
accepted.
"""

import pytest
from configurations import make

from megatron_tape.checks import Level, check, combinations
from megatron_tape.checks.combinations import validate
from megatron_tape.checks.layout import PROCESSES
from megatron_tape.config.data import split_shares
from megatron_tape.config.schema import ATTENTION_BACKENDS
from megatron_tape.errors import ConfigError
from megatron_tape.ops.backends import BACKENDS, SCORES
from megatron_tape.position import ENCODINGS

TENSOR = "parallel__tensor_model_parallel_size"
CONTEXT = "parallel__context_parallel_size"
SEQUENCE = {"parallel__sequence_parallel": False}
ROPE = {"model__position_encoding": "rope"}
YARN = {"model__position__rope_scaling_type": "yarn"}
LONG = {"minimum": 8192, "share": 0.5}
STAGES = "parallel__pipeline_model_parallel_size"
VIRTUAL = "parallel__virtual_pipeline_size"
STAGED = {"processes": 2, STAGES: 2, "model__num_layers": 4, "train__micro_batch_size": 1}
GENERATED = {"data__prefix": None, "data__tokenizer": None}


def examples(**settings):
    return {"data__prefix": None, "data__examples": {"path": "a.jsonl", **settings}}


def test_every_backend_can_be_chosen():
    assert ATTENTION_BACKENDS == ("auto", *BACKENDS)


def test_split_shares_sum_to_one():
    assert split_shares("969,30,1") == pytest.approx((0.969, 0.03, 0.001))
    assert split_shares("1, 0, 0") == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("split", ["969,30", "a,b,c", "1,-1,0", "0,1,1", "inf,1,1"])
def test_a_malformed_split_is_refused(split):
    with pytest.raises(ConfigError) as refused:
        validate(make(data__split=split), 1)
    assert refused.value.key == "data.split"


@pytest.mark.parametrize(
    "world_size, changes",
    [
        (1, {}),
        (8, {}),
        (2, {TENSOR: 2}),
        (4, {TENSOR: 2, STAGES: 2, "model__num_layers": 4}),
        (2, {STAGES: 2, VIRTUAL: 2, "model__num_layers": 4}),
        (2, {STAGES: 2, "model__num_layers": 5, "parallel__pipeline_layers": [2, 3]}),
        (8, {TENSOR: 2, "parallel__sequence_parallel": True}),
        (2, {TENSOR: 2, "model__seq_length": 31, **SEQUENCE, **ROPE}),
        (1, {"schedule__kind": "wsd", "schedule__warmup_steps": 50, "schedule__decay_steps": 50}),
        (
            1,
            {
                "extension__trains": ["lora"],
                "extension__lora_rank": 64,
                "extension__lora_targets": ["q", "o"],
                "model__num_query_groups": 2,
            },
        ),
        (
            1,
            {
                "extension__trains": ["norms"],
                "extension__lora_rank": 8,
                "extension__lora_alpha": 16.0,
            },
        ),
        (
            1,
            {
                "extension__trains": ["position"],
                "model__position_encoding": "repo",
                "model__position__repo_first_layer": 2,
            },
        ),
        (
            1,
            {
                "model__num_query_groups": 2,
                "model__position__gate_input": "attention",
                "model__tie_embeddings": True,
            },
        ),
        (1, {"model__hidden_size": 65, "model__kv_channels": 8}),
        (1, {"data__split": "1,0,0", "train__eval_interval": None}),
        (1, {"data__tokenizer": None, "logging__sample_tokens": 0}),
        (
            1,
            {
                "data__reset_attention_mask": True,
                "data__long_documents": {"minimum": 8192, "share": 1},
            },
        ),
        (
            1,
            {
                "optimizer__kind": "muon",
                "deepspeed__zero_stage": 2,
                "train__spikes": {"action": "skip", "window": 9},
                "train__average": {"kind": "last", "count": 3, "every": 49},
            },
        ),
        (
            1,
            {
                **GENERATED,
                "data__generator": {"task": "addition", "digits": 9},
                "data__split": "1,0,0",
                "logging__sample_tokens": 0,
            },
        ),
    ],
)
def test_compatible_settings_are_accepted(world_size, changes):
    validate(make(**changes), world_size)


@pytest.mark.parametrize(
    "key, changes",
    [
        # The number of processes, batch sizes and checkpoints.
        (PROCESSES, {"processes": 3, TENSOR: 2}),
        (PROCESSES, {"processes": 0}),
        (PROCESSES, {"processes": 6, TENSOR: 2, CONTEXT: 2}),
        ("model.num_attention_heads", {"processes": 3, TENSOR: 3}),
        ("model.num_attention_heads", {"processes": 16, CONTEXT: 16}),
        ("model.num_query_groups", {"processes": 4, TENSOR: 4, "model__num_query_groups": 2}),
        ("model.ffn_hidden_size", {"processes": 2, TENSOR: 2, "model__ffn_hidden_size": 97}),
        ("model.vocab_size", {"processes": 2, TENSOR: 2, "model__vocab_size": 129}),
        ("model.seq_length", {"processes": 2, TENSOR: 2, "model__seq_length": 31}),
        ("model.seq_length", {"processes": 4, CONTEXT: 4, "model__seq_length": 30}),
        ("parallel.sequence_parallel", {"parallel__sequence_parallel": True}),
        ("parallel.sequence_parallel", {"processes": 2, TENSOR: 2, **SEQUENCE}),
        (
            "parallel.sequence_parallel",
            {"processes": 2, TENSOR: 2, "model__qk_norm": True, **SEQUENCE, **ROPE},
        ),
        ("parallel.sequence_parallel", {"processes": 4, TENSOR: 2, CONTEXT: 2, **SEQUENCE, **ROPE}),
        ("train.global_batch_size", {"processes": 3}),
        ("train.batch_ramp.over_samples", {"train__batch_ramp": {"from": 2}}),
        ("train.batch_ramp.from", {"train__batch_ramp": {"from": 0, "over_samples": 10}}),
        (
            "train.batch_ramp.from",
            {"train__batch_ramp": {"from": 3, "over_samples": 10}, "train__global_batch_size": 8},
        ),
        (
            "train.batch_ramp.from",
            {
                "processes": 4,
                "train__batch_ramp": {"from": 2, "over_samples": 10},
                "train__global_batch_size": 8,
            },
        ),
        ("checkpoint.writers", {"processes": 2, "checkpoint__writers": 1, TENSOR: 2}),
        # Monitoring.
        ("train.profile.steps", {"train__profile": {"steps": [3]}}),
        ("train.profile.steps", {"train__profile": {"steps": [4, 3]}}),
        ("train.profile.steps[0]", {"train__profile": {"steps": [0, 3]}}),
        ("train.profile.steps", {"train__profile": {"steps": [11, 12]}, "train__steps": 10}),
        ("train.profile.ranks", {"train__profile": {"ranks": []}}),
        # Pipeline stages.
        (PROCESSES, {**STAGED, "processes": 6, TENSOR: 2}),
        ("parallel.pipeline_model_parallel_size", {**STAGED, "processes": 3, STAGES: 3}),
        ("parallel.pipeline_model_parallel_size", {**STAGED, VIRTUAL: 3}),
        ("parallel.virtual_pipeline_size", {VIRTUAL: 2}),
        ("parallel.pipeline_layers", {"parallel__pipeline_layers": [4]}),
        ("parallel.pipeline_layers", {**STAGED, "parallel__pipeline_layers": [1, 2]}),
        ("parallel.pipeline_layers", {**STAGED, "parallel__pipeline_layers": [4, 0]}),
        ("parallel.pipeline_layers", {**STAGED, VIRTUAL: 2, "parallel__pipeline_layers": [1, 3]}),
        ("deepspeed.zero_stage", {**STAGED, "deepspeed__zero_stage": 2}),
        ("train.global_batch_size", {**STAGED, "train__global_batch_size": 1}),
        ("train.global_batch_size", {**STAGED, VIRTUAL: 2, "train__global_batch_size": 3}),
        ("train.batch_ramp.from", {**STAGED, "train__batch_ramp": {"from": 1, "over_samples": 10}}),
        ("checkpoint.writers", {**STAGED, "checkpoint__writers": 1}),
        # The model.
        ("model.hidden_size", {"model__hidden_size": 60}),
        ("model.hidden_size", {"model__hidden_size": 72}),
        ("model.num_attention_heads", {"model__num_query_groups": 3}),
        ("model.kv_channels", {"model__kv_channels": 7}),
        ("model.unpadded_vocab_size", {"model__unpadded_vocab_size": 1000}),
        ("model.position_encoding", {"model__position_encoding": "sine"}),
        ("model.position.gate_input", {"model__position__gate_input": "both"}),
        (
            "model.position.token_mixing",
            {"model__position__token_mixing": "per_head", "model__num_query_groups": 2},
        ),
        ("model.position.mlp_size", {"model__position__mlp_size": 2**20 + 1}),
        ("model.position.rope_scaling_factor", {"model__position__rope_scaling_factor": 0.5}),
        ("model.position.rope_beta_fast", {**YARN, "model__position__rope_beta_fast": 1e308}),
        ("model.position.rope_share", {"model__position__rope_share": 1.01}),
        ("model.position.rope_share", {"model__position__rope_share": 0.01}),
        ("model.layers_without_positions", {"model__layers_without_positions": 100}),
        ("model.layers_without_positions", {"model__layers_without_positions": 1}),
        ("model.position.rope_low_freq_factor", {"model__position__rope_low_freq_factor": 4.0}),
        ("model.position.rope_beta_slow", {"model__position__rope_beta_slow": 32.0}),
        ("model.position.rope_theta", {**YARN, "model__position__rope_theta": 1.0}),
        (
            "model.attention_backend",
            {"model__attention_backend": "flash_attn", "train__precision": "fp32"},
        ),
        (
            "model.attention_backend",
            {"model__attention_backend": "torch_wide", "train__precision": "fp32"},
        ),
        (
            "model.attention_backend",
            {"model__attention_backend": "torch_wide", "model__kv_channels": 128},
        ),
        (
            "model.attention_backend",
            {"model__attention_backend": "triton", "model__kv_channels": 48},
        ),
        # Types and precision.
        ("deepspeed.zero_stage", {"deepspeed__zero_stage": True}),
        (
            "deepspeed.communication_precision",
            {"deepspeed__communication_precision": "bf16", "train__precision": "fp32"},
        ),
        ("train.steps", {"train__steps": 10**8, "train__global_batch_size": 10**6}),
        # The schedule and the optimizer.
        ("schedule.warmup_steps", {"schedule__warmup_steps": 101}),
        (
            "schedule.warmup_steps",
            {"schedule__kind": "wsd", "schedule__warmup_steps": 60, "schedule__decay_steps": 50},
        ),
        ("schedule.decay_steps", {"schedule__decay_steps": 50}),
        ("optimizer.min_lr", {"optimizer__min_lr": 0.1}),
        ("optimizer.lr", {"optimizer__lr": float("nan")}),
        ("optimizer.kind", {"optimizer__kind": "muon", "deepspeed__zero_stage": 3}),
        ("optimizer.kind", {"optimizer__kind": "muon", "extension__trains": ["position", "norms"]}),
        ("data.stages[0].share", {"data__stages": [{"prefix": "b", "share": 1.5}]}),
        ("data.stages[0].prefix", {"data__stages": [{"share": 0.5}]}),
        (
            "data.stages",
            {"data__stages": [{"prefix": "b", "share": 0.5}, {"prefix": "c", "share": 0.5}]},
        ),
        ("data.stages[0].prefix", {"data__stages": [{"prefix": [], "share": 0.5}]}),
        ("data.stages", {"data__stages": [{"prefix": "b", "share": 1e-9}]}),
        ("train.average.count", {"train__average": {"kind": "last", "count": 3, "every": 50}}),
        ("optimizer.weight_decay_of", {"optimizer__weight_decay_of": {"tape": 0.0}}),
        ("optimizer.weight_decay_of.position", {"optimizer__weight_decay_of": {"position": -0.1}}),
        ("optimizer.lr_scale_of", {"optimizer__lr_scale_of": {"position.increments": 0.1}}),
        ("optimizer.lr_scale_of.norms", {"optimizer__lr_scale_of": {"norms": float("nan")}}),
        # Evaluations, checkpoints, logging.
        ("train.evaluations", {"train__evaluations": ["sample", "perplexity"]}),
        ("train.eval_interval", {"data__split": "1,0,0"}),
        ("logging.sample_tokens", {"data__tokenizer": None}),
        ("checkpoint.resume", {"checkpoint__resume": ""}),
        ("checkpoint.keep_every", {"checkpoint__keep_every": 300, "checkpoint__interval": 200}),
        # Data.
        ("data.prefix", {"data__prefix": []}),
        ("data.prefix", {"data__generator": {"task": "addition"}}),
        (
            "data.reset_attention_mask",
            {
                "data__reset_attention_mask": True,
                "data__tokenizer": None,
                "train__eval_interval": None,
            },
        ),
        ("data.long_documents", {"data__long_documents": LONG}),
        ("data.generator.task", {**GENERATED, "data__generator": {"digits": 3}}),
        (
            "data.generator.digit",
            {**GENERATED, "data__generator": {"task": "addition", "digit": 3}},
        ),
        ("data.generator", {**GENERATED, "data__generator": {"task": "addition"}}),
        (
            "data.generator",
            {**GENERATED, "data__generator": {"task": "selective_copy", "symbols": 200}},
        ),
        (
            "data.generator.digits",
            {**GENERATED, "data__generator": {"task": "addition", "digits": "many"}},
        ),
        (
            "data.tokenizer",
            {"data__prefix": None, "data__generator": {"task": "addition", "digits": 4}},
        ),
        (
            "data.reset_attention_mask",
            {
                "data__prefix": None,
                "data__reset_attention_mask": True,
                "data__generator": {"task": "addition"},
            },
        ),
        ("data.examples.path", {"data__prefix": None, "data__examples": {}}),
        ("data.examples.file", examples(file="b.jsonl")),
        ("data.examples.bos", examples(bos="yes")),
        ("data.examples.template", examples(template="Q:")),
        ("data.examples.target_tokens", examples()),
        ("data.examples.target_tokens", examples(target_tokens=0)),
        ("data.tokenizer", examples() | {"data__tokenizer": None}),
        ("train.eval_interval", examples(target_tokens=8)),
        # The encoding.
        ("model.position.rope_theta", {"model__position__rope_theta": 0}),
        ("model.position.mlp_size", {"model__position__mlp_size": 0}),
        # Extensions.
        ("extension.trains", {"extension__trains": []}),
        ("extension.trains[0]", {"extension__trains": ["heads"]}),
        ("extension.trains", {"extension__trains": ["all", "norms"]}),
        ("extension.trains", {"extension__trains": ["output"], "model__tie_embeddings": True}),
        ("extension.trains", {"extension__trains": ["position"], **ROPE}),
        (
            "extension.trains",
            {"extension__trains": ["norms"], "optimizer__lr_scale_of": {"norms": 0.0}},
        ),
        (
            "extension.lora_rank",
            {
                "extension__trains": ["lora"],
                "extension__lora_rank": 17,
                "model__num_query_groups": 2,
            },
        ),
        ("extension.lora_rank", {"extension__trains": ["position"], "extension__lora_rank": 4}),
        ("extension.lora_alpha", {"extension__lora_alpha": 8.0}),
        ("extension.lora_targets", {"extension__lora_targets": ["q"]}),
        (
            "extension.lora_targets[0]",
            {"extension__trains": ["lora"], "extension__lora_targets": ["x"]},
        ),
    ],
)
def test_incompatible_settings_are_refused(key, changes):
    changes = dict(changes)
    processes = changes.pop("processes", 1)
    with pytest.raises(ConfigError) as refused:
        validate(make(**changes), processes)
    assert refused.value.key == key
    assert "\n" not in str(refused.value) and ". " not in str(refused.value)


def test_a_profiled_rank_must_be_below_the_number_of_processes():
    config = make(train__profile={"steps": [1, 2], "ranks": [0, 2]})
    check(config, Level.SETTINGS)
    check(config, Level.SETTINGS, processes=4)
    with pytest.raises(
        ConfigError, match="train.profile.ranks contains 2, but the ranks are 0 to 1"
    ):
        check(config, Level.SETTINGS, processes=2)


def test_incompatible_settings_of_shifted_sparse_attention_are_refused(monkeypatch):
    shifted = {"extension__attention": "shifted_sparse", "model__seq_length": 64}
    validate(make(**shifted), 1)
    validate(
        make(
            **shifted, model__num_attention_heads=9, model__kv_channels=8, model__num_query_groups=3
        ),
        1,
    )
    monkeypatch.setattr(ENCODINGS["nope"], "needs", frozenset({SCORES}))
    for cause, changes in (
        ("model.seq_length", {"model__seq_length": 60}),
        ("model.num_query_groups", {"model__num_query_groups": 1}),
        ("model.position_encoding", {"model__position_encoding": "nope"}),
    ):
        with pytest.raises(ConfigError) as refused:
            validate(make(**shifted | changes), 1)
        assert refused.value.subjects == ("extension.attention", cause)


@pytest.mark.parametrize(
    "changes, fix",
    [
        ({STAGES: 3, "processes": 3}, "set parallel.pipeline_model_parallel_size to 2"),
        ({"train__global_batch_size": 1}, "raise it to 2 or more"),
        ({VIRTUAL: 2, "train__global_batch_size": 7}, "make it a multiple of 2"),
    ],
)
def test_an_error_about_pipeline_stages_suggests_a_valid_value(changes, fix):
    settings = STAGED | changes
    with pytest.raises(ConfigError) as refused:
        validate(
            make(**{key: value for key, value in settings.items() if key != "processes"}),
            settings["processes"],
        )
    assert fix in refused.value.fix


def test_an_error_about_one_micro_batch_counts_it_in_the_singular():
    settings = {key: value for key, value in STAGED.items() if key != "processes"}
    with pytest.raises(ConfigError) as refused:
        validate(make(**settings | {"train__global_batch_size": 1}), 2)
    assert "gives each pipeline 1 micro-batch, fewer than its 2 stages" in str(refused.value)


def test_pipeline_stages_are_refused_if_only_some_receive_a_state(monkeypatch):
    settings = {key: value for key, value in STAGED.items() if key != "processes"}
    validate(make(**settings), 2)
    monkeypatch.setattr(ENCODINGS["tape"], "updates", lambda self, layer: layer > 0)
    with pytest.raises(ConfigError) as refused:
        validate(make(**settings), 2)
    assert refused.value.subjects == (
        "parallel.pipeline_model_parallel_size",
        "model.position_encoding",
    )


def test_logging_to_wandb_is_refused_without_the_package(monkeypatch):
    config = make(logging__wandb={"project": "tape"})
    monkeypatch.setattr(combinations, "installed", lambda: True)
    validate(config, 1)
    monkeypatch.setattr(combinations, "installed", lambda: False)
    with pytest.raises(ConfigError, match="run pip install wandb==") as refused:
        validate(config, 1)
    assert refused.value.key == "logging.wandb"
