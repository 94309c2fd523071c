"""`make demo`: its commands and what it shows; and all of it, cut to a few steps, as one of the slow tests."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_tape.checks.arguments import parse_run_config
from megatron_tape.run.curves import read_run
from pretrain import compare, demo, evaluate
from pretrain.demo_results import BLANKS, COPYING, write_picture, write_summary

REPOSITORY = Path(__file__).parents[2]
SIZES = {"num_layers": 6, "hidden_size": 192, "num_attention_heads": 6, "ffn_hidden_size": 512, "vocab_size": 4096}
PNG = b"\x89PNG"


def test_every_command_is_one_that_its_program_accepts(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    arguments, directory = argparse.Namespace(processes=2, steps=6, directory=Path("elsewhere")), Path("elsewhere")
    stages = [*demo.training(arguments, False), *demo.evaluation(directory, False, quick=True)]
    read = {"pretrain.train": [], "pretrain.extend_context": [], "pretrain.evaluate": [], "pretrain.compare": []}
    for stage in [*stages, demo.copying(directory, 6)]:
        program = next((name for name in read if name in stage.command), None)
        if program is not None:
            read[program].append(stage.command[stage.command.index(program) + 1 :])
    # An extension takes these from the model that it extends.
    base = [text for key, value in SIZES.items() for text in (f"--model.{key}", str(value))]
    trained = [parse_run_config([*given, *base]) for program in list(read)[:2] for given in read[program]]
    assert [config.model.position_encoding for config in trained] == ["tape", "rope"] * 2
    assert {config.data.prefix for config in trained} == {"elsewhere/data/stdlib"}
    extended = trained[2:]
    assert [set(config.extension.trains) - {"tape"} for config in extended] == [{"lora", "embeddings", "norms"}] * 2
    assert [config.model.seq_length for config in extended] == [1024] * 2
    models = [evaluate.read_command(given)[0].model for given in read["pretrain.evaluate"]]
    assert models == [f"elsewhere/{name}" for name in ("tape", "rope", "tape-1024", "rope-1024")]
    (given,) = read["pretrain.compare"]
    assert compare.read_command(given)[0].encodings.split(",") == list(COPYING.values())


def test_the_picture_and_the_summary_show_training_extension_and_copying(tmp_path):
    runs = {}
    for name, loss in (("TAPE", 4.25), ("RoPE", 4.5)):
        rows = [{"step": step, "loss": 5.0, "validation_loss": loss, "tokens_per_second": 9.0} for step in (3, 6)]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        runs[name] = read_run(tmp_path)
    losses = {"before": ([64, 512], [4.0, 6.5]), "after": ([64, 512], [3.75, 3.5])}
    by_position = {when: {name: losses[when] for name in runs} for when in losses}
    copied = {name: {group: place / 4 for group in BLANKS} for place, name in enumerate(COPYING)}
    write_picture(runs, by_position, copied, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(PNG)
    write_summary(runs, by_position, copied, 400, tmp_path / "summary.md")
    lines = (tmp_path / "summary.md").read_text().splitlines()
    assert "| TAPE | 6 | 5.0000 | 4.2500 | 70.11 |" in lines
    assert "| RoPE | 4.0000 | 3.7500 | 6.5000 | 3.5000 |" in lines
    assert "| TAPE, signed increments | 0.750 | 0.750 | 0.750 |" in lines


def run_demo(folder):
    command = [sys.executable, "-m", "pretrain.demo", "--directory", str(folder), "--steps", "6"]
    return subprocess.run(command, cwd=REPOSITORY, env=os.environ, capture_output=True, text=True, timeout=850)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def first(folder):
    return run_demo(folder)


@pytest.mark.slow
def test_the_demo_runs_to_its_summary(first, folder):
    assert first.returncode == 0, first.stdout[-2000:] + first.stderr[-8000:]
    rows = [line.split("|")[1:-1] for line in (folder / "summary.md").read_text().splitlines() if line.startswith("|")]
    rows = [row for row in rows if row[0].strip().startswith(("TAPE", "RoPE"))]
    parts = rows[:2], rows[2:4], rows[4:]
    numbers = [{row[0].strip(): [float(cell.replace(",", "")) for cell in row[1:]] for row in part} for part in parts]
    trained, extended, copied = numbers
    assert all(6 < values[2] < 8.4 for values in trained.values())  # below the 8.3 nats of 4096 equal pieces
    assert all(6 < loss < 8.4 for values in extended.values() for loss in values)
    assert all(values[0] != values[1] and values[2] != values[3] for values in extended.values())
    assert set(trained) == set(extended) == {"TAPE", "RoPE"} and set(copied) == set(COPYING)
    page = (folder / "report.html").read_text()
    for shown in ("TAPE 256", "RoPE 256", "TAPE 1,024", "RoPE 1,024", "perplexity", "tape+position_increments=signed"):
        assert shown in page
    assert (folder / "demo.png").read_bytes().startswith(PNG)
    continuation = first.stdout.split("a continuation: ")[1].split("\n", 1)[1]
    assert continuation.startswith("def main(") and len(continuation) > 60


@pytest.mark.slow
def test_the_demo_reuses_what_is_whole(first, folder):
    stamps = {path: path.stat().st_mtime_ns for path in (folder / "data").iterdir() if path.is_file()}
    summary = (folder / "summary.md").read_text()
    second = run_demo(folder)
    assert second.returncode == 0 and second.stderr.count("is finished already") == 4
    assert second.stdout.count("exists already") == 3 and second.stderr.count("nothing to do") == 4
    assert "all runs are finished already" in second.stderr
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert (folder / "summary.md").read_text() == summary
