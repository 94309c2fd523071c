"""How long a training step takes, from FLOPs and bytes at assumed rates. Imports no torch.

GPUs are assumed to compute at `EFFICIENCY` of their peak and to communicate at their links' full bandwidth, in rings
whose members in a node share the links to other nodes. Nothing overlaps. This ranks layouts; it is no prediction of a
model's speed.
"""

from typing import NamedTuple

from megatron_tape.errors import refuse
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
"""Assumed share of the peak. Measured on one H200 (benchmarks/results/h200/first/summary.md): TAPE reaches 0.32 with
155M parameters and 1,024 tokens and 0.43 with 1.3B and 4,096 tokens, RoPE 0.38 and 0.50."""


class StepTime(NamedTuple):
    """Seconds of one step."""

    computation: float
    """Recomputation included."""
    communication: float
    bubble: float
    """Where a pipeline stage waits at the beginning and at the end of a step, as others compute."""

    @property
    def total(self) -> float:
        return sum(self)


def step_time(plan: Plan, hardware: Hardware) -> StepTime:
    """Return the assumed time of a step, that of the slowest pipeline stage; raises ConfigError for runs in fp32."""
    refuse(plan.width != 2, "train.precision", "is fp32", "step times are only assumed for bf16, so set it to that")
    stages = plan.of_stages()
    # Stages between the first and the last differ only by their numbers of layers.
    stages = stages if plan.config.parallel.pipeline_layers else [*stages[:2], *stages[2:][-1:]]
    return max((_of_stage(stage, hardware) for stage in stages), key=lambda time: time.total)


def _of_stage(plan: Plan, hardware: Hardware) -> StepTime:
    """Return the time of a GPU of the plan's pipeline stage."""
    flops = flops_per_token(plan.model, plan.extension, plan.held) + recomputed_flops_per_token(plan)
    tokens = plan.tokens_per_step * plan.stages / plan.processes
    computation = flops * tokens / (EFFICIENCY * hardware.peak)
    sent = communication(plan).items()
    seconds = {key: _seconds(plan, *key, size, hardware) for key, size in sent}
    of_micro_batches = computation + sum(time for (group, _), time in seconds.items() if group != DATA)
    waiting = (plan.stages - 1) / len(plan.model_chunks) / plan.micro_batches
    return StepTime(computation, sum(seconds.values()), waiting * of_micro_batches)


def _seconds(plan: Plan, group: str, kind: str, size: int, hardware: Hardware) -> float:
    """Return the time of collectives of one kind in one group, which together have `size` bytes."""
    tensor, context, stages = plan.tensor_size, plan.context_size, plan.stages
    stride = {CONTEXT: tensor, PIPELINE: tensor * context}.get(group, 1)
    ranks = {
        TENSOR: tensor,
        CONTEXT: context,
        SEQUENCE: tensor * context,
        PIPELINE: stages,
        DATA: plan.replicas,
    }[group]
    here = min(ranks, max(1, NODE_SIZE // stride))
    if group == DATA:  # neighbouring context ranks, and further ones behind the pipeline's other stages
        near = min(context, max(1, NODE_SIZE // tensor))
        here = min(ranks, near * max(1, NODE_SIZE // (tensor * context * stages)))
    inside, between = hardware.intra_node_bandwidth, hardware.inter_node_bandwidth
    if kind in (SEND, BROADCAST):
        # Between some neighbours lies the edge of a node, for which all others wait.
        return size / (inside if here == ranks else between)
    if kind == ALL_TO_ALL:
        return size / ranks * max((here - 1) / inside, (ranks - here) / between)
    bandwidth = inside if here == ranks else min(inside, here * between)
    return size * (ranks - 1) / ranks / bandwidth * (2 if kind == ALL_REDUCE else 1)
