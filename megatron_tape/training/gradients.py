"""Average gradients under ZeRO 1 and 2, sum those of parameters that are replicated over
tensor-parallel ranks, and compute the norm of all gradients.

With sequence parallelism, norms and TAPE's matrices (Megatron's attribute `sequence_parallel`)
process only their rank's tokens, so their gradients must be summed over the tensor-parallel group.
Megatron does this in `finalize_model_grads`, which DeepSpeed does not call. `sum_replicated` does
it once per optimizer step. By then, the gradients are averaged over the data-parallel ranks and
partitioned by ZeRO. Tensor-parallel ranks have the same partitions of these parameters, because all
their shards have equal sizes.
"""

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import safe_get_local_grad
from torch import Tensor
from torch.nn import Parameter

from megatron_tape.parallel import deepspeed_patches
from megatron_tape.parallel.layout import ParallelLayout
from megatron_tape.parallel.partitions import is_sharded


def replicated_parameters(model: torch.nn.Module) -> list[Parameter]:
    """Return the trained parameters whose gradient on a tensor-parallel rank covers only the
    rank's own tokens.
    """
    return [
        parameter
        for parameter in model.parameters()
        if parameter.requires_grad and getattr(parameter, "sequence_parallel", False)
    ]


def local_gradient(parameter: Parameter, zero_stage: int) -> Tensor | None:
    """Return this rank's ZeRO partition of a parameter's averaged gradient, or None if the
    partition is empty.
    """
    if zero_stage == 3:
        return safe_get_local_grad(parameter)
    mapping = parameter._hp_mapping
    # DeepSpeed sets no mapping if this rank's partition has no element of the parameter.
    if mapping is None:
        return None
    return mapping.get_lp_grad_fragment(parameter._index_in_param_group)


def sum_over_group(gradients: list[Tensor], group: dist.ProcessGroup) -> None:
    """Replace each gradient in place by its sum over `group`, with one all-reduce in fp32.

    All ranks must pass gradients of the same sizes in the same order.
    """
    if not gradients or group.size() == 1:
        return
    flat = torch.cat([gradient.reshape(-1).float() for gradient in gradients])
    sizes = [gradient.numel() for gradient in gradients]
    dist.all_reduce(flat, group=group)
    totals = flat.split(sizes)
    for gradient, total in zip(gradients, totals):
        gradient.copy_(total.view_as(gradient))


@torch.no_grad()
def sum_replicated(parameters: list[Parameter], zero_stage: int, group: dist.ProcessGroup) -> None:
    """Sum the averaged gradients of `parameters` in place over the tensor-parallel group.

    Call this before the optimizer's step. `parameters` are those of `replicated_parameters`.
    """
    gradients = [local_gradient(parameter, zero_stage) for parameter in parameters]
    present = [gradient for gradient in gradients if gradient is not None]
    sum_over_group(present, group)


@torch.no_grad()
def gradient_norm(
    parameters: Iterable[Parameter], zero_stage: int, layout: ParallelLayout
) -> Tensor:
    """Return the norm of the whole model's averaged gradients, in fp32 and equal on all ranks.

    The norm is NaN or infinite if any element on any rank is, or if the norm's square overflows
    fp32. Call this between `sum_replicated` and the update. Collective over all ranks, each of
    which passes the trained parameters of its pipeline stage.
    """
    sharded = []
    replicated = []
    for parameter in parameters:
        gradient = local_gradient(parameter, zero_stage)
        if gradient is None:
            continue
        if is_sharded(parameter):
            sharded.append(gradient)
        else:
            replicated.append(gradient)

    squares = sum_of_squares(sharded, layout.device)
    # All tensor-parallel ranks have the replicated gradients. Each adds an equal share, so that the
    # sum over the ranks counts them once.
    replicated_squares = sum_of_squares(replicated, layout.device)
    squares += replicated_squares / layout.tensor_parallel_size

    # In fp32, a sum that is too large becomes infinite, and so does the norm. Adam's second moments
    # would overflow, too.
    total = squares.float()
    dist.all_reduce(total)
    return total.sqrt()


def sum_of_squares(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Return the sum of the squares of all elements, in fp64."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    # fp64, since on CPUs an fp32 norm of an embedding of 25 million elements is wrong by 0.1 %. A
    # GPU reads each tensor once, without an fp64 copy.
    norms = torch._foreach_norm(tensors, dtype=torch.float64)
    return torch.stack(norms).square().sum()


SMALL = 2**14
"""Maximum number of elements of a small gradient, such as that of a norm or of a matrix of the
encoding. Small gradients are accumulated together, in few kernels, because a kernel for each would
take longer to launch than to run.
"""


class _PendingReduceScatter(NamedTuple):
    """A reduce-scatter that has been started."""

    group: int
    """Index of the parameter group."""
    work: dist.Work
    shard: Tensor
    """This rank's partition of the flat gradients, which receives the sum over the ranks."""


class ScatteredGradients:
    """Averages gradients under ZeRO 1 and 2 with one reduce-scatter per parameter group.

    A group is averaged as soon as the backward pass has computed its last gradient: with ZeRO 1 in
    the last micro-batch, with ZeRO 2 in each micro-batch. Gradients are accumulated in fp32, summed
    over the ranks in `deepspeed.communication_precision`, and divided by the number of ranks. The
    group of the parameter `deferred` is averaged at the end of the step, because another pipeline
    stage adds to its gradient after the backward pass.

    These methods replace DeepSpeed's, which (in 0.19.8) use buckets that contain gradients of
    several groups. Ranks need unequal parts of such a bucket, so DeepSpeed averages it with an
    all-reduce, which sends twice as many bytes.
    """

    def __init__(
        self,
        zero: DeepSpeedZeroOptimizer,
        overlap: bool,
        deferred: Parameter | None = None,
        waiting: Callable[[], AbstractContextManager] = contextlib.nullcontext,
    ):
        """Replace the methods of `zero`.

        Args:
            zero: the optimizer that `deepspeed.initialize` returns under ZeRO 1 and 2.
            overlap: whether reduce-scatters run while the backward pass continues.
            deferred: a parameter whose gradient is complete only after the backward pass.
            waiting: returns a context that is entered while this rank waits for others, for
                example to measure the time.
        """
        self._zero = zero
        self._overlap = overlap
        self._deferred = deferred
        self._waiting = waiting
        self._sums: dict[int, Tensor] = {}
        """Flat gradients that this rank has accumulated but not averaged yet, by parameter group.
        """
        self._small: dict[Parameter, tuple[Tensor, Tensor]] = {}
        """Small gradients that have not been added to the flat sums yet, by parameter: the slice of
        the flat sum, and the gradient.
        """
        self._pending: list[_PendingReduceScatter] = []
        self._missing: list[set[int]] = []
        """For each parameter group, the indices of the parameters whose gradients are not complete.
        """
        self._expect_all_gradients()
        deepspeed_patches.replace_gradient_reduction(zero, self._add, self._finish)

    def _expect_all_gradients(self) -> None:
        """Mark the gradients of all parameters as not complete."""
        self._missing = [set(range(len(parameters))) for parameters in self._zero.bit16_groups]

    def _add(self, parameter: Parameter, group: int) -> None:
        """Accumulate a parameter's gradient of one micro-batch. If this completes the gradients of
        the parameter group, start to average them.

        DeepSpeed calls this during the backward pass. `group` is the index of the parameter group.
        """
        self._accumulate(parameter, parameter.grad, group)
        parameter.grad = None
        # `partition_gradients` is true for ZeRO 2, which averages in each micro-batch.
        is_averaged = (
            self._zero.partition_gradients or self._zero.is_gradient_accumulation_boundary()
        )
        if not is_averaged or parameter is self._deferred:
            return

        missing = self._missing[group]
        missing.discard(parameter.param_idx_in_group)
        if not missing:
            self._scatter(group)

    def add_to_deferred(self, gradient: Tensor) -> None:
        """Add a gradient of `deferred` from another pipeline stage.

        Call this before DeepSpeed calls `_finish`, which averages the group of `deferred`.
        """
        for group, parameters in enumerate(self._zero.bit16_groups):
            # `self._deferred in parameters` would compare the elements of tensors.
            if any(parameter is self._deferred for parameter in parameters):
                self._accumulate(self._deferred, gradient, group)

    def _accumulate(self, parameter: Parameter, gradient: Tensor, group: int) -> None:
        """Add a gradient to its place in the flat sum of its parameter group. `_add_small` adds
        small gradients later.
        """
        # ZeRO's offsets of the parameters in the flat tensor of their group.
        start = self._zero.round_robin_bit16_offsets[group][parameter.param_idx_in_group]
        stop = start + parameter.numel()
        place = self._flat_sum(group)[start:stop]
        flat_gradient = gradient.reshape(-1)
        if parameter.numel() > SMALL:
            place.add_(flat_gradient)
            return

        # A second gradient of the parameter, usually that of the next micro-batch.
        if parameter in self._small:
            self._add_small()
        self._small[parameter] = place, flat_gradient

    def _add_small(self) -> None:
        """Add the small gradients of a micro-batch to their places in the flat sums."""
        if not self._small:
            return
        places, gradients = zip(*self._small.values())
        self._small = {}

        # One conversion for all. `_foreach_add_` launches a kernel for each tensor unless all have
        # the same dtype.
        flat = torch.cat(gradients).to(places[0].dtype)
        sizes = [place.numel() for place in places]
        torch._foreach_add_(places, flat.split(sizes))

    def _flat_sum(self, group: int) -> Tensor:
        """Return the flat gradients of a group that this rank has accumulated; zeros at first."""
        if group not in self._sums:
            dtype = torch.float32
            # ZeRO 2 averages each micro-batch by itself, so the sum has only one term.
            if self._zero.partition_gradients:
                dtype = self._zero.communication_data_type
            weights = self._zero.bit16_groups_flat[group]
            self._sums[group] = torch.zeros_like(weights, dtype=dtype)
        return self._sums[group]

    def _scatter(self, group: int) -> None:
        """Start the reduce-scatter of a group."""
        self._add_small()
        if self._zero.partition_gradients:
            # Free the gradients of the previous group before those of this one are copied.
            self._finish_pending()
        flat = self._flat_sum(group).to(self._zero.communication_data_type)
        del self._sums[group]

        process_group = self._zero.dp_process_group
        # The sum overwrites this rank's partition of `flat`.
        shard = flat.chunk(process_group.size())[process_group.rank()]
        work = dist.reduce_scatter_tensor(shard, flat, group=process_group, async_op=True)
        self._pending.append(_PendingReduceScatter(group, work, shard))
        if not self._overlap:
            self._finish_pending()

    def _finish_pending(self) -> None:
        """Wait for pending reduce-scatters, and add their averages to ZeRO's gradients.

        On a GPU, the kernels and the sends between pipeline stages that are started later also wait
        for the reduce-scatters.
        """
        while self._pending:
            group, work, shard = self._pending.pop(0)
            with self._waiting():
                work.wait()
            # The fp32 buffer from which ZeRO updates this rank's partition of the group.
            averaged = self._zero._get_compact_grad_partition_buffer(group).flat_partition
            averaged.add_(shard, alpha=1 / self._zero.dp_process_group.size())

    def _finish(self, **_: Any) -> None:
        """Average the groups that `_add` has not averaged, and prepare for the next backward pass.

        `_add` leaves the group of `deferred`, and groups with a parameter that had no gradient.
        DeepSpeed calls this after the backward pass, with arguments that are not needed here.
        """
        for group, missing in enumerate(self._missing):
            if missing or group in self._sums:
                self._scatter(group)
        self._finish_pending()
        self._expect_all_gradients()
