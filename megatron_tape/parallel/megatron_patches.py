"""All patches of Megatron-core 0.16.1 and 0.19.2.

Each docstring says why the patch is needed, and when it is no longer needed. Where it names no
version, both need it. A patch lasts until the process ends, unless it is a context manager. Each
function imports the modules of Megatron that it patches, so that a program does not load others.
"""

import contextlib
import functools
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
    """Make attention split the output of its projection into queries, keys and values with `split`.

    `split` gets the tensor and the widths of the three parts of its last axis. Megatron uses
    Transformer Engine or, if it is not installed, torch. Unnecessary once Megatron accepts a
    function as an argument.
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


def send_through_cpu() -> None:
    """Make pipeline stages send copies of their tensors on the CPU, and receive into such copies.

    Gloo cannot send and receive tensors on a GPU, though all its collectives that this project uses
    accept them. Only tests use gloo with a GPU. Unnecessary once gloo sends tensors on a GPU.
    """
    from megatron.core.pipeline_parallel import p2p_communication

    for name in ("_batched_p2p_ops", "_p2p_ops"):
        start = getattr(p2p_communication, name)
        # A later call must not replace the functions again.
        if not isinstance(start, functools.partial):
            setattr(p2p_communication, name, functools.partial(_start_on_cpu, start))


_TRANSFERS = ("send_prev", "recv_prev", "send_next", "recv_next")
"""The transfers between pipeline stages that a call may start, in the order in which Megatron's
`_batched_p2p_ops` returns their requests.
"""


def _start_on_cpu(start: Callable, **arguments: Any) -> list | dict:
    """Start sending and receiving with copies on the CPU, and return the requests as `start` does.

    `start` is one of Megatron's functions: `_batched_p2p_ops` returns a list of requests, and
    `_p2p_ops` a dict by transfer. Their `arguments` are a tensor or None for each of `_TRANSFERS`,
    with the prefix `tensor_`, and the ranks and the process group.
    """
    # Both by transfer: the copies on the CPU, and the tensors to receive into.
    copies = {}
    targets = {}
    for transfer in _TRANSFERS:
        name = f"tensor_{transfer}"
        tensor = arguments[name]
        if tensor is None:
            continue
        copy = tensor.detach().to("cpu", copy=True)
        copies[transfer] = copy
        arguments[name] = copy
        if transfer.startswith("recv"):
            targets[transfer] = tensor

    requests = start(**arguments)
    requests_by_transfer = requests
    if isinstance(requests, list):
        requests_by_transfer = dict(zip(copies, requests, strict=True))

    on_cpu = {}
    for transfer, request in requests_by_transfer.items():
        copy = copies[transfer]
        target = targets.get(transfer)
        on_cpu[transfer] = _RequestOnCpu(request, copy, target)
    if isinstance(requests, list):
        return list(on_cpu.values())
    return on_cpu


class _RequestOnCpu:
    """A request that sends a copy on the CPU, or receives into one. `wait` is the only method that
    Megatron's schedules call.
    """

    def __init__(self, request: dist.Work, copy: torch.Tensor, target: torch.Tensor | None):
        self._request = request
        self._copy = copy
        self._target = target
        """The tensor to which `wait` copies what was received; None if the request sends."""

    def wait(self) -> None:
        """Wait until the tensor is sent, or received and copied to its device."""
        self._request.wait()
        if self._target is not None:
            # Detached, since Megatron's tensors require gradients, and torch refuses to change such
            # tensors in place.
            self._target.detach().copy_(self._copy)


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
