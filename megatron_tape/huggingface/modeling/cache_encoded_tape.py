"""The cache of models with any positional encoding, which stores the encoding's tensors with keys
and values.

Axes: B batch, S new tokens, T all tokens.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

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


class WindowLayer(EncodedLayer):
    """A layer that keeps keys and values only of the tokens to which later tokens attend: the last
    W - 1 of them, for a window of W tokens.

    The encoding's tensors are kept for all tokens, since an encoding may need them, such as for
    running sums. They have few numbers per token.
    """

    is_sliding = True

    def __init__(self, window: int = 1) -> None:
        super().__init__()
        self.sliding_window = window
        self.num_seen = 0
        """Number of all tokens of a sequence, including those that are no longer kept."""
        self.record_past = False
        """Whether `update` keeps all new tokens until `crop` is called. Some versions of
        transformers set this attribute.
        """

    def activate_past_recording(self) -> None:
        """Keep new tokens until the next call of `crop`, which can then remove them."""
        self.record_past = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Append keys (B, G, S, D) and values (B, G, S, D or 2 D), and return the keys and values
        of the S new tokens and of the at most W - 1 tokens before them.
        """
        new_tokens = key_states.shape[-2]
        num_returned, _ = self.get_mask_sizes(new_tokens)
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        self.num_seen += new_tokens

        if not self.record_past:
            self.keys = self._last_tokens("keys", keys, new_tokens)
            self.values = self._last_tokens("values", values, new_tokens)
        start = keys.shape[-2] - num_returned
        return keys[:, :, start:], values[:, :, start:]

    def _last_tokens(self, name: str, tensor: Tensor, new_tokens: int) -> Tensor:
        """Return the last W - 1 tokens of `tensor`, the value of the attribute `name` after an
        update with `new_tokens` tokens.
        """
        start = max(tensor.shape[-2] - self.sliding_window + 1, 0)
        if start == 0:
            return tensor
        kept = tensor[:, :, start:]
        buffer, _ = self._buffers.pop(name, (None, None))
        if new_tokens > 1 or buffer is None:
            # A view would keep the memory of all tokens, such as those of a long prompt.
            return kept.clone()
        # The next token is appended to the same buffer.
        self._buffers[name] = buffer[:, :, start:], kept
        return kept

    def get_seq_length(self, *args) -> int:
        """Return the number of all tokens of a sequence, including those that are not kept."""
        return self.num_seen

    def get_mask_sizes(self, query_length: int | Tensor, *args) -> tuple[int, int]:
        """Return the number of tokens whose keys `update` would return for `query_length` new
        tokens, and the index of the first of them in the sequence.

        Some versions of transformers give the indices of the new tokens instead of their number.
        """
        if isinstance(query_length, Tensor):
            query_length = query_length.shape[0]
        earlier = min(self.num_seen, self.sliding_window - 1)
        return earlier + query_length, self.num_seen - earlier

    def crop(self, *args, **kwargs) -> None:
        """Remove the last tokens. The arguments depend on the version of transformers.

        Raises RuntimeError if tokens that are visible then have been dropped already.
        """
        if not self.is_initialized:
            return
        # transformers applies the arguments to a layer of this length without memory.
        probe = DynamicLayer()
        probe.keys = probe.values = torch.empty(1, self.num_seen, 1, device="meta")
        probe.is_initialized = True
        probe.crop(*args, **kwargs)
        length = probe.get_seq_length()

        end = self.keys.shape[-2] - (self.num_seen - length)
        start = end - min(length, self.sliding_window - 1)
        if start < 0:
            raise RuntimeError(
                f"{self.num_seen - length} tokens cannot be removed from this cache, since layers"
                f" with a window of {self.sliding_window} tokens have dropped the tokens before"
                " them; start with an empty cache, or call its activate_past_recording before"
                " adding tokens that may be removed, which assisted generation does in recent"
                " versions of transformers"
            )
        self.keys = self.keys[:, :, start:end]
        self.values = self.values[:, :, start:end]
        self.num_seen = length
        self._apply_to_tensors(lambda tensor: tensor[:, :length])

    def reset(self) -> None:
        """Empty the layer."""
        super().reset()
        self.num_seen = 0


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
            if not isinstance(layer, EncodedLayer) and layer.get_seq_length() > 0:
                raise NotImplementedError(
                    "this cache was filled without the positional encoding's tensors; start with an"
                    " empty DynamicCache"
                )
        return
    raise NotImplementedError(
        f"this model does not support {unsupported}, which cannot store the positional encoding's"
        " tensors of earlier tokens; use a DynamicCache"
    )


def use_encoded_layers(cache: Cache | None, windows: list[int | None]) -> None:
    """Replace the first layers of a cache by `EncodedLayer`s, in place.

    `windows` has an entry for each of these layers: the size of the window of a layer that keeps
    only the tokens in it, or None for a layer that keeps all tokens. A cache that was created
    without the model's configuration keeps all tokens, so that any of them can be removed. Empty
    layers after these are dropped. `check_cache` must have accepted the cache. Raises RuntimeError
    if the layers have different numbers of tokens.
    """
    if cache is None:
        return
    # A DynamicCache may create its layers only when they are first updated.
    cache.layers.extend(DynamicLayer() for _ in windows[len(cache.layers) :])
    # An early exit does not use the last layers, but transformers may derive the mask from them.
    if not any(layer.get_seq_length() for layer in cache.layers[len(windows) :]):
        del cache.layers[len(windows) :]
    for i, window in enumerate(windows):
        replaced = cache.layers[i]
        if isinstance(replaced, EncodedLayer):
            continue
        if window is None or not replaced.is_sliding:
            cache.layers[i] = EncodedLayer()
        else:
            cache.layers[i] = WindowLayer(window)
            # Assisted generation may have called `activate_past_recording` of an empty cache.
            cache.layers[i].record_past = getattr(replaced, "record_past", False)

    # For example if `crop` has raised an error after it had cropped some layers.
    lengths = {layer.get_seq_length() for layer in cache.layers[: len(windows)]}
    if len(lengths) > 1:
        raise RuntimeError(
            f"the layers of this cache have different numbers of tokens, {min(lengths)} to"
            f" {max(lengths)}, since an earlier call has failed; start with an empty cache"
        )
