"""--rope-scaling gives the settings of an extension, in the model and in its config.json."""

import json
import math
from dataclasses import replace
from typing import get_args, get_type_hints

import pytest
from extension.test_scaling import MODELS, base_of, extended_model
from huggingface.test_import import FAMILY, LLAMA3, PARTIAL, write_source
from models import WINDOWS, YARN, small_model

from megatron_tape import command_line
from megatron_tape.errors import ConfigError
from megatron_tape.extension.rope_scaling import RopeScaling, read_options
from megatron_tape.extension.scaled_export import link_scaled
from megatron_tape.huggingface.imports.config_json import model_settings, read_settings
from megatron_tape.position import BUILT_IN
from megatron_tape.position.rope import ScaledSettings


def scaled_source(folder, kind, scaling):
    """Scale the model of transformers FAMILY[kind]; return the contents of its config.json before
    and after.
    """
    write_source(folder / "source", kind)
    link_scaled(scaling, folder / "source", folder / "scaled")
    return [read_settings(folder / name / "config.json") for name in ("source", "scaled")]


@pytest.mark.parametrize("encoding", ["rope", "tape", "repo"])
@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_a_model_without_scaling_is_scaled_from_its_own_length(kind, encoding):
    base = base_of("none", encoding)
    model = RopeScaling(kind, 4.0).scaled(base.model, base.path)
    assert model.seq_length == 4 * base.model.seq_length
    position = model.position
    assert (position.rope_scaling_type, position.rope_scaling_factor) == (kind, 4.0)
    if kind != "linear":
        assert position.rope_original_seq_length == base.model.seq_length
    assert position.rope_theta == base.model.position.rope_theta


@pytest.mark.parametrize("name", [name for name in MODELS if name != "yarn_attention"])
def test_the_settings_are_those_of_an_extension(name):
    base = base_of(name, attention_backend="naive")
    kind = base.model.position.rope_scaling_type
    scaled = RopeScaling(kind, 1.5).scaled(base.model, base.path)
    extended = extended_model(base, context_factor=1.5)
    assert scaled.attention_backend == base.model.attention_backend != extended.attention_backend
    assert replace(scaled, attention_backend=extended.attention_backend) == extended


@pytest.mark.parametrize("name", ["rope_scaled_full_layers", "tape_local_theta"])
def test_layers_with_a_window_keep_their_own_frequencies(name):
    model = small_model(**WINDOWS[name])
    kind = model.position.rope_scaling_type
    scaled = RopeScaling(kind, 2.0).scaled(model, "somewhere")
    for key in ("rope_scaling_layers", "rope_local_theta", "rope_original_seq_length"):
        if kind == "yarn" or key != "rope_original_seq_length":
            assert getattr(scaled.position, key) == getattr(model.position, key)
    assert scaled.position.rope_scaling_factor == 2 * model.position.rope_scaling_factor
    assert (scaled.sliding_window, scaled.seq_length) == (model.sliding_window, 32)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
@pytest.mark.parametrize("name", ["rope_window", "swan", "tape_swan"])
def test_a_model_in_which_no_distance_becomes_longer_is_refused(name, kind):
    """Otherwise its scaling would get another type, but keep its factor."""
    model = small_model(**WINDOWS[name] | YARN)
    message = f"contexts of 32 tokens, .* at most {model.sliding_window} tokens; omit"
    with pytest.raises(ConfigError, match=message) as error:
        RopeScaling(kind, 2.0).scaled(model, "somewhere")
    assert error.value.key == "--rope-scaling"


@pytest.mark.parametrize(
    "kind",
    [
        *(kind for kind in FAMILY if not kind.startswith("phi3")),
        "mistral_long",
        "qwen3_window",
        "smollm3_rope",
    ],
)
def test_config_json_of_a_family_gets_the_settings_of_an_extension(tmp_path, kind):
    own = {"llama3_tied": "llama3", "llama3_2": "llama3", "llama_yarn": "yarn"}
    own |= {"llama_linear": "linear", "llama_share": "linear"}
    scaling = RopeScaling(own.get(kind, "yarn"), 4.0)
    before, after = scaled_source(tmp_path, kind, scaling)
    config = tmp_path / "source" / "config.json"
    model = model_settings(before, config)
    assert model_settings(after, config) == scaling.scaled(model, tmp_path)
    assert after["max_position_embeddings"] == 256
    rope = {"rope_parameters", "rope_scaling", "rope_theta", "max_position_embeddings"}
    assert {key for key in before | after if before.get(key) != after.get(key)} <= rope
    weights = tmp_path / "scaled" / "model.safetensors"
    assert weights.read_bytes() == (tmp_path / "source" / "model.safetensors").read_bytes()


def test_older_settings_of_a_config_json_do_not_stay(tmp_path):
    write_source(tmp_path / "source", "llama_yarn")
    file = tmp_path / "source" / "config.json"
    settings = read_settings(file)
    rope = {key: value for key, value in settings.pop("rope_parameters").items()}
    length = rope.pop("original_max_position_embeddings")
    theta = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    older = {"rope_scaling": rope, "rope_theta": theta, "original_max_position_embeddings": length}
    file.write_text(json.dumps(settings | older))
    link_scaled(RopeScaling("yarn", 2.0), tmp_path / "source", tmp_path / "scaled")
    after = read_settings(tmp_path / "scaled" / "config.json")
    assert "original_max_position_embeddings" not in after
    for key in ("rope_parameters", "rope_scaling"):
        assert after[key]["factor"] == 8.0
        assert after[key]["original_max_position_embeddings"] == length
    assert after["rope_theta"] == theta


@pytest.mark.parametrize(
    "encoding",
    [encoding.name for encoding in BUILT_IN if encoding.name not in ("tape", "rope", "repo")],
)
def test_encodings_without_scaling_are_refused(encoding):
    model = small_model(position_encoding=encoding)
    with pytest.raises(
        ConfigError, match=f"encoding {encoding} has no .* omit .* tape, rope, repo"
    ):
        RopeScaling("yarn", 4.0).scaled(model, "somewhere")


@pytest.mark.parametrize(
    "name, kind, message",
    [
        ("llama3", "yarn", "the scaling llama3, .*; give --rope-scaling llama3"),
        ("linear", "llama3", "give --rope-scaling linear"),
        ("yarn_attention", "yarn", "its attention factor 1.2 is not yarn's default"),
    ],
)
def test_a_scaling_that_does_not_fit_that_of_the_model_is_refused(name, kind, message):
    base = base_of(name)
    with pytest.raises(ConfigError, match=message) as error:
        RopeScaling(kind, 4.0).scaled(base.model, base.path)
    assert error.value.key == "--rope-scaling"
    assert "somewhere" in str(error.value)


@pytest.mark.parametrize(
    "kind, scaling, message",
    [
        ("phi3", "yarn", "from-hf --position-encoding rope"),
        ("llama_share", "yarn", "has the scaling linear"),
        ("llama3_tied", "yarn", "give --rope-scaling llama3"),
    ],
)
def test_a_config_json_that_transformers_cannot_scale_is_refused(tmp_path, kind, scaling, message):
    with pytest.raises(ConfigError, match=message):
        scaled_source(tmp_path, kind, RopeScaling(scaling, 4.0))
    assert not (tmp_path / "scaled").exists()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2' .* cannot be imported.*; omit"),
        ({"hidden_size": "wide"}, "config.json .*; omit"),
        ({"rope_parameters": LLAMA3 | {"rope_type": "dynamic"}}, "'dynamic' .*; omit"),
        (
            {"rope_parameters": PARTIAL | {"rope_type": "proportional", "factor": 1.0}},
            "only a share .*; give --rope-scaling linear",
        ),
    ],
)
def test_a_config_json_that_is_not_understood_is_refused(tmp_path, changes, message):
    write_source(tmp_path / "source", "llama1")
    settings = read_settings(tmp_path / "source" / "config.json") | changes
    with pytest.raises(ConfigError, match=message) as error:
        RopeScaling("yarn", 4.0).scaled_transformers_model(settings, tmp_path / "source")
    assert error.value.key == "--rope-scaling"


@pytest.mark.parametrize(
    "kind, factor, key",
    [
        ("yarn", None, "--rope-scaling-factor"),
        (None, 4.0, "--rope-scaling"),
        ("yarn", 1.0, "--rope-scaling-factor"),
        ("yarn", 0.5, "--rope-scaling-factor"),
        ("yarn", math.nan, "--rope-scaling-factor"),
        ("yarn", math.inf, "--rope-scaling-factor"),
    ],
)
def test_incomplete_options_are_refused(kind, factor, key):
    with pytest.raises(ConfigError) as error:
        read_options(kind, factor)
    assert error.value.key == key
    assert error.value.fix


def test_the_options_offer_all_scalings_and_name_them():
    parser = command_line.Parser()
    command_line.add_rope_scaling(parser.add_argument)
    (option,) = [action for action in parser._actions if action.dest == "rope_scaling"]
    assert option.choices == get_args(get_type_hints(ScaledSettings)["rope_scaling_type"])
    assert read_options(None, None) is None
    names = [read_options("yarn", factor).name for factor in (4.0, 2.5, 1.0000001)]
    assert names == ["yarn-x4", "yarn-x2.5", "yarn-x1.0000001"]


def test_a_factor_beyond_the_bounds_of_the_setting_is_refused():
    model = small_model(position_encoding="rope", rope_scaling_factor=1e8)
    with pytest.raises(ConfigError, match="--rope-scaling cannot be applied to somewhere: model"):
        RopeScaling("linear", 1e6).scaled(model, "somewhere")
