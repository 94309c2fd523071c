"""Access to what this rank stores of a parameter.

A shard is what a tensor-parallel rank holds of a parameter. ZeRO 3 flattens a shard and divides it
into partitions, one for each rank with the same shard.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn


def is_sharded(parameter: Tensor) -> bool:
    """Return whether the tensor-parallel ranks hold different parts of a parameter."""
    return getattr(parameter, "tensor_model_parallel", False)


def shard_shape(parameter: nn.Parameter) -> torch.Size:
    """Return the shape of a parameter's shard, whether or not ZeRO 3 has partitioned it."""
    return getattr(parameter, "ds_shape", parameter.shape)


def local_storage(parameter: nn.Parameter) -> tuple[Tensor, int]:
    """Return the flat tensor in which this rank stores a parameter, and its offset in the flattened
    shard.

    Under ZeRO 3, this is the rank's partition without padding, which may be empty. Otherwise, it is
    the whole shard, and the offset is 0.
    """
    if not hasattr(parameter, "ds_tensor"):
        return parameter.detach().view(-1), 0
    # All partitions have this size; the last ones are padded. One that is only padding would start
    # after the end of the shard, so its offset is limited.
    size = parameter.ds_tensor.ds_numel
    offset = min(parameter.ds_zero_partition_rank * size, parameter.ds_numel)
    # The shard has `ds_numel - offset` elements from the offset on; what follows is padding.
    return parameter.ds_tensor[: parameter.ds_numel - offset], offset


@torch.no_grad()
def write_shard(parameter: nn.Parameter, shard: Tensor) -> None:
    """Set a parameter to the values in `shard`, this rank's whole tensor-parallel shard.

    Under ZeRO 3, the rank copies only its partition.
    """
    storage, offset = local_storage(parameter)
    storage.copy_(shard.reshape(-1)[offset : offset + len(storage)])


def allocate(
    model: nn.Module,
    device: torch.device | str,
    partition: Callable[[nn.Parameter], None] | None = None,
) -> None:
    """Replace the model's parameters on torch's meta device by uninitialized ones on `device`.

    The new `Parameter` objects have the attributes of the old ones. No other object may refer to
    the old ones. `partition` is called for each new parameter before the next one is allocated. A
    ZeRO 3 model therefore never needs the memory of more than one whole shard.
    """
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.is_meta:
                continue
            allocated = nn.Parameter(
                torch.empty_like(parameter, device=device), parameter.requires_grad
            )
            # Copy attributes such as `tensor_model_parallel`, except those that the new parameter
            # has already.
            vars(allocated).update(vars(parameter) | vars(allocated))
            setattr(module, name, allocated)
            if partition is not None:
                partition(allocated)
