"""A rank's memory for parameters: its share under tensor parallelism and, under ZeRO 3, only its partition of that."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


def share_shape(parameter: nn.Parameter) -> torch.Size:
    """Return the shape of the tensor-parallel share, also where ZeRO 3 has left nothing of it in place."""
    return getattr(parameter, "ds_shape", parameter.shape)


def own_memory(parameter: nn.Parameter) -> tuple[Tensor, int]:
    """Return this rank's memory for a parameter, flat, and which number of the flat tensor-parallel share comes first.

    Under ZeRO 3 that is the rank's partition without its padding, which may be empty; otherwise the whole share.
    """
    if not hasattr(parameter, "ds_tensor"):
        return parameter.detach().view(-1), 0
    size = parameter.ds_tensor.ds_numel
    first = min(parameter.ds_zero_partition_rank * size, parameter.ds_numel)
    return parameter.ds_tensor[: parameter.ds_numel - first], first


@torch.no_grad()
def write_share(parameter: nn.Parameter, share: Tensor) -> None:
    """Write what this rank keeps of a tensor-parallel share."""
    memory, first = own_memory(parameter)
    memory.copy_(share.reshape(-1)[first : first + len(memory)])


def allocate(
    model: nn.Module, device: torch.device | str, partition: Callable[[nn.Parameter], None] | None = None
) -> None:
    """Give the parameters on torch's meta device memory on `device`, whose contents are undefined.

    `partition` cuts each as soon as it is there, so that no two are whole at a time. The model gets new `Parameter`s
    with the attributes of the old ones; no other object may hold them yet.
    """
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.is_meta:
                continue
            placed = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
            vars(placed).update(vars(parameter) | vars(placed))
            setattr(module, name, placed)
            if partition is not None:
                partition(placed)
