"""Follow docs/your-encoding.md in a copy of the repository, with less text and fewer steps."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "your-encoding.md").read_text(encoding="utf-8")
FEWER = (
    "--train.steps 4 --schedule.warmup_steps 2 --train.eval_interval 0 --model.num_layers 2 "
    "--logging.directory runs/kerple"
)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the repository with the page's file and line."""
    clone = tmp_path_factory.mktemp("clone")
    for folder in ("megatron_tape", "pretrain", "tools"):
        shutil.copytree(ROOT / folder, clone / folder, ignore=shutil.ignore_patterns("__pycache__"))
    file = re.search(r"^Save this as (\S+):\n\n```python\n(.*?)^```", PAGE, re.M | re.S)
    (clone / file[1]).write_text(file[2], encoding="utf-8")
    assert len(file[2].splitlines()) < 100
    registry = clone / "megatron_tape" / "position" / "__init__.py"
    imported, opened, listed = re.search(
        r"^    (from .*)\n\n    (BUILT_IN.*)\n        (\w+,)$", PAGE, re.M
    ).groups()
    text = (
        registry.read_text(encoding="utf-8")
        .replace(f"{imported}\n", "")
        .replace(f"    {listed}\n", "")
    )
    assert text.count(opened) == 1
    text = text.replace(opened, f"{opened}\n    {listed}").replace(
        "from megatron_tape.position.nope", f"{imported}\nfrom megatron_tape.position.nope", 1
    )
    registry.write_text(text, encoding="utf-8")
    data = clone / "runs" / "demo" / "data"
    data.mkdir(parents=True)
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-j]*.py"))
    texts = [source.read_text(encoding="utf-8", errors="replace") for source in sources]
    (data / "stdlib.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return clone


def run(clone, command):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PYTHONPATH": str(clone), "PATH": path}
    return subprocess.run(
        ["bash", "-ec", command],
        cwd=clone,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.slow
def test_every_command_of_the_page_works(copy):
    demo = (ROOT / "docs" / "demo.md").read_text(encoding="utf-8")
    prepare = re.search(r"^(    python tools/train_tokenizer.py.*?)\n\n", demo, re.M | re.S)[1]
    commands = re.search(r"^With the data.*?\n\n((?:    [^\n]*\n)+)", PAGE, re.M | re.S)[1]
    assert commands.count("--logging.directory runs/kerple") == 1
    recipe = re.search(r"^    sed .*\n.*$", PAGE, re.M)[0]
    few = commands.replace("--logging.directory runs/kerple", FEWER)
    found = run(copy, f"{prepare}\n{recipe}\n{few}")
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    code = (copy / "runs" / "kerple-hf" / "position_kerple_tape.py").read_text()
    assert "class KerplePosition" in code
    assert "megatron_tape" not in re.sub(r'""".*?"""', "", code, flags=re.S)
    rest = re.findall(
        r"^    (python (?:tools/convert_checkpoint.py from-hf|-m pretrain.compare) .*)$", PAGE, re.M
    )
    found = run(copy, f"{rest[0]}\n{rest[1]} --check")
    assert found.returncode == 0 and "6 runs, 0 finished, output in " in found.stdout, found.stderr[
        -3000:
    ]
    results = json.loads(
        next((copy / "runs" / "kerple" / "evaluation").rglob("results.json")).read_text()
    )
    assert [score["length"] for score in results["tasks"]["perplexity"]["scores"]]
    refused = run(
        copy,
        "python -m pretrain.train --config pretrain/recipes/tape_demo.yaml"
        " --model.position_encoding kerple --model.position.kerple_start 0",
    )
    assert refused.returncode == 2
    assert "model.position.kerple_start is 0" in refused.stderr
