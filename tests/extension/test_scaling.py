"""How an extension changes the context length and the scaling of a model's positions."""

from dataclasses import fields
from pathlib import Path

import pytest
import torch
from configurations import make, model_config, with_values
from conversions import change_config
from datasets_for_tests import write_all
from extension_cases import TOKENS, arguments, first_logits, pretrained, write_llama
from transformers import AutoModelForCausalLM

from megatron_tape.checkpoint.directories import list_checkpoints, read_state
from megatron_tape.checks.arguments import parse_run_config
from megatron_tape.config.schema import ModelConfig
from megatron_tape.config.sections import as_dict, build
from megatron_tape.errors import ConfigError
from megatron_tape.extension.base_checks import check_base
from megatron_tape.extension.base_model import Base, with_base_settings
from megatron_tape.model.validation import validate_model
from pretrain import extend_context

TESTS = Path(__file__).parents[1]
BY_FACTOR = TESTS / "recipes" / "extend_by_factor.yaml"
LLAMA3 = {
    "rope_scaling_type": "llama3",
    "rope_scaling_factor": 8.0,
    "rope_original_seq_length": 8192,
    "rope_low_freq_factor": 1.5,
    "rope_theta": 5e5,
}
YARN = {
    "rope_scaling_type": "yarn",
    "rope_scaling_factor": 4.0,
    "rope_original_seq_length": 32768,
    "rope_beta_fast": 16.0,
    "rope_truncate": False,
}
MODELS = {
    "none": {},
    "linear": {"rope_scaling_factor": 2.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn_attention": YARN | {"rope_attention_factor": 1.2},
    "theta": {"rope_theta": 1e6},
    "share": {"rope_share": 0.5, "rope_scaling_factor": 4.0},
}
ROTARY = {
    "default": {},
    "linear": {"factor": 2.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 4.0},
}
"""`rope_parameters` of small models, in addition to theta and the original length."""


def rotary(kind, factor=1):
    """Return ROTARY[kind] with its scaling factor multiplied by `factor`; without scaling, it
    becomes linear.
    """
    rope = {"rope_type": kind, "rope_theta": 20.0} | ROTARY[kind]
    if kind in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = 8
    if kind == "default" and factor != 1:
        rope |= {"rope_type": "linear", "factor": 1.0}
    if "factor" in rope:
        rope["factor"] *= factor
    return rope


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_all(tmp_path_factory.mktemp("data"))


def base_of(name, encoding="rope", **changes):
    """Return a model to extend with contexts of 131,072 tokens and the positions MODELS[name]."""
    model = model_config(
        position_encoding=encoding,
        num_layers=4,
        hidden_size=64,
        ffn_hidden_size=96,
        num_attention_heads=8,
        vocab_size=128,
        seq_length=131072,
        **MODELS[name] | changes,
    )
    return Base(Path("somewhere"), model, None)


def extended_model(base, position=None, **extension):
    """Return the model of a run that extends `base`, checked as when a run starts.

    `position` are the given settings of `model.position`. `extension` also has those of `model`.
    """
    model = {"position": position or {}}
    for key in {field.name for field in fields(ModelConfig)}:
        if key in extension:
            model[key] = extension.pop(key)
    values = {"model": model, "extension": {"from": "somewhere", **extension}}
    found = with_base_settings(values, base)
    assert found["extension"].get("context_factor") is None
    result = build(ModelConfig, found["model"], "model")
    allowed = {
        f"extension__{key}": extension.get(key, False)
        for key in ("allow_shorter_context", "allow_other_scaling")
    }
    check_base(make(result, data__tokenizer=None, **allowed), base)
    return result


@pytest.mark.parametrize("encoding", ["rope", "tape"])
@pytest.mark.parametrize("name", ["linear", "llama3", "yarn", "theta", "share"])
def test_a_context_factor_multiplies_the_factor_of_the_models_own_scaling(name, encoding):
    base = base_of(name)
    factor = MODELS[name].get("rope_scaling_factor", 1.0)
    longer = extended_model(base, context_factor=2, position_encoding=encoding)
    expected = with_values(base.model, rope_scaling_factor=2 * factor)
    assert longer.seq_length == 262144
    settings = as_dict(longer)["position"]
    assert {key: settings[key] for key in as_dict(expected)["position"]} == as_dict(expected)[
        "position"
    ]


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_a_context_factor_scales_a_model_without_scaling_from_its_own_length(kind):
    position = extended_model(
        base_of("none"), {"rope_scaling_type": kind}, context_factor=1.5
    ).position
    assert (position.rope_scaling_type, position.rope_scaling_factor) == (kind, 1.5)
    assert kind == "linear" or position.rope_original_seq_length == 131072
    assert (
        extended_model(base_of("none"), context_factor=1.5).position.rope_scaling_type == "linear"
    )


def test_a_context_factor_lengthens_a_model_without_rotation_alone():
    model = extended_model(base_of("none", "nope"), context_factor=4)
    assert model == with_values(base_of("none", "nope").model, seq_length=4 * 131072)
    dropped = extended_model(base_of("llama3"), context_factor=1, position_encoding="nope")
    assert (dropped.position_encoding, dropped.seq_length) == ("nope", 131072)


PAPER = {"rope_scaling_type": "linear", "rope_scaling_factor": 2.0}
TO_YARN = {"rope_scaling_type": "yarn", "rope_scaling_factor": 16.0}


@pytest.mark.parametrize(
    "name, position, key",
    [
        ("llama3", PAPER, "rope_scaling_type"),
        ("llama3", TO_YARN, "rope_scaling_type"),
        ("llama3", {"rope_scaling_factor": 1.0}, "rope_scaling_factor"),
        ("llama3", {"rope_original_seq_length": 4096}, "rope_original_seq_length"),
        ("llama3", {"rope_high_freq_factor": 8.0}, "rope_high_freq_factor"),
        ("llama3", {"rope_theta": 1e4}, "rope_theta"),
        ("yarn", PAPER, "rope_scaling_type"),
        ("yarn", {"rope_beta_fast": 32.0}, "rope_beta_fast"),
        ("yarn", {"rope_truncate": True}, "rope_truncate"),
        ("linear", TO_YARN, "rope_scaling_type"),
        ("linear", {"rope_scaling_factor": 1.5}, "rope_scaling_factor"),
        ("share", {"rope_share": 1.0}, "rope_share"),
    ],
)
def test_another_scaling_must_be_allowed_by_name(name, position, key):
    base = base_of(name)
    with pytest.raises(ConfigError) as error:
        extended_model(base, position, seq_length=262144)
    assert error.value.key == f"model.position.{key}"
    assert "extension.allow_other_scaling: true" in error.value.fix
    model = extended_model(base, position, seq_length=262144, allow_other_scaling=True)
    assert as_dict(model)["position"].items() >= position.items()


def test_a_replaced_linear_scaling_leaves_the_length_before_it_as_the_original_length():
    given = {"rope_scaling_type": "yarn", "rope_scaling_factor": 4.0}
    model = extended_model(base_of("linear"), given, seq_length=262144, allow_other_scaling=True)
    assert model.position.rope_original_seq_length == 65536


@pytest.mark.parametrize(
    "name, position",
    [
        ("none", PAPER),
        ("none", {"rope_theta": 1e6}),
        ("none", {"rope_scaling_type": "llama3", "rope_scaling_factor": 2.0}),
        ("linear", {"rope_scaling_factor": 4.0}),
        ("llama3", {"rope_theta": 8e6}),
        ("llama3", {"rope_scaling_factor": 16.0}),
        ("yarn", {"rope_scaling_factor": 8.0, "rope_attention_factor": 1.1}),
    ],
)
def test_a_larger_factor_and_a_larger_theta_replace_nothing(name, position, capsys):
    model = extended_model(base_of(name), position, seq_length=262144)
    assert as_dict(model)["position"].items() >= position.items()
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["none", "linear", "llama3", "yarn"])
def test_a_longer_context_with_the_same_positions_is_warned_about(name, capsys):
    factor = MODELS[name].get("rope_scaling_factor", 1.0)
    extended_model(base_of(name), seq_length=262144)
    assert f"tokens; set it to {2 * factor:g} unless this is intended" in capsys.readouterr().err


def test_a_type_of_scaling_without_a_factor_is_refused():
    with pytest.raises(ConfigError) as error:
        extended_model(base_of("none"), {"rope_scaling_type": "yarn"}, seq_length=262144)
    assert error.value.key == "model.position.rope_scaling_factor"


def test_a_shorter_context_must_be_allowed_by_name():
    base = base_of("none", "alibi")
    with pytest.raises(ConfigError) as error:
        extended_model(base, seq_length=8192)
    assert error.value.key == "model.seq_length"
    assert "extension.allow_shorter_context: true" in error.value.fix
    shorter = extended_model(base, seq_length=8192, allow_shorter_context=True)
    assert shorter == with_values(base.model, seq_length=8192)


@pytest.mark.parametrize(
    "name, position, extension, key",
    [
        ("none", {}, {"seq_length": 9}, "model.seq_length"),
        ("none", {"rope_scaling_factor": 2.0}, {}, "model.position.rope_scaling_factor"),
        ("none", {}, {"context_factor": 0.5}, "extension.context_factor"),
        ("llama3", {"rope_scaling_type": "yarn"}, {}, "model.position.rope_scaling_type"),
        ("yarn_attention", {}, {}, "model.position.rope_attention_factor"),
    ],
)
def test_a_context_factor_that_is_not_clear_is_refused(name, position, extension, key):
    with pytest.raises(ConfigError) as error:
        extended_model(base_of(name), position, **{"context_factor": 2} | extension)
    assert error.value.key == key
    assert error.value.problem


def test_a_context_factor_without_a_model_to_extend_is_refused():
    with pytest.raises(ConfigError, match="^extension.context_factor"):
        parse_run_config(["--config=tape_demo", "--extension.context_factor=2"])


def test_a_yarn_model_with_its_own_attention_factor_can_be_given_another():
    position = extended_model(
        base_of("yarn_attention"), {"rope_attention_factor": 1.3}, context_factor=2
    ).position
    assert (position.rope_scaling_factor, position.rope_attention_factor) == (8.0, 1.3)


def theirs(folder):
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype="float32")(TOKENS).logits


@pytest.mark.parametrize("encoding", ["rope", "tape"])
@pytest.mark.parametrize("kind", ROTARY)
def test_at_step_0_logits_equal_transformers_with_the_multiplied_factor(
    data, tmp_path, kind, encoding
):
    source = write_llama(tmp_path / "source", data, rope_parameters=rotary(kind))
    given = [f"--model.position_encoding={encoding}", "--extension.trains=[all]"]
    for factor in (1, 2):
        change_config(source, {"rope_parameters": rotary(kind, factor)})
        expected = theirs(source)
        change_config(source, {"rope_parameters": rotary(kind)})
        chosen = [*given, f"--extension.context_factor={factor}"]
        logits = first_logits(data, source, tmp_path / str(factor), *chosen, recipe=BY_FACTOR)
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


def test_a_run_with_llama3_scaling_is_extended_and_continued_with_its_scaling(data, tmp_path):
    scaling = [
        "--model.position.rope_scaling_type=llama3",
        "--model.position.rope_scaling_factor=8",
        "--model.position.rope_original_seq_length=8",
        "--model.position.rope_theta=20",
    ]
    base = pretrained(tmp_path, data, "base", "rope", *scaling)
    chosen = arguments(
        tmp_path, data, base, "run", "--extension.trains=[position,lora]", recipe=BY_FACTOR
    )
    # The same command, and the settings that the run has written, must not multiply the factor
    # again.
    for command in (
        chosen,
        [*chosen, "--train.steps=2"],
        ["--config", f"{tmp_path}/run/config.yaml", "--train.steps=3"],
    ):
        position = parse_run_config(command).model.position
        assert (position.rope_scaling_type, position.rope_scaling_factor) == ("llama3", 16.0)
        assert (position.rope_original_seq_length, position.rope_theta) == (8, 20.0)
        assert extend_context.main(command) == 0
    (_, newest), *_ = list_checkpoints(tmp_path / "run" / "checkpoints")
    saved = read_state(newest)["config"]["model"]
    assert (saved["seq_length"], saved["position"]["rope_scaling_factor"]) == (32, 16.0)


WINDOW = {"sliding_window": 4096, "full_attention_every": 2}
SWAN = WINDOW | {"layers_without_positions": 2}
GEMMA = WINDOW | {"rope_local_theta": 1e3}
HOT = SWAN | {"temperature_scale": 0.1, "temperature_floor_scale": 512}
YARN_IN_FULL_LAYERS = {"rope_scaling_type": "yarn", "rope_scaling_layers": "full"}


def test_windows_and_layers_are_inherited_from_the_model_to_extend(capsys):
    base = base_of("none", **HOT, rope_local_theta=1e4)
    extended = extended_model(base, seq_length=262144)
    assert extended == with_values(base.model, seq_length=262144)
    assert "outputs" not in capsys.readouterr().err


@pytest.mark.parametrize("encoding", ["rope", "tape"])
def test_windows_with_scaling_in_the_other_layers_can_be_added(encoding, capsys):
    base = base_of("none", encoding)
    model = extended_model(base, YARN_IN_FULL_LAYERS, context_factor=2, **WINDOW)
    assert (model.sliding_window, model.full_attention_every) == (4096, 2)
    position = model.position
    assert (position.rope_scaling_factor, position.rope_scaling_layers) == (2.0, "full")
    log = capsys.readouterr().err
    assert "model.sliding_window: was null, is now 4096; " in log
    assert "; model.position.rope_scaling_layers: was 'all', is now 'full': outputs change" in log
    assert "more than" not in log  # YaRN's frequencies change all outputs
    assert "warning" not in log


@pytest.mark.parametrize(
    "old, new, effect",
    [
        (WINDOW, {"sliding_window": 512}, "outputs change for texts of more than 512 tokens"),
        (WINDOW, {"sliding_window": None}, "outputs change for texts of more than 4,096 tokens"),
        ({}, {"sliding_window": 8000}, "outputs change for texts of more than 8,000 tokens"),
        (WINDOW, {"full_attention_every": None}, "for texts of more than 4,096 tokens"),
        ({}, {"layers_without_positions": 2}, "model.layers_without_positions: was null, is now 2"),
        ({}, {"layers_without_positions": 2}, "is now 2: outputs change\n"),
        (SWAN, {"temperature_scale": 0.1}, "outputs change for texts of more than 8,191 tokens"),
        (HOT, {"temperature_floor_scale": 99}, "outputs change for texts of more than 98 tokens"),
        (HOT, {"temperature_scale": 0.0}, "outputs change for texts of more than 511 tokens"),
        ({}, {"sliding_window": 200_000}, "outputs change for texts of more than 200,000 tokens"),
        (GEMMA, {"sliding_window": 512}, "outputs change for texts of more than 512 tokens"),
        # Layer 2 gets the window, and with it the window's frequencies.
        (GEMMA, {"full_attention_every": 4}, "is now 4: outputs change\n"),
        (GEMMA | SWAN, {"full_attention_every": 4}, "change for texts of more than 4,096 tokens"),
    ],
)
def test_the_log_says_whether_changed_layers_change_the_outputs(old, new, effect, capsys):
    model = extended_model(base_of("none", **old), seq_length=131072, **new)
    assert as_dict(model).items() >= new.items()
    assert effect in capsys.readouterr().err


@pytest.mark.parametrize("layers", [SWAN, {"sliding_window": 4096}])
def test_a_longer_context_leaves_the_scaling_if_no_distance_becomes_longer(layers, capsys):
    base = base_of("none", **layers)
    model = extended_model(base, context_factor=4)
    assert model == with_values(base.model, seq_length=4 * 131072)
    assert "warning" not in capsys.readouterr().err
    longer_window = extended_model(base, context_factor=4, sliding_window=8192)
    assert longer_window.position.rope_scaling_factor == 4.0


@pytest.mark.parametrize(
    "name, layers, position, key",
    [
        ("yarn", WINDOW, {"rope_scaling_layers": "full"}, "rope_scaling_layers"),
        ("theta", WINDOW, {"rope_local_theta": 1e4}, "rope_local_theta"),
        ("none", {}, {"rope_local_theta": 1e6}, "rope_local_theta"),
        ("none", {}, {"rope_scaling_layers": "full"}, "rope_scaling_layers"),
    ],
)
def test_other_frequencies_in_layers_with_a_window_must_be_allowed(name, layers, position, key):
    """The last two name no window at all."""
    with pytest.raises(ConfigError) as error:
        model = extended_model(base_of(name, **layers), position, seq_length=131072)
        validate_model(model)
    assert error.value.key == f"model.position.{key}"


def test_positions_can_be_dropped_from_a_model_with_windows(capsys):
    base = base_of("none", **HOT)
    dropped = extended_model(base, position_encoding="nope", temperature_scale=0.0)
    assert (dropped.sliding_window, dropped.full_attention_every) == (4096, 2)
    assert dropped.layers_without_positions is None
    validate_model(dropped)
    assert "outputs change\n" in capsys.readouterr().err
    kept = extended_model(base, position_encoding="nope")
    with pytest.raises(ConfigError, match="set model.temperature_scale to 0"):
        validate_model(kept)


def test_at_step_0_added_windows_change_only_logits_of_later_tokens(data, tmp_path):
    source = write_llama(tmp_path / "source", data)
    chosen = ["--extension.trains=[all]", "--model.seq_length=32"]
    expected = first_logits(data, source, tmp_path / "a", *chosen)
    window = ["--model.sliding_window=9", "--model.full_attention_every=3"]
    logits = first_logits(data, source, tmp_path / "b", *chosen, *window)
    torch.testing.assert_close(logits[:, :9], expected[:, :9], atol=1e-5, rtol=0)
    assert (logits[:, 9:] - expected[:, 9:]).abs().amax(-1).min() > 1e-4
