"""All patches of Megatron-core 0.16.1. Each docstring says why, and what in Megatron would make it unnecessary.

A patch lasts until the process ends, unless it is a context manager. The functions import Megatron, so that a program
loads only the parts it uses.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


def run_without_cuda() -> None:
    """Make Megatron run on the CPU. Call it before a model is built.

    Megatron allocates collective buffers on `torch.cuda.current_device()`, activation recomputation saves CUDA's random
    states, and pipeline schedules count tokens on "cuda". Unnecessary once Megatron uses the current device.
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
    """Megatron's `CudaRNGStatesTracker` for the CPU: named states of torch's CPU generator."""

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
    """The torch module, with a `zeros` that ignores the device and allocates on the CPU."""

    def __getattr__(self, name: str):
        return getattr(torch, name)

    @staticmethod
    def zeros(*args, device: object = None, **kwargs) -> torch.Tensor:
        return torch.zeros(*args, **kwargs)


def clear_group_variables() -> None:
    """Clear the process groups that `parallel_state.destroy_model_parallel` leaves in its module variables."""
    from megatron.core import parallel_state

    for name, value in list(vars(parallel_state).items()):
        if isinstance(value, dist.ProcessGroup):
            setattr(parallel_state, name, None)


def split_qkv_with_torch() -> None:
    """Make attention split q, k and v with torch even if Transformer Engine is installed.

    Unnecessary once Megatron's local spec does so.
    """
    from megatron.core.transformer import attention

    attention.SplitAlongDim = None


def load_cached_indices_with(load: Callable) -> None:
    """Make Megatron's datasets load their cached indices with `load` instead of `numpy.load`, which allows pickles."""
    from megatron.core.datasets import blended_dataset, gpt_dataset

    class _NumPy:
        def __getattr__(self, name: str) -> Any:
            return getattr(np, name)

    numpy: Any = _NumPy()
    numpy.load = load
    blended_dataset.numpy = gpt_dataset.numpy = numpy


@contextlib.contextmanager
def barriers_disabled() -> Iterator[None]:
    """Within the context, disable `dist.barrier`: Megatron's dataset builder on rank 0 would wait for other ranks.

    Unnecessary once the builder takes a process group.
    """
    barrier = dist.barrier
    dist.barrier = lambda *arguments, **options: None
    try:
        yield
    finally:
        dist.barrier = barrier
