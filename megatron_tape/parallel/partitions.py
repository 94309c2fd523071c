"""A rank's storage of a parameter: its tensor-parallel shard, or its partition of the shard under ZeRO 3."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


def shard_shape(parameter: nn.Parameter) -> torch.Size:
    """Return the shape of the tensor-parallel shard, also if ZeRO 3 has partitioned it."""
    return getattr(parameter, "ds_shape", parameter.shape)


def local_storage(parameter: nn.Parameter) -> tuple[Tensor, int]:
    """Return this rank's flat storage of a parameter, and its offset in the flattened tensor-parallel shard.

    Under ZeRO 3 it is the rank's partition without padding, which may be empty; otherwise the whole shard.
    """
    if not hasattr(parameter, "ds_tensor"):
        return parameter.detach().view(-1), 0
    size = parameter.ds_tensor.ds_numel
    first = min(parameter.ds_zero_partition_rank * size, parameter.ds_numel)
    return parameter.ds_tensor[: parameter.ds_numel - first], first


@torch.no_grad()
def write_shard(parameter: nn.Parameter, shard: Tensor) -> None:
    """Copy this rank's part of a tensor-parallel shard into its storage."""
    storage, offset = local_storage(parameter)
    storage.copy_(shard.reshape(-1)[offset : offset + len(storage)])


def allocate(
    model: nn.Module, device: torch.device | str, partition: Callable[[nn.Parameter], None] | None = None
) -> None:
    """Allocate uninitialized memory on `device` for the parameters on torch's meta device.

    `partition` is called on each parameter after its allocation, so that at most one is whole at a time. The model gets
    new `Parameter` objects with the attributes of the old ones; no other object may refer to the old ones.
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
