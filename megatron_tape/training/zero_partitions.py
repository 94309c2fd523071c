"""Whole tensors of what ZeRO has cut over ranks: each is put together on the one rank that wants it.

DeepSpeed's own functions sum every whole tensor over all ranks, zeros where a rank holds nothing.
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
"""Bytes of whole tensors that a rank receives at once, unless a single tensor has more."""


@dataclass(frozen=True)
class Cut:
    """Where a parameter's `numel` elements lie, from `first` on, in a flat tensor of which each rank has `part`."""

    first: int
    numel: int
    part: int
    alone: bool = False
    """Whether the flat tensor is this parameter's own, with zeros behind it, so that every rank has as much of it."""

    def of(self, rank: int) -> int:
        """Return how many elements of it a rank sends; ranks hold them in order."""
        if self.alone:
            return self.part
        begin, end = max(self.first, rank * self.part), min(self.first + self.numel, (rank + 1) * self.part)
        return max(0, end - begin)


@dataclass(frozen=True)
class Share:
    """This rank's elements of one tensor of the state, and the rank that wants all of them."""

    key: str
    shape: torch.Size
    cut: Cut
    owner: int
    held: Callable[[], Tensor]
    """Returns them, flat; called only if there are any."""


def cuts(zero_optimizer, parameters: dict[str, Parameter]) -> dict[str, Cut]:
    """Return how DeepSpeed's optimizer has cut each parameter, by its name in `parameters`."""
    if not isinstance(zero_optimizer, DeepSpeedZeroOptimizer):  # ZeRO 3
        return {name: Cut(0, p.ds_numel, p.partition_numel(), True) for name, p in parameters.items()}
    names, found = {parameter: name for name, parameter in parameters.items()}, {}
    for group, size in zip(zero_optimizer.bit16_groups, zero_optimizer.partition_size):
        first = 0
        for parameter in group:
            if parameter in names:  # and not what stands in an empty group
                found[names[parameter]] = Cut(first, parameter.numel(), int(size))
            first += parameter.numel()
    return found


def local_elements(parameter: Parameter, key: str) -> Tensor:
    """Return this rank's fp32 elements, flat, of a trained parameter's `weight` or of Adam's `exp_avg` and so on.

    With ZeRO 3 zeros may follow them or be left out.
    """
    if hasattr(parameter, "ds_id"):
        local = safe_get_local_fp32_param if key == "weight" else safe_get_local_optimizer_state
        return local(parameter) if key == "weight" else local(parameter, key)
    return parameter._hp_mapping.get_hp_fragment(None if key == "weight" else key)


def gather_to_owners(
    shares: list[Share], group: dist.ProcessGroup, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield the key and the whole fp32 tensor, on `device`, of each share that this rank owns.

    All ranks of `group` call this together, with shares of the same tensors in the same order.
    """
    me, ranks = group.rank(), range(group.size())
    for batch in _batches(shares):
        sent: list[list[Tensor]] = [[] for _ in ranks]
        for share in batch:
            if count := share.cut.of(me):
                held = share.held().flatten().to(device, torch.float32)
                sent[share.owner].append(F.pad(held, (0, count - len(held))))
        mine = [share for share in batch if share.owner == me]
        counts = [[share.cut.of(rank) for share in mine] for rank in ranks]
        received = torch.empty(sum(map(sum, counts)), device=device)
        given = torch.cat([torch.empty(0, device=device), *(part for parts in sent for part in parts)])
        sizes = [sum(map(len, parts)) for parts in sent]
        dist.all_to_all_single(received, given, [sum(row) for row in counts], sizes, group=group)
        yield from zip((share.key for share in mine), _joined(mine, received, counts))


def _joined(mine: list[Share], received: Tensor, counts: list[list[int]]) -> Iterator[Tensor]:
    """Yield the whole tensor of each share; every rank has sent `counts` elements of each, in their order."""
    if mine and mine[0].cut.alone:
        table = received.view(len(counts), -1)
        for share, columns in zip(mine, table.split([share.cut.part for share in mine], dim=1)):
            yield columns.reshape(-1)[: share.cut.numel].view(share.shape)
        return
    pieces: list[list[Tensor]] = [[] for _ in mine]
    begin = 0
    for row in counts:
        for piece, count in zip(pieces, row):
            if count:  # of few ranks; empty pieces of thousands would be many
                piece.append(received[begin : begin + count])
            begin += count
    for share, piece in zip(mine, pieces):
        yield torch.cat(piece).view(share.shape)


def _batches(shares: list[Share]) -> list[list[Share]]:
    """Divide the shares so that no rank gets more than about BATCH_BYTES from a batch."""
    batches: list[list[Share]] = []
    of_owner: dict[int, int] = {}
    for share in shares:
        number = of_owner.get(share.owner, 0) // BATCH_BYTES
        of_owner[share.owner] = of_owner.get(share.owner, 0) + 4 * share.cut.numel
        batches += [[] for _ in range(number + 1 - len(batches))]
        batches[number].append(share)
    return batches
