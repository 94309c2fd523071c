"""Bytes that a GPU sends and receives in a step, calculated from the settings. Imports no torch."""

from collections import Counter

from megatron_tape.planning.parameters import parameters, replicated_count
from megatron_tape.planning.plan import Plan

TENSOR = "tensor parallel"
CONTEXT = "context parallel"
SEQUENCE = "tensor and context parallel"
PIPELINE = "pipeline parallel"
DATA = "data parallel"
"""All ranks with the same weights, context-parallel ranks included, over which ZeRO partitions."""
ALL_GATHER = "all-gather"
REDUCE_SCATTER = "reduce-scatter"
ALL_REDUCE = "all-reduce"
ALL_TO_ALL = "all-to-all"
SEND = "send"
BROADCAST = "broadcast"

PERSISTENCE_THRESHOLD = 100_000
"""DeepSpeed's default of stage3_param_persistence_threshold: parameters with fewer elements are not
partitioned.
"""
REUSE_DISTANCE = 1_000_000_000
"""DeepSpeed's default of stage3_max_reuse_distance: a parameter stays gathered if it is used again
within this many elements."""


def communication(plan: Plan, replicated_share: int | None = None) -> Counter[tuple[str, str]]:
    """Return the bytes of one step's collectives on one GPU, by process group and kind. Scalars are
    not counted.

    A collective counts the bytes of the whole tensor: the output of an all-gather, the input of a
    reduce-scatter. `replicated_share` is the number of elements in this GPU's optimizer partition
    that are replicated over tensor-parallel ranks. It differs between GPUs, because ZeRO 1 and 2
    partition at arbitrary elements; None stands for the mean.
    """
    found = Counter()
    if plan.tensor_size > 1:
        found.update({(TENSOR, kind): size for kind, size in _of_layers(plan).items()})
    found.update(_between_tokens_and_heads(plan))
    if plan.tensor_size > 1 and plan.config.parallel.uses_sequence_parallel:
        if replicated_share is None:
            replicated_share = -(
                -replicated_count(plan.model, plan.extension, plan.contents)
                // plan.data_context_size
            )
        found[TENSOR, ALL_REDUCE] += 4 * replicated_share  # sums their gradients in fp32
    found.update(_between_stages(plan))
    if plan.data_context_size > 1:
        found.update(_of_zero(plan))
    return found


def _of_layers(plan: Plan) -> dict[str, int]:
    """Return the bytes that Megatron's layers exchange among the tensor-parallel ranks."""
    model = plan.model
    layers = len(plan.contents.layers)
    recomputes = plan.recomputes
    tokens = plan.matrix_tokens * plan.micro_batches
    hidden_states = tokens * model.hidden_size * plan.width
    # Attention and MLP each reduce their output and, in the backward pass, the gradient of their
    # input. The embedding reduces only its output, the output layer only the gradient of its input.
    # The gate of attention's output has its own gradient of attention's input.
    gate = layers * model.attention_output_gate
    summed = hidden_states * (
        layers * (4 + 2 * recomputes) + gate + plan.contents.first + plan.contents.last
    )
    # The loss reduces the maximum over the vocabulary, the sum of exponentials and the label's
    # logit, in fp32.
    softmax = tokens * plan.contents.last * 3 * 4
    if not plan.config.parallel.uses_sequence_parallel:
        return {ALL_REDUCE: summed + softmax}
    # Sequence parallelism reduce-scatters these sums and gathers inputs, twice if trained weights
    # need a gradient.
    for_weights = (layers * 2 + gate) * plan.trains_matrices
    embedding = plan.contents.first and "embeddings" in plan.trained_kinds
    gathered = hidden_states * (
        layers * (4 + 2 * recomputes)
        + gate * plan.forward_passes
        + plan.contents.last
        + embedding
        + for_weights
    )
    # LoRA gathers the low-rank tensors of q, k and v and reduce-scatters that of o; the backward
    # pass does the reverse.
    of_qkv = len(plan.lora_targets & {*"qkv"})
    of_o = len(plan.lora_targets & {"o"})
    narrow = tokens * plan.extension.lora_rank * plan.width * layers
    gathered += narrow * (of_qkv * plan.forward_passes + of_o)
    summed += narrow * (of_qkv + of_o * plan.forward_passes)
    return {ALL_GATHER: gathered, REDUCE_SCATTER: summed, ALL_REDUCE: softmax}


def _between_tokens_and_heads(plan: Plan) -> dict[tuple[str, str], int]:
    """Return the bytes of the all-to-alls of attention and of the positional encoding.

    Context-parallel ranks exchange q, k and v as one tensor, and the output of attention. All ranks
    that compute the same sequences exchange the encoding's position state.
    """
    model = plan.model
    batch = plan.batch
    if plan.context_size == 1 and not plan.config.parallel.uses_sequence_parallel:
        return {}
    exchanged = 0
    for layer in plan.contents.layers:
        costs = plan.costs[layer]
        exchanged += plan.micro_batches * (
            costs.sent_forward * plan.forward_passes + costs.sent_backward
        )
    if plan.context_size == 1:
        return {(TENSOR, ALL_TO_ALL): exchanged}
    heads = 2 * (model.num_attention_heads // batch.head_shards + batch.groups(model.query_groups))
    passes = plan.micro_batches * len(plan.contents.layers) * (plan.forward_passes + 1)
    of_attention = passes * batch.tokens * heads * model.head_dim * plan.width
    if plan.tensor_size > 1:
        return {(CONTEXT, ALL_TO_ALL): of_attention, (SEQUENCE, ALL_TO_ALL): exchanged}
    return {(CONTEXT, ALL_TO_ALL): of_attention + exchanged}


def _between_stages(plan: Plan) -> dict[tuple[str, str], int]:
    """Return the bytes that a pipeline stage sends: outputs of its model chunks, gradients, and a
    tied embedding.
    """
    if plan.pipeline_size == 1:
        return {}
    last = plan.model.num_layers
    sends = (
        sum((chunk.stop < last) + (chunk.start > 0) for chunk in plan.model_chunks)
        * plan.micro_batches
    )
    found = {(PIPELINE, SEND): sends * plan.sent_bytes}
    if (
        plan.model.tie_embeddings
        and (plan.contents.first or plan.contents.last)
        and plan.trains_output
    ):
        elements = plan.model.vocab_size // plan.tensor_size * plan.model.hidden_size
        found[PIPELINE, BROADCAST] = (4 + plan.width) * elements
    return found


def _of_zero(plan: Plan) -> Counter[tuple[str, str]]:
    """Return the bytes that ZeRO exchanges among the ranks with the same weights."""
    trained = plan.trained_elements
    stage = plan.zero_stage
    if stage == 3:
        # Parameters above the threshold are gathered for each forward pass, and for the backward
        # pass if they were released in between. All others are gathered once, after the step.
        sizes = (
            (parameter.shape.elements(plan.tensor_size), count)
            for parameter, count in parameters(plan.model, plan.extension, plan.contents).items()
        )
        large = sum(size * count for size, count in sizes if size > PERSISTENCE_THRESHOLD)
        again = (plan.micro_batches - 1) * large + plan.micro_batches * max(
            0, large - REUSE_DISTANCE // 2
        )
        found = Counter(
            {(DATA, REDUCE_SCATTER): plan.gradient_width * trained * plan.micro_batches}
        )
        found[DATA, ALL_GATHER] = plan.width * (plan.elements + again)
        return found
    found = Counter(
        {
            (DATA, REDUCE_SCATTER): plan.gradient_width
            * trained
            * (plan.micro_batches if stage == 2 else 1)
        }
    )
    found[DATA, ALL_GATHER] = plan.width * trained
    return found
