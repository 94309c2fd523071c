"""Time the forward pass, the backward pass and the optimizer within a training step, from outside."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

PHASES = ("forward", "backward", "optimizer")


@contextlib.contextmanager
def surrounded(places: Iterable[tuple[Any, str, Callable[[], AbstractContextManager]]]) -> Iterator[None]:
    """Let methods run inside contexts while the block runs; a place is an object, a method's name, and the context."""
    with contextlib.ExitStack() as stack:
        for owner, name, context in places:
            own = name in vars(owner)
            method = getattr(owner, name)

            def call(*args, method=method, context=context, **kwargs):
                with context():
                    return method(*args, **kwargs)

            setattr(owner, name, call)
            stack.callback(setattr, owner, name, method) if own else stack.callback(delattr, owner, name)
        yield


class PhaseTimer:
    """Adds up the seconds of each phase of a DeepSpeed engine's step: on a GPU between CUDA events, else on the clock.

    The backward pass includes averaging gradients over ranks; the optimizer includes clipping.
    """

    def __init__(self, engine: Any, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[str, Any, Any]] = []
        methods = zip(PHASES, ("forward", "backward", "step"))
        self._places = [(engine, method, lambda phase=phase: self._timed(phase)) for phase, method in methods]

    def timing(self) -> AbstractContextManager:
        """Time all steps that are taken inside this context."""
        return surrounded(self._places)

    def take(self) -> dict[str, float]:
        """Return the seconds by phase since the last call; what was started on a GPU must have ended."""
        seconds = dict.fromkeys(PHASES, 0.0)
        for phase, start, end in self._marks:
            seconds[phase] += start.elapsed_time(end) / 1e3 if self._on_gpu else end - start
        self._marks.clear()
        return seconds

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = self._mark()
        yield
        self._marks.append((phase, start, self._mark()))

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
