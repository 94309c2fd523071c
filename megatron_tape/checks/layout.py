"""Validate the parallel layout: the number of processes against the model and the batch sizes."""

import functools

from megatron_tape.config.schema import RunConfig
from megatron_tape.config.values import format_value, refuse_incompatible
from megatron_tape.errors import refuse
from megatron_tape.position import PositionEncoding, encoding_of

PROCESSES = "the number of processes"
"""Subject of errors about the number of processes, which is not a setting."""
STAGES = "parallel.pipeline_model_parallel_size"
LARGEST_RUN = 10**11
"""Maximum number of sequences of a run. An index of more would take longer to build than the run itself."""


def check_processes(config: RunConfig, processes: int) -> None:
    """Raise ConfigError if the run cannot be divided over `processes`, or `train.profile` names a missing rank."""
    validate_layout(config, processes)
    highest = max(config.train.profile.ranks)
    problem = f"contains {highest}, but the ranks are 0 to {processes - 1}"
    refuse(highest >= processes, "train.profile.ranks", problem, "choose from these ranks")


def validate_layout(config: RunConfig, world_size: int) -> None:
    """Raise ConfigError if `parallel` cannot divide the model and the batches over `world_size` processes."""
    _validate_parallel(config, world_size)
    _validate_batches(config, world_size)
    _validate_pipeline(config, world_size)


def _validate_parallel(config: RunConfig, world_size: int) -> None:
    model, parallel = config.model, config.parallel
    tensor_size, context_size = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    tensor_key, context_key = "parallel.tensor_model_parallel_size", "parallel.context_parallel_size"
    stage_size, sequence_parallel = parallel.ranks_per_stage, parallel.uses_sequence_parallel
    tensor, both = f"{tensor_key} {tensor_size}", f"{tensor_key} {tensor_size} times {context_key} {context_size}"
    stage, stage_keys = (tensor, (tensor_key,)) if context_size == 1 else (both, (tensor_key, context_key))
    refuse(world_size < 1, PROCESSES, f"is {world_size}", "start at least 1")
    stages, replica, replica_keys = parallel.pipeline_model_parallel_size, stage, stage_keys
    if stages > 1:
        replica, replica_keys = f"{stage} times {STAGES} {stages}", (*stage_keys, STAGES)
    refuse(
        world_size % parallel.ranks_per_sequence != 0,
        (PROCESSES, *replica_keys),
        f"is {world_size}, which is not divisible by {replica}",
        "change it (torchrun --nproc-per-node) or the number of processes",
    )
    for key, size, divisor, keys in (
        ("model.num_attention_heads", model.num_attention_heads, stage_size, stage_keys),
        ("model.num_query_groups", model.query_groups, tensor_size, (tensor_key,)),
        ("model.ffn_hidden_size", model.ffn_hidden_size, tensor_size, (tensor_key,)),
        ("model.vocab_size", model.vocab_size, tensor_size, (tensor_key,)),
        ("model.seq_length", model.seq_length, stage_size if context_size > 1 or sequence_parallel else 1, stage_keys),
    ):
        by = stage if keys == stage_keys else tensor
        refuse(size % divisor != 0, (key, *keys), f"{size} is not divisible by {by}", "change either")
    incompatible, key = functools.partial(refuse_incompatible, config), "parallel.sequence_parallel"
    why = "so there is nothing to shard over"
    incompatible(tensor_size == 1 and sequence_parallel, f"{key} {tensor_key}", "set it to null", why)
    if tensor_size > 1 and not sequence_parallel:
        fix = f"set {key} to true or null"
        incompatible(context_size > 1, f"{key} {tensor_key} {context_key}", fix)
        why = "whose parameters require sharded tokens"
        replicated = has_replicated_parameters(encoding_of(model))
        incompatible(replicated, f"{key} {tensor_key} model.position_encoding", fix, why)
        why = "which requires the reduction of the norms' gradients"
        incompatible(model.qk_norm, f"{key} {tensor_key} model.qk_norm", fix, why)


def has_replicated_parameters(encoding: PositionEncoding) -> bool:
    """Return whether some parameters of an encoding are replicated on all tensor-parallel ranks.

    Each rank computes their gradients from its own tokens. They are summed over ranks only with sequence parallelism.
    """
    layers = (encoding.parameters(layer).values() for layer in range(encoding.model.num_layers))
    return any(parameter.head_axis is None for layer in layers for parameter in layer)


def _validate_pipeline(config: RunConfig, world_size: int) -> None:
    model, parallel, incompatible = config.model, config.parallel, functools.partial(refuse_incompatible, config)
    stages, virtual, layers = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_size, model.num_layers
    virtual_key, layers_key = "parallel.virtual_pipeline_size", "parallel.pipeline_layers"
    if stages == 1:
        incompatible(virtual > 1, f"{virtual_key} {STAGES}", f"set it to 1, or raise {STAGES}")
        uneven = parallel.pipeline_layers is not None
        incompatible(uneven, f"{layers_key} {STAGES}", f"set it to null, or raise {STAGES}")
        return
    chunks, given = stages * virtual, parallel.pipeline_layers
    problem = f"{stages} times {virtual_key} {virtual} does not divide model.num_layers {layers}"
    least = 1 if virtual == 1 else 2
    nearest = [n for n in range(least, layers // virtual + 1) if layers % (n * virtual) == 0] or [1]
    near = min(nearest, key=lambda n: abs(n - stages))
    fix = f"set {STAGES} to {near}, or set {layers_key} to the number of layers of each of the {chunks} model chunks"
    refuse(given is None and layers % chunks != 0, (STAGES, virtual_key, "model.num_layers"), problem, fix)
    wrong = given is not None and (len(given) != chunks or min(given, default=0) < 1 or sum(given) != layers)
    fix = f"give {chunks} numbers of at least 1 that add up to model.num_layers {layers}"
    refuse(wrong, (layers_key, STAGES), f"is {format_value(given)}", fix)
    why = "and pipeline parallelism reduces gradients once per step"
    incompatible(config.deepspeed.zero_stage > 1, f"deepspeed.zero_stage {STAGES}", "set it to 1", why)
    encoding = encoding_of(model)
    undefined = encoding.sends_state(1) and type(encoding).sent_state is PositionEncoding.sent_state
    keys = f"{STAGES} model.position_encoding"
    incompatible(undefined, keys, "set it to 1", "which does not define sent_state")
    sends = {
        encoding.sends_state(layer) for layer in (1, *(chunk.start for chunk in parallel.model_chunks(layers)[1:]))
    }
    incompatible(len(sends) > 1, keys, "set it to 1", "which sends a state from some layers only (sends_state)")
    for key, size in config.train.batch_size_keys().items():
        micro_batches = size * parallel.ranks_per_sequence // (world_size * config.train.micro_batch_size)
        problem = f"{size} gives each pipeline {micro_batches} micro-batches"
        fix = f"raise it to {-(-stages * size // micro_batches)} or more"
        refuse(micro_batches < stages, (key, STAGES), f"{problem}, fewer than its {stages} stages", fix)
        uneven = virtual > 1 and micro_batches % stages != 0
        fix = f"make it a multiple of {stages * size // micro_batches}"
        refuse(uneven, (key, STAGES, virtual_key), f"{problem}, not a multiple of {stages}", fix)


def _validate_batches(config: RunConfig, world_size: int) -> None:
    train, data_size = config.train, world_size // config.parallel.ranks_per_sequence
    why = f"and a run has at most {LARGEST_RUN:,} sequences"
    sequences = train.steps * train.global_batch_size
    refuse_incompatible(config, sequences > LARGEST_RUN, "train.steps train.global_batch_size", "lower either", why)
    first = train.batch_ramp.from_ if train.batch_ramp else 1
    problem = f"is {first}, which does not divide train.global_batch_size {train.global_batch_size}"
    uneven = train.global_batch_size % first != 0
    refuse(uneven, ("train.batch_ramp.from", "train.global_batch_size"), problem, "change either")
    for key, size in train.batch_size_keys().items():
        refuse(
            size % (train.micro_batch_size * data_size) != 0,
            (key, "train.micro_batch_size"),
            f"{size} is not divisible by train.micro_batch_size {train.micro_batch_size} times "
            f"{data_size} data-parallel processes",
            "change either",
        )
