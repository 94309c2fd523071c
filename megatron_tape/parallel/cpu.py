"""Training without CUDA: redirect the few places where megatron-core assumes CUDA, and keep memory that was used."""

import contextlib
import ctypes

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""From glibc's malloc.h: free bytes at the end of the heap that are returned; bytes of a tensor that gets a mapping of
its own."""
_LARGEST = 2**31 - 1
"""Bytes; both are a C int."""


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


def prepare_cpu() -> None:
    """Make megatron-core and DeepSpeed usable without CUDA; call once per process, before a model is built.

    Changes nothing if CUDA is available. Otherwise it replaces `torch.cuda.current_device()` (Megatron allocates its
    collectives' buffers there), the random number tracker and state functions of
    `megatron.core.tensor_parallel.random`, which activation recomputation calls, and the torch of its pipeline
    schedules, which count tokens on "cuda".
    """
    if torch.cuda.is_available():
        return
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
    _keep_deepspeed_from_compiling()
    keep_freed_memory()


def _keep_deepspeed_from_compiling() -> None:
    """Stop DeepSpeed from building its shared-memory collectives with a C++ compiler when it starts without CUDA.

    They serve only inference, take half a minute, and would require a compiler.
    """
    import deepspeed.ops
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    if builder is not None:
        deepspeed.ops.__compatible_ops__[builder.NAME] = False


def keep_freed_memory() -> None:
    """Make the C library, if it is glibc, reuse the memory of freed tensors instead of returning it to the system.

    New memory must be mapped page by page when it is first touched, which takes about as long as computing what is
    written to it. What is kept is freed when the process ends.
    """
    with contextlib.suppress(OSError, AttributeError):
        set_option = ctypes.CDLL(None).mallopt
        # Before 2.35, glibc takes no more than 32 MiB. Either setting ends the automatic choice of both.
        if any(set_option(_MMAP_THRESHOLD, size) == 1 for size in (_LARGEST, 2**25)):
            set_option(_TRIM_THRESHOLD, _LARGEST)
