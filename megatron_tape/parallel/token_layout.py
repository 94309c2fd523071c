"""Distribution of sequences, tokens and heads over ranks (`TokenLayout`).

Data-parallel ranks hold different sequences. The TP * CP ranks that compute the same sequences (TP
tensor-parallel and CP context-parallel ranks) shard the tokens outside attention and the heads
inside attention. An all-to-all converts one into the other. Context-parallel rank i and
tensor-parallel rank t, which is rank i * TP + t in Megatron's order, hold

- outside attention, with sequence parallelism: chunk i * TP + t of the TP * CP chunks of each
  sequence, with all heads. The outputs of Megatron's column-parallel layers have the tokens of all
  tensor-parallel ranks (chunk i of CP chunks) and the heads of this tensor-parallel rank (chunk t
  of TP chunks);
- inside attention: all tokens, with chunk t * CP + i of the TP * CP chunks of the heads.

If CP does not divide the key/value groups of a tensor-parallel rank, they are replicated.

Axes: S all tokens of a sequence, c tokens of this context-parallel rank, s tokens of this rank, B
batch, N all heads or groups, m heads of this tensor-parallel rank, n heads of this rank inside
attention, D head dimension.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import all_to_all, gather_from_sequence_parallel_region
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class TokenLayout:
    """The process groups of this rank, and conversions between local and global tokens and
    heads.
    """

    model_group: ProcessGroup
    """The tensor-parallel ranks, which hold different shards of the matrices."""
    context_group: ProcessGroup
    """The context-parallel ranks, which hold the same matrices and different tokens of the same
    sequences.
    """
    sequence_group: ProcessGroup
    """The tensor-parallel and context-parallel ranks, which compute the same sequences."""
    data_group: ProcessGroup
    """The ranks that hold the same matrices and different sequences."""
    replica_group: ProcessGroup
    """The context-parallel and data-parallel ranks, which hold the same matrices."""
    sequence_parallel: bool
    """Whether the ranks of `model_group` split the tokens of a sequence outside attention."""

    @classmethod
    def of(cls, groups: ProcessGroupCollection, sequence_parallel: bool) -> "TokenLayout":
        """Return the layout for Megatron's process groups.

        With CP > 1 and TP > 1, `sequence_parallel` must be true.
        """
        # Of several groups with the same ranks, use only one, since each group has its own
        # communicator and buffers on a GPU. For example, `tp_cp` and `cp` are equal if TP is 1.
        sequence = groups.tp_cp
        data = groups.dp
        if groups.tp.size() == 1:
            sequence = groups.cp
        if groups.cp.size() == 1:
            sequence = groups.tp
            data = groups.dp_cp
        return cls(groups.tp, groups.cp, sequence, data, groups.dp_cp, sequence_parallel)

    @property
    def context_shards(self) -> int:
        """Number of context-parallel ranks."""
        return self.context_group.size()

    @property
    def sequence_shards(self) -> int:
        """Number of chunks into which a sequence is split outside attention.

        The length of a sequence must be a multiple of it.
        """
        if self.sequence_parallel:
            return self.context_shards * self.model_group.size()
        return self.context_shards

    def context_tokens(self, x_BS: Tensor) -> Tensor:
        """Return this context-parallel rank's tokens, (B, c, ...), of all tokens (B, S, ...)."""
        if self.context_shards > 1:
            return x_BS.chunk(self.context_shards, 1)[self.context_group.rank()]
        return x_BS

    def gather_context(self, x_Bc: Tensor) -> Tensor:
        """All-gather the tokens (B, c, ...) of the context-parallel ranks to (B, S, ...).

        In the backward pass, gradients are summed over these ranks.
        """
        if self.context_shards == 1:
            return x_Bc
        # Megatron gathers along the first axis.
        by_token = x_Bc.transpose(0, 1).contiguous()
        gathered = gather_from_sequence_parallel_region(by_token, group=self.context_group)
        return gathered.transpose(0, 1).contiguous()

    def local_tokens(self, x_SB: Tensor) -> Tensor:
        """Return this rank's tokens, (s, B, ...), of all tokens (S, B, ...)."""
        if self.sequence_shards == 1:
            return x_SB
        return x_SB.chunk(self.sequence_shards)[self.sequence_group.rank()]

    def tensor_parallel_shard(self, x_N: Tensor, dim: int = 0) -> Tensor:
        """Select the m heads of this tensor-parallel rank from all N heads on axis `dim`."""
        return x_N.chunk(self.model_group.size(), dim)[self.model_group.rank()]

    def heads_in_attention(self, x_m: Tensor, dim: int = 0) -> Tensor:
        """Select the n heads of this rank inside attention from the m heads of its tensor-parallel
        rank on axis `dim`. If CP does not divide m, the heads are replicated first.
        """
        if self.context_shards == 1:
            return x_m
        chunks = self._replicated(x_m, dim).chunk(self.context_shards, dim)
        return chunks[self.context_group.rank()]

    def local_heads(self, x_N: Tensor, dim: int = 0) -> Tensor:
        """Select the n heads of this rank inside attention from all N heads on axis `dim`."""
        return self.heads_in_attention(self.tensor_parallel_shard(x_N, dim), dim)

    def copies_of(self, groups: int) -> int:
        """Return how often each key/value group is replicated, so that CP divides their number.

        `groups` is the number of groups of a tensor-parallel rank.
        """
        return math.lcm(groups, self.context_shards) // groups

    def _replicated(self, x_m: Tensor, dim: int) -> Tensor:
        """Replicate the heads or groups on axis `dim` so that their number is a multiple of CP."""
        copies = self.copies_of(x_m.shape[dim])
        if copies == 1:
            return x_m
        return x_m.repeat_interleave(copies, dim)

    def to_heads(self, x_sBN: Tensor) -> Tensor:
        """Convert (s, B, N, ...), local tokens and all heads, to (S, B, n, ...), all tokens and
        local heads.

        Collective over `sequence_group`.
        """
        if self.sequence_shards == 1:
            return x_sBN
        # (s, B, TP, m, ...), where CP divides m.
        x_sBTm = self._replicated(x_sBN.unflatten(2, (self.model_group.size(), -1)), dim=3)
        # (CP, TP, s, B, n, ...): the all-to-all needs the destination ranks first, in the order of
        # `sequence_group`.
        by_rank = x_sBTm.unflatten(3, (self.context_shards, -1)).movedim((3, 2), (0, 1))
        received = all_to_all(self.sequence_group, by_rank.flatten(0, 1).contiguous())
        return received.flatten(0, 1)

    def to_tokens(self, x_SBn: Tensor) -> Tensor:
        """Convert (S, B, n, ...), all tokens and local heads, to (s, B, N, ...), local tokens and
        all heads.

        Replicated groups occur several times in the result. Collective over `sequence_group`.
        """
        if self.sequence_shards == 1:
            return x_SBn
        by_rank = x_SBn.unflatten(0, (self.sequence_shards, -1)).contiguous()
        received = all_to_all(self.sequence_group, by_rank)
        # From (CP, TP, s, B, n, ...) to (s, B, TP, CP, n, ...), the order of all heads.
        by_group = received.unflatten(0, (self.context_shards, -1)).movedim((1, 0), (2, 3))
        return by_group.flatten(2, 4)

    def enter_attention(self, *tensors_cBm: Tensor) -> tuple[Tensor, ...]:
        """Convert queries, keys and values from (c, B, m, D) to (S, B, n, D) in one all-to-all over
        `context_group`.
        """
        if self.context_shards == 1:
            return tensors_cBm
        # Each has the shape (CP, c, B, n, D), with the destination ranks first.
        by_rank = []
        for x in tensors_cBm:
            replicated = self._replicated(x, dim=2)
            by_rank.append(replicated.unflatten(2, (self.context_shards, -1)).movedim(2, 0))
        received = all_to_all(self.context_group, torch.cat(by_rank, dim=3)).flatten(0, 1)
        return received.split([x.shape[3] for x in by_rank], dim=2)

    def leave_attention(self, x_SBn: Tensor) -> Tensor:
        """Convert the output of attention from (S, B, n, D) to (c, B, m, D) in an all-to-all over
        `context_group`.
        """
        if self.context_shards == 1:
            return x_SBn
        by_rank = x_SBn.unflatten(0, (self.context_shards, -1)).contiguous()
        received = all_to_all(self.context_group, by_rank)
        return received.movedim(0, 2).flatten(2, 3)

    @property
    def data_shards(self) -> int:
        """Number of ranks over which the sequences of a batch are distributed."""
        return self.data_group.size()

    def average(self, loss: Tensor) -> Tensor:
        """Return the mean of `loss`, detached, over the context- and data-parallel ranks.

        Tensor-parallel ranks have the same loss. Collective over `replica_group`.
        """
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=self.replica_group)
        return mean / self.replica_group.size()

    def total(self, value: Tensor) -> Tensor:
        """Return the sum of `value`, detached, over the ranks with different sequences.

        Collective over `data_group`.
        """
        total = value.detach().clone()
        dist.all_reduce(total, group=self.data_group)
        return total

    def micro_batches(
        self,
        first: int,
        stop: int,
        size: int,
    ) -> Iterator[list[int]]:
        """Divide the samples range(first, stop) into micro-batches of `size` samples, and yield
        this rank's micro-batches as lists of sample numbers.

        Data-parallel rank r of R takes micro-batches r, r + R, r + 2 R, ... Micro-batches at the
        end that are not enough for all R ranks are dropped.
        """
        samples_of_all_ranks = size * self.data_shards  # in one micro-batch of each rank
        for start in range(first, stop - samples_of_all_ranks + 1, samples_of_all_ranks):
            begin = start + size * self.data_group.rank()
            yield list(range(begin, begin + size))
