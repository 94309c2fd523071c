"""The time that the host takes to launch a kernel, for the part `machine` of
`benchmarks.gpu_trial`. Imports Triton.
"""

import time
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from benchmarks.timing import synchronized_time

WARMUP = 100
"""Launches before those that are timed; the first ones compile the kernel."""
GRID = (1,)


@triton.jit
def _add_one(X):
    """Add 1 to a number."""
    tl.store(X, tl.load(X) + 1)


def launch_seconds(device: torch.device, launches: int = 2000) -> dict[str, float]:
    """Return the host's seconds for a launch of the smallest kernel by torch and by Triton.

    The host does not wait for the kernels, unless they take longer than their launches.
    """
    number = torch.zeros(1, device=device)
    return {
        "torch": _seconds_per_launch(lambda: number.add_(1), device, launches),
        "triton": _seconds_per_launch(lambda: _add_one[GRID](number), device, launches),
    }


def _seconds_per_launch(launch: Callable[[], object], device: torch.device, launches: int) -> float:
    """Return the mean time of the host for a call of `launch`."""
    for _ in range(min(WARMUP, launches)):
        launch()
    started = synchronized_time(device)
    for _ in range(launches):
        launch()
    # Without waiting for the kernels.
    return (time.perf_counter() - started) / launches
