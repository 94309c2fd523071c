"""Scores in which each channel of a key decays with every later token, up to the query (Wall
attention, Tilde Research, 2026).

The score of query i and key j is sum_n q_in k_jn exp(P_in - P_jn) / sqrt(D), where P is the running
sum of the logarithms of the decays, per query head and channel. Queries and keys are multiplied by
exp(P - P_a) and exp(P_a - P) for a token a, the anchor, so that scores are matrix products. Neither
factor may overflow. Keys before a block of queries have the block's first query as their anchor:
both factors are then at most 1. Keys inside the block have its middle token. Axes: T tokens, B
batch, H query heads, G key/value groups, r queries of one call, t keys that end with the last of
them, D head dimension.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megatron_tape.ops.backends import DECAY
from megatron_tape.ops.rescore import Rescore

STRONGEST = 1.0
"""Largest decay of a channel per token, in nats. In a block of 128 tokens, factors relative to its
middle are then at most exp(64), which float32 can represent. fla's kernel clamps factors within 64
tokens at 110 bits, 1.19 nats per token.
"""
BLOCK = 64
"""Queries per block. A product of two factors of masked pairs is then finite in float32, too."""


@dataclass(frozen=True)
class Decay(Rescore):
    """A `Rescore` with decays of channels."""

    need: ClassVar[str] = DECAY

    @property
    def log_decay_TBHD(self) -> Tensor:
        """The natural logarithms of the decays, for backends that compute the scores
        themselves.
        """
        return self.tensors[0]


def with_decay(log_decay_TBHD: Tensor) -> Decay:
    """Return the `Rescore` for the natural logarithms of the decays, between -`STRONGEST` and 0.

    That of token t applies to all earlier keys. Sums run across documents, since only differences
    within one are used.
    """

    def prepare(q: Tensor, k: Tensor, log_decay_TBHD: Tensor) -> tuple[Tensor]:
        """Return the running sums (B, H, T, D)."""
        return (running_sums(log_decay_TBHD),)

    return Decay(_rows, (log_decay_TBHD,), prepare, takes_scores=False)


def running_sums(log_decay_TBHD: Tensor) -> Tensor:
    """Return the sums of the logarithms up to each token, (B, H, T, D), in float64.

    In long sequences, float32 would lose the differences between nearby tokens.
    """
    # Sums are twice as fast if each head's channels are contiguous.
    return log_decay_TBHD.permute(1, 2, 0, 3).contiguous().cumsum(2, dtype=torch.float64)


def _rows(
    scores: None,
    q: Tensor,
    k: Tensor,
    seen: Tensor,
    tokens: slice,
    sums_BHTD: Tensor,
) -> Tensor:
    """Return the scores (B, H, r, t) of the queries `tokens`; see `Rescore`."""
    # Factors may be too large for fp16, and exponents too inexact in bf16.
    dtype = torch.promote_types(q.dtype, torch.float32)
    heads_per_group = q.shape[1] // k.shape[1]
    keys = k.repeat_interleave(heads_per_group, dim=1).to(dtype)
    first_key = tokens.stop - k.shape[2]
    sums = sums_BHTD[:, :, first_key : tokens.stop]
    queries = q.to(dtype) * q.shape[-1] ** -0.5

    rows = []
    first_query = tokens.start - first_key
    for start in range(first_query, k.shape[2], BLOCK):
        stop = min(start + BLOCK, k.shape[2])
        block = queries[:, :, start - first_query : stop - first_query]
        parts = []
        # The anchors are the first query of the block, for the keys before it, and the middle.
        for anchor, columns in (
            (start, slice(0, start)),
            ((start + stop) // 2, slice(start, stop)),
        ):
            origin = sums[:, :, anchor, None]
            of_queries = (sums[:, :, start:stop] - origin).to(dtype).exp()
            of_keys = (origin - sums[:, :, columns]).to(dtype).exp()
            parts.append((block * of_queries) @ (keys[:, :, columns] * of_keys).mT)
        later = queries.new_zeros(*q.shape[:2], stop - start, k.shape[2] - stop)
        rows.append(torch.cat([*parts, later], dim=-1))
    return torch.cat(rows, dim=2).to(q.dtype)
