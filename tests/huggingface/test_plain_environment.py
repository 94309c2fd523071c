"""Exported models in an environment of torch and the oldest transformers that works, where this project never was."""

import json
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-transformers" / "bin" / "python"

STRANGER = """
import importlib.util, sys
from pathlib import Path

import torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

torch.set_num_threads(1)
for name in ("megatron_tape", "megatron", "pretrain", "deepspeed", "sentencepiece"):
    assert importlib.util.find_spec(name) is None, name
assert transformers.__version__ == sys.argv[1], transformers.__version__
expected = torch.load("expected.pt")
text = Path("text").read_text(encoding="utf-8")
classes = transformers.AutoModelForSequenceClassification
classifier = classes.from_pretrained("classifier", trust_remote_code=True)
with torch.no_grad():
    logits = classifier(torch.tensor(expected["ids"][:96]).view(2, 48)).logits
torch.testing.assert_close(logits, expected["classifier"], atol=1e-5, rtol=0)
for name in ("AutoModelForTokenClassification", "AutoModelForQuestionAnswering"):
    model = getattr(transformers, name).from_pretrained("classifier", trust_remote_code=True)
    assert torch.equal(model.model.norm.weight, classifier.model.norm.weight), name

for name, path in zip(("tape", "rope"), sys.argv[4:]):
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=True)
    ids = tokenizer(text).input_ids
    assert ids == expected["ids"] and tokenizer.decode(ids) == text, name

    model, found = AutoModelForCausalLM.from_pretrained(
        path, trust_remote_code=name == "tape", output_loading_info=True
    )
    assert not any(found[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), found
    with torch.no_grad():
        logits = model(torch.tensor(ids[:96]).view(2, 48)).logits
    torch.testing.assert_close(logits, expected[name], atol=1e-5, rtol=0)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        output = model(torch.tensor(ids[:96]).view(2, 48), output_attentions=True)
    assert len(output.attentions) == 3
    torch.testing.assert_close(output.logits, expected[name], atol=1e-5, rtol=0)
    model.set_attn_implementation("sdpa")
    if name == "tape":
        try:
            raise AssertionError(model.generate_batch([ids[:8]], max_new_tokens=4))
        except NotImplementedError as error:
            assert f"is not supported with transformers {transformers.__version__}" in str(error)

    prompts = tokenizer([text[:20], text[:90]], padding=True, padding_side="left", return_tensors="pt")
    assert not prompts.attention_mask.all()
    options = dict(max_new_tokens=12, min_new_tokens=12, do_sample=False, disable_compile=True)
    generated = model.generate(**prompts, **options, use_cache=False)
    for cache in ("dynamic", "static"):
        assert torch.equal(model.generate(**prompts, **options, cache_implementation=cache), generated), (name, cache)

for name, path in zip(("tape_yarn", "rope_yarn"), sys.argv[2:4]):
    model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)
    with torch.no_grad():
        logits = model(torch.tensor(expected["ids"][:96]).view(2, 48)).logits
    torch.testing.assert_close(logits, expected[name], atol=1e-5, rtol=0)
    assert (logits - expected[name.removesuffix("_yarn")]).abs().max() > 1e-2
"""
YARN = dict(rope_type="yarn", rope_theta=100.0, factor=4.0, original_max_position_embeddings=32)


def with_yarn(exported, folder):
    """Copy an exported model, give the copy yarn, and load it."""
    shutil.copytree(exported, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_parameters": YARN, "rope_scaling": None}))
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)


def test_exports_run_on_torch_and_the_oldest_transformers_alone(exports, source_text, tmp_path):
    from megatron_tape.huggingface.modeling.configuration_tape import OLDEST_TRANSFORMERS

    if not PYTHON.exists():
        pytest.fail(f"{PYTHON.relative_to(ROOT)} does not exist; make it with: make .venv-transformers")
    ids = AutoTokenizer.from_pretrained(exports["tape"].directory, trust_remote_code=True)(source_text).input_ids
    with torch.no_grad():
        models = {name: made.model for name, made in exports.items()}
        models |= {f"{name}_yarn": with_yarn(exports[name].directory, tmp_path / f"{name}_yarn") for name in models}
        expected = {name: model(torch.tensor(ids[:96]).view(2, 48)).logits for name, model in models.items()}
    heads = dict(num_labels=5, pad_token_id=3)
    classifier = AutoModelForSequenceClassification.from_pretrained(
        exports["tape"].directory, trust_remote_code=True, **heads
    )
    classifier.save_pretrained(tmp_path / "classifier")
    with torch.no_grad():
        expected["classifier"] = classifier(torch.tensor(ids[:96]).view(2, 48)).logits
    torch.save(expected | {"ids": ids}, tmp_path / "expected.pt")
    (tmp_path / "text").write_text(source_text, encoding="utf-8")
    done = subprocess.run(
        [
            PYTHON,
            "-c",
            STRANGER,
            OLDEST_TRANSFORMERS,
            "tape_yarn",
            "rope_yarn",
            *(exports[name].directory for name in ("tape", "rope")),
        ],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_an_older_transformers_is_refused_in_one_sentence(monkeypatch):
    import transformers

    from megatron_tape.huggingface.modeling import configuration_tape

    monkeypatch.setattr(transformers, "__version__", "4.57.6")
    with pytest.raises(ImportError, match=f"needs transformers {configuration_tape.OLDEST_TRANSFORMERS} or newer"):
        runpy.run_path(configuration_tape.__file__)
