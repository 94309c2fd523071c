"""The job scripts refuse invalid arguments and submit valid ones. A fake sbatch replaces
Slurm's.
"""

import os
import shlex
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
TRAINING = [RECIPE, "--data.prefix=a"]
EXTENSION = [str(REPOSITORY / "tests" / "recipes" / "extend.yaml"), "--data.prefix=a"]
CHAIN = [*TRAINING, "--model.position_encoding=rope", "--extend", *EXTENSION]
COMPARISON = ["--recipe", RECIPE, "--encodings", "rope", "--data.prefix=a", "--output=out"]


@pytest.fixture
def submit(inputs, tmp_path):
    """Run a script as a user does; return its exit status, the arguments of sbatch (or None), and
    its output.
    """
    shutil.copytree(inputs / "data", tmp_path, dirs_exist_ok=True)
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(SBATCH)
    sbatch.chmod(0o755)
    scancel = sbatch.with_name("scancel")
    scancel.write_text('#!/bin/sh\necho scancel "$@"; exit "${CANCEL_STATUS:-0}"\n')
    scancel.chmod(0o755)
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "TAPE_"))
    }
    environment |= {
        "FOLDER": str(tmp_path),
        "PATH": f"{sbatch.parent}:{os.environ['PATH']}",
        "TAPE_PYTHON": sys.executable,
    }

    def run(script, *arguments, **variables):
        command = ["bash", str(REPOSITORY / "slurm" / script), *arguments]
        options = {
            "cwd": tmp_path,
            "env": environment | variables,
            "start_new_session": True,
        }  # it receives SIGNAL
        done = subprocess.run(command, **options, capture_output=True, text=True)
        submitted = tmp_path / "submitted"
        if submitted.exists():
            given = submitted.read_text().split("\0")[1:-1]
        else:
            given = None
        return done.returncode, given, done.stdout + done.stderr

    return run


@pytest.mark.parametrize(
    "script, arguments, message",
    [
        ("pretrain_tape.sh", ["--bad.key", "1"], "bad.key is an unknown key"),
        ("pretrain_tape.sh", ["missing.yaml"], "missing.yaml does not exist"),
        (
            "run_all.sh",
            [*TRAINING, "--extend", RECIPE, "--bad.key", "1"],
            "bad.key is an unknown key",
        ),
        ("run_all.sh", [*TRAINING, "--evaluate", "perplexity"], "perplexity.data"),
    ],
)
def test_invalid_settings_are_refused_before_sbatch(submit, script, arguments, message):
    status, submitted, output = submit(script, *arguments)
    assert (status, submitted) == (2, None) and message in output


def test_valid_commands_are_submitted_without_the_variables_of_a_session(
    submit, tmp_path, run_tool
):
    (tmp_path / "text.jsonl").write_text('{"text": "some words in a line"}\n' * 50)
    run_tool(
        "train_tokenizer",
        "--input",
        tmp_path / "*.jsonl",
        "--vocab-size",
        "280",
        "--output",
        tmp_path / "t.model",
    )
    preprocess = ["--input", "*.jsonl", "--tokenizer", "t.model", "--output-prefix", "out"]
    # An interactive session is a job, too; the new job must not inherit its CPUs and memory.
    session = {"SLURM_JOB_ID": "7", "SLURM_CPU_BIND": "mask_cpu:0x1", "SLURM_MEM_PER_CPU": "100"}
    for script, arguments in (("pretrain_tape.sh", TRAINING), ("preprocess.sh", preprocess)):
        # These lead sbatch to the cluster.
        client = {
            "SLURM_CONF_SERVER": "head",
            "SLURM_SACK_SOCKET": "/run/sack",
            "SLURM_CLUSTERS": "far",
        }
        assert submit(script, *arguments, **client, **session)[:2] == (0, arguments)
        inherited = (tmp_path / "environment").read_text().splitlines()
        kept = {line for line in inherited if line.startswith("SLURM_")}
        assert kept == {f"{name}={value}" for name, value in client.items()}
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    "script", ["pretrain_tape.sh", "extend_tape.sh", "evaluate_tape.sh", "preprocess.sh"]
)
def test_every_job_script_takes_options_of_sbatch_and_shows_what_it_would_submit(
    submit, tmp_path, script
):
    # A Python that accepts all settings.
    site = {
        "TAPE_PYTHON": "true",
        "TAPE_SBATCH_OPTIONS": "--gpus-per-node=8",
        "SBATCH_ACCOUNT": "my group",
    }
    options = ["--sbatch", "--nodes=4 --comment='a b'"]
    expected = ["--nodes=4", "--comment=a b", f"{REPOSITORY}/slurm/{script}", "x y", "--z"]
    if script != "preprocess.sh":
        expected.insert(0, "--gpus-per-node=8")
    # The options may be anywhere in the command.
    status, submitted, output = submit(script, "x y", *options, "--z", "--dry-run", **site)
    assert (status, submitted) == (0, None), output
    assert shlex.split(output) == ["SBATCH_ACCOUNT=my group", "sbatch", *expected]
    for given in (options, ["=".join(options)]):
        status, _, output = submit(script, *given, "x y", "--z", **site)
        assert status == 0, output
        assert (tmp_path / "submitted").read_text().split("\0")[:-1] == expected


def test_a_dry_run_of_several_jobs_prints_their_commands(submit):
    status, submitted, output = submit("run_all.sh", *CHAIN, "--dry-run")
    assert (status, submitted) == (0, None)
    lines = output.splitlines()
    assert [line.split()[:2] for line in lines[1::2]] == [
        ["pretraining", "job"],
        ["extension", "job"],
    ]
    assert "--dependency=afterok:JOB1" in lines[2].split() and lines[3].startswith(
        "extension    job JOB2, after JOB1, in"
    )
    site = {"TAPE_SBATCH_OPTIONS": "--gpus-per-node=8"}
    status, submitted, output = submit(
        "compare.sh", "--dry-run", "--sbatch", "--gpus=1", *COMPARISON, **site
    )
    assert (status, submitted) == (0, None)
    commands = [line.split() for line in output.splitlines() if line.startswith("sbatch")]
    assert (
        commands[0][1:3] == ["--gpus=1", "--array=0-2"]
        and commands[1][1] == "--dependency=afterany:JOB1"
    )


@pytest.mark.parametrize(
    "script",
    [
        "pretrain_tape.sh",
        "extend_tape.sh",
        "evaluate_tape.sh",
        "compare.sh",
        "preprocess.sh",
        "run_all.sh",
    ],
)
def test_options_that_print_something_submit_no_job(submit, script):
    site = {"TAPE_PYTHON": "true"}
    status, submitted, output = submit(script, RECIPE, "--evaluate", "passkey", "--help", **site)
    assert (status, submitted) == (0, None)
    assert f"slurm/{script} [--sbatch" in output
    for option in ("--print_config", "--version", "--check"):
        status, submitted, output = submit(script, RECIPE, "--evaluate", "passkey", option, **site)
        assert (status, submitted) == (1, None)
        assert output.startswith(f"error: {option} makes the program exit before it does any work")


@pytest.mark.parametrize("script", ["pretrain_tape.sh", "preprocess.sh", "run_all.sh"])
@pytest.mark.parametrize(
    "given, shown",
    [
        (["--nodes=4"], "--nodes=4"),
        (["-N", "4"], "-N 4"),
        (["-N4"], "-N4"),
        (["--exclusive"], "--exclusive"),
    ],
)
def test_an_option_of_sbatch_that_is_given_to_a_script_is_answered_with_the_right_command(
    submit, script, given, shown
):
    status, submitted, output = submit(script, RECIPE, *given)
    path = REPOSITORY / "slurm" / script
    assert (status, submitted) == (1, None)
    assert output.startswith(f"error: {given[0]} is an option of sbatch, not of the script; run  ")
    assert output.endswith(f'{path} --sbatch "{shown}" ...\n')
    assert (f"sbatch {shown} {path} ...  or " in output) == (script != "run_all.sh")


@pytest.mark.parametrize(
    "name", ["TAPE_SBATCH_OPTIONS", "TAPE_SRUN_OPTIONS", "TAPE_PREFLIGHT_OPTIONS"]
)
def test_options_of_the_site_must_begin_with_an_option(submit, name):
    status, submitted, output = submit("pretrain_tape.sh", *TRAINING, **{name: "nodes=4 --x"})
    assert (status, submitted) == (1, None)
    assert output.startswith(f"error: {name} is nodes=4 --x, whose first word is no option; ")


def test_the_parts_of_a_chain_must_be_in_order(submit):
    evaluation = ["--evaluate", "perplexity"]
    extension = ["--extend", *EXTENSION]
    for parts in (evaluation + extension, evaluation + evaluation, extension + extension):
        status, submitted, output = submit("run_all.sh", *TRAINING, *parts)
        assert (status, submitted) == (1, None)
        assert "give --extend at most once, and then --evaluate at most once" in output


def test_the_limit_of_an_array_may_stand_anywhere(submit):
    for arguments in (["--at-once", "2", *COMPARISON], [*COMPARISON, "--at-once", "2"]):
        status, _, output = submit("compare.sh", "--dry-run", *arguments)
        assert status == 0 and "sbatch --array=0-2%2 " in output
        assert "--at-once" not in output

    status, submitted, output = submit("compare.sh", *COMPARISON, "--at-once")
    assert (status, submitted) == (1, None) and "error: --at-once is ''" in output


def test_preprocessing_is_refused_without_input(submit):
    status, submitted, output = submit(
        "preprocess.sh", "--input", "*.x", "--tokenizer", "t", "--output-prefix", "out"
    )
    assert (status, submitted) == (2, None) and "error: *.x matches no file (--input)" in output
    status, submitted, output = submit("preprocess.sh")
    assert (
        (status, submitted) == (0, None)
        and "sbatch --array=0-7" in output
        and "#SBATCH" not in output
    )


def test_variables_of_the_environment_override_the_site_file(tmp_path):
    (tmp_path / "slurm").mkdir()
    site = (
        "TAPE_SCRATCH=/site\nTAPE_SRUN_OPTIONS=--mpi=none\nTAPE_CONTAINER='x"
        " y'\nTAPE_PYTHON=python3\n"
    )
    (tmp_path / "slurm" / "site.env").write_text(site)
    script = 'source "$1"; load_site "$2"; echo "$TAPE_SCRATCH|$TAPE_SRUN_OPTIONS|${#container[@]}"'
    command = [
        "bash",
        "-euc",
        script,
        "bash",
        str(REPOSITORY / "slurm" / "common.sh"),
        str(tmp_path),
    ]
    environment = {
        "PATH": os.environ["PATH"],
        "TAPE_SCRATCH": "/mine",
        "TAPE_CONTAINER": "",
        "TAPE_PYTHON": "python3",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "/mine|--mpi=none|0\n"
    assert (
        "TAPE_SCRATCH is '/mine' from the environment, not '/site' from slurm/site.env"
        in done.stderr
    )
    assert "TAPE_PYTHON" not in done.stderr and "TAPE_SRUN_OPTIONS" not in done.stderr


@pytest.mark.parametrize(
    "last, count, expected",
    [(None, 0, ""), (2, 3, " --part 1/3"), (1, 1, "the array does not begin at 0")],
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


@pytest.mark.parametrize(
    "script", ["pretrain_tape.sh", "compare.sh", "evaluate_tape.sh", "run_all.sh"]
)
def test_a_python_without_the_packages_is_named_with_the_command_that_installs_them(
    submit, tmp_path, script
):
    bare = tmp_path / "bare"
    venv.create(bare, symlinks=True)
    python = bare / "bin" / "python"
    arguments = CHAIN if script == "run_all.sh" else ["--x"]
    status, submitted, output = submit(script, *arguments, TAPE_PYTHON=str(python))
    assert (status, submitted, len(output.splitlines())) == (1, None, 1)
    assert output.startswith(f"error: TAPE_PYTHON is {python}, which lacks the package ")
    assert (
        f"install the packages with {python} -m pip install -r {REPOSITORY}/requirements.txt"
        in output
    )
    status, _, output = submit(
        script, *arguments, TAPE_PYTHON=str(python), TAPE_CONTAINER="nice -n 0"
    )
    assert status == 1 and output.startswith(
        f"error: TAPE_PYTHON is {python} in TAPE_CONTAINER (nice -n 0), which lacks"
    )
    assert "in the image, as slurm/apptainer.def does" in output


@pytest.mark.parametrize(
    "option", ["--gpus-per-task=1", "--gpu-bind=single:1", "-n 4", "--ntasks=4", "--gres=gpu:1"]
)
def test_options_of_srun_that_change_the_tasks_or_their_gpus_are_refused(submit, option):
    arguments = [RECIPE, "--data.prefix=a"]
    status, submitted, output = submit(
        "pretrain_tape.sh", *arguments, TAPE_SRUN_OPTIONS=f"--mpi=none {option}"
    )
    assert (status, submitted) == (1, None)
    assert (
        f"TAPE_SRUN_OPTIONS contains {option.split()[0]}, but the scripts start one task per GPU"
        in output
    )
    assert (
        submit(
            "pretrain_tape.sh",
            *arguments,
            TAPE_SRUN_OPTIONS="--mpi=none --nodelist=a --gpu-freq=low",
        )[0]
        == 0
    )


def test_a_chain_is_submitted_with_the_site_options(submit):
    options = {"TAPE_SBATCH_OPTIONS": "--gpus-per-node=8 --comment='a * b'"}
    status, submitted, output = submit("run_all.sh", "--sbatch", '-A\n"me too"', *CHAIN, **options)
    assert status == 0 and submitted[:4] == [
        "--gpus-per-node=8",
        "--comment=a * b",
        "-A",
        "me too",
    ], output
    assert "pretraining  job 41, in" in output and "extension    job 42, after 41, in" in output
    assert "scancel" not in output
    status, _, output = submit("run_all.sh", "--sbatch", "--comment='a", *CHAIN)
    assert status == 1 and "error: --sbatch is --comment='a, whose quotes do not match" in output
    # The recipe is in the place of the options.
    status, submitted, output = submit("pretrain_tape.sh", "--sbatch", RECIPE)
    assert status == 1 and f"error: --sbatch is {RECIPE}, whose first word is no option" in output


@pytest.mark.parametrize("script, arguments", [("run_all.sh", CHAIN), ("compare.sh", COMPARISON)])
def test_a_failed_submission_cancels_the_submitted_jobs(submit, script, arguments):
    status, _, output = submit(script, *arguments, FAILS_AT="42")
    assert status == 1 and output.endswith(
        "scancel 41\nerror: not all jobs could be submitted; cancelled those that were: 41\n"
    )
    status, _, output = submit(
        script, *arguments, FAILS_AT="44", CANCEL_STATUS="1", FAKE_CLUSTER="far"
    )
    assert status == 1 and output.endswith("cancel those that were: scancel --clusters=far 43\n")


def test_an_evaluation_without_an_extension_is_of_the_pretrained_model(submit):
    evaluation = ["perplexity", "--perplexity.data", "a", "--perplexity.lengths", "[8]"]
    status, submitted, output = submit("run_all.sh", *TRAINING, "--evaluate", *evaluation)
    assert status == 0, output
    assert submitted == [
        "--dependency=afterok:41",
        "--kill-on-invalid-dep=yes",
        f"{REPOSITORY}/slurm/evaluate_tape.sh",
        *evaluation,
        "--model=runs/tiny",
    ]
    jobs = (
        "pretraining  job 41, in runs/tiny\nevaluation   job 42, after 41, in"
        " runs/tiny/evaluation\n"
    )
    assert output.startswith(jobs)
    for arguments, message in (
        ([], "neither --extend RECIPE nor --evaluate TASK"),
        (["--extend"], "names no recipe"),
    ):
        status, _, output = submit("run_all.sh", *TRAINING, *arguments)
        assert status == 1 and message in output


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
    script = (
        'source "$1"; ROOT=/r; shift; with_recipe default "$@"; printf "%s\\0" "${ARGUMENTS[@]}"'
    )
    command = ["bash", "-euc", script, "bash", str(REPOSITORY / "slurm" / "common.sh"), *arguments]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")[
        :-1
    ]
    assert found == (["/r/default"] if added is None else added) + arguments
