"""Reject layouts of processes that a model or a batch cannot have."""

import functools

from megatron_tape.config.schema import RunConfig
from megatron_tape.config.values import format_value, refuse_incompatible
from megatron_tape.errors import refuse
from megatron_tape.position import PositionEncoding, encoding_of

PROCESSES = "the number of processes"
"""What an error is about that no setting causes."""
STAGES = "parallel.pipeline_model_parallel_size"
LARGEST_RUN = 10**11
"""Sequences of a run; an index of more takes longer to build than any run."""


def check_processes(config: RunConfig, processes: int) -> None:
    """Raise ConfigError if `processes` cannot share the run, or lack a rank that `train.profile` names."""
    validate_layout(config, processes)
    highest = max(config.train.profile.ranks)
    problem = f"names {highest}, but the ranks are 0 to {processes - 1}"
    refuse(highest >= processes, "train.profile.ranks", problem, "choose among them")


def validate_layout(config: RunConfig, world_size: int) -> None:
    """Raise ConfigError if `world_size` processes cannot share the model and the batches as `parallel` says."""
    _validate_parallel(config, world_size)
    _validate_batches(config, world_size)
    _validate_pipeline(config, world_size)


def _validate_parallel(config: RunConfig, world_size: int) -> None:
    model, parallel = config.model, config.parallel
    tensor_size, context_size = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    tensor_key, context_key = "parallel.tensor_model_parallel_size", "parallel.context_parallel_size"
    together, sequence_parallel = parallel.ranks_per_stage, parallel.uses_sequence_parallel
    tensor, both = f"{tensor_key} {tensor_size}", f"{tensor_key} {tensor_size} times {context_key} {context_size}"
    joint, joint_keys = (tensor, (tensor_key,)) if context_size == 1 else (both, (tensor_key, context_key))
    refuse(world_size < 1, PROCESSES, f"is {world_size}", "start at least 1")
    stages, all_joint, all_keys = parallel.pipeline_model_parallel_size, joint, joint_keys
    if stages > 1:
        all_joint, all_keys = f"{joint} times {STAGES} {stages}", (*joint_keys, STAGES)
    refuse(
        world_size % parallel.ranks_per_sequence != 0,
        (PROCESSES, *all_keys),
        f"is {world_size}, which is not divisible by {all_joint}",
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
    clash, key = functools.partial(refuse_incompatible, config), "parallel.sequence_parallel"
    clash(tensor_size == 1 and sequence_parallel, f"{key} {tensor_key}", "set it to null", "so nothing can be sharded")
    if tensor_size > 1 and not sequence_parallel:
        fix = f"set {key} to true or null"
        clash(context_size > 1, f"{key} {tensor_key} {context_key}", fix)
        why = "whose parameters work where tokens are sharded"
        sharded = has_whole_parameters(encoding_of(model))
        clash(sharded, f"{key} {tensor_key} model.position_encoding", fix, why)
        clash(model.qk_norm, f"{key} {tensor_key} model.qk_norm", fix, "which adds up the norms' gradients")


def has_whole_parameters(encoding: PositionEncoding) -> bool:
    """Return whether every tensor-parallel rank holds some of an encoding's parameters whole.

    Their gradients come from the rank's own tokens, and are summed over the ranks only under sequence parallelism.
    """
    layers = (encoding.parameters(layer).values() for layer in range(encoding.model.num_layers))
    return any(parameter.head_axis is None for layer in layers for parameter in layer)


def _validate_pipeline(config: RunConfig, world_size: int) -> None:
    model, parallel, clash = config.model, config.parallel, functools.partial(refuse_incompatible, config)
    stages, virtual, layers = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_size, model.num_layers
    virtual_key, layers_key = "parallel.virtual_pipeline_size", "parallel.pipeline_layers"
    if stages == 1:
        clash(virtual > 1, f"{virtual_key} {STAGES}", "set it to 1, or raise the other")
        clash(parallel.pipeline_layers is not None, f"{layers_key} {STAGES}", "set it to null, or raise the other")
        return
    chunks, given = stages * virtual, parallel.pipeline_layers
    problem = f"{stages} stages times {virtual_key} {virtual} do not divide model.num_layers {layers}"
    least = 1 if virtual == 1 else 2
    nearest = [n for n in range(least, layers // virtual + 1) if layers % (n * virtual) == 0] or [1]
    near = min(nearest, key=lambda n: abs(n - stages))
    fix = f"set {STAGES} to {near}, or say in {layers_key} how many layers each of the {chunks} model chunks has"
    refuse(given is None and layers % chunks != 0, (STAGES, virtual_key, "model.num_layers"), problem, fix)
    wrong = given is not None and (len(given) != chunks or min(given, default=0) < 1 or sum(given) != layers)
    fix = f"give {chunks} numbers of at least 1 that add up to model.num_layers {layers}"
    refuse(wrong, (layers_key, STAGES), f"is {format_value(given)}", fix)
    why = "whose stages reduce gradients once a step"
    clash(config.deepspeed.zero_stage > 1, f"deepspeed.zero_stage {STAGES}", "set it to 1", why)
    encoding = encoding_of(model)
    silent = encoding.sends_state(1) and type(encoding).sent_state is PositionEncoding.sent_state
    keys = f"{STAGES} model.position_encoding"
    clash(silent, keys, "set it to 1", "which does not say what it sends (sent_state)")
    sends = {
        encoding.sends_state(layer) for layer in (1, *(chunk.start for chunk in parallel.model_chunks(layers)[1:]))
    }
    clash(len(sends) > 1, keys, "set it to 1", "which sends a state from some layers on only (sends_state)")
    for key, size in config.train.batch_size_keys().items():
        micro_batches = size * parallel.ranks_per_sequence // (world_size * config.train.micro_batch_size)
        problem = f"{size} gives each pipeline {micro_batches} micro-batches"
        few = f"{problem}, fewer than its {stages} stages"
        refuse(micro_batches < stages, (key, STAGES), few, f"raise it to {-(-stages * size // micro_batches)} or more")
        uneven = virtual > 1 and micro_batches % stages != 0
        fix = f"make it a multiple of {stages * size // micro_batches}"
        refuse(uneven, (key, STAGES, virtual_key), f"{problem}, not a multiple of {stages}", fix)


def _validate_batches(config: RunConfig, world_size: int) -> None:
    train, data_size = config.train, world_size // config.parallel.ranks_per_sequence
    why = f"and at most {LARGEST_RUN:,} sequences can be indexed"
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
