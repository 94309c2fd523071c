"""Activation memory of one micro-batch on a GPU, counted tensor by tensor. Imports no torch.

To keep a tensor means to save it for the backward pass. All attention backends are counted like
torch's SDPA, with these exceptions:

- Only `torch`, `torch_wide` and `naive` keep the mask of packed documents.
- The Triton kernel keeps no rotated queries and keys.
- `torch_wide` computes values and position state in one call, and keeps them in one tensor.

The estimate is too low in two cases. With grouped keys, SDPA has no fast kernel and may keep the S
x S scores of a sequence of S tokens in fp32. Shifted sparse attention, which is counted as full
attention, keeps a second copy of its outputs in layers that are not recomputed.
"""

from dataclasses import dataclass
from itertools import accumulate

from megatron_tape.config.schema import ModelConfig
from megatron_tape.ops.backends import AVERAGE, BIAS, GATE, POINTWISE, REFLECTIONS, ROTATION, SCORES
from megatron_tape.ops.chunks import chunk_size
from megatron_tape.planning.plan import CALLED_TWICE, Plan
from megatron_tape.position import encoding_of


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


def activations(plan: Plan, fused_norms: bool = True) -> Activations:
    """Return the activation memory of one GPU on the plan's pipeline stage.

    Attention's log-sum-exp and the norms' scales are in fp32 even in bf16 runs. `fused_norms`:
    whether RMSNorm uses a fused kernel, as on GPUs. Otherwise, as on CPUs, RMSNorm keeps its input
    and, for its weight gradient, a normalized copy in fp32. The input of a frozen matrix is kept
    only if the matrix has LoRA layers.
    """
    model = plan.model
    width = plan.width
    layers = [_layer(plan, layer, fused_norms) for layer in plan.contents.layers]
    inputs = _inputs(plan)
    backward = sum(layers)
    if plan.recomputes:
        recomputed = layers
        keeps = plan.config.train.recompute == "selective" and keeps_attention(model)
        outputs = [
            _attention_outputs(plan, layer) if keeps else 0 for layer in plan.contents.layers
        ]
        layers = [
            _layer_input(plan, layer) + kept for layer, kept in zip(plan.contents.layers, outputs)
        ]
        # Each layer is recomputed after the layers above it have freed their activations.
        backward = max(
            below + layer - kept
            for below, layer, kept in zip(accumulate(layers), recomputed, outputs)
        )
    # The backward pass of a layer needs about as much memory as its MLP keeps; the logits are freed
    # by then.
    backward += inputs + plan.matrix_tokens * 5 * model.ffn_hidden_size // plan.tensor_size * width
    # The loss keeps the gradient of the last norm's output.
    kept = sum(layers) + inputs + (_norm(plan, fused_norms) if plan.contents.last else 0)
    if plan.contents.last:
        output = model.vocab_size // plan.tensor_size * model.hidden_size * width
    else:
        output = 0
    gradient = output if plan.trains_output else 0
    loss = _loss(plan, gradient) if plan.contents.last else 0
    backward -= kept + gradient
    if plan.pipeline_size > 1:
        # A stage keeps the tensor that it receives, and copies of the hidden states and the
        # position state in it. With virtual stages, it also keeps the tensors that it sends.
        received = sum(chunk.start > 0 for chunk in plan.model_chunks) * plan.encoding.sends_state(
            1
        )
        returned = sum(chunk.stop < model.num_layers for chunk in plan.model_chunks) * (
            len(plan.model_chunks) > 1
        )
        kept = int(plan.in_flight * (kept + (received + returned) * plan.sent_bytes)) + _in_transit(
            plan
        )
    return Activations(kept, gradient, loss, backward)


def _in_transit(plan: Plan) -> int:
    """Return the bytes of a pipeline stage's latest output and of the latest gradients that it
    received and sent.
    """
    between = (not plan.contents.last) + (not plan.contents.first)
    gradients = between if plan.micro_batches > plan.in_flight else 0
    return plan.sent_bytes * ((not plan.contents.last) + gradients)


def keeps_attention(model: ModelConfig) -> bool:
    """Return whether selective recomputation keeps the outputs of attention instead of recomputing
    them.
    """
    return not _computes_whole_rows(model) and model.attention_backend != "naive"


def _inputs(plan: Plan) -> int:
    """Return the bytes kept once for all layers: token ids, initial position state and mask of
    packed documents.
    """
    model = plan.model
    encoding = plan.encoding
    width = plan.width
    entering = plan.costs[0]
    packed = plan.config.data.reset_attention_mask
    # All sequences have the same initial state, unless positions restart in each document of a
    # packed sequence.
    if packed and encoding.restarts_in_documents:
        states = plan.batch.tokens
    else:
        states = model.seq_length
    # A recomputed layer keeps its input state in the state's precision; otherwise attention keeps
    # it in the run's.
    if plan.recomputes:
        state = entering.state_bytes(width)
    else:
        state = entering.state * width
    if packed and _needs_mask(plan):
        mask = plan.batch.tokens * model.seq_length * width
    else:
        mask = 0
    return plan.matrix_tokens * 8 + states * state + mask


def _layer_input(plan: Plan, layer: int) -> int:
    """Return the bytes of a recomputed layer's inputs: hidden states, and a state that the previous
    layer changed.
    """
    encoding = plan.encoding
    changed = layer > 0 and (encoding.updates(layer - 1) or encoding.learns_on_entry(layer - 1))
    state = plan.costs[layer].state_bytes(plan.width) if changed else 0
    return plan.batch.local_tokens * (plan.model.hidden_size * plan.width + state)


def _layer(plan: Plan, layer: int, fused_norms: bool) -> int:
    """Return the bytes that a layer keeps if it is not recomputed."""
    model = plan.model
    encoding = plan.encoding
    batch = plan.batch
    trained = plan.trained_kinds
    costs = plan.costs[layer]
    only_encoding = not trained - {"position", "output"}
    after_attention = encoding.updates(0) or not encoding.parameters(0)
    if layer == 0 and only_encoding and after_attention and not encoding.learns_on_entry(0):
        return costs.saved  # operations before the encoding's update need no gradient
    trains_matrices = plan.trains_matrices
    mlp = (
        plan.matrix_tokens
        * (3 if trains_matrices else 2)
        * model.ffn_hidden_size
        // plan.tensor_size
        * plan.width
    )
    attention = _attention(plan, layer, fused_norms) + _attention_outputs(plan, layer)
    kept = 2 * _norm(plan, fused_norms) + attention + mlp + costs.saved
    if not trains_matrices:
        reads = encoding.learns_on_entry(layer) or costs.reads_hidden_states
        inputs_not_kept = 1 if plan.lora_targets & {*"qkv"} or reads else 2
        kept -= inputs_not_kept * batch.local_tokens * model.hidden_size * plan.width
    return (
        kept + plan.matrix_tokens * len(plan.lora_targets) * plan.extension.lora_rank * plan.width
    )


def _norm(plan: Plan, fused: bool) -> int:
    """Return the bytes that one RMSNorm over the hidden states keeps, including its output."""
    unfused = (8 if "norms" in plan.trained_kinds else 4) + plan.width
    return plan.batch.local_tokens * (
        plan.model.hidden_size * (2 * plan.width if fused else unfused) + 4
    )


def _attention(plan: Plan, layer: int, fused_norms: bool) -> int:
    """Return the bytes that one layer's attention keeps, except those of `_attention_outputs`."""
    model = plan.model
    encoding = plan.encoding
    batch = plan.batch
    width = plan.width
    dim = model.head_dim
    groups = batch.groups(model.query_groups)
    heads = model.num_attention_heads // batch.head_shards
    grouped = heads > groups
    exchanged = batch.context_size > 1
    # A rotation that depends on parameters keeps its inputs.
    learned = plan.costs[layer].learns_rotation or encoding.state_is_learned(layer)
    learns_rotation = ROTATION in encoding.needs_in(layer) and learned
    averages_state = AVERAGE in encoding.needs and encoding.updates(layer)
    # The position state is counted here unless an earlier layer or the encoding already keeps it.
    before = next(
        (earlier for earlier in reversed(range(layer)) if encoding.needs_in(earlier)), None
    )
    kept_elsewhere = encoding.state_is_learned(layer) and (
        before is None or not encoding.updates(before)
    )
    states = groups if learns_rotation and not kept_elsewhere else 0
    # The Triton kernel keeps its inputs and repeats the rotation in the backward pass.
    rotates_again = plan.attention.backend == "triton"
    keeps_projection = learns_rotation or rotates_again
    normed = 0
    projected = heads + 2 * groups
    # Megatron copies queries when it separates them from keys and values.
    if grouped and groups > 1 and (model.qk_norm or not exchanged):
        copied = heads
    else:
        copied = 0
    if model.qk_norm:
        # Context-parallel ranks exchange queries, keys and values as one tensor.
        if exchanged:
            normed = projected
        elif keeps_projection:
            normed = heads + groups
        else:
            normed = 0
        keeps_projection = fused_norms or width == 4
    # The rotation's input (or attention's, if there is no rotation) is kept only if the rotation
    # needs a gradient.
    if rotates_again or (ROTATION not in encoding.needs_in(layer) and not model.qk_norm):
        queries = copied if keeps_projection or not model.qk_norm else 0
        keys = 0
    else:
        queries = heads + (copied if keeps_projection else 0)
        keys = groups
    values = states
    widened = 0
    if plan.config.data.reset_attention_mask and grouped and _needs_mask(plan):
        # Keys and values are repeated for every head. The projection's output is kept only if kept
        # tensors view it.
        keys = heads
        values = heads + (heads if averages_state else 0) + states
        projected = projected if keeps_projection or not queries else 0
    if _computes_whole_rows(model) and width == 2:
        # Attention by whole rows of scores converts its inputs to fp32.
        projected, queries, keys = (projected, copied, 0) if keeps_projection else (0, 0, 0)
        widened = 4 * (heads + (3 if averages_state else 2) * groups) * dim
    # The output gate keeps its sigmoid and the product.
    gate = 2 * heads if model.attention_output_gate else 0
    # The output projection or gate keeps the heads' outputs that the other context-parallel ranks
    # return.
    returned = heads if exchanged else 0
    # FlashAttention-4 is assumed where it accepts values and state in one tensor; versions 2 and 3
    # keep less.
    called_once = {"torch_wide": True, "flash_attn": dim in (64, 128) and not grouped}
    if averages_state and called_once.get(plan.attention.backend, False):
        # Values and states are one tensor, and so are their averages; the output projection keeps a
        # copy.
        values = values + 2 * groups
        returned = heads
        if not learns_rotation:
            # The original values, and queries and keys before their rotation, are not kept.
            projected = projected if keeps_projection else 0
            normed = 0
    norms = 0
    if model.qk_norm:
        # Without a fused kernel: a normalized fp32 copy, and an fp32 copy of a bf16 input.
        norms = (heads + groups) * (4 + (0 if fused_norms else dim * (4 if width == 4 else 8)))
    kept_heads = projected + queries + keys + values + normed + returned + gate
    return batch.tokens * (kept_heads * dim * width + widened + norms)


def _attention_outputs(plan: Plan, layer: int) -> int:
    """Return the bytes of the outputs of one layer's attention: averages of values and state, and
    log-sum-exp.
    """
    encoding = plan.encoding
    model = plan.model
    if AVERAGE in encoding.needs and encoding.updates(layer):
        averages = 2
    else:
        averages = 1
    heads = model.num_attention_heads // plan.batch.head_shards
    if _computes_whole_rows(model):
        log_sums = 0
    elif plan.attention.backend in CALLED_TWICE:
        log_sums = averages
    else:
        log_sums = 1
    return plan.batch.tokens * heads * (averages * model.head_dim * plan.width + 4 * log_sums)


def _loss(plan: Plan, gradient: int) -> int:
    """Return the additional bytes while the loss is computed, given the bytes of the output
    weight's `gradient`.
    """
    width = plan.width
    tokens = plan.matrix_tokens
    vocabulary = plan.model.vocab_size // plan.tensor_size
    chunk = min(tokens, chunk_size(vocabulary))
    logits = chunk * vocabulary * 4
    rounded = chunk * vocabulary * width if width == 2 else 0
    # The weight gradient is summed over chunks in fp32; each chunk's gradient has the run's
    # precision.
    total = 0 if chunk == tokens else 4 * gradient // width
    product = gradient if chunk == tokens or width == 2 else 0
    # Sequence parallelism gathers the hidden states of all tokens; otherwise only their gradient is
    # additional.
    states = (
        (2 if plan.batch.local_tokens < tokens else 1) * tokens * plan.model.hidden_size * width
    )
    return states + total + max(logits + rounded, (rounded or logits) + product) - gradient


def _needs_mask(plan: Plan) -> bool:
    """Return whether attention needs a mask tensor for packed documents, rather than masking block
    by block.
    """
    parts = {BIAS, POINTWISE, GATE, SCORES, REFLECTIONS}
    return (
        plan.attention.backend in ("torch", "torch_wide", "naive")
        and not parts & plan.encoding.needs
    )


def _computes_whole_rows(model: ModelConfig) -> bool:
    """Return whether attention computes blocks of whole rows of scores, recomputed in the backward
    pass.
    """
    return bool({SCORES, REFLECTIONS} & encoding_of(model).needs)
