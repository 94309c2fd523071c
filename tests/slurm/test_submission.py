"""The job scripts refuse invalid arguments and submit valid ones. A fake sbatch replaces Slurm's."""

import os
import shutil
import subprocess
import sys
import venv

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
    """Run a script as a user does; return its exit status, the arguments of sbatch (or None), and its output."""
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
        options = {"cwd": tmp_path, "env": environment | variables, "start_new_session": True}  # it receives SIGNAL
        done = subprocess.run(command, **options, capture_output=True, text=True)
        submitted = tmp_path / "submitted"
        given = submitted.read_text().split("\0")[1:-1] if submitted.exists() else None
        return done.returncode, given, done.stdout + done.stderr

    return run


@pytest.mark.parametrize(
    "script, arguments, message",
    [
        ("pretrain_tape.sh", ["--bad.key", "1"], "bad.key is an unknown key"),
        ("pretrain_tape.sh", ["missing.yaml"], "missing.yaml does not exist"),
        ("run_all.sh", [RECIPE, "--data.prefix=a", "--extend", RECIPE, "--bad.key", "1"], "bad.key is an unknown key"),
    ],
)
def test_invalid_settings_are_refused_before_sbatch(submit, script, arguments, message):
    status, submitted, output = submit(script, *arguments)
    assert (status, submitted) == (2, None) and message in output


def test_valid_commands_are_submitted_and_incomplete_ones_explained(submit, tmp_path):
    assert submit("run_all.sh", RECIPE)[:2] == (1, None) and "--extend RECIPE is missing" in submit("run_all.sh")[2]
    assert "sbatch --array=0-7" in submit("preprocess.sh", "--help")[2]
    for script, arguments in (("pretrain_tape.sh", [RECIPE, "--data.prefix=a"]), ("preprocess.sh", ["--input", "*.x"])):
        assert submit(script, *arguments)[:2] == (0, arguments)
        # An interactive session is a job, too; the new job must not inherit its CPUs and memory.
        session = {"SLURM_JOB_ID": "7", "SLURM_CPU_BIND": "mask_cpu:0x1", "SLURM_MEM_PER_CPU": "100"}
        assert submit(script, *arguments, SLURM_CONF="/etc/slurm.conf", **session)[:2] == (0, arguments)
        inherited = (tmp_path / "environment").read_text().splitlines()
        assert [line for line in inherited if line.startswith("SLURM_")] == ["SLURM_CONF=/etc/slurm.conf"]


@pytest.mark.parametrize(
    "last, count, expected", [(None, 0, ""), (2, 3, " --part 1/3"), (1, 1, "the array does not begin at 0")]
)
def test_each_array_task_preprocesses_one_part(tmp_path, last, count, expected):
    """Slurm runs a copy of the script."""
    script = shutil.copy(REPOSITORY / "slurm" / "preprocess.sh", tmp_path)
    facts = "ArrayJobId=7 ArrayTaskId=1 " if count else ""
    record = f"JobId=7 {facts}JobName=x\n   Command={REPOSITORY}/slurm/preprocess.sh --input x"
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\necho '{record}'\n")
    (tmp_path / "scontrol").chmod(0o755)
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "TAPE_PYTHON": "echo", "SLURM_JOB_ID": "7"}
    # A job that is submitted in a job inherits the number of CPUs of that job's tasks.
    variables |= {"SLURM_CPUS_ON_NODE": "2", "SLURM_CPUS_PER_TASK": "16"}
    if count:
        task = {"ID": 1, "MAX": last, "COUNT": count}
        variables |= {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in task.items()}
    command = ["bash", script, "--input", "a b*"]
    done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True)
    if last == 1:
        assert done.returncode == 1 and expected in done.stderr
    else:
        program = f"{REPOSITORY}/slurm/run_module.py tools.preprocess_data"
        assert done.stdout == f"{program} --workers 2 --input a b*{expected}\n"


@pytest.mark.parametrize("script", ["pretrain_tape.sh", "compare.sh", "evaluate_tape.sh", "run_all.sh"])
def test_a_python_without_the_packages_is_named_with_the_command_that_installs_them(submit, tmp_path, script):
    bare = tmp_path / "bare"
    venv.create(bare, symlinks=True)
    python = bare / "bin" / "python"
    arguments = CHAIN if script == "run_all.sh" else ["--x"]
    status, submitted, output = submit(script, *arguments, TAPE_PYTHON=str(python))
    assert (status, submitted, len(output.splitlines())) == (1, None, 1)
    assert output.startswith(f"error: TAPE_PYTHON is {python}, which lacks the package ")
    assert f"install the packages with {python} -m pip install -r {REPOSITORY}/requirements.txt" in output
    status, _, output = submit(script, *arguments, TAPE_PYTHON=str(python), TAPE_CONTAINER="nice -n 0")
    assert status == 1 and output.startswith(
        f"error: TAPE_PYTHON is {python} in TAPE_CONTAINER (nice -n 0), which lacks"
    )
    assert "in the image, as slurm/apptainer.def does" in output


@pytest.mark.parametrize("option", ["--gpus-per-task=1", "--gpu-bind=single:1", "-n 4", "--ntasks=4", "--gres=gpu:1"])
def test_options_of_srun_that_change_the_tasks_or_their_gpus_are_refused(submit, option):
    arguments = [RECIPE, "--data.prefix=a"]
    status, submitted, output = submit("pretrain_tape.sh", *arguments, TAPE_SRUN_OPTIONS=f"--mpi=none {option}")
    assert (status, submitted) == (1, None)
    assert f"TAPE_SRUN_OPTIONS contains {option.split()[0]}, but the scripts start one task per GPU" in output
    assert submit("pretrain_tape.sh", *arguments, TAPE_SRUN_OPTIONS="--mpi=none --nodelist=a --gpu-freq=low")[0] == 0


CHAIN = [RECIPE, "--data.prefix=a", "--model.position_encoding=rope"]
CHAIN += ["--extend", str(REPOSITORY / "tests" / "recipes" / "extend.yaml"), "--data.prefix=a"]


def test_a_chain_is_submitted_with_the_site_options(submit):
    options = {"TAPE_SBATCH_OPTIONS": "--gpus-per-node=8 --comment='a * b'"}
    status, submitted, output = submit("run_all.sh", "--sbatch", '-A\n"me too"', *CHAIN, **options)
    assert status == 0 and submitted[:4] == ["--gpus-per-node=8", "--comment=a * b", "-A", "me too"], output
    assert "pretraining  job 41, in" in output and "extension    job 42, after 41, in" in output
    assert "scancel" not in output
    status, _, output = submit("run_all.sh", "--sbatch", "--comment='a", *CHAIN)
    assert status == 1 and "error: --sbatch is --comment='a, whose quotes do not match" in output


COMPARISON = ["--recipe", RECIPE, "--encodings", "rope", "--data.prefix=a", "--output=out"]


@pytest.mark.parametrize("script, arguments", [("run_all.sh", CHAIN), ("compare.sh", COMPARISON)])
def test_a_failed_submission_cancels_the_submitted_jobs(submit, script, arguments):
    status, _, output = submit(script, *arguments, FAILS_AT="42")
    assert status == 1 and output.endswith(
        "scancel 41\nerror: not all jobs could be submitted; cancelled those that were: 41\n"
    )
    status, _, output = submit(script, *arguments, FAILS_AT="44", CANCEL_STATUS="1", FAKE_CLUSTER="far")
    assert status == 1 and output.endswith("cancel those that were: scancel --clusters=far 43\n")


def test_an_interrupted_submission_cancels_the_submitted_jobs(submit):
    status, _, output = submit("run_all.sh", *CHAIN, SIGNAL="INT")
    assert status == 130 and "cancelled those that were: 41" in output


@pytest.mark.parametrize(
    "arguments, added",
    [
        ([], None),
        (["--logging.note=a", "--data.prefix", "x --config=y"], None),
        (["a b.yaml", "--data.prefix", "*"], []),
        (["--data.prefix", "`x` $HOME\n'", "--config", "x y"], []),
        (["--config=x"], []),
    ],
)
def test_the_default_recipe_is_added_only_if_none_is_given(arguments, added):
    script = 'source "$1"; ROOT=/r; shift; with_recipe default "$@"; printf "%s\\0" "${ARGUMENTS[@]}"'
    command = ["bash", "-euc", script, "bash", str(REPOSITORY / "slurm" / "common.sh"), *arguments]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")[:-1]
    assert found == (["/r/default"] if added is None else added) + arguments
