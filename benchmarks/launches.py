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
"""Launches before those that are timed; the first one compiles the kernel."""
GRID = (1,)
"""A single program."""


@triton.jit
def _add_one(X):
    """Add 1 to a number."""
    tl.store(X, tl.load(X) + 1)


def launch_seconds(device: torch.device, launches: int = 2000) -> dict[str, float]:
    """Return the host's seconds for a launch of the smallest kernel by torch and by Triton.

    The host does not wait for the kernels, unless they take longer than their launches. `launches`
    is the number of launches that are timed.
    """
    number = torch.zeros(1, device=device)

    def launch_by_torch() -> None:
        number.add_(1)

    def launch_by_triton() -> None:
        _add_one[GRID](number)

    return {
        "torch": _seconds_per_launch(launch_by_torch, device, launches),
        "triton": _seconds_per_launch(launch_by_triton, device, launches),
    }


def _seconds_per_launch(
    launch: Callable[[], None],
    device: torch.device,
    launches: int,
) -> float:
    """Return the host's mean time for a call of `launch`, in seconds."""
    for _ in range(min(WARMUP, launches)):
        launch()

    started = synchronized_time(device)
    for _ in range(launches):
        launch()
    # Not `synchronized_time`, which would wait for the kernels.
    elapsed = time.perf_counter() - started
    return elapsed / launches
