"""What is refused before sbatch is called; a program of that name stands in for Slurm's."""

import os
import subprocess
import sys

import pytest
from cluster import REPOSITORY
from datasets_for_tests import write_all

RECIPE = str(REPOSITORY / "tests" / "recipes" / "tiny.yaml")


@pytest.fixture
def submit(tmp_path):
    """Call a script as a user does; return its status, whether it called sbatch, and what it printed."""
    write_all(tmp_path)
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >{tmp_path}/submitted\n')
    sbatch.chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "TAPE_"))}
    environment |= {"PATH": f"{sbatch.parent}:{os.environ['PATH']}", "TAPE_PYTHON": sys.executable}

    def run(script, *arguments):
        command = ["bash", str(REPOSITORY / "slurm" / script), *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        return done.returncode, (tmp_path / "submitted").exists(), done.stderr

    return run


@pytest.mark.parametrize(
    "script, arguments, told",
    [
        ("pretrain_tape.sh", ["--bad.key", "1"], "bad.key is an unknown key"),
        ("pretrain_tape.sh", [RECIPE, "--bad.key", "1"], "bad.key is an unknown key"),
        ("pretrain_tape.sh", ["--train.steps", "0"], "train.steps is 0"),
        ("pretrain_tape.sh", [RECIPE, "--data.prefix=missing"], "missing"),
        ("pretrain_tape.sh", ["missing.yaml"], "missing.yaml does not exist"),
        ("extend_tape.sh", ["--bad.key", "1"], "bad.key is an unknown key"),
    ],
)
def test_a_mistake_is_refused_before_sbatch_whether_a_recipe_is_named_or_not(submit, script, arguments, told):
    status, submitted, error = submit(script, *arguments)
    assert (status, submitted) == (2, False) and told in error


def test_what_can_run_is_submitted(submit):
    assert submit("pretrain_tape.sh", RECIPE, "--data.prefix=a")[:2] == (0, True)
