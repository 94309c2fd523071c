"""Servers that bring an attention of their own are refused, where their cache cannot hold the position state."""

import pytest
import torch
from small_models import build, tokens
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def test_an_attention_that_keeps_its_own_cache_is_refused_before_it_is_called(monkeypatch):
    """As vLLM's, which calls one cache for each layer and has no room for z: the answer would be wrong, not refused."""
    called = []

    def attention(module, query, key, value, attention_mask, **kwargs):
        called.append(module.layer_idx)
        return torch.zeros_like(query).transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "vllm", attention)
    model = build()
    model.config._attn_implementation = "vllm"
    with pytest.raises(NotImplementedError, match="do not support vllm.*transformers serve or generate_batch"):
        model(tokens(), use_cache=False)
    assert not called
