"""Reject settings that cannot work, alone or together, before a process group or a parameter exists.

No file is read, and torch is not imported.
"""

import dataclasses

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
    split_shares,
)
from megatron_tape.config.values import check_section, shown
from megatron_tape.errors import refuse
from megatron_tape.evaluation.during_training import build_tasks
from megatron_tape.model.settings import validate_model
from megatron_tape.model.shapes import lora_widths
from megatron_tape.ops.backends import REFLECTIONS, SCORES
from megatron_tape.position import encoding_of
from megatron_tape.synthetic.settings import generator_of
from megatron_tape.training.hooks import EVALUATIONS

PROCESSES = "the number of processes"
"""What an error is about that no setting causes."""
LARGEST_RUN = 10**11
"""Sequences of a run; an index of more takes longer to build than any run."""


def validate(config: RunConfig, world_size: int) -> None:
    """Raise `ConfigError` if `config` cannot run on `world_size` processes. Reads no file."""
    validate_model(config.model)
    for section in dataclasses.fields(RunConfig):
        if section.name != "model":
            check_section(section.name, getattr(config, section.name))
    _validate_parallel(config, world_size)
    _validate_batches(config, world_size)
    _validate_checkpoint(config)
    _validate_optimizer(config)
    _validate_schedule(config)
    _validate_precision(config)
    _validate_data(config)
    _validate_evaluations(config)
    _validate_trained_parts(config)
    _validate_lora(config)
    _validate_shifted_sparse(config)


def _validate_parallel(config: RunConfig, world_size: int) -> None:
    model, parallel = config.model, config.parallel
    tensor_size, context_size = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    tensor_key, context_key = "parallel.tensor_model_parallel_size", "parallel.context_parallel_size"
    together, sequence_parallel = parallel.ranks_per_sequence, parallel.uses_sequence_parallel
    tensor, both = f"{tensor_key} {tensor_size}", f"{tensor_key} {tensor_size} times {context_key} {context_size}"
    joint, joint_keys = (tensor, (tensor_key,)) if context_size == 1 else (both, (tensor_key, context_key))
    refuse(world_size < 1, PROCESSES, f"is {world_size}", "start at least 1")
    refuse(
        world_size % together != 0,
        (PROCESSES, *joint_keys),
        f"is {world_size}, which is not divisible by {joint}",
        "start another number of processes, as torchrun --nproc-per-node does, or change it",
    )
    for key, size, divisor, keys in (
        ("model.num_attention_heads", model.num_attention_heads, together, joint_keys),
        ("model.num_query_groups", model.query_groups, tensor_size, (tensor_key,)),
        ("model.ffn_hidden_size", model.ffn_hidden_size, tensor_size, (tensor_key,)),
        ("model.vocab_size", model.vocab_size, tensor_size, (tensor_key,)),
        ("model.seq_length", model.seq_length, together if context_size > 1 or sequence_parallel else 1, joint_keys),
    ):
        by = joint if keys == joint_keys else tensor
        refuse(size % divisor != 0, (key, *keys), f"{size} is not divisible by {by}", "change either")
    key = "parallel.sequence_parallel"
    refuse(
        tensor_size == 1 and sequence_parallel,
        (key, tensor_key),
        f"is true with {tensor}, so there is nothing to shard",
        "set it to null",
    )
    if tensor_size > 1 and not sequence_parallel:
        fix = f"set {key} to true or null"
        refuse(context_size > 1, (key, context_key), f"is false, and {both} needs it", fix)
        refuse(
            encoding_of(model).needs_sharded_tokens,
            (key, "model.position_encoding"),
            f"is false, and model.position_encoding {model.position_encoding} with {tensor} needs it, since its "
            "parameters work where tokens are sharded",
            fix,
        )
        refuse(
            model.qk_norm,
            (key, "model.qk_norm"),
            f"is false, and model.qk_norm with {tensor} needs it, since it adds up the norms' gradients",
            fix,
        )


def _validate_batches(config: RunConfig, world_size: int) -> None:
    train, data_size = config.train, world_size // config.parallel.ranks_per_sequence
    sequences = train.steps * train.global_batch_size
    refuse(
        sequences > LARGEST_RUN,
        ("train.steps", "train.global_batch_size"),
        f"{train.steps} times train.global_batch_size {train.global_batch_size} is {sequences:,} sequences, and at "
        f"most {LARGEST_RUN:,} can be indexed",
        "lower either",
    )
    refuse(
        train.global_batch_size % (train.micro_batch_size * data_size) != 0,
        ("train.global_batch_size", "train.micro_batch_size"),
        f"{train.global_batch_size} is not divisible by train.micro_batch_size {train.micro_batch_size} times "
        f"{data_size} data-parallel processes",
        "change either",
    )


def _validate_checkpoint(config: RunConfig) -> None:
    checkpoint, tensor_size = config.checkpoint, config.parallel.tensor_model_parallel_size
    refuse(not checkpoint.resume, "checkpoint.resume", "is empty", "set it to auto, none or a checkpoint's path")
    refuse(
        checkpoint.keep_every is not None and checkpoint.keep_every % checkpoint.interval != 0,
        ("checkpoint.keep_every", "checkpoint.interval"),
        f"{checkpoint.keep_every} is not a multiple of checkpoint.interval {checkpoint.interval}, so there would be no "
        "checkpoint to keep at most of those steps",
        "change either",
    )
    refuse(
        checkpoint.writers is not None and checkpoint.writers < tensor_size,
        ("checkpoint.writers", "parallel.tensor_model_parallel_size"),
        f"{checkpoint.writers} is less than parallel.tensor_model_parallel_size {tensor_size}, and every "
        "tensor-parallel rank writes its own shares",
        "set it to at least that, or to null",
    )


def _parameters_of_encoding(model: ModelConfig) -> list[str]:
    """Return the names by which `optimizer` may give the parameters of the model's encoding their own values."""
    encoding = encoding_of(model)
    names = [f"position.{name}" for layer in range(model.num_layers) for name in encoding.parameters(layer)]
    return list(dict.fromkeys(names))


def _validate_optimizer(config: RunConfig) -> None:
    optimizer = config.optimizer
    kinds = (*PARAMETER_KINDS, *_parameters_of_encoding(config.model))
    for key in ("weight_decay_of", "lr_scale_of"):
        for kind in getattr(optimizer, key):
            refuse(kind not in kinds, f"optimizer.{key}", f"names the kind {kind}", f"choose from {', '.join(kinds)}")
    refuse(
        optimizer.min_lr > optimizer.lr,
        ("optimizer.min_lr", "optimizer.lr"),
        f"{optimizer.min_lr} exceeds optimizer.lr {optimizer.lr}",
        "lower it",
    )


def _validate_schedule(config: RunConfig) -> None:
    schedule, steps = config.schedule, config.train.steps
    warmup, decay = schedule.warmup_steps, schedule.decay_steps
    refuse(
        warmup > steps,
        ("schedule.warmup_steps", "train.steps"),
        f"{warmup} exceeds train.steps {steps}",
        "lower schedule.warmup_steps or raise train.steps",
    )
    refuse(
        decay is not None and schedule.kind != "wsd",
        ("schedule.decay_steps", "schedule.kind"),
        f"{decay} has no meaning for schedule.kind {schedule.kind}, which decays until the last step",
        "remove it or use kind wsd",
    )
    refuse(
        warmup + (decay or 0) > steps,
        ("schedule.warmup_steps", "schedule.decay_steps", "train.steps"),
        f"{warmup} and schedule.decay_steps {decay} together exceed train.steps {steps}",
        "lower either",
    )


def _validate_precision(config: RunConfig) -> None:
    precision, deepspeed = config.train.precision, config.deepspeed
    refuse(
        precision == "bf16" and deepspeed.zero_stage == 0,
        ("train.precision", "deepspeed.zero_stage"),
        "bf16 with deepspeed.zero_stage 0 keeps no fp32 copy of the weights",
        "set zero_stage to 1, 2 or 3, or precision to fp32",
    )
    for key, value, why in (
        ("deepspeed.communication_precision", deepspeed.communication_precision, "bf16"),
        ("model.attention_backend", config.model.attention_backend, "flash_attn"),
    ):
        refuse(
            precision == "fp32" and value == why,
            (key, "train.precision"),
            f"is {value}, which needs train.precision bf16, and that is fp32",
            "change either",
        )
    refuse(
        deepspeed.offload_optimizer and deepspeed.zero_stage == 0,
        ("deepspeed.offload_optimizer", "deepspeed.zero_stage"),
        "is true with deepspeed.zero_stage 0",
        "set zero_stage to 1, 2 or 3",
    )


def _validates(config: RunConfig) -> bool:
    """Return whether the run computes something on the validation split."""
    return config.train.eval_interval is not None and bool(ON_VALIDATION_DATA & set(config.train.evaluations))


def _validate_data(config: RunConfig) -> None:
    data, interval = config.data, config.train.eval_interval
    if data.source in SAMPLE_SOURCES:
        _validate_samples(config)
    blend(data.prefix)
    validation_share = split_shares(data.split)[1]
    refuse(
        data.source == "prefix" and _validates(config) and validation_share == 0,
        ("train.eval_interval", "data.split"),
        f"is {interval}, but data.split {data.split} leaves nothing for validation",
        "raise its second share, or set eval_interval to null",
    )
    refuse(
        data.reset_attention_mask and data.tokenizer is None,
        ("data.reset_attention_mask", "data.tokenizer"),
        "is true, but data.tokenizer, which knows the end-of-document id, is null",
        "set it",
    )
    if data.long_documents is not None:
        _validate_long_documents(config)
    samples = "sample" in config.train.evaluations and config.logging.sample_tokens > 0
    refuse(
        interval is not None and samples and data.tokenizer is None,
        ("logging.sample_tokens", "data.tokenizer"),
        f"is {config.logging.sample_tokens}, but data.tokenizer, which turns samples into text, is null",
        "set it or set sample_tokens to 0",
    )


def _validate_samples(config: RunConfig) -> None:
    """Check a source of samples that stands in place of indexed datasets."""
    data = config.data
    for key, unset in (("long_documents", None), ("reset_attention_mask", False)):
        value = getattr(data, key)
        refuse(
            value != unset,
            (f"data.{key}", f"data.{data.source}"),
            f"is {shown(value)}, but data.{data.source} makes samples that are not cut from documents",
            f"set it to {shown(unset)}",
        )
    if data.source == "generator":
        _validate_generator(config)
    else:
        _validate_examples(config)


def _validate_generator(config: RunConfig) -> None:
    data, model = config.data, config.model
    generator = generator_of(data.generator)
    refuse(
        data.tokenizer is not None,
        ("data.tokenizer", "data.generator"),
        f"is {data.tokenizer}, but data.generator makes tokens that are no text",
        "set it to null",
    )
    refuse(
        generator.vocab_size > model.vocab_size,
        ("data.generator", "model.vocab_size"),
        f"makes {generator.vocab_size} different tokens, but model.vocab_size is {model.vocab_size}",
        "raise it",
    )
    refuse(
        generator.length > model.seq_length + 1,
        ("data.generator", "model.seq_length"),
        f"makes sequences of up to {generator.length} tokens, but model.seq_length is {model.seq_length}",
        f"raise it to at least {generator.length - 1}",
    )


def _validate_examples(config: RunConfig) -> None:
    data, length = config.data, config.model.seq_length
    examples = examples_of(data.examples)
    refuse(
        data.tokenizer is None, ("data.tokenizer", "data.examples"), "is null, but data.examples are texts", "set it"
    )
    refuse(
        examples.target_tokens >= length,
        ("data.examples.target_tokens", "model.seq_length"),
        f"is {examples.target_tokens}, but model.seq_length is {length}",
        "set target_tokens to less",
    )
    refuse(
        _validates(config) and examples.validation is None,
        ("train.eval_interval", "data.examples"),
        f"is {config.train.eval_interval}, but data.examples names no validation file",
        "add the key validation, or set eval_interval to null",
    )


def _validate_long_documents(config: RunConfig) -> None:
    key, setting = "data.long_documents", config.data.long_documents
    fix = "give it the keys minimum and share, such as {minimum: 8192, share: 0.6}"
    refuse(set(setting) != {"minimum", "share"}, key, f"is {shown(setting)}", fix)
    minimum, share = setting["minimum"], setting["share"]
    wrong = not isinstance(minimum, int) or minimum < 1
    refuse(wrong, f"{key}.minimum", f"is {minimum}", "set it to a whole number of tokens, at least 1")
    fix = "set it above 0 and at most to 1, or remove long_documents"
    refuse(not 0 < share <= 1, f"{key}.share", f"is {share}", fix)
    refuse(
        not config.data.reset_attention_mask,
        (key, "data.reset_attention_mask"),
        "is set, but data.reset_attention_mask is false, so that tokens would attend to the documents before their own",
        "set it to true",
    )


def _validate_evaluations(config: RunConfig) -> None:
    _check_names("train.evaluations", config.train.evaluations, tuple(EVALUATIONS))
    build_tasks(config)


def _check_names(key: str, names: list[str], choices: tuple[str, ...]) -> None:
    for name in names:
        refuse(name not in choices, key, f"names {name}", f"choose from {', '.join(choices)}")
        refuse(names.count(name) > 1, key, f"names {name} twice", "remove one")


def _validate_trained_parts(config: RunConfig) -> None:
    model, trains, key = config.model, config.extension.trains, "extension.trains"
    choices = (*TRAINABLE, "all")
    refuse(not trains, key, "is empty", f"choose from {', '.join(choices)}")
    _check_names(key, trains, choices)
    refuse(
        "all" in trains and len(trains) > 1,
        key,
        f"is {shown(trains)}",
        "name all alone, as it includes the others but lora",
    )
    refuse(
        trains == ["output"] and model.tie_embeddings,
        (key, "model.tie_embeddings"),
        "names output alone, but model.tie_embeddings is true, so there is no output layer to train",
        "name embeddings",
    )
    kinds = {OF_ENCODING: "position", "output": "embeddings"}
    of_encoding, scales = _parameters_of_encoding(model), config.optimizer.lr_scale_of
    rates = [scales.get(kinds.get(name, name), 1) for name in trains]
    rates += [scales.get(name, 0) for name in of_encoding if OF_ENCODING in trains]
    refuse(
        not any(rates),
        (key, "optimizer.lr_scale_of"),
        f"is {shown(trains)}, but optimizer.lr_scale_of is 0 for all of that, so nothing would be trained",
        "raise it",
    )
    refuse(
        OF_ENCODING in trains and not of_encoding,
        (key, "model.position_encoding"),
        f"names {OF_ENCODING}, but model.position_encoding {model.position_encoding} has no parameters",
        f"choose another encoding, or leave {OF_ENCODING} out",
    )


def _validate_lora(config: RunConfig) -> None:
    extension, targets = config.extension, config.extension.lora_targets
    refuse(not targets, "extension.lora_targets", "is empty", f"choose from {', '.join(LORA_TARGETS)}")
    _check_names("extension.lora_targets", targets, LORA_TARGETS)
    if not extension.adds_lora:
        for key in ("lora_rank", "lora_alpha", "lora_targets"):
            value = getattr(extension, key)
            refuse(
                value != getattr(ExtensionConfig(), key),
                (f"extension.{key}", "extension.trains"),
                f"is {shown(value)}, but extension.trains is {shown(extension.trains)}, so there are no LoRA layers",
                "add lora to it, or remove the setting",
            )
        return
    for target, widths in lora_widths(config.model).items():
        refuse(
            target in targets and extension.lora_rank > min(widths),
            ("extension.lora_rank", "extension.lora_targets"),
            f"is {extension.lora_rank}, but the projection {target} is only {min(widths)} wide",
            f"choose a smaller rank, or leave {target} out of extension.lora_targets",
        )


def _validate_shifted_sparse(config: RunConfig) -> None:
    model, key = config.model, "extension.attention"
    if config.extension.attention != "shifted_sparse":
        return
    refuse(
        model.seq_length % 8 != 0,
        (key, "model.seq_length"),
        f"is shifted_sparse, but model.seq_length {model.seq_length} is not divisible by 8: a quarter of the sequence "
        "is a segment, and half of it the shift",
        "change the length",
    )
    refuse(
        model.query_groups < 2,
        (key, "model.num_query_groups"),
        "is shifted_sparse, which shifts half of the heads, but all heads of this model share one group of keys",
        "set it to full",
    )
    refuse(
        bool({SCORES, REFLECTIONS} & encoding_of(model).needs),
        (key, "model.position_encoding"),
        f"is shifted_sparse, which cannot be combined with model.position_encoding {model.position_encoding}, whose "
        "scores are computed from whole rows",
        "set it to full",
    )
