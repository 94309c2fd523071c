"""Scores that are not products of queries and keys, computed in blocks of whole rows.

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
    """Scores given by `rows(scores, q, k, seen, tokens, *tensors)`, (B, H, r, t) for a block of queries.

    `scores` (B, H, r, t) are the products of rotated queries `q` (B, H, r, D) and keys `k` (B, G, t, D), divided by
    sqrt(D); `seen` (B or 1, 1, r, t) is true for keys that a query may attend to; `tokens` is the slice of the queries'
    tokens. Scores of other keys must be finite and are ignored. Masked keys may lie between visible ones, as when a
    right-padded prompt is continued. `rows` is differentiable in q, k and `tensors`, which must include everything that
    needs a gradient. It is called again in the backward pass.
    """

    need: ClassVar[str] = SCORES
    """The capability of `ops.backends` that attention needs."""

    rows: Callable[..., Tensor]
    tensors: tuple[Tensor, ...] = ()
    prepare: Callable[..., tuple[Tensor, ...]] | None = None
    """`prepare(q, k, *tensors)`, optional, is called once with all queries (B, H, S, D) and keys (B, G, T, D); it
    returns the tensors that are passed to `rows`."""
    takes_scores: bool = True
    """Whether `rows` uses `scores`; otherwise it is passed None."""

    def in_float32(self) -> "Rescore":
        """Return a copy with tensors of at least float32."""
        wider = tuple(x.to(torch.promote_types(x.dtype, torch.float32)) for x in self.tensors)
        return replace(self, tensors=wider)

    def prepared(self, q_BHSD: Tensor, k_BGTD: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors to pass to `rows`."""
        return self.tensors if self.prepare is None else self.prepare(q_BHSD, k_BGTD, *self.tensors)
