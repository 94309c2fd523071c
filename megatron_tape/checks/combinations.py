"""Reject incompatible settings before process groups and parameters are created.

This module reads no files and does not import torch.
"""

import functools

from megatron_tape.checks.layout import validate_layout
from megatron_tape.config.data import SAMPLE_SOURCES, check_template, split_shares
from megatron_tape.config.schema import ExtensionConfig, ModelConfig, RunConfig
from megatron_tape.config.stages import stages_of
from megatron_tape.config.train import AverageSettings
from megatron_tape.config.values import format_value, refuse_incompatible
from megatron_tape.errors import ConfigError
from megatron_tape.evaluation.during_training import build_tasks
from megatron_tape.model.names import KINDS
from megatron_tape.model.shapes import lora_widths
from megatron_tape.model.validation import validate_model
from megatron_tape.ops.backends import ONLY_HALF, REFLECTIONS, SCORES
from megatron_tape.position import encoding_of
from megatron_tape.run.weights_and_biases import INSTALL, installed
from megatron_tape.training.hooks import HOOKS


def validate(config: RunConfig, world_size: int) -> None:
    """Raise `ConfigError` if `config` cannot run on `world_size` processes. Reads no files."""
    validate_model(config.model)
    validate_layout(config, world_size)
    _validate_checkpoint(config)
    _validate_optimizer(config)
    _validate_schedule(config)
    _validate_precision(config)
    _validate_data(config)
    _validate_monitoring(config)
    _validate_trained_kinds(config)
    _validate_lora(config)
    _validate_shifted_sparse(config)


def _validate_checkpoint(config: RunConfig) -> None:
    checkpoint = config.checkpoint
    incompatible = functools.partial(refuse_incompatible, config)
    not_multiple = (
        checkpoint.keep_every is not None and checkpoint.keep_every % checkpoint.interval != 0
    )
    fix = "set it to a multiple of checkpoint.interval"
    incompatible(not_multiple, "checkpoint.keep_every checkpoint.interval", fix)
    shards = (
        config.parallel.tensor_model_parallel_size * config.parallel.pipeline_model_parallel_size
    )
    too_few = checkpoint.writers is not None and checkpoint.writers < shards
    why = f"so each of the model's {shards} shards needs a writer"
    fix = f"set it to {shards} or more, or null"
    keys = (
        "checkpoint.writers parallel.tensor_model_parallel_size"
        " parallel.pipeline_model_parallel_size"
    )
    incompatible(too_few, keys, fix, why)


def _encoding_parameter_kinds(model: ModelConfig) -> list[str]:
    """Return the kinds of the encoding's parameters that `optimizer.lr_scale_of` can name, as
    `position.increments`.
    """
    encoding = encoding_of(model)
    names = [
        f"position.{name}"
        for layer in range(model.num_layers)
        for name in encoding.parameters(layer)
    ]
    return list(dict.fromkeys(names))


def _validate_optimizer(config: RunConfig) -> None:
    optimizer = config.optimizer
    kinds = (*KINDS, *_encoding_parameter_kinds(config.model))
    for key in ("weight_decay_of", "lr_scale_of"):
        for kind in getattr(optimizer, key):
            if kind not in kinds:
                raise ConfigError(
                    f"optimizer.{key}",
                    f"contains the unknown parameter kind {kind}",
                    f"choose from {', '.join(kinds)}",
                )
    fix = "set optimizer.min_lr to at most optimizer.lr"
    refuse_incompatible(
        config, optimizer.min_lr > optimizer.lr, "optimizer.min_lr optimizer.lr", fix
    )
    if optimizer.kind == "muon":
        incompatible = functools.partial(refuse_incompatible, config)
        deepspeed = config.deepspeed
        why = "which shards the matrices that Muon needs whole"
        fix = "set deepspeed.zero_stage to 1 or 2"
        incompatible(deepspeed.zero_stage == 3, "optimizer.kind deepspeed.zero_stage", fix, why)
        why = "so Muon has no matrices to train"
        partial = "all" not in config.extension.trains
        incompatible(partial, "optimizer.kind extension.trains", "set optimizer.kind to adamw", why)
    _validate_average(config)


def _validate_average(config: RunConfig) -> None:
    average = config.train.average
    key = "train.average"
    steps = config.train.steps
    if average is None:
        return
    for name, kind in (("decay", "ema"), ("count", "last"), ("every", "last")):
        is_set = getattr(average, name) != getattr(AverageSettings, name)
        if is_set and kind != average.kind:
            raise ConfigError(
                f"{key}.{name}",
                f"applies only to kind {kind}, but {key}.kind is {average.kind}",
                "remove it",
            )
    first = steps - (average.count - 1) * average.every
    if average.kind == "last" and first < 1:
        raise ConfigError(
            (f"{key}.count", "train.steps"),
            f"is {average.count}, which at {key}.every {average.every} covers more steps than"
            f" train.steps {steps}",
            f"lower {key}.count or {key}.every, or raise train.steps",
        )


def _validate_schedule(config: RunConfig) -> None:
    warmup = config.schedule.warmup_steps
    decay = config.schedule.decay_steps
    steps = config.train.steps
    incompatible = functools.partial(refuse_incompatible, config)
    key = "schedule.warmup_steps"
    incompatible(warmup > steps, f"{key} train.steps", f"lower {key} or raise train.steps")
    unused = decay is not None and config.schedule.kind != "wsd"
    why = "which has no final decay"
    fix = "remove schedule.decay_steps, or set schedule.kind to wsd"
    incompatible(unused, "schedule.decay_steps schedule.kind", fix, why)
    unused = config.schedule.power != 1 and config.schedule.kind != "polynomial"
    fix = "remove schedule.power, or set schedule.kind to polynomial"
    incompatible(unused, "schedule.power schedule.kind", fix, "which has no exponent")
    keys = f"{key} schedule.decay_steps train.steps"
    fix = f"lower {key} or schedule.decay_steps"
    incompatible(warmup + (decay or 0) > steps, keys, fix, "which is less than their sum")


def _validate_precision(config: RunConfig) -> None:
    incompatible = functools.partial(refuse_incompatible, config)
    fp32 = config.train.precision == "fp32"
    fix = "set deepspeed.communication_precision to fp32"
    in_bf16 = config.deepspeed.communication_precision == "bf16"
    incompatible(fp32 and in_bf16, "deepspeed.communication_precision train.precision", fix)
    needs_bf16 = config.model.attention_backend in ONLY_HALF
    fix = "choose another backend, or train in bf16"
    why = "which this backend does not support"
    incompatible(fp32 and needs_bf16, "model.attention_backend train.precision", fix, why)


def _validate_data(config: RunConfig) -> None:
    data = config.data
    interval = config.train.eval_interval
    incompatible = functools.partial(refuse_incompatible, config)
    if data.source in SAMPLE_SOURCES:
        _validate_samples(config)
    stages_of(config)
    no_validation = (
        interval
        and config.train.validates
        and data.source == "prefix"
        and split_shares(data.split)[1] == 0
    )
    fix = "raise the second number of data.split, or set train.eval_interval to null"
    why = "which leaves no validation data"
    incompatible(no_validation, "train.eval_interval data.split", fix, why)
    no_tokenizer = data.tokenizer is None
    fix = "set data.tokenizer"
    why = "so the ends of documents are unknown"
    incompatible(
        data.reset_attention_mask and no_tokenizer,
        "data.reset_attention_mask data.tokenizer",
        fix,
        why,
    )
    why = "so tokens would attend to preceding documents"
    fix = "set data.reset_attention_mask to true"
    attends_across = data.long_documents is not None and not data.reset_attention_mask
    incompatible(attends_across, "data.long_documents data.reset_attention_mask", fix, why)
    samples = interval and "sample" in config.train.evaluations and config.logging.sample_tokens > 0
    fix = "set data.tokenizer, or set logging.sample_tokens to 0"
    incompatible(samples and no_tokenizer, "logging.sample_tokens data.tokenizer", fix)


def _validate_samples(config: RunConfig) -> None:
    """Validate the settings of `data.generator` or `data.examples`."""
    why = "whose samples are not cut from documents"
    for key, default in (
        ("stages", None),
        ("long_documents", None),
        ("reset_attention_mask", False),
    ):
        is_set = getattr(config.data, key) != default
        fix = f"set data.{key} to {format_value(default)}"
        refuse_incompatible(config, is_set, f"data.{key} data.{config.data.source}", fix, why)
    if config.data.source == "generator":
        _validate_generator(config)
    else:
        _validate_examples(config)


def _validate_generator(config: RunConfig) -> None:
    data = config.data
    model = config.model
    incompatible = functools.partial(refuse_incompatible, config)
    generator = data.generator
    fix = "set data.tokenizer to null"
    try:
        generator.check()
    except ConfigError as error:
        raise ConfigError(f"data.generator.{error.subject}", error.problem, error.fix) from None
    incompatible(
        data.tokenizer is not None,
        "data.tokenizer data.generator",
        fix,
        "whose tokens are not text",
    )
    fix = (
        f"raise model.vocab_size to at least {generator.vocab_size}, the vocabulary size of the"
        " task"
    )
    incompatible(generator.vocab_size > model.vocab_size, "data.generator model.vocab_size", fix)
    fix = f"raise model.seq_length to at least {generator.length - 1}"
    incompatible(generator.length > model.seq_length + 1, "data.generator model.seq_length", fix)


def _validate_examples(config: RunConfig) -> None:
    length = config.model.seq_length
    incompatible = functools.partial(refuse_incompatible, config)
    examples = config.data.examples
    check_template(examples.template, "data.examples.template")
    why = "and examples are text"
    incompatible(
        config.data.tokenizer is None, "data.tokenizer data.examples", "set data.tokenizer", why
    )
    if examples.target_tokens >= length:
        raise ConfigError(
            ("data.examples.target_tokens", "model.seq_length"),
            f"is {examples.target_tokens}, which is not below model.seq_length {length}",
            "lower it, or raise model.seq_length",
        )
    fix = "set data.examples.validation, or set train.eval_interval to null"
    no_validation = (
        config.train.eval_interval and config.train.validates and examples.validation is None
    )
    incompatible(
        no_validation, "train.eval_interval data.examples", fix, "without a validation file"
    )


def _validate_monitoring(config: RunConfig) -> None:
    for name in config.train.evaluations:
        if name not in HOOKS:
            raise ConfigError(
                "train.evaluations",
                f"contains the unknown evaluation {name}",
                f"choose from {', '.join(HOOKS)}",
            )
    build_tasks(config)
    steps, last = config.train.profile.steps, config.train.steps
    if steps is not None and steps[0] > steps[1]:
        raise ConfigError(
            "train.profile.steps",
            f"is {format_value(steps)}",
            "give the first and the last step, such as [10, 12]",
        )
    if steps is not None and steps[0] > last:
        raise ConfigError(
            "train.profile.steps",
            f"is {format_value(steps)}, but the run ends at step {last}",
            f"choose steps up to {last}",
        )
    if config.logging.wandb is not None:
        if not installed():
            raise ConfigError(
                "logging.wandb",
                "is set, but the package wandb is not installed",
                f"run {INSTALL}, or set it to null",
            )


def _validate_trained_kinds(config: RunConfig) -> None:
    model = config.model
    trains = config.extension.trains
    key = "extension.trains"
    incompatible = functools.partial(refuse_incompatible, config)
    mixed = "all" in trains and len(trains) > 1
    if mixed:
        raise ConfigError(
            key,
            f"is {format_value(trains)}",
            "set it to [all], which trains everything without LoRA layers",
        )
    no_output = trains == ["output"] and model.tie_embeddings
    why = "so there is no output layer to train"
    incompatible(no_output, f"{key} model.tie_embeddings", "train embeddings instead", why)
    encoding_kinds = _encoding_parameter_kinds(model)
    scales = config.optimizer.lr_scale_of
    rates = [scales.get(kind, 1) for kind in trains]
    rates += [scales.get(kind, 0) for kind in encoding_kinds if "position" in trains]
    incompatible(
        not any(rates),
        f"{key} optimizer.lr_scale_of",
        "raise a multiplier",
        "so nothing would be trained",
    )
    no_parameters = "position" in trains and not encoding_kinds
    fix = "choose another encoding, or remove position from extension.trains"
    incompatible(no_parameters, f"{key} model.position_encoding", fix, "which has no parameters")


def _validate_lora(config: RunConfig) -> None:
    extension, targets = config.extension, config.extension.lora_targets
    if not extension.adds_lora:
        for key in ("lora_rank", "lora_alpha", "lora_targets"):
            is_set = getattr(extension, key) != getattr(ExtensionConfig(), key)
            fix = f"add lora to extension.trains, or remove extension.{key}"
            refuse_incompatible(
                config,
                is_set,
                f"extension.{key} extension.trains",
                fix,
                "so there are no LoRA layers",
            )
        return
    for target, widths in lora_widths(config.model).items():
        if target in targets and extension.lora_rank > min(widths):
            raise ConfigError(
                ("extension.lora_rank", "extension.lora_targets"),
                f"is {extension.lora_rank}, but the smaller dimension of projection {target} is"
                f" {min(widths)}",
                f"lower it to at most {min(widths)}, or remove {target} from"
                " extension.lora_targets",
            )


def _validate_shifted_sparse(config: RunConfig) -> None:
    model = config.model
    key = "extension.attention"
    incompatible = functools.partial(refuse_incompatible, config)
    if config.extension.attention != "shifted_sparse":
        return
    why = "which cannot be divided into four segments of even length"
    incompatible(
        model.seq_length % 8 != 0,
        f"{key} model.seq_length",
        "set model.seq_length to a multiple of 8",
        why,
    )
    if model.query_groups < 2:
        raise ConfigError(
            (key, "model.num_query_groups"),
            "is shifted_sparse, which shifts half of the key/value heads, but this model has"
            " only one",
            "set it to full",
        )
    row_scores = {SCORES, REFLECTIONS} & encoding_of(model).needs
    why = "whose attention scores depend on all tokens between query and key"
    incompatible(bool(row_scores), f"{key} model.position_encoding", "set it to full", why)
