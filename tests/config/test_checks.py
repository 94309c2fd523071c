"""Incompatible settings are refused with an error about one of their keys, and compatible ones are
accepted.
"""

import pytest
import yaml
from configurations import make

from megatron_tape.checks import Level, check, combinations
from megatron_tape.checks.combinations import validate
from megatron_tape.checks.layout import PROCESSES
from megatron_tape.config.data import split_shares
from megatron_tape.config.schema import ATTENTION_BACKENDS
from megatron_tape.errors import ConfigError
from megatron_tape.ops.backends import BACKENDS, SCORES
from megatron_tape.position import ENCODINGS

TENSOR = "parallel.tensor_model_parallel_size"
CONTEXT = "parallel.context_parallel_size"
PIPELINE = "parallel.pipeline_model_parallel_size"
VIRTUAL = "parallel.virtual_pipeline_size"
NO_SEQUENCE = "parallel.sequence_parallel=false"
WINDOW = "model.sliding_window=8 model.full_attention_every=2"
ROPE = "model.position_encoding=rope"
TWO_STAGES = f"{PIPELINE}=2 model.num_layers=4 train.micro_batch_size=1"
YARN = "model.position.rope_scaling_type=yarn"
GENERATOR = "data.prefix=null data.tokenizer=null data.generator.task=selective_copy"
EXAMPLES = "data.prefix=null data.examples.path=a.jsonl"


def of(options):
    """Return a valid configuration, changed by options such as `train.steps=3 train.seed=1`."""
    changes = {}
    for option in options.split():
        key, value = option.split("=", 1)
        changes[key.replace(".", "__")] = yaml.safe_load(value)
    return make(**changes)


def refusal(options, processes=1):
    with pytest.raises(ConfigError) as refused:
        validate(of(options), processes)
    return refused.value


def test_every_backend_can_be_chosen():
    assert ATTENTION_BACKENDS == ("auto", *BACKENDS)


@pytest.mark.parametrize("split", ["969,30", "a,b,c", "1,-1,0", "0,1,1"])
def test_a_malformed_split_is_refused(split):
    with pytest.raises(ConfigError) as refused:
        split_shares(split)
    assert refused.value.key == "data.split"


@pytest.mark.parametrize(
    "processes, options",
    [
        (8, ""),
        (4, f"{TENSOR}=2 {PIPELINE}=2 model.num_layers=4"),
        (2, f"{PIPELINE}=2 {VIRTUAL}=2 model.num_layers=4"),
        (2, f"{PIPELINE}=2 model.num_layers=5 parallel.pipeline_layers=[2,3]"),
        (8, f"{TENSOR}=2 parallel.sequence_parallel=true"),
        (2, f"{TENSOR}=2 model.seq_length=31 {NO_SEQUENCE} {ROPE}"),
        (1, "schedule.kind=wsd schedule.warmup_steps=50 schedule.decay_steps=50"),
        (1, "extension.trains=[lora] extension.lora_rank=64 extension.lora_targets=[q,o]"),
        (1, "model.hidden_size=65 model.kv_channels=8"),
        (1, "data.split=1,0,0 train.eval_interval=null"),
        (1, "train.average.kind=last train.average.count=3 train.average.every=49"),
        (1, f"{GENERATOR} model.seq_length=512 logging.sample_tokens=0"),
    ],
)
def test_compatible_settings_are_accepted(processes, options):
    validate(of(options), processes)


@pytest.mark.parametrize(
    "processes, key, options",
    [
        (3, PROCESSES, f"{TENSOR}=2"),
        (6, PROCESSES, f"{TENSOR}=2 {CONTEXT}=2"),
        (6, PROCESSES, f"{TENSOR}=2 {TWO_STAGES}"),
        (3, "model.num_attention_heads", f"{TENSOR}=3"),
        (16, "model.num_attention_heads", f"{CONTEXT}=16"),
        (4, "model.num_query_groups", f"{TENSOR}=4 model.num_query_groups=2"),
        (2, "model.ffn_hidden_size", f"{TENSOR}=2 model.ffn_hidden_size=97"),
        (2, "model.vocab_size", f"{TENSOR}=2 model.vocab_size=129"),
        (2, "model.seq_length", f"{TENSOR}=2 model.seq_length=31"),
        (4, "model.seq_length", f"{CONTEXT}=4 model.seq_length=30"),
        (1, "parallel.sequence_parallel", "parallel.sequence_parallel=true"),
        (2, "parallel.sequence_parallel", f"{TENSOR}=2 {NO_SEQUENCE}"),
        (2, "parallel.sequence_parallel", f"{TENSOR}=2 {NO_SEQUENCE} {ROPE} model.qk_norm=true"),
        (4, "parallel.sequence_parallel", f"{TENSOR}=2 {NO_SEQUENCE} {ROPE} {CONTEXT}=2"),
        (3, "train.global_batch_size", ""),
        (
            1,
            "train.batch_ramp.from",
            "train.batch_ramp.from=3 train.batch_ramp.over_samples=10 train.global_batch_size=8",
        ),
        (4, "train.batch_ramp.from", "train.batch_ramp.from=2 train.batch_ramp.over_samples=10"),
        (2, "checkpoint.writers", f"checkpoint.writers=1 {TENSOR}=2"),
        (3, PIPELINE, f"{TWO_STAGES} {PIPELINE}=3"),
        (2, PIPELINE, f"{TWO_STAGES} {VIRTUAL}=3"),
        (1, VIRTUAL, f"{VIRTUAL}=2"),
        (1, "parallel.pipeline_layers", "parallel.pipeline_layers=[4]"),
        (2, "parallel.pipeline_layers", f"{TWO_STAGES} parallel.pipeline_layers=[1,2]"),
        (2, "parallel.pipeline_layers", f"{TWO_STAGES} parallel.pipeline_layers=[4,0]"),
        (2, "parallel.pipeline_layers", f"{TWO_STAGES} {VIRTUAL}=2 parallel.pipeline_layers=[1,3]"),
        (2, "deepspeed.zero_stage", f"{TWO_STAGES} deepspeed.zero_stage=2"),
        (
            2,
            "train.batch_ramp.from",
            f"{TWO_STAGES} train.batch_ramp.from=1 train.batch_ramp.over_samples=9",
        ),
    ],
)
def test_incompatible_layouts_are_refused(processes, key, options):
    assert refusal(options, processes).key == key


@pytest.mark.parametrize(
    "key, options",
    [
        ("train.profile.steps", "train.profile.steps=[4,3]"),
        ("train.profile.steps", "train.profile.steps=[11,12] train.steps=10"),
        ("model.hidden_size", "model.hidden_size=60"),
        ("model.num_attention_heads", "model.num_query_groups=3"),
        ("model.kv_channels", "model.kv_channels=7"),
        ("model.unpadded_vocab_size", "model.unpadded_vocab_size=1000"),
        (
            "model.position.token_mixing",
            "model.position.token_mixing=per_head model.num_query_groups=2",
        ),
        ("model.position.mlp_size", "model.position.mlp_size=0"),
        ("model.position.rope_scaling_factor", "model.position.rope_scaling_factor=0.5"),
        ("model.position.rope_theta", "model.position.rope_theta=0.0"),
        ("model.position.rope_beta_fast", f"{YARN} model.position.rope_beta_fast=1.0e+308"),
        ("model.position.rope_beta_slow", f"{YARN} model.position.rope_beta_slow=32.0"),
        ("model.position.rope_theta", f"{YARN} model.position.rope_theta=1.0"),
        (
            "model.position.rope_local_theta",
            f"{YARN} {WINDOW} model.position.rope_local_theta=1.0",
        ),
        ("model.position.rope_share", "model.position.rope_share=0.01"),
        ("model.layers_without_positions", "model.layers_without_positions=100"),
        ("model.temperature_scale", "model.temperature_scale=0.1"),
        (
            "model.temperature_floor_scale",
            "model.temperature_floor_scale=4096 model.layers_without_positions=2",
        ),
        ("model.full_attention_every", "model.full_attention_every=2"),
        ("model.full_attention_every", "model.full_attention_every=5 model.sliding_window=8"),
        ("model.position.rope_local_theta", "model.position.rope_local_theta=100.0"),
        (
            "model.position.rope_scaling_layers",
            "model.position.rope_scaling_layers=full model.sliding_window=8",
        ),
        (
            "model.position.rope_local_theta",
            f"model.position.rope_local_theta=100.0 {WINDOW} model.position.increments=learned",
        ),
        (
            "model.attention_backend",
            f"model.position_encoding=path model.attention_backend=fla {WINDOW}",
        ),
        ("model.attention_backend", "model.attention_backend=flash_attn train.precision=fp32"),
        ("model.attention_backend", "model.attention_backend=torch_wide model.kv_channels=128"),
        (
            "deepspeed.communication_precision",
            "deepspeed.communication_precision=bf16 train.precision=fp32",
        ),
        ("schedule.warmup_steps", "schedule.warmup_steps=101"),
        (
            "schedule.warmup_steps",
            "schedule.kind=wsd schedule.warmup_steps=60 schedule.decay_steps=50",
        ),
        ("schedule.decay_steps", "schedule.decay_steps=50"),
        ("schedule.power", "schedule.power=2.0"),
        ("optimizer.min_lr", "optimizer.min_lr=0.1"),
        ("optimizer.kind", "optimizer.kind=muon deepspeed.zero_stage=3"),
        ("optimizer.kind", "optimizer.kind=muon extension.trains=[position,norms]"),
        ("optimizer.weight_decay_of", "optimizer.weight_decay_of.tape=0.0"),
        ("optimizer.lr_scale_of", 'optimizer.lr_scale_of={"position.increments":0.1}'),
        (
            "train.average.count",
            "train.average.kind=last train.average.count=3 train.average.every=50",
        ),
        ("train.average.decay", "train.average.kind=last train.average.decay=0.5"),
        ("train.evaluations", "train.evaluations=[sample,perplexity]"),
        ("train.eval_interval", "data.split=1,0,0"),
        ("train.eval_interval", f"{EXAMPLES} data.examples.target_tokens=8"),
        ("logging.sample_tokens", "data.tokenizer=null"),
        ("checkpoint.keep_every", "checkpoint.keep_every=300 checkpoint.interval=200"),
        ("data.stages", 'data.stages=[{"prefix":"b","share":0.5},{"prefix":"c","share":0.5}]'),
        ("data.stages", 'data.stages=[{"prefix":"b","share":1.0e-9}]'),
        ("data.prefix", "data.generator.task=addition"),
        (
            "data.reset_attention_mask",
            "data.reset_attention_mask=true data.tokenizer=null train.eval_interval=null",
        ),
        ("data.long_documents", "data.long_documents.minimum=8192 data.long_documents.share=0.5"),
        ("data.generator", GENERATOR),
        ("data.generator", f"{GENERATOR} model.vocab_size=8"),
        ("data.generator.symbols", f"{GENERATOR} data.generator.symbols=0"),
        ("data.tokenizer", f"{GENERATOR} data.tokenizer=x"),
        ("data.reset_attention_mask", f"{GENERATOR} data.reset_attention_mask=true"),
        ("data.examples.template", f"{EXAMPLES} data.examples.template=Q"),
        ("data.examples.target_tokens", EXAMPLES),
        ("data.tokenizer", f"{EXAMPLES} data.tokenizer=null"),
        ("extension.trains", "extension.trains=[all,norms]"),
        ("extension.trains", "extension.trains=[output] model.tie_embeddings=true"),
        ("extension.trains", f"extension.trains=[position] {ROPE}"),
        ("extension.trains", "extension.trains=[norms] optimizer.lr_scale_of.norms=0.0"),
        (
            "extension.trains",
            "model.position_encoding=cope extension.trains=[position]"
            ' optimizer.lr_scale_of={"position":1.0,"position.table":0.0}',
        ),
        (
            "extension.lora_rank",
            "extension.trains=[lora] extension.lora_rank=17 model.num_query_groups=2",
        ),
        ("extension.lora_rank", "extension.trains=[position] extension.lora_rank=4"),
    ],
)
def test_incompatible_settings_are_refused(key, options):
    error = refusal(options)
    assert error.key == key
    assert error.fix
    assert "\n" not in str(error)
    assert ". " not in str(error)


def test_a_profiled_rank_must_be_below_the_number_of_processes():
    config = of("train.profile.steps=[1,2] train.profile.ranks=[0,2]")
    check(config, Level.SETTINGS)
    check(config, Level.SETTINGS, processes=4)
    with pytest.raises(ConfigError) as refused:
        check(config, Level.SETTINGS, processes=2)
    assert refused.value.key == "train.profile.ranks"


def test_incompatible_settings_of_shifted_sparse_attention_are_refused(monkeypatch):
    shifted = "extension.attention=shifted_sparse"
    validate(of(shifted), 1)
    monkeypatch.setattr(ENCODINGS["nope"], "needs", frozenset({SCORES}))
    for cause, change in (
        ("model.seq_length", "model.seq_length=60"),
        ("model.num_query_groups", "model.num_query_groups=1"),
        ("model.position_encoding", "model.position_encoding=nope"),
    ):
        assert refusal(f"{shifted} {change}").subjects == ("extension.attention", cause)


@pytest.mark.parametrize(
    "options, processes, fix",
    [
        (f"{PIPELINE}=3", 3, f"set {PIPELINE} to 2"),
        ("train.global_batch_size=1", 2, "raise it to 2 or more"),
        (f"{VIRTUAL}=2 train.global_batch_size=7", 2, "make it a multiple of 2"),
    ],
)
def test_an_error_about_pipeline_stages_suggests_a_valid_value(options, processes, fix):
    assert fix in refusal(f"{TWO_STAGES} {options}", processes).fix


def test_pipeline_stages_are_refused_if_only_some_receive_a_state(monkeypatch):
    validate(of(TWO_STAGES), 2)
    monkeypatch.setattr(ENCODINGS["tape"], "updates", lambda self, layer: layer > 0)
    error = refusal(TWO_STAGES, 2)
    assert error.subjects == (PIPELINE, "model.position_encoding")


def test_logging_to_wandb_is_refused_without_the_package(monkeypatch):
    config = make(logging__wandb={"project": "tape"})
    monkeypatch.setattr(combinations, "is_wandb_installed", lambda: True)
    validate(config, 1)
    monkeypatch.setattr(combinations, "is_wandb_installed", lambda: False)
    with pytest.raises(ConfigError, match="run pip install wandb==") as refused:
        validate(config, 1)
    assert refused.value.key == "logging.wandb"
