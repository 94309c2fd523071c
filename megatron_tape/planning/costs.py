"""What a model and a run cost, calculated from the configuration: parameters, memory per GPU, FLOPs, tokens, disk.

Imports no torch. Memory consists of what stays (weights, gradients and optimizer state, as the ZeRO stages of DeepSpeed
0.19.8 hold them) and what one micro-batch adds. The CUDA context, NCCL's buffers and fragmentation, which take about 6
% more, are not included. Attention is assumed to keep no S x S scores; on GPUs, torch's SDPA may keep them in fp32 with
grouped keys, for which it has no fast kernel. All backends are counted like torch's SDPA, except for the mask of packs,
which only SDPA keeps, and for our kernel, which keeps no rotated queries and keys.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from megatron_tape.config.schema import OF_ENCODING, ExtensionConfig, ModelConfig, RunConfig
from megatron_tape.ops.backends import (
    AVERAGE,
    BIAS,
    GATE,
    HEAD_DIMS,
    POINTWISE,
    REFLECTIONS,
    ROTATION,
    SCORES,
    lacks,
)
from megatron_tape.ops.chunks import chunk_size
from megatron_tape.planning.parameters import (
    lora_targets,
    parameter_count,
    parameters_per_rank,
    remembered,
    trained_parts,
    trains_output,
)
from megatron_tape.position import MicroBatch, PositionEncoding, encoding_of

# DeepSpeed's default of stage3_max_live_parameters.
LIVE_PARAMETERS = 1_000_000_000


@dataclass(frozen=True)
class Activations:
    """Bytes on one GPU from one micro-batch."""

    layers: int
    """What the layers, the embedding and the last norm keep for the backward pass."""
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


@dataclass(frozen=True)
class Estimate:
    """What a run needs; memory is in bytes on the GPU that needs most, and adds up to `peak`."""

    parameters: int
    """Number of parameters of the whole model."""
    trained: int
    """Number of those that are trained."""
    parameters_per_rank: int
    """Those that one tensor-parallel rank computes with, before ZeRO 3 shards them."""
    weights: int
    """Weights in the precision of the run."""
    gradients: int
    """Gradients of the trained parameters, summed over the micro-batches."""
    optimizer: int
    """Adam's two moments of the trained parameters and, except under ZeRO 0, a copy of them, all in fp32."""
    layer_activations: int
    """What the layers keep for the backward pass of one micro-batch."""
    logits: int
    """What the loss keeps."""
    buffers: int
    """ZeRO's reduce buckets and, at stage 3, the weights gathered at any one time."""
    working: int
    """Additional at the peak, in the backward pass or in the optimizer's step."""
    host: int
    """Bytes of pinned host memory per process under offload_optimizer."""
    checkpoint_bytes: int
    """One checkpoint: fp32 weights (without frozen ones, if they are left out) and moments, without the small rest."""
    checkpoints_bytes: int
    """Disk space for the checkpoints kept and one more, as the oldest is removed only after a save; those kept for good
    are counted although the newest may be among them."""
    flops_per_step: int
    """Matmul FLOPs of forward and backward over the global batch; recomputation is not counted."""
    flops_per_gpu: int
    """The same, divided by the processes."""
    tokens_per_step: int
    """Tokens of one optimizer step."""
    tokens: int
    """Tokens of the whole run."""

    @property
    def peak(self) -> int:
        """Bytes on the GPU that needs most."""
        state = self.weights + self.gradients + self.optimizer
        return state + self.layer_activations + self.logits + self.buffers + self.working


def estimate(config: RunConfig, world_size: int) -> Estimate:
    """Estimate a run of `config` on `world_size` processes; `checks.settings.validate` must have accepted both.

    Shifted sparse attention is counted as full attention, although it keeps its outputs once more where layers are not
    recomputed.
    """
    model, train, tensor_size = config.model, config.train, config.parallel.tensor_model_parallel_size
    replicas = world_size // tensor_size
    extension = config.extension
    parts = trained_parts(extension)
    held = parameters_per_rank(model, tensor_size, extension)
    trained = parameters_per_rank(model, tensor_size, extension, parts)
    weights, gradients, optimizer, buffers, copy, step, host = _state(config, held, trained, replicas)
    kept = activations(
        model,
        train.micro_batch_size,
        train.precision,
        train.recompute,
        tensor_size,
        config.parallel.uses_sequence_parallel,
        config.data.reset_attention_mask,
        extension=extension,
        context_size=config.parallel.context_parallel_size,
    )
    # ZeRO 2 takes its buckets at the first gradient, when the logits are gone.
    apart = buffers if config.deepspeed.zero_stage == 2 else 0
    if config.parallel.uses_sequence_parallel and {"matrices", "output"} & {*parts}:
        # Megatron gathers the input of every trained matrix into one buffer, which it keeps.
        gathered = train.micro_batch_size * model.seq_length // config.parallel.context_parallel_size
        buffers += gathered * model.hidden_size * _width(config)
    # When the first bucket is full, what the layers above have kept is gone. A step begins when all activations and
    # most buffers are gone.
    left = 1 - min(1, config.deepspeed.reduce_bucket_size / trained)
    reducing = copy + int(left * (kept.layers + max(0, kept.backward))) - kept.saved
    beside = kept.saved + buffers
    checkpoint = tensor_size * (12 * trained + 4 * (held - trained) * config.checkpoint.frozen)
    tokens_per_step = train.global_batch_size * model.seq_length
    flops_per_step = flops_per_token(model, extension) * tokens_per_step
    return Estimate(
        parameters=parameter_count(model, extension),
        trained=parameter_count(model, extension, parts),
        parameters_per_rank=held,
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        layer_activations=kept.layers,
        logits=kept.logits,
        buffers=buffers,
        working=max(kept.loss - apart, kept.backward, reducing, step - beside),
        host=host,
        checkpoint_bytes=checkpoint,
        checkpoints_bytes=checkpoint * (config.checkpoint.keep + 1 + config.checkpoint.milestones(train.steps)),
        flops_per_step=flops_per_step,
        flops_per_gpu=flops_per_step // world_size,
        tokens_per_step=tokens_per_step,
        tokens=tokens_per_step * train.steps,
    )


class LayerWork(NamedTuple):
    """The multiply-adds of one layer's forward pass for one token of a full sequence."""

    projections: int
    """Attention's projections and the MLP."""
    attention: int
    """Scores, and the average of the values."""
    averages: int
    """The average of the position state, by the same attention map."""
    position: int
    """What else the positional encoding adds."""


@remembered
def layer_works(model: ModelConfig, extension: ExtensionConfig | None = None) -> tuple[LayerWork, ...]:
    """Count the multiply-adds of every layer; a query has `S / 2` keys, the causal mean.

    LoRA layers are not counted, so that `extension` changes nothing.
    """
    return tuple(_layer_work(model, layer) for layer in range(model.num_layers))


def _layer_work(model: ModelConfig, layer: int) -> LayerWork:
    hidden, heads, groups, dim = model.hidden_size, model.num_attention_heads, model.query_groups, model.head_dim
    encoding = encoding_of(model)
    scores = heads * dim * model.seq_length // 2
    projections = hidden * (heads + 2 * groups) * dim + heads * dim * hidden * (1 + model.attention_output_gate)
    averages = scores if AVERAGE in encoding.needs and encoding.updates(layer) else 0
    position = encoding.multiply_adds(layer) - averages
    return LayerWork(projections + 3 * hidden * model.ffn_hidden_size, 2 * scores, averages, position)


def flops_per_token(model: ModelConfig, extension: ExtensionConfig | None = None) -> int:
    """Return the matmul FLOPs of forward and backward for one token of a full sequence.

    A multiply-add counts as two, the backward pass as two forward passes, and a query has `S / 2` keys (the causal
    mean), also where a run extends the context with shifted sparse attention. What the positional encoding and LoRA
    layers add is included; a frozen matrix has no gradient of its own, which saves a third.
    """
    layers = sum(map(sum, layer_works(model)))
    whole = 3 * 2 * (layers + model.hidden_size * model.vocab_size)
    trained = trained_parts(extension)
    frozen = 0 if "matrices" in trained else parameter_count(model, None, {"matrices"})
    frozen += 0 if trains_output(model, extension) else model.hidden_size * model.vocab_size
    return whole - 2 * frozen + 3 * 2 * parameter_count(model, extension, {"lora"})


def activations(
    model: ModelConfig,
    micro_batch_size: int,
    precision: str,
    recompute: str = "none",
    tensor_size: int = 1,
    sequence_parallel: bool = False,
    masked: bool = False,
    fused_norms: bool = True,
    extension: ExtensionConfig | None = None,
    context_size: int = 1,
) -> Activations:
    """Count what one micro-batch keeps on one GPU, tensor by tensor as autograd saves it.

    Even in bf16, attention's log-sums and the norms' scales are in fp32. `masked` adds the
    mask of packed documents. GPUs run RMSNorm with `fused_norms`; without it, as on CPUs, RMSNorm keeps its input and,
    for the gradient of its weight, a normalised copy in fp32. A frozen matrix keeps no input, unless it has LoRA
    layers, as `extension` says.
    """
    width = 4 if precision == "fp32" else 2
    whole_sequences = model.seq_length * micro_batch_size
    tokens = whole_sequences // context_size
    local = tokens // tensor_size if sequence_parallel else tokens
    encoding, batch = encoding_of(model), MicroBatch(whole_sequences, local, width, tensor_size, context_size)
    trained, lora = trained_parts(extension), lora_targets(extension)
    normed = local * model.hidden_size * width
    apart = 8 if "norms" in trained else 4
    norm = local * (model.hidden_size * (2 * width if fused_norms else apart + width) + 4)

    def layer(index: int) -> int:
        only_encoding = not {*trained} - {OF_ENCODING, "output"}
        after_attention = encoding.updates(0) or not encoding.parameters(0)
        if index == 0 and only_encoding and after_attention and not encoding.learns_on_entry(0):
            return encoding.saved_bytes(0, batch)  # what comes before the encoding's update needs no gradient
        moves = ROTATION in encoding.needs and encoding.learns_rotation(index)
        averages = AVERAGE in encoding.needs and encoding.updates(index)
        kept_before = encoding.state_is_learned(index) and (index == 0 or not encoding.updates(index - 1))
        attention = _attention(model, batch, masked, moves, moves and not kept_before, averages, fused_norms)
        mlp = tokens * (3 if "matrices" in trained else 2) * model.ffn_hidden_size // tensor_size * width
        kept = 2 * norm + attention + _averages(model, batch, index) + mlp + encoding.saved_bytes(index, batch)
        if "matrices" not in trained:
            reads = encoding.learns_on_entry(index) or (encoding.reads_hidden_states and encoding.parameters(index))
            kept -= normed * (1 if set("qkv") & lora or reads else 2)
        narrow = tokens * len(lora) * extension.lora_rank * width if lora else 0
        return kept + narrow

    layers = [layer(i) for i in range(model.num_layers)]
    # Sequences share their positions, unless they are packs whose documents have their own.
    states = whole_sequences if masked and encoding.counts_in_documents else model.seq_length
    # What enters a recomputed layer is kept as it is; otherwise, as attention reads it.
    state = encoding.state_size(0) * width if recompute == "none" else encoding.state_bytes(0, width)
    inputs = tokens * 8 + states * state
    # The mask of packs is made once for all layers.
    inputs += whole_sequences * model.seq_length * width if masked and not _tiled(model) else 0
    backward = sum(layers)
    if recompute != "none":
        whole = layers
        selects = recompute == "selective" and keeps_attention(model)
        attended = [_averages(model, batch, i) if selects else 0 for i in range(len(layers))]
        layers = [
            local * (model.hidden_size * width + (encoding.state_bytes(i, width) if _is_new(encoding, i) else 0)) + kept
            for i, kept in enumerate(attended)
        ]
        # Each layer is run again when what those above it kept is gone.
        backward = max(below + layer - kept for below, layer, kept in zip(accumulate(layers), whole, attended))
    # Running a layer backward takes about as much as its MLP keeps, when the logits are gone.
    backward += inputs + tokens * 5 * model.ffn_hidden_size // tensor_size * width
    # Of the last norm's output the loss keeps the gradient.
    kept = sum(layers) + inputs + norm
    of_output = model.vocab_size // tensor_size * model.hidden_size * width if trains_output(model, extension) else 0
    loss = _loss(model, tokens, local, width, tensor_size, of_output)
    backward -= kept + of_output
    return Activations(kept, of_output, loss, backward)


def _loss(model: ModelConfig, tokens: int, local: int, width: int, tensor_size: int, of_output: int) -> int:
    """Return the additional bytes while the loss is computed, which leaves `of_output` bytes of a gradient."""
    vocabulary = model.vocab_size // tensor_size
    chunk = min(tokens, chunk_size(vocabulary))
    logits = chunk * vocabulary * 4
    rounded = chunk * vocabulary * width if width == 2 else 0
    # The gradient is added up over several chunks in fp32, while the next product is in the precision of the run.
    total = 0 if chunk == tokens else 4 * of_output // width
    product = of_output if chunk == tokens or width == 2 else 0
    # Under sequence parallelism the states of all tokens are gathered; otherwise only their gradient is added.
    states = (2 if local < tokens else 1) * tokens * model.hidden_size * width
    return states + total + max(logits + rounded, (rounded or logits) + product) - of_output


def _is_new(encoding: PositionEncoding, layer: int) -> bool:
    """Return whether the layer before `layer` made the state that it is handed."""
    return layer > 0 and (encoding.updates(layer - 1) or encoding.learns_on_entry(layer - 1))


def _tiled(model: ModelConfig) -> bool:
    """Return whether attention needs no mask: with a bias, gates or rows of scores, it is computed in parts."""
    parts = {BIAS, POINTWISE, GATE, SCORES, REFLECTIONS}
    return bool(parts & encoding_of(model).needs) or model.attention_backend == "tiled" or _fused(model)


def _fused(model: ModelConfig) -> bool:
    """Return whether our kernel computes attention, which a GPU chooses where a state is averaged if it can."""
    if model.attention_backend != "auto":
        return model.attention_backend == "triton"
    needs = encoding_of(model).needs
    return AVERAGE in needs and model.head_dim in HEAD_DIMS and not lacks("triton", needs)


def _attention(
    model: ModelConfig,
    batch: MicroBatch,
    masked: bool,
    moves: bool,
    own: bool,
    averages: bool,
    fused_norms: bool,
) -> int:
    """Return the bytes that one layer's attention keeps, without its `_averages`.

    `moves`: the position state needs a gradient, so the rotation keeps its inputs. `own`: it is counted neither with an
    earlier layer nor by the encoding. `averages`: the state is averaged as a second value.
    """
    tokens, width, dim = batch.tokens, batch.width, model.head_dim
    heads, groups = model.num_attention_heads // batch.head_shards, batch.groups(model.query_groups)
    grouped = heads > groups
    projected = heads + 2 * groups
    # Megatron copies queries when it separates them from keys and values.
    exchanged = batch.context_size > 1
    copied = heads if grouped and groups > 1 and (model.qk_norm or not exchanged) else 0
    # The input of the rotation (without one, of attention) is kept only if the rotation needs a gradient.
    # Our kernel always keeps its input and rotates again in the backward pass.
    again = _fused(model)
    read, normed = moves or again, 0
    if model.qk_norm:
        read = fused_norms or width == 4
        # What context ranks get, queries, keys and values, is one tensor.
        normed = projected if exchanged else heads + groups if moves or again else 0
    if again or (ROTATION not in encoding_of(model).needs and not model.qk_norm):
        queries, keys = copied if read or not model.qk_norm else 0, 0
    else:
        queries, keys = heads + (copied if read else 0), groups
    values = groups if own else 0
    if masked and grouped and not _tiled(model):
        # Keys and values are repeated for every head; the projection's output is kept if parts of it are views.
        keys, values = heads, heads + (heads if averages else 0) + (groups if own else 0)
        projected = projected if read or not queries else 0
    widened = 0
    if _by_rows(model) and width == 2:
        # Blocks of rows read copies in fp32.
        projected, queries, keys = (projected, copied, 0) if read else (0, 0, 0)
        widened = 4 * (heads + (3 if averages else 2) * groups) * dim
    # Of the output's gate, its sigmoid and the product.
    gate = 2 * heads if model.attention_output_gate else 0
    # What comes back from the other context ranks is what the output's projection or gate keeps.
    returned = heads if exchanged else 0
    numbers = projected + queries + keys + values + normed + returned + gate
    norms = 0
    if model.qk_norm:
        # Without a fused kernel, a normalised copy in fp32, and one of its input where that is bf16.
        norms = (heads + groups) * (4 + (0 if fused_norms else dim * (4 if width == 4 else 8)))
    return tokens * (numbers * dim * width + widened + norms)


def _averages(model: ModelConfig, batch: MicroBatch, layer: int) -> int:
    """Return the bytes of what one layer's attention returns, and of its log-sums."""
    encoding = encoding_of(model)
    calls = 2 if AVERAGE in encoding.needs and encoding.updates(layer) else 1
    heads = model.num_attention_heads // batch.head_shards
    return batch.tokens * calls * heads * (model.head_dim * batch.width + (0 if _by_rows(model) else 4))


def keeps_attention(model: ModelConfig) -> bool:
    """Return whether selective recomputation keeps what attention returns."""
    return not _by_rows(model) and model.attention_backend != "naive"


def _by_rows(model: ModelConfig) -> bool:
    """Return whether scores come in blocks of whole rows, which keep no log-sums and are always computed again."""
    return bool({SCORES, REFLECTIONS} & encoding_of(model).needs)


def _width(config: RunConfig) -> int:
    return 4 if config.train.precision == "fp32" else 2


def _state(config: RunConfig, held: int, trained: int, replicas: int) -> tuple[int, int, int, int, int, int, int]:
    """Return bytes of weights, gradients, optimizer state, buffers, the copy of a bucket that is sent, the optimizer's
    step, and host memory.
    """
    settings, width, part = config.deepspeed, _width(config), -(-trained // replicas)
    stage, numbers = settings.zero_stage, settings.reduce_bucket_size
    weights = width * (-(-held // replicas) if stage == 3 else held)
    if stage == 0:
        # The step takes square roots of the second moments.
        return weights, 4 * trained, 8 * trained, 0, 0, 4 * trained, 0
    gradients = 4 * (trained if stage == 1 else part)  # bf16 gradients are added up in fp32
    # ZeRO copies the weights even if they already are fp32.
    optimizer = 12 * part
    # What is reduced at once, and a copy in the precision that it is sent in, in which ZeRO 3 collects it already. With
    # `overlap_comm` ZeRO 1 and 2 fill one bucket while they reduce the other.
    sent_width = 2 if settings.communication_precision == "bf16" else 4
    bucket_width = {1: 4, 2: width, 3: sent_width}[stage]
    buffers = bucket_width * numbers * (2 if settings.overlap_comm and stage < 3 else 1)
    copy = sent_width * min(numbers, trained) if sent_width != bucket_width else 0
    if stage == 3 and replicas > 1:
        buffers += width * min(held, LIVE_PARAMETERS)
    # The step takes an fp32 copy of the gradients, which ZeRO 2 in bf16 holds already, and square roots.
    step = (4 if stage == 2 and width == 2 else 8) * part + (bucket_width * numbers if stage == 3 else 0)
    if not settings.offload_optimizer:
        return weights, gradients, optimizer, buffers, copy, step, 0
    if stage == 3:
        return weights, 0, 0, buffers, copy, 0, (12 + 4 + 4) * part
    model, tensor_size = config.model, config.parallel.tensor_model_parallel_size
    largest = width * model.hidden_size * max(model.vocab_size, 2 * model.ffn_hidden_size) // tensor_size
    # On the host: the state, its gradients, weights that are copied back, gradients summed over micro-batches.
    host = (12 + 4 + 2 * width) * part + largest
    return weights, gradients if stage == 1 else 0, 0, buffers + largest, copy, 0, host
