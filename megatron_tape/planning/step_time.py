"""How long a training step takes, predicted by phase from counts and a GPU's rates. Imports no torch.

A computing phase takes the larger of its FLOPs over the GPU's rate and its bytes over the bandwidth of the GPU's memory
(a roofline). A backward pass takes twice the FLOPs and bytes of a forward pass; attention's takes more, depending on
the backend (`flops.attention_products`), and our kernel of attention has a rate of its own. Phases follow each other;
only averages of gradients, and ZeRO 3's gathering of weights, run beside computation, unless `deepspeed.overlap_comm`
is false. Packs and shifted sparse attention count as full attention.

Not predicted: contention between groups or jobs, slower GPUs among many, saves, evaluation, data that comes too late.
"""

from dataclasses import dataclass, fields
from math import ceil

from megatron_tape.errors import refuse
from megatron_tape.ops.chunks import chunk_size
from megatron_tape.planning.communication import (
    ALL_GATHER,
    CONTEXT,
    DATA,
    NODE,
    PIPELINE,
    REUSE_DISTANCE,
    SEQUENCE,
    TENSOR,
    communication,
    gathered_parameters,
)
from megatron_tape.planning.flops import Load, loads, recomputed_phases
from megatron_tape.planning.hardware import Group, Hardware
from megatron_tape.planning.parameters import parameters
from megatron_tape.planning.plan import Plan

CHUNK_BYTES = 12
"""Bytes read and written to add one chunk's gradient of one weight of the output layer to the fp32 sum."""
GRADIENT_BYTES = 10
"""Bytes read and written to add a micro-batch's bf16 gradient of one element to the fp32 sum."""
UPDATE_BYTES = 50
"""Bytes read and written to update one element: its gradient is scaled, its norm taken, moments and weight updated in
fp32, and the weight rounded."""
OPERATIONS = 80
"""Operations that the host starts in one layer's forward pass; the backward pass has about as many."""
OPERATIONS_OF_PARAMETER = 40
"""Operations of ZeRO 3 for each parameter and micro-batch, which gather it and cut its gradient (by rehearsals)."""


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
    pipeline_parallel: float = 0.0
    zero: float = 0.0
    """Communication that does not run beside computation, by kind."""
    bubble: float = 0.0
    """Where a pipeline stage waits at the beginning and at the end of a step, as others compute."""

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))


def step_time(plan: Plan, hardware: Hardware) -> StepTime:
    """Predict a step of a run, as long as that of its slowest pipeline stage, on GPUs of the plan's generation.

    Raises ConfigError for runs in fp32 and with an optimizer on the host, whose rates `hardware` does not have.
    """
    assert plan.generation == hardware.generation, (plan.generation, hardware.generation)
    refuse(plan.width != 2, "train.precision", "is fp32", "step times are only predicted for bf16, so set it to that")
    refuse(
        plan.config.deepspeed.offload_optimizer,
        "deepspeed.offload_optimizer",
        "is true",
        "step times are not predicted with the optimizer on the host, so set it to false",
    )
    stages = plan.of_stages()
    # Stages between the first and the last differ only by their numbers of layers.
    stages = stages if plan.config.parallel.pipeline_layers else [*stages[:2], *stages[2:][-1:]]
    return max((_step_time(stage, hardware) for stage in stages), key=lambda time: time.total)


def _step_time(plan: Plan, hardware: Hardware) -> StepTime:
    """Predict a step of a GPU of the plan's pipeline stage."""
    attention = hardware.state_attention if plan.attention.backend == "triton" else hardware.attention
    rates = {"attention": attention}
    bandwidth = hardware.memory_bandwidth
    seconds = {p: _seconds(load, rates.get(p, hardware.matmul), bandwidth) for p, load in loads(plan).items()}
    seconds["loss"] = seconds["loss"][0], seconds["loss"][1] + _bytes_of_chunks(plan) / hardware.memory_bandwidth
    repeated = sum(seconds[phase][0] for phase in recomputed_phases(plan))
    forward, backward = map(sum, zip(*seconds.values()))
    sent = _communication(plan, hardware, forward, backward + repeated)
    started = OPERATIONS * len(plan.held.layers) * (1 + plan.forward_passes)
    if plan.zero_stage == 3:
        started += OPERATIONS_OF_PARAMETER * parameters(plan.model, plan.extension).total()
    exchanged = sent["tensor_parallel"] + sent["context_parallel"] + sent["pipeline_parallel"]
    on_gpu = forward + backward + repeated + exchanged / plan.micro_batches
    host = max(0.0, started * hardware.operation_start - on_gpu)
    updated = plan.trained_elements / (plan.replicas if plan.zero_stage > 0 else 1)
    gradient_bytes = GRADIENT_BYTES * plan.trained_elements * plan.micro_batches
    return StepTime(
        **{phase: plan.micro_batches * sum(both) for phase, both in seconds.items()},
        recomputation=plan.micro_batches * repeated,
        optimizer=(gradient_bytes + UPDATE_BYTES * updated) / hardware.memory_bandwidth,
        host=plan.micro_batches * host,
        bubble=(plan.stages - 1) / len(plan.stretches) * (on_gpu + host),
        **sent,
    )


def _seconds(load: Load, rate: float, bandwidth: float) -> tuple[float, float]:
    """Return the time of a phase's forward and backward pass."""
    return max(load.forward / rate, load.moved / bandwidth), max(load.backward / rate, 2 * load.moved / bandwidth)


def _bytes_of_chunks(plan: Plan) -> float:
    """Return what the loss of a micro-batch reads and writes to add up its chunks' gradients of the output layer."""
    if not plan.trains_output:
        return 0.0
    vocabulary = plan.model.vocab_size // plan.tensor_size
    chunks = ceil(plan.matrix_tokens / chunk_size(vocabulary))
    return CHUNK_BYTES * vocabulary * plan.model.hidden_size * (chunks - 1)


def _communication(plan: Plan, hardware: Hardware, forward: float, backward: float) -> dict[str, float]:
    """Return the seconds of communication that no computation hides, by the names of `StepTime`.

    `forward` and `backward` are the seconds that a micro-batch computes.
    """
    groups = {
        TENSOR: (Group(plan.tensor_size, 1), "tensor_parallel"),
        CONTEXT: (Group(plan.context_size, plan.tensor_size), "context_parallel"),
        SEQUENCE: (Group(plan.tensor_size * plan.context_size, 1), "context_parallel"),
        PIPELINE: (Group(plan.stages, plan.config.parallel.ranks_per_stage), "pipeline_parallel"),
        # It has the ranks of all context- and data-parallel groups, between which pipeline stages lie.
        DATA: (Group(plan.replicas, plan.tensor_size * plan.stages, plan.context_size, plan.tensor_size), "zero"),
        NODE: (Group(plan.hierarchy, plan.tensor_size), "zero"),
    }
    found = dict.fromkeys((phase for _, phase in groups.values()), 0.0)
    for (name, kind), traffic in communication(plan).items():
        group, phase = groups[name]
        calls = traffic.calls
        if calls is None and phase == "zero":
            calls = _calls_of_zero(plan, name, kind)
        elif calls is None:
            # State and averages, there and back; again where layers are recomputed. In a group of context ranks alone
            # as often queries, keys and values, and attention's output.
            exchanges = 2 if name == CONTEXT else 1
            calls = exchanges * plan.micro_batches * len(plan.held.layers) * (2 + 2 * plan.forward_passes)
        seconds = group.seconds(kind, traffic.bytes, calls, hardware)
        if phase == "zero" and plan.config.deepspeed.overlap_comm:
            seconds -= _hidden(plan, name, kind, seconds, forward, backward)
        found[phase] += seconds
    return found


def _hidden(plan: Plan, name: str, kind: str, seconds: float, forward: float, backward: float) -> float:
    """Return how much of ZeRO's communication of one kind runs beside computation, with `overlap_comm`.

    Averages of gradients run beside the backward pass, in stage 1 only beside that of the last micro-batch; the last
    bucket is complete when it ends. Stage 3 gathers weights beside the forward pass; the others gather them after the
    update, when nothing is left to compute.
    """
    if kind == ALL_GATHER and plan.zero_stage == 3:
        once = name == DATA and plan.hierarchy > 1
        return min(seconds, (1 if once else plan.micro_batches) * forward)
    if kind == ALL_GATHER:
        return 0.0
    beside = (plan.micro_batches if plan.zero_stage > 1 else 1) * backward
    return min(seconds * (1 - 1 / _buckets(plan)), beside)


def _calls_of_zero(plan: Plan, name: str, kind: str) -> int:
    """Return about how many collectives ZeRO makes in a step: by buckets, or matrix by matrix."""
    if kind != ALL_GATHER:
        return _buckets(plan) * (plan.micro_batches if plan.zero_stage > 1 else 1)
    if plan.zero_stage < 3:
        return _buckets(plan)
    large = gathered_parameters(plan)
    # Most are gathered for the backward pass, too, if not all of them stay.
    passes = plan.micro_batches * (2 if sum(size * count for size, count in large) > REUSE_DISTANCE // 2 else 1)
    if plan.hierarchy > 1:
        passes = 1 if name == DATA else passes - 1
    return passes * sum(count for _, count in large)


def _buckets(plan: Plan) -> int:
    """Return about how many buckets the gradients of a micro-batch fill."""
    return ceil(plan.trained_elements / plan.config.deepspeed.reduce_bucket_size)
