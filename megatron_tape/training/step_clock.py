"""Seconds of a training step by phase."""

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
"""With pipeline stages, forward and backward passes alternate, and waiting for other stages is part of both."""
COMMUNICATION = "communication"
"""Waiting for gradients that are averaged and for weights that ZeRO 3 gathers."""


class StepClock:
    """Adds up seconds by phase; of nested phases, the inner one counts.

    On a GPU the seconds are those of its stream: an event marks each change of phase, and nothing waits for the GPU
    until `read`. A phase that leaves the GPU idle, such as waiting for data, lasts until the next work reaches it.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter):
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._clock = clock
        self._open: list[str] = []
        self._marks: list[tuple[Any, str | None]] = []
        """Moments (seconds, or events on a GPU), and the phase that begins there."""
        self._spare: list[torch.cuda.Event] = []
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block as `name`."""
        if self._stream is not None and torch.cuda.current_stream() != self._stream:
            yield  # beside the computation
            return
        self._open.append(name)
        self._mark()
        try:
            yield
        finally:
            self._open.pop()
            self._mark()

    def waiting(self) -> AbstractContextManager:
        """Count a block within another phase as waiting for other ranks; outside of a step it is not counted."""
        return self.phase(COMMUNICATION) if self._open else contextlib.nullcontext()

    def each(self, name: str, items: Iterable[Any]) -> Iterator[Any]:
        """Yield the items, and count the waiting for each as `name`."""
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
        """Add up the marks so far if there are `at_least` so many; waits for the GPU. Call it between steps."""
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
