"""Exported models in an environment with only torch and the oldest supported transformers."""

import json
import runpy
import shutil

import ecosystem
import pytest
import torch
from conversions import change_config
from environments import run_in
from exported_models import NAMES, OWN_CLASSES, PLAIN_ROPE, make
from models import random_tokens
from test_ecosystem import LIGHT
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_tape.huggingface.modeling import configuration_tape

STRANGER = """
import importlib.util, runpy, sys
import torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

for name in ("megatron_tape", "megatron", "pretrain", "deepspeed", "sentencepiece"):
    assert importlib.util.find_spec(name) is None, name
torch.set_num_threads(1)
expected = torch.load("expected.pt")
ids, text = expected["ids"], expected["text"]
mask = torch.ones(2, 8, dtype=torch.int64)
mask[0, :3] = 0
close = dict(atol=1e-5, rtol=1e-5)
with torch.no_grad():
    for name in sys.argv[1 : sys.argv.index("--")]:
        load = lambda path: AutoModelForCausalLM.from_pretrained(
            path, trust_remote_code=not name.startswith("plain_"), output_loading_info=True
        )
        model, found = load(name)
        for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            assert not found[key], found
        torch.testing.assert_close(model(ids).logits, expected[name], **close, msg=name)
        model.set_attn_implementation("eager")
        output = model(ids, output_attentions=True)
        assert len(output.attentions) == 3
        torch.testing.assert_close(output.logits, expected[name], **close, msg=name)
        model.set_attn_implementation("sdpa")
        options = dict(attention_mask=mask, max_new_tokens=4, min_new_tokens=4, do_sample=False)
        options |= dict(num_beams=2, disable_compile=True, pad_token_id=0)
        without = model.generate(ids[:, :8], use_cache=False, **options)
        ways = [{}]
        if "Encoded" not in type(model).__name__:
            ways.append({"cache_implementation": "static"})
        for way in ways:
            assert torch.equal(model.generate(ids[:, :8], **options, **way), without), (name, way)
        model.save_pretrained(f"again/{name}-saved")
        again, _ = load(f"again/{name}-saved")
        assert torch.equal(again(ids).logits, model(ids).logits), name
for name in ("with_tokenizer", "plain_with_tokenizer"):
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
    assert tokenizer(text).input_ids == expected["pieces"], name
    assert tokenizer.decode(expected["pieces"]) == text, name
sys.argv = sys.argv[sys.argv.index("--") + 1 :]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# Sequences of the script are four times as long as those of the training.
WINDOW = {"sliding_window": 3, "seq_length": 4}
WINDOWED = {
    "plain_mistral": WINDOW,
    "plain_qwen2": WINDOW | {"full_attention_every": 2, "qkv_bias": True},
    "plain_qwen3": WINDOW | {"full_attention_every": 2, "qk_norm": True},
    "plain_smollm3": WINDOW | {"full_attention_every": 2},
    "plain_swan": WINDOW | {"full_attention_every": 2, "layers_without_positions": 2},
}
WINDOWS = dict(sliding_window=4, full_attention_every=3, layers_without_positions=3)
WINDOWS |= dict(temperature_scale=0.5, temperature_floor_scale=3)
YARN = dict(rope_type="yarn", rope_theta=100.0, factor=4.0, original_max_position_embeddings=32)


@pytest.fixture(scope="module")
def ran(exported, exports, streamable, source_text, tmp_path_factory):
    """Return results of the script with exports of every encoding, then of the rows of
    ecosystem.py.
    """
    ids = random_tokens()
    names = []
    folder = tmp_path_factory.mktemp("plain")
    tokenizer = AutoTokenizer.from_pretrained(exports["tape"].directory, trust_remote_code=True)
    expected = {"ids": ids, "text": source_text, "pieces": tokenizer(source_text).input_ids}

    def give(name, directory, model):
        # transformers copies only files that it discovers.
        names.append(name)
        if directory.parent != folder:
            shutil.copytree(directory, folder / name)
        with torch.no_grad():
            logits = model(ids)
        expected[name] = logits if torch.is_tensor(logits) else logits.logits

    for made in map(exported, (*NAMES, OWN_CLASSES)):
        give(made.directory.name, made.directory, made.built)
    for name, changes in WINDOWED.items():
        made = make(folder, PLAIN_ROPE, label=name, **changes)
        give(name, made.directory, made.built)
    in_some_layers = {f"{name}_windows": (name, WINDOWS) for name in ("rope", "tape", "fox")}
    in_all_layers = {"tape_all_windows": ("tape", {"sliding_window": 4})}
    for label, (name, settings) in (in_some_layers | in_all_layers).items():
        made = make(folder, name, label=label, **settings)
        give(made.directory.name, made.directory, made.built)
    for kind, prefix in (("tape", ""), ("rope", "plain_")):
        made = exports[kind]
        yarn = folder / f"{prefix}yarn"
        give(f"{prefix}with_tokenizer", made.directory, made.built)
        shutil.copytree(made.directory, yarn)
        change_config(yarn, {"rope_parameters": YARN, "rope_scaling": None})
        give(yarn.name, yarn, AutoModelForCausalLM.from_pretrained(yarn, trust_remote_code=True))
        assert (expected[f"{prefix}yarn"] - expected[f"{prefix}with_tokenizer"]).abs().max() > 1e-2
    torch.save(expected, folder / "expected.pt")
    rows = [
        ecosystem.__file__,
        streamable["tape"],
        "--only",
        "light",
        "--json",
        folder / "outcomes.json",
    ]
    done = run_in("transformers", folder, "-c", STRANGER, *names, "--", *rows)
    assert (folder / "outcomes.json").exists(), done.stderr[-3000:]
    return json.loads((folder / "outcomes.json").read_text(encoding="utf-8"))


def test_exports_need_only_torch_and_the_oldest_transformers(ran):
    assert configuration_tape.OLDEST_TRANSFORMERS == "5.0.0"
    assert ran["transformers"] == "5.0.0"


def test_the_oldest_transformers_passes_the_light_rows(ran):
    assert ran["rows"].keys() == set(LIGHT)
    expected = {"lora_and_positions": "not installed (peft"}
    expected |= {name: "not installed (accelerate" for name in ("trainer", "offloaded_weights")}
    expected |= {"lm_eval": "not installed (lm_eval, accelerate"}
    found = {name: result for name, result in ran["rows"].items() if result != ecosystem.WORKS}
    assert found.keys() == expected.keys()
    assert all(found[name].startswith(text) for name, text in expected.items()), found


def test_an_older_transformers_is_refused_in_one_sentence(monkeypatch):
    monkeypatch.setattr("transformers.__version__", "4.57.6")
    with pytest.raises(
        ImportError,
        match=f"requires transformers {configuration_tape.OLDEST_TRANSFORMERS} or newer",
    ):
        runpy.run_path(configuration_tape.__file__)
