"""A fake GPU in a fake process group: answers in place of `torch.cuda`, stand-ins for operators and kernels.

Collectives return at once. This replaces functions of torch, Megatron, DeepSpeed and Triton until the process ends.
"""

import contextlib
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_tape.planning.rehearsal.cuda_hooks import fill_cuda_hooks
from megatron_tape.planning.rehearsal.tracking import Tracker

aten = torch.ops.aten
PROPERTIES = SimpleNamespace(
    name="imaginary H100",
    multi_processor_count=132,
    total_memory=80 * 2**30,
    major=9,
    minor=0,
    L2_cache_size=50 * 2**20,
)
PER_NODE = 8


class FakeDeviceError(RuntimeError):
    """A kernel launch that a GPU would refuse."""


def install_fake_world(world_size: int, rank: int) -> None:
    """Make this process, until it ends, rank `rank` of `world_size`, on a node with eight fake GPUs.

    Raises `ConfigError` if that is not possible with this version of torch.
    """
    os.environ |= {
        "WORLD_SIZE": str(world_size),
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": str(PER_NODE),
    }
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "DS_ACCELERATOR": "cuda"}
    os.environ.pop("TRITON_INTERPRET", None)  # launches are checked; nothing is interpreted
    fill_cuda_hooks()
    _answer_for_cuda()
    _replace_operators()
    _replace_launches()
    _join_fake_group(world_size, rank)


def _join_fake_group(world_size: int, rank: int) -> None:
    import deepspeed
    import deepspeed.runtime.zero.partitioned_param_coordinator as coordinator
    from megatron.core import parallel_state

    def all_gather_own_object(gathered: list, own: object, group: dist.ProcessGroup | None = None) -> None:
        gathered[:] = [own] * len(gathered)

    # These would exchange objects with other ranks.
    coordinator.assert_ints_same_as_other_ranks = _constantly()
    dist.broadcast_object_list = _constantly()
    dist.all_gather_object = all_gather_own_object
    create_group = parallel_state.create_group
    parallel_state.create_group = lambda ranks=None, **others: create_group(ranks, **others | {"backend": "fake"})
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    deepspeed.init_distributed(dist_backend="nccl", auto_mpi_discovery=False, verbose=False)


def _constantly(value: Any = None) -> Callable:
    return lambda *_, **__: value


class _Handle:
    """A stream or event; all its methods do nothing."""

    device = torch.device("cuda", 0)
    device_index = 0

    def __init__(self, *_, **__):
        pass

    def __getattr__(self, name: str) -> Callable:
        return lambda *_, **__: _Handle()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


class _HostGenerator(torch.Generator):
    """Accepts a GPU as its device, as Megatron and DeepSpeed ask; fake tensors draw nothing from it."""

    def __new__(cls, device=None):
        return super().__new__(cls)


def _answer_for_cuda() -> None:
    cuda, gib = torch.cuda, 2**30
    state = lambda *_, **__: torch.zeros(16, dtype=torch.uint8)  # noqa: E731
    answers = {
        "is_available": True,
        "is_initialized": True,
        "device_count": PER_NODE,
        "current_device": 0,
        "get_device_capability": (PROPERTIES.major, PROPERTIES.minor),
        "get_device_name": PROPERTIES.name,
        "get_device_properties": PROPERTIES,
        "mem_get_info": (79 * gib, 80 * gib),
        "is_bf16_supported": True,
        "is_current_stream_capturing": False,
    }
    answers |= dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), 0)
    answers |= dict.fromkeys(
        ("_lazy_init", "set_device", "empty_cache", "reset_peak_memory_stats", "manual_seed", "manual_seed_all")
    )
    answers["memory_stats"] = {}
    for name, value in answers.items():
        setattr(cuda, name, _constantly(value))
    cuda.synchronize = lambda *_: Tracker.note_wait("synchronize")
    for name in ("device", "device_of", "stream"):
        setattr(cuda, name, lambda *_: contextlib.nullcontext())
    # Distinct classes, since they are compared by isinstance.
    cuda.Stream, cuda.Event = type("Stream", (_Handle,), {}), type("Event", (_Handle,), {})
    cuda.current_stream, cuda.default_stream = cuda.Stream, cuda.Stream
    for module in (cuda, cuda.random):
        module.get_rng_state, module.set_rng_state = state, _constantly()
    cuda.default_generators = [SimpleNamespace(set_state=_constantly(), get_state=state)] * PER_NODE
    cuda.nvtx.range_push, cuda.nvtx.range_pop = _constantly(), _constantly()
    torch.Generator = _HostGenerator
    torch.accelerator.is_available = _constantly(True)
    torch.Tensor.pin_memory = Tracker.pin
    torch._subclasses.fake_tensor.init_gpu_context = _constantly()
    FakeTensorMode.avoid_device_init = property(lambda self: True)


def _replace_operators() -> None:
    """Replace operators that, without a device, are decomposed and keep other tensors than on a GPU."""
    from megatron.core.tensor_parallel import random

    plain_attention = F.scaled_dot_product_attention

    def attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        if v.shape[-1] != q.shape[-1]:  # cuDNN's kernels alone take wider values
            return aten._scaled_dot_product_cudnn_attention(q, k, v, attn_mask, True, 0.0, is_causal)[0]
        if attn_mask is None and q.dtype in (torch.bfloat16, torch.float16):
            return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]
        if q.shape[1] != k.shape[1]:  # no fast kernel takes grouped heads with a mask or in fp32
            return plain_attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        bias = None if attn_mask is None else attn_mask.expand(-1, q.shape[1], -1, -1)
        return aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, is_causal)[0]

    F.scaled_dot_product_attention = attention
    F.rms_norm = lambda x, shape, weight, eps=None: _FusedRMSNorm.apply(x, weight)
    F.silu = lambda x, inplace=False: _Silu.apply(x)
    random.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    torch.nn.Module._apply = _move
    # Otherwise Adam would update tensor by tensor, with other temporaries than on a GPU.
    sys.modules["torch.optim.optimizer"]._foreach_supported_types.append(FakeTensor)


class _FusedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        scales = x.new_empty(x.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(x, weight, scales)
        return x * weight

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class _Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return torch.empty_like(gradient)


def _move(module: torch.nn.Module, function: Callable, recurse: bool = True) -> torch.nn.Module:
    """Apply `function` in place: torch would replace fake parameters, without the attributes that Megatron set."""
    for tensor in [*module.parameters(recurse), *module.buffers(recurse)]:
        with torch.no_grad():
            moved = function(tensor)
        if moved is not tensor:
            tensor.data, tensor.fake_device = moved, moved.fake_device
    return module


def _replace_launches() -> None:
    import triton

    def launcher(kernel, grid):
        def launch(*arguments, **_):
            name = getattr(kernel, "fn", kernel).__name__
            for position, argument in enumerate(arguments):
                if isinstance(argument, Tensor) and not argument.is_cuda:
                    raise FakeDeviceError(f"kernel {name} is given a tensor on the CPU as argument {position}")
            if not (0 < grid[0] < 2**31 and all(0 < size < 2**16 for size in grid[1:])):
                raise FakeDeviceError(f"kernel {name} is launched with the grid {tuple(grid)}, which no GPU takes")
            Tracker.note_launch(name)

        return launch

    triton.runtime.jit.KernelInterface.__getitem__ = launcher
