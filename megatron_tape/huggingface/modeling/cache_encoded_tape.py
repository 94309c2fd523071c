"""The cache of models with any positional encoding: beside keys and values, what the encoding remembers.

Axes: B batch, S new tokens, T all tokens.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from .cache_tape import GrowingLayer
from .encoding_tape import TokenCache


class EncodedLayer(GrowingLayer):
    """A layer of a dynamic cache that also holds tensors of an encoding, and does with them what it does with keys."""

    _layer_type = None

    def __init__(self) -> None:
        super().__init__()
        self.of_tokens: dict[str, Tensor] = {}
        """One value per token, (B, T, ...)."""

    def __reduce__(self):
        return type(self), (), {name: value for name, value in vars(self).items() if name != "_buffers"}

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        self.of_tokens = {name: change(kept) for name, kept in self.of_tokens.items()}

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._change(lambda kept: kept.index_select(0, beam_idx.to(kept.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._change(lambda kept: kept.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._change(lambda kept: kept[indices, ...])

    def crop(self, *args, **kwargs) -> None:
        super().crop(*args, **kwargs)
        length = self.get_seq_length()
        self.of_tokens = {name: kept[:, :length] for name, kept in self.of_tokens.items()}

    def reset(self) -> None:
        self.keys = self.values = None
        self.is_initialized = False
        self._buffers.clear()
        self.of_tokens = {}


class EncodingCache(TokenCache):
    """What an encoding remembers in one layer of a cache, for `batch` sequences."""

    def __init__(self, layer: EncodedLayer, batch: int):
        self.layer, self.batch = layer, batch

    def append(self, name: str, new: Tensor) -> Tensor:
        """Return the values of all tokens (T, B, ...), given those of the new ones (S, B or 1, ...); keep them."""
        new = new.expand(-1, self.batch, *new.shape[2:]).transpose(0, 1)
        if (before := self.layer.get_seq_length()) > 0:
            # Without those of a pass that broke off.
            new = torch.cat([self.layer.of_tokens[name][:, :before], new], dim=1)
        # Not in place: a shallow copy of the layer has the same dictionary, and continues apart.
        self.layer.of_tokens = self.layer.of_tokens | {name: new}
        return new.transpose(0, 1)


def check_cache(cache: Cache | None) -> None:
    """Raise NotImplementedError for a cache that cannot hold what an encoding remembers."""
    if cache is None:
        return
    if type(cache) is not DynamicCache or cache.offloading:
        kind = "offloaded caches" if type(cache) is DynamicCache else type(cache).__name__
        raise NotImplementedError(
            f"this model does not support {kind}, which cannot hold what a positional encoding remembers of earlier "
            "tokens; use a DynamicCache"
        )
    if any(type(layer) is not EncodedLayer and layer.get_seq_length() > 0 for layer in cache.layers):
        raise NotImplementedError(
            "this cache was filled without what the positional encoding remembers of its tokens; start with an empty "
            "DynamicCache, and let the model fill it"
        )


def prepare_cache(cache: Cache | None, layers: int) -> None:
    """Give a checked cache `layers` layers that can hold what an encoding remembers."""
    if cache is None:
        return
    for i in range(layers):
        if i == len(cache.layers):
            cache.layers.append(EncodedLayer())
        elif type(cache.layers[i]) is not EncodedLayer:
            cache.layers[i] = EncodedLayer()
