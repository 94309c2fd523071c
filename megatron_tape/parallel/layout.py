"""Process groups, devices and seeds of a rank, and the `mpu` object that DeepSpeed takes."""

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
"""Added to the watchdog's timeout for collectives, so that the watchdog can write every rank's stack first."""
WITHOUT_LIMIT = timedelta(days=365)
NVIDIA_DRIVER = Path("/dev/nvidiactl")
"""Exists where NVIDIA's driver has found a GPU."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Options of glibc's mallopt: the free bytes at the top of the heap above which memory is returned to the system, and
the size above which an allocation gets its own mapping."""
_LARGEST = 2**31 - 1
"""The largest value of either option, in bytes (a C int)."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ParallelLayout:
    """The ranks of this process and its groups. Megatron modules receive `groups`; none uses a global rank."""

    groups: ProcessGroupCollection
    device: torch.device
    rank: int
    world_size: int
    tensor_parallel_rank: int
    tensor_parallel_size: int
    context_parallel_rank: int
    context_parallel_size: int
    pipeline_rank: int
    """The pipeline stage, which determines the layers of this rank."""
    pipeline_size: int
    data_parallel_rank: int
    """Ranks that differ in this number process different sequences."""
    data_parallel_size: int
    replica_rank: int
    """The rank within all data-parallel and context-parallel ranks, which hold the same tensor-parallel shard of the
    same layers. ZeRO partitions over them."""
    replica_size: int
    mpu: SimpleNamespace
    tokens: TokenLayout

    @classmethod
    def of(cls, groups: ProcessGroupCollection, device: torch.device, sequence_parallel: bool) -> "ParallelLayout":
        """Return the layout of this process in Megatron's groups."""
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
        """Return on every rank whether `flag` is true on any rank. Collective over all ranks."""
        found = torch.tensor([flag], dtype=torch.int32, device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return bool(found.item())

    def broadcast_from_last_stage(self, tensor: torch.Tensor) -> torch.Tensor:
        """Overwrite `tensor` with the last stage's and return it. Collective over the stages, with equal shapes."""
        if self.pipeline_size > 1:
            last = dist.get_global_rank(self.groups.pp, self.pipeline_size - 1)
            dist.broadcast(tensor, last, self.groups.pp)
        return tensor

    def gather_stages(self, value: Any) -> list[Any]:
        """Return the `value` of each stage, in order, on every stage. Collective over the stages."""
        values = [value] * self.pipeline_size
        if self.pipeline_size > 1:
            dist.all_gather_object(values, value, self.groups.pp)
        return values

    def gather(self, value: Any) -> list[Any]:
        """Return the `value` of each rank, in order, on every rank. Collective over all ranks."""
        values = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    @contextlib.contextmanager
    def first_on_node(self) -> Iterator[None]:
        """Run the block on local rank 0 first, so that other ranks of the node find what it cached. Collective."""
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

    DeepSpeed calls functions that `megatron.core.parallel_state` lacks, such as `get_model_parallel_world_size`. The
    model-parallel group, over which norms are summed, contains the tensor-parallel ranks of all stages. The
    data-parallel group, over which ZeRO partitions, contains all ranks with the same weights, context-parallel ranks
    included.
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
    """Initialize torch.distributed from torchrun's variables, or for a single process, and build Megatron's groups.

    The backend is NCCL with CUDA, otherwise gloo. Repeated calls keep the groups, or rebuild them if a size differs;
    layouts returned before are then invalid. `sequence_parallel` defaults to whether there are several tensor-parallel
    ranks. Collectives time out 10 minutes after `timeout` seconds; None disables the timeout.

    Each pipeline stage has tensor_model_parallel_size * context_parallel_size consecutive ranks, so that neighboring
    stages share a node or are on adjacent nodes.

    Raises:
        ConfigError: if there are more processes on this node than GPUs.
        NodeError: if this node cannot resolve the address of rank 0.
    """
    sizes = tensor_model_parallel_size, context_parallel_size, pipeline_model_parallel_size
    _, world_size = launcher.rank_and_size()
    assert world_size % math.prod(sizes) == 0, "checks.layout refuses other numbers of processes"
    prepare_cpu()
    device = _own_device()
    limit = WITHOUT_LIMIT if timeout is None else timedelta(seconds=timeout) + MARGIN
    if not dist.is_initialized():
        _initialize_process_group("nccl" if device.type == "cuda" else "gloo", limit)
    groups = _megatron_groups(sizes)
    # Defaults are 30 minutes in Megatron and 10 or 30 in torch; reused groups still have the previous call's timeout.
    for group in distributed_c10d._world.pg_map:
        distributed_c10d._set_pg_timeout(limit, group)
    return ParallelLayout.of(groups, device, sizes[0] > 1 if sequence_parallel is None else sequence_parallel)


def prepare_cpu() -> None:
    """Patch Megatron-core and DeepSpeed to run without CUDA. Call it before a model is built; a no-op with CUDA."""
    if torch.cuda.is_available():
        return
    from megatron_tape.parallel import deepspeed_patches

    megatron_patches.run_without_cuda()
    deepspeed_patches.skip_inference_op_build()
    keep_freed_memory()


def keep_freed_memory() -> None:
    """Make glibc reuse the memory of freed tensors instead of returning it to the system; a no-op without glibc.

    Fresh memory is mapped page by page on first access, which takes about as long as computing its contents.
    """
    with contextlib.suppress(OSError, AttributeError):
        set_option = ctypes.CDLL(None).mallopt
        # Versions before 2.35 accept at most 32 MiB. Setting either option turns off glibc's dynamic thresholds.
        if any(set_option(_MMAP_THRESHOLD, size) == 1 for size in (_LARGEST, 2**25)):
            set_option(_TRIM_THRESHOLD, _LARGEST)


def _own_device() -> torch.device:
    """Make the GPU of this local rank torch's current device and return it; without GPUs return the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank, devices = launcher.local_rank(), torch.cuda.device_count()
    problem = f"has no GPU: {devices} are visible here"
    refuse(local_rank >= devices, f"process {local_rank} of this node", problem, "start no more processes than GPUs")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def check_devices(requested: str) -> None:
    """Raise ConfigError if `train.device` is not available, or if GPUs of this node would be idle.

    GPUs would be idle if torch is built for GPUs but cannot use those of the node, or if the node's processes see more
    GPUs than there are processes.
    """
    key, prefix = "train.device", f"is {requested}, but torch {torch.__version__}"
    if requested == "cpu":
        return
    if torch.cuda.is_available():
        processes, devices = launcher.local_world_size(), torch.cuda.device_count()
        problem = f"is {requested}, but only {processes} of the {devices} visible GPUs would be used"
        fix = f"start {devices} processes, select GPUs with CUDA_VISIBLE_DEVICES, or set it to cpu"
        refuse(processes < devices, key, problem, fix)
        return
    fix = "check the output of nvidia-smi, or set it to cpu"
    refuse(requested == "cuda", key, f"{prefix} finds no GPU here ({_cuda_error()})", fix)
    if NVIDIA_DRIVER.exists() and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        refuse(torch.version.cuda is not None, key, f"{prefix} cannot use this node's GPUs ({_cuda_error()})", fix)
        logger.warning("WARNING: training on the CPU, as this torch is built without CUDA; see requirements-gpu.txt")


def _cuda_error() -> str:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0]
    return "it finds 0 devices"


def _initialize_process_group(backend: str, timeout: timedelta) -> None:
    """Initialize torch.distributed, and DeepSpeed on top of it."""
    import deepspeed

    # RANK alone may be a leftover of DeepSpeed; only a launcher sets the address of rank 0 as well.
    launched = {"RANK", "MASTER_ADDR"} <= set(os.environ)
    if launched:
        launcher.check_master_address()
    store, rank, size = next(dist.rendezvous("env://", timeout=timeout)) if launched else (dist.HashStore(), 0, 1)
    # torchrun keeps its store across restarts, with the addresses of processes that have ended.
    store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=size)
    os.environ.setdefault("LOCAL_RANK", "0")
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    atexit.register(_end_process_groups)


def _megatron_groups(sizes: tuple[int, int, int]) -> ProcessGroupCollection:
    """Return Megatron's groups for these tensor, context and pipeline-parallel sizes, existing ones if they match."""
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
            # There are no experts, but Megatron also builds their groups, which need this size with this order.
            expert_tensor_parallel_size=sizes[0] * sizes[1],
            create_gloo_process_groups=False,
        )
    return ProcessGroupCollection.use_mpu_process_groups()


def _destroy_groups() -> None:
    """Destroy Megatron's groups with their threads, which `destroy_model_parallel` leaves running."""
    variables = [value if isinstance(value, list) else [value] for value in vars(parallel_state).values()]
    groups = {group for values in variables for group in values if isinstance(group, dist.ProcessGroup)}
    parallel_state.destroy_model_parallel()
    gc.collect()  # models in reference cycles hold groups
    names = distributed_c10d._world.pg_names  # NCCL requires the same order on all ranks
    for group in sorted(groups - {dist.group.WORLD}, key=lambda group: names.get(group, "")):
        with contextlib.suppress(ValueError):  # already destroyed by Megatron
            dist.destroy_process_group(group)
    megatron_patches.clear_group_variables()


def _end_process_groups() -> None:
    """Destroy all groups and their threads, unless they were aborted.

    A gloo thread acquires the GIL to free the tensors of a finished collective. If the interpreter is shutting down by
    then, the process aborts.
    """
    if dist.is_initialized():
        from megatron_tape.parallel import deepspeed_patches

        _destroy_groups()
        deepspeed_patches.destroy_group()


def abort_process_groups() -> None:
    """Abort pending collectives, for which NCCL could otherwise block a failing process forever.

    Gloo's connections close with the process. A later `initialize_distributed` builds new groups.
    """
    if dist.is_initialized():
        distributed_c10d._abort_process_group()
        parallel_state.destroy_model_parallel()


@contextlib.contextmanager
def deterministic_kernels(enabled: bool) -> Iterator[None]:
    """Within the context, make torch and the project's kernels deterministic. Enter it before cuBLAS is used.

    Torch then raises RuntimeError for an operation without a deterministic kernel.
    """
    if not enabled:
        yield
        return
    workspace, cudnn = os.environ.get("CUBLAS_WORKSPACE_CONFIG"), torch.backends.cudnn
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    flags = cudnn.deterministic, cudnn.benchmark
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = workspace or ":4096:8"
    torch.use_deterministic_algorithms(True)
    # Filling uninitialized memory only costs time, since it is never read, and ZeRO's buffers are large.
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
    """Seed Python, NumPy and torch equally on all ranks, and Megatron's model-parallel generator by rank.

    Weights do not depend on these generators (see `model.initialization`).
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tracker = get_cuda_rng_tracker()
    tracker.reset()
    tracker.add("data-parallel-rng", seed)
    tracker.add("model-parallel-rng", seed + 2718 + layout.tensor_parallel_rank)
