"""All patches of DeepSpeed 0.19.8. Each docstring says why the patch is needed, and when it is no
longer needed.

A patch of a module lasts until the process ends. A patch of an engine or an optimizer changes only
this object.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.comm import comm
from deepspeed.runtime.zero import partition_parameters, stage3
from deepspeed.runtime.zero.partition_parameters import (
    AllGatherCoalescedHandle,
    AllGatherHandle,
    ZeroParamStatus,
)
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS
from torch import Tensor
from torch.nn import Parameter

Waiting = Callable[[], AbstractContextManager]
"""Returns a context that is entered while a rank waits for others, for example to measure the time.
"""


def skip_inference_op_build() -> None:
    """Keep DeepSpeed from compiling its shared-memory collectives when it starts without CUDA.

    Compilation takes half a minute and requires a C++ compiler, but only inference uses these
    collectives. Unnecessary once DeepSpeed compiles them on first use.
    """
    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    if builder is not None:
        deepspeed.ops.__compatible_ops__[builder.NAME] = False


def destroy_group() -> None:
    """Destroy the default process group, and clear DeepSpeed's reference to it.

    If the reference remained, a later `deepspeed.init_distributed` would keep the backend of the
    destroyed group. Unnecessary once DeepSpeed's `destroy_process_group` clears it.
    """
    comm.destroy_process_group()
    comm.cdb = None


def accept_optimizer(kind: type[torch.optim.Optimizer]) -> None:
    """Register an optimizer class as supported by ZeRO, so that DeepSpeed does not warn about an
    untested optimizer.

    This project's tests train with the optimizer under every ZeRO stage.
    """
    if kind not in ZERO_SUPPORTED_OPTIMIZERS:
        ZERO_SUPPORTED_OPTIMIZERS.append(kind)


def replace_gradient_norm(
    zero: DeepSpeedZeroOptimizer | stage3.DeepSpeedZeroOptimizer_Stage3,
    compute_norm: Callable[[], Tensor],
) -> None:
    """Make the optimizer clip by the gradient norm that `compute_norm` returns, and skip the update
    if the norm is not finite.

    ZeRO 1 and 2 launch 15 kernels for each parameter: 2 for its norm, and 13 to find values that
    are not finite. A norm of all gradients takes fewer, and is not finite if a value is not. ZeRO 3
    launches 2 for each norm. `compute_norm` may also return infinity to skip an update for another
    reason. DeepSpeed's message about an overflow is suppressed, since the trainer logs skipped
    steps. Unnecessary once DeepSpeed computes one norm of all gradients, and has a hook between
    this computation and the update.
    """
    # `update_scale` only logs the message, because bf16 and fp32 use no loss scale.
    zero.loss_scaler.update_scale = lambda overflow: None
    if isinstance(zero, stage3.DeepSpeedZeroOptimizer_Stage3):
        # ZeRO 3 combines the norms in this list, one for each parameter group.
        zero._get_norm_groups = lambda: [compute_norm()]
    else:
        # This would search every gradient. DeepSpeed checks the norm afterwards.
        zero.check_overflow = lambda partition_gradients: None
        zero.scaled_global_norm = compute_norm


def replace_gradient_reduction(
    zero: DeepSpeedZeroOptimizer, add: Callable[[Parameter, int], None], finish: Callable[..., None]
) -> None:
    """Make ZeRO 1 and 2 call `add(parameter, group_index)` for each gradient, and `finish` after
    the last gradient.

    `training.gradients.ScatteredGradients` implements both with reduce-scatter. DeepSpeed cannot
    use reduce-scatter, since its buckets span parameter groups and ranks own unequal parts of a
    group. Its all-reduce sends twice as much.
    """
    # ZeRO then keeps the averaged gradients, to which `finish` adds, in fp32.
    zero.gradient_accumulation_dtype = torch.float32
    zero.process_gradients = add
    zero.reduce_gradients = zero.overlapping_partition_gradients_reduce_epilogue = finish


def link_optimizer_states(zero: DeepSpeedZeroOptimizer) -> None:
    """Make Adam's state accessible from the parameters under ZeRO 1 and 2.

    DeepSpeed links them only once, after the update of the first parameter group, when the other
    groups do not have any state yet. Unnecessary once it links them after all groups are updated.
    """
    # If this flag is true, the method below does nothing.
    zero._hp_optimizer_states_linked = False
    zero._lazy_init_hp_params_optimizer_state()


def vectorize_zero3_collectives(waiting: Waiting) -> None:
    """Make ZeRO 3 split and concatenate the partitions of all ranks in one operation, instead of in
    loops over ranks.

    With hundreds of ranks, DeepSpeed's loops take longer on the host than a step takes on the GPU.
    The communication does not change. The context of `waiting` is entered while a rank waits for a
    collective. Unnecessary once DeepSpeed has no such loops.
    """
    stage3.reduce_scatter_coalesced = functools.partial(average_and_scatter, waiting=waiting)
    partition_parameters.AllGatherCoalescedHandle.wait = functools.partialmethod(
        _wait, waiting=waiting
    )
    partition_parameters.AllGatherHandle.wait = functools.partialmethod(
        _wait_for_one, waiting=waiting
    )


def average_and_scatter(
    tensors: list[Tensor], group: dist.ProcessGroup, waiting: Waiting = nullcontext
) -> list[Tensor]:
    """Average each tensor over `group`, and return this rank's flat partition of each average.

    With R ranks, a partition of a tensor of n elements has ceil(n / R) elements, except that the
    partitions of the last ranks may be shorter or empty. The context of `waiting` is entered while
    the rank waits for the others.
    """
    ranks = group.size()
    # Elements of a partition: the quotient is rounded up.
    sizes = [-(-tensor.numel() // ranks) for tensor in tensors]
    # Row r holds the partitions of all tensors that rank r receives.
    rows = tensors[0].new_empty(ranks, sum(sizes))
    for tensor, size, columns in zip(tensors, sizes, rows.split(sizes, dim=1)):
        flat = tensor.view(-1)
        # The first ranks have full partitions, and the next one has the remainder. The other
        # elements of `columns` are padding, and stay uninitialized.
        full_rows, remainder = divmod(tensor.numel(), size)
        columns[:full_rows] = flat[: full_rows * size].view(full_rows, size)
        if remainder:
            columns[full_rows, :remainder] = flat[full_rows * size :]
    rows.div_(ranks)

    # The result overwrites this rank's row.
    own = rows[group.rank()]
    with waiting():
        dist.reduce_scatter_tensor(own, rows.view(-1), group=group)
    averages = []
    for tensor, size, partition in zip(tensors, sizes, own.split(sizes)):
        # The number of elements from the start of this partition on. It is less than `size` if the
        # partition is padded, and negative if it is only padding.
        length = tensor.numel() - group.rank() * size
        averages.append(partition[: max(0, length)])
    return averages


def _wait(
    handle: AllGatherCoalescedHandle, handle_dependency: bool = True, *, waiting: Waiting
) -> None:
    """Wait for the all-gather of several parameters, within the context of `waiting`, and set their
    `data` to the whole weights.

    Replaces the method `wait` of the handle, whose argument `handle_dependency` is not used.
    """
    if handle.complete:
        return
    with waiting():
        handle.allgather_handle.wait()

    # `partitions` are views of one buffer, which `_base` is. Row r of it has the partitions of all
    # parameters that rank r has sent.
    gathered = handle.partitions[0]._base
    rows = gathered.view(handle.world_size, -1)
    start = 0
    for parameter in handle.params:
        size = parameter.ds_tensor.ds_numel
        # The slice at the end drops the padding of the last partitions.
        flat = rows[:, start : start + size].reshape(-1)[: parameter.ds_numel]
        parameter.data = flat.view(parameter.ds_shape).to(parameter.ds_tensor.dtype)
        parameter.ds_status = ZeroParamStatus.AVAILABLE
        start += size

    # The buffer was allocated in the stream of the all-gather. It must not be reused before the
    # copies above have run in this stream.
    if gathered.is_cuda:
        gathered.record_stream(torch.cuda.current_stream())
    handle.complete = True


# Read before `vectorize_zero3_collectives` replaces the method.
_UNPATCHED_WAIT = partition_parameters.AllGatherHandle.wait


def _wait_for_one(
    handle: AllGatherHandle, handle_dependency: bool = True, *, waiting: Waiting
) -> None:
    """Wait for the all-gather of a single parameter, within the context of `waiting`.

    Replaces the method `wait` of the handle, and calls it.
    """
    with waiting():
        _UNPATCHED_WAIT(handle, handle_dependency)
