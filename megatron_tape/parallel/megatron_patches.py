"""Everything that is replaced in megatron-core 0.16.1, with the reason; no known release does without any of it.

Each patch lasts until the process ends, unless it is a context manager. Megatron is imported by the functions, so that
a program pays only for the parts that it uses.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


def run_without_cuda() -> None:
    """Let Megatron run on the CPU; call once per process, before a model is built.

    Until Megatron asks for the current device instead of CUDA's: it allocates buffers of collectives on
    `torch.cuda.current_device()`, activation recomputation saves CUDA's random states, and the pipeline schedules count
    tokens on "cuda".
    """
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import random

    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    if not isinstance(random._CUDA_RNG_STATE_TRACKER, _CpuRngTracker):
        random._CUDA_RNG_STATE_TRACKER = _CpuRngTracker()
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    schedules.torch = _TorchOnCpu()


class _CpuRngTracker:
    """Replaces Megatron's `CudaRNGStatesTracker`: named random streams of torch's CPU generator."""

    def __init__(self):
        self._states: dict[str, torch.Tensor] = {}

    def is_initialized(self) -> bool:
        return bool(self._states)

    def reset(self) -> None:
        self._states = {}

    def get_states(self) -> dict[str, torch.Tensor]:
        return dict(self._states)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        self._states[name] = torch.Generator().manual_seed(seed).get_state()

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng"):
        if name not in self._states:
            raise KeyError(f"random stream {name!r} was not added; there are {sorted(self._states)}")
        outside = torch.get_rng_state()
        torch.set_rng_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = torch.get_rng_state()
            torch.set_rng_state(outside)


class _TorchOnCpu:
    """torch, which makes zeros on the CPU whatever device they are asked for."""

    def __getattr__(self, name: str):
        return getattr(torch, name)

    @staticmethod
    def zeros(*args, device: object = None, **kwargs) -> torch.Tensor:
        return torch.zeros(*args, **kwargs)


def forget_groups() -> None:
    """Drop the process groups that `parallel_state.destroy_model_parallel` leaves in its module.

    Until that function drops all of them.
    """
    from megatron.core import parallel_state

    for name, value in list(vars(parallel_state).items()):
        if isinstance(value, dist.ProcessGroup):
            setattr(parallel_state, name, None)


def split_with_torch() -> None:
    """Let attention split queries, keys and values by torch where Transformer Engine is installed.

    Until Megatron's local spec does so itself.
    """
    from megatron.core.transformer import attention

    attention.SplitAlongDim = None


def read_indices(load: Callable) -> None:
    """Let Megatron's datasets read their cached indices with `load`.

    Until Megatron reads no pickles from the cache.
    """
    from megatron.core.datasets import blended_dataset, gpt_dataset

    class _NumPy:
        def __getattr__(self, name: str) -> Any:
            return getattr(np, name)

    numpy: Any = _NumPy()
    numpy.load = load
    blended_dataset.numpy = gpt_dataset.numpy = numpy


@contextlib.contextmanager
def without_barriers() -> Iterator[None]:
    """Keep Megatron's builder of datasets on rank 0 from waiting for other ranks, which build nothing.

    Until the builder takes a process group, or no barrier.
    """
    barrier = dist.barrier
    dist.barrier = lambda *arguments, **options: None
    try:
        yield
    finally:
        dist.barrier = barrier
