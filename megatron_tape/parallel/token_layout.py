"""Which rank holds which tokens: the only object that knows how sequences and heads are distributed over processes.

Data-parallel ranks hold different sequences. The tp * cp ranks that compute the same sequences share their tokens
outside attention and the heads inside it; an all-to-all switches between the two. Context rank c and tensor-parallel
rank t, whose number in Megatron's order is c * tp + t, hold

- outside attention, under sequence parallelism, stretch c * tp + t of tp * cp stretches of every sequence, with all
  heads. What Megatron's column-parallel layers return there has the tokens of the whole context rank, stretch c of cp,
  and the heads of the tensor-parallel rank, chunk t of tp;
- inside attention, all tokens of chunk t * cp + c of tp * cp chunks of the heads.

A tensor-parallel rank's key/value groups that cannot be divided among the cp context ranks are held several times.

Everything that depends on this uses `TokenLayout`.

Axes: S all tokens of a sequence, c those of this context rank, s those of this rank, B batch, N heads or groups,
m those of this tensor-parallel rank, n those of this rank inside attention.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import all_to_all, gather_from_sequence_parallel_region
from torch import Tensor


@dataclass(frozen=True)
class TokenLayout:
    """The place of this rank."""

    model_group: dist.ProcessGroup
    """The tensor-parallel ranks, which share the matrices of one copy of the model."""
    context_group: dist.ProcessGroup
    """The context-parallel ranks, which hold the same matrices and other tokens of the same sequences."""
    sequence_group: dist.ProcessGroup
    """Both: the ranks that compute the same sequences."""
    data_group: dist.ProcessGroup
    """The ranks that hold the same matrices and different sequences."""
    replica_group: dist.ProcessGroup
    """The ranks that hold the same matrices: those of all context and data-parallel ranks."""
    sequence_parallel: bool
    """Whether the ranks of `model_group` share the tokens of a sequence outside attention."""

    @classmethod
    def of(cls, groups: ProcessGroupCollection, sequence_parallel: bool) -> "TokenLayout":
        """Return the layout of Megatron's groups.

        Context parallelism over more than one tensor-parallel rank needs `sequence_parallel`.
        """
        # Of groups with the same ranks one is used: each has a communicator with buffers of its own on a GPU.
        sequence = groups.tp if groups.cp.size() == 1 else groups.cp if groups.tp.size() == 1 else groups.tp_cp
        data = groups.dp_cp if groups.cp.size() == 1 else groups.dp
        return cls(groups.tp, groups.cp, sequence, data, groups.dp_cp, sequence_parallel)

    @property
    def context_shards(self) -> int:
        """Over how many context ranks, each with its tensor-parallel group, a sequence is distributed."""
        return self.context_group.size()

    @property
    def sequence_shards(self) -> int:
        """Into how many stretches a sequence is cut; its length must be a multiple of this number."""
        return self.context_shards * (self.model_group.size() if self.sequence_parallel else 1)

    def context_tokens(self, x_BS: Tensor) -> Tensor:
        """Return this context rank's tokens (B, c, ...) of a tensor of all tokens (B, S, ...)."""
        return x_BS.chunk(self.context_shards, 1)[self.context_group.rank()] if self.context_shards > 1 else x_BS

    def gather_context(self, x_Bc: Tensor) -> Tensor:
        """Return all tokens (B, S, ...), in one copy, of what the context ranks hold of them, (B, c, ...).

        Its gradient is the sum of those of all context ranks.
        """
        if self.context_shards == 1:
            return x_Bc
        by_token = x_Bc.transpose(0, 1).contiguous()
        return gather_from_sequence_parallel_region(by_token, group=self.context_group).transpose(0, 1).contiguous()

    def local_tokens(self, x_SB: Tensor) -> Tensor:
        """Return this rank's tokens (s, B, ...) of a tensor of all tokens (S, B, ...)."""
        if self.sequence_shards == 1:
            return x_SB
        return x_SB.chunk(self.sequence_shards)[self.sequence_group.rank()]

    def tensor_share(self, x_N: Tensor, dim: int = 0) -> Tensor:
        """Return this tensor-parallel rank's share of a tensor whose axis `dim` holds all heads, as of a parameter."""
        return x_N.chunk(self.model_group.size(), dim)[self.model_group.rank()]

    def heads_in_attention(self, x_m: Tensor, dim: int = 0) -> Tensor:
        """Return what this rank has inside attention of a tensor whose axis `dim` holds its `tensor_share`."""
        if self.context_shards == 1:
            return x_m
        return self._divisible(x_m, dim).chunk(self.context_shards, dim)[self.context_group.rank()]

    def local_heads(self, x_N: Tensor, dim: int = 0) -> Tensor:
        """Return what this rank has inside attention of a tensor whose axis `dim` holds all heads or groups."""
        return self.heads_in_attention(self.tensor_share(x_N, dim), dim)

    def copies_of(self, groups: int) -> int:
        """Return how often the context ranks hold each of a tensor-parallel rank's groups; 1 if they divide them."""
        return math.lcm(groups, self.context_shards) // groups

    def _divisible(self, x_m: Tensor, dim: int) -> Tensor:
        """Repeat each head or group of axis `dim` until the context ranks can divide them."""
        copies = self.copies_of(x_m.shape[dim])
        return x_m if copies == 1 else x_m.repeat_interleave(copies, dim)

    def to_heads(self, x_sBN: Tensor) -> Tensor:
        """Turn (s, B, N, ...), local tokens and all heads, into (S, B, n, ...), all tokens and local heads."""
        if self.sequence_shards == 1:
            return x_sBN
        by_tensor_rank = self._divisible(x_sBN.unflatten(2, (self.model_group.size(), -1)), 3)
        by_rank = by_tensor_rank.unflatten(3, (self.context_shards, -1)).movedim((3, 2), (0, 1))
        return all_to_all(self.sequence_group, by_rank.flatten(0, 1).contiguous()).flatten(0, 1)

    def to_tokens(self, x_SBn: Tensor) -> Tensor:
        """Turn (S, B, n, ...), all tokens and local heads, into (s, B, N, ...), local tokens and all heads.

        Groups that several ranks hold come as often.
        """
        if self.sequence_shards == 1:
            return x_SBn
        by_rank = all_to_all(self.sequence_group, x_SBn.unflatten(0, (self.sequence_shards, -1)).contiguous())
        return by_rank.unflatten(0, (self.context_shards, -1)).movedim((1, 0), (2, 3)).flatten(2, 4)

    def enter_attention(self, *tensors_cBm: Tensor) -> tuple[Tensor, ...]:
        """Turn queries, keys and values (c, B, m, D) into (S, B, n, D), by one all-to-all over the context ranks."""
        if self.context_shards == 1:
            return tensors_cBm
        by_rank = [self._divisible(x, 2).unflatten(2, (self.context_shards, -1)).movedim(2, 0) for x in tensors_cBm]
        together = all_to_all(self.context_group, torch.cat(by_rank, dim=3)).flatten(0, 1)
        return together.split([x.shape[3] for x in by_rank], dim=2)

    def leave_attention(self, x_SBn: Tensor) -> Tensor:
        """Turn attention's output (S, B, n, D) into (c, B, m, D), by an all-to-all over the context ranks."""
        if self.context_shards == 1:
            return x_SBn
        by_rank = all_to_all(self.context_group, x_SBn.unflatten(0, (self.context_shards, -1)).contiguous())
        return by_rank.movedim(0, 2).flatten(2, 3)

    def loss_weights(self, weights_Bc: Tensor | None) -> Tensor | None:
        """Return the weights with which this rank adds up the losses of its context rank's tokens; None: their mean.

        They are scaled such that the mean over the context ranks, as ZeRO takes it of the gradients, is the weighted
        sum over whole sequences.
        """
        return None if weights_Bc is None else weights_Bc * self.context_shards

    @property
    def data_shards(self) -> int:
        """Over how many ranks the sequences of a batch are distributed."""
        return self.data_group.size()

    def average(self, loss: Tensor) -> Tensor:
        """Return the mean of a detached loss over the ranks that hold different tokens; all call it together."""
        loss = loss.detach().clone()
        dist.all_reduce(loss, group=self.replica_group)
        return loss / self.replica_group.size()

    def total(self, value: Tensor) -> Tensor:
        """Return the sum of a detached value over the ranks that hold different sequences; all call it together."""
        value = value.detach().clone()
        dist.all_reduce(value, group=self.data_group)
        return value

    def micro_batches(self, first: int, stop: int, size: int) -> Iterator[list[int]]:
        """Yield the sample indices of this rank's micro-batches of `size` among the samples from `first` up to `stop`.

        Consecutive micro-batches go to consecutive data-parallel ranks; a remainder that does not suffice for all ranks
        is dropped. The ranks that compute the same sequences get the same micro-batches.
        """
        rank, ranks = self.data_group.rank(), self.data_group.size()
        for i in range((stop - first) // (size * ranks)):
            start = first + (i * ranks + rank) * size
            yield list(range(start, start + size))
