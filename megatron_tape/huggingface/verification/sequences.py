"""The token sequences that engines and plain torch read, and what both return for them.

Axes: S tokens of a sequence, P compared tokens, V vocabulary, C hidden size.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

GROUP = 16
"""Tokens that precede a compared token in a sequence of groups, including the token itself."""
_SEED = 2606


@dataclass(frozen=True, eq=False)
class Sequence:
    """Tokens, their positions, and which of them are compared. Equal only to itself."""

    ids: Tensor
    """Token ids, int64 (S,)."""
    positions: Tensor
    """Ascending positions of the tokens, int64 (S,)."""
    compared: tuple[int, ...]
    """Ascending indices of the compared tokens in the sequence, P of them."""

    @property
    def has_gaps(self) -> bool:
        """Whether positions differ from 0, 1, ..., so that an engine must be told them."""
        last = int(self.positions[-1])
        return len(self.positions) != last + 1

    @property
    def compared_positions(self) -> list[int]:
        """The positions of the compared tokens."""
        return self.positions[list(self.compared)].tolist()

    def until(self, position: int) -> "Sequence":
        """Return the beginning of the sequence, up to the token at `position`."""
        stop = int(torch.searchsorted(self.positions, position, right=True))
        compared = tuple(index for index in self.compared if index < stop)
        return Sequence(self.ids[:stop], self.positions[:stop], compared)


@dataclass(frozen=True)
class Outputs:
    """What a model computed for the compared tokens of a sequence, on the CPU."""

    logits: Tensor
    """(P, V)."""
    hidden_states: Tensor | None = None
    """The hidden states after each layer, before the final norm, (layers, P, C). None if the engine
    does not show them."""


def default_positions(trained_length: int) -> list[int]:
    """Return the positions to compare: 0, L/2, L - 1, L, 2 L and 4 L for the trained length L."""
    L = trained_length
    positions = {0, L // 2, L - 1, L, 2 * L, 4 * L}
    return sorted(positions)


def groups_of_tokens(positions: list[int], vocab_size: int, first: int = GROUP) -> Sequence:
    """Return a short sequence with a group of tokens up to each of the ascending `positions`.

    A group has `GROUP` tokens with consecutive positions. The first group has at least `first`
    tokens, from position 0 on. Between the groups, positions have gaps. The sequence is as long as
    the number of groups requires, and attention nevertheless spans all distances between them.
    """
    wanted = set(range(first))
    for position in positions:
        start = max(0, position - GROUP + 1)
        wanted |= set(range(start, position + 1))
    return _sequence(sorted(wanted), positions, vocab_size)


def every_token(positions: list[int], vocab_size: int) -> Sequence:
    """Return a sequence with all tokens from position 0 to the last of the ascending
    `positions`.
    """
    token_positions = list(range(positions[-1] + 1))
    return _sequence(token_positions, positions, vocab_size)


def _sequence(token_positions: list[int], compared: list[int], vocab_size: int) -> Sequence:
    """Return a sequence of random tokens at `token_positions`, the same in every call. Those at the
    positions `compared` are compared.
    """
    generator = torch.Generator().manual_seed(_SEED)
    ids = torch.randint(vocab_size, (len(token_positions),), generator=generator)
    index_of = {position: index for index, position in enumerate(token_positions)}
    indices = tuple(index_of[position] for position in compared)
    return Sequence(ids, torch.tensor(token_positions), indices)


def chunks(sequence: Sequence) -> list[slice]:
    """Return the parts of a sequence that a model reads one after the other with a cache.

    A part ends before each compared token, which is then read alone, as in generation. It also ends
    at the first gap, before which an engine knows the positions itself.
    """
    edges = {0, before_gaps(sequence), len(sequence.ids)}
    for index in sequence.compared:
        edges |= {index, index + 1}
    return [slice(start, stop) for start, stop in pairwise(sorted(edges))]


def before_gaps(sequence: Sequence) -> int:
    """Return the number of tokens before the first gap, whose positions are 0, 1, ..."""
    indices = torch.arange(len(sequence.positions))
    has_own_index = sequence.positions == indices
    return int(has_own_index.sum())
