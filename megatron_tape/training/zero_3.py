"""ZeRO 3's averaging of gradients and gathering of weights, without loops over the ranks.

DeepSpeed 0.19.8 cuts and joins every tensor rank by rank. With hundreds of ranks, that keeps the host busy for longer
than a step keeps the GPU. The functions here send the same numbers, and cut and join them for all ranks at once.
"""

import torch
import torch.distributed as dist
from deepspeed.runtime.zero import partition_parameters, stage3
from deepspeed.runtime.zero.partition_parameters import AllGatherCoalescedHandle, ZeroParamStatus
from torch import Tensor


def replace_loops_over_ranks() -> None:
    """Let DeepSpeed call these functions, until the process ends."""
    stage3.reduce_scatter_coalesced = average_and_scatter
    partition_parameters.AllGatherCoalescedHandle.wait = _wait


def average_and_scatter(tensors: list[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Average each tensor over `group`, and return this rank's part of it, flat.

    The parts of a tensor are equal, but the last ones may be shorter or empty.
    """
    ranks, rank = group.size(), group.rank()
    sizes = [-(-tensor.numel() // ranks) for tensor in tensors]
    rows = tensors[0].new_empty(ranks, sum(sizes))
    parts = []
    for tensor, size, columns in zip(tensors, sizes, rows.split(sizes, dim=1)):
        whole, rest = divmod(tensor.numel(), size)
        flat = tensor.view(-1)
        columns[:whole] = flat[: whole * size].view(whole, size)
        if rest:
            columns[whole, :rest] = flat[whole * size :]
        parts.append(min(size, max(0, tensor.numel() - rank * size)))
    rows.div_(ranks)
    dist.reduce_scatter_tensor(rows[rank], rows.view(-1), group=group)
    return [share[:part] for share, part in zip(rows[rank].split(sizes), parts)]


def _wait(handle: AllGatherCoalescedHandle, handle_dependency: bool = True) -> None:
    """Wait for gathered weights, and give each parameter its own."""
    if handle.complete:
        return
    handle.allgather_handle.wait()
    gathered = handle.partitions[0]._base  # the tensor of which there is a part for each rank
    rows, first = gathered.view(handle.world_size, -1), 0
    for parameter in handle.params:
        size = parameter.ds_tensor.ds_numel
        if handle.use_secondary_tensor:
            size *= parameter.ds_secondary_tensor_num_of_groups
        flat = rows[:, first : first + size].reshape(-1)[: parameter.ds_numel]
        parameter.data = flat.view(parameter.ds_shape).to(parameter.ds_tensor.dtype)
        parameter.ds_status = ZeroParamStatus.AVAILABLE
        first += size
    if gathered.is_cuda:
        gathered.record_stream(torch.cuda.current_stream())
    handle.complete = True
