"""What ZeRO 3 gathers where, and its averaging of gradients and gathering of weights without loops over the ranks.

DeepSpeed 0.19.8 cuts and joins every tensor rank by rank. With hundreds of ranks, that keeps the host busy for longer
than a step keeps the GPU. The functions here send the same numbers, and cut and join them for all ranks at once.
"""

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import partition_parameters, stage3
from deepspeed.runtime.zero.partition_parameters import AllGatherCoalescedHandle, AllGatherHandle, ZeroParamStatus
from torch import Tensor

from megatron_tape.model.layers import PositionTransformerLayer


def update_weights(zero: stage3.DeepSpeedZeroOptimizer_Stage3) -> None:
    """Let the model have the fp32 weights of `zero`, which it has after a step, when these have been exchanged."""
    zero._partition_all_parameters()
    for group in range(len(zero.fp16_groups)):
        zero._reassign_or_swap_out_partitioned_parameters(group)
    if zero.persistent_parameters:
        zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


def gather_for_whole_layers(model: torch.nn.Module) -> None:
    """Let ZeRO 3 gather the encoding's parameters with each layer.

    It would gather them only for `LayerPosition.forward`, but a bias is computed from them before, inside attention.
    """
    for layer in model.modules():
        if isinstance(layer, PositionTransformerLayer):
            for parameter in layer.position.parameters():
                deepspeed.zero.register_external_parameter(layer, parameter)


def replace_loops_over_ranks(waiting: Callable[[], AbstractContextManager]) -> None:
    """Let DeepSpeed call these functions, until the process ends; `waiting` is entered while they wait for others."""
    stage3.reduce_scatter_coalesced = functools.partial(average_and_scatter, waiting=waiting)
    partition_parameters.AllGatherCoalescedHandle.wait = functools.partialmethod(_wait, waiting=waiting)
    partition_parameters.AllGatherHandle.wait = functools.partialmethod(_wait_for_one, waiting=waiting)


def average_and_scatter(
    tensors: list[Tensor],
    group: dist.ProcessGroup,
    waiting: Callable[[], AbstractContextManager] = contextlib.nullcontext,
) -> list[Tensor]:
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
    with waiting():
        dist.reduce_scatter_tensor(rows[rank], rows.view(-1), group=group)
    return [share[:part] for share, part in zip(rows[rank].split(sizes), parts)]


def _wait(
    handle: AllGatherCoalescedHandle,
    handle_dependency: bool = True,
    *,
    waiting: Callable[[], AbstractContextManager],
) -> None:
    """Wait for gathered weights, and give each parameter its own."""
    if handle.complete:
        return
    with waiting():
        handle.allgather_handle.wait()
    gathered = handle.partitions[0]._base  # the tensor of which there is a part for each rank
    rows, first = gathered.view(handle.world_size, -1), 0
    for parameter in handle.params:
        size = parameter.ds_tensor.ds_numel
        flat = rows[:, first : first + size].reshape(-1)[: parameter.ds_numel]
        parameter.data = flat.view(parameter.ds_shape).to(parameter.ds_tensor.dtype)
        parameter.ds_status = ZeroParamStatus.AVAILABLE
        first += size
    if gathered.is_cuda:
        gathered.record_stream(torch.cuda.current_stream())
    handle.complete = True


_DEEPSPEEDS = partition_parameters.AllGatherHandle.wait


def _wait_for_one(
    handle: AllGatherHandle, handle_dependency: bool = True, *, waiting: Callable[[], AbstractContextManager]
) -> None:
    """Wait for the weights of a parameter that is gathered alone."""
    with waiting():
        _DEEPSPEEDS(handle, handle_dependency)
