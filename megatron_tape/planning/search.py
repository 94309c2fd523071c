"""Search for the fastest parallel layouts of a run that fit on the GPUs. Imports no torch."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, get_args, get_type_hints

from megatron_tape.config.schema import RunConfig, replace_settings
from megatron_tape.config.train import TrainConfig
from megatron_tape.errors import ConfigError
from megatron_tape.planning.hardware import NODE_SIZE, Hardware
from megatron_tape.planning.memory import Memory, memory
from megatron_tape.planning.plan import Plan
from megatron_tape.planning.step_time import StepTime, step_time

HEADROOM = 0.10
"""Fraction of GPU memory reserved for the CUDA context, NCCL and fragmentation."""
GIB = 2**30
ZERO_STAGES: tuple[int, ...] = (1, 2, 3)
MOST_VIRTUAL = 8
"""Largest number of virtual stages. With more, the additional messages cost more than the smaller
bubble saves.
"""
RECOMPUTATION = get_args(get_type_hints(TrainConfig)["recompute"])
"""Recomputation modes, from the one that keeps most activations."""
CHOSEN = (
    "parallel.tensor_model_parallel_size",
    "parallel.sequence_parallel",
    "parallel.context_parallel_size",
    "parallel.pipeline_model_parallel_size",
    "parallel.virtual_pipeline_size",
    "parallel.pipeline_layers",
    "deepspeed.zero_stage",
    "train.micro_batch_size",
    "train.recompute",
)
"""Settings that the search sets."""
ONE_GPU = {name: "1" for name in CHOSEN if name.endswith("_size")} | {
    "parallel.sequence_parallel": "null",
    "parallel.pipeline_layers": "null",
}
"""Settings of the layout on one GPU, which is valid for every model. A search starts from it."""

Validate = Callable[[RunConfig, int], None]
"""A function that raises ConfigError if the settings are invalid for a number of processes."""


def fits(run_memory: Memory, gib: float) -> bool:
    """Return whether a run with `run_memory` fits on GPUs of `gib` GiB, if HEADROOM of it stays
    free.
    """
    return run_memory.peak <= (1 - HEADROOM) * gib * GIB


class Candidate(NamedTuple):
    """A layout with its estimated step time and memory."""

    plan: Plan
    time: StepTime
    memory: Memory


@dataclass
class SearchResult:
    """The layouts that a search found, and why others are invalid."""

    fitting: list[Candidate] = field(default_factory=list)
    """The fastest layouts that fit, fastest first."""
    too_large: list[Candidate] = field(default_factory=list)
    """Layouts that do not fit, fastest first; once `fitting` is complete, slower layouts are not
    examined.
    """
    refused: Counter[str] = field(default_factory=Counter)
    """The number of invalid layouts by the message of their ConfigError."""


def search(
    plan: Plan, hardware: Hardware, gib: float, validate: Validate, limit: int = 10
) -> SearchResult:
    """Find the `limit` fastest layouts of a run that fit on the plan's GPUs, each with `gib` GiB.

    The search varies tensor, context and pipeline parallelism, virtual stages, the ZeRO stage, the
    micro-batch size and recomputation; all other settings are fixed, including the global batch
    size. Tensor parallelism stays within a node. Stages have equal numbers of layers, or the first
    and the last have one fewer than the others. Raises ConfigError if the step time of the run
    cannot be estimated.
    """
    result = SearchResult()
    # All layouts are timed, but memory is estimated only until enough of them fit.
    layouts = list(candidates(plan, validate, result.refused))
    timed = [(step_time(layout, hardware), layout) for layout in layouts]
    # The sort is stable: among equally fast layouts, the one that needs less memory comes first.
    for time, layout in sorted(timed, key=lambda pair: pair[0].total):
        candidate = Candidate(layout, time, memory(layout))
        if fits(candidate.memory, gib):
            result.fitting.append(candidate)
        else:
            result.too_large.append(candidate)
        if len(result.fitting) == limit:
            break
    return result


def candidates(plan: Plan, validate: Validate, refused: Counter[str]) -> Iterator[Plan]:
    """Yield a copy of `plan` for every layout that `validate` accepts; count all others in
    `refused` by message.
    """
    batch_size = plan.config.train.global_batch_size
    for layout in _layouts(plan):
        tensor_size, context_size, pipeline_size, virtual_size, layers = layout
        zero_stages = ZERO_STAGES
        # Pipeline parallelism requires ZeRO 1.
        if pipeline_size > 1:
            zero_stages = (1,)
        # The sequences of a data-parallel rank in a step. Micro-batches of 1, 2, 4, ... of them are
        # tried.
        sequences = batch_size * tensor_size * context_size * pipeline_size // plan.processes
        # At least one size is tried, so that `validate` says why the batch is too small for the
        # layout.
        exponents = range(max(1, sequences.bit_length()))
        for exponent, zero_stage in itertools.product(exponents, zero_stages):
            changes = {
                "parallel.tensor_model_parallel_size": tensor_size,
                "parallel.context_parallel_size": context_size,
                "parallel.pipeline_model_parallel_size": pipeline_size,
                "parallel.virtual_pipeline_size": virtual_size,
                "parallel.pipeline_layers": layers,
                "parallel.sequence_parallel": None,  # enabled with tensor parallelism
                "train.micro_batch_size": 2**exponent,
                "deepspeed.zero_stage": zero_stage,
            }
            config = replace_settings(plan.config, changes)
            try:
                validate(config, plan.processes)
            except ConfigError as error:
                refused[str(error)] += 1
                continue
            # Recomputation has no effect on whether a layout is valid, so it is not validated.
            for recompute in RECOMPUTATION:
                recomputing = replace_settings(config, {"train.recompute": recompute})
                yield dataclasses.replace(plan, config=recomputing)


def _layouts(plan: Plan) -> Iterator[tuple[int, int, int, int, list[int] | None]]:
    """Yield tensor, context and pipeline-parallel sizes, virtual stages, and layers per stage if
    they are unequal.
    """
    layers = plan.model.num_layers
    for tensor_size in _divisors(plan.processes, NODE_SIZE):
        other_ranks = plan.processes // tensor_size
        for context_size in _divisors(other_ranks, plan.model.num_attention_heads):
            sizes = (tensor_size, context_size)
            # Without pipeline parallelism, there is one stage without virtual stages.
            yield *sizes, 1, 1, None
            # A pipeline stage has at least two layers. The first divisor, 1, is the case above.
            for pipeline_size in _divisors(other_ranks // context_size, layers // 2)[1:]:
                if layers % pipeline_size == 0:
                    for virtual_size in _divisors(layers // pipeline_size, MOST_VIRTUAL):
                        yield *sizes, pipeline_size, virtual_size, None
                # The embedding and the loss each take about as long as a layer, so they count as
                # two more layers, and the first and the last stage get one layer less than the
                # others. With only two stages, their numbers of layers would be equal, as above.
                inner, remainder = divmod(layers + 2, pipeline_size)
                if remainder == 0 and pipeline_size > 2:
                    unequal = [inner - 1, *[inner] * (pipeline_size - 2), inner - 1]
                    yield *sizes, pipeline_size, 1, unequal


def _divisors(number: int, largest: int) -> list[int]:
    """Return the divisors of `number` from 1 to at most `largest`."""
    return [divisor for divisor in range(1, min(number, largest) + 1) if number % divisor == 0]
