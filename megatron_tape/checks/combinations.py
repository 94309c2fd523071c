"""Reject settings that cannot work, alone or together, before a process group or a parameter exists.

No file is read, and torch is not imported.
"""

import functools

from megatron_tape.checks.layout import validate_layout
from megatron_tape.config.data import SAMPLE_SOURCES, check_template, split_shares
from megatron_tape.config.schema import ExtensionConfig, ModelConfig, RunConfig
from megatron_tape.config.stages import stages_of
from megatron_tape.config.train import AverageSettings
from megatron_tape.config.values import format_value, refuse_incompatible
from megatron_tape.errors import ConfigError, refuse
from megatron_tape.evaluation.during_training import build_tasks
from megatron_tape.model.names import KINDS
from megatron_tape.model.shapes import lora_widths
from megatron_tape.model.validation import validate_model
from megatron_tape.ops.backends import ONLY_HALF, REFLECTIONS, SCORES
from megatron_tape.position import encoding_of
from megatron_tape.run.weights_and_biases import INSTALL, installed
from megatron_tape.training.hooks import HOOKS


def validate(config: RunConfig, world_size: int) -> None:
    """Raise `ConfigError` if `config` cannot run on `world_size` processes. Reads no file."""
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
    checkpoint, clash = config.checkpoint, functools.partial(refuse_incompatible, config)
    never = checkpoint.keep_every is not None and checkpoint.keep_every % checkpoint.interval != 0
    clash(never, "checkpoint.keep_every checkpoint.interval", "set it to a multiple of the interval")
    shares = config.parallel.tensor_model_parallel_size * config.parallel.pipeline_model_parallel_size
    few = checkpoint.writers is not None and checkpoint.writers < shares
    why, fix = "and each tensor-parallel rank of each stage writes its own shares", f"set it to {shares} or to null"
    keys = "checkpoint.writers parallel.tensor_model_parallel_size parallel.pipeline_model_parallel_size"
    clash(few, keys, fix, why)


def _parameters_of_encoding(model: ModelConfig) -> list[str]:
    """Return the names by which `optimizer` may give the parameters of the model's encoding their own values."""
    encoding = encoding_of(model)
    names = [f"position.{name}" for layer in range(model.num_layers) for name in encoding.parameters(layer)]
    return list(dict.fromkeys(names))


def _validate_optimizer(config: RunConfig) -> None:
    optimizer = config.optimizer
    kinds = (*KINDS, *_parameters_of_encoding(config.model))
    for key in ("weight_decay_of", "lr_scale_of"):
        for kind in getattr(optimizer, key):
            refuse(kind not in kinds, f"optimizer.{key}", f"names the kind {kind}", f"choose from {', '.join(kinds)}")
    refuse_incompatible(config, optimizer.min_lr > optimizer.lr, "optimizer.min_lr optimizer.lr", "lower it")
    if optimizer.kind == "muon":
        clash, deepspeed = functools.partial(refuse_incompatible, config), config.deepspeed
        why = "which cuts the matrices that Muon needs whole"
        clash(deepspeed.zero_stage == 3, "optimizer.kind deepspeed.zero_stage", "set that to 1 or 2", why)
        without = "all" not in config.extension.trains
        clash(without, "optimizer.kind extension.trains", "set it to adamw", "so no matrix of Muon's is trained")
    _validate_average(config)


def _validate_average(config: RunConfig) -> None:
    average, key, steps = config.train.average, "train.average", config.train.steps
    if average is None:
        return
    for name, kind in (("decay", "ema"), ("count", "last"), ("every", "last")):
        given = getattr(average, name) != getattr(AverageSettings, name)
        refuse(given and kind != average.kind, f"{key}.{name}", f"belongs to kind {kind}", "remove it")
    first = steps - (average.count - 1) * average.every
    problem = f"{average.count} times every {average.every} is more than train.steps {steps}"
    refuse(average.kind == "last" and first < 1, (f"{key}.count", "train.steps"), problem, "lower either")


def _validate_schedule(config: RunConfig) -> None:
    warmup, decay, steps = config.schedule.warmup_steps, config.schedule.decay_steps, config.train.steps
    clash, key = functools.partial(refuse_incompatible, config), "schedule.warmup_steps"
    clash(warmup > steps, f"{key} train.steps", f"lower {key} or raise train.steps")
    other, why = decay is not None and config.schedule.kind != "wsd", "which decays until the last step"
    clash(other, "schedule.decay_steps schedule.kind", "remove it or use kind wsd", why)
    other = config.schedule.power != 1 and config.schedule.kind != "polynomial"
    clash(other, "schedule.power schedule.kind", "remove it or use kind polynomial", "which has no power")
    clash(warmup + (decay or 0) > steps, f"{key} schedule.decay_steps train.steps", "lower either")


def _validate_precision(config: RunConfig) -> None:
    clash = functools.partial(refuse_incompatible, config)
    fp32, fix = config.train.precision == "fp32", "change either, as it needs bf16"
    in_bf16 = config.deepspeed.communication_precision == "bf16"
    clash(fp32 and in_bf16, "deepspeed.communication_precision train.precision", fix)
    in_bf16 = config.model.attention_backend in ONLY_HALF
    clash(fp32 and in_bf16, "model.attention_backend train.precision", fix)


def _validate_data(config: RunConfig) -> None:
    data, interval, clash = config.data, config.train.eval_interval, functools.partial(refuse_incompatible, config)
    if data.source in SAMPLE_SOURCES:
        _validate_samples(config)
    stages_of(config)
    nothing = data.source == "prefix" and config.train.validates and split_shares(data.split)[1] == 0
    fix, why = "raise its second share, or set eval_interval to null", "which leaves nothing for validation"
    clash(nothing, "train.eval_interval data.split", fix, why)
    without = data.tokenizer is None
    clash(data.reset_attention_mask and without, "data.reset_attention_mask data.tokenizer", "set the tokenizer")
    why, fix = "so that tokens would attend to the documents before their own", "set reset_attention_mask to true"
    attends = data.long_documents is not None and not data.reset_attention_mask
    clash(attends, "data.long_documents data.reset_attention_mask", fix, why)
    samples = interval is not None and "sample" in config.train.evaluations and config.logging.sample_tokens > 0
    fix = "set the tokenizer, or sample_tokens to 0"
    clash(samples and without, "logging.sample_tokens data.tokenizer", fix)


def _validate_samples(config: RunConfig) -> None:
    """Check a source of samples that stands in place of indexed datasets."""
    why = "which makes samples that are not cut from documents"
    for key, unset in (("stages", None), ("long_documents", None), ("reset_attention_mask", False)):
        given = getattr(config.data, key) != unset
        refuse_incompatible(
            config, given, f"data.{key} data.{config.data.source}", f"set it to {format_value(unset)}", why
        )
    if config.data.source == "generator":
        _validate_generator(config)
    else:
        _validate_examples(config)


def _validate_generator(config: RunConfig) -> None:
    data, model, clash = config.data, config.model, functools.partial(refuse_incompatible, config)
    generator, fix = data.generator, "set it to null"
    try:
        generator.check()
    except ConfigError as error:
        raise ConfigError(f"data.generator.{error.subject}", error.problem, error.fix) from None
    clash(data.tokenizer is not None, "data.tokenizer data.generator", fix, "which makes tokens that are no text")
    fix = f"raise model.vocab_size to at least {generator.vocab_size}, the number of different tokens"
    clash(generator.vocab_size > model.vocab_size, "data.generator model.vocab_size", fix)
    fix = f"raise model.seq_length to at least {generator.length - 1}"
    clash(generator.length > model.seq_length + 1, "data.generator model.seq_length", fix)


def _validate_examples(config: RunConfig) -> None:
    length, clash = config.model.seq_length, functools.partial(refuse_incompatible, config)
    examples = config.data.examples
    check_template(examples.template, "data.examples.template")
    clash(config.data.tokenizer is None, "data.tokenizer data.examples", "set it", "which are texts")
    refuse(
        examples.target_tokens >= length,
        ("data.examples.target_tokens", "model.seq_length"),
        f"is {examples.target_tokens}, but model.seq_length is {length}",
        "set target_tokens to less",
    )
    fix = "add validation, or set eval_interval to null"
    without = config.train.validates and examples.validation is None
    clash(without, "train.eval_interval data.examples", fix, "which names no validation file")


def _validate_monitoring(config: RunConfig) -> None:
    for name in config.train.evaluations:
        refuse(name not in HOOKS, "train.evaluations", f"names {name}", f"choose from {', '.join(HOOKS)}")
    build_tasks(config)
    steps, last = config.train.profile.steps, config.train.steps
    fix = "give the first and the last step, such as [10, 12]"
    refuse(steps is not None and steps[0] > steps[1], "train.profile.steps", f"is {format_value(steps)}", fix)
    late = steps is not None and steps[0] > last
    refuse(
        late,
        "train.profile.steps",
        f"is {format_value(steps)}, but the run ends with step {last}",
        "name earlier steps",
    )
    if config.logging.wandb is not None:
        problem = "is set, but the package wandb is not installed"
        refuse(not installed(), "logging.wandb", problem, f"run {INSTALL}, or set it to null")


def _validate_trained_kinds(config: RunConfig) -> None:
    model, trains, key = config.model, config.extension.trains, "extension.trains"
    clash = functools.partial(refuse_incompatible, config)
    mixed, fix = "all" in trains and len(trains) > 1, "name all alone, as it includes the others but lora"
    refuse(mixed, key, f"is {format_value(trains)}", fix)
    nothing, why = trains == ["output"] and model.tie_embeddings, "so there is no output layer to train"
    clash(nothing, f"{key} model.tie_embeddings", "name embeddings", why)
    of_encoding, scales = _parameters_of_encoding(model), config.optimizer.lr_scale_of
    rates = [scales.get(kind, 1) for kind in trains]
    rates += [scales.get(name, 0) for name in of_encoding if "position" in trains]
    clash(not any(rates), f"{key} optimizer.lr_scale_of", "raise a scale", "so nothing would be trained")
    nothing, fix = "position" in trains and not of_encoding, "choose another encoding, or leave position out"
    clash(nothing, f"{key} model.position_encoding", fix, "which has no parameters")


def _validate_lora(config: RunConfig) -> None:
    extension, targets = config.extension, config.extension.lora_targets
    if not extension.adds_lora:
        for key in ("lora_rank", "lora_alpha", "lora_targets"):
            given = getattr(extension, key) != getattr(ExtensionConfig(), key)
            fix = "add lora to trains, or remove the setting"
            refuse_incompatible(config, given, f"extension.{key} extension.trains", fix, "so there are no LoRA layers")
        return
    for target, widths in lora_widths(config.model).items():
        refuse(
            target in targets and extension.lora_rank > min(widths),
            ("extension.lora_rank", "extension.lora_targets"),
            f"is {extension.lora_rank}, but the projection {target} is only {min(widths)} wide",
            f"choose a smaller rank, or leave {target} out of extension.lora_targets",
        )


def _validate_shifted_sparse(config: RunConfig) -> None:
    model, key, clash = config.model, "extension.attention", functools.partial(refuse_incompatible, config)
    if config.extension.attention != "shifted_sparse":
        return
    why = "which is not divisible by 8: a quarter of the sequence is a segment, and half of it the shift"
    clash(model.seq_length % 8 != 0, f"{key} model.seq_length", "change the length", why)
    refuse(
        model.query_groups < 2,
        (key, "model.num_query_groups"),
        "is shifted_sparse, which shifts half of the heads, but all heads of this model share one group of keys",
        "set it to full",
    )
    whole, why = {SCORES, REFLECTIONS} & encoding_of(model).needs, "whose scores are computed from whole rows"
    clash(bool(whole), f"{key} model.position_encoding", "set it to full", why)
