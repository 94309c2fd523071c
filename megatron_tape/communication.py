"""What a GPU sends and receives in a step, by arithmetic from the configuration alone. Imports no torch."""

from collections import Counter

from megatron_tape.config.schema import RunConfig
from megatron_tape.parameters import (
    lora_targets,
    parameters_per_rank,
    replicated_parameters,
    trained_parts,
    trains_output,
    weights,
)
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
    extension, parts = config.extension, trained_parts(config.extension)
    found: Counter[str] = Counter()
    if config.parallel.uses_sequence_parallel:
        # Attention and MLP each gather their input and scatter their output. Backward they do the reverse, and gather
        # the input again for the gradient of the weights, as the output layer does, unless these are frozen.
        inputs = layers * 2 * ("matrices" in parts) + trains_output(model, extension)
        found[ALL_GATHER] = hidden * (layers * (4 + 2 * again) + 1 + ("embeddings" in parts) + inputs)
        found[REDUCE_SCATTER] = hidden * (layers * (4 + 2 * again) + 2)
        # LoRA does the same with its narrow tensors: gathers those of q, k and v, and scatters that of o.
        narrow = tokens * extension.lora_rank * width * layers
        own, whole = len({"o"} & lora_targets(extension)), len({*"qkv"} & lora_targets(extension))
        found[ALL_GATHER] += narrow * (whole * (1 + again) + own)
        found[REDUCE_SCATTER] += narrow * (own * (1 + again) + whole)
        encoding, batch = encoding_of(model), MicroBatch(tokens, tokens // tensor_size, width, tensor_size)
        for layer in range(layers):
            forward, backward = encoding.exchanged_bytes(layer, batch)
            found[ALL_TO_ALL] += forward * (1 + again) + backward
        found[ALL_REDUCE] = 4 * replicated_parameters(model, extension, parts)  # their gradients, in fp32
    else:
        found[ALL_REDUCE] = hidden * (layers * (4 + 2 * again) + 2)
    # Maximum, sum and label's share of the softmax over the vocabulary, in fp32.
    found[ALL_REDUCE] += 3 * 4 * tokens
    return found


def _of_zero(config: RunConfig, tensor_size: int, micro_batches: int) -> Counter[str]:
    """Count what DeepSpeed 0.19.8 sends among the ranks that hold different sequences."""
    stage, width = config.deepspeed.zero_stage, 2 if config.train.precision == "bf16" else 4
    sent = 2 if config.deepspeed.communication_precision == "bf16" else 4
    held = parameters_per_rank(config.model, tensor_size, config.extension)
    trained = parameters_per_rank(config.model, tensor_size, config.extension, trained_parts(config.extension))
    if stage == 3:
        # Large parameters are gathered for each forward pass, and for the backward pass those that were let go before
        # it; small ones after each step.
        sizes = [w.size // (tensor_size if w.is_cut else 1) for w in weights(config.model, config.extension)]
        large = sum(size for size in sizes if size > PERSISTENT)
        gathered = micro_batches * (large + max(0, large - REUSED // 2)) + held - large
        return Counter({ALL_GATHER: width * gathered, REDUCE_SCATTER: sent * trained * micro_batches})
    found = Counter({ALL_REDUCE: sent * trained * (micro_batches if stage == 2 else 1)})
    if stage > 0:
        found[ALL_GATHER] = width * trained
    return found
