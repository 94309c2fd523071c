"""`make demo`, cut to a few steps: real text, the data tools, torchrun with two processes, both models before and after
their extension, the summary."""

import json
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def demo(folder):
    command = [sys.executable, "-m", "pretrain.demo", "--directory", str(folder), "--steps", "6"]
    return subprocess.run(command, cwd=REPOSITORY, env=os.environ, capture_output=True, text=True, timeout=600)


def test_the_demo_runs_to_its_summary_and_reuses_what_is_whole(tmp_path):
    first = demo(tmp_path)
    assert first.returncode == 0, first.stdout[-2000:] + first.stderr[-2000:]
    assert "tensorboard --logdir" in first.stdout
    summary = (tmp_path / "summary.md").read_text()
    rows = {line.split("|")[1].strip(): line.split("|") for line in summary.splitlines() if "| 6 |" in line}
    extended = [line.split("|") for line in summary.splitlines() if line.startswith(("| TAPE", "| RoPE"))][2:]
    assert set(rows) == {"TAPE", "RoPE"}
    assert all(6 < float(row[4]) < 8.4 for row in rows.values())  # below the 8.3 nats of 4096 equal pieces
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "tape-hf" / "config.json").read_text())["architectures"] == ["TapeForCausalLM"]
    assert [row[1].strip() for row in extended] == ["TAPE", "RoPE"]
    assert all(6 < float(loss) < 8.4 for row in extended for loss in row[2:6])
    assert all(before != after for row in extended for before, after in (row[2:4], row[4:6]))
    assert (tmp_path / "extended.png").read_bytes().startswith(b"\x89PNG")
    for name, kind in (("tape", "TapeForCausalLM"), ("rope", "LlamaForCausalLM")):
        settings = json.loads((tmp_path / f"{name}-1024-hf" / "config.json").read_text())
        assert settings["architectures"] == [kind] and settings["max_position_embeddings"] == 1024
    continuation = first.stdout.split("a continuation: ")[1].split("\n", 1)[1]
    assert continuation.startswith("def main(") and len(continuation) > 60
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "data").iterdir() if path.is_file()}

    second = demo(tmp_path)
    assert second.returncode == 0
    assert second.stdout.count("exists already") == 3 and second.stderr.count("nothing to do") == 4
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert (tmp_path / "summary.md").read_text() == summary
