"""Caches: growing layers equal transformers' dynamic layers, and early exits keep the cache
correct.
"""

import random

import pytest
import torch
from small_models import build, tokens
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from megatron_tape.huggingface.modeling.cache_tape import GrowingLayer


def rows(batch, count, width):
    return torch.randn(batch, 2, count, width)


CHANGES = {
    "crop": lambda layer, n: layer.crop(-min(n, layer.get_seq_length() - 1)),
    "reorder": lambda layer, n: layer.reorder_cache(torch.arange(layer.keys.shape[0]).flip(0)),
    "select": lambda layer, n: layer.batch_select_indices(torch.tensor([0, -1])),
    "repeat": lambda layer, n: layer.batch_repeat_interleave(1 if len(layer.keys) > 3 else 2),
    "by_hand": lambda layer, n: setattr(layer, "values", layer.values.clone()),
}


@torch.no_grad()
@pytest.mark.parametrize("seed", range(4))
def test_growing_layers_equal_plain_layers(seed, unwritten_memory_is_nan):
    torch.manual_seed(seed)
    draw = random.Random(seed)
    growing = GrowingLayer()
    plain = DynamicLayer()
    seen = []
    in_place = 0
    for _ in range(60):
        if plain.is_initialized and draw.random() < 0.3:
            change = draw.choice(list(CHANGES))
            count = draw.randint(1, 9)
            for layer in (growing, plain):
                CHANGES[change](layer, count)
        batch = plain.keys.shape[0] if plain.is_initialized else 3
        count = draw.choice([1, 1, 1, 2, 30])
        new = rows(batch, count, 4), rows(batch, count, 8)
        before = growing.keys.data_ptr() if growing.is_initialized else 0
        for found, expected in zip(growing.update(*new), plain.update(*new)):
            assert torch.equal(found, expected)
            seen.append((found, expected))  # `plain` never writes to returned tensors
        in_place += growing.keys.data_ptr() == before
        assert growing.get_seq_length() == plain.get_seq_length()
    assert in_place > 15
    assert all(torch.equal(found, expected) for found, expected in seen)


def test_a_reset_does_not_change_returned_tensors(monkeypatch):
    monkeypatch.setattr(DynamicLayer, "reset", CacheLayerMixin.reset)  # as transformers 5.0 does
    layer = GrowingLayer()
    with torch.no_grad():
        keys, _ = layer.update(rows(1, 3, 4), rows(1, 3, 8))
        kept = keys.clone()
        layer.reset()
        layer.update(rows(1, 3, 4), rows(1, 3, 8))
    assert torch.equal(keys, kept)


def test_decoding_writes_in_place_into_a_dynamic_cache(model):
    for cache in (DynamicCache(), DynamicCache(config=model.config)):
        with torch.no_grad():
            model(tokens(2, 9), past_key_values=cache)
            model(tokens(2, 1), past_key_values=cache)
            before = [layer.values.data_ptr() for layer in cache.layers]
            for _ in range(4):
                model(tokens(2, 1), past_key_values=cache)
        assert type(cache) is DynamicCache
        assert cache.get_seq_length() == 14
        assert [layer.values.data_ptr() for layer in cache.layers] == before


def test_an_early_exit_equals_the_model_of_the_first_layers():
    torch.manual_seed(0)
    whole = build(torch.float64, num_hidden_layers=4)
    short = build(torch.float64, num_hidden_layers=2)
    weights = whole.state_dict()
    short.load_state_dict({name: weights[name] for name in short.state_dict()})
    whole.config.num_hidden_layers = 2
    with torch.no_grad():
        cache = DynamicCache()
        found = whole(tokens(), past_key_values=cache)
        assert torch.equal(found.logits, short(tokens()).logits)
    widths = [(layer.keys.shape[-1], layer.values.shape[-1]) for layer in cache.layers]
    assert widths == [(8, 16), (8, 8)], "the last layer that is used averages no state"


@pytest.mark.parametrize("base", [DynamicCache, StaticCache, EncoderDecoderCache])
def test_unsupported_caches_are_refused(model, base):
    class Other(base):
        def __init__(self):
            pass

    with pytest.raises(NotImplementedError, match="Other"):
        model(tokens(), past_key_values=Other())
