"""Reject settings that cannot work, alone or together, before a process group or a parameter exists.

Each error is one sentence that names the key, its value and the fix. No file is read, and torch is not imported.
"""

from megatron_tape.config.examples import examples_of
from megatron_tape.config.schema import (
    LORA_TARGETS,
    OF_ENCODING,
    ON_VALIDATION_DATA,
    PARAMETER_KINDS,
    SAMPLE_SOURCES,
    TRAINABLE,
    ExtensionConfig,
    ModelConfig,
    RunConfig,
    blend,
    is_positive,
    split_shares,
)
from megatron_tape.config.values import check_section, shown
from megatron_tape.errors import refuse
from megatron_tape.evaluation.during_training import build_tasks
from megatron_tape.model.lora_shapes import lora_widths
from megatron_tape.model.settings import validate_model
from megatron_tape.ops.backends import REFLECTIONS, SCORES
from megatron_tape.position import encoding_of
from megatron_tape.synthetic.settings import generator_of
from megatron_tape.training.evaluations import EVALUATIONS

LARGEST_RUN = 10**11
"""Sequences of a run; an index of more takes longer to build than any run."""


def validate(config: RunConfig, world_size: int) -> None:
    """Raise `ConfigError` with one sentence if `config` cannot run on `world_size` processes.

    Needs no process group and reads no file; `check_data_files` looks at files.
    """
    validate_model(config.model)
    check_section("optimizer", config.optimizer, ("lr", "eps"), ("min_lr", "weight_decay", "clip_grad"))
    check_section("schedule", config.schedule, ("decay_steps", "power"), ("warmup_steps",))
    check_section("parallel", config.parallel, ("tensor_model_parallel_size", "context_parallel_size"))
    check_section("deepspeed", config.deepspeed, ("reduce_bucket_size",))
    numbers = "steps micro_batch_size global_batch_size eval_interval eval_steps max_bad_steps hang_timeout"
    check_section("train", config.train, numbers.split(), ("seed",))
    check_section("checkpoint", config.checkpoint, ("interval", "keep", "keep_every", "writers"))
    check_section("extension", config.extension, ("lora_rank", "lora_alpha"))
    check_section("logging", config.logging, ("interval",), ("sample_tokens",))
    check_section("data", config.data, (), ("num_workers",))
    _validate_parallel(config, world_size)
    _validate_checkpoint(config)
    _validate_optimizer(config)
    _validate_data(config)
    _validate_evaluations(config)
    _validate_extension(config)


def _validate_parallel(config: RunConfig, world_size: int) -> None:
    model, tensor_size = config.model, config.parallel.tensor_model_parallel_size
    tensor_key = f"parallel.tensor_model_parallel_size {tensor_size}"
    context_size, together = config.parallel.context_parallel_size, config.parallel.ranks_per_sequence
    joint_key = tensor_key if context_size == 1 else f"{tensor_key} times parallel.context_parallel_size {context_size}"
    refuse(world_size < 1, f"the number of processes is {world_size}; start at least 1")
    refuse(
        world_size % together != 0,
        f"the number of processes, {world_size}, is not divisible by {joint_key}; start another number of processes, "
        "as torchrun --nproc-per-node does, or change it",
    )
    heads, length = model.num_attention_heads, model.seq_length
    refuse(heads % together != 0, f"model.num_attention_heads {heads} is not divisible by {joint_key}; change either")
    for key, size in (
        ("model.num_query_groups", model.query_groups),
        ("model.ffn_hidden_size", model.ffn_hidden_size),
        ("model.vocab_size", model.vocab_size),
    ):
        refuse(size % tensor_size != 0, f"{key} {size} is not divisible by {tensor_key}; change either")
    refuse(
        (context_size > 1 or config.parallel.uses_sequence_parallel) and length % together != 0,
        f"model.seq_length {length} is not divisible by {joint_key}; change either",
    )
    refuse(
        context_size > 1 and tensor_size > 1 and not config.parallel.uses_sequence_parallel,
        f"parallel.context_parallel_size {context_size} with {tensor_key} needs parallel.sequence_parallel; set that "
        "to true or null",
    )
    refuse(
        tensor_size == 1 and config.parallel.uses_sequence_parallel,
        f"parallel.sequence_parallel is true with {tensor_key}, so there is nothing to shard; set it to null",
    )
    refuse(
        tensor_size > 1 and not config.parallel.uses_sequence_parallel and encoding_of(model).needs_sharded_tokens,
        f"model.position_encoding {model.position_encoding} with {tensor_key} needs parallel.sequence_parallel, since "
        "its parameters work where tokens are sharded; set that to true or null",
    )
    refuse(
        tensor_size > 1 and model.qk_norm and not config.parallel.uses_sequence_parallel,
        f"model.qk_norm with {tensor_key} needs parallel.sequence_parallel, which adds up the norms' gradients; set "
        "that to true or null",
    )
    data_size, train = world_size // together, config.train
    sequences = train.steps * train.global_batch_size
    refuse(
        sequences > LARGEST_RUN,
        f"train.steps {train.steps} times train.global_batch_size {train.global_batch_size} is {sequences:,} "
        f"sequences, and at most {LARGEST_RUN:,} can be indexed; lower either",
    )
    refuse(
        train.global_batch_size % (train.micro_batch_size * data_size) != 0,
        f"train.global_batch_size {train.global_batch_size} is not divisible by train.micro_batch_size "
        f"{train.micro_batch_size} times {data_size} data-parallel processes; change either",
    )


def _validate_checkpoint(config: RunConfig) -> None:
    checkpoint, tensor_size = config.checkpoint, config.parallel.tensor_model_parallel_size
    refuse(not checkpoint.resume, "checkpoint.resume is empty; set it to auto, none or a checkpoint's path")
    refuse(
        checkpoint.keep_every is not None and checkpoint.keep_every % checkpoint.interval != 0,
        f"checkpoint.keep_every {checkpoint.keep_every} is not a multiple of checkpoint.interval "
        f"{checkpoint.interval}, so there would be no checkpoint to keep at most of those steps; change either",
    )
    refuse(
        checkpoint.writers is not None and checkpoint.writers < tensor_size,
        f"checkpoint.writers {checkpoint.writers} is less than parallel.tensor_model_parallel_size {tensor_size}, and "
        "every tensor-parallel rank writes its own shares; set it to at least that, or to null",
    )


def _own_kinds(model: ModelConfig) -> list[str]:
    """Return the names by which `optimizer` may give the parameters of the model's encoding their own values."""
    encoding = encoding_of(model)
    names = [f"position.{name}" for layer in range(model.num_layers) for name in encoding.parameters(layer)]
    return list(dict.fromkeys(names))


def _validate_optimizer(config: RunConfig) -> None:
    optimizer, schedule, steps = config.optimizer, config.schedule, config.train.steps
    stage = config.deepspeed.zero_stage
    kinds = (*PARAMETER_KINDS, *_own_kinds(config.model))
    for key in ("weight_decay_of", "lr_scale_of"):
        for kind, value in getattr(optimizer, key).items():
            refuse(kind not in kinds, f"optimizer.{key} names the kind {kind}; choose from {', '.join(kinds)}")
            in_range = value == 0 or is_positive(value)
            refuse(not in_range, f"optimizer.{key}.{kind} is {value!r}; set it to 0 or a positive number")
    for key in ("beta1", "beta2"):
        value = getattr(optimizer, key)
        refuse(not 0 <= value < 1, f"optimizer.{key} is {value}; set it to at least 0 and below 1")
    refuse(
        optimizer.min_lr > optimizer.lr,
        f"optimizer.min_lr {optimizer.min_lr} exceeds optimizer.lr {optimizer.lr}; lower it",
    )
    refuse(
        schedule.warmup_steps > steps,
        f"schedule.warmup_steps {schedule.warmup_steps} exceeds train.steps {steps}; lower "
        "schedule.warmup_steps or raise train.steps",
    )
    refuse(
        schedule.decay_steps is not None and schedule.kind != "wsd",
        f"schedule.decay_steps {schedule.decay_steps} has no meaning for schedule.kind {schedule.kind}, which decays "
        "until the last step; remove it or use kind wsd",
    )
    refuse(
        schedule.warmup_steps + (schedule.decay_steps or 0) > steps,
        f"schedule.warmup_steps {schedule.warmup_steps} and schedule.decay_steps {schedule.decay_steps} together "
        f"exceed train.steps {steps}; lower either",
    )
    refuse(
        config.train.precision == "bf16" and stage == 0,
        "train.precision bf16 with deepspeed.zero_stage 0 keeps no fp32 copy of the weights; set zero_stage to 1, 2 "
        "or 3, or precision to fp32",
    )
    refuse(
        config.train.precision == "fp32" and config.deepspeed.communication_precision == "bf16",
        "deepspeed.communication_precision is bf16 and train.precision is fp32; change either",
    )
    refuse(
        config.model.attention_backend == "flash_attn" and config.train.precision == "fp32",
        "model.attention_backend is flash_attn, which computes in bf16, and train.precision is fp32; change either",
    )
    refuse(
        config.deepspeed.offload_optimizer and stage == 0,
        "deepspeed.offload_optimizer is true with deepspeed.zero_stage 0; set zero_stage to 1, 2 or 3",
    )


def _validate_data(config: RunConfig) -> None:
    data, interval = config.data, config.train.eval_interval
    if data.source in SAMPLE_SOURCES:
        _validate_samples(config)
    blend(data.prefix)
    validation_share = split_shares(data.split)[1]
    validates = interval is not None and bool(ON_VALIDATION_DATA & set(config.train.evaluations))
    refuse(
        data.source == "prefix" and validates and validation_share == 0,
        f"train.eval_interval is {interval}, but data.split {data.split} leaves nothing for validation; raise its "
        "second share, or set eval_interval to null",
    )
    refuse(
        data.reset_attention_mask and data.tokenizer is None,
        "data.reset_attention_mask is true, but data.tokenizer, which knows the end-of-document id, is null; set it",
    )
    if data.long_documents is not None:
        _validate_long_documents(config)
    samples = "sample" in config.train.evaluations and config.logging.sample_tokens > 0
    refuse(
        interval is not None and samples and data.tokenizer is None,
        f"logging.sample_tokens is {config.logging.sample_tokens}, but data.tokenizer, which turns samples into text, "
        "is null; set it or set sample_tokens to 0",
    )


def _validate_samples(config: RunConfig) -> None:
    """Check a source of samples that stands in place of indexed datasets."""
    data, model = config.data, config.model
    for key, unset in (("long_documents", None), ("reset_attention_mask", False)):
        value = getattr(data, key)
        refuse(
            value != unset,
            f"data.{key} is {shown(value)}, but data.{data.source} makes samples that are not cut from documents; "
            f"set it to {shown(unset)}",
        )
    if data.source == "generator":
        generator = generator_of(data.generator)
        refuse(
            data.tokenizer is not None,
            f"data.tokenizer is {data.tokenizer}, but data.generator makes tokens that are no text; set it to null",
        )
        refuse(
            generator.vocab_size > model.vocab_size,
            f"data.generator makes {generator.vocab_size} different tokens, but model.vocab_size is "
            f"{model.vocab_size}; raise it",
        )
        refuse(
            generator.length > model.seq_length + 1,
            f"data.generator makes sequences of up to {generator.length} tokens, but model.seq_length is "
            f"{model.seq_length}; raise it to at least {generator.length - 1}",
        )
    if data.source == "examples":
        examples = examples_of(data.examples)
        refuse(data.tokenizer is None, "data.examples are texts, but data.tokenizer is null; set it")
        refuse(
            examples.target_tokens >= model.seq_length,
            f"data.examples keeps target_tokens {examples.target_tokens} of a target, but model.seq_length is "
            f"{model.seq_length}; set target_tokens to less",
        )
        interval, validates = config.train.eval_interval, bool(ON_VALIDATION_DATA & set(config.train.evaluations))
        refuse(
            interval is not None and validates and examples.validation is None,
            f"train.eval_interval is {interval}, but data.examples names no validation file; add the key validation, "
            "or set eval_interval to null",
        )


def _validate_long_documents(config: RunConfig) -> None:
    setting = config.data.long_documents
    refuse(
        set(setting) != {"minimum", "share"},
        f"data.long_documents is {shown(setting)}; give it the keys minimum and share, such as "
        "{minimum: 8192, share: 0.6}",
    )
    minimum, share = setting["minimum"], setting["share"]
    refuse(
        not isinstance(minimum, int) or minimum < 1,
        f"data.long_documents.minimum is {minimum}; set it to a whole number of tokens, at least 1",
    )
    refuse(
        not 0 < share <= 1,
        f"data.long_documents.share is {share}; set it above 0 and at most to 1, or remove long_documents",
    )
    refuse(
        not config.data.reset_attention_mask,
        "data.long_documents is set, but data.reset_attention_mask is false, so that tokens would attend to the "
        "documents before their own; set it to true",
    )


def _validate_evaluations(config: RunConfig) -> None:
    names = config.train.evaluations
    for name in names:
        refuse(
            name not in EVALUATIONS,
            f"train.evaluations names {name}, which is not an evaluation; choose from {', '.join(EVALUATIONS)}",
        )
        refuse(names.count(name) > 1, f"train.evaluations names {name} twice; remove one")
    check_section("evaluation", config.evaluation)
    build_tasks(config)


def _validate_extension(config: RunConfig) -> None:
    extension, model = config.extension, config.model
    known = {"extension.trains": (*TRAINABLE, "all"), "extension.lora_targets": LORA_TARGETS}
    for key, choices in known.items():
        names = getattr(extension, key.partition(".")[2])
        refuse(not names, f"{key} is empty; choose from {', '.join(choices)}")
        for name in names:
            refuse(name not in choices, f"{key} names {name}; choose from {', '.join(choices)}")
            refuse(names.count(name) > 1, f"{key} names {name} twice; remove one")
    refuse(
        "all" in extension.trains and len(extension.trains) > 1,
        f"extension.trains is {shown(extension.trains)}; all stands alone, as it includes the others but lora",
    )
    refuse(
        extension.trains == ["output"] and model.tie_embeddings,
        "extension.trains names output alone, but model.tie_embeddings is true, so there is no output layer to train; "
        "name embeddings",
    )
    kinds = {OF_ENCODING: "position", "output": "embeddings"}
    scales = config.optimizer.lr_scale_of
    rates = [scales.get(kinds.get(name, name), 1) for name in extension.trains]
    rates += [scales.get(name, 0) for name in _own_kinds(model) if OF_ENCODING in extension.trains]
    refuse(
        not any(rates),
        f"extension.trains is {shown(extension.trains)}, but optimizer.lr_scale_of is 0 for all of that, so nothing "
        "would be trained; raise it",
    )
    refuse(
        OF_ENCODING in extension.trains and not _own_kinds(model),
        f"extension.trains names tape, but model.position_encoding {model.position_encoding} has no parameters; set "
        "it to tape, or leave tape out",
    )
    for key in ("lora_rank", "lora_alpha", "lora_targets") if not extension.adds_lora else ():
        refuse(
            getattr(extension, key) != getattr(ExtensionConfig(), key),
            f"extension.{key} is {shown(getattr(extension, key))}, but extension.trains is {shown(extension.trains)}, "
            "so there are no LoRA layers; add lora to it, or remove the setting",
        )
    for target, widths in lora_widths(model).items() if extension.adds_lora else ():
        refuse(
            target in extension.lora_targets and extension.lora_rank > min(widths),
            f"extension.lora_rank is {extension.lora_rank}, but the projection {target} is only {min(widths)} wide; "
            f"choose a smaller rank, or leave {target} out of extension.lora_targets",
        )
    if extension.attention == "shifted_sparse":
        refuse(
            model.seq_length % 8 != 0,
            f"extension.attention is shifted_sparse, but model.seq_length {model.seq_length} is not divisible by 8: "
            "a quarter of the sequence is a segment, and half of it the shift; change the length",
        )
        refuse(
            model.query_groups < 2,
            "extension.attention is shifted_sparse, which shifts half of the heads, but all heads of this model share "
            "one group of keys; set it to full",
        )
        refuse(
            bool({SCORES, REFLECTIONS} & encoding_of(model).needs),
            "extension.attention is shifted_sparse, which cannot be combined with model.position_encoding "
            f"{model.position_encoding}, whose scores are computed from whole rows; set it to full",
        )
