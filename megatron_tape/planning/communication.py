"""What a GPU sends and receives in a step, by arithmetic from the configuration alone. Imports no torch."""

from collections import Counter
from dataclasses import dataclass

from megatron_tape.config.schema import ExtensionConfig, ModelConfig, RunConfig
from megatron_tape.ops.chunks import chunk_size
from megatron_tape.planning.parameters import (
    lora_targets,
    parameters_per_rank,
    replicated_parameters,
    trained_parts,
    weight_counts,
)
from megatron_tape.position import MicroBatch, encoding_of

TENSOR, CONTEXT, SEQUENCE = "tensor parallel", "context parallel", "tensor and context parallel"
DATA = "data parallel"
"""All ranks that hold the same weights, over which ZeRO partitions, those of other context ranks included."""
ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, ALL_TO_ALL = "all-gather", "reduce-scatter", "all-reduce", "all-to-all"

PERSISTENT = 100_000
"""DeepSpeed's default of stage3_param_persistence_threshold: smaller parameters stay whole on every rank."""
REUSED = 1_000_000_000
"""DeepSpeed's default of stage3_max_reuse_distance: numbers between two uses of a parameter that is kept gathered."""


@dataclass
class Traffic:
    """A step's collectives of one kind in one group, on one GPU. Those of single numbers are left out."""

    bytes: int = 0
    """Of whole tensors: what an all-gather returns, and what a reduce-scatter is given."""
    calls: int | None = 0
    """None: the configuration does not tell."""


def communication(
    config: RunConfig, world_size: int, replicated_share: int | None = None
) -> dict[tuple[str, str], Traffic]:
    """Return a step's collectives on one GPU by group and collective.

    `replicated_share` says how many numbers this GPU's share of the optimizer has of parameters that every
    tensor-parallel rank holds whole. None takes the mean over the GPUs; ZeRO 1 and 2 cut the parameters anywhere.
    """
    tensor_size = config.parallel.tensor_model_parallel_size
    data_size, replicas = world_size // config.parallel.ranks_per_sequence, world_size // tensor_size
    micro_batches = config.train.global_batch_size // (config.train.micro_batch_size * data_size)
    found: dict[tuple[str, str], Traffic] = {}
    if tensor_size > 1:
        for kind, traffic in _of_layers(config, tensor_size, micro_batches).items():
            found[TENSOR, kind] = traffic
    found |= _between_tokens_and_heads(config, micro_batches)
    if tensor_size > 1 and config.parallel.uses_sequence_parallel:
        if replicated_share is None:
            shares = replicas if config.deepspeed.zero_stage > 0 else 1
            parts = trained_parts(config.extension)
            replicated_share = -(-replicated_parameters(config.model, config.extension, parts) // shares)
        found[TENSOR, ALL_REDUCE].bytes += 4 * replicated_share  # the sum of their gradients, in fp32
        found[TENSOR, ALL_REDUCE].calls += replicated_share > 0
    if replicas > 1:
        for kind, size in _of_zero(config, tensor_size, micro_batches).items():
            found[DATA, kind] = Traffic(size, None)
    return found


def _of_layers(config: RunConfig, tensor_size: int, micro_batches: int) -> dict[str, Traffic]:
    """Count what Megatron's layers send among the tensor-parallel ranks."""
    model, width = config.model, 2 if config.train.precision == "bf16" else 4
    tokens = config.train.micro_batch_size * model.seq_length // config.parallel.context_parallel_size
    layers, again = model.num_layers, config.train.recompute != "none"
    extension, parts = config.extension, trained_parts(config.extension)

    def of_hidden_states(calls: int) -> Traffic:
        return Traffic(micro_batches * calls * tokens * model.hidden_size * width, micro_batches * calls)

    # Attention and MLP each add up their output, and backward the gradient of their input; the embedding and the output
    # layer do one of the two. The gate of attention's output has the same input as attention, and gathers it again.
    gate = layers * model.attention_output_gate
    summed = of_hidden_states(layers * (4 + 2 * again) + gate + 2)
    # Of each chunk of the loss, first the softmax's maximum over the vocabulary, then its sum and the label's share, in
    # fp32.
    chunks = -(-tokens // chunk_size(model.vocab_size // tensor_size))
    softmax = Traffic(micro_batches * 3 * 4 * tokens, micro_batches * 2 * chunks)
    if not config.parallel.uses_sequence_parallel:
        return {ALL_REDUCE: Traffic(summed.bytes + softmax.bytes, summed.calls + softmax.calls)}
    # They scatter these sums, and gather their input, for the gradient of weights that are trained a second time.
    again_for_weights = (layers * 2 + gate) * ("matrices" in parts)
    gathered = of_hidden_states(
        layers * (4 + 2 * again) + gate * (1 + again) + 1 + ("embeddings" in parts) + again_for_weights
    )
    # LoRA does the same with its narrow tensors: gathers those of q, k and v together, and scatters that of o.
    own, whole = len({"o"} & lora_targets(extension)), len({*"qkv"} & lora_targets(extension))
    for traffic, of_qkv, of_o in ((gathered, 1 + again, 1), (summed, 1, 1 + again)):
        narrow = tokens * extension.lora_rank * width * layers * micro_batches
        traffic.bytes += narrow * (whole * of_qkv + own * of_o)
        traffic.calls += layers * micro_batches * ((whole > 0) * of_qkv + own * of_o)
    return {ALL_GATHER: gathered, REDUCE_SCATTER: summed, ALL_REDUCE: softmax}


def _between_tokens_and_heads(config: RunConfig, micro_batches: int) -> dict[tuple[str, str], Traffic]:
    """Count the all-to-alls of attention and of the positional encoding.

    Attention sends queries, keys and values together, and its output back, among the context ranks; the encoding sends
    what it has among all ranks that compute the same sequences.
    """
    model, parallel, width = config.model, config.parallel, 2 if config.train.precision == "bf16" else 4
    tensor_size, context_size = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    shards = parallel.ranks_per_sequence
    if context_size == 1 and not parallel.uses_sequence_parallel:
        return {}
    layers, forwards = model.num_layers, 1 + (config.train.recompute != "none")
    tokens = config.train.micro_batch_size * model.seq_length
    encoding, batch = encoding_of(model), MicroBatch(tokens, tokens // shards, width, tensor_size, context_size)
    exchanged = 0
    for layer in range(layers):
        forward, backward = encoding.exchanged_bytes(layer, batch)
        exchanged += forward * forwards + backward
    of_encoding = Traffic(micro_batches * exchanged, None)
    if context_size == 1:
        return {(TENSOR, ALL_TO_ALL): of_encoding}
    heads = 2 * (model.num_attention_heads // shards + batch.groups(model.query_groups))
    calls = micro_batches * layers * (forwards + 1)
    of_attention = Traffic(calls * tokens * heads * model.head_dim * width, 2 * calls)
    if tensor_size > 1:
        return {(CONTEXT, ALL_TO_ALL): of_attention} | ({(SEQUENCE, ALL_TO_ALL): of_encoding} if exchanged else {})
    together = of_attention.bytes + of_encoding.bytes
    return {(CONTEXT, ALL_TO_ALL): Traffic(together, None if exchanged else of_attention.calls)}


def gathered_parameters(
    model: ModelConfig, tensor_size: int, extension: ExtensionConfig | None
) -> list[tuple[int, int]]:
    """Return the sizes on a tensor-parallel rank, and the numbers, of parameters that ZeRO 3 gathers for each pass."""
    found = weight_counts(model, extension).items()
    sizes = ((weight.size // (tensor_size if weight.is_cut else 1), count) for weight, count in found)
    return [(size, count) for size, count in sizes if size > PERSISTENT]


def _of_zero(config: RunConfig, tensor_size: int, micro_batches: int) -> Counter[str]:
    """Count what DeepSpeed 0.19.8 sends among the ranks that hold different sequences."""
    stage, width = config.deepspeed.zero_stage, 2 if config.train.precision == "bf16" else 4
    sent = 2 if config.deepspeed.communication_precision == "bf16" else 4
    held = parameters_per_rank(config.model, tensor_size, config.extension)
    trained = parameters_per_rank(config.model, tensor_size, config.extension, trained_parts(config.extension))
    if stage == 3:
        # Large parameters are gathered for each forward pass, and for the backward pass those that were let go before
        # it; small ones after each step.
        large = sum(size * count for size, count in gathered_parameters(config.model, tensor_size, config.extension))
        gathered = micro_batches * (large + max(0, large - REUSED // 2)) + held - large
        return Counter({ALL_GATHER: width * gathered, REDUCE_SCATTER: sent * trained * micro_batches})
    found = Counter({ALL_REDUCE: sent * trained * (micro_batches if stage == 2 else 1)})
    if stage > 0:
        found[ALL_GATHER] = width * trained
    return found
