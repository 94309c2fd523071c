"""Which rank holds which tokens: the only object that knows how sequences and heads are distributed over processes.

Data-parallel ranks hold different sequences. Under sequence parallelism each of the ranks that share a model holds,
outside attention, a stretch of every sequence with all heads, and inside attention all tokens of some heads; an
all-to-all switches between the two. Everything that depends on this uses `TokenLayout`.

Axes: S all tokens of a sequence, s those of this rank, B batch, N heads or groups, n those of this rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_to_all
from torch import Tensor


@dataclass(frozen=True)
class TokenLayout:
    """The place of this rank: `model_group` shares one copy of the model, `data_group` holds different sequences."""

    model_group: dist.ProcessGroup
    data_group: dist.ProcessGroup
    sequence_parallel: bool
    """Whether the ranks of `model_group` share the tokens of a sequence outside attention."""

    @property
    def sequence_shards(self) -> int:
        """Into how many stretches a sequence is cut; its length must be a multiple of this number."""
        return self.model_group.size() if self.sequence_parallel else 1

    def local_tokens(self, x_SB: Tensor) -> Tensor:
        """Return this rank's tokens (s, B, ...) of a tensor of all tokens (S, B, ...)."""
        return x_SB.chunk(self.sequence_shards)[self.model_group.rank()] if self.sequence_shards > 1 else x_SB

    def local_heads(self, x_N: Tensor, dim: int = 0) -> Tensor:
        """Return this rank's heads of a tensor whose axis `dim` holds all heads."""
        return x_N.chunk(self.model_group.size(), dim)[self.model_group.rank()]

    def to_heads(self, x_sBN: Tensor) -> Tensor:
        """Turn (s, B, N, ...), local tokens and all heads, into (S, B, n, ...), all tokens and local heads."""
        if self.sequence_shards == 1:
            return x_sBN
        by_rank = x_sBN.unflatten(2, (self.sequence_shards, -1)).movedim(2, 0)
        return all_to_all(self.model_group, by_rank.contiguous()).flatten(0, 1)

    def to_tokens(self, x_SBn: Tensor) -> Tensor:
        """Turn (S, B, n, ...), all tokens and local heads, into (s, B, N, ...), local tokens and all heads."""
        if self.sequence_shards == 1:
            return x_SBn
        by_rank = x_SBn.unflatten(0, (self.sequence_shards, -1))
        return all_to_all(self.model_group, by_rank.contiguous()).movedim(0, 2).flatten(2, 3)

    def loss(self, losses_BS: Tensor, weights_BS: Tensor | None = None) -> Tensor:
        """Return the mean of next-token losses, or their sum weighted by `weights_BS`; this rank differentiates it."""
        losses_BS = losses_BS.float()
        return losses_BS.mean() if weights_BS is None else (losses_BS * weights_BS).sum()

    @property
    def data_shards(self) -> int:
        """Over how many ranks the sequences of a batch are distributed."""
        return self.data_group.size()

    def average(self, value: Tensor) -> Tensor:
        """Return the mean of a detached value over the ranks that hold different sequences; all call it together."""
        return self.total(value) / self.data_group.size()

    def total(self, value: Tensor) -> Tensor:
        """Return the sum of a detached value over the ranks that hold different sequences; all call it together."""
        value = value.detach().clone()
        dist.all_reduce(value, group=self.data_group)
        return value

    def micro_batches(self, first: int, stop: int, size: int) -> Iterator[list[int]]:
        """Yield the sample indices of this rank's micro-batches of `size` among the samples from `first` up to `stop`.

        Consecutive micro-batches go to consecutive data-parallel ranks; a remainder that does not suffice for all ranks
        is dropped.
        """
        rank, ranks = self.data_group.rank(), self.data_group.size()
        for i in range((stop - first) // (size * ranks)):
            start = first + (i * ranks + rank) * size
            yield list(range(start, start + size))

    def cut(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's part of a batch of whole sequences (B, S), as the model's forward expects it."""
        return batch
