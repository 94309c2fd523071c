"""Measure the time that each phase of a training step takes, on the CPU or on a GPU."""

import contextlib
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

DATA = "data"
FORWARD = "forward"
BACKWARD = "backward"
OPTIMIZER = "optimizer"
SAVE = "save"
FORWARD_BACKWARD = "forward_backward"
"""Forward and backward passes with pipeline stages, where they alternate, and waiting for other
stages.
"""
COMMUNICATION = "communication"
"""Waiting for the averaging of gradients and for ZeRO 3's all-gathers."""


class StepClock:
    """Sums the seconds of each phase. In nested phases, time counts only for the innermost one.

    On a GPU, an event is recorded in the current stream whenever the phase changes, so only
    `take_seconds` and `add_up` wait for the GPU. A phase in which the GPU is idle, such as waiting
    for data, lasts until the next kernel starts.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter):
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._clock = clock
        self._open: list[str] = []
        """The phases that have begun and not ended, the innermost one last."""
        self._changes: list[tuple[Any, str | None]] = []
        """The changes of phase: a time (seconds, or an event on a GPU), and the phase that starts
        then, or None if no phase does.
        """
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the time within the context as phase `name`."""
        # Do not measure work in another stream, which overlaps with the phase of the main stream.
        if self._stream is not None and torch.cuda.current_stream() != self._stream:
            yield
            return
        self._open.append(name)
        self._record_change()
        try:
            yield
        finally:
            self._open.pop()
            self._record_change()

    def waiting(self) -> AbstractContextManager:
        """Measure the time within the context as `COMMUNICATION`, but only inside of another
        phase: collectives outside of steps do not count.
        """
        if self._open:
            return self.phase(COMMUNICATION)
        return contextlib.nullcontext()

    def each(self, name: str, items: Iterable[Any]) -> Iterator[Any]:
        """Yield the items, and measure the time to produce each of them as phase `name`."""
        iterator = iter(items)
        while True:
            with self.phase(name):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

    def take_seconds(self) -> dict[str, float]:
        """Return the seconds by phase since the last call. Call this between steps."""
        self.add_up()
        seconds = dict(self._seconds)
        self._seconds.clear()
        return seconds

    def add_up(self, min_changes: int = 0) -> None:
        """Add the times between the recorded changes of phase to the sums, and forget the changes.

        Does nothing within a phase, or if there are fewer than `min_changes` changes. Waits for the
        GPU. Call this between steps.
        """
        # A duration needs two changes.
        if self._open or len(self._changes) < max(2, min_changes):
            return
        if self._stream is not None:
            self._changes[-1][0].synchronize()

        # A phase lasts until the next change. `elapsed_time` of CUDA events is in milliseconds.
        for (start, name), (end, _) in itertools.pairwise(self._changes):
            if name is not None and self._stream is not None:
                self._seconds[name] += start.elapsed_time(end) / 1e3
            elif name is not None:
                self._seconds[name] += end - start
        self._changes.clear()

    def _record_change(self) -> None:
        """Record that the phase has changed to the innermost one of `_open`, or to none."""
        if self._stream is None:
            time_or_event = self._clock()
        else:
            time_or_event = torch.cuda.Event(enable_timing=True)
            time_or_event.record()
        name = self._open[-1] if self._open else None
        self._changes.append((time_or_event, name))
