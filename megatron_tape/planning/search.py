"""The layouts in which a run could train on a number of GPUs, the fastest first. Imports no torch."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import get_args, get_type_hints

from megatron_tape.config.schema import RunConfig, TrainConfig
from megatron_tape.errors import ConfigError
from megatron_tape.planning.costs import Estimate, estimate
from megatron_tape.planning.hardware import Hardware
from megatron_tape.planning.step_time import StepTime, step_time

HEADROOM = 0.06
"""Share of a GPU's memory that is left to the CUDA context, NCCL and fragmentation."""
GIB = 2**30
STAGES = (1, 2, 3)
"""ZeRO stages that a run in bf16 can have."""
CHOSEN = (
    "parallel.tensor_model_parallel_size",
    "parallel.sequence_parallel",
    "parallel.context_parallel_size",
    "deepspeed.zero_stage",
    "train.micro_batch_size",
    "train.recompute",
)
"""Settings that a search chooses."""


def fits(result: Estimate, gib: float) -> bool:
    """Return whether a run fits on GPUs of `gib` GiB."""
    return result.peak <= (1 - HEADROOM) * gib * GIB


@dataclass(frozen=True)
class Layout:
    """A way to train, and what it is predicted to take."""

    config: RunConfig
    time: StepTime
    memory: Estimate


@dataclass
class Found:
    """The outcome of a search."""

    fitting: list[Layout] = field(default_factory=list)
    """The fastest that fit, the fastest first."""
    too_large: list[Layout] = field(default_factory=list)
    """Those that would be as fast, but do not fit, the fastest first."""
    tried: int = 0
    """How many layouts there are without those refused."""
    refused: Counter[str] = field(default_factory=Counter)
    """Why others are not possible, and how many."""


Validate = Callable[[RunConfig, int], None]
"""Raises ConfigError if a run cannot work on a number of processes."""


def search(
    config: RunConfig, processes: int, hardware: Hardware, gib: float, validate: Validate, wanted: int = 10
) -> Found:
    """Find the `wanted` fastest layouts of `config` on `processes` GPUs of `gib` GiB.

    Tensor- and context-parallel sizes, ZeRO stage, micro-batch size and recomputation are tried; the global batch and
    all other settings stay as they are. Tensor parallelism stays within a node. Raises ConfigError if the run itself
    cannot be predicted.
    """
    found, timed = Found(), []
    for candidate in candidates(config, processes, hardware.node_size, validate, found.refused):
        timed.append((step_time(candidate, processes, hardware), candidate))
    found.tried = len(timed)
    # Of layouts that are as fast, the one that needs less comes first: the earlier one.
    for time, candidate in sorted(timed, key=lambda pair: pair[0].total):
        layout = Layout(candidate, time, estimate(candidate, processes))
        (found.fitting if fits(layout.memory, gib) else found.too_large).append(layout)
        if len(found.fitting) == wanted:
            break
    return found


def candidates(
    config: RunConfig, processes: int, node_size: int, validate: Validate, refused: Counter[str]
) -> Iterator[RunConfig]:
    """Yield `config` in every layout that `validate` accepts; count in `refused` why others were not."""
    for tensor_size in _divisors(processes, node_size):
        for context_size in _divisors(processes // tensor_size, config.model.num_attention_heads):
            data_size = processes // tensor_size // context_size
            shared = config.train.global_batch_size // data_size
            for micro_batch in (2**i for i in range(max(1, shared.bit_length()))):
                parallel = dataclasses.replace(
                    config.parallel,
                    tensor_model_parallel_size=tensor_size,
                    context_parallel_size=context_size,
                    sequence_parallel=None,
                )
                train = dataclasses.replace(config.train, micro_batch_size=micro_batch)
                changed = dataclasses.replace(config, parallel=parallel, train=train)
                try:
                    validate(changed, processes)
                except ConfigError as error:
                    refused[str(error)] += 1
                    continue
                yield from _variants(changed)


def _variants(config: RunConfig) -> Iterator[RunConfig]:
    for recompute in get_args(get_type_hints(TrainConfig)["recompute"]):
        for stage in STAGES:
            train = dataclasses.replace(config.train, recompute=recompute)
            yield dataclasses.replace(
                config, train=train, deepspeed=dataclasses.replace(config.deepspeed, zero_stage=stage)
            )


def _divisors(number: int, largest: int) -> list[int]:
    return [divisor for divisor in range(1, min(number, largest) + 1) if number % divisor == 0]
