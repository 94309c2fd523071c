"""Exports of models with a sliding window to architectures of transformers."""

import dataclasses
import json

import pytest
import torch
from exported_models import PLAIN_ROPE, make
from models import YARN, build, random_tokens, small_model
from test_exported_models import GREEDY, in_parts
from torch.testing import assert_close

from megatron_tape.huggingface.export.saved_weights import open_weights
from megatron_tape.huggingface.export.to_transformers import huggingface_config
from megatron_tape.huggingface.imports.config_json import model_settings
from megatron_tape.huggingface.imports.from_transformers import import_model
from megatron_tape.position import BUILT_IN, encoding_of

WINDOW = 5
MIXED = {"sliding_window": WINDOW, "full_attention_every": 2, "num_layers": 4}
LLAMA3 = dict(rope_scaling_type="llama3", rope_scaling_factor=8.0, rope_original_seq_length=32)
PLAIN = {
    "mistral": {"sliding_window": WINDOW},
    "mistral_yarn": {"sliding_window": WINDOW, **YARN},
    "mistral_of_two_tokens": {"sliding_window": 2},
    "qwen2": {"qkv_bias": True, "sliding_window": WINDOW},
    "qwen2_mixed": {"qkv_bias": True, **MIXED},
    "qwen3_mixed": {"qk_norm": True, **MIXED, "full_attention_every": 3},
    "smollm3": MIXED | LLAMA3,
    "smollm3_swan": MIXED | {"layers_without_positions": 2},
    "smollm3_all": {"sliding_window": WINDOW, "layers_without_positions": 2},
}
"""By model_type and, after an underscore, what is special."""
CODE = {
    "one_token": {"sliding_window": 1},
    "scaled_full_layers": MIXED | YARN | {"rope_scaling_layers": "full"},
    "local_theta": MIXED | {"rope_local_theta": 3.0},
    "temperature": {
        "layers_without_positions": 2,
        "temperature_scale": 0.1,
        "num_layers": 10,
    },
    "gate": {"attention_output_gate": True, "sliding_window": WINDOW},
}
"""Models with `rope` that no architecture of transformers has."""
LENGTH = 64
"""Four times the length of the trained sequences."""
CLOSE = dict(atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    """Return a model with a window and its export, made once."""
    folder = tmp_path_factory.mktemp("windowed")
    made = {}

    def of(name):
        if name not in made:
            made[name] = make(folder, PLAIN_ROPE, label=name, **PLAIN[name])
        return made[name]

    return of


@torch.no_grad()
@pytest.mark.parametrize("name", PLAIN)
def test_logits_equal_the_training_model_far_beyond_the_trained_length(windowed, name):
    made = windowed(name)
    model = made.loaded
    assert model.config.model_type == name.partition("_")[0]
    ids = random_tokens(2, LENGTH)
    expected = made.built(ids)
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        assert_close(model(ids, use_cache=False).logits, expected, **CLOSE)
        assert_close(in_parts(model, ids, 1)[0], expected, **CLOSE)
        assert_close(in_parts(model, ids, [3, 1, 9, 30, 2, 19])[0], expected, **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("name", PLAIN)
def test_left_padding_changes_nothing(windowed, name):
    made = windowed(name)
    model = made.loaded
    ids = random_tokens(2, LENGTH)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    alone = made.built(ids[:1, 9:])
    padded = model(ids, attention_mask=mask, use_cache=False).logits
    assert_close(padded[:1, 9:], alone, **CLOSE)
    assert_close(padded[1:], made.built(ids[1:]), **CLOSE)

    expected = model.generate(ids, attention_mask=mask, use_cache=False, **GREEDY)
    for cache in ("dynamic", "static"):
        found = model.generate(
            ids, attention_mask=mask, cache_implementation=cache, disable_compile=True, **GREEDY
        )
        assert torch.equal(found, expected), cache


@torch.no_grad()
@pytest.mark.parametrize("name", PLAIN)
def test_an_export_hides_tokens_beyond_the_window(windowed, name):
    """All logits after the window differ from those of the same weights without a window."""
    made = windowed(name)
    window = made.model.sliding_window
    ids = random_tokens(2, LENGTH)
    found = made.loaded(ids, use_cache=False).logits
    full = dataclasses.replace(made.model, sliding_window=None, full_attention_every=None)
    without = without_window(made, full)(ids)
    assert_close(found[:, :window], without[:, :window], **CLOSE)
    assert (found - without)[:, window:].abs().amax(-1).min() > 1e-4


def without_window(made, model):
    """Return the training model with the weights of `made` and the settings `model`."""
    built, _ = build(model)
    built.load_state_dict(made.built.state_dict())
    return built.eval()


@pytest.mark.parametrize("name", PLAIN)
def test_an_export_can_be_imported_and_gives_the_same_export(windowed, name, tmp_path):
    made = windowed(name)
    import_model(made.directory, tmp_path / "imported", "rope")
    model = open_weights(tmp_path / "imported").model
    for field in ("sliding_window", "full_attention_every", "layers_without_positions"):
        assert getattr(model, field) == getattr(made.model, field), field
    for settings in (model, made.model):
        assert huggingface_config(settings, 64, "fp32").items() <= exported_settings(made).items()


@pytest.mark.parametrize("name", PLAIN)
def test_the_card_says_which_layers_have_the_window(windowed, name):
    made = windowed(name)
    card = (made.directory / "README.md").read_text()
    window = f"| Sliding window | {made.model.sliding_window} tokens in all layers"
    if made.model.full_attention_every == 2:
        window += " except layers 2, 4 (counted from 1)"
    elif made.model.full_attention_every == 3:
        window += " except layer 3 (counted from 1)"
    assert f"{window} |" in card
    assert ("| Without positions | layer" in card) == name.endswith(("swan", "all"))
    # vLLM's own classes of these models would refuse layers of two types.
    needs_option = name in ("qwen2_mixed", "qwen3_mixed")
    assert ("--model-impl transformers" in card) == needs_option
    if needs_option:
        settings = exported_settings(made)
        assert settings["max_window_layers"] != settings["num_hidden_layers"]


def test_the_card_describes_the_temperature(tmp_path):
    made = make(tmp_path, "rope", **CODE["temperature"])
    card = (made.directory / "README.md").read_text()
    assert "| 1 + 0.1 log(floor((p + 1) / 8192) + 1) at position p |" in card
    assert "| Without positions | layers 2, 4, ..., 10 (counted from 1) |" in card


def exported_settings(made):
    return json.loads((made.directory / "config.json").read_text())


@pytest.mark.parametrize("encoding", [encoding.name for encoding in BUILT_IN])
@pytest.mark.parametrize("sizes", [{}, {"sliding_window": WINDOW}, MIXED, {"sliding_window": 99}])
def test_every_format_has_the_window_and_its_import_too(encoding, sizes, tmp_path):
    """A window that is longer than the trained sequences hides tokens in longer ones."""
    model = small_model(position_encoding=encoding, **sizes)
    check_round_trip(model, tmp_path)
    if sizes and encoding == "tape":
        assert encoding_of(model).exports_to == "code"


@pytest.mark.parametrize("encoding", ["rope", "tape"])
@pytest.mark.parametrize("name", CODE)
def test_rules_that_transformers_lacks_need_the_encodings_file(encoding, name, tmp_path):
    model = small_model(position_encoding=encoding, **CODE[name])
    assert encoding_of(model).exports_to == "code"
    check_round_trip(model, tmp_path)


def check_round_trip(model, tmp_path):
    """Check that the settings in an export's config.json give the model again."""
    settings = huggingface_config(model, model.vocab_size, "fp32")
    again = model_settings(settings, tmp_path / "config.json", model.position_encoding)
    fields = ["sliding_window", "full_attention_every", "layers_without_positions"]
    fields += ["temperature_scale", "temperature_floor_scale", "position"]
    for field in fields:
        assert getattr(again, field) == getattr(model, field), field
