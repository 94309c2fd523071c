"""Check that the section `parallel`, the model, the batch sizes and the number of processes are
compatible.
"""

from megatron_tape.config.schema import RunConfig
from megatron_tape.config.values import format_value
from megatron_tape.errors import ConfigError
from megatron_tape.position import PositionEncoding, encoding_of

PROCESSES = "the number of processes"
"""Subject of errors about the number of processes, which is not a setting."""
TENSOR = "parallel.tensor_model_parallel_size"
CONTEXT = "parallel.context_parallel_size"
PIPELINE = "parallel.pipeline_model_parallel_size"
VIRTUAL = "parallel.virtual_pipeline_size"
LAYERS = "parallel.pipeline_layers"
SEQUENCE = "parallel.sequence_parallel"
ENCODING = "model.position_encoding"
# TENSOR to ENCODING are keys of settings, for the subjects and messages of errors.


def check_processes(config: RunConfig, processes: int) -> None:
    """Raise ConfigError if `processes` processes cannot train the run, or if a rank in
    `train.profile.ranks` does not exist.
    """
    validate_processes(config, processes)

    # A missing rank would silently write no trace.
    highest = max(config.train.profile.ranks)
    if highest >= processes:
        raise ConfigError(
            "train.profile.ranks",
            f"contains {highest}, but the ranks are 0 to {processes - 1}",
            "choose from these ranks",
        )


def validate_layout(config: RunConfig) -> None:
    """Raise ConfigError if the model cannot be divided as in `parallel`, or the batch sizes are
    invalid for any number of processes.
    """
    _validate_batches(config)
    _validate_tensor_and_context(config)
    _validate_sequence_parallel(config)
    _validate_pipeline(config)


def validate_processes(config: RunConfig, processes: int) -> None:
    """Raise ConfigError if the model and the batches cannot be divided over `processes`
    processes.
    """
    parallel = config.parallel
    train = config.train
    pipeline_size = parallel.pipeline_model_parallel_size
    virtual_size = parallel.virtual_pipeline_size

    if processes % parallel.ranks_per_sequence != 0:
        raise ConfigError(
            (PROCESSES, TENSOR, CONTEXT, PIPELINE),
            f"is {processes}, which is not divisible by {parallel.ranks_per_sequence}, the product"
            f" of {TENSOR} {parallel.tensor_model_parallel_size}, {CONTEXT}"
            f" {parallel.context_parallel_size} and {PIPELINE} {pipeline_size}",
            "start another number of processes (torchrun --nproc-per-node), or change a setting",
        )

    data_size = processes // parallel.ranks_per_sequence
    # The number of sequences in one micro-batch of every model replica.
    sequences = train.micro_batch_size * data_size
    for key, batch_size in train.batch_size_keys().items():
        if batch_size % sequences != 0:
            raise ConfigError(
                (key, "train.micro_batch_size"),
                f"{batch_size} is not divisible by train.micro_batch_size {train.micro_batch_size}"
                f" times {data_size} data-parallel processes",
                "change one of them",
            )

        micro_batches = batch_size // sequences
        if micro_batches < pipeline_size:
            raise ConfigError(
                (key, PIPELINE),
                f"is {batch_size}, so that a step has fewer micro-batches ({micro_batches}) than"
                f" the pipeline has stages ({pipeline_size})",
                f"raise it to {pipeline_size * sequences} or more",
            )
        if virtual_size > 1 and micro_batches % pipeline_size != 0:
            raise ConfigError(
                (key, PIPELINE, VIRTUAL),
                f"is {batch_size}, which gives each pipeline {micro_batches} micro-batches, but"
                f" {VIRTUAL} {virtual_size} requires a multiple of {PIPELINE} {pipeline_size}",
                f"make it a multiple of {pipeline_size * sequences}",
            )


def _validate_batches(config: RunConfig) -> None:
    train = config.train

    # All batch sizes of a ramp are multiples of the first one.
    if train.batch_ramp is not None and train.global_batch_size % train.batch_ramp.from_ != 0:
        raise ConfigError(
            ("train.batch_ramp.from", "train.global_batch_size"),
            f"is {train.batch_ramp.from_}, which does not divide train.global_batch_size"
            f" {train.global_batch_size}",
            "change one of them",
        )


def _validate_tensor_and_context(config: RunConfig) -> None:
    model = config.model
    parallel = config.parallel
    tensor_size = parallel.tensor_model_parallel_size
    context_size = parallel.context_parallel_size
    product = f"{TENSOR} {tensor_size} times {CONTEXT} {context_size}"

    # Tensor and context parallelism both shard the heads inside attention.
    if model.num_attention_heads % parallel.ranks_per_pipeline_stage != 0:
        raise ConfigError(
            ("model.num_attention_heads", TENSOR, CONTEXT),
            f"{model.num_attention_heads} is not divisible by {product}",
            "change one of them",
        )
    # Outside attention, they both shard the tokens, tensor parallelism only if it is sequence
    # parallel.
    shards_tokens = context_size > 1 or parallel.uses_sequence_parallel
    if shards_tokens and model.seq_length % parallel.ranks_per_pipeline_stage != 0:
        raise ConfigError(
            ("model.seq_length", TENSOR, CONTEXT),
            f"{model.seq_length} is not divisible by {product}",
            "change one of them",
        )

    # Dimensions of matrices, which only tensor parallelism shards.
    sizes = {
        "model.num_query_groups": model.query_groups,
        "model.ffn_hidden_size": model.ffn_hidden_size,
        "model.vocab_size": model.vocab_size,
    }
    for key, size in sizes.items():
        if size % tensor_size != 0:
            raise ConfigError(
                (key, TENSOR),
                f"{size} is not divisible by {TENSOR} {tensor_size}",
                "change one of them",
            )


def _validate_sequence_parallel(config: RunConfig) -> None:
    """Raise ConfigError if sequence parallelism is enabled without tensor parallelism, or disabled
    although the layout or the model requires it.
    """
    model = config.model
    tensor_size = config.parallel.tensor_model_parallel_size
    context_size = config.parallel.context_parallel_size
    fix = f"set {SEQUENCE} to true or null"

    if tensor_size == 1 and config.parallel.uses_sequence_parallel:
        raise ConfigError(
            (SEQUENCE, TENSOR),
            f"is true, but {TENSOR} is 1, so there are no ranks to shard tokens over",
            f"set {SEQUENCE} to null",
        )
    if tensor_size == 1 or config.parallel.uses_sequence_parallel:
        return

    # From here on, there are tensor-parallel ranks without sequence parallelism, which each of the
    # following cases needs. With context parallelism, `TokenLayout` shards the tokens over the
    # tensor-parallel ranks, too, which is sequence parallelism.
    if context_size > 1:
        raise ConfigError(
            (SEQUENCE, TENSOR, CONTEXT),
            f"is false, but {TENSOR} is {tensor_size} and {CONTEXT} is {context_size}",
            fix,
        )
    if has_replicated_parameters(encoding_of(model)):
        raise ConfigError(
            (SEQUENCE, TENSOR, ENCODING),
            f"is false, but {TENSOR} is {tensor_size} and {ENCODING} is {model.position_encoding},"
            " whose gradients are only summed over ranks with sequence parallelism",
            fix,
        )
    # Each rank normalizes its own heads with a copy of the norms' weights, so the copies have
    # different gradients.
    if model.qk_norm:
        raise ConfigError(
            (SEQUENCE, TENSOR, "model.qk_norm"),
            f"is false, but {TENSOR} is {tensor_size} and model.qk_norm is true, and the gradients"
            " of its norms are only summed over ranks with sequence parallelism",
            fix,
        )


def has_replicated_parameters(encoding: PositionEncoding) -> bool:
    """Return whether tensor-parallel ranks hold copies of a parameter of the encoding.

    Each rank computes the gradient of its copy from its own heads or tokens. Only with sequence
    parallelism are the gradients of copies summed over ranks.
    """
    # With partition_dim None, every rank holds the whole parameter.
    layers = (encoding.parameters(layer).values() for layer in range(encoding.model.num_layers))
    return any(parameter.partition_dim is None for layer in layers for parameter in layer)


def _validate_pipeline(config: RunConfig) -> None:
    parallel = config.parallel
    layers = config.model.num_layers
    pipeline_size = parallel.pipeline_model_parallel_size
    virtual_size = parallel.virtual_pipeline_size
    chunks = pipeline_size * virtual_size
    chunk_sizes = parallel.pipeline_layers

    if pipeline_size == 1:
        if virtual_size > 1:
            raise ConfigError(
                (VIRTUAL, PIPELINE),
                f"is {virtual_size}, but {PIPELINE} is 1",
                f"set {VIRTUAL} to 1, or raise {PIPELINE}",
            )
        if chunk_sizes is not None:
            raise ConfigError(
                (LAYERS, PIPELINE),
                f"is {format_value(chunk_sizes)}, but {PIPELINE} is 1",
                f"set {LAYERS} to null, or raise {PIPELINE}",
            )
        return

    if chunk_sizes is None and layers % chunks != 0:
        # Suggest the largest pipeline size below this one for which the layers can be divided.
        smaller_sizes = [
            size for size in range(1, pipeline_size) if layers % (size * virtual_size) == 0
        ]
        raise ConfigError(
            (PIPELINE, VIRTUAL, "model.num_layers"),
            f"{pipeline_size} times {VIRTUAL} {virtual_size} does not divide model.num_layers"
            f" {layers}",
            f"set {PIPELINE} to {max(smaller_sizes, default=1)}, or set {LAYERS} to the number of"
            f" layers of each of the {chunks} model chunks",
        )
    if chunk_sizes is not None and (
        len(chunk_sizes) != chunks or min(chunk_sizes) < 1 or sum(chunk_sizes) != layers
    ):
        raise ConfigError(
            (LAYERS, PIPELINE),
            f"is {format_value(chunk_sizes)}",
            f"give {chunks} numbers of at least 1 that add up to model.num_layers {layers}",
        )
    if config.deepspeed.zero_stage > 1:
        raise ConfigError(
            ("deepspeed.zero_stage", PIPELINE),
            f"is {config.deepspeed.zero_stage}, but {PIPELINE} is {pipeline_size}, and pipeline"
            " parallelism requires ZeRO 1",
            "set deepspeed.zero_stage to 1",
        )
    _validate_sent_state(config)


def _validate_sent_state(config: RunConfig) -> None:
    """Raise ConfigError if pipeline stages cannot send the encoding's position state to the next
    stage.
    """
    encoding = encoding_of(config.model)
    pipeline_size = config.parallel.pipeline_model_parallel_size
    # Whether layer 1 receives a state from layer 0. The layers with which the stages begin must
    # agree with it (see below): Megatron's messages between stages all have the same shape.
    sends_state = encoding.sends_state(1)

    # The encoding does not define `sent_state` if its method is that of the base class, which only
    # raises an error.
    if sends_state and type(encoding).sent_state is PositionEncoding.sent_state:
        raise ConfigError(
            (PIPELINE, ENCODING),
            f"is {pipeline_size}, but {ENCODING} is {encoding.name}, which has a state but does not"
            " implement PositionEncoding.sent_state",
            f"set {PIPELINE} to 1",
        )
    # All stages exchange messages of the same shape, so either all or none contain a state.
    later_chunks = config.parallel.model_chunks(config.model.num_layers)[1:]
    if any(encoding.sends_state(chunk.start) != sends_state for chunk in later_chunks):
        raise ConfigError(
            (PIPELINE, ENCODING),
            f"is {pipeline_size}, but {ENCODING} is {encoding.name}, which sends a state to only"
            " some of the stages (sends_state)",
            f"set {PIPELINE} to 1",
        )
