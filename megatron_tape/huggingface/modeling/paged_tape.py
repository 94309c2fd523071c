"""Continuous batching of TAPE models: the paged cache holds the position state beside keys and values.

transformers' paged cache keeps two rows for every token, layer and key/value head, each as wide as the `head_dim` of
the configuration that it was made with. A configuration with rows of 3 D / 2 makes room for [key | value | z].

Axes: S new tokens of all requests, T tokens that the cache returns, G key/value heads, D head dimension.
"""

import copy
import functools
import inspect
from collections.abc import Callable

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

_USE_GENERATE = "use generate, which needs no paged cache"
_INDICES, _MAPPING = ["read_index", "write_index"], ["kwargs"]
"""What the paged cache's `update` takes after keys, values and the layer, until transformers 5.16 and after it."""


@functools.cache
def _arguments_of(update: Callable) -> list[str]:
    return list(inspect.signature(update).parameters)[4:]


def check_continuous_batching() -> None:
    """Raise NotImplementedError where transformers has no paged cache that can hold the position state."""
    try:
        from transformers import ContinuousBatchingManager
        from transformers.generation.continuous_batching import PagedAttentionCache

        known = _arguments_of(PagedAttentionCache.update) in (_INDICES, _MAPPING)
        known = known and hasattr(ContinuousBatchingManager, "_create_batch_processor")
    except ImportError:
        known = False
    if not known:
        raise NotImplementedError(
            f"continuous batching of TAPE models is not supported with transformers {transformers.__version__}, whose "
            f"paged cache is not known to be able to hold the position state; {_USE_GENERATE}"
        )


def prepare_manager(manager, model: PreTrainedModel) -> None:
    """Let a ContinuousBatchingManager make its cache wide enough for the position state, and without block tables.

    Raises NotImplementedError if the manager has chosen an attention implementation that updates the cache itself.
    """
    from transformers.generation.continuous_batching import PagedAttentionCache

    implementation = model.config._attn_implementation
    separate = not implementation.startswith("paged|") and _arguments_of(PagedAttentionCache.update) == _MAPPING
    if not separate and implementation.removeprefix("paged|") not in ("eager", "sdpa"):
        raise NotImplementedError(
            f"continuous batching of TAPE models does not support {implementation} with transformers "
            f"{transformers.__version__}; call model.set_attn_implementation('sdpa'), and set auto_switch_to_flash "
            "to False in the continuous batching config"
        )
    create = manager._create_batch_processor

    def create_wide():
        # With block tables, flash attention would write the cache itself, as wide as its queries.
        manager.continuous_batching_config.max_blocks_per_request = 0
        wide = copy.copy(model)
        wide.config = copy.copy(model.config)
        wide.config.head_dim = model.config.head_dim * 3 // 2
        manager.model = wide
        try:
            return create()
        finally:
            manager.model = model

    manager._create_batch_processor = create_wide


def check_paged_cache(cache: object | None, config: PreTrainedConfig, arguments: dict) -> None:
    """Raise NotImplementedError unless `cache` is None or holds the position state, and the arguments fit to it."""
    if cache is None:
        implementation = config._attn_implementation
        if implementation.startswith("paged|"):
            raise NotImplementedError(
                f"{implementation} attention is only for continuous batching; call "
                f"model.set_attn_implementation('{implementation.removeprefix('paged|')}')"
            )
        if "write_index" in arguments:
            raise NotImplementedError(
                f"continuous batching of TAPE models is not supported with transformers {transformers.__version__}, "
                f"which gives the model no paged cache; {_USE_GENERATE}"
            )
        return
    from transformers.generation.continuous_batching import PagedAttentionCache

    if type(cache) is not PagedAttentionCache or 2 * cache.config.head_dim != 3 * config.head_dim:
        raise NotImplementedError(
            f"this {type(cache).__name__} cannot hold the position state of a TAPE model; make the manager of "
            "continuous batching by model.init_continuous_batching(), or use generate_batch"
        )
    if arguments.get("block_table") is not None:
        raise NotImplementedError(
            "continuous batching of TAPE models does not support block tables; set max_blocks_per_request to 0"
        )


@torch.compiler.disable  # as transformers' own update
def update_paged(cache, key: Tensor, value: Tensor, layer_idx: int, arguments: dict) -> tuple[Tensor, Tensor]:
    """Store keys (1, G, S, D) and values (1, G, S, D or 2 D), and return those of all tokens, (1, G, T, the same).

    `arguments` are the attention function's; they are completed in place, as transformers' cache does it.
    """
    D, width = key.shape[-1], value.shape[-1]
    half = D // 2
    # One row is [key | first half of the value], the other [second half of the value | z].
    first = torch.cat([key, value[..., :half]], dim=-1)
    second = torch.nn.functional.pad(value[..., half:], (0, 2 * D - width))
    if _arguments_of(type(cache).update) == _MAPPING:
        first, second = cache.update(first, second, layer_idx, arguments)
    else:
        indices = {name: arguments[name] for name in _INDICES}
        first, second = (rows.transpose(0, 1)[None] for rows in cache.update(first, second, layer_idx, **indices))
    return first[..., :D], torch.cat([first[..., D:], second[..., : width - half]], dim=-1)
