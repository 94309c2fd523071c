"""The parallel layout of a process: its ranks, process groups and device, and DeepSpeed's `mpu`
object.

TP, CP, PP and DP stand for tensor, context, pipeline and data parallelism.
"""

import atexit
import contextlib
import ctypes
import gc
import logging
import math
import os
import random
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed import distributed_c10d

from megatron_tape.errors import ConfigError
from megatron_tape.io.versions import cuda_build_fix
from megatron_tape.parallel import launcher, megatron_patches
from megatron_tape.parallel.token_layout import TokenLayout

MARGIN = timedelta(minutes=10)
"""Collectives time out this much later than the watchdog, so that it can write the stacks of all
ranks first.
"""
WITHOUT_LIMIT = timedelta(days=365)
"""Timeout of collectives if the timeout is disabled."""
NVIDIA_DRIVER = Path("/dev/nvidiactl")
"""A file that exists if NVIDIA's driver has found a GPU."""
_TRIM_THRESHOLD = -1
"""Number of an option of glibc's mallopt: free memory at the top of the heap, in bytes, above which
it is returned to the system."""
_MMAP_THRESHOLD = -3
"""Number of another option: the size in bytes above which an allocation has its own memory mapping,
which is returned to the system as soon as it is freed."""
_LARGEST = 2**31 - 1
"""Largest value of these options, which are C ints."""

logger = logging.getLogger(__name__)


class ParallelLayout:
    """The ranks, process groups and device of this process.

    Megatron modules receive `groups` as an argument. They do not use global ranks.
    """

    def __init__(
        self, groups: ProcessGroupCollection, device: torch.device, sequence_parallel: bool
    ):
        self.groups = groups
        self.device = device
        self.token_layout = TokenLayout.of(groups, sequence_parallel)
        """Distribution of sequences, tokens and heads over the ranks."""
        self.mpu = deepspeed_mpu(groups)
        """The model parallel unit for `deepspeed.initialize`."""

        self.rank = dist.get_rank()
        """Global rank."""
        self.world_size = dist.get_world_size()
        self.tensor_parallel_rank = groups.tp.rank()
        self.tensor_parallel_size = groups.tp.size()
        self.context_parallel_size = groups.cp.size()
        self.pipeline_rank = groups.pp.rank()
        """Number of the pipeline stage, from 0."""
        self.pipeline_size = groups.pp.size()
        self.data_parallel_rank = groups.dp.rank()
        """Ranks with different values train on different sequences."""
        self.data_parallel_size = groups.dp.size()
        self.replica_rank = groups.dp_cp.rank()
        """Rank within the DP x CP ranks that hold the same tensor-parallel shard of the same
        layers. ZeRO partitions over these ranks."""
        self.replica_size = groups.dp_cp.size()

    def any_rank(self, flag: bool) -> bool:
        """Return true on every rank if `flag` is true on any rank. Collective over all ranks."""
        result = torch.tensor([flag], dtype=torch.int32, device=self.device)
        dist.all_reduce(result, op=dist.ReduceOp.MAX)
        return bool(result.item())

    def broadcast_from_last_pipeline_stage(self, tensor: torch.Tensor) -> torch.Tensor:
        """Overwrite `tensor` with that of the last pipeline stage, and return it.

        The tensors of all stages have the same shape. Collective over the stages.
        """
        if self.pipeline_size > 1:
            last = dist.get_global_rank(self.groups.pp, self.pipeline_size - 1)
            dist.broadcast(tensor, last, self.groups.pp)
        return tensor

    def gather_pipeline_stages(self, value: Any) -> list[Any]:
        """Return the values of all pipeline stages, in order, on every stage. Collective over the
        stages.
        """
        values = [value] * self.pipeline_size
        if self.pipeline_size > 1:
            dist.all_gather_object(values, value, self.groups.pp)
        return values

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in order, on every rank. Collective over all ranks."""
        values = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    @contextlib.contextmanager
    def first_on_node(self) -> Iterator[None]:
        """Run the code within the context on local rank 0 first, then on the node's other ranks.

        The other ranks then find cached results. Collective over all ranks.
        """
        is_first = launcher.local_rank() == 0
        if not is_first:
            dist.barrier()
        try:
            yield
        finally:
            # The other ranks wait for local rank 0 in the barrier, even if it has failed.
            if is_first:
                dist.barrier()


def deepspeed_mpu(groups: ProcessGroupCollection) -> SimpleNamespace:
    """Return the object that `deepspeed.initialize` takes as `mpu` (model parallel unit).

    Its functions, such as `get_data_parallel_group`, return process groups, and their ranks and
    sizes. `megatron.core.parallel_state` lacks some that DeepSpeed calls. The model-parallel group,
    over which norms are summed, contains the TP ranks of all pipeline stages. The data-parallel
    group, over which ZeRO partitions, contains the DP x CP ranks that hold the same weights.
    """
    functions = {}
    # Without pipeline stages, the TP group has the same ranks as the model-parallel group. Use the
    # TP group, since each group has its own communicator.
    model = groups.tp if groups.pp.size() == 1 else groups.mp
    for name, group in (("model", model), ("tensor_model", groups.tp), ("data", groups.dp_cp)):
        # The default argument keeps the group of this iteration.
        functions[f"get_{name}_parallel_group"] = lambda group=group: group
        functions[f"get_{name}_parallel_rank"] = group.rank
        functions[f"get_{name}_parallel_world_size"] = group.size
    return SimpleNamespace(**functions)


def initialize_distributed(
    tensor_model_parallel_size: int = 1,
    sequence_parallel: bool | None = None,
    timeout: float | None = None,
    context_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
) -> ParallelLayout:
    """Initialize torch.distributed and Megatron's process groups, and return their layout.

    Ranks come from torchrun's variables; without them, this is a single process. The backend is
    NCCL with CUDA, except in tests whose ranks share a GPU, and gloo without. A later call reuses
    the groups, or rebuilds them if a size differs, which makes earlier layouts invalid.

    Args:
        tensor_model_parallel_size: the setting in `parallel`, like the other two sizes. The number
            of processes must be a multiple of the product of the three sizes.
        sequence_parallel: whether to shard tokens outside attention; None enables it if TP > 1.
        timeout: `train.hang_timeout` in seconds. Collectives time out MARGIN later, or after
            WITHOUT_LIMIT if None.

    Raises:
        ConfigError: if there are more processes on this node than GPUs, or if the environment
            variable `launcher.SHARED_GPU` is set outside of pytest.
        NodeError: if this node cannot resolve the address of rank 0.
    """
    sizes = tensor_model_parallel_size, context_parallel_size, pipeline_model_parallel_size
    _, world_size = launcher.rank_and_size()
    assert world_size % math.prod(sizes) == 0, (
        f"{world_size} processes are not a multiple of the product of {sizes}"
    )
    prepare_cpu()
    device = _own_device()
    group_timeout = WITHOUT_LIMIT
    if timeout is not None:
        group_timeout = timedelta(seconds=timeout) + MARGIN
    if not dist.is_initialized():
        _initialize_process_group(_prepare_backend(device), group_timeout)

    groups = _megatron_groups(*sizes)
    # Set the timeout of all groups: Megatron creates groups with torch's default of 10 or 30
    # minutes, and reused groups have the timeout of the previous call.
    for group in distributed_c10d._world.pg_map:
        distributed_c10d._set_pg_timeout(group_timeout, group)
    if sequence_parallel is None:
        sequence_parallel = tensor_model_parallel_size > 1
    return ParallelLayout(groups, device, sequence_parallel)


def prepare_cpu() -> None:
    """Patch Megatron-core and DeepSpeed to run without CUDA; do nothing with CUDA. Call it before a
    model is built.
    """
    if torch.cuda.is_available():
        return
    from megatron_tape.parallel import deepspeed_patches

    megatron_patches.run_without_cuda()
    deepspeed_patches.skip_inference_op_build()
    keep_freed_memory()


def keep_freed_memory() -> None:
    """Make glibc reuse the memory of freed tensors instead of returning it to the system; do
    nothing without glibc.

    The system maps new memory page by page on first access, which takes about as long as computing
    a tensor in it.
    """
    with contextlib.suppress(OSError, AttributeError):
        set_option = ctypes.CDLL(None).mallopt
        # mallopt returns 1 if it accepts the value; `any` then tries no other. glibc before 2.35
        # accepts at most 32 MiB, which is tried second. Setting either option turns off glibc's
        # dynamic thresholds.
        if any(set_option(_MMAP_THRESHOLD, size) == 1 for size in (_LARGEST, 2**25)):
            set_option(_TRIM_THRESHOLD, _LARGEST)


def _own_device() -> torch.device:
    """Make the GPU of this local rank the current device, and return it. Without GPUs, return the
    CPU.

    Raises ConfigError if the rank has no GPU, because there are more processes than GPUs.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = launcher.local_rank()
    devices = torch.cuda.device_count()
    if local_rank >= devices:
        raise ConfigError(
            f"local rank {local_rank}",
            f"has no GPU, since only {devices} are visible (ranks count from 0)",
            f"start at most {devices} processes per node",
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def check_devices(requested: str) -> None:
    """Raise ConfigError if `train.device` is not available, or if GPUs of this node would be idle.

    `requested` is the value of `train.device`. GPUs would be idle if torch is built with CUDA but
    cannot use the GPUs of this node, or if there are fewer processes than visible GPUs.
    """
    if requested == "cpu":
        return

    if torch.cuda.is_available():
        processes = launcher.local_world_size()
        devices = torch.cuda.device_count()
        if processes < devices:
            raise ConfigError(
                "train.device",
                f"is {requested}, but only {processes} of the {devices} visible GPUs would be used",
                f"start {devices} processes, set CUDA_VISIBLE_DEVICES, or set it to cpu",
            )
        return

    # An empty CUDA_VISIBLE_DEVICES asks for a run without GPUs.
    hides_gpus = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    has_gpu = NVIDIA_DRIVER.exists() and not hides_gpus
    if requested == "cuda" or has_gpu and torch.version.cuda is not None:
        raise ConfigError(
            "train.device",
            f"is {requested}, but torch {torch.__version__} cannot use a GPU of this node"
            f" ({_cuda_error()})",
            "check the output of nvidia-smi, or set it to cpu",
        )
    if has_gpu:
        logger.warning(
            "warning: training on the CPU, since torch is built without CUDA; to use this node's"
            " GPUs, %s",
            cuda_build_fix(),
        )


def _cuda_error() -> str:
    """Return why CUDA is not available."""
    # `is_available` only returns false, but `init` raises an error that says what is wrong.
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0]
    return "it finds 0 devices"


def _prepare_backend(device: torch.device) -> str:
    """Return the backend of process groups: NCCL for a GPU, and gloo for the CPU and for a GPU that
    ranks share.

    Gloo's collectives accept tensors on a GPU, but gloo cannot send and receive them. For a shared
    GPU, Megatron is therefore patched to send and receive copies on the CPU.
    """
    if device.type != "cuda":
        return "gloo"
    if not launcher.ranks_share_gpu():
        return "nccl"
    megatron_patches.send_through_cpu()
    return "gloo"


def _initialize_process_group(backend: str, timeout: timedelta) -> None:
    """Initialize torch.distributed, and DeepSpeed on top of it.

    `timeout` is that of collectives. Raises NodeError if the address of rank 0 cannot be resolved.
    """
    import deepspeed

    # A single process needs no connections, so its store is in its own memory.
    store, rank, size = dist.HashStore(), 0, 1
    if launcher.has_rank_0_address():
        launcher.check_master_address()
        store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
    # When torchrun restarts the processes, its store still has the addresses of the previous ones.
    store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=size)
    # DeepSpeed requires this variable also in a single process.
    os.environ.setdefault("LOCAL_RANK", "0")
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    atexit.register(_end_process_groups)


def _megatron_groups(tp: int, cp: int, pp: int) -> ProcessGroupCollection:
    """Return Megatron's process groups for these TP, CP and PP sizes.

    Groups of an earlier call in this process are reused if their sizes are equal, and otherwise
    destroyed.
    """
    if parallel_state.model_parallel_is_initialized():
        existing = ProcessGroupCollection.use_mpu_process_groups()
        if (existing.tp.size(), existing.cp.size(), existing.pp.size()) != (tp, cp, pp):
            _destroy_groups()

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tp,
            pipeline_model_parallel_size=pp,
            context_parallel_size=cp,
            # Each pipeline stage has TP x CP consecutive ranks, and the stages of a pipeline follow
            # each other, so that neighboring stages are on the same node or on adjacent nodes.
            order="tp-cp-ep-pp-dp",
            # Megatron also builds groups of experts, which are not used. In this order, they are
            # valid only with this size.
            expert_tensor_parallel_size=tp * cp,
            create_gloo_process_groups=False,
        )
    return ProcessGroupCollection.use_mpu_process_groups()


def _destroy_groups() -> None:
    """Destroy Megatron's groups and their threads, which `destroy_model_parallel` leaves
    running.
    """
    # Megatron has no list of its groups. They are in variables of the module, or in lists there.
    groups = set()
    for value in vars(parallel_state).values():
        values = value if isinstance(value, list) else [value]
        groups.update(group for group in values if isinstance(group, dist.ProcessGroup))
    parallel_state.destroy_model_parallel()
    gc.collect()  # models in reference cycles refer to groups
    # NCCL requires that all ranks destroy the groups in the same order.
    names = distributed_c10d._world.pg_names
    for group in sorted(groups - {dist.group.WORLD}, key=lambda group: names.get(group, "")):
        with contextlib.suppress(ValueError):  # already destroyed by Megatron
            dist.destroy_process_group(group)
    megatron_patches.clear_group_variables()


def _end_process_groups() -> None:
    """Destroy all groups and their threads when the interpreter exits, unless the groups were
    aborted.

    A gloo thread acquires the GIL to free the tensors of a finished collective. If this happened
    while the interpreter shuts down, the process would abort.
    """
    if dist.is_initialized():
        from megatron_tape.parallel import deepspeed_patches

        _destroy_groups()
        deepspeed_patches.destroy_group()


def abort_process_groups() -> None:
    """Abort pending collectives, since NCCL could block a failing process forever until they are
    finished.

    Gloo's connections close when the process ends. A later `initialize_distributed` builds new
    groups.
    """
    if dist.is_initialized():
        distributed_c10d._abort_process_group()
        # Megatron only forgets the groups here, so that `initialize_distributed` does not reuse
        # them.
        parallel_state.destroy_model_parallel()


@contextlib.contextmanager
def deterministic_kernels(enabled: bool) -> Iterator[None]:
    """Use deterministic kernels of torch and of this project within the context, if `enabled`.

    Torch then raises RuntimeError for an operation without a deterministic kernel. Enter the
    context before cuBLAS is used for the first time, because cuBLAS then reads its environment
    variable.
    """
    if not enabled:
        yield
        return
    was_filling = torch.utils.deterministic.fill_uninitialized_memory
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # By default, torch would also fill uninitialized memory. This changes no results, but takes
    # time in ZeRO's large buffers.
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        with torch.backends.cudnn.flags(enabled=True, deterministic=True):
            yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = was_filling


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch with the same seed on all ranks.

    Initial weights do not depend on any of these generators (see `model.initialization`), and no
    layer draws numbers.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
