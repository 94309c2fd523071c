"""What is refused before sbatch is called; a program of that name stands in for Slurm's."""

import os
import shutil
import subprocess
import sys

import pytest
from cluster import REPOSITORY

RECIPE = str(REPOSITORY / "tests" / "recipes" / "tiny.yaml")


@pytest.fixture
def submit(inputs, tmp_path):
    """Call a script as a user does; return its status, what sbatch was given, if anything, and what was printed."""
    shutil.copytree(inputs / "data", tmp_path, dirs_exist_ok=True)
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >{tmp_path}/submitted\nenv >{tmp_path}/environment\n')
    sbatch.chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "TAPE_"))}
    environment |= {"PATH": f"{sbatch.parent}:{os.environ['PATH']}", "TAPE_PYTHON": sys.executable}

    def run(script, *arguments, **variables):
        command = ["bash", str(REPOSITORY / "slurm" / script), *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment | variables, capture_output=True, text=True)
        submitted = tmp_path / "submitted"
        given = submitted.read_text().splitlines()[1:] if submitted.exists() else None
        return done.returncode, given, done.stdout + done.stderr

    return run


@pytest.mark.parametrize(
    "script, arguments, told",
    [
        ("pretrain_tape.sh", ["--bad.key", "1"], "bad.key is an unknown key"),
        ("pretrain_tape.sh", [RECIPE, "--data.prefix=missing"], "missing"),
        ("pretrain_tape.sh", ["missing.yaml"], "missing.yaml does not exist"),
        ("extend_tape.sh", ["--bad.key", "1"], "bad.key is an unknown key"),
        ("run_all.sh", [RECIPE, "--data.prefix=a", "--extend", RECIPE, "--bad.key", "1"], "bad.key is an unknown key"),
    ],
)
def test_a_mistake_is_refused_before_sbatch_whether_a_recipe_is_named_or_not(submit, script, arguments, told):
    status, submitted, said = submit(script, *arguments)
    assert (status, submitted) == (2, None) and told in said


def test_what_can_run_is_submitted_and_what_is_incomplete_explained(submit, tmp_path):
    assert submit("run_all.sh", RECIPE)[:2] == (1, None) and "--extend RECIPE is missing" in submit("run_all.sh")[2]
    assert "sbatch --array=0-7" in submit("preprocess.sh", "--help")[2]
    for script, arguments in (("pretrain_tape.sh", [RECIPE, "--data.prefix=a"]), ("preprocess.sh", ["--input", "*.x"])):
        assert submit(script, *arguments)[:2] == (0, arguments)
        # A terminal on a node of the cluster is a job, too, whose CPUs and memory are not those of the new one.
        session = {"SLURM_JOB_ID": "7", "SLURM_CPU_BIND": "mask_cpu:0x1", "SLURM_MEM_PER_CPU": "100"}
        assert submit(script, *arguments, SLURM_CONF="/etc/slurm.conf", **session)[:2] == (0, arguments)
        passed_on = (tmp_path / "environment").read_text().splitlines()
        assert [line for line in passed_on if line.startswith("SLURM_")] == ["SLURM_CONF=/etc/slurm.conf"]


def test_a_chain_is_submitted_with_the_options_of_the_site(submit):
    arguments = [RECIPE, "--data.prefix=a", "--model.position_encoding=rope"]
    extended = ["--extend", str(REPOSITORY / "tests" / "recipes" / "extend.yaml"), "--data.prefix=a"]
    status, submitted, said = submit("run_all.sh", *arguments, *extended, TAPE_SBATCH_OPTIONS="--gpus-per-node=8 -A me")
    assert status == 0 and submitted[:3] == ["--gpus-per-node=8", "-A", "me"], said
