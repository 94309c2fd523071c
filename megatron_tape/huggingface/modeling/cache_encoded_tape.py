"""The cache of models with any positional encoding, which stores the encoding's tensors with keys
and values.

Axes: B batch, S new tokens, G key/value heads, D head dimension. W is the number of tokens of a
window.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from .cache_tape import GrowingLayer
from .encoding_tape import TokenCache


@dataclass(frozen=True)
class EncodingTensor:
    """A tensor of an encoding in one layer of a cache."""

    kept: Tensor
    """The tensor for the tokens from `first` on, (B, tokens, ...)."""
    first: int = 0
    """Index of the first kept token in the sequence."""
    before: int = 0
    """Number of tokens to keep before those whose keys are kept."""
    dropped_sum: Tensor | None = None
    """The sum over the tokens before `first`, float64 (B, 1, ...); None if it is not needed."""

    def map(self, function: Callable[[Tensor], Tensor]) -> "EncodingTensor":
        """Return a copy to whose tensors `function` is applied. Their first axis is sequences."""
        dropped_sum = self.dropped_sum
        if dropped_sum is not None:
            dropped_sum = function(dropped_sum)
        return replace(self, kept=function(self.kept), dropped_sum=dropped_sum)

    def until(self, length: int) -> "EncodingTensor":
        """Return a copy with only the first `length` tokens of the sequence."""
        return replace(self, kept=self.kept[:, : length - self.first])

    def for_keys_from(self, first_key: int) -> "EncodingTensor":
        """Return this tensor without the tokens that later tokens do not need if the first kept key
        is that of token `first_key`.
        """
        first = max(first_key - self.before, self.first)
        if first == self.first:
            return self
        dropped, kept = self.kept.tensor_split([first - self.first], dim=1)
        if dropped.shape[1] > 1:
            # A view would keep the memory of all tokens, such as those of a long prompt.
            kept = kept.clone()
        dropped_sum = self.dropped_sum
        if dropped_sum is not None:
            dropped_sum = dropped_sum + dropped.sum(1, keepdim=True, dtype=dropped_sum.dtype)
        return replace(self, kept=kept, first=first, dropped_sum=dropped_sum)


class EncodedLayer(GrowingLayer):
    """A layer of a dynamic cache that also stores an encoding's tensors, and handles them like the
    keys.
    """

    def __init__(self) -> None:
        super().__init__()
        self.encoding_tensors: dict[str, EncodingTensor] = {}
        """The encoding's tensors by name."""

    def __reduce__(self):
        """Copy and pickle without buffers, since only one layer may write to a buffer."""
        state = {name: value for name, value in vars(self).items() if name != "_buffers"}
        return type(self), (), state

    def first_key(self) -> int:
        """Return the index in the sequence of the first token whose keys the next `update` will
        return.
        """
        return 0

    def _change_tensors(self, change: Callable[[EncodingTensor], EncodingTensor]) -> None:
        """Replace each of the encoding's tensors by `change` of it."""
        # Not in place, since a shallow copy of the layer shares the dictionary.
        self.encoding_tensors = {
            name: change(tensor) for name, tensor in self.encoding_tensors.items()
        }

    def _map_tensors(self, function: Callable[[Tensor], Tensor]) -> None:
        """Apply `function` to each of the encoding's tensors, whose first axis is sequences."""
        self._change_tensors(lambda tensor: tensor.map(function))

    # The methods below override those of transformers' cache layers, which beam search and assisted
    # generation call.

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace each sequence by the one at its index in beam_idx (B,), for beam search."""
        super().reorder_cache(beam_idx)
        self._map_tensors(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence, (B, ...) to (B repeats, ...)."""
        super().batch_repeat_interleave(repeats)
        self._map_tensors(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the sequences at these indices."""
        super().batch_select_indices(indices)
        self._map_tensors(lambda tensor: tensor[indices, ...])

    def crop(self, *args, **kwargs) -> None:
        """Remove the last tokens. The arguments depend on the version of transformers."""
        super().crop(*args, **kwargs)
        length = self.get_seq_length()
        self._change_tensors(lambda tensor: tensor.until(length))

    def reset(self) -> None:
        """Empty the layer. In some versions of transformers, DynamicLayer only zeroes the tensors,
        and keeps their length.
        """
        self.keys = self.values = None
        self.is_initialized = False
        self._buffers.clear()
        self.encoding_tensors = {}


class WindowLayer(EncodedLayer):
    """A layer that keeps keys, values and the encoding's tensors only of the tokens to which later
    tokens attend: the last W - 1 of them, for a window of W tokens.
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
        num_returned = self.num_seen + new_tokens - self.first_key()
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        self.num_seen += new_tokens

        if not self.record_past:
            self.keys = self._last_tokens("keys", keys, new_tokens)
            self.values = self._last_tokens("values", values, new_tokens)
            first_key = self.first_key()
            self._change_tensors(lambda tensor: tensor.for_keys_from(first_key))
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

    def first_key(self) -> int:
        """Return the index of the first token to which the next token attends."""
        return max(self.num_seen - self.sliding_window + 1, 0)

    def get_mask_sizes(self, query_length: int | Tensor, *args) -> tuple[int, int]:
        """Return the number of tokens whose keys `update` would return for `query_length` new
        tokens, and the index of the first of them in the sequence.

        Some versions of transformers give the indices of the new tokens instead of their number.
        """
        if isinstance(query_length, Tensor):
            query_length = query_length.shape[0]
        first = self.first_key()
        return self.num_seen + query_length - first, first

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
        first_key = self.first_key()
        self._change_tensors(lambda tensor: tensor.until(length).for_keys_from(first_key))

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

    def append(self, name: str, new: Tensor, before: int = 0) -> Tensor:
        """Append `new` (S, B or 1, ...) to the tensor `name`, and return it for the tokens whose
        keys the layer will return, and for `before` tokens before them, if there are so many.

        Call it before the layer's keys of the same tokens are appended.
        """
        tensor = self._append(name, EncodingTensor(self._by_sequence(new), before=before))
        start = max(self.layer.first_key() - before - tensor.first, 0)
        return tensor.kept[:, start:].transpose(0, 1)

    def cumsum(self, name: str, new: Tensor) -> Tensor:
        """Return the sums up to each new token, float64 (S, B, ...). The summands are cached, not
        the sums, so that the last tokens can be removed.
        """
        summands = self._by_sequence(new)
        zero = torch.zeros_like(summands[:, :1], dtype=torch.float64)
        tensor = self._append(name, EncodingTensor(summands, dropped_sum=zero))
        earlier = tensor.kept[:, : -len(new)].sum(1, keepdim=True, dtype=torch.float64)
        sums = tensor.dropped_sum + earlier + summands.cumsum(1, dtype=torch.float64)
        return sums.transpose(0, 1)

    def _by_sequence(self, new: Tensor) -> Tensor:
        """Return `new` (S, B or 1, ...) as (B, S, ...)."""
        return new.expand(-1, self.batch, *new.shape[2:]).transpose(0, 1)

    def _append(self, name: str, new: EncodingTensor) -> EncodingTensor:
        """Append `new`, which has only the new tokens, to the tensor `name`, and return it."""
        tensor = new
        past_length = self.layer.get_seq_length()
        if past_length > 0:
            # A forward pass that failed may have appended tokens here, but not to the keys, whose
            # number is `past_length`.
            old = self.layer.encoding_tensors[name].until(past_length)
            tensor = replace(old, kept=torch.cat([old.kept, new.kept], dim=1))
        # Not in place, since a shallow copy of the layer shares the dictionary.
        self.layer.encoding_tensors = self.layer.encoding_tensors | {name: tensor}
        return tensor


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
