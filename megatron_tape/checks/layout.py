"""Check that the number of processes, the section `parallel`, the model and the batch sizes are
compatible.
"""

import functools

from megatron_tape.config.schema import RunConfig
from megatron_tape.config.values import format_value, refuse_incompatible
from megatron_tape.errors import ConfigError
from megatron_tape.position import PositionEncoding, encoding_of
from megatron_tape.text import counted

PROCESSES = "the number of processes"
"""Subject of errors about the number of processes, which is not a setting."""
STAGES = "parallel.pipeline_model_parallel_size"
LARGEST_RUN = 10**11
"""Maximum number of training sequences of a run. Megatron could not build the index of more in a
reasonable time.
"""


def check_processes(config: RunConfig, processes: int) -> None:
    """Raise ConfigError if `processes` processes cannot train the run, or lack a rank in
    `train.profile.ranks`.
    """
    validate_layout(config, processes)
    highest = max(config.train.profile.ranks)
    if highest >= processes:
        raise ConfigError(
            "train.profile.ranks",
            f"contains {highest}, but the ranks are 0 to {processes - 1}",
            "choose from these ranks",
        )


def validate_layout(config: RunConfig, world_size: int) -> None:
    """Raise ConfigError if the model and the batches cannot be divided over `world_size` processes
    as in `parallel`.
    """
    _validate_parallel(config, world_size)
    _validate_batches(config, world_size)
    _validate_pipeline(config, world_size)


def _validate_parallel(config: RunConfig, world_size: int) -> None:
    model = config.model
    parallel = config.parallel
    tensor_size = parallel.tensor_model_parallel_size
    context_size = parallel.context_parallel_size
    tensor_key = "parallel.tensor_model_parallel_size"
    context_key = "parallel.context_parallel_size"
    stage_size = parallel.ranks_per_pipeline_stage
    sequence_parallel = parallel.uses_sequence_parallel
    tensor = f"{tensor_key} {tensor_size}"
    both = f"{tensor_key} {tensor_size} times {context_key} {context_size}"
    stage, stage_keys = (
        (tensor, (tensor_key,)) if context_size == 1 else (both, (tensor_key, context_key))
    )
    if world_size < 1:
        raise ConfigError(PROCESSES, f"is {world_size}", "start at least 1")
    stages = parallel.pipeline_model_parallel_size
    replica = stage
    replica_keys = stage_keys
    if stages > 1:
        replica = f"{stage} times {STAGES} {stages}"
        replica_keys = (*stage_keys, STAGES)
    if world_size % parallel.ranks_per_sequence != 0:
        raise ConfigError(
            (PROCESSES, *replica_keys),
            f"is {world_size}, which is not divisible by {replica}",
            "start another number of processes (torchrun --nproc-per-node), or change the setting",
        )
    for key, size, divisor, keys in (
        ("model.num_attention_heads", model.num_attention_heads, stage_size, stage_keys),
        ("model.num_query_groups", model.query_groups, tensor_size, (tensor_key,)),
        ("model.ffn_hidden_size", model.ffn_hidden_size, tensor_size, (tensor_key,)),
        ("model.vocab_size", model.vocab_size, tensor_size, (tensor_key,)),
        (
            "model.seq_length",
            model.seq_length,
            stage_size if context_size > 1 or sequence_parallel else 1,
            stage_keys,
        ),
    ):
        product = stage if keys == stage_keys else tensor
        if size % divisor != 0:
            raise ConfigError(
                (key, *keys), f"{size} is not divisible by {product}", "change one of them"
            )
    incompatible = functools.partial(refuse_incompatible, config)
    key = "parallel.sequence_parallel"
    why = "so there are no ranks to shard tokens over"
    incompatible(
        tensor_size == 1 and sequence_parallel, f"{key} {tensor_key}", f"set {key} to null", why
    )
    if tensor_size > 1 and not sequence_parallel:
        fix = f"set {key} to true or null"
        incompatible(context_size > 1, f"{key} {tensor_key} {context_key}", fix)
        why = "whose gradients are only summed over ranks with sequence parallelism"
        replicated = has_replicated_parameters(encoding_of(model))
        incompatible(replicated, f"{key} {tensor_key} model.position_encoding", fix, why)
        why = "and the gradients of its norms are only summed over ranks with sequence parallelism"
        incompatible(model.qk_norm, f"{key} {tensor_key} model.qk_norm", fix, why)


def has_replicated_parameters(encoding: PositionEncoding) -> bool:
    """Return whether tensor-parallel ranks hold copies of a parameter of the encoding.

    Each rank computes the gradient of a copy from its own tokens. Gradients of copies are only
    summed over ranks with sequence parallelism.
    """
    layers = (encoding.parameters(layer).values() for layer in range(encoding.model.num_layers))
    return any(parameter.partition_dim is None for layer in layers for parameter in layer)


def _validate_pipeline(config: RunConfig, world_size: int) -> None:
    model = config.model
    parallel = config.parallel
    incompatible = functools.partial(refuse_incompatible, config)
    stages = parallel.pipeline_model_parallel_size
    virtual = parallel.virtual_pipeline_size
    layers = model.num_layers
    virtual_key = "parallel.virtual_pipeline_size"
    layers_key = "parallel.pipeline_layers"
    if stages == 1:
        incompatible(
            virtual > 1, f"{virtual_key} {STAGES}", f"set {virtual_key} to 1, or raise {STAGES}"
        )
        uneven = parallel.pipeline_layers is not None
        incompatible(
            uneven, f"{layers_key} {STAGES}", f"set {layers_key} to null, or raise {STAGES}"
        )
        return
    chunks = stages * virtual
    sizes = parallel.pipeline_layers
    problem = f"{stages} times {virtual_key} {virtual} does not divide model.num_layers {layers}"
    least = 1 if virtual == 1 else 2
    divisors = [n for n in range(least, layers // virtual + 1) if layers % (n * virtual) == 0] or [
        1
    ]
    nearest = min(divisors, key=lambda n: abs(n - stages))
    if sizes is None and layers % chunks != 0:
        raise ConfigError(
            (STAGES, virtual_key, "model.num_layers"),
            problem,
            f"set {STAGES} to {nearest}, or set {layers_key} to the number of layers of each of the"
            f" {chunks} model chunks",
        )
    invalid = sizes is not None and (
        len(sizes) != chunks or min(sizes, default=0) < 1 or sum(sizes) != layers
    )
    if invalid:
        raise ConfigError(
            (layers_key, STAGES),
            f"is {format_value(sizes)}",
            f"give {chunks} numbers of at least 1 that add up to model.num_layers {layers}",
        )
    fix = "set deepspeed.zero_stage to 1"
    why = "and pipeline parallelism requires ZeRO 1"
    incompatible(config.deepspeed.zero_stage > 1, f"deepspeed.zero_stage {STAGES}", fix, why)
    encoding = encoding_of(model)
    undefined = encoding.sends_state(1) and type(encoding).sent_state is PositionEncoding.sent_state
    keys = f"{STAGES} model.position_encoding"
    fix = f"set {STAGES} to 1"
    incompatible(
        undefined, keys, fix, "which has a state but does not implement PositionEncoding.sent_state"
    )
    sends = {
        encoding.sends_state(layer)
        for layer in (1, *(chunk.start for chunk in parallel.model_chunks(layers)[1:]))
    }
    incompatible(
        len(sends) > 1, keys, fix, "which sends a state to only some of the stages (sends_state)"
    )
    for key, size in config.train.batch_size_keys().items():
        micro_batches = (
            size * parallel.ranks_per_sequence // (world_size * config.train.micro_batch_size)
        )
        problem = (
            f"{size} gives each pipeline {counted(micro_batches, 'micro-batch', 'micro-batches')}"
        )
        if micro_batches < stages:
            raise ConfigError(
                (key, STAGES),
                f"{problem}, fewer than its {stages} stages",
                f"raise it to {-(-stages * size // micro_batches)} or more",
            )
        uneven = virtual > 1 and micro_batches % stages != 0
        fix = f"make it a multiple of {stages * size // micro_batches}"
        problem += f", but {virtual_key} {virtual} requires a multiple of {STAGES} {stages}"
        if uneven:
            raise ConfigError((key, STAGES, virtual_key), problem, fix)


def _validate_batches(config: RunConfig, world_size: int) -> None:
    train = config.train
    data_size = world_size // config.parallel.ranks_per_sequence
    why = f"and a run can have at most {LARGEST_RUN:,} sequences (steps times batch size)"
    sequences = train.steps * train.global_batch_size
    fix = "lower one of them"
    refuse_incompatible(
        config, sequences > LARGEST_RUN, "train.steps train.global_batch_size", fix, why
    )
    first = train.batch_ramp.from_ if train.batch_ramp else 1
    problem = f"is {first}, which does not divide train.global_batch_size {train.global_batch_size}"
    uneven = train.global_batch_size % first != 0
    if uneven:
        raise ConfigError(
            ("train.batch_ramp.from", "train.global_batch_size"), problem, "change one of them"
        )
    for key, size in train.batch_size_keys().items():
        if size % (train.micro_batch_size * data_size) != 0:
            raise ConfigError(
                (key, "train.micro_batch_size"),
                f"{size} is not divisible by train.micro_batch_size {train.micro_batch_size} times "
                f"{data_size} data-parallel processes",
                "change one of them",
            )
