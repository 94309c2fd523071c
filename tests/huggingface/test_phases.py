"""positions.json: exports record the positions of the training, and programs refuse a model that
computes others.
"""

import copy
import importlib.util
import json
import shutil

import pytest
import torch
from conversions import change_config
from environments import ROOT, run_in
from exported_models import OWN_CLASSES, PLAIN_ROPE, make
from models import LLAMA3, WINDOWS, YARN, small_model
from test_generate import generate  # noqa: F401
from test_import import write_source
from torch.testing import assert_close
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from megatron_tape.errors import FileError
from megatron_tape.evaluation.model_source import find_model
from megatron_tape.extension.rope_scaling import RopeScaling
from megatron_tape.extension.scaled_export import link_scaled
from megatron_tape.huggingface.export import to_transformers
from megatron_tape.huggingface.modeling.configuration_tape import TapeConfig
from megatron_tape.huggingface.modeling.position_tape import TapePhases
from megatron_tape.huggingface.verification.phases import check_loaded, measured_phases
from megatron_tape.huggingface.verification.position_record import (
    POSITIONS,
    check_config,
    read_positions,
    record_of,
    write_positions,
)
from pretrain import evaluate

MIXED = {"sliding_window": 5, "full_attention_every": 2, "num_layers": 4}
THETA = {"rope_theta": 500_000.0}
# By name: the model of exported_models, its settings, and for each layer what the record says of
# its phases. `full` and `window` are compared with numbers, `none` does not rotate, and of None
# nothing is known.
FULL = ["full"] * 3
LEARNED_LATER = ["full", None, None]
CASES = {
    "llama": (PLAIN_ROPE, {}, FULL),
    "llama_theta": (PLAIN_ROPE, THETA, FULL),
    "llama_llama3": (PLAIN_ROPE, LLAMA3, FULL),
    "llama_yarn": (PLAIN_ROPE, YARN, FULL),
    "llama_linear": (PLAIN_ROPE, {"rope_scaling_factor": 3.0}, FULL),
    "llama_share": (PLAIN_ROPE, {"rope_share": 0.5}, FULL),
    "mistral": (PLAIN_ROPE, {"sliding_window": 5}, FULL),
    "qwen2": (PLAIN_ROPE, {"qkv_bias": True}, FULL),
    "qwen2_windows": (PLAIN_ROPE, {"qkv_bias": True} | MIXED, ["full"] * 4),
    "qwen3": (PLAIN_ROPE, {"qk_norm": True} | YARN, FULL),
    "smollm3": (PLAIN_ROPE, {"layers_without_positions": 2}, ["full", "none", "full"]),
    "smollm3_windows": (
        PLAIN_ROPE,
        {"layers_without_positions": 2} | MIXED,
        ["full", "none", "full", "none"],
    ),
    "tape": (OWN_CLASSES, {}, LEARNED_LATER),
    "tape_yarn": (OWN_CLASSES, YARN, LEARNED_LATER),
    "tape_one_layer": (OWN_CLASSES, {"num_layers": 1}, ["full"]),
    "code_tape": ("tape", {"layers_without_positions": 2}, ["full", "none", None]),
    "code_rope": ("rope", {}, FULL),
    "alibi": ("alibi", {}, ["none"] * 3),
    "sincos": ("sincos", {}, ["none"] * 3),
    "path": ("path", {}, ["none"] * 3),
    "xpos": ("xpos", {}, FULL),
    # Positions 0, 2, 4, ..., also beyond the trained length.
    "randpe": ("randpe", {"randpe_range": 130}, FULL),
    "repo": ("repo", {"repo_first_layer": 2}, ["full", "full", None]),
    "selective_rope": ("selective_rope", {}, [None] * 3),
    "rope_learned": ("rope_learned", {}, [None] * 3),
    "tape_signed": ("tape_signed", {}, [None, "none", None]),
    "local_theta": ("rope", {"rope_local_theta": 3.0} | MIXED, ["window", "full"] * 2),
    "scaled_full_layers": (
        "rope",
        WINDOWS["rope_scaled_full_layers"],
        ["window", "window", "full"],
    ),
    "tape_local_theta": ("tape", WINDOWS["tape_local_theta"], ["window", None, None, None]),
    "swan": ("rope", WINDOWS["swan"], ["full", "none"] * 2),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return the export of a case, made once."""
    folder = tmp_path_factory.mktemp("phases")
    exports = {}

    def of(name):
        if name not in exports:
            kind, settings, _ = CASES[name]
            changes = {key: value for key, value in settings.items() if key != "position_encoding"}
            exports[name] = make(folder, kind, label=name, **changes)
        return exports[name]

    return of


@pytest.fixture
def changed(made, tmp_path):
    """Return a copy of a case's export and of the loaded model, which a test may change."""

    def of(name):
        export = made(name)
        shutil.copytree(export.directory, tmp_path / name)
        return tmp_path / name, copy.deepcopy(export.loaded)

    return of


def edited(directory, change):
    """Change the record in `directory` by the function `change` of its contents."""
    file = directory / POSITIONS
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


@pytest.mark.parametrize("name", CASES)
def test_the_record_agrees_with_the_loaded_model(made, name):
    export = made(name)
    check_config(export.directory)
    check_loaded(export.loaded, export.directory)
    record = read_positions(export.directory)
    assert record.positions == [0, 8, 15, 16, 32, 64]
    assert [layer["phases"] for layer in record.layers] == CASES[name][2]
    windows = [export.model.window_of(layer) for layer in range(export.model.num_layers)]
    assert [layer["window"] for layer in record.layers] == windows

    measured = measured_phases(export.loaded, record.positions)
    assert len(measured) == len(record.layers)
    for layer, expected in zip(measured, record.layers, strict=True):
        assert layer.window == expected["window"]
        if expected["phases"] in record.phases:
            phases = torch.tensor(record.phases[expected["phases"]])
            assert phases.shape == (6, export.model.head_dim)
            assert_close(layer.phases, phases, atol=5e-7, rtol=0)
            # The positions differ, and the kinds of layers do too.
            assert len(set(map(tuple, phases.tolist()))) == 6
    if len(record.phases) == 2:
        assert record.phases["full"] != record.phases["window"]


@pytest.mark.parametrize("name", ["llama_linear", "qwen3", "smollm3", "tape_yarn", "local_theta"])
def test_the_record_agrees_with_the_model_in_bf16(made, name):
    directory = made(name).directory
    for implementation in ("eager", "sdpa"):
        model = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=torch.bfloat16,
            trust_remote_code=True,
            attn_implementation=implementation,
        )
        check_loaded(model, directory)
        assert model.config._attn_implementation == implementation
    # `model.bfloat16()` rounds the frequencies of transformers' models, and `dtype` does not.
    if name == "llama_linear":
        with pytest.raises(FileError, match="rotates queries and keys by other angles"):
            check_loaded(model.bfloat16(), directory)


@pytest.mark.parametrize("name", ["llama", "qwen3", "smollm3", "tape", "local_theta"])
def test_a_measurement_leaves_the_model_as_it_was(made, name):
    model = made(name).loaded
    ids = torch.arange(10)[None]
    before = model(ids).logits
    functions = dict(ALL_ATTENTION_FUNCTIONS)
    implementation = model.config._attn_implementation

    def check_unchanged():
        assert dict(ALL_ATTENTION_FUNCTIONS) == functions
        assert model.config._attn_implementation == implementation
        for module in model.modules():
            assert not module._forward_hooks and not module._forward_pre_hooks
        assert torch.equal(model(ids).logits, before)

    measured_phases(model, [0, 4, 9])
    check_unchanged()

    def fail(*arguments):
        raise RuntimeError("within the pass")

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(model.base_model.norm, "forward", fail)
        with pytest.raises(RuntimeError, match="within the pass"):
            measured_phases(model, [0, 4, 9])
    check_unchanged()


def test_phi3_rotates_a_part_of_each_head(tmp_path):
    write_source(tmp_path / "phi3", "phi3_partial")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "phi3").eval()
    positions = [0, 3, 500]
    cos, sin = model.model.rotary_emb(torch.zeros(1), torch.tensor([positions]))
    expected = torch.cat([cos[0].chunk(2, -1)[0], sin[0].chunk(2, -1)[0]], -1)
    assert expected.shape == (3, 6)
    for layer in measured_phases(model, positions):
        assert_close(layer.phases, expected, atol=1e-6, rtol=0)


def test_a_record_can_be_read_by_people_and_programs(made, tmp_path):
    directory = made("smollm3_windows").directory
    text = (directory / POSITIONS).read_text()
    lines = [line.strip().rstrip(",") for line in text.splitlines()]
    assert lines.count('{"phases": "full", "window": 5}') == 2
    assert lines.count('{"phases": "none", "window": null}') == 2
    # One line for each position.
    assert sum(line.startswith("[") for line in lines) == 6
    assert '"layer_types": ["sliding_attention", "full_attention", ' in text
    assert "-0.0," not in text and "-0.0]" not in text
    record = read_positions(directory)
    assert record.config["no_rope_layers"] == [1, 0, 1, 0]
    write_positions(tmp_path, record)
    assert (tmp_path / POSITIONS).read_text() == text


def test_a_wrong_config_json_of_the_export_itself_is_found(made, tmp_path, monkeypatch):
    """Numbers come from the settings of the training, not from config.json."""
    original = to_transformers._rope_parameters

    def squared(position):
        rope = original(position)
        return rope | {"factor": rope["factor"] ** 2}

    monkeypatch.setattr(to_transformers, "_rope_parameters", squared)
    for name in ("llama_yarn", "tape_yarn"):
        kind, settings, _ = CASES[name]
        wrong = make(tmp_path, kind, label=name, **settings)
        check_config(wrong.directory)
        with pytest.raises(FileError, match="multiplies queries and keys by 1.277 .* other angles"):
            check_loaded(wrong.loaded, wrong.directory)


def scale_frequencies(model, factor):
    model.model.rotary_emb.inv_freq.div_(factor)


def set_base(model, base):
    size = model.config.head_dim
    model.model.rotary_emb.inv_freq.copy_(base ** -(torch.arange(0, size, 2) / size))


def round_frequencies(model):
    frequencies = model.model.rotary_emb.inv_freq
    frequencies.copy_(frequencies.bfloat16())


def round_phases(model):
    def rounded(module, inputs, output):
        return tuple(x.bfloat16().to(x.dtype) for x in output)

    model.model.rotary_emb.register_forward_hook(rounded)


def set_scaling(model, factor):
    model.model.rotary_emb.attention_scaling = factor


def shift_rope(model, shift):
    flags = [layer.self_attn.use_rope for layer in model.model.layers]
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.use_rope = flags[(index + shift) % len(flags)]


def always_rotate(model):
    for layer in model.model.layers:
        layer.self_attn.use_rope = 1


def set_window(model, window):
    model.config.sliding_window = window


def remove_layer(model):
    del model.model.layers[-1]
    model.config.num_hidden_layers -= 1


OTHER_ANGLES = "rotates queries and keys by other angles from position"
FAULTS = {
    "base": ("llama_theta", lambda model: set_base(model, 1e4), f"layer 0 .*{OTHER_ANGLES} 8 on"),
    "bf16": ("llama", round_frequencies, f"layer 0 .*{OTHER_ANGLES} 8 on; in all, 3 layers differ"),
    "phases": ("llama", round_phases, rf"layer 0 \(counted from 0\) {OTHER_ANGLES} 8 on"),
    "twice": ("llama_linear", lambda model: scale_frequencies(model, 3.0), f"{OTHER_ANGLES} 8 on"),
    "unscaled": ("llama_llama3", lambda model: set_base(model, 1e4), f"{OTHER_ANGLES} 8 on"),
    "factor": (
        "llama_yarn",
        lambda model: set_scaling(model, 1.0),
        r"layer 0 .*multiplies queries and keys by 1(\.00\d)? instead of 1.139; in all, 3",
    ),
    "shifted": (
        "smollm3",
        lambda model: shift_rope(model, 1),
        "layer 0 .*does not rotate queries and keys; in all, 2 layers differ",
    ),
    "all": (
        "smollm3_windows",
        always_rotate,
        "layer 1 .*rotates queries and keys, but has no positions in the training; in all, 2 ",
    ),
    "window": (
        "mistral",
        lambda model: set_window(model, 3),
        "layer 0 .*has a window of 3 tokens instead of a window of 5 tokens",
    ),
    "no_window": (
        "swan",
        lambda model: set_window(model, None),
        "layer 0 .*has no window instead of a window of 3 tokens; in all, 2 layers",
    ),
    "tape": (
        "tape",
        lambda model: model.model.phases.inv_freq.mul_(1.01),
        f"layer 0 .*{OTHER_ANGLES} 8 on;",
    ),
    "layers": ("llama", remove_layer, "has 2 layers in transformers, but 3 in the training"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_loaded_model_with_other_positions_is_found(changed, fault, dtype):
    name, change, message = FAULTS[fault]
    directory, _ = changed(name)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, trust_remote_code=True)
    check_loaded(model, directory)
    with torch.no_grad():
        change(model)
    if fault in ("bf16", "phases") and dtype == torch.bfloat16:
        # At the positions of this small model, at most the rounding of the keys.
        check_loaded(model, directory)
        return
    with pytest.raises(FileError, match=message) as error:
        check_loaded(model, directory)
    assert "delete positions.json" in str(error.value)
    (directory / POSITIONS).unlink()
    check_loaded(model, directory)


def test_keys_of_zeros_cannot_be_measured(changed):
    directory, model = changed("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight.zero_()
    check_loaded(model, directory)
    assert measured_phases(model, [0, 5])[1].phases.isnan().all()
    with torch.no_grad():
        round_frequencies(model)
    with pytest.raises(FileError, match="in all, 2 layers differ"):
        check_loaded(model, directory)


# By what is changed: the case, the changes of config.json, keys to remove, and the message.
EDITS = {
    "base": (
        "llama_theta",
        lambda settings: settings["rope_parameters"].update(rope_theta=10_000.0),
        "has rope_parameters.rope_theta 10000.0, but was exported with 500000.0",
    ),
    "older base": (
        "llama_theta",
        lambda settings: settings.update(rope_theta=10_000),
        "has rope_theta 10000, but was exported with 500000.0",
    ),
    "no scaling": (
        "llama_yarn",
        lambda settings: settings.update(rope_parameters={"rope_type": "default"}),
        "has rope_parameters.rope_type 'default', but was exported with 'yarn'",
    ),
    "factor": (
        "llama_linear",
        lambda settings: settings["rope_parameters"].update(factor=9.0),
        "has rope_parameters.factor 9.0, but was exported with 3.0",
    ),
    "original length": (
        "llama_llama3",
        lambda settings: settings["rope_parameters"].update(original_max_position_embeddings=16),
        "has rope_parameters.original_max_position_embeddings 16, but was exported with 32",
    ),
    "length above": (
        "llama_llama3",
        lambda settings: settings.update(original_max_position_embeddings=16),
        "has original_max_position_embeddings 16, but was exported without it",
    ),
    "layer types": (
        "qwen2_windows",
        lambda settings: settings["layer_types"].reverse(),
        "has layer_types[0] 'full_attention', but was exported with 'sliding_attention'",
    ),
    "flags": (
        "smollm3",
        lambda settings: settings.update(no_rope_layers=[0, 1]),
        "has no_rope_layers [0, 1], but was exported with [1, 0, 1]",
    ),
    "tape": (
        "tape",
        lambda settings: settings.update(gate_input="attention"),
        "has gate_input 'attention', but was exported with 'mlp'",
    ),
    "code": (
        "scaled_full_layers",
        lambda settings: settings["position_settings"].update(rope_scaling_layers="all"),
        "has position_settings.rope_scaling_layers 'all', but was exported with 'full'",
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_changed_config_json_is_found(changed, edit):
    name, change, message = EDITS[edit]
    directory, _ = changed(name)
    settings = json.loads((directory / "config.json").read_text())
    change(settings)
    (directory / "config.json").write_text(json.dumps(settings))
    with pytest.raises(FileError) as error:
        check_config(directory)
    assert f"config.json {message}" in str(error.value)
    assert "export the model again, or delete positions.json" in str(error.value)
    (directory / POSITIONS).unlink()
    check_config(directory)


def test_other_settings_may_change(changed):
    directory, _ = changed("llama")
    change_config(directory, {"max_position_embeddings": 999, "dtype": "bfloat16", "new": [1]})
    check_config(directory)


@pytest.fixture(scope="module")
def with_tokenizer(tmp_path_factory, code_tokenizer):
    """Exports with a tokenizer, and a text for perplexity."""
    folder = tmp_path_factory.mktemp("programs")
    sizes = dict(seq_length=64, vocab_size=400, unpadded_vocab_size=400)
    for label, (name, settings) in {
        "plain": (PLAIN_ROPE, THETA),
        "tape": (OWN_CLASSES, {}),
    }.items():
        make(folder, name, label, tokenizer=str(code_tokenizer), **sizes, **settings)
    (folder / "text.jsonl").write_text(json.dumps({"text": "import heapq\n" * 90}) + "\n")
    return folder


@pytest.mark.parametrize("name", ["llama_theta", "llama_yarn", "qwen2", "smollm3_windows", "tape"])
def test_a_model_that_was_saved_again_in_its_place_is_not_refused(made, name, tmp_path):
    folder = tmp_path / "saved"
    shutil.copytree(made(name).directory, folder)
    made(name).loaded.save_pretrained(folder)
    check_config(folder)
    check_loaded(made(name).loaded, folder)


@pytest.mark.parametrize("label", ["plain", "tape"])
def test_programs_refuse_a_changed_model_until_the_record_is_deleted(
    with_tokenizer,
    generate,  # noqa: F811
    tmp_path,
    capsys,
    monkeypatch,
    label,
):
    model = tmp_path / label
    shutil.copytree(with_tokenizer / label, model)

    def outcomes():
        """Return the exit status of both programs and what they say."""
        code, _, line = generate("--model", model, "--prompt", "import", "--max-new-tokens", "2")
        yield code, line
        command = ["perplexity", "--model", model, "--output", tmp_path / "out", "--device", "cpu"]
        command += ["--perplexity.data", with_tokenizer / "text.jsonl"]
        command += ["--perplexity.lengths", "[64]"]
        status = evaluate.main(list(map(str, command)))
        yield status, capsys.readouterr().err
        shutil.rmtree(tmp_path / "out", ignore_errors=True)

    for status, text in outcomes():
        assert status == 0, text

    original = (model / "config.json").read_text()
    rope = json.loads(original)["rope_parameters"]
    change_config(model, {"rope_parameters": rope | {"rope_theta": 777.0}})
    for status, text in outcomes():
        assert status == 2
        assert "config.json has rope_parameters.rope_theta 777.0, but was exported with" in text
    # A record of the changed settings, with the numbers of the training.
    edited(model, lambda content: content["config"]["rope_parameters"].update(rope_theta=777.0))
    if label == "plain":
        # transformers reads the base of rope_parameters.
        edited(model, lambda content: content["config"].update(rope_theta=500_000.0))
    for status, text in outcomes():
        assert status == 2
        assert "has other positions in this version of transformers (" in text
        assert f"layer 0 (counted from 0) {OTHER_ANGLES} 32 on" in text
    # Results do not depend on the record.
    digest = find_model(str(model)).digest()
    (model / POSITIONS).unlink()
    assert find_model(str(model)).digest() == digest
    for status, text in outcomes():
        assert status == 0, text


def test_a_damaged_record_is_an_error(changed):
    directory, model = changed("llama")
    file = directory / POSITIONS
    text = file.read_text()

    def refused(problem, change):
        file.write_text(text)
        edited(directory, change)
        for check in (lambda: check_config(directory), lambda: check_loaded(model, directory)):
            with pytest.raises(FileError, match=f"{POSITIONS} cannot be used: .*{problem}"):
                check()

    refused("format_version is 2", lambda content: content.update(format_version=2))
    refused("layers is missing", lambda content: content.pop("layers"))
    refused("positions are not ascending", lambda content: content["positions"].reverse())
    refused("positions end at 1e\\+30", lambda content: content["positions"].append(10**30))
    refused("for each of the 6 positions", lambda content: content["phases"]["full"].pop())
    refused("for each of the 6 positions", lambda content: content["phases"]["full"][0].pop())
    refused("phases.*is 'x'", lambda content: content["phases"]["full"][0].append("x"))
    refused(
        r"layers\[1\].phases is 'x', which is missing in phases",
        lambda content: content["layers"][1].update(phases="x"),
    )

    def narrow(content):
        content["phases"]["full"] = [row[:2] for row in content["phases"]["full"]]

    file.write_text(text)
    edited(directory, narrow)
    with pytest.raises(FileError, match="rotates .* elements of a head instead of 2"):
        check_loaded(model, directory)
    file.write_text(text[:500])
    with pytest.raises(FileError, match="is not JSON"):
        check_config(directory)
    # Keys of a later version are ignored.
    file.write_text(text)
    edited(directory, lambda content: content.update(more=[1]))
    check_loaded(model, directory)


@pytest.mark.parametrize("kind", ["yarn", "linear"])
@pytest.mark.parametrize("name", ["llama", "tape", "repo"])
def test_a_linked_model_with_scaling_has_the_record_of_its_scaling(changed, tmp_path, name, kind):
    directory, _ = changed(name)
    scaled = tmp_path / "scaled"
    link_scaled(RopeScaling(kind, 4.0), directory, scaled)
    assert not (scaled / POSITIONS).is_symlink()
    assert (scaled / "model.safetensors").is_symlink()
    record = read_positions(scaled)
    assert record.positions == [0, 32, 63, 64, 128, 256]
    check_config(scaled)
    model = AutoModelForCausalLM.from_pretrained(scaled, trust_remote_code=True)
    check_loaded(model, scaled)
    # The model without the scaling differs.
    with pytest.raises(FileError, match="layer 0 "):
        check_loaded(
            AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True), scaled
        )

    shutil.rmtree(scaled)
    change_config(directory, {"rope_theta": 3.0})
    with pytest.raises(FileError, match="config.json has .*rope_theta 3.0"):
        link_scaled(RopeScaling(kind, 4.0), directory, scaled)
    assert not scaled.exists()


@pytest.mark.parametrize("kind", ["llama1", "llama_share", "qwen2", "qwen3_window", "smollm3_rope"])
def test_the_scaling_of_a_model_of_transformers_is_checked_too(tmp_path, kind):
    write_source(tmp_path / "source", kind)
    link_scaled(RopeScaling("linear", 2.0), tmp_path / "source", tmp_path / "scaled")
    check_config(tmp_path / "scaled")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "scaled")
    check_loaded(model, tmp_path / "scaled")
    with pytest.raises(FileError, match=f"layer 0 .*{OTHER_ANGLES} 64 on"):
        check_loaded(AutoModelForCausalLM.from_pretrained(tmp_path / "source"), tmp_path / "scaled")


def test_a_users_encoding_may_have_other_frequencies_in_each_layer(monkeypatch):
    from megatron_tape.position.rope import RotaryPosition

    def own_frequencies(self, layer, parameters, state, hidden_states_sBC, cache):
        inputs = original(self, layer, parameters, state, hidden_states_sBC, cache)
        return type(inputs)(inputs.z_TBGD * (1 + layer // 2))

    original = RotaryPosition.position_inputs
    monkeypatch.setattr(RotaryPosition, "position_inputs", own_frequencies)
    record = record_of(small_model(position_encoding="rope"), {})
    assert [layer["phases"] for layer in record.layers] == ["full", "full", "layer_2"]
    assert record.phases["layer_2"][0][0] == 2 * record.phases["full"][0][0] == 2.0


STRANGER = """
import sys
import torch, transformers
from pathlib import Path
from transformers import AutoModelForCausalLM
from megatron_tape.huggingface.verification.phases import check_loaded
from megatron_tape.errors import FileError

torch.set_num_threads(1)
assert transformers.__version__ == "5.0.0"
for directory in map(Path, sys.argv[1:]):
    for implementation in ("eager", "sdpa"):
        model = AutoModelForCausalLM.from_pretrained(
            directory, trust_remote_code=True, attn_implementation=implementation
        )
        check_loaded(model, directory)
        assert model.config._attn_implementation == implementation
    if hasattr(model.model, "rotary_emb"):
        model.model.rotary_emb.inv_freq.mul_(1.01)
        try:
            check_loaded(model, directory)
        except FileError as error:
            assert "in this version of transformers (5.0.0)" in str(error)
        else:
            raise AssertionError(directory)
print("compared", len(sys.argv) - 1)
"""


def test_the_oldest_transformers_computes_the_same_positions(made, tmp_path):
    # Version 5.0.0 has no rotation of a share of the frequencies.
    names = [name for name in CASES if name != "llama_share"]
    directories = [made(name).directory for name in names]
    done = run_in("transformers", tmp_path, "-c", STRANGER, *directories, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"compared {len(names)}" in done.stdout


def test_vllm_refuses_other_positions(changed):
    path = ROOT / "transformers_tape" / "src" / "transformers_tape" / "vllm_plugin.py"
    spec = importlib.util.spec_from_file_location("transformers_tape.vllm_plugin", path)
    spec.loader.exec_module(plugin := importlib.util.module_from_spec(spec))
    directory, _ = changed("tape_yarn")
    config = TapeConfig.from_pretrained(directory)
    # vLLM creates models with another default dtype.
    torch.set_default_dtype(torch.bfloat16)
    try:
        phases = TapePhases(config)
        plugin.check_positions(str(directory), phases)
        plugin.check_positions("some/model-of-the-hub", phases)
        phases.inv_freq[2] *= 1.001
        with pytest.raises(ValueError, match="other angles from position 8 on; .*delete"):
            plugin.check_positions(str(directory), phases)
    finally:
        torch.set_default_dtype(torch.float32)
    change_config(directory, {"rope_parameters": config.rope_parameters | {"factor": 16.0}})
    with pytest.raises(ValueError, match="config.json has rope_parameters .*16.0.*exported with"):
        plugin.check_positions(str(directory), phases)
    (directory / POSITIONS).unlink()
    plugin.check_positions(str(directory), phases)
