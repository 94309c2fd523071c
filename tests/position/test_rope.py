"""Scalings of RoPE's positions are those of transformers."""

import pytest
import torch
from models import small_model
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_tape.huggingface.export.to_transformers import huggingface_config
from megatron_tape.position import encoding_of

YARN = {
    "defaults": dict(rope_scaling_factor=8.0),
    "llama2_to_128k": dict(rope_scaling_factor=32.0, rope_original_seq_length=4096),
    "not_truncated": dict(rope_scaling_factor=8.0, rope_truncate=False),
    "bounds": dict(rope_scaling_factor=3.0, rope_beta_fast=20.0, rope_beta_slow=0.7, rope_truncate=False),
    "attention_factor": dict(rope_scaling_factor=16.0, rope_attention_factor=1.25),
    "large_theta": dict(rope_scaling_factor=4.0, rope_theta=8e6, rope_original_seq_length=8192),
    "a_short_context": dict(rope_scaling_factor=4.0, rope_original_seq_length=16),
    "a_long_context": dict(rope_scaling_factor=4.0, rope_original_seq_length=10**9, rope_theta=10.0),
    "one_index": dict(rope_original_seq_length=5, rope_beta_fast=30.0, rope_beta_slow=29.0),
    "no_extension": dict(rope_scaling_factor=1.0),
}


@pytest.mark.parametrize("head_dim", [8, 64, 128])
@pytest.mark.parametrize("case", YARN)
def test_yarn_is_bit_for_bit_that_of_transformers(case, head_dim):
    model = small_model(rope_scaling_type="yarn", position_encoding="rope", kv_channels=head_dim, **YARN[case])
    config = LlamaConfig(**huggingface_config(model, model.vocab_size, "fp32"))
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](config)
    encoding = encoding_of(model)
    assert torch.equal(encoding.frequencies(), frequencies)
    assert encoding.attention_factor == attention_factor
    positions = torch.tensor([[0], [1], [5000]])
    assert torch.equal(encoding.initial_state(positions, torch.float32)[0, 0, 0, : head_dim // 2],
                       torch.full((head_dim // 2,), attention_factor))  # fmt: skip
    assert (encoding.initial_state(positions, torch.float64).unflatten(-1, (2, -1)).norm(dim=-2) - attention_factor
            ).abs().max() < 1e-6  # fmt: skip


def test_only_yarn_changes_the_modulus():
    for kind in ("linear", "llama3"):
        model = small_model(rope_scaling_type=kind, rope_scaling_factor=8.0, rope_attention_factor=1.25)
        assert encoding_of(model).attention_factor == 1.0
