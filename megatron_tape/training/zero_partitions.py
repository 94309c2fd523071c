"""Gather tensors that ZeRO has partitioned, each on the one rank that needs it.

DeepSpeed's own functions all-reduce every whole tensor, with zeros for the elements that a rank does not have.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state
from torch import Tensor
from torch.nn import Parameter

BATCH_BYTES = 1 << 22
"""Maximum size of the tensors that a rank receives at once, in bytes; a single tensor may be larger."""


@dataclass(frozen=True)
class Partitioning:
    """The place of a parameter's `numel` elements, from `first` on, in a flat tensor with `part` elements per rank."""

    first: int
    numel: int
    part: int
    padded: bool = False
    """Whether the flat tensor contains only this parameter, padded so that all ranks have equal parts."""

    def numel_on(self, rank: int) -> int:
        """Return the number of elements that a rank sends; ranks hold consecutive parts."""
        if self.padded:
            return self.part
        begin, end = max(self.first, rank * self.part), min(self.first + self.numel, (rank + 1) * self.part)
        return max(0, end - begin)


@dataclass(frozen=True)
class Shard:
    """This rank's elements of one tensor of the state, and the rank that needs the whole tensor."""

    key: str
    shape: torch.Size
    partitioning: Partitioning
    owner: int
    local: Callable[[], Tensor]
    """Returns the elements, flat; called only if there are any."""


def partitionings(zero_optimizer, parameters: dict[str, Parameter]) -> dict[str, Partitioning]:
    """Return how DeepSpeed's optimizer has partitioned each parameter, by its name in `parameters`."""
    if not isinstance(zero_optimizer, DeepSpeedZeroOptimizer):  # ZeRO 3
        return {name: Partitioning(0, p.ds_numel, p.partition_numel(), True) for name, p in parameters.items()}
    names, found = {parameter: name for name, parameter in parameters.items()}, {}
    for group, size in zip(zero_optimizer.bit16_groups, zero_optimizer.partition_size):
        first = 0
        for parameter in group:
            if parameter in names:  # and not the placeholder of an empty group
                found[names[parameter]] = Partitioning(first, parameter.numel(), int(size))
            first += parameter.numel()
    return found


def local_elements(parameter: Parameter, key: str) -> Tensor:
    """Return this rank's fp32 elements, flat, of a trained parameter's `weight`, Adam's `exp_avg` and so on.

    With ZeRO 3, they may or may not be padded with zeros.
    """
    if hasattr(parameter, "ds_id"):
        local = safe_get_local_fp32_param if key == "weight" else safe_get_local_optimizer_state
        return local(parameter) if key == "weight" else local(parameter, key)
    return parameter._hp_mapping.get_hp_fragment(None if key == "weight" else key)


def gather_to_owners(
    shards: list[Shard], group: dist.ProcessGroup, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield the key and the whole fp32 tensor, on `device`, of each shard that this rank owns.

    All ranks of `group` call this together, with shards of the same tensors in the same order.
    """
    me, ranks = group.rank(), range(group.size())
    for batch in _batches(shards):
        sent: list[list[Tensor]] = [[] for _ in ranks]
        for shard in batch:
            if count := shard.partitioning.numel_on(me):
                local = shard.local().flatten().to(device, torch.float32)
                sent[shard.owner].append(F.pad(local, (0, count - len(local))))
        mine = [shard for shard in batch if shard.owner == me]
        counts = [[shard.partitioning.numel_on(rank) for shard in mine] for rank in ranks]
        received = torch.empty(sum(map(sum, counts)), device=device)
        given = torch.cat([torch.empty(0, device=device), *(part for parts in sent for part in parts)])
        sizes = [sum(map(len, parts)) for parts in sent]
        dist.all_to_all_single(received, given, [sum(row) for row in counts], sizes, group=group)
        yield from zip((shard.key for shard in mine), _assemble(mine, received, counts))


def _assemble(mine: list[Shard], received: Tensor, counts: list[list[int]]) -> Iterator[Tensor]:
    """Yield the whole tensor of each shard in `mine`; `counts[rank]` is the number of elements of each from a rank."""
    if mine and mine[0].partitioning.padded:
        table = received.view(len(counts), -1)
        for shard, columns in zip(mine, table.split([shard.partitioning.part for shard in mine], dim=1)):
            yield columns.reshape(-1)[: shard.partitioning.numel].view(shard.shape)
        return
    pieces: list[list[Tensor]] = [[] for _ in mine]
    begin = 0
    for row in counts:
        for piece, count in zip(pieces, row):
            if count:  # only few of thousands of ranks have elements
                piece.append(received[begin : begin + count])
            begin += count
    for shard, piece in zip(mine, pieces):
        yield torch.cat(piece).view(shard.shape)


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
