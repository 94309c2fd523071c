"""What a GPU sends and receives in a step, by arithmetic from the configuration alone. Imports no torch."""

from collections import Counter
from collections.abc import Iterator
from math import prod

from megatron_tape.config.schema import ModelConfig, RunConfig
from megatron_tape.costs import parameters_per_rank, replicated_parameters
from megatron_tape.position import MicroBatch, encoding_of

TENSOR, DATA = "tensor parallel", "data parallel"
ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, ALL_TO_ALL = "all-gather", "reduce-scatter", "all-reduce", "all-to-all"

PERSISTENT = 100_000
"""DeepSpeed's default of stage3_param_persistence_threshold: smaller parameters stay whole on every rank."""
REUSED = 1_000_000_000
"""DeepSpeed's default of stage3_max_reuse_distance: numbers between two uses of a parameter that is kept gathered."""


def communication(config: RunConfig, world_size: int) -> dict[tuple[str, str], int]:
    """Return the bytes of a step's collectives on one GPU by group and collective.

    Each counts with the whole tensor, such as what an all-gather returns; single numbers are left out.
    """
    tensor_size = config.parallel.tensor_model_parallel_size
    data_size = world_size // tensor_size
    micro_batches = config.train.global_batch_size // (config.train.micro_batch_size * data_size)
    found: Counter[tuple[str, str]] = Counter()
    if tensor_size > 1:
        for kind, size in _of_a_micro_batch(config, tensor_size).items():
            found[TENSOR, kind] = size * micro_batches
    if data_size > 1:
        for kind, size in _of_zero(config, tensor_size, micro_batches).items():
            found[DATA, kind] = size
    return dict(found)


def _of_a_micro_batch(config: RunConfig, tensor_size: int) -> Counter[str]:
    """Count what Megatron's layers and the positional encoding send among the ranks that share the model."""
    model, width = config.model, 2 if config.train.precision == "bf16" else 4
    tokens = config.train.micro_batch_size * model.seq_length
    hidden, layers, again = tokens * model.hidden_size * width, model.num_layers, config.train.recompute == "full"
    found: Counter[str] = Counter()
    if config.parallel.uses_sequence_parallel:
        # Attention and MLP each gather their input and scatter their output. Backward they do the reverse, and gather
        # the input again for the gradient of the weights, as the output layer does.
        found[ALL_GATHER] = hidden * (layers * (6 + 2 * again) + 3)
        found[REDUCE_SCATTER] = hidden * (layers * (4 + 2 * again) + 2)
        encoding, batch = encoding_of(model), MicroBatch(tokens, tokens // tensor_size, width, tensor_size)
        for layer in range(layers):
            forward, backward = encoding.exchanged_bytes(layer, batch)
            found[ALL_TO_ALL] += forward * (1 + again) + backward
        found[ALL_REDUCE] = 4 * replicated_parameters(model)  # their gradients, in fp32
    else:
        found[ALL_REDUCE] = hidden * (layers * (4 + 2 * again) + 2)
    # Maximum, sum and label's share of the softmax over the vocabulary, in fp32.
    found[ALL_REDUCE] += 3 * 4 * tokens
    return found


def _of_zero(config: RunConfig, tensor_size: int, micro_batches: int) -> Counter[str]:
    """Count what DeepSpeed 0.19.8 sends among the ranks that hold different sequences."""
    stage, width = config.deepspeed.zero_stage, 2 if config.train.precision == "bf16" else 4
    sent = 2 if config.deepspeed.communication_precision == "bf16" else 4
    held = parameters_per_rank(config.model, tensor_size)
    if stage == 3:
        # Large parameters are gathered for each forward pass, and for the backward pass those that were let go before
        # it; small ones after each step.
        large = sum(size for size in _parameter_sizes(config.model, tensor_size) if size > PERSISTENT)
        gathered = micro_batches * (large + max(0, large - REUSED // 2)) + held - large
        return Counter({ALL_GATHER: width * gathered, REDUCE_SCATTER: sent * held * micro_batches})
    found = Counter({ALL_REDUCE: sent * held * (micro_batches if stage == 2 else 1)})
    if stage > 0:
        found[ALL_GATHER] = width * held
    return found


def _parameter_sizes(model: ModelConfig, tensor_size: int) -> Iterator[int]:
    """Yield how many numbers of each matrix a tensor-parallel rank holds."""
    hidden, heads, groups, dim = model.hidden_size, model.num_attention_heads, model.query_groups, model.head_dim
    encoding = encoding_of(model)
    yield from [model.vocab_size * hidden // tensor_size] * (1 if model.tie_embeddings else 2)
    for layer in range(model.num_layers):
        for numbers in ((heads + 2 * groups) * dim, heads * dim, 2 * model.ffn_hidden_size, model.ffn_hidden_size):
            yield numbers * hidden // tensor_size
        for parameter in encoding.parameters(layer).values():
            yield prod(parameter.shape) // (1 if parameter.head_axis is None else tensor_size)
