"""Scaling of RoPE's positions, compared with transformers."""

import pytest
import torch
from configurations import with_values
from models import small_model
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_tape.huggingface.export.to_transformers import huggingface_config
from megatron_tape.position import encoding_of

YARN = {
    "defaults": dict(rope_scaling_factor=8.0),
    "llama2_to_128k": dict(rope_scaling_factor=32.0, rope_original_seq_length=4096),
    "bounds": dict(
        rope_scaling_factor=3.0, rope_beta_fast=20.0, rope_beta_slow=0.7, rope_truncate=False
    ),
    "attention_factor": dict(rope_scaling_factor=16.0, rope_attention_factor=1.25),
    "a_short_context": dict(rope_scaling_factor=4.0, rope_original_seq_length=16),
    "a_long_context": dict(
        rope_scaling_factor=4.0, rope_original_seq_length=10**9, rope_theta=10.0
    ),
    "one_index": dict(rope_original_seq_length=5, rope_beta_fast=30.0, rope_beta_slow=29.0),
}


@pytest.mark.parametrize("head_dim", [8, 64, 128])
@pytest.mark.parametrize("case", YARN)
def test_yarn_equals_transformers_bit_for_bit(case, head_dim):
    model = small_model(
        rope_scaling_type="yarn", position_encoding="rope", kv_channels=head_dim, **YARN[case]
    )
    config = LlamaConfig(**huggingface_config(model, model.vocab_size, "fp32"))
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](config)
    encoding = encoding_of(model)
    assert torch.equal(encoding.frequencies(), frequencies)
    assert encoding.attention_factor == attention_factor
    states = encoding.initial_state(
        torch.tensor([[0], [5000]]),
        torch.float64,
    )
    moduli = states.unflatten(-1, (2, -1)).norm(dim=-2)
    assert (moduli - attention_factor).abs().max() < 1e-6


@pytest.mark.parametrize(
    "share, left",
    [(0.75, 6), (0.5, 4), (0.2, 1), (1.0, 8)],
)
def test_rope_share_equals_transformers(share, left):
    model = small_model(
        position_encoding="rope", kv_channels=16, rope_share=share, rope_scaling_factor=2.0
    )
    config = LlamaConfig(**huggingface_config(model, model.vocab_size, "fp32"))
    frequencies, _ = ROPE_INIT_FUNCTIONS["proportional" if share < 1 else "linear"](config)
    assert torch.equal(encoding_of(model).frequencies(), frequencies)
    assert frequencies.count_nonzero() == left


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_rope_share_zeroes_the_slowest_scaled_frequencies(kind):
    scaled = small_model(rope_scaling_type=kind, rope_scaling_factor=8.0, kv_channels=16)
    some = encoding_of(with_values(scaled, rope_share=0.5)).frequencies()
    whole = encoding_of(scaled).frequencies()
    assert torch.equal(some[:4], whole[:4])
    assert whole[4:].all()
    assert not some[4:].any()
