"""Logits of vLLM, which runs in its own environment."""

import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from conversions import change_config
from environments import ROOT, python_of, run_in
from exported_models import OWN_CLASSES, PLAIN_ROPE, make
from models import LLAMA3

from megatron_tape.errors import UserError
from megatron_tape.huggingface.verification import vllm_engine
from megatron_tape.huggingface.verification.logits_file import read_logits, write_tokens
from megatron_tape.huggingface.verification.sequences import every_token
from megatron_tape.huggingface.verification.vllm_engine import find_python, run_vllm

LENGTH = 128
# vLLM pads these 400 rows of the vocabulary to 448.
SIZES = dict(num_layers=3, hidden_size=192, ffn_hidden_size=256, num_attention_heads=6)
SIZES |= dict(num_query_groups=3, vocab_size=400, unpadded_vocab_size=400, seq_length=LENGTH)
SIZES |= dict(init_std=0.06)
MODELS = {
    "llama": (PLAIN_ROPE, LLAMA3),
    "qwen3": (PLAIN_ROPE, dict(qk_norm=True)),
    "tape": (OWN_CLASSES, dict(mlp_size=24)),
}


def run_verify(*words):
    """Run tools/verify.py in this process, and return its status."""
    sys.path.insert(0, str(ROOT / "tools"))
    import verify

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(sys, "argv", ["verify.py", *map(str, words)])
        return verify.main()


@torch.no_grad()
def logits_of(model, sequence, positions):
    return model(sequence.ids[None]).logits[0, positions].float()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", MODELS)
def test_vllm_computes_the_logits_of_transformers(name, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    kind, changes = MODELS[name]
    exported = make(tmp_path, kind, label=name, **SIZES | changes)
    # vLLM has no positions from LENGTH on.
    sequence = every_token([0, LENGTH // 2, LENGTH - 1, LENGTH, 2 * LENGTH], SIZES["vocab_size"])
    python = python_of("vllm")

    logits, positions = run_vllm(python, exported.directory, sequence, torch.float32)
    assert positions == [0, LENGTH // 2, LENGTH - 1]
    expected = logits_of(exported.loaded, sequence, positions)
    assert list(logits) == ["alone", "together"]
    for found in logits.values():
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)

    logits, positions = run_vllm(python, exported.directory, sequence, torch.bfloat16)
    rounded = logits_of(exported.loaded.bfloat16(), sequence, positions)
    allowed = 2 * (rounded - expected).abs().max()
    for found in logits.values():
        assert 0 < (found - expected).abs().max() < allowed


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_script_alone_writes_a_file_of_logits(tmp_path):
    exported = make(tmp_path, PLAIN_ROPE, **SIZES)
    tokens = tmp_path / "tokens.npz"
    output = tmp_path / "logits.npz"
    sequence = every_token([0, 64, 90, LENGTH - 1], SIZES["vocab_size"])
    write_tokens(tokens, sequence)
    command = [vllm_engine._SCRIPT, exported.directory, tokens, output, "--max-model-len", 100]
    done = run_in("vllm", tmp_path, *command)
    assert done.returncode == 0, done.stderr[-3000:]

    read, logits, normalized = read_logits(output, SIZES["vocab_size"])
    assert read.compared_positions == [0, 64, 90]
    assert not normalized
    expected = logits_of(exported.loaded, sequence, [0, 64, 90])
    torch.testing.assert_close(logits.float(), expected, atol=1e-4, rtol=0)
    # The first step has the first prompt and 63 tokens of the second one. In the second step, the
    # third prompt reads two blocks of the second one from the cache.
    assert np.load(output)["cached_tokens"].tolist() == [0, 0, 64]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_vllm_without_the_plug_in_asks_for_it(exports, monkeypatch):
    monkeypatch.setattr(vllm_engine, "_PLUG_IN", Path("missing"))
    with pytest.raises(UserError, match="does not know the architecture TapeForCausalLM; .*pip"):
        run_vllm(python_of("vllm"), exports["tape"].directory, every_token([1], 400), torch.float32)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_program_compares_vllm_and_names_a_fault(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    made = make(tmp_path, PLAIN_ROPE, label="llama", **SIZES | {"rope_theta": 5000.0})
    words = [made.directory, "--against", made.checkpoint, "--engine", "vllm", "--precision"]
    assert run_verify(*words, "fp32", "bf16") == 0
    out = capsys.readouterr().out
    for check in ("alone, fp32", "together, fp32", "alone, bf16", "together, bf16"):
        assert check in out
    assert "vLLM serves no positions after 127" in out

    theta = {"rope_type": "default", "rope_theta": 10000.0}
    change_config(made.directory, {"rope_theta": 10000.0, "rope_parameters": theta})
    assert run_verify(*words, "fp32") == 1
    out = capsys.readouterr().out
    assert "the base of its frequencies is 10,000 instead of 5,000" in out


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_plug_in_refuses_changed_positions(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    made = make(tmp_path, OWN_CLASSES, label="tape", **SIZES)
    theta = {"rope_type": "default", "rope_theta": 5000.0}
    change_config(made.directory, {"rope_parameters": theta})
    with pytest.raises(UserError, match="positions.json"):
        run_vllm(python_of("vllm"), made.directory, every_token([1], 400), torch.float32)


def test_the_copied_plug_in_is_the_package(package_site, tmp_path):
    site = vllm_engine._copy_plug_in(tmp_path / "site")

    def contents(folder):
        # Another test may have imported the package.
        return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    expected = contents(package_site / "transformers_tape")
    assert contents(site / "transformers_tape") == expected

    metadata = tomllib.loads((ROOT / "transformers_tape/pyproject.toml").read_text("utf-8"))
    ((group, entries),) = metadata["project"]["entry-points"].items()
    lines = [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (entry_points,) = site.glob("*.dist-info/entry_points.txt")
    assert entry_points.read_text("utf-8").splitlines() == lines


def test_the_python_with_vllm_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_engine, "ROOT", tmp_path / "repository")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(vllm_engine.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="make .venv-vllm.*--engine-python"):
        find_python(None)
    with pytest.raises(UserError, match="missing does not exist"):
        find_python(Path("missing"))

    monkeypatch.setattr(vllm_engine.importlib.util, "find_spec", lambda name: name == "vllm")
    assert find_python(None) == Path(sys.executable)
    for folder in (tmp_path, tmp_path / "repository"):
        python = folder / ".venv-vllm" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.touch()
        assert find_python(None) == python
    assert find_python(Path(sys.executable)) == Path(sys.executable)


@pytest.fixture
def fake_vllm(tmp_path):
    """Return a function that makes a Python that runs a shell script instead of vLLM's."""

    def make_python(script):
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
        return python

    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return make_python


@pytest.mark.parametrize(
    "script, problem",
    [
        ("echo 'error: no memory' >&2; echo warning >&2; exit 1", "failed in vLLM: no memory$"),
        ("echo 'No module named vllm' >&2; echo >&2; exit 1", "vLLM: No module named vllm$"),
        ("exit 3", "vLLM: exit status 3$"),
        ("kill -SEGV $$", "vLLM: it was ended by SIGSEGV$"),
    ],
)
def test_a_failure_of_vllm_is_named(script, problem, fake_vllm, tmp_path):
    with pytest.raises(UserError, match=problem):
        run_vllm(fake_vllm(script), tmp_path, every_token([1], 8), torch.float32)


def test_the_script_gets_the_tokens(fake_vllm, tmp_path):
    python = fake_vllm(f'cp "$3" "{tmp_path}/copied.npz"; echo "$6" >&2; exit 1')
    sequence = every_token([0, 3], 8)
    with pytest.raises(UserError, match="bfloat16$"):
        run_vllm(python, tmp_path, sequence, torch.bfloat16)
    with np.load(tmp_path / "copied.npz") as archive:
        assert archive["tokens"].tolist() == sequence.ids.tolist()
        assert archive["positions"].tolist() == [0, 3]
