"""The cache of models with any positional encoding, which stores the encoding's tensors with keys
and values.

Axes: B batch, S new tokens, T all tokens.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from .cache_tape import GrowingLayer
from .encoding_tape import TokenCache


class EncodedLayer(GrowingLayer):
    """A layer of a dynamic cache that also stores an encoding's tensors, and handles them like the
    keys.
    """

    def __init__(self) -> None:
        super().__init__()
        self.encoding_tensors: dict[str, Tensor] = {}
        """The encoding's tensors by name, (B, T, ...)."""

    def __reduce__(self):
        """Copy and pickle without buffers, since only one layer may write to a buffer."""
        state = {name: value for name, value in vars(self).items() if name != "_buffers"}
        return type(self), (), state

    def _apply_to_tensors(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace each of the encoding's tensors by `function` of it."""
        self.encoding_tensors = {
            name: function(tensor) for name, tensor in self.encoding_tensors.items()
        }

    # The methods below override those of transformers' cache layers, which beam search and assisted
    # generation call.

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace each sequence by the one at its index in beam_idx (B,), for beam search."""
        super().reorder_cache(beam_idx)
        self._apply_to_tensors(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence, (B, ...) to (B repeats, ...)."""
        super().batch_repeat_interleave(repeats)
        self._apply_to_tensors(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the sequences at these indices."""
        super().batch_select_indices(indices)
        self._apply_to_tensors(lambda tensor: tensor[indices, ...])

    def crop(self, *args, **kwargs) -> None:
        """Remove the last tokens. The arguments depend on the version of transformers."""
        super().crop(*args, **kwargs)
        length = self.get_seq_length()
        self._apply_to_tensors(lambda tensor: tensor[:, :length])

    def reset(self) -> None:
        """Empty the layer. In some versions of transformers, DynamicLayer only zeroes the tensors,
        and keeps their length.
        """
        self.keys = self.values = None
        self.is_initialized = False
        self._buffers.clear()
        self.encoding_tensors = {}


class EncodingCache(TokenCache):
    """The interface through which an encoding appends to one layer of a cache, for `batch`
    sequences.
    """

    def __init__(self, layer: EncodedLayer, batch: int):
        self.layer = layer
        self.batch = batch

    def append(self, name: str, new: Tensor) -> Tensor:
        """Append `new` (S, B or 1, ...) to the tensor `name`, and return the tensor of all tokens
        (T, B, ...).

        Call it before the layer's keys of the same tokens are appended.
        """
        new = new.expand(-1, self.batch, *new.shape[2:]).transpose(0, 1)
        if (past_length := self.layer.get_seq_length()) > 0:
            # A forward pass that failed may have appended tokens here, but not to the keys, whose
            # length is `past_length`. The slice drops these tokens.
            new = torch.cat([self.layer.encoding_tensors[name][:, :past_length], new], dim=1)
        # Not in place, since a shallow copy of the layer shares the dictionary.
        self.layer.encoding_tensors = self.layer.encoding_tensors | {name: new}
        return new.transpose(0, 1)


def check_cache(cache: Cache | None) -> None:
    """Raise NotImplementedError for a cache that cannot store an encoding's tensors."""
    if cache is None:
        return
    if type(cache) is not DynamicCache:
        unsupported = type(cache).__name__
    elif cache.offloading:
        unsupported = "offloaded caches"
    else:
        # `use_encoded_layers` can replace layers only while they are empty.
        for layer in cache.layers:
            if type(layer) is not EncodedLayer and layer.get_seq_length() > 0:
                raise NotImplementedError(
                    "this cache was filled without the positional encoding's tensors; start with an"
                    " empty DynamicCache"
                )
        return
    raise NotImplementedError(
        f"this model does not support {unsupported}, which cannot store the positional encoding's"
        " tensors of earlier tokens; use a DynamicCache"
    )


def use_encoded_layers(cache: Cache | None, layers: int) -> None:
    """Replace the first `layers` layers of a cache by `EncodedLayer`s, in place.

    `check_cache` must have accepted the cache.
    """
    if cache is None:
        return
    # A DynamicCache may create its layers only when they are first updated.
    cache.layers.extend(EncodedLayer() for _ in range(layers - len(cache.layers)))
    for i in range(layers):
        if type(cache.layers[i]) is not EncodedLayer:
            cache.layers[i] = EncodedLayer()
