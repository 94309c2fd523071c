"""Caches of TAPE models: which ones keep the position state with the values."""

from transformers import Cache, DynamicCache, StaticCache

CACHES = (DynamicCache, StaticCache)


def check_cache(past_key_values: Cache | None) -> None:
    """Raise NotImplementedError for a cache that is not known to keep the position state with the values."""
    if past_key_values is not None and type(past_key_values) not in CACHES:
        raise NotImplementedError(
            f"TAPE models do not support {type(past_key_values).__name__}, which may be unable to keep the "
            f"position state with the values; use {' or '.join(cache.__name__ for cache in CACHES)}"
        )
