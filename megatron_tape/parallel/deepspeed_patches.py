"""Everything that is replaced in DeepSpeed 0.19.8, with the reason; no known release does without any of it.

Patches of modules last until the process ends, those of an engine or optimizer as long as that.
"""

import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.comm import comm
from deepspeed.runtime.utils import combine_grad_norm_groups
from deepspeed.runtime.zero import partition_parameters, stage3
from deepspeed.runtime.zero.partition_parameters import AllGatherCoalescedHandle, AllGatherHandle, ZeroParamStatus
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS
from torch import Tensor
from torch.nn import Parameter

Waiting = Callable[[], AbstractContextManager]
"""Entered while a rank waits for others."""


def compile_nothing() -> None:
    """Stop DeepSpeed from building its shared-memory collectives with a C++ compiler when it starts without CUDA.

    They serve only inference, take half a minute, and would require a compiler. Until they are built on first use.
    """
    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    if builder is not None:
        deepspeed.ops.__compatible_ops__[builder.NAME] = False


def destroy_group() -> None:
    """Destroy the group of all ranks; until DeepSpeed drops its reference to it itself."""
    comm.destroy_process_group()
    comm.cdb = None


def accept_optimizer(kind: type[torch.optim.Optimizer]) -> None:
    """Keep DeepSpeed from warning of an optimizer that it does not know; tests train with ours under every ZeRO stage.

    Until `zero_allow_untested_optimizer` warns no more.
    """
    if kind not in ZERO_SUPPORTED_OPTIMIZERS:
        ZERO_SUPPORTED_OPTIMIZERS.append(kind)


def leave_out_updates(zero: DeepSpeedZeroOptimizer | stage3.DeepSpeedZeroOptimizer_Stage3, judge: Callable) -> None:
    """Make no update where `judge` returns true for the gradient norm: DeepSpeed is told an infinite one.

    It then cleans up as after a gradient that is infinite, about which it says nothing any more. Until DeepSpeed lets
    one see the norm and skip the step.
    """
    zero.loss_scaler.update_scale = lambda overflow: None
    by_groups = isinstance(zero, stage3.DeepSpeedZeroOptimizer_Stage3)  # of which it takes the norm itself
    name = "_get_norm_groups" if by_groups else "scaled_global_norm"
    of_deepspeed = getattr(zero, name)

    def judged() -> Tensor | list[Tensor]:
        found = of_deepspeed()
        norm = combine_grad_norm_groups(found) if by_groups else found
        if not judge(float(norm)):
            return found
        infinite = torch.full_like(norm, math.inf)
        return [*found, infinite] if by_groups else infinite

    setattr(zero, name, judged)


def average_with(
    zero: DeepSpeedZeroOptimizer, add: Callable[[Parameter, int], None], finish: Callable[..., None]
) -> None:
    """Let ZeRO 1 and 2 hand each parameter's gradient to `add`, with its group's number, and call `finish` at the end.

    Until DeepSpeed averages by reduce-scatter: its buckets reach across groups, of which ranks need unequal parts, so
    that it averages by all-reduce, which sends twice as much (see `training.gradients.ScatteredGradients`).
    """
    zero.gradient_accumulation_dtype = torch.float32
    zero.process_gradients = add
    zero.reduce_gradients = zero.overlapping_partition_gradients_reduce_epilogue = finish


def link_moments(zero: DeepSpeedZeroOptimizer) -> None:
    """Let ZeRO 1 and 2 find Adam's state by parameter.

    Until DeepSpeed links it when all groups have it: it does so once, after the first parameter group's first step.
    """
    zero._hp_optimizer_states_linked = False
    zero._lazy_init_hp_params_optimizer_state()


def cut_and_join_at_once(waiting: Waiting) -> None:
    """Let ZeRO 3 average gradients and gather weights without loops over the ranks.

    Until DeepSpeed does so: with hundreds of ranks, its loops keep the host busy for longer than a step keeps the GPU.
    The functions here send the same numbers, and cut and join them for all ranks at once.
    """
    stage3.reduce_scatter_coalesced = functools.partial(average_and_scatter, waiting=waiting)
    partition_parameters.AllGatherCoalescedHandle.wait = functools.partialmethod(_wait, waiting=waiting)
    partition_parameters.AllGatherHandle.wait = functools.partialmethod(_wait_for_one, waiting=waiting)


def average_and_scatter(
    tensors: list[Tensor], group: dist.ProcessGroup, waiting: Waiting = nullcontext
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


def _wait(handle: AllGatherCoalescedHandle, handle_dependency: bool = True, *, waiting: Waiting) -> None:
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


def _wait_for_one(handle: AllGatherHandle, handle_dependency: bool = True, *, waiting: Waiting) -> None:
    """Wait for the weights of a parameter that is gathered alone."""
    with waiting():
        _DEEPSPEEDS(handle, handle_dependency)
