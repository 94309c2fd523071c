"""What one micro-batch keeps on a GPU for the backward pass, counted tensor by tensor. Imports no torch.

Attention is assumed to keep no S x S scores; on GPUs, torch's SDPA may keep them in fp32 with grouped keys, for which
it has no fast kernel. All backends are counted like torch's SDPA, except for the mask of packs, which only SDPA keeps,
for our kernel, which keeps no rotated queries and keys, and for one call of SDPA for values and states, which keeps
them in one tensor. Shifted sparse attention is counted as full attention, although it keeps its outputs once more where
layers are not recomputed.
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
    """Bytes on one GPU from one micro-batch, or from those that a pipeline stage has in flight."""

    layers: int
    """What the layers, the embedding and the last norm keep for the backward pass, of all micro-batches in flight."""
    logits: int
    """What the loss keeps: the gradient of the output layer."""
    loss: int
    """Additional while the loss is computed: the logits of a chunk, and the gradient of the output layer in fp32."""
    backward: int
    """Additional in the backward pass, with one layer run backward; below 0 where that is less than what was kept."""

    @property
    def saved(self) -> int:
        """Bytes that a forward pass leaves for the backward pass."""
        return self.layers + self.logits


def activations(plan: Plan, fused_norms: bool = True) -> Activations:
    """Count what one micro-batch keeps on one GPU, as autograd saves it.

    Even in bf16, attention's log-sums and the norms' scales are in fp32. GPUs run RMSNorm with `fused_norms`; without
    it, as on CPUs, RMSNorm keeps its input and, for the gradient of its weight, a normalised copy in fp32. A frozen
    matrix keeps no input, unless it has LoRA layers.
    """
    model, width = plan.model, plan.width
    layers = [_layer(plan, layer, fused_norms) for layer in plan.held.layers]
    inputs = _inputs(plan)
    backward = sum(layers)
    if plan.recomputes:
        whole = layers
        keeps = plan.config.train.recompute == "selective" and keeps_attention(model)
        attended = [_attention_outputs(plan, layer) if keeps else 0 for layer in plan.held.layers]
        layers = [_layer_input(plan, layer) + kept for layer, kept in zip(plan.held.layers, attended)]
        # Each layer is run again when what those above it kept is gone.
        backward = max(below + layer - kept for below, layer, kept in zip(accumulate(layers), whole, attended))
    # Running a layer backward takes about as much as its MLP keeps, when the logits are gone.
    backward += inputs + plan.matrix_tokens * 5 * model.ffn_hidden_size // plan.tensor_size * width
    # Of the last norm's output the loss keeps the gradient.
    kept = sum(layers) + inputs + (_norm(plan, fused_norms) if plan.held.last else 0)
    output = model.vocab_size // plan.tensor_size * model.hidden_size * width if plan.held.last else 0
    gradient = output if plan.trains_output else 0
    loss = _loss(plan, gradient) if plan.held.last else 0
    backward -= kept + gradient
    if plan.stages > 1:
        # What a stage was sent stays, beside the hidden states and the state that are taken out of it; with virtual
        # stages, what it has sent stays, too.
        received = sum(chunk.start > 0 for chunk in plan.model_chunks) * plan.encoding.sends_state(1)
        returned = sum(chunk.stop < model.num_layers for chunk in plan.model_chunks) * (len(plan.model_chunks) > 1)
        kept = int(plan.in_flight * (kept + (received + returned) * plan.sent_bytes)) + _on_their_way(plan)
    return Activations(kept, gradient, loss, backward)


def _on_their_way(plan: Plan) -> int:
    """Return the bytes of what a pipeline stage has returned, and of gradients that it got and sent just before."""
    between = (not plan.held.last) + (not plan.held.first)
    gradients = between if plan.micro_batches > plan.in_flight else 0
    return plan.sent_bytes * ((not plan.held.last) + gradients)


def keeps_attention(model: ModelConfig) -> bool:
    """Return whether selective recomputation keeps what attention returns."""
    return not _computes_whole_rows(model) and model.attention_backend != "naive"


def _inputs(plan: Plan) -> int:
    """Return the bytes that are kept once for all layers: tokens, positions and the mask of packs."""
    model, encoding, width = plan.model, plan.encoding, plan.width
    entering = plan.costs[0]
    packed = plan.config.data.reset_attention_mask
    # Sequences share their positions, unless they are packs whose documents have their own.
    states = plan.batch.tokens if packed and encoding.restarts_in_documents else model.seq_length
    # What enters a recomputed layer is kept as it is; otherwise, as attention reads it.
    state = entering.state_bytes(width) if plan.recomputes else entering.state * width
    mask = plan.batch.tokens * model.seq_length * width if packed and _needs_mask(plan) else 0
    return plan.matrix_tokens * 8 + states * state + mask


def _layer_input(plan: Plan, layer: int) -> int:
    """Return the bytes that a recomputed layer is given: hidden states, and the state if the layer before made it."""
    encoding = plan.encoding
    made = layer > 0 and (encoding.updates(layer - 1) or encoding.learns_on_entry(layer - 1))
    state = plan.costs[layer].state_bytes(plan.width) if made else 0
    return plan.batch.local_tokens * (plan.model.hidden_size * plan.width + state)


def _layer(plan: Plan, layer: int, fused_norms: bool) -> int:
    """Return the bytes that a layer keeps without recomputation."""
    model, encoding, batch, trained = plan.model, plan.encoding, plan.batch, plan.trained_kinds
    costs = plan.costs[layer]
    only_encoding = not trained - {"position", "output"}
    after_attention = encoding.updates(0) or not encoding.parameters(0)
    if layer == 0 and only_encoding and after_attention and not encoding.learns_on_entry(0):
        return costs.saved  # what comes before the encoding's update needs no gradient
    trains_matrices = plan.trains_matrices
    mlp = plan.matrix_tokens * (3 if trains_matrices else 2) * model.ffn_hidden_size // plan.tensor_size * plan.width
    attention = _attention(plan, layer, fused_norms) + _attention_outputs(plan, layer)
    kept = 2 * _norm(plan, fused_norms) + attention + mlp + costs.saved
    if not trains_matrices:
        reads = encoding.learns_on_entry(layer) or costs.reads_hidden_states
        inputs_not_kept = 1 if plan.lora_targets & {*"qkv"} or reads else 2
        kept -= inputs_not_kept * batch.local_tokens * model.hidden_size * plan.width
    return kept + plan.matrix_tokens * len(plan.lora_targets) * plan.extension.lora_rank * plan.width


def _norm(plan: Plan, fused: bool) -> int:
    """Return the bytes that one RMSNorm over the hidden states keeps, its output included."""
    unfused = (8 if "norms" in plan.trained_kinds else 4) + plan.width
    return plan.batch.local_tokens * (plan.model.hidden_size * (2 * plan.width if fused else unfused) + 4)


def _attention(plan: Plan, layer: int, fused_norms: bool) -> int:
    """Return the bytes that one layer's attention keeps, without its outputs."""
    model, encoding, batch, width = plan.model, plan.encoding, plan.batch, plan.width
    dim, groups = model.head_dim, batch.groups(model.query_groups)
    heads = model.num_attention_heads // batch.head_shards
    grouped, exchanged = heads > groups, batch.context_size > 1
    # With a rotation that depends on parameters, the rotation keeps its inputs.
    learned = plan.costs[layer].learns_rotation or encoding.state_is_learned(layer)
    learns_rotation = ROTATION in encoding.needs_in(layer) and learned
    averages_state = AVERAGE in encoding.needs and encoding.updates(layer)
    # The state itself is counted here unless an earlier layer or the encoding keeps it.
    before = next((earlier for earlier in reversed(range(layer)) if encoding.needs_in(earlier)), None)
    kept_elsewhere = encoding.state_is_learned(layer) and (before is None or not encoding.updates(before))
    states = groups if learns_rotation and not kept_elsewhere else 0
    # Our kernel always keeps its input and rotates again in the backward pass.
    rotates_again = plan.attention.backend == "triton"
    keeps_projection, normed = learns_rotation or rotates_again, 0
    projected = heads + 2 * groups
    # Megatron copies queries when it separates them from keys and values.
    copied = heads if grouped and groups > 1 and (model.qk_norm or not exchanged) else 0
    if model.qk_norm:
        # What context ranks get, queries, keys and values, is one tensor.
        normed = projected if exchanged else heads + groups if keeps_projection else 0
        keeps_projection = fused_norms or width == 4
    # The input of the rotation (without one, of attention) is kept only if the rotation needs a gradient.
    if rotates_again or (ROTATION not in encoding.needs_in(layer) and not model.qk_norm):
        queries, keys = copied if keeps_projection or not model.qk_norm else 0, 0
    else:
        queries, keys = heads + (copied if keeps_projection else 0), groups
    values, widened = states, 0
    if plan.config.data.reset_attention_mask and grouped and _needs_mask(plan):
        # Keys and values are repeated for every head; the projection's output is kept if parts of it are views.
        keys, values = heads, heads + (heads if averages_state else 0) + states
        projected = projected if keeps_projection or not queries else 0
    if _computes_whole_rows(model) and width == 2:
        # Blocks of rows read copies in fp32.
        projected, queries, keys = (projected, copied, 0) if keeps_projection else (0, 0, 0)
        widened = 4 * (heads + (3 if averages_state else 2) * groups) * dim
    # Of the output's gate, its sigmoid and the product.
    gate = 2 * heads if model.attention_output_gate else 0
    # What comes back from the other context ranks is what the output's projection or gate keeps.
    returned = heads if exchanged else 0
    # FlashAttention-4 is assumed where it takes [v | z]; versions 2 and 3 keep less.
    called_once = {"torch_wide": True, "flash_attn": dim in (64, 128) and not grouped}
    if averages_state and called_once.get(plan.attention.backend, False):
        # Values and states are one tensor, and so are their averages, of which the output's projection gets a copy.
        values, returned = values + 2 * groups, heads
        if not learns_rotation:
            # Nothing keeps the values that were copied, nor queries and keys before their rotation.
            projected, normed = projected if keeps_projection else 0, 0
    norms = 0
    if model.qk_norm:
        # Without a fused kernel, a normalised copy in fp32, and one of its input where that is bf16.
        norms = (heads + groups) * (4 + (0 if fused_norms else dim * (4 if width == 4 else 8)))
    kept_heads = projected + queries + keys + values + normed + returned + gate
    return batch.tokens * (kept_heads * dim * width + widened + norms)


def _attention_outputs(plan: Plan, layer: int) -> int:
    """Return the bytes of what one layer's attention returns, and of its log-sums."""
    encoding, model = plan.encoding, plan.model
    averages = 2 if AVERAGE in encoding.needs and encoding.updates(layer) else 1
    heads = model.num_attention_heads // plan.batch.head_shards
    log_sums = 0 if _computes_whole_rows(model) else averages if plan.attention.backend in CALLED_TWICE else 1
    return plan.batch.tokens * heads * (averages * model.head_dim * plan.width + 4 * log_sums)


def _loss(plan: Plan, gradient: int) -> int:
    """Return the additional bytes while the loss is computed; `gradient` are those of its weights' gradient."""
    width, tokens = plan.width, plan.matrix_tokens
    vocabulary = plan.model.vocab_size // plan.tensor_size
    chunk = min(tokens, chunk_size(vocabulary))
    logits = chunk * vocabulary * 4
    rounded = chunk * vocabulary * width if width == 2 else 0
    # The gradient is added up over several chunks in fp32, while the next product is in the precision of the run.
    total = 0 if chunk == tokens else 4 * gradient // width
    product = gradient if chunk == tokens or width == 2 else 0
    # Under sequence parallelism the states of all tokens are gathered; otherwise only their gradient is added.
    states = (2 if plan.batch.local_tokens < tokens else 1) * tokens * plan.model.hidden_size * width
    return states + total + max(logits + rounded, (rounded or logits) + product) - gradient


def _needs_mask(plan: Plan) -> bool:
    """Return whether attention masks documents; with a bias, gates or rows of scores, it is computed in parts."""
    parts = {BIAS, POINTWISE, GATE, SCORES, REFLECTIONS}
    return plan.attention.backend in ("torch", "torch_wide", "naive") and not parts & plan.encoding.needs


def _computes_whole_rows(model: ModelConfig) -> bool:
    """Return whether scores come in blocks of whole rows, which keep no log-sums and are always computed again."""
    return bool({SCORES, REFLECTIONS} & encoding_of(model).needs)
