import pytest
from configurations import MODEL, make

from megatron_tape.checks.settings import validate
from megatron_tape.config.schema import blend, split_shares
from megatron_tape.config.values import LARGEST
from megatron_tape.errors import ConfigError
from megatron_tape.model.settings import validate_model
from megatron_tape.ops.backends import SCORES
from megatron_tape.position import ENCODINGS, model_config


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
        (1, {"extension__trains": ["lora"], "extension__lora_rank": 64, "extension__lora_targets": ["q", "o"],
             "model__num_query_groups": 2}),
        (1, {"extension__trains": ["norms"], "extension__lora_rank": 8, "extension__lora_alpha": 16.0}),
        (1, {"extension__trains": ["tape"], "model__position_encoding": "repo", "model__repo_first_layer": 2}),
        (1, {"model__token_mixing": "per_head"}),
        (1, {"model__num_query_groups": 2, "model__gate_input": "attention", "model__tie_embeddings": True}),
        (1, {"data__split": "1,0,0", "train__eval_interval": None}),
        (1, {"data__tokenizer": None, "train__eval_interval": None}),
        (1, {"data__tokenizer": None, "logging__sample_tokens": 0}),
        (1, {"data__reset_attention_mask": True, "data__long_documents": {"minimum": 8192, "share": 1}}),
        (1, {"data__reset_attention_mask": True, "deepspeed__offload_optimizer": True}),
        (1, {"optimizer__clip_grad": 0.0, "optimizer__weight_decay": 0.0, "optimizer__min_lr": 1e-4}),
        (1, {"data__prefix": None, "data__tokenizer": None, "data__generator": {"task": "addition", "digits": 9},
             "data__split": "1,0,0", "logging__sample_tokens": 0}),
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
        ("model.position_encoding is 'YaRN'; YaRN is rope with model.rope_scaling_type yarn", 1,
         {"model__position_encoding": "YaRN"}),
        ("model.position_encoding is 'other'; choose one of tape, rope", 1, {"model__position_encoding": "other"}),
        ("model.position_encoding is 'sine'; did you mean sincos? There are tape", 1,
         {"model__position_encoding": "sine"}),
        ("model.gate_input is 'both'", 1, {"model__gate_input": "both"}),
        ("train.precision is 'fp16'", 1, {"train__precision": "fp16"}),
        ("deepspeed.zero_stage is 4", 1, {"deepspeed__zero_stage": 4}),
        ("deepspeed.communication_precision is bf16 and train.precision is fp32", 1,
         {"deepspeed__communication_precision": "bf16", "train__precision": "fp32"}),
        ("schedule.kind is 'step'", 1, {"schedule__kind": "step"}),
        ("number of processes, 3, is not divisible by parallel.tensor_model_parallel_size 2", 3,
         {"parallel__tensor_model_parallel_size": 2}),
        ("the number of processes is 0; start at least 1", 0, {}),
        ("model.num_attention_heads 8 is not divisible by parallel.tensor_model_parallel_size 3", 3,
         {"parallel__tensor_model_parallel_size": 3}),
        ("model.num_query_groups 2 is not divisible by parallel.tensor_model_parallel_size 4", 4,
         {"parallel__tensor_model_parallel_size": 4, "model__num_query_groups": 2}),
        ("number of processes, 6, is not divisible by parallel.tensor_model_parallel_size 2 times "
         "parallel.context_parallel_size 2", 6,
         {"parallel__tensor_model_parallel_size": 2, "parallel__context_parallel_size": 2}),
        ("model.num_attention_heads 8 is not divisible by parallel.tensor_model_parallel_size 1 times "
         "parallel.context_parallel_size 16", 16, {"parallel__context_parallel_size": 16}),
        ("model.seq_length 30 is not divisible by parallel.tensor_model_parallel_size 1 times "
         "parallel.context_parallel_size 4", 4, {"parallel__context_parallel_size": 4, "model__seq_length": 30}),
        ("parallel.context_parallel_size 2 with parallel.tensor_model_parallel_size 2 needs parallel.sequence_parallel",
         4, {"parallel__tensor_model_parallel_size": 2, "parallel__context_parallel_size": 2,
             "parallel__sequence_parallel": False, "model__position_encoding": "rope"}),
        ("parallel.context_parallel_size is 0", 1, {"parallel__context_parallel_size": 0}),
        ("extension.lora_rank is 17, but the projection k is only 16 wide", 1,
         {"extension__trains": ["lora"], "extension__lora_rank": 17, "model__num_query_groups": 2}),
        ("extension.lora_rank is 4, but extension.trains is ['tape'], so there are no LoRA layers; add lora", 1,
         {"extension__trains": ["tape"], "extension__lora_rank": 4}),
        ("extension.lora_alpha is 8.0, but extension.trains is ['all']", 1, {"extension__lora_alpha": 8.0}),
        ("extension.lora_targets is ['q'], but extension.trains is ['all']", 1, {"extension__lora_targets": ["q"]}),
        ("model.rope_scaling_factor is 0.5, which would shorten the context; set it to at least 1", 1,
         {"model__rope_scaling_factor": 0.5}),
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
        ("optimizer.weight_decay_of names the kind tape; choose from matrices, embeddings, norms, biases, position", 1,
         {"optimizer__weight_decay_of": {"tape": 0.0}}),
        ("optimizer.lr_scale_of names the kind position.increments; choose from matrices, embeddings",
         1, {"optimizer__lr_scale_of": {"position.increments": 0.1}}),
        ("optimizer.weight_decay_of.position is -0.1", 1, {"optimizer__weight_decay_of": {"position": -0.1}}),
        ("optimizer.lr_scale_of.norms is nan", 1, {"optimizer__lr_scale_of": {"norms": float("nan")}}),
        ("train.evaluations names perplexity, which is not an evaluation; choose from validation_loss, sample,", 1,
         {"train__evaluations": ["sample", "perplexity"]}),
        ("train.evaluations names sample twice", 1, {"train__evaluations": ["sample", "sample"]}),
        ("train.eval_interval is 50, but data.split 1,0,0", 1, {"data__split": "1,0,0"}),
        ("data.reset_attention_mask is true", 1,
         {"data__reset_attention_mask": True, "data__tokenizer": None, "train__eval_interval": None}),
        ("data.long_documents is {'minimum': 8192}; give it the keys minimum and share", 1,
         {"data__long_documents": {"minimum": 8192}}),
        ("'weight': 1}; give it the keys minimum and share", 1,
         {"data__long_documents": {"minimum": 8192, "share": 0.5, "weight": 1}}),
        ("data.long_documents is {}; give it the keys", 1, {"data__long_documents": {}}),
        ("data.long_documents.minimum is 0; set it to a whole number", 1,
         {"data__long_documents": {"minimum": 0, "share": 0.5}}),
        ("data.long_documents.minimum is 0.5; set it to a whole number", 1,
         {"data__long_documents": {"minimum": 0.5, "share": 0.5}}),
        ("data.long_documents.share is 0; set it above 0", 1, {"data__long_documents": {"minimum": 1, "share": 0}}),
        ("data.long_documents.share is 60; set it above 0", 1, {"data__long_documents": {"minimum": 1, "share": 60}}),
        ("data.long_documents.share is nan", 1, {"data__long_documents": {"minimum": 1, "share": float("nan")}}),
        ("data.long_documents is 8192; set it to a mapping of names to numbers or null", 1,
         {"data__long_documents": 8192}),
        ("data.long_documents is set, but data.reset_attention_mask is false", 1,
         {"data__long_documents": {"minimum": 8192, "share": 0.5}}),
        ("logging.sample_tokens is 64", 1, {"data__tokenizer": None}),
        ("checkpoint.keep is 0", 1, {"checkpoint__keep": 0}),
        ("checkpoint.resume is empty", 1, {"checkpoint__resume": ""}),
        ("checkpoint.keep_every 300 is not a multiple of checkpoint.interval 200", 1,
         {"checkpoint__keep_every": 300, "checkpoint__interval": 200}),
        ("checkpoint.writers 1 is less than parallel.tensor_model_parallel_size 2", 2,
         {"checkpoint__writers": 1, "parallel__tensor_model_parallel_size": 2}),
        ("data.prefix is []", 1, {"data__prefix": []}),
        ("data.prefix and data.generator are set together; keep one", 1, {"data__generator": {"task": "addition"}}),
        ("data.generator is {'digits': 3}; give it the key task, one of addition, selective_copy", 1,
         {"data__prefix": None, "data__generator": {"digits": 3}}),
        ("data.generator names digit, which is not a setting of addition; choose from digits", 1,
         {"data__prefix": None, "data__generator": {"task": "addition", "digit": 3}}),
        ("data.generator of addition: digits is 'many'; set it to a whole number", 1,
         {"data__prefix": None, "data__generator": {"task": "addition", "digits": "many"}}),
        ("data.generator of addition: digits is 0; set it to at least 1", 1,
         {"data__prefix": None, "data__generator": {"task": "addition", "digits": 0}}),
        ("data.generator makes sequences of up to 124 tokens, but model.seq_length is 32; raise it to at least 123", 1,
         {"data__prefix": None, "data__tokenizer": None, "data__generator": {"task": "addition"}}),
        ("data.generator makes 202 different tokens, but model.vocab_size is 128; raise it", 1,
         {"data__prefix": None, "data__tokenizer": None,
          "data__generator": {"task": "selective_copy", "symbols": 200}}),
        ("data.tokenizer is somewhere/tokenizer.model, but data.generator makes tokens that are no text", 1,
         {"data__prefix": None, "data__generator": {"task": "addition", "digits": 4}}),
        ("data.examples is {}; give it the key path, a file of JSON lines", 1,
         {"data__prefix": None, "data__examples": {}}),
        ("data.examples names 'file'; choose from path, validation, template, target_tokens, bos", 1,
         {"data__prefix": None, "data__examples": {"path": "a.jsonl", "file": "b.jsonl"}}),
        ("data.examples.bos is 'yes'; set it to true or false", 1,
         {"data__prefix": None, "data__examples": {"path": "a.jsonl", "bos": "yes"}}),
        ("data.examples.template is 'Q:'; write {input} in it exactly once", 1,
         {"data__prefix": None, "data__examples": {"path": "a.jsonl", "template": "Q:"}}),
        ("data.examples keeps target_tokens 200 of a target, but model.seq_length is 32; set target_tokens to less", 1,
         {"data__prefix": None, "data__examples": {"path": "a.jsonl"}}),
        ("data.examples are texts, but data.tokenizer is null; set it", 1,
         {"data__prefix": None, "data__tokenizer": None, "data__examples": {"path": "a.jsonl"}}),
        ("train.eval_interval is 5, but data.examples names no validation file; add the key validation", 1,
         {"data__prefix": None, "data__examples": {"path": "a.jsonl", "target_tokens": 8}, "train__eval_interval": 5}),
        ("data.reset_attention_mask is true, but data.generator makes samples that are not cut from documents", 1,
         {"data__prefix": None, "data__reset_attention_mask": True, "data__generator": {"task": "addition"}}),
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
    "model rope_low_freq_factor rope_high_freq_factor rope_original_seq_length rope_beta_slow rope_beta_fast",
    "model rope_attention_factor",
    "optimizer lr eps",
    "schedule power",
    "parallel tensor_model_parallel_size",
    "deepspeed reduce_bucket_size",
    "train steps micro_batch_size global_batch_size eval_interval eval_steps max_bad_steps",
    "checkpoint interval keep keep_every writers",
    "logging interval",
]


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize("key", [f"{line.split()[0]}__{key}" for line in POSITIVE for key in line.split()[1:]])
def test_a_size_that_is_not_positive_is_refused_by_name(key, value):
    with pytest.raises(ConfigError, match=f"^{key.replace('__', '.')} is {value}; "):
        validate(make(**{key: value}), 1)


@pytest.mark.parametrize("name, largest", LARGEST.items())
def test_an_absurd_size_is_refused_by_name(name, largest):
    key = name.replace(".", "__")
    for value in (largest + 1, 10**30):
        with pytest.raises(ConfigError, match=f"^{name} is {value}; set it to at most {largest}$"):
            validate(make(**{key: value}), 1)
    try:
        validate(make(**{key: largest}), 1)
    except ConfigError as error:
        assert "at most" not in str(error)


@pytest.mark.parametrize(
    "key",
    ["optimizer__min_lr", "optimizer__weight_decay", "optimizer__clip_grad", "schedule__warmup_steps", "train__seed",
     "data__num_workers", "logging__sample_tokens"],
)  # fmt: skip
def test_a_negative_number_is_refused_by_name(key):
    with pytest.raises(ConfigError, match=f"^{key.replace('__', '.')} is -1; "):
        validate(make(**{key: -1}), 1)


def test_sizes_that_do_not_fit_are_refused_for_a_model_alone():
    validate_model(model_config(**MODEL))
    with pytest.raises(ConfigError, match="model.hidden_size 65"):
        validate_model(model_config(**MODEL | {"hidden_size": 65}))
    validate_model(model_config(**MODEL | {"hidden_size": 65, "kv_channels": 8}))
    for changes, message in (
        ({"kv_channels": 7}, "model.kv_channels 7 is odd"),
        ({"unpadded_vocab_size": 1000}, "model.unpadded_vocab_size 1000 exceeds model.vocab_size"),
        ({"rope_low_freq_factor": 4.0}, "model.rope_low_freq_factor 4.0 is not below"),
        ({"rope_beta_slow": 32.0}, "model.rope_beta_slow 32.0 is not below model.rope_beta_fast 32.0"),
        ({"rope_scaling_type": "yarn", "rope_theta": 1.0}, "model.rope_theta 1.0 is not above 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            validate_model(model_config(**MODEL | changes))


def test_numbers_that_no_run_can_have_are_refused_at_once():
    for changes, message in (
        ({"train__steps": 10**400}, "train.steps is 1000.*; set it to at most 100000000"),
        ({"train__steps": 10**8, "train__global_batch_size": 10**6}, "100,000,000,000,000 sequences, and at most"),
    ):
        with pytest.raises(ConfigError, match=message):
            validate(make(**changes), world_size=1)


def test_shifted_sparse_attention_needs_half_segments_groups_and_no_rows_of_scores(monkeypatch):
    shifted = {"extension__attention": "shifted_sparse", "model__seq_length": 64}
    validate(make(**shifted), 1)
    validate(make(**shifted, model__num_attention_heads=9, model__kv_channels=8, model__num_query_groups=3), 1)
    for changes, message in (
        ({"model__seq_length": 60}, "model.seq_length 60 is not divisible by 8"),
        ({"model__num_query_groups": 1}, "all heads of this model share one group of keys; set it to full"),
    ):
        with pytest.raises(ConfigError, match=message):
            validate(make(**shifted | changes), 1)
    monkeypatch.setattr(ENCODINGS["nope"], "needs", frozenset({SCORES}))
    with pytest.raises(ConfigError, match="cannot be combined with model.position_encoding nope"):
        validate(make(**shifted, model__position_encoding="nope"), 1)
