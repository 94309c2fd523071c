"""Caches of TAPE models: checks of supported classes, and layers of a dynamic cache that grow in
place.

Axes: B batch, S new tokens, G key/value heads, D head dimension.
"""

import inspect
from typing import NoReturn

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import create_causal_mask

_IS_RENAMED = "cache" in inspect.signature(create_causal_mask).parameters
CACHE = "cache" if _IS_RENAMED else "past_key_values"
"""The name of the cache in transformers' arguments and outputs. transformers 5.24 renamed it."""
# These accept values that are wider than keys.
SUPPORTED_CACHES = (DynamicCache, StaticCache)
_LAYER_ATTRIBUTES = {"keys", "values", "is_initialized", "dtype", "device"}
"""The attributes of a DynamicLayer that GrowingLayer knows. If a version of transformers adds
others, layers are not replaced by GrowingLayers.
"""


def check_cache(cache: Cache | None) -> None:
    """Raise NotImplementedError for a cache that may not be able to store the position state with
    the values.
    """
    # Not isinstance: subclasses may store values in other formats.
    if cache is not None and type(cache) not in SUPPORTED_CACHES:
        raise NotImplementedError(
            f"TAPE models do not support {type(cache).__name__}, which may be unable to store the"
            " position state with the values; use DynamicCache or StaticCache"
        )


def refuse_paged() -> NoReturn:
    """Raise NotImplementedError for continuous batching."""
    raise NotImplementedError(
        "this model does not support continuous batching, since its paged cache cannot store"
        " positions per token; use model.generate, or serve a TAPE model with vLLM"
    )


class GrowingLayer(DynamicLayer):
    """A layer of a dynamic cache that appends in place. DynamicLayer copies all tokens for each new
    one.

    `keys` and `values` are views of the used part of larger buffers. Another method, or a copy of
    the cache, may have replaced such a view. `update` then allocates a new buffer, so it never
    writes to tensors that another object uses.
    """

    # Some versions of transformers register every subclass that has a layer type. They would then
    # use this class instead of DynamicLayer for all models.
    _layer_type = None

    def __init__(self) -> None:
        super().__init__()
        # By attribute name: the buffer, and the view of its used part that the attribute holds.
        self._buffers: dict[str, tuple[Tensor, Tensor]] = {}

    def __reduce__(self):
        """Copy and pickle as a DynamicLayer, since only one layer may write to a buffer."""
        state = {name: value for name, value in vars(self).items() if name != "_buffers"}
        return DynamicLayer, (), state

    def update(
        self, key_states: Tensor, value_states: Tensor, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Append keys (B, G, S, D) and values (B, G, S, D or 2 D), and return the keys and values
        of all tokens.
        """
        if not can_write_in_place(key_states):
            # DynamicLayer replaces the views, so the buffers would only take memory.
            self._buffers.clear()
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = self._append("keys", key_states)
        self.values = self._append("values", value_states)
        return self.keys, self.values

    def _append(self, name: str, new: Tensor) -> Tensor:
        """Append `new` (B, G, S, ...) to the attribute `name` along the tokens, and return the
        tensor of all tokens.
        """
        old = getattr(self, name)
        # An empty layer holds a tensor without a token axis.
        used = old.shape[-2] if old.numel() else 0
        total = used + new.shape[-2]
        buffer, view = self._buffers.pop(name, (None, None))
        # Allocate a new buffer unless the attribute still is the view of this one, which has room.
        if (
            view is not old
            or buffer.shape[-2] < total
            or buffer.dtype != new.dtype
            # torch forbids writing to inference tensors outside inference mode.
            or (buffer.is_inference() and not torch.is_inference_mode_enabled())
        ):
            dtype = torch.promote_types(old.dtype, new.dtype)
            # With room for an eighth more tokens, the average number of copies of a token does not
            # grow with the length.
            buffer = new.new_empty(
                *new.shape[:2], total + max(32, total // 8), new.shape[-1], dtype=dtype
            )
            if used:
                buffer[:, :, :used] = old
        buffer[:, :, used:total] = new
        view = buffer[:, :, :total]
        self._buffers[name] = buffer, view
        return view

    def reset(self) -> None:
        """Reset as DynamicLayer does, without changing tensors that `update` has returned."""
        # Some versions of transformers zero the layer's tensors in place, so the layer first gets
        # its own copies.
        if self._buffers:
            self.keys, self.values = self.keys.clone(), self.values.clone()
            self._buffers.clear()
        super().reset()


def can_write_in_place(states: Tensor) -> bool:
    """Return whether neither autograd, torch.compile nor tracing records operations on `states`."""
    return not (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        # Other tracers, such as torch.export's, use subclasses.
        or type(states) is not Tensor
    )


def use_growing_layers(cache: Cache | None, states: Tensor) -> None:
    """Replace the layers of a DynamicCache by `GrowingLayer`s, if `can_write_in_place(states)`.

    Caches of other classes and offloaded caches, which move their layers between devices, remain
    unchanged.
    """
    if type(cache) is not DynamicCache or not can_write_in_place(states) or cache.offloading:
        return
    for i, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer and vars(layer).keys() <= _LAYER_ATTRIBUTES:
            cache.layers[i] = growing = GrowingLayer()
            vars(growing).update(vars(layer))
