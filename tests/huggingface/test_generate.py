"""tools/generate.py: the continuation is the model's own, and what goes wrong is one sentence."""

import os
import runpy
import shutil
import sys

import pytest
from conftest import ROOT


@pytest.fixture
def generate(monkeypatch, capsys):
    """Run the tool in this process; returns its exit code, stdout and the last line of stderr."""
    monkeypatch.setattr("signal.signal", lambda *arguments: None)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["generate.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(str(ROOT / "tools" / "generate.py"), run_name="__main__")
        told = capsys.readouterr()
        return stop.value.code, told.out, (told.err.strip().splitlines() or [""])[-1]

    return run


def test_the_likeliest_tokens_follow_the_prompt(exports, generate):
    from transformers import AutoTokenizer

    made = exports["tape"]
    tokenizer = AutoTokenizer.from_pretrained(made.directory, trust_remote_code=True)
    ids = tokenizer("import heapq", return_tensors="pt")["input_ids"]
    expected = made.model.generate(ids, max_new_tokens=9, do_sample=False)[0, ids.shape[1] :]
    arguments = ["--model", made.directory, "--prompt", "import heapq", "--max-new-tokens", "9"]
    code, out, _ = generate(*arguments, "--trust-remote-code")
    assert code == 0 and out == f"import heapq{tokenizer.decode(expected, skip_special_tokens=True)}\n"
    sampled = [generate(*arguments, "--trust-remote-code", "--temperature", "1", "--seed", s)[1] for s in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]


def test_mistakes_are_one_sentence(exports, generate, tmp_path):
    tape = exports["tape"].directory
    for arguments, told in (
        ([tape, "--prompt", "a"], "--trust-remote-code"),
        ([tmp_path, "--prompt", "a"], "no directory with a config.json"),
        ([tape, "--prompt", "", "--trust-remote-code"], "--prompt is empty"),
        ([tape, "--prompt", "a", "--max-new-tokens", "0", "--trust-remote-code"], "--max-new-tokens"),
    ):
        code, out, line = generate("--model", *arguments)
        assert code == 1 and not out and line.startswith("error: ") and told in line
    shutil.copytree(exports["rope"].directory, tmp_path / "broken")
    os.truncate(tmp_path / "broken" / "model.safetensors", 5000)
    code, _, line = generate("--model", tmp_path / "broken", "--prompt", "a")
    assert code == 1 and line.startswith(f"error: {tmp_path / 'broken'} cannot be loaded: ")
