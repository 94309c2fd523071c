"""Metrics of time and memory per step, and warnings about slow ranks."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from megatron_tape.io.versions import node_name
from megatron_tape.planning.hardware import peak_flops
from megatron_tape.run.metrics import MFU
from megatron_tape.training.hooks import Hook, HookResult
from megatron_tape.training.step_clock import BACKWARD, DATA, FORWARD, FORWARD_BACKWARD

if TYPE_CHECKING:
    from megatron_tape.config.schema import RunConfig
    from megatron_tape.parallel.layout import ParallelLayout
    from megatron_tape.training.engine import StepResult
    from megatron_tape.training.trainer import Trainer

logger = logging.getLogger(__name__)

COMPUTING = (FORWARD, BACKWARD, FORWARD_BACKWARD)
"""The phases that make up a rank's computing time."""
MOST_CHANGES = 10_000
"""Maximum number of phase changes to store before they are summed."""
WINDOW = 10
"""Minimum number of steps over which ranks are compared."""
CPU_RANKS = 3
"""Minimum number of ranks for warnings in runs on CPUs. Two processes that share a CPU often differ
by chance.
"""
SLOW_RATIO = 1.3
"""A rank is slow if its computing time exceeds this multiple of the median rank's."""


class StepTimes(Hook):
    """Logs seconds per step, averaged over the steps since the last logged one. Every run has this
    hook.

    `seconds/PHASE` are rank 0's times. With several ranks, it also logs:

    - `seconds/compute_median` and `seconds/compute_slowest`: the forward and backward times of the
      median rank and of the slowest rank.
    - `slowest_rank`: the slowest rank and its node.
    - `seconds/data_slowest`: the longest wait of a rank for data.

    Rank 0 warns once about each slow rank, but not on CPUs with fewer than `CPU_RANKS` ranks.
    """

    def __init__(self) -> None:
        self._steps = 0
        """Number of steps since the last logged one."""
        self._names: Sequence[str] = ()
        """The node and GPU of each rank."""
        self._warmed_up = False
        """Whether the first logged step is over. Steps up to it include start-up costs, and are not
        compared.
        """
        self._compared_times: list[Sequence[float]] = []
        """Computing time of each rank in each compared step."""
        self._reported: set[int] = set()
        """The slow ranks about which a warning was logged."""

    def after_step(self, trainer: Trainer, step: int, result: StepResult) -> HookResult:
        clock = trainer.engine.clock
        self._steps += 1
        if not trainer.logs(step):
            # Runs that log rarely would otherwise store very many changes of phase.
            clock.add_up(MOST_CHANGES)
            return HookResult()

        steps = self._steps
        self._steps = 0
        seconds = {}
        scalars = {}
        for name, total in clock.take_seconds().items():
            seconds[name] = total / steps
            scalars[f"seconds/{name}"] = seconds[name]
        metrics = HookResult(scalars)
        if trainer.layout.device.type == "cuda":
            metrics.scalars["memory/allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
            metrics.scalars["memory/reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
            # The next logged step then reports the peaks since this one.
            torch.cuda.reset_peak_memory_stats()
        if trainer.layout.world_size > 1:
            self._compare_ranks(trainer.layout, steps, seconds, metrics)
        return metrics

    def _compare_ranks(
        self,
        layout: ParallelLayout,
        steps: int,
        seconds: dict[str, float],
        metrics: HookResult,
    ) -> None:
        """Add the metrics of all ranks to `metrics`, and warn about slow ranks.

        `seconds` are this rank's seconds by phase, averaged over the last `steps` steps. All ranks
        call this together.
        """
        # The names do not change, so they are gathered once.
        self._names = self._names or layout.gather(_device_name(layout.device))
        computing = sum(seconds.get(name, 0.0) for name in COMPUTING)
        data = seconds.get(DATA, 0.0)
        of_all_ranks = layout.gather((computing, data))
        computing_times, data_times = zip(*of_all_ranks)
        slowest = computing_times.index(max(computing_times))  # a rank
        metrics.scalars["seconds/compute_median"] = statistics.median_low(computing_times)
        metrics.scalars["seconds/compute_slowest"] = computing_times[slowest]
        metrics.scalars["seconds/data_slowest"] = max(data_times)
        metrics.words["slowest_rank"] = f"{slowest} on {self._names[slowest]}"

        warns = layout.device.type == "cuda" or layout.world_size >= CPU_RANKS
        if self._warmed_up and layout.rank == 0 and warns:
            # `computing_times` are averages over `steps` steps. They are repeated, so that each
            # step counts once in the mean.
            self._compared_times += [computing_times] * steps
            if len(self._compared_times) >= WINDOW:
                times_by_rank = zip(*self._compared_times)
                means = [statistics.fmean(times) for times in times_by_rank]
                self._report_slow(means)
                self._compared_times = []
        self._warmed_up = True

    def _report_slow(self, means: list[float]) -> None:
        """Warn about slow ranks. `means` are the mean computing times of all ranks in seconds."""
        # The lower median is the faster one of two ranks, so the other one can be slow.
        median = statistics.median_low(means)
        for rank, mean in enumerate(means):
            # The median is 0 if the clock measured no phase.
            if 0 < SLOW_RATIO * median < mean and rank not in self._reported:
                self._reported.add(rank)
                logger.warning(
                    "warning: rank %d on %s computes %.2f times as long as the median rank (%.4g s"
                    " per step)",
                    rank,
                    self._names[rank],
                    mean / median,
                    mean,
                )


def _device_name(device: torch.device) -> str:
    """Return the name of this rank's node and, on a GPU, the GPU's index and UUID."""
    node = node_name()
    if device.type != "cuda":
        return node
    uuid = torch.cuda.get_device_properties(device).uuid
    return f"{node}, GPU {device.index} ({uuid})"


def utilization(
    flops_per_second: float,
    config: RunConfig,
    layout: ParallelLayout,
) -> dict[str, float]:
    """Return the metric `throughput/mfu`: the run's FLOPs as a fraction of the GPUs' peak in bf16.

    Return an empty dict if the peak is unknown, on CPUs, and in another precision.
    """
    if layout.device.type != "cuda" or config.train.precision != "bf16":
        return {}
    peak = peak_flops(torch.cuda.get_device_name(layout.device))
    if peak is None:
        return {}
    return {MFU: flops_per_second / (peak * layout.world_size)}
