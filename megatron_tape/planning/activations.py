"""Activation memory of one micro-batch on a GPU, counted tensor by tensor. Imports no torch.

To keep a tensor means to save it for the backward pass. All attention backends are counted like
torch's SDPA, with these exceptions:

- Only `torch`, `torch_wide` and `naive` keep masks of packed documents and sliding windows.
- The Triton kernel keeps no rotated queries and keys.
- `torch_wide` and FlashAttention-4 average values and position state in one call, and keep them in
  one tensor, into which the fused update of the state writes its result. FlashAttention-4 keeps the
  keys and this tensor for each query head. It is assumed where it supports such a call; version 2
  keeps less.

The estimate is too low in three cases. With grouped keys, SDPA has no fast kernel and may keep the
S x S scores of a sequence of S tokens in fp32. Shifted sparse attention, which is counted as full
attention, keeps a second copy of its outputs in layers that are not recomputed. A state that is
rescaled after the update (`state_norm`) is kept next to that one tensor.
"""

from dataclasses import dataclass
from itertools import accumulate

from megatron_tape.ops.backends import BIAS, DECAY, GATE, POINTWISE, REFLECTIONS, ROTATION, SCORES
from megatron_tape.ops.backends.table import FLASH_ATTN_4_WIDE
from megatron_tape.ops.chunks import chunk_size
from megatron_tape.planning.plan import CALLED_TWICE, MASKING, Plan


@dataclass(frozen=True)
class Activations:
    """Activation memory of one GPU, in bytes."""

    layers: int
    """Tensors that the layers, the embedding and the last norm keep, of all micro-batches in
    flight.
    """
    output_gradient: int
    """Gradient of the output layer's weight. The forward pass computes it with the loss, and keeps
    no logits.
    """
    loss: int
    """Additional memory while the loss is computed: a chunk of logits, and the output layer's
    gradient in fp32.
    """
    backward: int
    """Additional memory in the backward pass of one layer; negative if it is less than the memory
    freed by then.
    """

    @property
    def saved(self) -> int:
        """Bytes that the forward pass saves for the backward pass."""
        return self.layers + self.output_gradient


def activations(plan: Plan) -> Activations:
    """Return the activation memory of one GPU on the plan's pipeline stage.

    Attention's log-sum-exp and the norms' scales are in fp32 even in bf16 runs. RMSNorm is a fused
    kernel. The input of a frozen matrix is kept only if the matrix has LoRA layers.
    """
    contents = plan.contents
    layer_bytes = [_layer_bytes(plan, layer) for layer in contents.layers]
    shared_inputs = _input_bytes(plan)

    # The backward pass of a layer needs most memory in the MLP: five tensors of the MLP's width.
    # The logits are freed by then.
    backward = shared_inputs + plan.mlp_width * plan.matrix_tokens * 5 * plan.width
    if plan.recomputes:
        outputs = [0 for _ in layer_bytes]
        if plan.keeps_attention:
            outputs = [_attention_output_bytes(plan, layer) for layer in contents.layers]
        # A recomputed layer keeps its inputs and, with selective recomputation, attention's
        # outputs.
        inputs = [_layer_input_bytes(plan, layer) for layer in contents.layers]
        kept_by_layer = [sum(tensors) for tensors in zip(inputs, outputs)]
        # When a layer is recomputed, the tensors that the forward pass kept for it and for the
        # layers below it (the cumulative sum) still exist, and it gets all tensors of a layer that
        # is not recomputed. Attention's outputs that were kept are in both, but exist once.
        moments = zip(accumulate(kept_by_layer), layer_bytes, outputs)
        backward += max(below + layer - output for below, layer, output in moments)
    else:
        kept_by_layer = layer_bytes
        backward += sum(kept_by_layer)

    kept = sum(kept_by_layer) + shared_inputs

    gradient = 0
    loss = 0
    if contents.is_last:
        # The last norm keeps its input. The loss keeps the gradient of the norm's output, which is
        # as large as that output.
        kept += _norm_bytes(plan)
        if plan.trains_output:
            gradient = plan.vocabulary * plan.model.hidden_size * plan.width
        loss = _loss_bytes(plan, gradient)
    # `Activations.backward` is in addition to what the forward pass saves.
    backward -= kept + gradient

    if plan.pipeline_size > 1:
        kept += _bytes_between_chunks(plan)
        # All micro-batches in flight keep these tensors; those in transit exist once.
        kept = int(plan.in_flight * kept) + _bytes_in_transit(plan)
    return Activations(layers=kept, output_gradient=gradient, loss=loss, backward=backward)


def _bytes_between_chunks(plan: Plan) -> int:
    """Return the bytes of tensors between model chunks that a pipeline stage keeps.

    These are the tensors that each chunk receives and, with several chunks, those that they send.
    Copies of hidden states and position state that layers keep of a received tensor count there.
    """
    tensors = 0
    for chunk in plan.model_chunks:
        # Without a position state, the received tensor itself is the input of the first layer, and
        # counts there. Layer 1 stands for all layers that a later chunk may begin with.
        if chunk.start > 0 and plan.encoding.sends_state(1):
            tensors += 1
        if chunk.stop < plan.model.num_layers and len(plan.model_chunks) > 1:
            tensors += 1
    return tensors * plan.sent_bytes


def _bytes_in_transit(plan: Plan) -> int:
    """Return the bytes of the tensors that a pipeline stage is exchanging with its neighbors at the
    peak: its latest output, and the latest gradients that it received and sent.
    """
    has_next = not plan.contents.is_last
    tensors = int(has_next)  # the output
    # If all micro-batches fit into the pipeline at once, no gradients exist yet at the peak.
    if plan.micro_batches > plan.in_flight:
        # The next stage sends the gradient of this stage's output, and the previous stage receives
        # the gradient of this stage's input.
        tensors += has_next + (not plan.contents.is_first)
    return tensors * plan.sent_bytes


def _input_bytes(plan: Plan) -> int:
    """Return the bytes kept once for all layers: token ids, initial position state, phases of
    layers with a window, and masks.
    """
    packed = plan.config.data.reset_attention_mask
    costs = plan.costs[0]  # of layer 0, which the initial state enters
    layers = plan.contents.layers

    token_ids = plan.matrix_tokens * 8  # int64
    # Without recomputation, attention keeps the state in the run's precision. A recomputed layer
    # keeps its input state in the state's own precision.
    state_bytes = costs.state * plan.width
    if plan.recomputes:
        state_bytes = costs.state_bytes(plan.width)

    # All sequences have the same initial state, unless positions restart in each document of a
    # packed sequence.
    distinct_states = plan.model.seq_length
    if packed and plan.encoding.restarts_in_documents:
        distinct_states = plan.batch.tokens

    window_phases = max((plan.costs[layer].window_phases for layer in layers), default=0)

    # One mask of the layers with a window, and one of the others.
    masks = {plan.window_hides_tokens(layer) for layer in layers if _needs_mask(plan, layer)}
    mask_bytes = len(masks) * plan.batch.tokens * plan.model.seq_length * plan.width
    return token_ids + distinct_states * (state_bytes + window_phases) + mask_bytes


def _layer_input_bytes(plan: Plan, layer: int) -> int:
    """Return the bytes of a recomputed layer's inputs: hidden states, and a state that the previous
    layer changed. `_input_bytes` counts a state that is the same in all layers.
    """
    encoding = plan.encoding
    previous = layer - 1
    token_bytes = plan.model.hidden_size * plan.width
    if layer > 0 and (encoding.updates(previous) or encoding.learns_on_entry(previous)):
        token_bytes += plan.costs[layer].state_bytes(plan.width)
    return plan.batch.local_tokens * token_bytes


def _layer_bytes(plan: Plan, layer: int) -> int:
    """Return the bytes that a layer keeps if it is not recomputed."""
    encoding = plan.encoding
    costs = plan.costs[layer]
    # The output layer comes after all layers, so training it needs nothing here.
    trains_only_encoding = not plan.trained_kinds - {"position", "output"}
    learns_after_attention = encoding.updates(0) or not encoding.parameters(0)
    # Operations before the first trained parameter need no gradient, and so keep nothing. These are
    # all operations of layer 0 but the encoding's own, if only the encoding is trained (the output
    # layer may be, too) and has no parameter in layer 0 before the end of attention.
    if (
        layer == 0
        and trains_only_encoding
        and learns_after_attention
        and not encoding.learns_on_entry(0)
    ):
        return costs.saved

    norms = 2 * _norm_bytes(plan)
    attention = _attention_bytes(plan, layer) + _attention_output_bytes(plan, layer)
    mlp_tensors = 2  # gate and up projection
    inputs_not_kept = 0
    if plan.trains_matrices:
        mlp_tensors += 1  # input of the down projection
    else:
        # `_norm_bytes` counts the inputs of attention and of the MLP, which frozen matrices do not
        # keep. Attention's input is still kept if the encoding or LoRA multiplies it by trained
        # parameters.
        reads_input = encoding.learns_on_entry(layer) or costs.reads_hidden_states
        inputs_not_kept = 2
        if reads_input or plan.lora_targets & {*"qkv"}:
            inputs_not_kept = 1
    mlp = plan.matrix_tokens * mlp_tensors * plan.mlp_width * plan.width
    # A LoRA layer keeps the product with its first factor.
    lora = plan.matrix_tokens * len(plan.lora_targets) * plan.extension.lora_rank * plan.width
    hidden_states = plan.batch.local_tokens * plan.model.hidden_size * plan.width
    return norms + attention + mlp + lora + costs.saved - inputs_not_kept * hidden_states


def _norm_bytes(plan: Plan) -> int:
    """Return the bytes that one RMSNorm over the hidden states keeps, including its output."""
    scale = 4  # in fp32, one per token
    # The factor 2 is for the input and the output.
    return plan.batch.local_tokens * (plan.model.hidden_size * 2 * plan.width + scale)


def _attention_bytes(plan: Plan, layer: int) -> int:
    """Return the bytes that a layer's attention keeps, except `_attention_output_bytes`."""
    model = plan.model
    encoding = plan.encoding
    batch = plan.batch
    width = plan.width
    dim = model.head_dim
    groups = batch.groups_per_rank(model.query_groups)
    heads = model.num_attention_heads // batch.head_shards
    grouped = heads > groups  # several heads of queries share keys and values
    has_temperature = model.temperature_scale > 0 and not model.has_positions(layer)
    is_packed = plan.config.data.reset_attention_mask
    exchanges = batch.context_size > 1  # ranks exchange tokens and heads around attention
    rotates = ROTATION in encoding.needs_in(layer)
    # The Triton kernel keeps its inputs and repeats the rotation in the backward pass.
    rotates_again = plan.attention.backend == "triton"
    # A rotation that depends on parameters keeps its inputs.
    learns_rotation = _learns_rotation(plan, layer)
    keeps_projection = learns_rotation or rotates_again

    # The heads that each kept tensor has per token.
    projected = heads + 2 * groups  # output of the projection to queries, keys and values
    normed = 0  # queries and keys after their norms
    # Attention's inputs, if they are not views of these tensors.
    queries = 0
    keys = 0
    values = _value_heads(plan, layer, heads, groups)
    returned = 0  # input of the output projection
    gate = 0
    # Bytes per token of other tensors.
    scales_of_norms = 0
    widened = 0  # inputs in fp32

    if model.qk_norm:
        scales_of_norms = 4 * (heads + groups)
        if exchanges:
            normed = projected  # context-parallel ranks exchange all as one tensor
        elif keeps_projection:
            normed = heads + groups
        # The norm keeps its input.
        keeps_projection = True

    # Megatron copies queries when it separates them from keys and values.
    copied = 0
    if grouped and groups > 1 and (model.qk_norm or not exchanges):
        copied = heads
    # The copies are kept if they are the input of a norm or rotation that keeps its input, or if
    # they are attention's input because there is no rotation.
    if keeps_projection or not rotates:
        queries = copied
    # The product with the temperature replaces the copies.
    if has_temperature and not model.qk_norm:
        queries = heads
    # Attention keeps the queries and keys that the rotation or the norms return.
    if not rotates_again and (rotates or model.qk_norm):
        queries += heads
        keys = groups

    if grouped and _needs_mask(plan, layer):
        # Keys and values are repeated for every head, so they are copies. If queries are copies
        # too, no input of attention is a view of the projection's output.
        if queries and not keeps_projection:
            projected = 0
        keys = heads
        values += heads
        if encoding.averages_state(layer):
            values += heads

    if plan.attention.backend == "flash_attn" and is_packed and batch.tokens > model.seq_length:
        # Concatenating the sequences copies all inputs that are views of the projection's output.
        if not rotates and not model.qk_norm:
            queries = heads
            keys = groups
        values += groups
        if encoding.averages_state(layer):
            values += groups
        if not keeps_projection:
            projected = 0

    if plan.computes_whole_rows and width == 2:
        # Attention by whole rows of scores converts its inputs to fp32, and keeps the results
        # instead of the inputs.
        widened = 4 * (heads + 2 * groups) * dim
        queries = copied
        keys = 0
        if not keeps_projection:
            queries = 0
            projected = 0

    if model.attention_output_gate:
        gate = 2 * heads  # its sigmoid and the product
    if exchanges:
        returned = heads  # the outputs that the other context-parallel ranks return

    if averages_in_one_call(plan, layer):
        if _repeats_groups(plan):
            keys = heads
        if not learns_rotation:
            # The original values, and queries and keys before their rotation, are not kept.
            normed = 0
            if not keeps_projection:
                projected = 0

    kept_heads = projected + normed + queries + keys + values + returned + gate
    return batch.tokens * (kept_heads * dim * width + widened + scales_of_norms)


def _learns_rotation(plan: Plan, layer: int) -> bool:
    """Return whether a layer's rotation of queries and keys depends on parameters."""
    if ROTATION not in plan.encoding.needs_in(layer):
        return False
    return plan.costs[layer].learns_rotation or plan.encoding.state_is_learned(layer)


def _value_heads(plan: Plan, layer: int, heads: int, groups: int) -> int:
    """Return how many heads per token a layer's attention keeps of the position state, and of
    values v and state z as one tensor [v | z].

    A rank has `heads` query heads, and `groups` key/value groups.
    """
    kept = 0
    is_joined = _is_state_joined(plan, layer)
    # A learned rotation keeps its phases, which are as large as the values.
    is_separate = not is_joined and not _is_state_kept_elsewhere(plan, layer)
    if plan.costs[layer].window_phases:
        # `Costs.saved` includes the state in the frequencies of this layer.
        is_separate = False
    if _learns_rotation(plan, layer) and is_separate:
        kept += groups

    if averages_in_one_call(plan, layer):
        kept += 2 * (heads if _repeats_groups(plan) else groups)
    return kept


def _repeats_groups(plan: Plan) -> bool:
    """Return whether one call for [v | z] gets copies of keys and of this tensor for each query
    head.
    """
    model = plan.model
    is_grouped = model.query_groups < model.num_attention_heads
    return is_grouped and plan.attention.backend == "flash_attn"


def _is_state_joined(plan: Plan, layer: int) -> bool:
    """Return whether the previous layer's update wrote the state into [v | z] of this layer, so
    that it is no tensor of its own.
    """
    # The state that enters a model chunk was received or computed there.
    previous = layer - 1
    if previous not in plan.contents.layers or not plan.encoding.updates(previous):
        return False
    # In models with windows, updates write the state into a tensor of its own.
    if plan.model.needs_window:
        return False
    # Activation checkpointing keeps the state for the next layer, and an all-to-all copies it.
    if plan.recomputes or plan.batch.head_shards > 1 or _repeats_groups(plan):
        return False
    return averages_in_one_call(plan, layer)


def averages_in_one_call(plan: Plan, layer: int) -> bool:
    """Return whether one call of a library averages values and position state as one tensor."""
    is_bounded = plan.is_masked(layer) or plan.extension.attention == "shifted_sparse"
    if is_bounded or not plan.encoding.averages_state(layer):
        return False
    if plan.attention.backend == "flash_attn":
        return plan.model.head_dim in FLASH_ATTN_4_WIDE.get(plan.generation, ())
    return plan.attention.backend == "torch_wide"


def _is_state_kept_elsewhere(plan: Plan, layer: int) -> bool:
    """Return whether the encoding or an earlier layer already keeps the position state."""
    encoding = plan.encoding
    if not encoding.state_is_learned(layer):
        return False
    # The nearest earlier layer that reads a state keeps the same tensor, unless that layer then
    # computed a new state.
    for earlier in reversed(range(layer)):
        if encoding.needs_in(earlier):
            return not encoding.updates(earlier)
    # No layer read the state before, so the encoding keeps the state that it made.
    return True


def _attention_output_bytes(plan: Plan, layer: int) -> int:
    """Return the bytes of the outputs of one layer's attention: averages of values and state, and
    log-sum-exp.
    """
    heads = plan.model.num_attention_heads // plan.batch.head_shards
    averages = 1 + plan.encoding.averages_state(layer)
    log_sums = 1
    if plan.computes_whole_rows:
        # The backward pass recomputes whole rows of scores, which needs no log-sum-exp.
        log_sums = 0
    elif plan.attention.backend in CALLED_TWICE and not averages_in_one_call(plan, layer):
        # One for the call with the values, and one for the call with the state.
        log_sums = averages
    return plan.batch.tokens * heads * (averages * plan.model.head_dim * plan.width + 4 * log_sums)


def _loss_bytes(plan: Plan, gradient: int) -> int:
    """Return the additional bytes while the loss is computed. `gradient` are the bytes of the
    output weight's gradient in the run's precision, 0 if it is frozen.
    """
    tokens = plan.matrix_tokens
    chunk = min(tokens, chunk_size(plan.vocabulary, plan.generation))

    hidden_states = tokens * plan.model.hidden_size * plan.width
    if plan.batch.local_tokens < tokens:
        # Sequence parallelism gathers the hidden states of all tokens, in addition to their
        # gradient.
        hidden_states *= 2
    logits = chunk * plan.vocabulary * 4
    bf16_logits = 0
    if plan.width == 2:
        bf16_logits = chunk * plan.vocabulary * 2
    # The weight gradient is summed over chunks in fp32, but each chunk's gradient has the run's
    # precision. In fp32 runs with several chunks, products are added to the sum without a tensor
    # for the chunk's gradient.
    summed_gradient = 0
    if chunk < tokens:
        summed_gradient = 4 * gradient // plan.width
    chunk_gradient = 0
    if chunk == tokens or plan.width == 2:
        chunk_gradient = gradient
    # At first, a chunk has its logits in fp32 and in the run's precision. Later, it has those in
    # the run's precision and its gradient.
    largest = max(logits + bf16_logits, (bf16_logits or logits) + chunk_gradient)
    # The gradient is subtracted, since `Activations.output_gradient` counts it already.
    return hidden_states + summed_gradient + largest - gradient


def _needs_mask(plan: Plan, layer: int) -> bool:
    """Return whether a layer's attention needs a mask tensor for packed documents or a window,
    rather than masking block by block.
    """
    if not plan.is_masked(layer):
        return False
    if plan.attention.backend not in MASKING:
        return False
    # If the encoding has one of these needs, attention has no mask tensor, or is estimated without
    # it.
    return not {BIAS, POINTWISE, GATE, SCORES, REFLECTIONS, DECAY} & plan.encoding.needs
