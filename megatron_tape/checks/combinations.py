"""Reject incompatible settings before process groups and parameters are created.

This module reads no files and does not import torch.
"""

from megatron_tape.checks.layout import validate_layout, validate_processes
from megatron_tape.config.data import check_template, split_shares
from megatron_tape.config.schema import ExtensionConfig, ModelConfig, RunConfig
from megatron_tape.config.stages import stages_of
from megatron_tape.config.train import AverageSettings
from megatron_tape.config.values import format_value
from megatron_tape.errors import ConfigError
from megatron_tape.evaluation.during_training import build_tasks
from megatron_tape.model.names import KINDS
from megatron_tape.model.shapes import lora_widths
from megatron_tape.model.validation import validate_model
from megatron_tape.ops.backends import DECAY, ONLY_HALF, REFLECTIONS, SCORES
from megatron_tape.position import encoding_of
from megatron_tape.run.weights_and_biases import INSTALL, is_wandb_installed
from megatron_tape.training.hooks import HOOKS


def validate(config: RunConfig, world_size: int) -> None:
    """Raise ConfigError for the first setting that is invalid or incompatible with others, or if
    `config` cannot run on `world_size` processes. Reads no files.
    """
    validate_model(config.model)
    validate_layout(config)
    validate_processes(config, world_size)
    _validate_checkpoint(config)
    _validate_optimizer(config)
    _validate_average(config)
    _validate_schedule(config)
    _validate_precision(config)
    _validate_data(config)
    _validate_monitoring(config)
    _validate_trained_kinds(config)
    _validate_lora(config)
    _validate_shifted_sparse(config)


def _validate_checkpoint(config: RunConfig) -> None:
    checkpoint = config.checkpoint
    tensor_size = config.parallel.tensor_model_parallel_size
    pipeline_size = config.parallel.pipeline_model_parallel_size
    shards = tensor_size * pipeline_size

    # Checkpoints exist only at multiples of the interval.
    if checkpoint.keep_every is not None and checkpoint.keep_every % checkpoint.interval != 0:
        raise ConfigError(
            ("checkpoint.keep_every", "checkpoint.interval"),
            f"is {checkpoint.keep_every}, but checkpoint.interval is {checkpoint.interval}",
            "set it to a multiple of checkpoint.interval",
        )
    if checkpoint.writers is not None and checkpoint.writers < shards:
        raise ConfigError(
            (
                "checkpoint.writers",
                "parallel.tensor_model_parallel_size",
                "parallel.pipeline_model_parallel_size",
            ),
            f"is {checkpoint.writers}, but parallel.tensor_model_parallel_size is {tensor_size} and"
            f" parallel.pipeline_model_parallel_size is {pipeline_size}, so each of the model's"
            f" {shards} shards needs a writer",
            f"set it to {shards} or more, or null",
        )


def _encoding_parameter_kinds(model: ModelConfig) -> list[str]:
    """Return the kinds of the encoding's parameters that `optimizer.lr_scale_of` can name, such as
    `position.increments`, without duplicates.
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
    trains = config.extension.trains
    kinds = (*KINDS, *_encoding_parameter_kinds(config.model))

    for key in ("weight_decay_of", "lr_scale_of"):
        for kind in getattr(optimizer, key):
            if kind not in kinds:
                raise ConfigError(
                    f"optimizer.{key}",
                    f"contains the unknown parameter kind {kind}",
                    f"choose from {', '.join(kinds)}",
                )
    if optimizer.min_lr > optimizer.lr:
        raise ConfigError(
            ("optimizer.min_lr", "optimizer.lr"),
            f"is {optimizer.min_lr}, but optimizer.lr is {optimizer.lr}",
            "set optimizer.min_lr to at most optimizer.lr",
        )
    if optimizer.kind == "muon" and config.deepspeed.zero_stage == 3:
        raise ConfigError(
            ("optimizer.kind", "deepspeed.zero_stage"),
            "is muon, but deepspeed.zero_stage is 3, which shards the matrices that Muon needs"
            " whole",
            "set deepspeed.zero_stage to 1 or 2",
        )
    # Muon updates only the matrices of attention and the MLP, which `all` alone trains. The other
    # values, such as position or lora, select parameters that AdamW updates.
    if optimizer.kind == "muon" and "all" not in trains:
        raise ConfigError(
            ("optimizer.kind", "extension.trains"),
            f"is muon, but extension.trains is {format_value(trains)}, so Muon has no matrices to"
            " train",
            "set optimizer.kind to adamw",
        )


def _validate_average(config: RunConfig) -> None:
    average = config.train.average
    steps = config.train.steps

    if average is None:
        return
    # A setting of the other kind of average would have no effect. The class's attributes are the
    # defaults.
    for name, kind in (("decay", "ema"), ("count", "last"), ("every", "last")):
        is_set = getattr(average, name) != getattr(AverageSettings, name)
        if is_set and kind != average.kind:
            raise ConfigError(
                f"train.average.{name}",
                f"applies only to kind {kind}, but train.average.kind is {average.kind}",
                "remove it",
            )
    # The first averaged step, steps - (count - 1) * every, must be at least 1.
    if average.kind == "last" and (average.count - 1) * average.every >= steps:
        raise ConfigError(
            ("train.average.count", "train.steps"),
            f"is {average.count}, which at train.average.every {average.every} covers more steps"
            f" than train.steps {steps}",
            "lower train.average.count or train.average.every, or raise train.steps",
        )


def _validate_schedule(config: RunConfig) -> None:
    schedule = config.schedule
    steps = config.train.steps

    if schedule.warmup_steps > steps:
        raise ConfigError(
            ("schedule.warmup_steps", "train.steps"),
            f"is {schedule.warmup_steps}, but train.steps is {steps}",
            "lower schedule.warmup_steps or raise train.steps",
        )
    if schedule.power != 1 and schedule.kind != "polynomial":
        raise ConfigError(
            ("schedule.power", "schedule.kind"),
            f"is {schedule.power}, but schedule.kind is {schedule.kind}, which has no exponent",
            "remove schedule.power, or set schedule.kind to polynomial",
        )
    if schedule.decay_steps is None:
        return
    if schedule.kind != "wsd":
        raise ConfigError(
            ("schedule.decay_steps", "schedule.kind"),
            f"is {schedule.decay_steps}, but schedule.kind is {schedule.kind}, which has no final"
            " decay",
            "remove schedule.decay_steps, or set schedule.kind to wsd",
        )
    if schedule.warmup_steps + schedule.decay_steps > steps:
        raise ConfigError(
            ("schedule.warmup_steps", "schedule.decay_steps", "train.steps"),
            f"is {schedule.warmup_steps}, but schedule.decay_steps is {schedule.decay_steps} and"
            f" train.steps is {steps}, which is less than their sum",
            "lower schedule.warmup_steps or schedule.decay_steps",
        )


def _validate_precision(config: RunConfig) -> None:
    backend = config.model.attention_backend

    if config.train.precision != "fp32":
        return
    if config.deepspeed.communication_precision == "bf16":
        raise ConfigError(
            ("deepspeed.communication_precision", "train.precision"),
            "is bf16, but train.precision is fp32",
            "set deepspeed.communication_precision to fp32",
        )
    if backend in ONLY_HALF:
        raise ConfigError(
            ("model.attention_backend", "train.precision"),
            f"is {backend}, but train.precision is fp32, which this backend does not support",
            "choose another backend, or train in bf16",
        )


def _validate_data(config: RunConfig) -> None:
    data = config.data
    train = config.train

    if data.source != "prefix":
        _validate_samples(config)
    stages_of(config)  # for its ConfigError
    if data.reset_attention_mask and data.tokenizer is None:
        raise ConfigError(
            ("data.reset_attention_mask", "data.tokenizer"),
            "is true, but data.tokenizer is null, so the ends of documents are unknown",
            "set data.tokenizer",
        )
    if data.long_documents is not None and not data.reset_attention_mask:
        raise ConfigError(
            ("data.long_documents", "data.reset_attention_mask"),
            "is set, but data.reset_attention_mask is false, so tokens would attend to preceding"
            " documents",
            "set data.reset_attention_mask to true",
        )

    # 0 disables evaluations. By default (None), a run without validation data is not an error.
    if not train.eval_interval:
        return
    if train.validates and data.source == "prefix":
        _, validation_share, _ = split_shares(data.split)
        if validation_share == 0:
            raise ConfigError(
                ("train.eval_interval", "data.split"),
                f"is {train.eval_interval}, but data.split is {data.split}, which leaves no"
                " validation data",
                "raise the second number of data.split, or set train.eval_interval to null",
            )
    if train.validates and data.examples is not None and data.examples.validation is None:
        raise ConfigError(
            ("train.eval_interval", "data.examples.validation"),
            f"is {train.eval_interval}, but data.examples.validation is null",
            "set data.examples.validation, or set train.eval_interval to null",
        )
    writes_sample = "sample" in train.evaluations and config.logging.sample_tokens > 0
    if writes_sample and data.tokenizer is None:
        raise ConfigError(
            ("logging.sample_tokens", "data.tokenizer"),
            f"is {config.logging.sample_tokens}, but data.tokenizer is null",
            "set data.tokenizer, or set logging.sample_tokens to 0",
        )


def _validate_samples(config: RunConfig) -> None:
    """Validate the settings of `data.generator` or `data.examples`."""
    data = config.data

    for key in ("stages", "long_documents", "reset_attention_mask"):
        if getattr(data, key):
            raise ConfigError(
                (f"data.{key}", f"data.{data.source}"),
                f"is set, but data.{data.source} is set, whose samples are not cut from documents",
                f"remove data.{key}",
            )
    if data.source == "generator":
        _validate_generator(config)
    else:
        _validate_examples(config)


def _validate_generator(config: RunConfig) -> None:
    model = config.model
    generator = config.data.generator

    # A generator knows the names of its settings, but not their section.
    try:
        generator.check()
    except ConfigError as error:
        raise ConfigError(f"data.generator.{error.subject}", error.problem, error.fix) from None
    if config.data.tokenizer is not None:
        raise ConfigError(
            ("data.tokenizer", "data.generator"),
            f"is {format_value(config.data.tokenizer)}, but data.generator is set, whose tokens are"
            " not text",
            "set data.tokenizer to null",
        )
    if generator.vocab_size > model.vocab_size:
        raise ConfigError(
            ("data.generator", "model.vocab_size"),
            f"is set, but model.vocab_size is {model.vocab_size}",
            f"raise model.vocab_size to at least {generator.vocab_size}, the vocabulary size of the"
            " task",
        )
    # The model reads a sample without its last token, which is only a target.
    if generator.length > model.seq_length + 1:
        raise ConfigError(
            ("data.generator", "model.seq_length"),
            f"is set, but model.seq_length is {model.seq_length}",
            f"raise model.seq_length to at least {generator.length - 1}",
        )


def _validate_examples(config: RunConfig) -> None:
    examples = config.data.examples
    length = config.model.seq_length

    check_template(examples.template, "data.examples.template")
    if config.data.tokenizer is None:
        raise ConfigError(
            ("data.tokenizer", "data.examples"),
            "is null, but data.examples is set, and examples are text",
            "set data.tokenizer",
        )
    # At least one token of the prompt must fit before the target.
    if examples.target_tokens >= length:
        raise ConfigError(
            ("data.examples.target_tokens", "model.seq_length"),
            f"is {examples.target_tokens}, which is not below model.seq_length {length}",
            "lower it, or raise model.seq_length",
        )


def _validate_monitoring(config: RunConfig) -> None:
    profile_steps = config.train.profile.steps
    run_steps = config.train.steps

    for name in config.train.evaluations:
        if name not in HOOKS:
            raise ConfigError(
                "train.evaluations",
                f"contains the unknown evaluation {name}",
                f"choose from {', '.join(HOOKS)}",
            )
    build_tasks(config)  # for its ConfigError
    # The first traced step must be at most the last one and in the run. A last traced step after
    # the end of the run is allowed: the trace then ends with the run.
    if profile_steps is not None and profile_steps[0] > min(profile_steps[1], run_steps):
        raise ConfigError(
            ("train.profile.steps", "train.steps"),
            f"is {format_value(profile_steps)}, but the run ends at step {run_steps}",
            "give the first and the last step, such as [10, 12], within the run",
        )
    # Without this check, the run would only warn, and train without logging to W&B.
    if config.logging.wandb is not None and not is_wandb_installed():
        raise ConfigError(
            "logging.wandb",
            "is set, but the package wandb is not installed",
            f"run {INSTALL}, or set it to null",
        )


def _validate_trained_kinds(config: RunConfig) -> None:
    """Raise ConfigError if `extension.trains` selects nothing that can be trained."""
    model = config.model
    trains = config.extension.trains
    scales = config.optimizer.lr_scale_of
    encoding_kinds = _encoding_parameter_kinds(model)

    if "all" in trains and len(trains) > 1:
        raise ConfigError(
            "extension.trains",
            f"is {format_value(trains)}",
            "set it to [all], which trains everything without LoRA layers",
        )
    if trains == ["output"] and model.tie_embeddings:
        raise ConfigError(
            ("extension.trains", "model.tie_embeddings"),
            "is [output], but model.tie_embeddings is true, so there is no output layer to train",
            "train embeddings instead",
        )

    if "position" in trains and not encoding_kinds:
        raise ConfigError(
            ("extension.trains", "model.position_encoding"),
            f"is {format_value(trains)}, but model.position_encoding is {model.position_encoding},"
            " which has no parameters",
            "choose another encoding, or remove position from extension.trains",
        )

    # Learning rate multipliers of the trained parameters. If all are 0, nothing is trained.
    multipliers = [scales.get(kind, 1) for kind in trains if kind != "position"]
    # A multiplier of one parameter, such as position.increments, overrides that of position.
    if "position" in trains:
        of_position = scales.get("position", 1)
        multipliers += [scales.get(kind, of_position) for kind in encoding_kinds]
    if not any(multipliers):
        raise ConfigError(
            ("extension.trains", "optimizer.lr_scale_of"),
            f"is {format_value(trains)}, but optimizer.lr_scale_of is {format_value(scales)}, so"
            " nothing would be trained",
            "raise a multiplier",
        )


def _validate_lora(config: RunConfig) -> None:
    extension = config.extension

    if not extension.adds_lora:
        for key in ("lora_rank", "lora_alpha", "lora_targets"):
            # A setting with another value than its default would have no effect.
            if getattr(extension, key) != getattr(ExtensionConfig(), key):
                raise ConfigError(
                    (f"extension.{key}", "extension.trains"),
                    f"is {format_value(getattr(extension, key))}, but extension.trains is"
                    f" {format_value(extension.trains)}, so there are no LoRA layers",
                    f"add lora to extension.trains, or remove extension.{key}",
                )
        return
    # LoRA adds a product of two matrices to the weight of a projection. The rank of the product
    # cannot exceed the smaller dimension of the projection.
    for target, widths in lora_widths(config.model).items():
        if target in extension.lora_targets and extension.lora_rank > min(widths):
            raise ConfigError(
                ("extension.lora_rank", "extension.lora_targets"),
                f"is {extension.lora_rank}, but the smaller dimension of projection {target} is"
                f" {min(widths)}",
                f"lower it to at most {min(widths)}, or remove {target} from"
                " extension.lora_targets",
            )


def _validate_shifted_sparse(config: RunConfig) -> None:
    model = config.model

    if config.extension.attention != "shifted_sparse":
        return
    # The length of a segment must be even, since segments are shifted by half of it.
    if model.seq_length % 8 != 0:
        raise ConfigError(
            ("extension.attention", "model.seq_length"),
            f"is shifted_sparse, but model.seq_length is {model.seq_length}, which cannot be"
            " divided into four segments of even length",
            "set model.seq_length to a multiple of 8",
        )
    if model.query_groups < 2:
        raise ConfigError(
            ("extension.attention", "model.num_query_groups"),
            "is shifted_sparse, which shifts half of the key/value heads, but this model has"
            " only one",
            "set it to full",
        )
    if {SCORES, REFLECTIONS, DECAY} & encoding_of(model).needs:
        raise ConfigError(
            ("extension.attention", "model.position_encoding"),
            f"is shifted_sparse, but model.position_encoding is {model.position_encoding}, whose"
            " attention scores depend on all tokens between query and key",
            "set it to full",
        )
