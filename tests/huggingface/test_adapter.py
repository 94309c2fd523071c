"""Exports of runs that trained parts of a model: merged, and as peft adapters."""

import json
import shutil
import warnings

import adapter_cases
import pytest
import torch
from conversions import changed_state, convert, refused
from datasets_for_tests import write_all
from launch import run_group
from models import random_tokens
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

CASES = [name for name in adapter_cases.cases() if name != "matrices"] + ["extended"]
LAYOUTS = [name for name in CASES if name.startswith("tape_tp")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train a run for each case, with the trained model's logits."""
    folder = write_all(tmp_path_factory.mktemp("trained"))
    run_group("adapter_cases", 2, folder)
    return folder


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    """Export each run as an adapter and as a merged model."""
    folder = tmp_path_factory.mktemp("exported")
    for name in CASES:
        to_hf = ["to-hf", "--tokenizer", "none", "--checkpoint", trained / name]
        for output in ([folder / name, "--adapter"], [folder / f"{name}_merged"]):
            done = convert(*to_hf, "--output", *output)
            assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def expected(trained):
    return load_file(trained / "logits.safetensors")


def load(directory):
    return AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True).eval()


def with_adapter(base, adapter):
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter(
            "error", UserWarning
        )  # peft's about keys that are missing or unknown, and tied weights
        return PeftModel.from_pretrained(base, adapter).eval()


def logits(model):
    with torch.no_grad():
        return model(random_tokens()).logits


@pytest.mark.parametrize("name", CASES)
def test_peft_merges_the_adapter_to_the_trained_model(exported, expected, name):
    base = load(exported / name / "base")
    before = logits(base)
    model = with_adapter(base, exported / name)
    torch.testing.assert_close(logits(model), expected[name], atol=1e-5, rtol=0)
    assert (before - expected[name]).abs().max() > (1e-3 if "without_lora" not in name else -1)
    merged = model.merge_and_unload()
    ours = load(exported / f"{name}_merged")
    torch.testing.assert_close(logits(merged), expected[name], atol=1e-5, rtol=0)
    torch.testing.assert_close(logits(ours), expected[name], atol=1e-5, rtol=0)
    found = merged.state_dict()
    for key, weight in ours.state_dict().items():
        torch.testing.assert_close(found[key], weight, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_peft_saves_the_same_adapter(exported, tmp_path, name):
    with_adapter(load(exported / name / "base"), exported / name).save_pretrained(tmp_path)
    again, ours = (
        load_file(path / "adapter_model.safetensors") for path in (tmp_path, exported / name)
    )
    assert again.keys() == ours.keys()
    assert all(torch.equal(again[key], ours[key]) for key in ours)
    again, ours = (
        json.loads((path / "adapter_config.json").read_text())
        for path in (tmp_path, exported / name)
    )
    for key in ours.keys() - {"target_modules", "modules_to_save"}:
        assert again[key] == ours[key]
    assert set(again["target_modules"]) == set(ours["target_modules"])


def test_the_adapter_does_not_depend_on_the_layout(exported):
    first, other = (load_file(exported / case / "adapter_model.safetensors") for case in LAYOUTS)
    assert first.keys() == other.keys()
    for key, expected in first.items():
        torch.testing.assert_close(other[key], expected, atol=1e-5, rtol=1e-4)


def test_the_cards_list_the_trained_parameters(exported):
    card = (exported / "tape_tp2_zero3" / "README.md").read_text()
    lora = 3 * 3 * (4 * 32 + 2 * 32 + 2 * 16)
    assert f"lora ({lora:,})" in card
    assert "norms (224)" in card
    assert "| LoRA layers | rank 3, alpha 7.5, for q, k, v, o |" in card
    card = (exported / "tape_tp2_zero3" / "base" / "README.md").read_text()
    assert "This is the base model of an adapter" in card
    assert "| Trained |" not in card
    card = (exported / "extended_merged" / "README.md").read_text()
    assert "| Extends | matrices, step 3 |" in card
    assert "output (2,048)" in card
    assert "Pre-trained on text only" not in card


def test_an_adapter_with_its_base_can_be_replaced(exported, trained, tmp_path):
    output = tmp_path / "out"
    shutil.copytree(exported / "tape_tp2_zero3", output)
    assert (output / "base" / "config.json").is_file()
    assert (output / "base" / "positions.json").is_file()
    to_hf = ["to-hf", "--tokenizer", "none", "--checkpoint", trained / "rope_biased", "--adapter"]
    refused(tmp_path, "exists; pass --overwrite", *to_hf, "--output", output)
    assert convert(*to_hf, "--output", output, "--overwrite").returncode == 0
    names = [
        {path.relative_to(folder) for path in folder.rglob("*")}
        for folder in (exported / "rope_biased", output)
    ]
    assert names[0] == names[1]


def test_parameters_that_an_adapter_cannot_contain_are_refused(trained, tmp_path):
    to_hf = ["to-hf", "--tokenizer", "none", "--output", tmp_path / "out"]
    refused(tmp_path, "omit --adapter", *to_hf, "--checkpoint", trained / "matrices", "--adapter")


def test_settings_that_do_not_match_the_lora_layers_are_refused(trained, tmp_path):
    source = trained / "rope_biased" / "checkpoints" / "step-00000003"
    with changed_state(source, tmp_path) as (step, state):
        state["config"]["extension"]["lora_targets"] = ["k"]
    to_hf = ["to-hf", "--checkpoint", step, "--output", tmp_path / "out"]
    refused(tmp_path, "has another architecture", *to_hf)
