"""Which tokens attend to which: packed documents and sliding windows, computed once per batch and
used by all layers.

Axes: S queries, T keys (the last S of them are the queries' own tokens), B batch.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
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
    """Return the boolean mask (B or 1, 1, S, T), True for keys up to the query and, with bounds,
    from the first token that it may attend to.
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
class Visibility:
    """Which tokens of a batch may attend to which, apart from the causal order, with a cache of
    derived masks that all layers share.

    Tokens attend within their document and, with a window, only to the last W tokens. Both are
    bounds that never decrease along a sequence, so kernels can skip what lies outside. The kernels
    of libraries take documents and window as separate arguments.
    """

    bounds_2BT: Tensor
    """int32 (2, B, T): for each token, the first token that it may attend to, and the token after
    the last one that may attend to it.
    """
    documents_2BT: Tensor | None
    """The bounds of the documents alone (see `document_bounds`), or of segments; None if each
    sequence is one document.
    """
    window: int | None = None
    """The size W of the window: a token attends to itself and the W - 1 tokens before it. None if
    there is no window.
    """
    _cache: dict = field(default_factory=dict, repr=False, compare=False)
    """The results of `cached` by key."""

    @classmethod
    def of(cls, documents_BT: Tensor) -> "Visibility":
        """Return the visibility of documents that are numbered as for `document_bounds`."""
        return cls.within(document_bounds(documents_BT))

    @classmethod
    def within(cls, documents_2BT: Tensor) -> "Visibility":
        """Return the visibility of documents (or segments) with the bounds `documents_2BT`."""
        return cls(documents_2BT, documents_2BT)

    @classmethod
    def of_whole(cls, tokens_BT: Tensor) -> "Visibility":
        """Return the visibility of sequences of one document each, for token ids (B, T)."""
        B, T = tokens_BT.shape
        starts_BT = torch.zeros(B, T, dtype=torch.int32, device=tokens_BT.device)
        ends_BT = torch.full_like(starts_BT, T)
        return cls(torch.stack([starts_BT, ends_BT]), None)

    def with_window(self, window: int) -> "Visibility":
        """Return the same documents, in which tokens attend only to the last `window` tokens,
        including their own.
        """
        starts_BT, ends_BT = self.bounds_2BT
        tokens_T = torch.arange(starts_BT.shape[1], dtype=torch.int32, device=starts_BT.device)
        starts_BT = starts_BT.maximum(tokens_T - window + 1)
        ends_BT = ends_BT.minimum(tokens_T + window)
        return replace(self, bounds_2BT=torch.stack([starts_BT, ends_BT]), window=window, _cache={})

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

    def first_seen(self, S: int) -> tuple[list[int], list[int]]:
        """Return, for each of the last S tokens, the first key that it may attend to: the smallest
        and the largest index among the sequences of the batch.

        The first call synchronizes the host with the device.
        """

        def make() -> tuple[list[int], list[int]]:
            """Return both lists, copied to the host at once."""
            starts_BS = self.bounds_2BT[0, :, -S:]
            smallest, largest = torch.stack([starts_BS.amin(0), starts_BS.amax(0)]).tolist()
            return smallest, largest

        return self.cached(("first", S), make)

    def varlen_arguments(self, S: int) -> tuple[Tensor, Tensor, int, int]:
        """Return flash-attn's cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k of the
        documents, which must not be None.

        The sequences of the batch are concatenated; the queries are the last S tokens of each. The
        first call synchronizes the host with the device.
        """

        def make() -> tuple[Tensor, Tensor, int, int]:
            """Return the four values, which `cached` keeps."""
            _, B, T = self.documents_2BT.shape
            starts_BT = self.documents_2BT[0]
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
