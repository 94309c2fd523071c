"""All patches of Megatron-core 0.16.1 and 0.19.2.

Each docstring says why the patch is needed, and when it is no longer needed. Where it names no
version, both need it. A patch lasts until the process ends, unless it is a context manager. Each
function imports the modules of Megatron that it patches, so that a program does not load others.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


def run_without_cuda() -> None:
    """Make Megatron run on the CPU. Call it before a model is built.

    Megatron allocates the buffers of collectives on `torch.cuda.current_device()`, its activation
    checkpointing saves CUDA's random states, and its pipeline schedules allocate token counts on
    "cuda". Unnecessary once Megatron uses the device of its inputs.
    """
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import random

    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    schedules.torch = _TorchOnCpu()


class _TorchOnCpu:
    """A replacement for the torch module, whose `zeros` ignores the argument `device` and
    allocates on the CPU.
    """

    def __getattr__(self, name: str):
        return getattr(torch, name)

    @staticmethod
    def zeros(*args, device: object = None, **kwargs) -> torch.Tensor:
        return torch.zeros(*args, **kwargs)


def clear_group_variables() -> None:
    """Clear the process groups that `parallel_state.destroy_model_parallel` leaves in variables of
    its module.

    Unnecessary once it clears all of them.
    """
    from megatron.core import parallel_state

    for name, value in list(vars(parallel_state).items()):
        if isinstance(value, dist.ProcessGroup):
            setattr(parallel_state, name, None)


def split_qkv_with(split: Callable[[torch.Tensor, list[int]], tuple[torch.Tensor, ...]]) -> None:
    """Make attention split queries, keys and values, along the last axis, with `split`.

    Megatron splits them with Transformer Engine or, if it is not installed, with torch.
    Unnecessary once Megatron accepts a function as an argument.
    """
    from megatron.core.transformer import attention

    attention.SplitAlongDim = lambda qkv, dim, widths: split(qkv, widths)


def reduce_tensors_of_any_strides() -> None:
    """Make Megatron's all-reduce of activations and gradients work for tensors that are not
    contiguous.

    Megatron 0.16.1 reduces a contiguous copy of such a tensor, and returns the tensor without the
    reduction. Unnecessary in 0.19.2.
    """
    from megatron.core.tensor_parallel import mappings

    reduce = mappings._reduce
    mappings._reduce = lambda input_, group: reduce(input_.contiguous(), group)


def load_cached_indices_with(load: Callable[..., np.ndarray]) -> None:
    """Make Megatron's datasets load the cached arrays of their sample indices with `load`.

    `load` gets the arguments of `numpy.load`: the path of a `.npy` file, and options. Megatron
    0.16.1 calls `numpy.load` and allows pickles, but unpickling a file can run code. Megatron
    0.19.2 calls its own `safe_numpy_load`, which only unpickles harmless classes. Neither version
    says how to mend a damaged index. Unnecessary once Megatron accepts a loader as an argument.
    """
    from megatron.core.datasets import blended_dataset, gpt_dataset

    class NumPyWithLoad:
        """A replacement for the numpy module with another `load`."""

        def __getattr__(self, name: str) -> Any:
            return getattr(np, name)

    # Setting `np.load` itself would change it for all modules of the process.
    numpy: Any = NumPyWithLoad()
    numpy.load = load
    for module in (blended_dataset, gpt_dataset):
        module.numpy = numpy
        # Only 0.19.2 has this function.
        if hasattr(module, "safe_numpy_load"):
            module.safe_numpy_load = load


@contextlib.contextmanager
def barriers_disabled() -> Iterator[None]:
    """Make `dist.barrier` do nothing within the context.

    Megatron's dataset builder calls it. A builder that runs only on rank 0 would then wait for the
    other ranks. Unnecessary once the builder takes a process group.
    """
    barrier = dist.barrier
    dist.barrier = lambda *arguments, **options: None
    try:
        yield
    finally:
        dist.barrier = barrier
