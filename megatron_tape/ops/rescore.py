"""Scores that are more than products of queries and keys, computed for whole rows, a block of rows at a time.

Axes: T tokens, B batch, H query heads, G key/value groups, r the queries of a block, t the tokens up to the last of
them, D head dimension.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from megatron_tape.ops.backends import SCORES


@dataclass(frozen=True)
class Rescore:
    """`rows(scores, q, k, seen, tokens, *tensors)` returns the scores (B, H, r, t) of a block of queries.

    `scores` (B, H, r, t) are the products of rotated queries `q` (B, H, r, D) and keys `k` (B, G, t, D), divided by
    sqrt(D); `seen` (B or 1, 1, r, t) says which keys each query sees, and `tokens` is the slice of the queries' tokens.
    Scores of keys that are not seen must be finite, and are ignored. A query may see keys before some that it does not,
    as where a prompt with padding after it is continued. `rows` is differentiable in q, k and `tensors`;
    everything that needs a gradient must be among these. It is called again in the backward pass.
    """

    need: ClassVar[str] = SCORES
    """What attention must be able to do, as named in `ops.backends`."""

    rows: Callable[..., Tensor]
    tensors: tuple[Tensor, ...] = ()
    prepare: Callable[..., tuple[Tensor, ...]] | None = None
    """`prepare(q, k, *tensors)`, given all queries (B, H, S, D) and all keys (B, G, T, D), is called once and returns
    what `rows` gets as its tensors."""
    takes_scores: bool = True
    """Whether `rows` reads `scores`; if not, it gets None instead."""

    def in_float32(self) -> "Rescore":
        """Return the same with tensors of at least float32."""
        wider = tuple(x.to(torch.promote_types(x.dtype, torch.float32)) for x in self.tensors)
        return replace(self, tensors=wider)

    def prepared(self, q_BHSD: Tensor, k_BGTD: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors that `rows` gets."""
        return self.tensors if self.prepare is None else self.prepare(q_BHSD, k_BGTD, *self.tensors)
