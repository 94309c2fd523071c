"""The script of `make demo-smollm2`, with few steps, and a small model instead of the download."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from small_llama import write_llama
from tool_runs import write_lines

from megatron_tape.evaluation.results import read_results
from megatron_tape.evaluation.tasks.perplexity import NATS

REPOSITORY = Path(__file__).parents[2]


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
    for name in ("megatron_tape", "pretrain", "tools"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "pretrain/demo_smollm2.sh", "4"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-8000:]

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
