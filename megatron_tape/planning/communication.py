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
KINDS = (ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, ALL_REDUCE, BROADCAST, SEND)
"""Kinds of communication. The name of torch's operator begins with the kind, apart from hyphens and
underscores.
"""

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
    sent = Counter()
    if plan.tensor_size > 1:
        sent.update(_layer_traffic(plan))
    sent.update(_all_to_all_traffic(plan))
    if plan.tensor_size > 1 and plan.config.parallel.uses_sequence_parallel:
        if replicated_share is None:
            replicated = replicated_count(plan.model, plan.extension, plan.contents)
            replicated_share = -(-replicated // plan.data_context_size)  # rounded up
        sent[TENSOR, ALL_REDUCE] += 4 * replicated_share  # their summed gradients, in fp32
    if plan.pipeline_size > 1:
        sent.update(_pipeline_traffic(plan))
    if plan.data_context_size > 1:
        sent.update(_zero_traffic(plan))
    return sent


def _layer_traffic(plan: Plan) -> dict[tuple[str, str], int]:
    """Return the bytes that Megatron's layers exchange among the tensor-parallel ranks."""
    layers = len(plan.contents.layers)
    tokens = plan.matrix_tokens * plan.micro_batches
    hidden_states = tokens * plan.model.hidden_size * plan.width

    # Attention and MLP each reduce their output and, in the backward pass, the gradient of their
    # input. The embedding reduces only its output, the output layer only the gradient of its input.
    # The gate of attention's output has its own gradient of attention's input.
    # Recomputation repeats the reductions of outputs.
    layer_sums = layers * (4 + 2 * plan.recomputes)
    gates = layers * plan.model.attention_output_gate
    sums = layer_sums + gates + plan.contents.is_first + plan.contents.is_last
    # The loss reduces the maximum over the vocabulary, the sum of exponentials and the label's
    # logit, in fp32.
    softmax = tokens * plan.contents.is_last * 3 * 4
    if not plan.config.parallel.uses_sequence_parallel:
        return {(TENSOR, ALL_REDUCE): hidden_states * sums + softmax}

    # Sequence parallelism reduce-scatters these sums and gathers inputs, twice if trained weights
    # need a gradient.
    gathers = layer_sums + gates * plan.forward_passes + plan.contents.is_last
    if plan.trains_matrices:
        gathers += layers * 2 + gates
    if plan.contents.is_first and "embeddings" in plan.trained_kinds:
        gathers += 1
    # LoRA gathers the low-rank tensors of q, k and v and reduce-scatters that of o; the backward
    # pass does the reverse.
    low_rank = tokens * plan.extension.lora_rank * plan.width * layers
    qkv_count = len(plan.lora_targets - {"o"})
    o_count = len(plan.lora_targets) - qkv_count
    gathered_by_lora = low_rank * (qkv_count * plan.forward_passes + o_count)
    summed_by_lora = low_rank * (qkv_count + o_count * plan.forward_passes)
    return {
        (TENSOR, ALL_GATHER): hidden_states * gathers + gathered_by_lora,
        (TENSOR, REDUCE_SCATTER): hidden_states * sums + summed_by_lora,
        (TENSOR, ALL_REDUCE): softmax,
    }


def _all_to_all_traffic(plan: Plan) -> dict[tuple[str, str], int]:
    """Return the bytes of the all-to-alls of attention and of the positional encoding.

    Context-parallel ranks exchange q, k and v as one tensor, and the output of attention. All ranks
    that compute the same sequences exchange the encoding's position state.
    """
    model = plan.model
    batch = plan.batch
    # `tokens` are those of the whole micro-batch, `local_tokens` those of a rank outside attention.
    # Inside attention, each of the `head_shards` ranks (tensor- times context-parallel) has all
    # tokens of its heads. Ranks with all heads or all tokens exchange nothing.
    if batch.head_shards == 1 or batch.local_tokens == batch.tokens:
        return {}

    encoding_bytes = 0
    for layer in plan.contents.layers:
        costs = plan.costs[layer]
        encoding_bytes += costs.sent_forward * plan.forward_passes + costs.sent_backward
    encoding_bytes *= plan.micro_batches
    # Without context parallelism, only the encoding exchanges tensors.
    if plan.context_size == 1:
        return {(TENSOR, ALL_TO_ALL): encoding_bytes}

    # Of queries and outputs, a rank sends all its heads; of keys and values, only its groups.
    heads = model.num_attention_heads // batch.head_shards
    sent_heads = 2 * heads + 2 * batch.groups_per_rank(model.query_groups)
    passes = plan.micro_batches * len(plan.contents.layers) * (plan.forward_passes + 1)
    attention_bytes = passes * batch.tokens * sent_heads * model.head_dim * plan.width
    if plan.tensor_size > 1:
        return {(CONTEXT, ALL_TO_ALL): attention_bytes, (SEQUENCE, ALL_TO_ALL): encoding_bytes}
    return {(CONTEXT, ALL_TO_ALL): attention_bytes + encoding_bytes}


def _pipeline_traffic(plan: Plan) -> dict[tuple[str, str], int]:
    """Return the bytes that a pipeline stage sends: outputs of its model chunks, gradients, and a
    tied embedding.
    """
    # Each chunk but the model's last sends its output, and each but the model's first sends the
    # gradient of its input.
    sends = 0
    for chunk in plan.model_chunks:
        sends += (chunk.stop < plan.model.num_layers) + (chunk.start > 0)
    sent = {(PIPELINE, SEND): sends * plan.micro_batches * plan.sent_bytes}

    has_embedding = plan.contents.is_first or plan.contents.is_last
    if plan.model.tie_embeddings and has_embedding and plan.trains_output:
        elements = plan.vocabulary * plan.model.hidden_size
        # The gradient is sent in fp32, the updated weights in the run's precision.
        sent[PIPELINE, BROADCAST] = (4 + plan.width) * elements
    return sent


def _zero_traffic(plan: Plan) -> dict[tuple[str, str], int]:
    """Return the bytes that ZeRO exchanges among the ranks with the same weights."""
    gradients = plan.gradient_width * plan.trained_elements
    # ZeRO 1 averages gradients once per step, ZeRO 2 and 3 after each micro-batch.
    if plan.zero_stage > 1:
        gradients *= plan.micro_batches
    gathered_elements = plan.trained_elements
    if plan.zero_stage == 3:
        # Parameters above the threshold are gathered for each forward pass, and for the backward
        # pass if they were released in between. All others are gathered once, after the step.
        large_elements = 0
        for parameter, count in parameters(plan.model, plan.extension, plan.contents).items():
            size = parameter.shape.elements(plan.tensor_size)
            if size > PERSISTENCE_THRESHOLD:
                large_elements += size * count
        # Between a parameter's use in the forward pass and that in the backward pass, all elements
        # after it in the model are used twice. So it is released in between if these are more than
        # half of REUSE_DISTANCE.
        released_elements = max(0, large_elements - REUSE_DISTANCE // 2)
        gathered_elements = plan.elements + (plan.micro_batches - 1) * large_elements
        gathered_elements += plan.micro_batches * released_elements
    return {(DATA, REDUCE_SCATTER): gradients, (DATA, ALL_GATHER): plan.width * gathered_elements}
