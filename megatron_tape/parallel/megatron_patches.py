"""All patches of Megatron-core 0.16.1 and 0.19.2.

Each docstring says why the patch is needed, and when it is no longer needed. All are needed in both versions. A patch
lasts until the process ends, unless it is a context manager. Each function imports the modules of Megatron that it
patches, so that a program does not load others.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


def run_without_cuda() -> None:
    """Make Megatron run on the CPU. Call it before a model is built.

    Megatron allocates the buffers of collectives on `torch.cuda.current_device()`, its activation checkpointing saves
    CUDA's random states, and its pipeline schedules allocate token counts on "cuda". Unnecessary once Megatron uses
    the device of its inputs.
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
    """A replacement for Megatron's `CudaRNGStatesTracker` that stores named states of torch's CPU generator."""

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
            raise KeyError(f"there is no random state {name!r}, only {sorted(self._states)}; call add first")
        outside = torch.get_rng_state()
        torch.set_rng_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = torch.get_rng_state()
            torch.set_rng_state(outside)


class _TorchOnCpu:
    """A replacement for the torch module whose `zeros` ignores the argument `device` and allocates on the CPU."""

    def __getattr__(self, name: str):
        return getattr(torch, name)

    @staticmethod
    def zeros(*args, device: object = None, **kwargs) -> torch.Tensor:
        return torch.zeros(*args, **kwargs)


def clear_group_variables() -> None:
    """Clear the process groups that `parallel_state.destroy_model_parallel` leaves in variables of its module.

    Unnecessary once it clears all of them.
    """
    from megatron.core import parallel_state

    for name, value in list(vars(parallel_state).items()):
        if isinstance(value, dist.ProcessGroup):
            setattr(parallel_state, name, None)


def split_qkv_with_torch() -> None:
    """Make attention split queries, keys and values with torch even if Transformer Engine is installed.

    Unnecessary once Megatron's local layer spec does not use Transformer Engine.
    """
    from megatron.core.transformer import attention

    attention.SplitAlongDim = None


def load_cached_indices_with(load: Callable) -> None:
    """Make Megatron's datasets load cached indices with `load`, which is called like `numpy.load`.

    Megatron 0.16.1 calls `numpy.load` and allows pickles, and unpickling a file can run code. 0.19.2 calls its own
    `safe_numpy_load`, which only unpickles harmless classes, but does not say how to mend a damaged index. Unnecessary
    once Megatron can be given a loader; the first reason ends with support for 0.16.1.
    """
    from megatron.core.datasets import blended_dataset, gpt_dataset

    class _NumPy:
        def __getattr__(self, name: str) -> Any:
            return getattr(np, name)

    numpy: Any = _NumPy()
    numpy.load = load
    for module in (blended_dataset, gpt_dataset):
        module.numpy = numpy
        if hasattr(module, "safe_numpy_load"):
            module.safe_numpy_load = load


@contextlib.contextmanager
def barriers_disabled() -> Iterator[None]:
    """Within the context, make `dist.barrier` do nothing.

    Megatron's dataset builder calls it, so that a builder on rank 0 alone would wait for the other ranks. Unnecessary
    once the builder takes a process group.
    """
    barrier = dist.barrier
    dist.barrier = lambda *arguments, **options: None
    try:
        yield
    finally:
        dist.barrier = barrier
