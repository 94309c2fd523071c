"""Attention scores that are not products of one query and one key, computed in blocks of whole
rows.

A row holds the scores of one query and all its keys. Axes: S queries, T keys, B batch, H query
heads, G key/value groups, r queries of a block, t keys up to the last of them, D head dimension.
The t keys begin with the first one that a query of the block may attend to, or earlier.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from megatron_tape.ops.backends import SCORES


@dataclass(frozen=True)
class Rescore:
    """Replaces attention scores: `rows(scores, q, k, seen, tokens, *tensors)` returns those of a
    block of queries, (B, H, r, t).

    - `scores` (B, H, r, t) are the products of `q` and `k`, divided by sqrt(D).
    - `q` (B, H, r, D) and `k` (B, G, t, D) are the rotated queries and keys.
    - `seen` (B or 1, 1, r, t) is True where a query may attend to a key. Masked keys may lie
      between visible ones, for example if a right-padded prompt is continued. Scores of masked keys
      must be finite and are ignored.
    - `tokens` is the slice of the queries' tokens.

    `rows` must be differentiable in q, k and `tensors`, which must include every tensor that needs
    a gradient. It is called again in the backward pass.
    """

    need: ClassVar[str] = SCORES
    """The capability that the attention backend must have (see `ops.backends`)."""

    rows: Callable[..., Tensor]
    tensors: tuple[Tensor, ...] = ()
    prepare: Callable[..., tuple[Tensor, ...]] | None = None
    """Optional; `prepare(q, k, *tensors)` returns the tensors that are passed to `rows` instead of
    `tensors`. It is called once, with all queries (B, H, S, D) and keys (B, G, T, D)."""
    takes_scores: bool = True
    """Whether `rows` uses `scores`. If not, backends may pass None instead."""

    def in_float32(self) -> "Rescore":
        """Return a copy whose tensors are in at least float32."""
        wider = tuple(x.to(torch.promote_types(x.dtype, torch.float32)) for x in self.tensors)
        return replace(self, tensors=wider)

    def prepared(self, q_BHSD: Tensor, k_BGTD: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors to pass to `rows`, given all queries and keys."""
        if self.prepare is None:
            return self.tensors
        return self.prepare(q_BHSD, k_BGTD, *self.tensors)
