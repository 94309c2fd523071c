"""Gradients of the parameters that every tensor-parallel rank holds whole.

Under sequence parallelism norms and TAPE's matrices (flagged `sequence_parallel`, Megatron's convention) see only their
rank's tokens, so their gradients have to be summed over the tensor-parallel group. Megatron does this in
`finalize_model_grads`, which DeepSpeed never calls. Here it is done once per optimizer step, when DeepSpeed has
accumulated the gradients and averaged them over the ranks that hold the same weights: a sum of averages is an average
of sums. Ranks of a tensor-parallel group hold shares of equal sizes, so ZeRO gives each of them the same parts of these
parameters.
"""

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_local_grad, safe_set_local_grad
from torch import Tensor
from torch.nn import Parameter

from megatron_tape.config.schema import DeepSpeedConfig
from megatron_tape.parallel.layout import ParallelLayout


def replicated_parameters(model: torch.nn.Module) -> list[Parameter]:
    """Return the trained parameters whose gradients a tensor-parallel rank computes from its own tokens alone."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [parameter for parameter in trained if getattr(parameter, "sequence_parallel", False)]


def sum_over_group(gradients: list[Tensor], group: dist.ProcessGroup, device: torch.device) -> None:
    """Replace each gradient by its sum over `group`, computed in fp32 by one all-reduce on `device`.

    All ranks give gradients of the same sizes in the same order.
    """
    if not gradients or group.size() == 1:
        return
    flat = torch.cat([gradient.reshape(-1).float() for gradient in gradients]).to(device)
    dist.all_reduce(flat, group=group)
    totals = flat.to(gradients[0].device).split([gradient.numel() for gradient in gradients])
    torch._foreach_copy_(gradients, [total.view_as(gradient) for gradient, total in zip(gradients, totals)])


class ReplicatedGradients:
    """The gradients of a model's replicated parameters, held by the optimizer that `deepspeed.initialize` returned."""

    def __init__(self, model: torch.nn.Module, optimizer: Any, settings: DeepSpeedConfig, layout: ParallelLayout):
        self._parameters = replicated_parameters(model)
        self._optimizer = optimizer
        self._zero_stage, self._offloaded = settings.zero_stage, settings.offload_optimizer
        self._layout = layout

    @torch.no_grad()
    def sum(self) -> None:
        """Sum them over the tensor-parallel group; call between the last backward pass and the optimizer's step."""
        if not self._parameters:
            return
        if self._offloaded and self._layout.device.type == "cuda":
            torch.cuda.synchronize(self._layout.device)  # DeepSpeed copies gradients to the host asynchronously
        parts = [(parameter, self._part(parameter)) for parameter in self._parameters]
        parts = [(parameter, part) for parameter, part in parts if part is not None]
        sum_over_group([part for _, part in parts], self._layout.groups.tp, self._layout.device)
        if self._offloaded:
            for parameter, part in parts:
                self._update_norm(parameter, part)

    def _part(self, parameter: Parameter) -> Tensor | None:
        """Return the part of the parameter's gradient that this rank's optimizer uses, or None if it uses none."""
        if self._zero_stage == 0:
            return parameter.grad
        if self._zero_stage == 3:
            return safe_get_local_grad(parameter)
        held = parameter._hp_mapping
        return None if held is None else held.get_lp_grad_fragment(parameter._index_in_param_group)

    def _update_norm(self, parameter: Parameter, part: Tensor) -> None:
        """Replace the norm of a part that has changed: with offloading, DeepSpeed takes norms in the backward pass."""
        if self._zero_stage == 3:
            safe_set_local_grad(parameter, part)  # which takes the norm as well
        else:
            self._optimizer.norm_for_param_grads[self._optimizer.get_param_id(parameter)] = part.norm()
