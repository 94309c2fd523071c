"""The scripts of `make demo` and `make demo-smollm2`, with few steps, and a small model instead of
the download.
"""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from small_llama import write_llama
from tool_runs import write_lines
from training_cases import rows

from megatron_tape.evaluation.results import read_results
from megatron_tape.evaluation.tasks.perplexity import NATS

REPOSITORY = Path(__file__).parents[2]


def run(script, folder):
    """Run a script for a few steps, with `folder` as the root of the repository."""
    for name in ("megatron_tape", "pretrain", "tools"):
        if not (folder / name).exists():
            (folder / name).symlink_to(REPOSITORY / name)
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["bash", f"pretrain/{script}", "4"]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=850
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-8000:]
    return done.stdout, done.stderr


@pytest.mark.slow
def test_the_demo_makes_its_page_and_skips_finished_steps_when_repeated(tmp_path):
    shown, _ = run("demo.sh", tmp_path)
    demo = tmp_path / "runs" / "demo"
    for name in ("tape", "rope", "tape-1024", "rope-1024"):
        assert 6 < rows(demo / name)[-1]["validation/loss"] < 8.4  # log(4096) is 8.3
    assert "\ndef main(" in shown
    page = (demo / "report.html").read_text()
    for part in ("tape-1024", "perplexity", "tape+increments=signed"):
        assert part in page
    files = [*demo.rglob("*.safetensors"), *(demo / "data").glob("*.*")]
    stamps = {path: path.stat().st_mtime_ns for path in files}
    _, said = run("demo.sh", tmp_path)
    assert said.count("is finished already") == said.count("nothing to do") == 4
    assert "all runs are finished already" in said
    assert {path: path.stat().st_mtime_ns for path in files} == stamps


@pytest.mark.slow
def test_the_smollm2_demo_compares_both_trained_methods(tmp_path):
    files = sorted(
        Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda path: path.stat().st_size
    )
    texts = [path.read_text(encoding="utf-8") for path in files[-40:]]
    demo = tmp_path / "runs" / "demo_smollm2"
    write_llama(demo / "SmolLM2-135M-Instruct", texts)
    (demo / "data").mkdir()
    write_lines(demo / "data" / "stdlib.jsonl", texts)
    run("demo_smollm2.sh", tmp_path)
    losses = set()
    for name in ("SmolLM2-135M-Instruct", "tape", "lora"):
        scores = read_results(demo / "results" / name).tasks["perplexity"].scores
        values = tuple(score.value for score in scores if score.unit == NATS)
        assert len(values) == 3
        assert all(5 < loss < 10 for loss in values)  # log(400) is 6
        losses.add(values)
    assert len(losses) == 3
    assert "SmolLM2" in (demo / "report.html").read_text()
    for method, kind in (("tape", "TapeForCausalLM"), ("lora", "LlamaForCausalLM")):
        config = json.loads((demo / f"{method}-hf" / "config.json").read_text())
        assert config["architectures"] == [kind]
