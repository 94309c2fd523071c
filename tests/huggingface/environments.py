"""Run scripts in other environments, which do not have this project."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = {"pinned": Path(sys.executable)}
PYTHONS |= {
    name: ROOT / f".venv-{name}" / "bin" / "python"
    for name in ("transformers", "ecosystem", "vllm")
}
"""Environments: the tests' own, the oldest supported transformers, heavy packages, and vLLM."""


def python_of(which):
    if not PYTHONS[which].exists():
        pytest.fail(
            f"{PYTHONS[which].relative_to(ROOT)} does not exist; make it with: make .venv-{which}"
        )
    return PYTHONS[which]


def run_in(which, folder, *command, **variables):
    """Run a Python with these arguments in `folder`, without this process's environment
    variables.
    """
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "HF_HOME": str(folder / "cache"),
    }
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    } | variables
    command = [python_of(which), *map(str, command)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
