"""How long a training step takes, predicted by phase from counts and a GPU's rates. Imports no torch.

A computing phase takes the larger of its FLOPs over the GPU's rate and its bytes over the bandwidth of the GPU's memory
(a roofline). A backward pass takes twice the FLOPs and bytes of a forward pass; attention's takes 2.5 times the FLOPs,
as it computes the scores again. Phases follow each other; only with `deepspeed.overlap_comm` do averages of gradients,
and ZeRO 3's gathering of weights, run beside computation. Packs and shifted sparse attention count as full attention.

Not predicted: contention between groups or jobs, slower GPUs among many, saves, evaluation, data that comes too late.
"""

from dataclasses import dataclass, fields
from math import ceil
from typing import NamedTuple

from megatron_tape.config.schema import ModelConfig, RunConfig
from megatron_tape.errors import refuse
from megatron_tape.ops.chunks import chunk_size
from megatron_tape.planning.communication import (
    ALL_GATHER,
    CONTEXT,
    DATA,
    REUSED,
    SEQUENCE,
    TENSOR,
    communication,
    gathered_parameters,
)
from megatron_tape.planning.costs import keeps_attention, layer_works
from megatron_tape.planning.hardware import Group, Hardware
from megatron_tape.planning.parameters import (
    parameter_count,
    parameters_per_rank,
    trained_parts,
    trains_output,
    weight_counts,
)
from megatron_tape.position import MicroBatch, PositionEncoding, encoding_of

NORMS, ACTIVATION, HEADS = 10, 5, 2
"""Numbers that the elementwise operations of a layer's forward pass read and write for each token: per hidden unit (two
norms, two residuals), per unit of the MLP (its activation), and per unit of queries, keys and values (rotation)."""
LOGIT_BYTES = 40
"""Bytes read and written for each logit, forward and backward: in bf16 and, several times, in fp32."""
CHUNK_BYTES = 12
"""Bytes read and written to add one chunk's gradient of one weight of the output layer to the fp32 sum."""
GRADIENT_BYTES = 10
"""Bytes read and written to add a micro-batch's bf16 gradient of one parameter to the fp32 sum."""
UPDATE_BYTES = 50
"""Bytes read and written to update one parameter: its gradient is scaled, its norm taken, moments and weight updated
in fp32, and the weight rounded."""
OPERATIONS = 80
"""Operations that the host starts in one layer's forward pass; the backward pass has about as many."""
SLICES = 5
"""Operations of DeepSpeed's ZeRO 3 for each parameter, rank and micro-batch: it cuts and joins gradients rank by rank
(docs/rehearsal.md)."""
GATHERED_AT_ONCE = 500_000_000
"""DeepSpeed's default of allgather_bucket_size, in numbers."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, by phase; what is computed again in the backward pass is a phase of its own."""

    projections: float = 0.0
    """Attention's projections and the MLP."""
    attention: float = 0.0
    """Scores and averages; also that of the position state."""
    position: float = 0.0
    """What else the positional encoding computes, such as TAPE's update."""
    elementwise: float = 0.0
    """Norms, residuals, the MLP's activation, rotations."""
    recomputation: float = 0.0
    loss: float = 0.0
    """The output layer and the cross-entropy."""
    optimizer: float = 0.0
    """Adding up the gradients of micro-batches, and Adam's step."""
    host: float = 0.0
    """Where the GPU waits for the host to start operations, as they are short."""
    tensor_parallel: float = 0.0
    context_parallel: float = 0.0
    zero: float = 0.0
    """Communication that does not run beside computation, by kind."""

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(getattr(self, field.name) for field in fields(self))


class Load(NamedTuple):
    """What one GPU computes of a micro-batch in one phase."""

    forward: float
    """FLOPs of the forward pass."""
    backward: float
    """FLOPs of the backward pass."""
    moved: float
    """Bytes that the forward pass reads and writes; the backward pass does so with twice as many."""

    def seconds(self, rate: float, hardware: Hardware) -> tuple[float, float]:
        """Return the time of the forward and of the backward pass at `rate` FLOP/s."""
        return (
            max(self.forward / rate, self.moved / hardware.memory_bandwidth),
            max(self.backward / rate, 2 * self.moved / hardware.memory_bandwidth),
        )


def step_time(config: RunConfig, world_size: int, hardware: Hardware) -> StepTime:
    """Predict a step of `config`, which `checks.settings.validate` has accepted, on `world_size` GPUs.

    Raises ConfigError for runs in fp32 and with an optimizer on the host, whose rates `hardware` does not have.
    """
    train, stage = config.train, config.deepspeed.zero_stage
    refuse(
        train.precision != "bf16", "train.precision is fp32; step times are only predicted for bf16, so set it to that"
    )
    refuse(
        config.deepspeed.offload_optimizer,
        "deepspeed.offload_optimizer is true; step times are not predicted with the optimizer on the host, so set it "
        "to false",
    )
    micro_batches = _micro_batches(config, world_size)
    taken = {
        phase: load.seconds(hardware.attention if phase == "attention" else hardware.matmul, hardware)
        for phase, load in loads(config).items()
    }
    taken["loss"] = taken["loss"][0], taken["loss"][1] + _bytes_of_chunks(config) / hardware.memory_bandwidth
    again = sum(taken[phase][0] for phase in recomputed_phases(config))
    forward, backward = map(sum, zip(*taken.values()))
    sent = _communication(config, world_size, hardware, micro_batches, forward, backward + again)
    tensor_size = config.parallel.tensor_model_parallel_size
    replicas = world_size // tensor_size
    trained = parameters_per_rank(config.model, tensor_size, config.extension, trained_parts(config.extension))
    updated = trained / (replicas if stage > 0 else 1)
    started = OPERATIONS * config.model.num_layers * (2 + (train.recompute != "none"))
    if stage == 3:
        started += SLICES * replicas * weight_counts(config.model, config.extension).total()
    on_gpu = forward + backward + again + (sent["tensor_parallel"] + sent["context_parallel"]) / micro_batches
    return StepTime(
        **{phase: micro_batches * sum(both) for phase, both in taken.items()},
        recomputation=micro_batches * again,
        optimizer=(GRADIENT_BYTES * trained * micro_batches + UPDATE_BYTES * updated) / hardware.memory_bandwidth,
        host=micro_batches * max(0.0, started * hardware.operation_start - on_gpu),
        **sent,
    )


def recomputed_phases(config: RunConfig) -> tuple[str, ...]:
    """Return the phases whose forward pass the backward pass repeats."""
    if config.train.recompute == "none":
        return ()
    kept = config.train.recompute == "selective" and keeps_attention(config.model)
    return ("projections", *(() if kept else ("attention",)), "position", "elementwise")


def loads(config: RunConfig) -> dict[str, Load]:
    """Return what one GPU computes of one micro-batch, without recomputation, by the computing phases' names."""
    model, parallel, width = config.model, config.parallel, 2 if config.train.precision == "bf16" else 4
    ranks, tensor_size = parallel.ranks_per_sequence, parallel.tensor_model_parallel_size
    all_tokens = config.train.micro_batch_size * model.seq_length
    # A rank multiplies the tokens of its context rank by its part of the matrices. Elsewhere it has its own tokens.
    tokens = all_tokens // parallel.context_parallel_size
    local = tokens // tensor_size if parallel.uses_sequence_parallel else tokens
    hidden, inner = model.hidden_size, model.ffn_hidden_size
    of_heads = model.num_attention_heads * model.head_dim
    projected = of_heads + 2 * model.query_groups * model.head_dim
    encoding = encoding_of(model)
    batch = MicroBatch(all_tokens, local, width, tensor_size, parallel.context_parallel_size)
    works = layer_works(model)
    layers, averaging = len(works), sum(work.averages > 0 for work in works)
    flops = 2 * all_tokens / ranks

    lora = parameter_count(model, config.extension, {"lora"})
    matrices = sum(work.projections for work in works) + lora
    gradients = 2 if "matrices" in trained_parts(config.extension) else 1
    read = layers * hidden * (projected + of_heads + 3 * inner) / tensor_size
    multiplied = layers * tokens * (4 * hidden + (projected + of_heads + 3 * inner) / tensor_size)

    # Forward: scores and every average. Backward: scores again, their gradient for every average, and the gradients of
    # queries, keys and everything averaged.
    scores = sum(work.attention for work in works) / 2
    averages = scores + sum(work.averages for work in works)
    attended = (layers * (projected + of_heads) + averaging * 2 * of_heads) * all_tokens / ranks

    position = sum(work.position for work in works)
    of_encoding = sum(_moved_by_encoding(model, encoding, layer, batch) for layer in range(layers))
    elementwise = layers * (NORMS * local * hidden + tokens / tensor_size * (ACTIVATION * inner + HEADS * projected))

    logits = tokens * model.vocab_size / tensor_size
    product = 2 * logits * hidden
    return {
        "projections": Load(flops * matrices, gradients * flops * matrices, width * (read + multiplied)),
        "attention": Load(flops * (scores + averages), flops * (3 * scores + 2 * averages), width * attended),
        "position": Load(flops * position, 2 * flops * position, of_encoding),
        "elementwise": Load(0, 0, width * elementwise),
        "loss": Load(product, product * (1 + trains_output(model, config.extension)), LOGIT_BYTES * logits / 3),
    }


def _bytes_of_chunks(config: RunConfig) -> float:
    """Return what the loss of a micro-batch reads and writes to add up its chunks' gradients of the output layer."""
    if not trains_output(config.model, config.extension):
        return 0.0
    parallel, vocabulary = config.parallel, config.model.vocab_size // config.parallel.tensor_model_parallel_size
    tokens = config.train.micro_batch_size * config.model.seq_length // parallel.context_parallel_size
    return CHUNK_BYTES * vocabulary * config.model.hidden_size * (ceil(tokens / chunk_size(vocabulary)) - 1)


def product_flops(config: RunConfig, world_size: int) -> float:
    """Return the FLOPs of one GPU's matrix products in a step: of all but attention, recomputation included."""
    found = loads(config)
    again = sum(found[phase].forward for phase in recomputed_phases(config) if phase != "attention")
    once = sum(load.forward + load.backward for phase, load in found.items() if phase != "attention")
    return (once + again) * _micro_batches(config, world_size)


def _micro_batches(config: RunConfig, world_size: int) -> int:
    return config.train.global_batch_size // (
        config.train.micro_batch_size * (world_size // config.parallel.ranks_per_sequence)
    )


def _moved_by_encoding(model: ModelConfig, encoding: PositionEncoding, layer: int, batch: MicroBatch) -> int:
    """Return the bytes that a layer's forward pass reads and writes for its encoding, outside attention.

    They are the states before and after the update, the average, and what is kept for the backward pass.
    """
    if not encoding.parameters(layer):
        return 0
    states = encoding.state_bytes(layer, batch.width) + encoding.updates(layer) * (
        encoding.state_bytes(layer + 1, batch.width) + model.num_attention_heads * model.head_dim * batch.width
    )
    return batch.local_tokens * states + encoding.saved_bytes(layer, batch)


def _communication(
    config: RunConfig, world_size: int, hardware: Hardware, micro_batches: int, forward: float, backward: float
) -> dict[str, float]:
    """Return the seconds of communication that no computation hides, by the names of `StepTime`.

    `forward` and `backward` are the seconds that a micro-batch computes.
    """
    tensor_size, context_size = config.parallel.tensor_model_parallel_size, config.parallel.context_parallel_size
    groups = {
        TENSOR: (Group(tensor_size, 1), "tensor_parallel"),
        CONTEXT: (Group(context_size, tensor_size), "context_parallel"),
        SEQUENCE: (Group(tensor_size * context_size, 1), "context_parallel"),
        DATA: (Group(world_size // tensor_size, tensor_size), "zero"),
    }
    found = {"tensor_parallel": 0.0, "context_parallel": 0.0, "zero": 0.0}
    for (name, kind), traffic in communication(config, world_size).items():
        group, phase = groups[name]
        calls = traffic.calls
        if calls is None and name == DATA:
            calls = _calls_of_zero(config, kind, micro_batches)
        elif calls is None:
            # State and averages, there and back; again where layers are recomputed. In a group of context ranks alone
            # as often queries, keys and values, and attention's output.
            exchanges = 2 if name == CONTEXT else 1
            calls = exchanges * micro_batches * config.model.num_layers * (4 + 2 * (config.train.recompute != "none"))
        seconds = group.seconds(kind, traffic.bytes, calls, hardware)
        if name == DATA and config.deepspeed.overlap_comm:
            seconds -= _hidden(config.deepspeed.zero_stage, kind, seconds, micro_batches, forward, backward)
        found[phase] += seconds
    return found


def _hidden(stage: int, kind: str, seconds: float, micro_batches: int, forward: float, backward: float) -> float:
    """Return how much of ZeRO's communication of one kind runs beside computation, with `overlap_comm`.

    Averages of gradients run beside the backward pass, in stage 1 only beside that of the last micro-batch. Stage 3
    gathers weights beside the forward pass; the others gather them after the update, when nothing is left to compute.
    """
    if kind == ALL_GATHER:
        return min(seconds, micro_batches * forward) if stage == 3 else 0.0
    return min(seconds, (micro_batches if stage > 1 else 1) * backward)


def _calls_of_zero(config: RunConfig, kind: str, micro_batches: int) -> int:
    """Return about how many collectives DeepSpeed's ZeRO makes in a step: by buckets, or matrix by matrix."""
    tensor_size, stage = config.parallel.tensor_model_parallel_size, config.deepspeed.zero_stage
    trained = parameters_per_rank(config.model, tensor_size, config.extension, trained_parts(config.extension))
    if kind != ALL_GATHER:
        return ceil(trained / config.deepspeed.reduce_bucket_size) * (micro_batches if stage > 1 else 1)
    if stage < 3:
        return ceil(trained / GATHERED_AT_ONCE)
    large = gathered_parameters(config.model, tensor_size, config.extension)
    # Most are gathered for the backward pass, too, if not all of them stay.
    passes = 2 if sum(size * count for size, count in large) > REUSED // 2 else 1
    return micro_batches * passes * sum(count for _, count in large)
