"""Estimated time of a training step, from FLOPs and bytes at assumed rates. Imports no torch.

The estimate assumes that GPUs compute at `EFFICIENCY` of their peak FLOP/s, communicate at full
bandwidth, and do not overlap the two. In a ring collective over several nodes, the ranks on a node
share all their links to other nodes. The estimate ranks layouts; it does not predict a model's
speed.
"""

from typing import NamedTuple

from megatron_tape.errors import ConfigError
from megatron_tape.planning.communication import (
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    CONTEXT,
    DATA,
    PIPELINE,
    SEND,
    SEQUENCE,
    TENSOR,
    communication,
)
from megatron_tape.planning.flops import flops_per_token, recomputed_flops_per_token
from megatron_tape.planning.hardware import NODE_SIZE, Hardware
from megatron_tape.planning.plan import Plan

EFFICIENCY = 0.4
"""Assumed fraction of peak FLOP/s. Measured on one H200 (benchmarks/results/h200/first/summary.md):
TAPE reaches 0.32 with 155M parameters and 1,024 tokens and 0.43 with 1.3B and 4,096 tokens, RoPE
0.38 and 0.50."""


class StepTime(NamedTuple):
    """The time of one step by component, in seconds."""

    computation: float
    """Time of matrix products and attention, recomputation included."""
    communication: float
    bubble: float
    """Idle time of a pipeline stage at the beginning and end of a step."""

    @property
    def total(self) -> float:
        """The time of the whole step."""
        return sum(self)


def step_time(plan: Plan, hardware: Hardware) -> StepTime:
    """Return the estimated step time of the slowest pipeline stage. Raises ConfigError for runs in
    fp32.
    """
    if plan.width != 2:
        raise ConfigError(
            "train.precision", "is fp32, but step times can be estimated only for bf16"
        )
    stages = plan.pipeline_stages()
    if not plan.config.parallel.pipeline_layers:
        # Inner stages are alike, so the first, the second and the last are enough. `stages[2:]` is
        # empty with two stages, whose last one must not count twice.
        stages = [*stages[:2], *stages[2:][-1:]]
    times = (_pipeline_stage_time(stage, hardware) for stage in stages)
    return max(times, key=lambda time: time.total)


def _pipeline_stage_time(plan: Plan, hardware: Hardware) -> StepTime:
    """Return the step time of the plan's pipeline stage."""
    flops = flops_per_token(plan.model, plan.extension, plan.contents)
    flops += recomputed_flops_per_token(plan)
    # Each rank computes all layers of its stage for its share of the tokens; tensor-parallel ranks
    # share the FLOPs.
    tokens = plan.tokens_per_step * plan.pipeline_size / plan.processes
    computation = flops * tokens / (EFFICIENCY * hardware.peak)

    traffic = communication(plan).items()
    seconds = {key: _seconds(plan, *key, size, hardware) for key, size in traffic}
    # ZeRO's collectives are not part of the pipeline's schedule.
    in_schedule = sum(time for (group, _), time in seconds.items() if group != DATA)
    # In a step, a pipeline stage waits once for each other stage, each time as long as it takes to
    # compute one micro-batch in one of its model chunks.
    idle_share = (plan.pipeline_size - 1) / len(plan.model_chunks) / plan.micro_batches
    bubble = idle_share * (computation + in_schedule)
    return StepTime(computation, sum(seconds.values()), bubble)


def _seconds(plan: Plan, group: str, kind: str, size: int, hardware: Hardware) -> float:
    """Return the seconds of all collectives of one `kind` in one process `group`, with `size` bytes
    in total.
    """
    tensor = plan.tensor_size
    context = plan.context_size
    pipeline = plan.pipeline_size
    # The number of ranks of each group, and the difference between neighboring ranks of the group.
    ranks, stride = {
        TENSOR: (tensor, 1),
        CONTEXT: (context, tensor),
        SEQUENCE: (tensor * context, 1),
        PIPELINE: (pipeline, tensor * context),
        DATA: (plan.data_context_size, tensor),
    }[group]
    # The number of the group's ranks that are on one node.
    on_node = min(ranks, max(1, NODE_SIZE // stride))
    if group == DATA:
        # The group consists of context-parallel ranks, which are close to each other, and of their
        # data-parallel replicas, between which are the ranks of all pipeline stages.
        replicas = max(1, NODE_SIZE // (tensor * context * pipeline))
        on_node = min(ranks, min(context, on_node) * replicas)

    intra = hardware.intra_node_bandwidth
    inter = hardware.inter_node_bandwidth
    if kind == ALL_TO_ALL:
        # A rank sends an equal part to each rank, over both kinds of links at once.
        return size / ranks * max((on_node - 1) / intra, (ranks - on_node) / inter)
    bandwidth = intra
    if kind in (SEND, BROADCAST):
        if on_node < ranks:
            bandwidth = inter  # some neighbors are on different nodes, and all others wait for them
        return size / bandwidth
    if on_node < ranks:
        bandwidth = min(intra, on_node * inter)
    if kind == ALL_REDUCE:
        # A reduce-scatter and an all-gather.
        size *= 2
    return size * (ranks - 1) / ranks / bandwidth
