"""The engine transformers of a verification, compared with plain forward passes."""

import gc

import pytest
import torch
from environments import ROOT, run_in
from exported_models import OWN_CLASSES, PLAIN_ROPE, make
from models import YARN
from torch.testing import assert_close
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from megatron_tape.errors import FileError
from megatron_tape.huggingface.verification.sequences import (
    Sequence,
    chunks,
    default_positions,
    every_token,
    groups_of_tokens,
)
from megatron_tape.huggingface.verification.transformers_engine import TransformersEngine

LENGTH = 32
"""Trained length. Sequences are four times as long."""
POSITIONS = default_positions(LENGTH)
WINDOW = 5
MIXED = {"sliding_window": WINDOW, "full_attention_every": 2, "num_layers": 4}
LLAMA3 = dict(rope_scaling_type="llama3", rope_scaling_factor=8.0, rope_original_seq_length=32)
LINEAR = dict(rope_scaling_type="linear", rope_scaling_factor=2.0)
SWAN = MIXED | {"layers_without_positions": 2}
TEMPERATURE = {"temperature_scale": 0.5, "temperature_floor_scale": 3}
EXPORTS = {
    "llama": (PLAIN_ROPE, {}),
    "llama_linear": (PLAIN_ROPE, LINEAR),
    "llama_yarn": (PLAIN_ROPE, YARN),
    "mistral": (PLAIN_ROPE, {"sliding_window": WINDOW, **LLAMA3}),
    "qwen2": (PLAIN_ROPE, {"qkv_bias": True}),
    "qwen2_windows": (PLAIN_ROPE, {"qkv_bias": True, **MIXED}),
    "qwen3": (PLAIN_ROPE, {"qk_norm": True, **YARN}),
    "qwen3_windows": (PLAIN_ROPE, {"qk_norm": True, **MIXED}),
    "smollm3": (PLAIN_ROPE, {"layers_without_positions": 2}),
    "smollm3_windows": (PLAIN_ROPE, SWAN | LLAMA3),
    "tape": (OWN_CLASSES, {}),
    "tape_yarn": (OWN_CLASSES, YARN),
    "encoded_rope": ("rope", {}),
    "encoded_rope_windows": ("rope", SWAN | TEMPERATURE),
    "encoded_tape": ("tape", {}),
    "encoded_tape_windows": ("tape", MIXED | YARN),
}
"""By model type and, after an underscore, what is special."""
SIZES = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=LENGTH,
    initializer_range=0.2,
    pad_token_id=0,
)
WITH_GAPS = (*EXPORTS, "llama_biases", "phi3", "phi3_window")
WITHOUT_GAPS = ("alibi", "sincos", "fire", "cope", "path_fox", "rope_learned", "tape_learned")
"""Encodings that need all tokens up to a position."""
GROUPS = groups_of_tokens(POSITIONS, SIZES["vocab_size"])
DENSE = every_token(POSITIONS, SIZES["vocab_size"])
CLOSE = dict(atol=1e-5, rtol=1e-5)


def other(name):
    """Return a random model of transformers that this project cannot export."""
    torch.manual_seed(0)
    if name == "llama_biases":
        model = LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True))
        biases = [weight for key, weight in model.named_parameters() if key.endswith("bias")]
        assert len(biases) == 7 * SIZES["num_hidden_layers"]
        for bias in biases:
            torch.nn.init.normal_(bias)
        return model
    changes = {"partial_rotary_factor": 0.5}
    if name == "phi3_window":
        changes = {"sliding_window": WINDOW}
    return Phi3ForCausalLM(Phi3Config(**SIZES, **changes))


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Return the directory of a model, made once."""
    folder = tmp_path_factory.mktemp("engine")

    def of(name):
        directory = folder / name
        if directory.exists():
            return directory
        if name in EXPORTS or name in (*WITHOUT_GAPS, "randpe"):
            encoding, changes = EXPORTS.get(name, (name, {}))
            make(folder, encoding, label=name, seq_length=LENGTH, **changes)
        else:
            other(name).save_pretrained(directory)
        return directory

    return of


@pytest.fixture(scope="module")
def engines(directories):
    """Return the engine with a model, loaded once."""
    loaded = {}

    def of(name):
        if name not in loaded:
            trust = name.startswith(("tape", "encoded")) or name in (*WITHOUT_GAPS, "randpe")
            loaded[name] = TransformersEngine.load(
                directories(name), torch.float32, trust_remote_code=trust
            )
        return loaded[name]

    return of


@torch.no_grad()
def plain_pass(model, sequence, **inputs):
    """Return the logits and all hidden states of the compared tokens, the last ones normed, from a
    pass with eager attention.
    """
    model.set_attn_implementation("eager")
    output = model(
        sequence.ids[None],
        attention_mask=torch.ones_like(sequence.ids)[None],
        position_ids=sequence.positions[None],
        use_cache=False,
        output_hidden_states=True,
        **inputs,
    )
    model.set_attn_implementation("sdpa")
    compared = list(sequence.compared)
    states = torch.stack(output.hidden_states)[1:, 0, compared]
    return output.logits[0, compared], states


def check(model, outputs, logits, states):
    """Check outputs against those of `plain_pass`."""
    assert_close(outputs.logits, logits, **CLOSE)
    assert_close(outputs.hidden_states[:-1], states[:-1], **CLOSE)
    assert_close(model.base_model.norm(outputs.hidden_states[-1]), states[-1], **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("name", (*WITH_GAPS, *WITHOUT_GAPS))
def test_all_ways_of_reading_agree_with_a_plain_pass(engines, name):
    engine = engines(name)
    if name in EXPORTS and not name.startswith("encoded"):
        assert engine.model.config.model_type == name.partition("_")[0]
    sequences = [DENSE]
    if name in WITH_GAPS:
        sequences.append(GROUPS)
    for sequence in sequences:
        expected = plain_pass(engine.model, sequence)
        for way in (engine.one_pass, engine.in_chunks, engine.left_padded):
            check(engine.model, way(sequence), *expected)
