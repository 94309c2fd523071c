"""`make demo`, cut to a few steps: real text, the data tools, torchrun with two processes, both models before and after
their extension, the summary."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def demo(folder):
    command = [sys.executable, "-m", "pretrain.demo", "--directory", str(folder), "--steps", "6"]
    return subprocess.run(command, cwd=REPOSITORY, env=os.environ, capture_output=True, text=True, timeout=850)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def first(folder):
    return demo(folder)


def test_the_demo_runs_to_its_summary(first, folder):
    assert first.returncode == 0, first.stdout[-2000:] + first.stderr[-2000:]
    assert "tensorboard --logdir" in first.stdout
    summary = (folder / "summary.md").read_text()
    rows = {line.split("|")[1].strip(): line.split("|") for line in summary.splitlines() if "| 6 |" in line}
    extended = [line.split("|") for line in summary.splitlines() if line.startswith(("| TAPE", "| RoPE"))][2:]
    assert set(rows) == {"TAPE", "RoPE"}
    assert all(6 < float(row[4]) < 8.4 for row in rows.values())  # below the 8.3 nats of 4096 equal pieces
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / "tape-hf" / "config.json").read_text())["architectures"] == ["TapeForCausalLM"]
    assert [row[1].strip() for row in extended] == ["TAPE", "RoPE"]
    assert all(6 < float(loss) < 8.4 for row in extended for loss in row[2:6])
    assert all(before != after for row in extended for before, after in (row[2:4], row[4:6]))
    assert (folder / "extended.png").read_bytes().startswith(b"\x89PNG")
    page = (folder / "report.html").read_text()
    assert all(f">{name}<" in page for name in ("TAPE 256", "RoPE 256", "TAPE 1,024", "RoPE 1,024"))
    assert {task for task in ("perplexity", "context_gain", "passkey") if task not in page} == set()
    for name, kind in (("tape", "TapeForCausalLM"), ("rope", "LlamaForCausalLM")):
        settings = json.loads((folder / f"{name}-1024-hf" / "config.json").read_text())
        assert settings["architectures"] == [kind] and settings["max_position_embeddings"] == 1024
    continuation = first.stdout.split("a continuation: ")[1].split("\n", 1)[1]
    assert continuation.startswith("def main(") and len(continuation) > 60


@pytest.mark.slow
def test_the_demo_reuses_what_is_whole(first, folder):
    stamps = {path: path.stat().st_mtime_ns for path in (folder / "data").iterdir() if path.is_file()}
    summary = (folder / "summary.md").read_text()
    second = demo(folder)
    assert second.returncode == 0 and second.stderr.count("is finished already") == 4 * 3
    assert second.stdout.count("exists already") == 3 and second.stderr.count("nothing to do") == 4
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert (folder / "summary.md").read_text() == summary
