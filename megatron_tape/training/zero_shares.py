"""Whole tensors of what ZeRO has cut over ranks: each is put together on the one rank that wants it.

DeepSpeed's own functions sum every whole tensor over all ranks, zeros where a rank holds nothing.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state
from torch import Tensor
from torch.nn import Parameter

BATCH_BYTES = 1 << 28
"""Bytes of whole tensors that a rank receives at once, unless a single tensor has more."""


@dataclass(frozen=True)
class Cut:
    """Where a parameter's `numel` elements lie, from `first` on, in a flat tensor of which each rank has `part`."""

    first: int
    numel: int
    part: int

    def of(self, rank: int) -> int:
        """Return how many of the elements a rank holds; ranks hold them in order."""
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
        return {name: Cut(0, p.ds_numel, p.partition_numel()) for name, p in parameters.items()}
    names, found = {parameter: name for name, parameter in parameters.items()}, {}
    for group, size in zip(zero_optimizer.bit16_groups, zero_optimizer.partition_size):
        first = 0
        for parameter in group:
            found[names[parameter]] = Cut(first, parameter.numel(), int(size))
            first += parameter.numel()
    return found


def held_by_zero(parameter: Parameter, key: str) -> Tensor:
    """Return this rank's fp32 elements, flat, of a trained parameter's `weight` or of Adam's `exp_avg` and so on.

    With ZeRO 3 zeros may follow them.
    """
    if hasattr(parameter, "ds_id"):
        local = safe_get_local_fp32_param if key == "weight" else safe_get_local_optimizer_state
        return local(parameter) if key == "weight" else local(parameter, key)
    return parameter._hp_mapping.get_hp_fragment(None if key == "weight" else key)


def to_owners(shares: list[Share], group: dist.ProcessGroup, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yield the key and the whole fp32 tensor, on `device`, of each share that this rank owns.

    All ranks of `group` call this together, with shares of the same tensors in the same order.
    """
    me, ranks = group.rank(), range(group.size())
    for batch in _batches(shares):
        sent: list[list[Tensor]] = [[] for _ in ranks]
        for share in batch:
            if count := share.cut.of(me):
                sent[share.owner].append(share.held().flatten()[:count].to(device, torch.float32))
        mine = [share for share in batch if share.owner == me]
        counts = [[share.cut.of(rank) for share in mine] for rank in ranks]
        received = torch.empty(sum(map(sum, counts)), device=device)
        given = torch.cat([torch.empty(0, device=device), *(part for parts in sent for part in parts)])
        sizes = [sum(map(len, parts)) for parts in sent]
        dist.all_to_all_single(received, given, [sum(row) for row in counts], sizes, group=group)
        parts = received.split([count for row in counts for count in row])
        for number, share in enumerate(mine):
            yield share.key, torch.cat(parts[number :: len(mine)]).view(share.shape)


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
