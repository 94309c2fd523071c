"""Packed documents: which tokens may attend to which, computed once per batch and used by every layer.

Axes: S queries, T keys (the last S of them are the queries' own tokens), B batch.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def document_bounds(documents_BT: Tensor) -> Tensor:
    """Return, as int32 (2, B, T), where each token's document starts and where the next document starts.

    `documents_BT` numbers the documents of each pack in ascending order. Padding before a sequence counts as a
    document, so an attention mask of zeros followed by ones can be passed. Raises ValueError for another order; this is
    checked only on CPUs.
    """
    documents_BT = documents_BT.contiguous().long()
    if documents_BT.device.type == "cpu" and (documents_BT.diff() < 0).any():
        raise ValueError("documents must be numbered in ascending order; padding comes before a sequence, not after it")
    starts = torch.searchsorted(documents_BT, documents_BT)
    return torch.stack([starts, torch.searchsorted(documents_BT, documents_BT, right=True)]).int()


def causal_mask(S: int, T: int, bounds_2BT: Tensor | None, device: torch.device) -> Tensor:
    """Return the boolean mask (B or 1, 1, S, T), True if the key is not later than the query and in its document."""
    keys = torch.arange(T, device=device)
    mask = (keys <= keys[T - S :, None])[None, None]
    return mask if bounds_2BT is None else mask & (keys >= bounds_2BT[0, :, None, T - S :, None])


def additive_mask(S: int, T: int, bounds_2BT: Tensor | None, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the same mask to be added to scores: 0 where a query sees a key, minus infinity elsewhere."""
    mask = causal_mask(S, T, bounds_2BT, device)
    return torch.zeros(mask.shape, dtype=dtype, device=device).masked_fill_(~mask, float("-inf"))


@dataclass(frozen=True)
class Packing:
    """The documents of a batch of packs; what backends derive from their bounds (2, B, T) is kept for all layers."""

    bounds_2BT: Tensor
    _kept: dict = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, documents_BT: Tensor) -> "Packing":
        """Return the packing of numbered documents; see `document_bounds`."""
        return cls(document_bounds(documents_BT))

    def kept(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return what `make` returned when it was first called for this key."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def mask(self, S: int, dtype: torch.dtype) -> Tensor:
        """Return the mask (B, 1, S, T) to add to the scores of the last S tokens."""
        bounds = self.bounds_2BT
        return self.kept((S, dtype), lambda: additive_mask(S, bounds.shape[2], bounds, bounds.device, dtype))

    def first_seen(self, S: int) -> list[int]:
        """Return, for each of the last S tokens, the first one that it sees in any pack. Asks the device once."""
        return self.kept(("first", S), lambda: self.bounds_2BT[0, :, -S:].amin(0).tolist())

    def lengths(self, S: int) -> tuple[Tensor, Tensor, int, int]:
        """Return the cumulative lengths, int32, of documents in queries and keys, and the longest of each.

        The queries are the last S tokens of each pack; all packs are concatenated. The host waits for the device once.
        """
        return self.kept(("lengths", S), lambda: self._lengths(S))

    def _lengths(self, S: int) -> tuple[Tensor, Tensor, int, int]:
        _, B, T = self.bounds_2BT.shape
        first = torch.arange(T, device=self.bounds_2BT.device) == self.bounds_2BT[0]
        k_ends = F.pad(first.flatten().nonzero().flatten(), (0, 1), value=B * T)
        # Documents that end before the first query have no queries.
        q_ends = k_ends // T * S + (k_ends % T - (T - S)).clamp(min=0)
        longest = torch.stack([q_ends.diff().max(), k_ends.diff().max()]).tolist()
        return q_ends.int(), k_ends.int(), *longest
