"""Gather tensors that ZeRO has partitioned, each on the one rank that needs it (its owner).

DeepSpeed's own functions all-reduce every whole tensor, which sends more data and needs more
memory.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import (
    safe_get_local_fp32_param,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch import Tensor
from torch.nn import Parameter

from megatron_tape.parallel.partitions import local_storage

BATCH_BYTES = 1 << 22
"""Maximum bytes of the tensors that a rank receives at once; a single tensor may be larger."""


@dataclass(frozen=True)
class Partitioning:
    """The position of a parameter in a flat tensor that is split over the ranks, `per_rank`
    elements each.
    """

    first: int
    """Offset of the parameter's first element."""
    numel: int
    per_rank: int

    def numel_on(self, rank: int) -> int:
        """Return the number of elements on a rank, without padding."""
        begin = max(self.first, rank * self.per_rank)
        end = min(self.first + self.numel, (rank + 1) * self.per_rank)
        return max(0, end - begin)


@dataclass(frozen=True)
class Shard:
    """This rank's elements of one tensor of the training state, and the tensor's owner."""

    key: str
    shape: torch.Size
    partitioning: Partitioning
    owner: int
    local: Callable[[], Tensor]
    """Returns the elements, flat; called only if there are any."""


def partitionings(zero_optimizer, parameters: dict[str, Parameter]) -> dict[str, Partitioning]:
    """Return how DeepSpeed's optimizer has partitioned each of `parameters`, by name."""
    if not isinstance(zero_optimizer, DeepSpeedZeroOptimizer):  # ZeRO 3
        return {
            name: Partitioning(0, p.ds_numel, p.partition_numel()) for name, p in parameters.items()
        }
    names = {parameter: name for name, parameter in parameters.items()}
    by_name = {}
    for group, size in zip(zero_optimizer.bit16_groups, zero_optimizer.partition_size):
        first = 0
        for parameter in group:
            if parameter in names:  # otherwise it is the placeholder of an empty group
                by_name[names[parameter]] = Partitioning(first, parameter.numel(), int(size))
            first += parameter.numel()
    return by_name


def local_elements(parameter: Parameter, key: str) -> Tensor:
    """Return this rank's partition, flat and in fp32, of a trained parameter's `weight`, `exp_avg`
    and so on.

    With ZeRO 3, it may be padded with zeros.
    """
    if not hasattr(parameter, "ds_id"):
        return parameter._hp_mapping.get_hp_fragment(None if key == "weight" else key)
    if key == "weight":
        return safe_get_local_fp32_param(parameter)
    return safe_get_local_optimizer_state(parameter, key)


def set_local_elements(parameter: Parameter, key: str, value: Tensor) -> None:
    """Set this rank's partition of a trained parameter's `weight`, `exp_avg` and so on to its part
    of a whole tensor.

    `value` is on the parameter's device.
    """
    if not hasattr(parameter, "ds_id"):
        if key == "weight":
            safe_set_full_fp32_param(parameter, value)
        else:
            safe_set_full_optimizer_state(parameter, value, key)
        return

    # With ZeRO 3, DeepSpeed's functions for whole tensors fail on ranks whose partitions are
    # padded.
    storage, first = local_storage(parameter)
    partition = value.flatten()[first : first + len(storage)]
    padded = F.pad(partition, (0, parameter.partition_numel() - len(partition)))
    if key == "weight":
        safe_set_local_fp32_param(parameter, padded)
    else:
        safe_set_local_optimizer_state(parameter, padded, key)


def gather_to_owners(
    shards: list[Shard], group: dist.ProcessGroup, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield the key and the whole fp32 tensor, on `device`, of each shard that this rank owns.

    All ranks of `group` call this together, with shards of the same tensors in the same order.
    """
    ranks = range(group.size())
    for batch in _batches(shards):
        to_send: list[list[Tensor]] = [[] for _ in ranks]
        for shard in batch:
            count = shard.partitioning.numel_on(group.rank())
            if count:
                local = shard.local().flatten()[:count]
                to_send[shard.owner].append(local.to(device, torch.float32))
        sent = torch.cat([torch.empty(0, device=device), *itertools.chain(*to_send)])
        sizes = [sum(map(len, tensors)) for tensors in to_send]

        owned = [shard for shard in batch if shard.owner == group.rank()]
        counts = [[shard.partitioning.numel_on(rank) for shard in owned] for rank in ranks]
        received_sizes = [sum(row) for row in counts]
        received = torch.empty(sum(received_sizes), device=device)
        dist.all_to_all_single(received, sent, received_sizes, sizes, group=group)

        by_rank = [part.split(row) for part, row in zip(received.split(received_sizes), counts)]
        for shard, pieces in zip(owned, zip(*by_rank)):
            yield shard.key, torch.cat(pieces).view(shard.shape)


def _batches(shards: list[Shard]) -> list[list[Shard]]:
    """Divide the shards so that no rank receives more than about BATCH_BYTES per batch."""
    batches: list[list[Shard]] = []
    of_owner: dict[int, int] = {}
    for shard in shards:
        number = of_owner.get(shard.owner, 0) // BATCH_BYTES
        of_owner[shard.owner] = of_owner.get(shard.owner, 0) + 4 * shard.partitioning.numel
        batches += [[] for _ in range(number + 1 - len(batches))]
        batches[number].append(shard)
    return batches
