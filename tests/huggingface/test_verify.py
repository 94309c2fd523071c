"""Verification finds planted faults of an engine and names them."""

import json
import re
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from environments import ROOT
from exported_models import OWN_CLASSES, PLAIN_ROPE, changed_weights, make
from models import LLAMA3, WINDOWS, YARN

from megatron_tape.errors import CheckpointError, ConfigError
from megatron_tape.huggingface.export.saved_weights import open_weights
from megatron_tape.huggingface.pretrained import cache_keyword
from megatron_tape.huggingface.verification import transformers_engine
from megatron_tape.huggingface.verification.plain_model import PlainModel
from megatron_tape.huggingface.verification.rounding import PRECISIONS, Precision
from megatron_tape.huggingface.verification.sequences import Sequence
from megatron_tape.huggingface.verification.trained import described_by, trained_by
from megatron_tape.huggingface.verification.transformers_checks import check_transformers
from megatron_tape.huggingface.verification.verify import Verification

sys.path.insert(0, str(ROOT / "tools"))

FP32 = Precision(torch.float32, torch.float32)
SWAN = {
    "num_layers": 8,
    "layers_without_positions": 4,
    "sliding_window": 5,
    "full_attention_every": 4,
}
LINEAR = {"rope_scaling_factor": 4.0}
FULL = {"rope_scaling_layers": "full", "sliding_window": 5, "full_attention_every": 3}


def checked(made, precisions=("fp32",), **options):
    """Return the report on an export, against its checkpoint."""
    verification = Verification(trained_by(open_weights(made.checkpoint)))
    for name in precisions:
        dtype = PRECISIONS[name]
        check_transformers(
            verification,
            made.directory,
            Precision(dtype, dtype),
            trust_remote_code=True,
            **options,
        )
    return verification.report()


def change_config(made, keep_record=False, **changes):
    """Change keys of an export's config.json; None removes a key, and a function changes its
    value. Without `keep_record`, also delete positions.json.
    """
    path = made.directory / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        if value is None:
            del config[key]
        elif callable(value):
            config[key] = value(config[key])
        else:
            config[key] = value
    path.write_text(json.dumps(config))
    if not keep_record:
        # Only logits and phases show the change then.
        (made.directory / "positions.json").unlink(missing_ok=True)


def plant(monkeypatch, change):
    """Change each model after transformers has loaded it."""
    load = transformers_engine.load_pretrained

    def load_and_change(*arguments):
        model = load(*arguments)
        change(model)
        return model

    monkeypatch.setattr(transformers_engine, "load_pretrained", load_and_change)


FAULTS_OF_CONFIG = {
    "base": (
        PLAIN_ROPE,
        {"rope_theta": 500.0},
        {"rope_theta": None, "rope_parameters": None},
        "the base of its frequencies is 10,000 instead of 500",
    ),
    "linear_ignored": (
        PLAIN_ROPE,
        LINEAR,
        {
            "rope_scaling": None,
            "rope_parameters": lambda rope: {"rope_type": "default", "rope_theta": 10000.0},
        },
        "it ignores the scaling of positions (linear, factor 4)",
    ),
    "llama3_ignored": (
        PLAIN_ROPE,
        LLAMA3,
        {
            "rope_scaling": None,
            "rope_parameters": lambda rope: {"rope_type": "default", "rope_theta": 10000.0},
        },
        "it ignores the scaling of positions (llama3, factor 8)",
    ),
    "yarn_twice": (
        PLAIN_ROPE,
        YARN,
        {"rope_scaling": None, "rope_parameters": lambda rope: rope | {"factor": 16.0}},
        "it applies the scaling of positions (yarn, factor 4) twice",
    ),
    "linear_twice": (
        PLAIN_ROPE,
        LINEAR,
        {"rope_scaling": None, "rope_parameters": lambda rope: rope | {"factor": 16.0}},
        "it applies the scaling of positions (linear, factor 4) twice",
    ),
    "original_length": (
        PLAIN_ROPE,
        YARN | {"seq_length": 64},
        {
            "rope_scaling": None,
            "rope_parameters": lambda rope: rope | {"original_max_position_embeddings": 64},
        },
        "it scales as if the context before the extension had 64 tokens instead of 16",
    ),
    "attention_factor": (
        PLAIN_ROPE,
        YARN,
        {"rope_scaling": None, "rope_parameters": lambda rope: rope | {"attention_factor": 1.0}},
        "it does not multiply queries and keys by yarn's attention factor",
    ),
    "scaled_windows": (
        "rope",
        YARN | FULL,
        {"position_settings": lambda settings: settings | {"rope_scaling_layers": "all"}},
        "it scales positions (yarn, factor 4) in layers with a window, too",
    ),
    "unscaled_windows": (
        "rope",
        YARN | FULL | {"rope_scaling_layers": "all"},
        {"position_settings": lambda settings: settings | {"rope_scaling_layers": "full"}},
        "it does not scale positions (yarn, factor 4) in layers with a window",
    ),
    "layers_without_positions": (
        PLAIN_ROPE,
        SWAN,
        {"no_rope_layers": lambda layers: layers[1:] + layers[:1]},
        "the pattern of layers without positions is shifted by one layer to the front",
    ),
    "layers_with_a_window": (
        PLAIN_ROPE,
        SWAN,
        {"layer_types": lambda types: types[-1:] + types[:-1]},
        "the pattern of layers with a window is shifted by one layer to the back",
    ),
    "both_patterns": (
        PLAIN_ROPE,
        SWAN,
        {
            "layer_types": lambda types: types[-1:] + types[:-1],
            "no_rope_layers": lambda layers: layers[-1:] + layers[:-1],
        },
        "the patterns of layers with a window and of layers without positions are shifted by one"
        " layer to the back",
    ),
    "positions_everywhere": (
        PLAIN_ROPE,
        SWAN,
        {"no_rope_layers": lambda layers: [1] * 8},
        "it rotates in layers without positions, too",
    ),
    "no_window": (
        PLAIN_ROPE,
        SWAN,
        {"use_sliding_window": False, "layer_types": lambda types: ["full_attention"] * 8},
        "no layer has the window",
    ),
    "window_size": (
        PLAIN_ROPE,
        {"sliding_window": 5},
        {"sliding_window": 6},
        "its windows have 6 tokens instead of 5: it does not count the token itself",
    ),
    "local_base": (
        "rope",
        FULL | {"rope_scaling_layers": "all", "rope_local_theta": 3.0},
        {"position_settings": lambda settings: settings | {"rope_local_theta": None}},
        "layers with a window have the base of the frequencies of the other layers",
    ),
    "temperature": (
        "rope",
        {
            "num_layers": 4,
            "layers_without_positions": 2,
            "temperature_scale": 0.5,
            "temperature_floor_scale": 3,
        },
        {"temperature_scale": 0.0},
        "it ignores the temperature",
    ),
    "share": (
        "tape",
        {"rope_share": 0.5},
        {"position_settings": lambda settings: settings | {"rope_share": 1.0}},
        "it rotates all frequencies instead of a share of them",
    ),
    "gate": (
        OWN_CLASSES,
        {},
        {"gate_input": "attention"},
        "the gate of the position MLP reads the output of attention instead of mlp",
    ),
    "tape_base": (
        OWN_CLASSES,
        {"rope_theta": 500.0},
        {"rope_parameters": lambda rope: rope | {"rope_theta": 10000.0}},
        "the base of its frequencies is 10,000 instead of 500",
    ),
    "tape_scaling": (
        OWN_CLASSES,
        YARN,
        {"rope_parameters": lambda rope: {"rope_type": "default", "rope_theta": 10.0}},
        "it ignores the scaling of positions (yarn, factor 4)",
    ),
    "other_settings": (
        PLAIN_ROPE,
        {},
        {"rope_theta": 500.0, "rope_parameters": lambda rope: rope | {"rope_theta": 500.0}},
        "its config.json has other settings: model.position.rope_theta is 500.0, in the training"
        " 10000.0",
    ),
    "fire": (
        "fire",
        {"fire_threshold": 3.0},
        {"position_settings": lambda settings: settings | {"fire_threshold": 512.0}},
        "the encoding has its default settings: it did not find fire_threshold",
    ),
}


@pytest.mark.parametrize("name", FAULTS_OF_CONFIG)
def test_a_fault_in_config_json_is_found_and_named(name, tmp_path):
    kind, settings, changes, sentence = FAULTS_OF_CONFIG[name]
    made = make(tmp_path, kind, label=f"fault_{name}", **settings)
    assert checked(made).is_equal
    change_config(made, **changes)
    report = checked(made)
    assert not report.is_equal
    assert report.cause.startswith(sentence), report.text()


def scale_again(model):
    rotary = model.model.rotary_emb
    unscaled = 10.0 ** (-torch.arange(0, 8, 2) / 8)
    rotary.inv_freq = rotary.inv_freq**2 / unscaled


def round_frequencies(model):
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.bfloat16().float()


def round_angles(model):
    rotary = model.model.rotary_emb

    def forward(x, position_ids):
        angles = position_ids[..., None].bfloat16() * rotary.inv_freq.bfloat16()
        angles = torch.cat([angles, angles], dim=-1).float()
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    rotary.forward = forward


def round_angles_and_phases(model):
    round_angles(model)
    forward = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda x, position_ids: tuple(
        phases.bfloat16().to(x.dtype) for phases in forward(x, position_ids)
    )


def round_phases(model):
    model.model.rotary_emb.register_forward_hook(
        lambda module, inputs, output: tuple(x.bfloat16().to(x.dtype) for x in output)
    )


def round_state(model):
    for layer in model.model.layers[:-1]:
        layer.position.register_forward_hook(
            lambda module, inputs, state: state.bfloat16().to(state.dtype)
        )


def transpose_mixing(model):
    for layer in model.model.layers[:-1]:
        weight = layer.position.token_mixing.weight
        weight.data = weight.data.T.contiguous()


def skip_updates(model):
    for layer in model.model.layers[:-1]:
        layer.position.register_forward_hook(lambda module, inputs, state: inputs[0])


FAULTS_OF_ENGINES = {
    "twice": (PLAIN_ROPE, YARN, scale_again, "it applies the scaling of positions (yarn"),
    "frequencies": (PLAIN_ROPE, {}, round_frequencies, "its frequencies are rounded to bf16"),
    "angles": (PLAIN_ROPE, {}, round_angles, "it computes angles, positions times frequencies"),
    "angles_and_phases": (
        PLAIN_ROPE,
        {},
        round_angles_and_phases,
        "it computes angles, positions times frequencies",
    ),
    "phases": (PLAIN_ROPE, {}, round_phases, "its phases are rounded to bf16"),
    "state": (OWN_CLASSES, {}, round_state, "its position state is in bf16"),
    "mixing": (
        OWN_CLASSES,
        {"num_query_groups": 4},
        transpose_mixing,
        "token_mixing is transposed",
    ),
    "updates": (OWN_CLASSES, {}, skip_updates, "it does not update the position state"),
}


@pytest.mark.parametrize("name", FAULTS_OF_ENGINES)
def test_a_fault_of_an_engine_is_found_and_named(name, tmp_path, monkeypatch):
    kind, settings, fault, sentence = FAULTS_OF_ENGINES[name]
    made = make(tmp_path, kind, label=f"engine_{name}", seq_length=512, **settings)
    plant(monkeypatch, fault)
    report = checked(made)
    assert not report.is_equal
    assert report.cause.startswith(sentence), report.text()


def test_the_report_names_the_first_layer_and_position(tmp_path, monkeypatch):
    made = make(tmp_path, OWN_CLASSES, label="first_layer")

    def fault(model):
        model.model.layers[1].position.register_forward_hook(
            lambda module, inputs, state: state * 1.5
        )

    plant(monkeypatch, fault)
    report = checked(made, layers_up_to=64)
    # The state after layer 1 is read by layer 2. The token at position 0 attends only to itself.
    assert report.difference == (
        "one pass, fp32: first at position 8; layer 2 is the first that differs, at 8."
    )
    assert report.cause == "none of the known faults computes these logits."
    layers = next(check for check in report.checks if check.name == "every token, fp32")
    assert not layers.is_equal  # the state itself differs
    assert "DIFFERENT" in report.text()


def test_differences_at_position_0_are_not_those_of_positions(tmp_path, monkeypatch):
    made = make(tmp_path, PLAIN_ROPE, label="weights")
    changed = tmp_path / "changed"
    shutil.copytree(made.directory, changed)
    with changed_weights(changed) as weights:
        weights["model.layers.1.mlp.up_proj.weight"] *= 1.01
    report = checked(replace(made, directory=changed))
    assert report.cause == (
        "the weights differ from those of the training, first in model.layers.1.mlp.up_proj.weight."
    )

    other_norm = tmp_path / "other_norm"
    shutil.copytree(made.directory, other_norm)
    change_config(replace(made, directory=other_norm), rms_norm_eps=0.1)
    report = checked(replace(made, directory=other_norm))
    assert report.cause.startswith("its config.json has other settings: model.norm_epsilon is 0.1")

    plant(monkeypatch, lambda model: model.model.norm.weight.data.mul_(1.1))
    assert checked(made).cause.startswith("not the positions, since the token at position 0")


def test_positions_json_is_compared_with_the_reference(tmp_path):
    made = make(tmp_path, OWN_CLASSES, label="recorded")
    change_config(made, keep_record=True, rope_parameters=lambda rope: rope | {"rope_theta": 500.0})

    def problems():
        verification = Verification(described_by(made.directory))
        check_transformers(verification, made.directory, FP32, trust_remote_code=True)
        report = verification.report()
        assert report.is_equal == (not report.problems)
        return report.problems

    (problem,) = problems()
    assert "has rope_parameters.rope_theta 500.0, but was exported with 10000.0" in problem
    # A record that was changed as well still has the phases of the training.
    path = made.directory / "positions.json"
    text = path.read_text()
    path.write_text(text.replace('"rope_theta": 10000.0', '"rope_theta": 500.0'))
    (problem,) = problems()
    assert "has other phases than the model that it is compared with" in problem
    path.unlink()
    assert problems() == []


def test_another_model_is_refused(tmp_path):
    made = make(tmp_path, OWN_CLASSES, label="first")
    other = make(tmp_path, OWN_CLASSES, label="second", num_layers=4)
    with pytest.raises(ValueError, match="it has num_layers 4 instead of 3"):
        checked(replace(made, directory=other.directory))


def test_a_state_in_bf16_is_no_rounding_if_the_training_has_fp32(tmp_path):
    made = make(tmp_path, OWN_CLASSES, label="state_precision")
    change_config(made, position_state_precision="bf16")
    assert checked(made, ("fp32",)).is_equal
    report = checked(made, ("bf16",))
    assert report.problems == ["The position state is in bf16, in the training in fp32."]


def test_the_allowed_error_is_that_of_many_tokens(tmp_path):
    """A few tokens may have much smaller errors than others."""
    made = make(tmp_path, PLAIN_ROPE, label="many", seq_length=64)
    verification = Verification(trained_by(open_weights(made.checkpoint)))
    sequence = verification.whole_sequence(63)
    all_compared = Sequence(sequence.ids, sequence.positions, tuple(range(64)))
    precision = Precision(torch.bfloat16, torch.bfloat16)
    trained = verification.trained
    exact, rounded = (
        PlainModel(trained.model, trained.weights, dtype, torch.bfloat16).run(all_compared).logits
        for dtype in (torch.float64, torch.bfloat16)
    )
    of_compared = exact[list(sequence.compared)]
    largest = ((rounded - exact).abs().max() / of_compared.abs().max()).item()
    outputs = verification.reference(sequence, precision).exact
    verification.add("bf16", sequence, outputs, precision)
    assert verification.checks[0].allowed == pytest.approx([2 * largest] * 3)
    assert verification.checks[0].errors == [0.0] * 3


def test_a_fault_only_in_bf16(tmp_path, monkeypatch):
    """The model computes its angles in bf16 only if its weights are in bf16."""
    made = make(tmp_path, PLAIN_ROPE, label="half", seq_length=512)

    def fault(model):
        if model.dtype == torch.bfloat16:
            round_angles(model)

    plant(monkeypatch, fault)
    report = checked(made, ("fp32", "bf16"))
    different = [check.name for check in report.checks if not check.is_equal]
    assert different == [
        "phases, bf16",
        "one pass, bf16",
        "with a cache, in chunks, bf16",
        "left padding in a batch, bf16",
    ]
    assert report.cause.startswith("it computes angles")


def test_a_fault_only_with_a_cache(tmp_path, monkeypatch):
    made = make(tmp_path, PLAIN_ROPE, label="cached", seq_length=64)

    def fault(model):
        forward = model.forward

        def shifted(*arguments, **inputs):
            if "position_ids" in inputs and inputs["input_ids"].shape[1] == 1:
                inputs["position_ids"] = inputs["position_ids"] - 1
            return forward(*arguments, **inputs)

        model.forward = shifted

    plant(monkeypatch, fault)
    report = checked(made)
    different = [check.name for check in report.checks if not check.is_equal]
    assert different == ["with a cache, in chunks, fp32"]
    assert report.difference.startswith("with a cache, in chunks, fp32: first at position 32")


@pytest.mark.parametrize("kind", [PLAIN_ROPE, OWN_CLASSES])
def test_positions_that_the_model_counts_after_a_cache(kind, tmp_path, monkeypatch):
    made = make(tmp_path, kind, label=f"counted_{kind}", seq_length=64)

    def fault(model):
        forward = model.model.forward

        def shifted(*arguments, **inputs):
            cached = 0
            if inputs["use_cache"]:
                cached = inputs[cache_keyword(model)].get_seq_length()
            if cached > 0 and inputs.get("position_ids") is None:
                indices = torch.arange(inputs["input_ids"].shape[1])
                inputs["position_ids"] = indices[None] + cached + 1
            return forward(*arguments, **inputs)

        model.model.forward = shifted

    plant(monkeypatch, fault)
    report = checked(made)
    different = [check.name for check in report.checks if not check.is_equal]
    assert different == ["with a cache, in chunks, fp32"]


def test_a_fault_only_with_padding(tmp_path, monkeypatch):
    made = make(tmp_path, PLAIN_ROPE, label="padded", seq_length=64)

    def fault(model):
        forward = model.model.forward

        def without_mask(*arguments, **inputs):
            if inputs["attention_mask"] is not None and len(inputs["attention_mask"]) > 1:
                inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
            return forward(*arguments, **inputs)

        model.model.forward = without_mask

    plant(monkeypatch, fault)
    report = checked(made)
    different = [check.name for check in report.checks if not check.is_equal]
    assert different == ["left padding in a batch, fp32"]
    assert report.cause.startswith("the way in which the tokens are read, since another way")


@pytest.mark.parametrize("window, is_equal", [(300, False), (600, True)])
def test_a_window_that_no_text_exceeds(window, is_equal, tmp_path):
    """As in to-hf, and in texts that are too long to be read."""
    made = make(
        tmp_path, PLAIN_ROPE, label=f"window_{window}", seq_length=128, sliding_window=window
    )
    assert checked(made, beyond_windows=False).is_equal
    change_config(made, sliding_window=window + 1)
    report = checked(made, beyond_windows=False)
    assert report.is_equal == is_equal, report.text()
    if not is_equal:
        assert report.difference == "windows, fp32: first at position 512."
        expected = "layer 0 has a window of 301 tokens instead of a window of 300 tokens."
        assert report.cause == expected


def test_windows_that_agree_at_the_first_position(tmp_path):
    made = make(
        tmp_path,
        PLAIN_ROPE,
        label="long_window",
        sliding_window=600,
        seq_length=1200,
        rope_theta=9.0,
    )
    change_config(made, sliding_window=601)
    assert checked(made).cause.startswith("its windows have 601 tokens instead of 600")


def test_without_a_checkpoint_config_json_counts(tmp_path):
    made = make(tmp_path, PLAIN_ROPE, label="alone", **YARN)
    change_config(made, rope_theta=30.0, rope_parameters=lambda rope: rope | {"rope_theta": 30.0})
    verification = Verification(described_by(made.directory))
    check_transformers(verification, made.directory, FP32, layers_up_to=64)
    assert verification.report().is_equal
    assert not checked(made).is_equal


@pytest.mark.parametrize(
    "kind, settings, checks",
    [
        (PLAIN_ROPE, SWAN, 9),
        (OWN_CLASSES, YARN, 9),
        ("tape", WINDOWS["tape_local_theta"], 9),
        # No phases, and no gaps between tokens.
        ("alibi", {}, 6),
        ("fox", {}, 6),
        ("cope", {}, 6),
        ("tape_signed", {}, 6),
        ("selective_rope", {}, 6),
        # Positions below the trained length only.
        ("randpe", {}, 9),
    ],
)
def test_all_checks_pass_with_every_kind_of_encoding(kind, settings, checks, tmp_path):
    made = make(tmp_path, kind, label=f"passes_{kind}", **settings)
    report = checked(made, ("fp32", "bf16"), layers_up_to=64)
    assert report.is_equal, report.text()
    assert len(report.checks) == checks


# to-hf and the program.


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", [PLAIN_ROPE, OWN_CLASSES, "fox"])
def test_an_export_is_verified_before_it_appears(kind, dtype, tmp_path, monkeypatch, capsys):
    from convert_checkpoint import to_hf

    settings = {"rope_theta": 500.0}
    if kind == "fox":
        settings = {}
    made = make(tmp_path, kind, label=f"export_{kind}_{dtype}", **settings)
    options = dict(
        checkpoint=str(made.checkpoint),
        adapter=False,
        rope_scaling=None,
        rope_scaling_factor=None,
        dtype=dtype,
        tokenizer="none",
    )
    to_hf(str(tmp_path / "good"), no_verify=False, **options)
    assert "verified: transformers computes the logits of the training" in capsys.readouterr().err

    plant(monkeypatch, lambda model: model.model.layers[1].mlp.up_proj.weight.data.mul_(1.1))
    with pytest.raises(CheckpointError, match="computes something else"):
        to_hf(str(tmp_path / "bad"), no_verify=False, **options)
    assert not (tmp_path / "bad").exists()
    to_hf(str(tmp_path / "bad"), no_verify=True, **options)
    assert (tmp_path / "bad" / "config.json").exists()


def run_program(capsys, *arguments):
    import verify as program

    old = sys.argv
    sys.argv = ["verify.py", *map(str, arguments)]
    try:
        status = program.main()
    finally:
        sys.argv = old
    return status, capsys.readouterr().out


def test_the_program_prints_a_table_and_returns_a_status(tmp_path, capsys):
    made = make(tmp_path, OWN_CLASSES, label="program", rope_theta=500.0)
    status, out = run_program(capsys, made.directory, "--against", made.checkpoint)
    assert status == 0
    assert re.search(r"^position +0 +8 +15 +16 +32 +64 +allowed$", out, re.M)
    assert len(re.findall(r"^.*, (?:fp32|bf16) .* equal$", out, re.M)) == 9

    # A checkpoint is exported first.
    assert run_program(capsys, made.checkpoint, "--precision", "fp32")[0] == 0

    change_config(made, rope_parameters=lambda rope: rope | {"rope_theta": 10000.0})
    status, out = run_program(
        capsys, made.directory, "--against", made.checkpoint, "--lengths", "20", "40"
    )
    assert status == 1
    assert "Likely cause: the base of its frequencies is 10,000 instead of 500" in out
    assert re.search(r"^position +0 +20 +40 +allowed$", out, re.M)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_rounded_export_equals_its_checkpoint(dtype, tmp_path, capsys):
    made = make(tmp_path, OWN_CLASSES, label=f"rounded_{dtype}", dtype=dtype)
    status, out = run_program(capsys, made.directory, "--against", made.checkpoint)
    assert status == 0, out


@pytest.mark.parametrize("limit", [3, 8, 100])
def test_a_long_trained_length_does_not_leave_position_0_alone(limit, tmp_path):
    made = make(tmp_path, "alibi", label=f"long_{limit}")
    verification = Verification(trained_by(open_weights(made.checkpoint)))
    positions = verification.whole_sequence(limit).compared_positions
    assert positions == {3: [0, 3], 8: [0, 8], 100: [0, 8, 15, 16, 32, 64]}[limit]


def test_logits_of_another_engine(tmp_path, capsys):
    made = make(tmp_path, PLAIN_ROPE, label="other_engine", rope_theta=500.0)
    tokens = tmp_path / "tokens.npz"
    assert run_program(capsys, made.directory, "--write-tokens", tokens)[0] == 0
    with pytest.raises(ConfigError, match="--write-tokens .* exists; give another file"):
        run_program(capsys, made.directory, "--write-tokens", tokens)
    with np.load(tokens) as archive:
        ids = archive["tokens"]
        positions = archive["positions"]
    with torch.no_grad():
        logits = made.loaded(torch.from_numpy(ids)[None]).logits[0, positions].numpy()
    good = tmp_path / "good.npz"
    np.savez(good, tokens=ids, positions=positions, logits=logits)
    assert run_program(capsys, made.directory, "--logits", good)[0] == 0

    made.loaded.model.rotary_emb.inv_freq = 10000.0 ** (-torch.arange(0, 8, 2) / 8)
    with torch.no_grad():
        logits = made.loaded(torch.from_numpy(ids)[None]).logits[0, positions]
    bad = tmp_path / "bad.npz"
    np.savez(bad, tokens=ids, positions=positions, logprobs=logits.log_softmax(-1).numpy())
    status, out = run_program(capsys, made.directory, "--logits", bad)
    assert status == 1
    assert "the base of its frequencies is 10,000 instead of 500" in out


def test_models_that_cannot_be_compared(tmp_path, capsys):
    made = make(tmp_path, PLAIN_ROPE, label="unknown")
    change_config(made, model_type="gemma")
    with pytest.raises(ValueError, match="model_type is 'gemma'"):
        run_program(capsys, made.directory)
    with pytest.raises(ValueError, match="^--against .*missing does not exist"):
        run_program(capsys, made.directory, "--against", tmp_path / "missing")
    (made.directory / "config.json").unlink()
    with pytest.raises(ValueError, match="^MODEL .* has weights, but no config.json"):
        run_program(capsys, made.directory)


def test_a_scaled_export_is_compared_with_the_scaled_checkpoint(tmp_path, capsys):
    from convert_checkpoint import to_hf

    made = make(tmp_path, PLAIN_ROPE, label="unscaled")
    options = dict(adapter=False, rope_scaling="yarn", rope_scaling_factor=4.0, tokenizer="none")
    to_hf(str(tmp_path / "scaled"), no_verify=False, checkpoint=str(made.checkpoint), **options)
    words = [tmp_path / "scaled", "--against", made.checkpoint, "--precision", "fp32"]
    assert run_program(capsys, *words)[0] == 1
    scaling = ["--rope-scaling", "yarn", "--rope-scaling-factor", "4"]
    status, out = run_program(capsys, *words, *scaling)
    assert status == 0
    assert "with yarn-x4" in out


@pytest.mark.parametrize(
    "words",
    [
        ["--logits", "x.npz", "--engine", "vllm"],
        ["--logits", "x.npz", "--lengths", "4"],
        ["--logits", "x.npz", "--write-tokens", "y.npz"],
        ["--logits", "x.npz", "--precision", "fp32", "bf16"],
        ["--engine-python", "python3"],
    ],
)
def test_options_that_exclude_each_other(words, capsys):
    with pytest.raises(
        ValueError, match="cannot be combined|requires --engine vllm|several values"
    ):
        run_program(capsys, "missing", *words)
