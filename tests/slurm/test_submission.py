"""What is refused before sbatch is called; a program of that name stands in for Slurm's."""

import os
import shutil
import subprocess
import sys

import pytest
from cluster import REPOSITORY

SBATCH = """#!/bin/bash
[ -z "${SIGNAL:-}" ] || kill -"$SIGNAL" 0
number=$(cat $FOLDER/number 2>/dev/null || echo 41)
echo $((number + 1)) >$FOLDER/number
printf "%s\\0" "$@" >$FOLDER/submitted
env >$FOLDER/environment
[ $number != "${FAILS_AT:-}" ] && echo "$number${FAKE_CLUSTER:+;$FAKE_CLUSTER}"
"""
RECIPE = str(REPOSITORY / "tests" / "recipes" / "tiny.yaml")


@pytest.fixture
def submit(inputs, tmp_path):
    """Call a script as a user does; return its status, what sbatch was given, if anything, and what was printed."""
    shutil.copytree(inputs / "data", tmp_path, dirs_exist_ok=True)
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(SBATCH)
    sbatch.chmod(0o755)
    scancel = sbatch.with_name("scancel")
    scancel.write_text('#!/bin/sh\necho scancel "$@"; exit "${CANCEL_STATUS:-0}"\n')
    scancel.chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "TAPE_"))}
    environment |= {
        "FOLDER": str(tmp_path),
        "PATH": f"{sbatch.parent}:{os.environ['PATH']}",
        "TAPE_PYTHON": sys.executable,
    }

    def run(script, *arguments, **variables):
        command = ["bash", str(REPOSITORY / "slurm" / script), *arguments]
        options = {"cwd": tmp_path, "env": environment | variables, "start_new_session": True}  # which gets SIGNAL
        done = subprocess.run(command, **options, capture_output=True, text=True)
        submitted = tmp_path / "submitted"
        given = submitted.read_text().split("\0")[1:-1] if submitted.exists() else None
        return done.returncode, given, done.stdout + done.stderr

    return run


@pytest.mark.parametrize(
    "script, arguments, told",
    [
        ("pretrain_tape.sh", ["--bad.key", "1"], "bad.key is an unknown key"),
        ("pretrain_tape.sh", ["missing.yaml"], "missing.yaml does not exist"),
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


@pytest.mark.parametrize(
    "last, count, told", [(None, 0, ""), (2, 3, " --part 1/3"), (1, 1, "the array does not begin at 0")]
)
def test_tasks_of_an_array_preprocess_a_part_each(tmp_path, last, count, told):
    """Slurm runs a copy of the script."""
    script = shutil.copy(REPOSITORY / "slurm" / "preprocess.sh", tmp_path)
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "   Command={REPOSITORY}/slurm/preprocess.sh --input x"\n')
    (tmp_path / "scontrol").chmod(0o755)
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "TAPE_PYTHON": "echo", "SLURM_JOB_ID": "7"}
    variables |= {"SLURM_CPUS_ON_NODE": "2"}
    if count:
        task = {"ID": 1, "MAX": last, "COUNT": count}
        variables |= {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in task.items()}
    command = ["bash", script, "--input", "a b*"]
    done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True)
    if last == 1:
        assert done.returncode == 1 and told in done.stderr
    else:
        assert done.stdout == f"{REPOSITORY}/tools/preprocess_data.py --workers 2 --input a b*{told}\n"


CHAIN = [RECIPE, "--data.prefix=a", "--model.position_encoding=rope"]
CHAIN += ["--extend", str(REPOSITORY / "tests" / "recipes" / "extend.yaml"), "--data.prefix=a"]


def test_a_chain_is_submitted_with_the_options_of_the_site(submit):
    options = {"TAPE_SBATCH_OPTIONS": "--gpus-per-node=8 --comment='a * b'"}
    status, submitted, said = submit("run_all.sh", "--sbatch", '-A\n"me too"', *CHAIN, **options)
    assert status == 0 and submitted[:4] == ["--gpus-per-node=8", "--comment=a * b", "-A", "me too"], said
    assert "pretraining  job 41, in" in said and "extension    job 42, after 41, in" in said and "scancel" not in said
    status, _, said = submit("run_all.sh", "--sbatch", "--comment='a", *CHAIN)
    assert status == 1 and "error: --sbatch is --comment='a, whose quotes do not match" in said


COMPARISON = ["--recipe", RECIPE, "--encodings", "rope", "--data.prefix=a", "--output=out"]


@pytest.mark.parametrize("script, arguments", [("run_all.sh", CHAIN), ("compare.sh", COMPARISON)])
def test_jobs_of_a_submission_that_fails_half_way_are_cancelled(submit, script, arguments):
    status, _, said = submit(script, *arguments, FAILS_AT="42")
    assert status == 1 and said.endswith(
        "scancel 41\nerror: not all jobs were submitted; those that were (41) have been cancelled\n"
    )
    status, _, said = submit(script, *arguments, FAILS_AT="44", CANCEL_STATUS="1", FAKE_CLUSTER="far")
    assert status == 1 and said.endswith("cancel those that were with: scancel --clusters=far 43\n")


def test_jobs_of_an_interrupted_submission_are_cancelled(submit):
    ended, _, said = submit("run_all.sh", *CHAIN, SIGNAL="INT")
    assert ended == 130 and "those that were (41) have been cancelled" in said


@pytest.mark.parametrize(
    "arguments, given",
    [
        ([], None),
        (["--logging.note=a", "--data.prefix", "x --config=y"], None),
        (["a b.yaml", "--data.prefix", "*"], []),
        (["--data.prefix", "`x` $HOME\n'", "--config", "x y"], []),
        (["--config=x"], []),
    ],
)
def test_the_default_recipe_is_left_out_only_where_one_is_named(arguments, given):
    script = 'source "$1"; ROOT=/r; shift; with_recipe default "$@"; printf "%s\\0" "${ARGUMENTS[@]}"'
    command = ["bash", "-euc", script, "bash", str(REPOSITORY / "slurm" / "common.sh"), *arguments]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")[:-1]
    assert found == (["/r/default"] if given is None else given) + arguments
