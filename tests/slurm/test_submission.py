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
import yaml
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
EVALUATION = ["--evaluate", "perplexity", "--perplexity.data", "a", "--perplexity.lengths", "[8]"]
JOB_SCRIPTS = ["pretrain_tape.sh", "extend_tape.sh", "evaluate_tape.sh", "preprocess.sh"]
COMPARISON = ["--recipe", RECIPE, "--encodings", "rope", "--data.prefix=a", "--output=out"]
LADDER = {
    "recipe": RECIPE,
    "settings": {"data.prefix": "a"},
    "variants": {"rope": "rope", "tape": "tape"},
    "sizes": {"small": {"model.hidden_size": 16}, "large": {"model.hidden_size": 32}},
    "tokens_per_parameter": [0.2, 0.4],
    "tuning": {"learning_rates": [0.01, 0.02, 0.04], "seeds": [9], "sizes": ["small"]},
    "seeds": [1, 2],
}


@pytest.fixture
def submit(inputs, tmp_path):
    """Run a script as a user does; return its exit status, the arguments of sbatch (or None), and
    its output.
    """
    shutil.copytree(inputs / "data", tmp_path, dirs_exist_ok=True)
    programs = tmp_path / "bin"
    programs.mkdir()
    scancel = '#!/bin/sh\necho scancel "$@"; exit "${CANCEL_STATUS:-0}"\n'
    for name, text in (("sbatch", SBATCH), ("scancel", scancel)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    names = [name for name in os.environ if not name.startswith(("SLURM_", "TAPE_"))]
    environment = {name: os.environ[name] for name in names}
    environment["PATH"] = f"{programs}:{os.environ['PATH']}"
    environment |= {"FOLDER": str(tmp_path), "TAPE_PYTHON": sys.executable}

    def run(script, *arguments, **variables):
        done = subprocess.run(
            ["bash", str(REPOSITORY / "slurm" / script), *arguments],
            cwd=tmp_path,
            env=environment | variables,
            start_new_session=True,  # it receives SIGNAL
            capture_output=True,
            text=True,
        )
        submitted = None
        if (tmp_path / "submitted").exists():
            submitted = (tmp_path / "submitted").read_text().split("\0")[:-1]
        return done.returncode, submitted, done.stdout + done.stderr

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
    assert (status, submitted) == (2, None)
    assert message in output


def test_valid_commands_are_submitted_without_the_variables_of_a_session(submit, tmp_path):
    """An interactive session is a job, too; the new job must not inherit its CPUs and memory."""
    session = {"SLURM_JOB_ID": "7", "SLURM_CPU_BIND": "mask_cpu:0x1", "SLURM_MEM_PER_CPU": "100"}
    # These lead sbatch to the cluster.
    client = {"SLURM_CONF_SERVER": "head", "SLURM_SACK_SOCKET": "/run/x", "SLURM_CLUSTERS": "far"}
    status, submitted, _ = submit("pretrain_tape.sh", *TRAINING, **client, **session)
    assert (status, submitted[1:]) == (0, TRAINING)
    inherited = (tmp_path / "environment").read_text().splitlines()
    kept = {line for line in inherited if line.startswith("SLURM_")}
    assert kept == {f"{name}={value}" for name, value in client.items()}


@pytest.mark.parametrize("script", JOB_SCRIPTS)
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
        status, submitted, output = submit(script, *given, "x y", "--z", **site)
        assert (status, submitted) == (0, expected), output


def test_a_dry_run_of_several_jobs_prints_their_commands(submit):
    status, submitted, output = submit("run_all.sh", *CHAIN, "--dry-run")
    assert (status, submitted) == (0, None)
    lines = output.splitlines()
    assert lines[1].startswith("pretraining  job JOB1, in")
    assert "--dependency=afterok:JOB1" in lines[2].split()
    assert lines[3].startswith("extension    job JOB2, after JOB1, in")

    # The limit of the array may stand anywhere.
    for given in (["--at-once", "2", *COMPARISON], [*COMPARISON, "--at-once", "2"]):
        status, submitted, output = submit(
            "compare.sh", "--dry-run", "--sbatch", "--gpus=1", *given
        )
        assert (status, submitted) == (0, None)
        commands = [line.split() for line in output.splitlines() if line.startswith("sbatch")]
        assert commands[0][1:3] == ["--gpus=1", "--array=0-2%2"]
        assert commands[1][1] == "--dependency=afterany:JOB1"
        assert "--at-once" not in output


def test_a_ladder_has_an_array_of_tunings_and_one_of_the_other_runs(submit, tmp_path):
    (tmp_path / "ladder.yaml").write_text(yaml.safe_dump(LADDER, sort_keys=False))
    ladder = ["--ladder", "ladder.yaml", "--extend-grid", "--output=out"]
    status, submitted, output = submit(
        "compare.sh", "--dry-run", "--at-once", "2", "--sbatch", "--gpus=1", *ladder
    )
    assert (status, submitted) == (0, None), output
    lines = output.splitlines()
    # The runs: two variants at four points with two seeds.
    counts = "2 tunings of learning rates (6 runs), 16 other runs"
    assert lines[0] == f"{counts}, 0 of 22 finished, output in out"
    assert lines[2::2] == [
        "tunings job JOB1",
        "runs    job JOB2, after JOB1",
        "report  job JOB3, after JOB2",
    ]
    script = [f"{REPOSITORY}/slurm/compare.sh", *ladder]
    dependency = ["--dependency=afterok:JOB1", "--kill-on-invalid-dep=yes"]
    report = ["--dependency=afterany:JOB2", "--output=slurm-%x-%j.out"]
    assert [shlex.split(line)[1:] for line in lines[1::2]] == [
        ["--gpus=1", "--array=0-1%2", *script],
        ["--gpus=1", *dependency, "--array=2-17%2", *script],
        [*report, *script],
    ]

    # The first array must not run if the second one cannot be submitted.
    status, _, output = submit("compare.sh", *ladder, FAILS_AT="42")
    assert status == 1
    assert "cancelled those that were: 41\n" in output


@pytest.mark.parametrize("size, message", [(17, "task 17 would be the last one"), (18, None)])
def test_an_array_with_more_tasks_than_slurm_allows_is_refused(submit, tmp_path, size, message):
    """The last task of the second array has the number 17."""
    (tmp_path / "ladder.yaml").write_text(yaml.safe_dump(LADDER, sort_keys=False))
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho 'MaxArraySize            = {size}'\n")
    scontrol.chmod(0o755)
    status, submitted, output = submit("compare.sh", "--ladder=ladder.yaml", "--output=out")
    if message is None:
        assert status == 0, output
    else:
        assert (status, submitted) == (1, None)
        assert message in output
        assert f"MaxArraySize of this cluster is {size}" in output


@pytest.mark.parametrize("script", [*JOB_SCRIPTS, "run_all.sh"])
@pytest.mark.parametrize("option", ["--help", "--print_config"])
def test_options_that_print_something_submit_no_job(submit, script, option):
    status, submitted, output = submit(script, RECIPE, option, TAPE_PYTHON="true")
    assert submitted is None
    if option == "--help":
        assert status == 0
        assert f"slurm/{script} [--sbatch" in output
    else:
        assert status == 1
        assert output.startswith(f"error: {option} makes the program exit")


@pytest.mark.parametrize("script", ["pretrain_tape.sh", "run_all.sh"])
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
    "script, arguments, site, message",
    [
        ("pretrain_tape.sh", TRAINING, {"TAPE_SRUN_OPTIONS": "nodes=4"}, "no option"),
        ("pretrain_tape.sh", ["--sbatch", RECIPE], {}, "no option"),
        ("run_all.sh", ["--sbatch", "--comment='a", *CHAIN], {}, "quotes do not match"),
        ("run_all.sh", [*TRAINING, *EVALUATION, *EVALUATION], {}, "--evaluate at most once"),
        ("run_all.sh", [*TRAINING, *EVALUATION, *CHAIN[-3:]], {}, "give --extend at most once"),
        ("run_all.sh", TRAINING, {}, "neither --extend RECIPE nor --evaluate TASK"),
        ("run_all.sh", [*TRAINING, "--extend"], {}, "names no recipe"),
        ("compare.sh", [*COMPARISON, "--at-once"], {}, "--at-once is ''"),
        *(
            ("pretrain_tape.sh", TRAINING, {"TAPE_SRUN_OPTIONS": option}, "one task per GPU")
            for option in ("--gpus-per-task=1", "--gpu-bind=single:1", "-n 4", "--gres=gpu:1")
        ),
    ],
)
def test_commands_that_no_job_can_follow_are_refused(submit, script, arguments, site, message):
    status, submitted, output = submit(script, *arguments, **site)
    assert (status, submitted) == (1, None)
    assert output.startswith("error: ")
    assert message in output


def test_preprocessing_is_refused_without_input(submit):
    status, submitted, output = submit(
        "preprocess.sh", "--input", "*.x", "--tokenizer", "t", "--output-prefix", "out"
    )
    assert (status, submitted) == (2, None)
    assert "error: *.x matches no file (--input)" in output


def test_variables_of_the_environment_override_the_site_file(tmp_path):
    (tmp_path / "slurm").mkdir()
    site = "TAPE_SCRATCH=/site\nTAPE_SRUN_OPTIONS=--mpi=none\nTAPE_PYTHON=python3\n"
    (tmp_path / "slurm" / "site.env").write_text(site)
    script = 'source "$1"; load_site "$2"; echo "$TAPE_SCRATCH|$TAPE_SRUN_OPTIONS"'
    command = ["bash", "-euc", script, "bash", f"{REPOSITORY}/slurm/common.sh", str(tmp_path)]
    environment = {"TAPE_SCRATCH": "/mine", "TAPE_PYTHON": "python3", "PATH": os.environ["PATH"]}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "/mine|--mpi=none\n"
    assert "TAPE_SCRATCH is '/mine' from the environment, not '/site' from" in done.stderr
    assert "TAPE_PYTHON" not in done.stderr
    assert "TAPE_SRUN_OPTIONS" not in done.stderr


@pytest.mark.parametrize(
    "last, count, expected",
    [
        (None, 0, ""),
        (2, 3, " --part 1/3"),
        (1, 1, "the array does not begin at 0"),
    ],
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
        assert done.returncode == 1
        assert expected in done.stderr
    else:
        program = f"{REPOSITORY}/slurm/run_module.py tools.preprocess_data"
        assert done.stdout == f"{program} --workers 2 --input a b*{expected}\n"


@pytest.mark.parametrize("script", ["compare.sh", "evaluate_tape.sh"])
@pytest.mark.parametrize("container", ["", "nice -n 0"])
def test_a_python_without_the_packages_is_named_with_the_command_that_installs_them(
    submit, tmp_path, script, container
):
    venv.create(tmp_path / "bare", symlinks=True)
    python = str(tmp_path / "bare" / "bin" / "python")
    status, submitted, output = submit(script, "--x", TAPE_PYTHON=python, TAPE_CONTAINER=container)
    assert (status, submitted, len(output.splitlines())) == (1, None, 1)
    assert output.startswith(f"error: TAPE_PYTHON is {python}")
    assert "lacks the package " in output
    assert "requirements.txt" in output
    assert ("in TAPE_CONTAINER (nice -n 0)" in output) == (container != "")


def test_a_chain_is_submitted_with_the_site_options(submit):
    site = {"TAPE_SBATCH_OPTIONS": "--gpus-per-node=8 --comment='a * b'"}
    status, submitted, output = submit("run_all.sh", "--sbatch", '-A\n"me too"', *CHAIN, **site)
    assert status == 0, output
    assert submitted[1:5] == ["--gpus-per-node=8", "--comment=a * b", "-A", "me too"]
    assert "pretraining  job 41, in" in output
    assert "extension    job 42, after 41, in" in output
    assert "scancel" not in output


@pytest.mark.parametrize("script, arguments", [("run_all.sh", CHAIN), ("compare.sh", COMPARISON)])
def test_a_failed_submission_cancels_the_submitted_jobs(submit, script, arguments):
    status, _, output = submit(script, *arguments, FAILS_AT="42")
    assert status == 1
    assert output.endswith(
        "scancel 41\nerror: not all jobs could be submitted; cancelled those that were: 41\n"
    )
    status, _, output = submit(
        script, *arguments, FAILS_AT="44", CANCEL_STATUS="1", FAKE_CLUSTER="far"
    )
    assert status == 1
    assert output.endswith("cancel those that were: scancel --clusters=far 43\n")


def test_an_evaluation_without_an_extension_is_of_the_pretrained_model(submit):
    status, submitted, output = submit("run_all.sh", *TRAINING, *EVALUATION)
    assert status == 0, output
    script = f"{REPOSITORY}/slurm/evaluate_tape.sh"
    assert submitted[1] == "--dependency=afterok:41"
    assert submitted[3:] == [script, *EVALUATION[1:], "--model=runs/tiny"]
    assert "evaluation   job 42, after 41, in runs/tiny/evaluation\n" in output


def test_an_interrupted_submission_cancels_the_submitted_jobs(submit):
    status, _, output = submit("run_all.sh", *CHAIN, SIGNAL="INT")
    assert status == 130
    assert "cancelled those that were: 41" in output


@pytest.mark.parametrize(
    "arguments, adds",
    [
        ([], True),
        (["--logging.note=a", "--data.prefix", "x --config=y"], True),
        (["a b.yaml", "--data.prefix", "*"], False),
        (["--data.prefix", "`x` $HOME\n'", "--config", "x y"], False),
        (["--config=x"], False),
    ],
)
def test_the_default_recipe_is_added_only_if_none_is_given(arguments, adds):
    script = (
        'source "$1"; ROOT=/r; shift; with_recipe default "$@"; printf "%s\\0" "${ARGUMENTS[@]}"'
    )
    command = ["bash", "-euc", script, "bash", f"{REPOSITORY}/slurm/common.sh", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split("\0")[:-1] == ["/r/default"] * adds + arguments
