"""How gradients are averaged under ZeRO 1 and 2, and those of parameters that every tensor-parallel rank holds whole.

Under sequence parallelism norms and TAPE's matrices (flagged `sequence_parallel`, Megatron's convention) see only their
rank's tokens, so their gradients have to be summed over the tensor-parallel group. Megatron does this in
`finalize_model_grads`, which DeepSpeed never calls. Here it is done once per optimizer step, when the gradients are
accumulated and averaged over the ranks that hold the same weights: a sum of averages is an average of sums. Ranks of a
tensor-parallel group hold shares of equal sizes, so ZeRO gives each of them the same parts of these parameters.
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import safe_get_local_grad
from torch import Tensor
from torch.nn import Parameter

from megatron_tape.parallel import deepspeed_patches


def replicated_parameters(model: torch.nn.Module) -> list[Parameter]:
    """Return the trained parameters whose gradients a tensor-parallel rank computes from its own tokens alone."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [parameter for parameter in trained if getattr(parameter, "sequence_parallel", False)]


def local_gradient(parameter: Parameter, zero_stage: int) -> Tensor | None:
    """Return the part of a parameter's averaged gradient that this rank's optimizer uses, or None if it uses none."""
    if zero_stage == 3:
        return safe_get_local_grad(parameter)
    held = parameter._hp_mapping
    return None if held is None else held.get_lp_grad_fragment(parameter._index_in_param_group)


def sum_over_group(gradients: list[Tensor], group: dist.ProcessGroup) -> None:
    """Replace each gradient by its sum over `group`, computed in fp32 by one all-reduce.

    All ranks give gradients of the same sizes in the same order.
    """
    if not gradients or group.size() == 1:
        return
    flat = torch.cat([gradient.reshape(-1).float() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    totals = flat.split([gradient.numel() for gradient in gradients])
    torch._foreach_copy_(gradients, [total.view_as(gradient) for gradient, total in zip(gradients, totals)])


@torch.no_grad()
def sum_replicated(parameters: list[Parameter], zero_stage: int, group: dist.ProcessGroup) -> None:
    """Sum the gradients of replicated parameters over the tensor-parallel group, before the optimizer's step."""
    parts = [local_gradient(parameter, zero_stage) for parameter in parameters]
    sum_over_group([part for part in parts if part is not None], group)


class _Scattered(NamedTuple):
    """A reduce-scatter under way."""

    group: int
    work: dist.Work
    share: Tensor
    """This rank's part of the flat gradients, which takes the sum over the ranks."""


class ScatteredGradients:
    """Averages gradients under ZeRO 1 and 2 by a reduce-scatter of each parameter group, as soon as all of it is there.

    The group of the parameter `late` waits for the end of the step, as something is still to be added to its gradient.

    ZeRO cuts each parameter group into equal parts for the ranks. DeepSpeed 0.19.8 fills buckets across the groups, of
    which ranks need unequal parts, and so averages them by all-reduce, which sends twice as much. This object replaces
    the methods that do so. It adds up in fp32, sums in `communication_precision`, and divides the sum. ZeRO 1 averages
    after the last micro-batch, ZeRO 2 after each of them.
    """

    def __init__(
        self,
        zero: DeepSpeedZeroOptimizer,
        overlap: bool,
        late: Parameter | None = None,
        waiting: Callable[[], AbstractContextManager] = contextlib.nullcontext,
    ):
        """Replace the methods. `waiting` is entered while the rank waits for others."""
        self._zero, self._overlap, self._late, self._waiting = zero, overlap, late, waiting
        self._sums: dict[int, Tensor] = {}
        """By group, the flat sum of this rank's gradients that have not been averaged yet."""
        self._under_way: list[_Scattered] = []
        self._missing: list[set[int]] = []
        self._begin()
        deepspeed_patches.replace_gradient_reduction(zero, self._add, self._finish)

    def _begin(self) -> None:
        self._missing = [set(range(len(parameters))) for parameters in self._zero.bit16_groups]

    def _add(self, parameter: Parameter, group: int) -> None:
        """Take a parameter's gradient of one micro-batch; a hook of the backward pass calls this."""
        first = self._zero.round_robin_bit16_offsets[group][parameter.param_idx_in_group]
        self._sum_of(group)[first : first + parameter.numel()].add_(parameter.grad.reshape(-1))
        parameter.grad = None
        averages = self._zero.partition_gradients or self._zero.is_gradient_accumulation_boundary()
        if averages and parameter is not self._late:
            self._missing[group].discard(parameter.param_idx_in_group)
            if not self._missing[group]:
                self._scatter(group)

    def add_to_late(self, gradient: Tensor) -> None:
        """Add what another rank has found of the gradient of `late`, before its group is averaged."""
        groups = enumerate(self._zero.bit16_groups)
        group = next(number for number, parameters in groups if any(one is self._late for one in parameters))
        first = self._zero.round_robin_bit16_offsets[group][self._late.param_idx_in_group]
        self._sum_of(group)[first : first + self._late.numel()].add_(gradient.reshape(-1))

    def _sum_of(self, group: int) -> Tensor:
        if group not in self._sums:
            dtype = self._zero.communication_data_type if self._zero.partition_gradients else torch.float32
            self._sums[group] = torch.zeros_like(self._zero.bit16_groups_flat[group], dtype=dtype)
        return self._sums[group]

    def _scatter(self, group: int) -> None:
        """Begin to average a group."""
        if self._zero.partition_gradients:
            self._receive()  # the group before takes memory, and the next micro-batch's gradients will
        flat = self._sum_of(group).to(self._zero.communication_data_type)
        del self._sums[group]
        ranks = self._zero.dp_process_group
        share = flat.chunk(ranks.size())[ranks.rank()]
        work = dist.reduce_scatter_tensor(share, flat, group=ranks, async_op=True)
        self._under_way.append(_Scattered(group, work, share))
        if not self._overlap:
            self._receive()

    def _receive(self) -> None:
        """Wait for what is under way: on a GPU, nothing computes meanwhile, nor sends what a pipeline's stages need."""
        while self._under_way:
            group, work, share = self._under_way.pop(0)
            with self._waiting():
                work.wait()
            averaged = self._zero._get_compact_grad_partition_buffer(group).flat_partition
            averaged.add_(share, alpha=1 / self._zero.dp_process_group.size())

    def _finish(self, **_: Any) -> None:
        """Average what is left, such as a group of which a parameter has no gradient; DeepSpeed calls this."""
        for group, missing in enumerate(self._missing):
            if missing or group in self._sums:
                self._scatter(group)
        self._receive()
        self._begin()
