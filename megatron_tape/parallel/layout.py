"""Process groups, seeds, and what DeepSpeed needs to know of them."""

import atexit
import contextlib
import ctypes
import gc
import logging
import math
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch.distributed import distributed_c10d

from megatron_tape.errors import refuse
from megatron_tape.parallel import launcher, megatron_patches
from megatron_tape.parallel.token_layout import TokenLayout

MARGIN = timedelta(minutes=10)
"""How much longer than the watch, which writes every rank's stack, the process groups wait for a rank."""
WITHOUT_LIMIT = timedelta(days=365)
NVIDIA_DRIVER = Path("/dev/nvidiactl")
"""Exists where NVIDIA's driver has found a GPU."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""From glibc's malloc.h: free bytes at the end of the heap that are returned; bytes of a tensor that gets a mapping of
its own."""
_LARGEST = 2**31 - 1
"""Bytes; both are a C int."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ParallelLayout:
    """The place of this process. Every Megatron module gets `groups`; none uses a global rank."""

    groups: ProcessGroupCollection
    device: torch.device
    rank: int
    world_size: int
    tensor_parallel_rank: int
    tensor_parallel_size: int
    context_parallel_rank: int
    context_parallel_size: int
    pipeline_rank: int
    """The stage; ranks with other numbers hold other layers."""
    pipeline_size: int
    data_parallel_rank: int
    """Ranks with other numbers hold different sequences."""
    data_parallel_size: int
    replica_rank: int
    """Among the ranks that hold the same tensor-parallel shard of the same layers: those of all data and context ranks,
    over which ZeRO partitions."""
    replica_size: int
    mpu: SimpleNamespace
    tokens: TokenLayout

    @classmethod
    def of(cls, groups: ProcessGroupCollection, device: torch.device, sequence_parallel: bool) -> "ParallelLayout":
        """Return the place of this process in Megatron's groups."""
        return cls(
            groups=groups,
            device=device,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            tensor_parallel_rank=groups.tp.rank(),
            tensor_parallel_size=groups.tp.size(),
            context_parallel_rank=groups.cp.rank(),
            context_parallel_size=groups.cp.size(),
            pipeline_rank=groups.pp.rank(),
            pipeline_size=groups.pp.size(),
            data_parallel_rank=groups.dp.rank(),
            data_parallel_size=groups.dp.size(),
            replica_rank=groups.dp_cp.rank(),
            replica_size=groups.dp_cp.size(),
            mpu=deepspeed_mpu(groups),
            tokens=TokenLayout.of(groups, sequence_parallel),
        )

    def any_rank(self, flag: bool) -> bool:
        """Return, on every rank, whether `flag` is set on any of them; all call it together."""
        found = torch.tensor([flag], dtype=torch.int32, device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return bool(found.item())

    def from_last_stage(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the last stage's tensor on all stages, which give one of its shape; all call it together."""
        if self.pipeline_size > 1:
            last = dist.get_global_rank(self.groups.pp, self.pipeline_size - 1)
            dist.broadcast(tensor, last, self.groups.pp)
        return tensor

    def gather_stages(self, value: Any) -> list[Any]:
        """Return the `value` of every stage, in order, on every stage; all call it together."""
        values = [value] * self.pipeline_size
        if self.pipeline_size > 1:
            dist.all_gather_object(values, value, self.groups.pp)
        return values

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's `value`, in order, on every rank; all call it together."""
        values = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    @contextlib.contextmanager
    def first_on_node(self) -> Iterator[None]:
        """Run a block on the first rank of each node before the others, which then find what it cached; all call it."""
        first = launcher.local_rank() == 0
        if not first:
            dist.barrier()
        try:
            yield
        finally:
            if first:
                dist.barrier()


def deepspeed_mpu(groups: ProcessGroupCollection) -> SimpleNamespace:
    """Return the `mpu` argument of `deepspeed.initialize`.

    `megatron.core.parallel_state` lacks names that DeepSpeed asks for (`get_model_parallel_world_size` and others);
    here all are answered from `groups`. The model-parallel group, over which norms are added up, is that of all tensor-
    parallel ranks of all stages, and ZeRO partitions over all ranks that hold the same weights, also those that hold
    other tokens of the same sequences.
    """
    answers = {}
    model = groups.tp if groups.pp.size() == 1 else groups.mp
    for name, group in (("model", model), ("tensor_model", groups.tp), ("data", groups.dp_cp)):
        answers[f"get_{name}_parallel_group"] = lambda group=group: group
        answers[f"get_{name}_parallel_rank"] = group.rank
        answers[f"get_{name}_parallel_world_size"] = group.size
    return SimpleNamespace(**answers)


def initialize_distributed(
    tensor_model_parallel_size: int = 1,
    sequence_parallel: bool | None = None,
    timeout: float | None = None,
    context_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
) -> ParallelLayout:
    """Join the process group torchrun describes (or make one of a single process) and build Megatron's groups.

    The backend is nccl with CUDA, otherwise gloo. A process may call this again: the groups are kept, or rebuilt if a
    size differs, which makes earlier layouts unusable. Without `sequence_parallel` tokens are sharded over the
    tensor-parallel ranks exactly when there are several. Collectives of all groups time out some minutes after
    `timeout` seconds, with None practically never. Raises ConfigError when this process has no GPU to itself, and
    NodeError when this node cannot find rank 0's.

    The stages of a pipeline have consecutive ranks, tensor_model_parallel_size * context_parallel_size for each, so
    that neighbours share a node or are on neighbouring ones.
    """
    sizes = tensor_model_parallel_size, context_parallel_size, pipeline_model_parallel_size
    _, world_size = launcher.rank_and_size()
    assert world_size % math.prod(sizes) == 0, "checks.layout refuses other numbers of processes"
    prepare_cpu()
    device = _own_device()
    limit = WITHOUT_LIMIT if timeout is None else timedelta(seconds=timeout) + MARGIN
    if not dist.is_initialized():
        _join_processes("nccl" if device.type == "cuda" else "gloo", limit)
    groups = _megatron_groups(sizes)
    # Megatron would give groups 30 minutes, torch 10 or 30; groups that are kept have those of an earlier call.
    for group in distributed_c10d._world.pg_map:
        distributed_c10d._set_pg_timeout(limit, group)
    return ParallelLayout.of(groups, device, sizes[0] > 1 if sequence_parallel is None else sequence_parallel)


def prepare_cpu() -> None:
    """Make megatron-core and DeepSpeed usable without CUDA; call once per process, before a model is built.

    Changes nothing if CUDA is available.
    """
    if torch.cuda.is_available():
        return
    from megatron_tape.parallel import deepspeed_patches

    megatron_patches.run_without_cuda()
    deepspeed_patches.compile_nothing()
    keep_freed_memory()


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


def _own_device() -> torch.device:
    """Return this process's GPU, made torch's current one, or the CPU where torch finds no GPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank, devices = launcher.local_rank(), torch.cuda.device_count()
    problem = f"has no GPU: {devices} are visible here"
    refuse(local_rank >= devices, f"process {local_rank} of this node", problem, "start no more processes than GPUs")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def check_devices(wanted: str) -> None:
    """Raise ConfigError if `train.device` cannot be had, or if GPUs that are there would not be used.

    That is, if torch is built for GPUs and finds none on a node that has some, or if this node's processes see more
    GPUs than there are processes.
    """
    key, said = "train.device", f"is {wanted}, but torch {torch.__version__}"
    if wanted == "cpu":
        return
    if torch.cuda.is_available():
        processes, devices = launcher.local_world_size(), torch.cuda.device_count()
        problem = f"is {wanted}, but only {processes} of the {devices} GPUs that are visible here would be used"
        fix = f"start {devices} processes, say in CUDA_VISIBLE_DEVICES which to use, or set it to cpu"
        refuse(processes < devices, key, problem, fix)
        return
    fix = "see what nvidia-smi says, or set it to cpu"
    refuse(wanted == "cuda", key, f"{said} finds no GPU here ({_cuda_error()})", fix)
    if NVIDIA_DRIVER.exists() and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        refuse(torch.version.cuda is not None, key, f"{said} cannot use this node's GPUs ({_cuda_error()})", fix)
        logger.warning("WARNING: training on the CPU, as this torch is built without CUDA; see requirements-gpu.txt")


def _cuda_error() -> str:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0]
    return "it counts none"


def _join_processes(backend: str, timeout: timedelta) -> None:
    """Initialize torch.distributed, and DeepSpeed on top of it."""
    import deepspeed

    # DeepSpeed leaves RANK behind where groups were made before; only a launcher says where rank 0 is.
    launched = {"RANK", "MASTER_ADDR"} <= set(os.environ)
    if launched:
        launcher.check_master_address()
    store, rank, size = next(dist.rendezvous("env://", timeout=timeout)) if launched else (dist.HashStore(), 0, 1)
    # torchrun keeps its store when it starts processes again, with the addresses of those that have ended.
    store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=size)
    os.environ.setdefault("LOCAL_RANK", "0")
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    atexit.register(_end_process_groups)


def _megatron_groups(sizes: tuple[int, int, int]) -> ProcessGroupCollection:
    """Return Megatron's groups for these tensor, context and pipeline-parallel sizes; those there are, if they fit."""
    if parallel_state.model_parallel_is_initialized():
        found = ProcessGroupCollection.use_mpu_process_groups()
        if (found.tp.size(), found.cp.size(), found.pp.size()) != sizes:
            _destroy_groups()
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            sizes[0],
            pipeline_model_parallel_size=sizes[2],
            context_parallel_size=sizes[1],
            order="tp-cp-ep-pp-dp",
            # There are no experts; with this size, Megatron's groups for them fit this order.
            expert_tensor_parallel_size=sizes[0] * sizes[1],
            create_gloo_process_groups=False,
        )
    return ProcessGroupCollection.use_mpu_process_groups()


def _destroy_groups() -> None:
    """Destroy Megatron's groups; its own `destroy_model_parallel` drops them, but their threads keep running."""
    held = [value if isinstance(value, list) else [value] for value in vars(parallel_state).values()]
    groups = {group for values in held for group in values if isinstance(group, dist.ProcessGroup)}
    parallel_state.destroy_model_parallel()
    gc.collect()  # of models in cycles of references, which hold groups
    names = distributed_c10d._world.pg_names  # NCCL wants the same order on all ranks
    for group in sorted(groups - {dist.group.WORLD}, key=lambda group: names.get(group, "")):
        with contextlib.suppress(ValueError):  # Megatron has destroyed some of them itself
            dist.destroy_process_group(group)
    megatron_patches.forget_groups()


def _end_process_groups() -> None:
    """End all groups and their threads, unless they were aborted.

    A thread of gloo's frees the tensors of a finished collective, for which it asks for Python's lock; if Python is
    ending by then, the process aborts.
    """
    if dist.is_initialized():
        from megatron_tape.parallel import deepspeed_patches

        _destroy_groups()
        deepspeed_patches.destroy_group()


def abort_process_groups() -> None:
    """Abort this rank's collectives: with NCCL, a process that ends because of an error could wait for them forever.

    Gloo needs no abort; its connections close with the process. A later `initialize_distributed` makes new groups.
    """
    if dist.is_initialized():
        distributed_c10d._abort_process_group()
        parallel_state.destroy_model_parallel()


@contextlib.contextmanager
def deterministic_kernels(enabled: bool) -> Iterator[None]:
    """Let torch and our kernels compute the same bits every time while the block runs.

    It must begin before cuBLAS is used. Inside it torch raises RuntimeError at an operation without a deterministic
    kernel.
    """
    if not enabled:
        yield
        return
    workspace, cudnn = os.environ.get("CUBLAS_WORKSPACE_CONFIG"), torch.backends.cudnn
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    flags = cudnn.deterministic, cudnn.benchmark
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = workspace or ":4096:8"
    torch.use_deterministic_algorithms(True)
    # Nothing reads what was not written, and ZeRO's buffers are large: filling them would only cost time.
    torch.utils.deterministic.fill_uninitialized_memory = False
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]
        cudnn.deterministic, cudnn.benchmark = flags
        if workspace is None:
            del os.environ["CUBLAS_WORKSPACE_CONFIG"]


def seed_everything(seed: int, layout: ParallelLayout) -> None:
    """Seed Python, NumPy and torch alike on every rank, and Megatron's tensor-parallel stream by rank.

    Weights do not depend on these streams (see `model.initialization`).
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tracker = get_cuda_rng_tracker()
    tracker.reset()
    tracker.add("data-parallel-rng", seed)
    tracker.add("model-parallel-rng", seed + 2718 + layout.tensor_parallel_rank)
