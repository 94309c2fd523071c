"""Time the phases of a training step."""

import contextlib
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

DATA, FORWARD, BACKWARD, OPTIMIZER, SAVE = "data", "forward", "backward", "optimizer", "save"
FORWARD_BACKWARD = "forward_backward"
"""With pipeline stages, forward and backward passes alternate; this phase includes waiting for other stages."""
COMMUNICATION = "communication"
"""Waiting for the averaging of gradients and for ZeRO 3's all-gathers."""


class StepClock:
    """Sums seconds by phase. Time in nested phases counts for the innermost phase.

    On a GPU, time is measured on its stream: an event is recorded at each change of phase, without synchronization
    until `read`. A phase in which the GPU is idle, such as waiting for data, lasts until the next kernel starts.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter):
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._clock = clock
        self._open: list[str] = []
        self._marks: list[tuple[Any, str | None]] = []
        """Points in time (seconds, or events on a GPU), and the phase that starts there."""
        self._spare: list[torch.cuda.Event] = []
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the context as phase `name`."""
        if self._stream is not None and torch.cuda.current_stream() != self._stream:
            yield  # overlapped with computation
            return
        self._open.append(name)
        self._mark()
        try:
            yield
        finally:
            self._open.pop()
            self._mark()

    def waiting(self) -> AbstractContextManager:
        """Measure a context within a phase as waiting for other ranks; do nothing outside of phases."""
        return self.phase(COMMUNICATION) if self._open else contextlib.nullcontext()

    def each(self, name: str, items: Iterable[Any]) -> Iterator[Any]:
        """Yield the items, and measure the wait for each as phase `name`."""
        iterator = iter(items)
        while True:
            with self.phase(name):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

    def read(self) -> dict[str, float]:
        """Return the seconds by phase since the last call."""
        self.add_up()
        found = dict(self._seconds)
        self._seconds.clear()
        return found

    def add_up(self, at_least: int = 0) -> None:
        """Sum the recorded marks, if there are `at_least` so many. Synchronizes the GPU; call it between steps."""
        if self._open or len(self._marks) < max(2, at_least):
            return
        if self._stream is not None:
            self._marks[-1][0].synchronize()
        for (begun, name), (ended, _) in itertools.pairwise(self._marks):
            if name is not None:
                self._seconds[name] += begun.elapsed_time(ended) / 1e3 if self._stream is not None else ended - begun
        if self._stream is not None:
            self._spare += [event for event, _ in self._marks]
        self._marks.clear()

    def _mark(self) -> None:
        if self._stream is None:
            moment = self._clock()
        else:
            moment = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
            moment.record()
        self._marks.append((moment, self._open[-1] if self._open else None))
