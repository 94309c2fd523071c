"""Exported models in an environment of torch and the oldest transformers that works, where this project never was."""

import runpy
import shutil

import pytest
import torch
from conversions import change_config
from environments import run_in
from exported_models import NAMES, OWN_CLASSES
from models import random_tokens
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_tape.huggingface.modeling import configuration_tape

STRANGER = """
import importlib.util, sys
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
    for name in sys.argv[1:]:
        load = lambda path: AutoModelForCausalLM.from_pretrained(
            path, trust_remote_code=not name.startswith("plain_"), output_loading_info=True
        )
        model, found = load(name)
        assert not any(found[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), found
        torch.testing.assert_close(model(ids).logits, expected[name], **close, msg=name)
        model.set_attn_implementation("eager")
        output = model(ids, output_attentions=True)
        assert len(output.attentions) == 3
        torch.testing.assert_close(output.logits, expected[name], **close, msg=name)
        model.set_attn_implementation("sdpa")
        options = dict(attention_mask=mask, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)
        cached = [{}] if "Encoded" in type(model).__name__ else [{}, {"cache_implementation": "static"}]
        for more in ({}, {"num_beams": 2}):
            without = model.generate(ids[:, :8], use_cache=False, **options, **more)
            for way in cached:
                assert torch.equal(model.generate(ids[:, :8], disable_compile=True, **options, **more, **way), without)
        model.save_pretrained(f"again/{name}-saved")
        again, _ = load(f"again/{name}-saved")
        assert torch.equal(again(ids).logits, model(ids).logits), name
for name in ("with_tokenizer", "plain_with_tokenizer"):
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
    assert tokenizer(text).input_ids == expected["pieces"] and tokenizer.decode(expected["pieces"]) == text, name
print(transformers.__version__)
"""
YARN = dict(rope_type="yarn", rope_theta=100.0, factor=4.0, original_max_position_embeddings=32)


def test_exports_run_on_torch_and_the_oldest_transformers_alone(exported, exports, source_text, tmp_path):
    """Of every encoding, where transformers copies only files that it finds itself."""
    ids, names = random_tokens(), []
    tokenizer = AutoTokenizer.from_pretrained(exports["tape"].directory, trust_remote_code=True)
    expected = {"ids": ids, "text": source_text, "pieces": tokenizer(source_text).input_ids}

    def give(name, directory, model):
        names.append(name)
        if directory.parent != tmp_path:
            shutil.copytree(directory, tmp_path / name)
        with torch.no_grad():
            logits = model(ids)
        expected[name] = logits if torch.is_tensor(logits) else logits.logits

    for made in map(exported, (*NAMES, OWN_CLASSES)):
        give(made.directory.name, made.directory, made.built)
    for kind, prefix in (("tape", ""), ("rope", "plain_")):
        made, yarn = exports[kind], tmp_path / f"{prefix}yarn"
        give(f"{prefix}with_tokenizer", made.directory, made.built)
        shutil.copytree(made.directory, yarn)
        change_config(yarn, {"rope_parameters": YARN, "rope_scaling": None})
        give(yarn.name, yarn, AutoModelForCausalLM.from_pretrained(yarn, trust_remote_code=True))
        assert (expected[f"{prefix}yarn"] - expected[f"{prefix}with_tokenizer"]).abs().max() > 1e-2
    torch.save(expected, tmp_path / "expected.pt")
    done = run_in("transformers", tmp_path, "-c", STRANGER, *names)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == configuration_tape.OLDEST_TRANSFORMERS == "5.0.0"


def test_an_older_transformers_is_refused_in_one_sentence(monkeypatch):
    monkeypatch.setattr("transformers.__version__", "4.57.6")
    with pytest.raises(ImportError, match=f"needs transformers {configuration_tape.OLDEST_TRANSFORMERS} or newer"):
        runpy.run_path(configuration_tape.__file__)
