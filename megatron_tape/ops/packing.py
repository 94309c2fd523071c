"""Packed documents: which tokens may attend to which, computed once per batch and used by every
layer.

Axes: S queries, T keys (the last S of them are the queries' own tokens), B batch.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def document_bounds(documents_BT: Tensor) -> Tensor:
    """Return int32 (2, B, T): for each token, the start of its document and the start of the next
    document.

    `documents_BT` holds the number of each token's document, ascending along a sequence. Padding
    before a sequence counts as a document, so an attention mask of zeros followed by ones can be
    passed. Raises ValueError if the numbers decrease, which is checked only on CPUs, since the
    check would block the host on a GPU.
    """
    documents_BT = documents_BT.contiguous().long()
    if documents_BT.device.type == "cpu" and (documents_BT.diff() < 0).any():
        raise ValueError(
            "documents_BT decreases within a row; number documents in ascending order and pad on"
            " the left"
        )
    # Numbers ascend, so a binary search finds the first token with a token's number.
    starts = torch.searchsorted(documents_BT, documents_BT)
    ends = torch.searchsorted(documents_BT, documents_BT, right=True)
    return torch.stack([starts, ends]).int()


def causal_mask(
    S: int,
    T: int,
    bounds_2BT: Tensor | None,
    device: torch.device,
) -> Tensor:
    """Return the boolean mask (B or 1, 1, S, T), True for keys up to the query and, with bounds, in
    its document.
    """
    keys = torch.arange(T, device=device)
    # (1, 1, S, T); the queries are the last S tokens.
    mask = (keys <= keys[T - S :, None])[None, None]
    if bounds_2BT is None:
        return mask
    # Keys of later documents are hidden already, as they follow the query.
    starts_B1S1 = bounds_2BT[0, :, None, T - S :, None]
    return mask & (keys >= starts_B1S1)


def additive_mask(
    S: int,
    T: int,
    bounds_2BT: Tensor | None,
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    """Return `causal_mask` as a bias (B or 1, 1, S, T): 0 where a query may attend to a key, and
    minus infinity elsewhere.
    """
    mask = causal_mask(S, T, bounds_2BT, device)
    bias = torch.zeros(mask.shape, dtype=dtype, device=device)
    return bias.masked_fill_(~mask, float("-inf"))


@dataclass(frozen=True)
class Packing:
    """The documents of a batch of packed sequences, with a cache of derived masks that all layers
    share.
    """

    bounds_2BT: Tensor
    """The result of `document_bounds`."""
    _cache: dict = field(default_factory=dict, repr=False, compare=False)
    """The results of `cached` by key."""

    @classmethod
    def of(cls, documents_BT: Tensor) -> "Packing":
        """Return the `Packing` of documents that are numbered as for `document_bounds`."""
        return cls(document_bounds(documents_BT))

    def cached(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the cached value for `key`, calling `make` the first time."""
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    def mask(self, S: int, dtype: torch.dtype) -> Tensor:
        """Return the `additive_mask` (B, 1, S, T) of the last S tokens."""
        bounds = self.bounds_2BT
        make = partial(additive_mask, S, bounds.shape[2], bounds, bounds.device, dtype)
        return self.cached((S, dtype), make)

    def first_seen(self, S: int) -> list[int]:
        """Return, for each of the last S tokens, the first key that it may attend to in any
        sequence of the batch.

        The first call synchronizes the host with the device.
        """
        starts_BT = self.bounds_2BT[0]
        return self.cached(("first", S), lambda: starts_BT[:, -S:].amin(0).tolist())

    def varlen_arguments(self, S: int) -> tuple[Tensor, Tensor, int, int]:
        """Return flash-attn's cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k of the
        documents.

        The sequences of the batch are concatenated; the queries are the last S tokens of each. The
        first call synchronizes the host with the device.
        """

        def make() -> tuple[Tensor, Tensor, int, int]:
            """Return the four values, which `cached` keeps."""
            _, B, T = self.bounds_2BT.shape
            starts_BT = self.bounds_2BT[0]
            is_start = torch.arange(T, device=starts_BT.device) == starts_BT
            k_starts = is_start.flatten().nonzero().flatten()
            cu_seqlens_k = F.pad(k_starts, (0, 1), value=B * T)

            # Token t of sequence b has the index b * T + t among all keys and, if it is a query,
            # the index b * S + t - (T - S) among all queries. Documents that end before the first
            # query contain no queries.
            queries_before = (cu_seqlens_k % T - (T - S)).clamp(min=0)
            cu_seqlens_q = cu_seqlens_k // T * S + queries_before

            # Both numbers are copied to the host at once, since each copy blocks it.
            longest = torch.stack([cu_seqlens_q.diff().max(), cu_seqlens_k.diff().max()])
            return cu_seqlens_q.int(), cu_seqlens_k.int(), *longest.tolist()

        return self.cached(("varlen", S), make)
