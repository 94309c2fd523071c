"""Exports and adapters that were written when TAPE's matrices were parameters rather than modules."""

import json

import pytest
import torch
from conversions import convert
from former_names import former, with_former_names
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_tape.huggingface.modeling.modeling_tape import TapeForCausalLM, TapeModel


@pytest.fixture(scope="module")
def earlier(exports, tmp_path_factory):
    return with_former_names(exports["tape"].directory, tmp_path_factory.mktemp("earlier") / "tape")


def tokens():
    return torch.arange(3, 40).view(1, -1)


def same_logits(model, expected):
    with torch.no_grad():
        return torch.equal(model(tokens()).logits, expected(tokens()).logits)


@pytest.mark.parametrize("load", ["own class", "remote code"])
def test_an_earlier_export_loads_and_is_saved_under_the_current_names(exports, earlier, load, tmp_path):
    options = dict(output_loading_info=True)
    if load == "own class":
        model, found = TapeForCausalLM.from_pretrained(earlier, **options)
    else:
        model, found = AutoModelForCausalLM.from_pretrained(earlier, trust_remote_code=True, **options)
    assert not any(found[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), found
    assert same_logits(model, exports["tape"].model)
    model.save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert names == load_file(exports["tape"].directory / "model.safetensors").keys()
    assert same_logits(TapeForCausalLM.from_pretrained(tmp_path), exports["tape"].model)


def test_the_decoder_of_an_earlier_export_loads_alone(exports, earlier):
    decoder = TapeModel.from_pretrained(earlier)
    expected = exports["tape"].model.model(tokens()).last_hidden_state
    assert torch.equal(decoder(tokens()).last_hidden_state, expected)


def test_a_state_dict_of_before_loads(exports):
    model = TapeForCausalLM(exports["tape"].model.config).eval()
    weights = {former(name): tensor for name, tensor in exports["tape"].model.state_dict().items()}
    model.load_state_dict(weights)
    assert same_logits(model, exports["tape"].model)


def test_an_earlier_export_is_imported_and_exported_again(exports, earlier, tmp_path):
    for command in (
        ["from-hf", "--model", earlier, "--output", tmp_path / "imported"],
        ["to-hf", "--checkpoint", tmp_path / "imported", "--output", tmp_path / "again"],
    ):
        done = convert(*command)
        assert done.returncode == 0, done.stderr
    again, expected = (
        load_file(directory / "model.safetensors") for directory in (tmp_path / "again", exports["tape"].directory)
    )
    assert again.keys() == expected.keys() and all(torch.equal(again[name], expected[name]) for name in again)


def test_an_index_of_an_earlier_export_is_read(exports, earlier, tmp_path):
    from megatron_tape.huggingface.imports.weight_files import open_directory

    (tmp_path / "model-00001-of-00001.safetensors").symlink_to(earlier / "model.safetensors")
    places = dict.fromkeys(load_file(earlier / "model.safetensors"), "model-00001-of-00001.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    weights = open_directory(tmp_path, allow_pickle=False)
    expected = load_file(exports["tape"].directory / "model.safetensors")
    assert set(weights) == expected.keys() and all(torch.equal(weights[name], expected[name]) for name in expected)
