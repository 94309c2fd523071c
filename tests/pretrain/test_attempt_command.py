"""`python -m pretrain.attempt`: what it prints for a Slurm script. tests/slurm runs whole jobs."""

import errno
import json
import os
import shlex
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from datasets_for_tests import write_all
from training_cases import RECIPE

from megatron_tape.checkpoint import directories
from megatron_tape.checks.arguments import parse_run_config
from megatron_tape.command_line import status_of
from megatron_tape.errors import EXIT_RESTART, UserError
from megatron_tape.io.files import digest
from megatron_tape.run.attempts import Attempt
from megatron_tape.run.judging import read_attempts
from pretrain import attempt

REPOSITORY = Path(__file__).parents[2]
DECIDE = ["decide", "--run", "run", "--checkpoints", "run/checkpoints"]


@pytest.fixture
def job(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    write_all(tmp_path)
    source = tmp_path / "source"
    (source / "pretrain").mkdir(parents=True)
    (source / "pretrain" / "train.py").write_text("first version")

    def begin(*overrides, job="7", requeued=False, recipe=str(RECIPE)):
        options = ["--job", job, "--source", str(source), "--job-link", f"links/{job}"]
        options += ["--nodes=a,b", "--processes=2", *["--requeued"] * requeued]
        chosen = [recipe, "--data.prefix=a", "--logging.directory=run", *overrides]
        arguments = ["begin", *options, "--", *chosen]
        status = status_of(lambda: attempt.main(arguments), unavailable=EXIT_RESTART)
        output = capfd.readouterr()
        variables = dict(shlex.split(line)[0].split("=", 1) for line in output.out.splitlines())
        return status, variables, output.err

    begin.folder = tmp_path
    begin.source = source
    return begin


def save(name, content, attempt=1):
    """Publish a checkpoint of step 5 that contains one file; return the attempt's folder."""
    home = Attempt.open("run", "run/checkpoints", attempt).staging
    staging = directories.staging_directory(home, 5)
    (staging / name).write_text(content)
    directories.publish(staging, "run/checkpoints", 5, {name: digest(staging / name)})
    return home


def test_begin_prints_every_path_and_a_job_continues_with_its_copy_of_the_code(job):
    status, variables, _ = job("--train.steps=20")
    assert status == 0
    expected = {"ATTEMPT": "1", "RUN_DIRECTORY": "run", "RESUME": "auto"}
    assert variables.items() >= expected.items()
    names = {"PREFLIGHT_PORT", "TRAINING_PORT", "CHECKPOINT_DIRECTORY", "ATTEMPT_DIRECTORY"}
    assert variables.keys() >= names

    (job.source / "pretrain" / "train.py").write_text("second version")
    status, again, error = job("--train.steps=30", requeued=True)
    assert status == 0
    assert again["ATTEMPT"] == "2"
    assert "attempt 1 was killed" in error
    assert again["CONFIG"] == variables["CONFIG"]
    assert "steps: 20" in open(again["CONFIG"]).read()
    assert open(f"{again['ROOT']}/pretrain/train.py").read() == "first version"
    record = json.loads((job.folder / "run/attempts/000002/attempt.json").read_text())
    assert record["nodes"] == ["a", "b"]


@pytest.mark.parametrize(
    "given",
    [
        ["b.yaml"],
        ["--config", "own.yaml", "--config=b.yaml"],
        ["--train.steps=3", "--config", "b.yaml"],
    ],
)
def test_the_run_is_named_after_the_last_recipe_unless_a_recipe_sets_its_directory(
    given, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    write_all(tmp_path)
    text = RECIPE.read_text()
    (tmp_path / "b.yaml").write_text(text)
    (tmp_path / "own.yaml").write_text(text)

    def directory(scratch):
        arguments = attempt._training_arguments([*given, "--data.prefix=a"], scratch)
        return parse_run_config(arguments).logging.directory

    assert directory("/scratch") == "/scratch/runs/b"
    assert directory("") == "runs/b"
    (tmp_path / "b.yaml").write_text(text.replace("logging: {", "logging: {directory: mine, "))
    assert directory("/scratch") == "mine"


def test_a_requeued_job_continues_from_its_own_checkpoints(job):
    status, variables, _ = job("--checkpoint.resume=none")
    assert status == 0
    assert variables["RESUME"] == "none"
    _, variables, _ = job(requeued=True)
    assert variables["RESUME"] == "none"
    save("weights", "w", attempt=2)
    _, variables, _ = job(requeued=True)
    assert variables["RESUME"] == "auto"


@pytest.mark.parametrize(
    "recipe, overrides, message",
    [
        (RECIPE, ["--data.prefix=nowhere"], "nowhere.idx"),
        (RECIPE, ["--train.global_batch_size=3"], "train.global_batch_size 3"),
        ("nowhere.yaml", [], "recipe nowhere.yaml does not exist"),
    ],
)
def test_mistakes_end_with_one_sentence_and_leave_nothing(job, recipe, overrides, message):
    status, variables, err = job(*overrides, recipe=str(recipe))
    assert status == 2
    assert variables == {}
    assert err.count("\n") == 1
    assert err.startswith("error: ")
    assert message in err
    assert not (job.folder / "run").exists()


@pytest.mark.parametrize(
    "extension, evaluation, key",
    [
        (["--extension.from=elsewhere"], [], "extension.from"),
        (["--logging.directory=runs/tiny"], [], "logging.directory"),
        ([], ["perplexity"], "perplexity.data"),
    ],
)
def test_an_invalid_chain_is_refused(job, extension, evaluation, key):
    recipes = [str(RECIPE), "--data.prefix=a", "--model.position_encoding=rope"]
    recipes += ["--extend", str(RECIPE.with_name("extend.yaml")), "--data.prefix=a", *extension]
    if evaluation:
        recipes += ["--evaluate", *evaluation]
    with pytest.raises(UserError) as refused:
        attempt.main(["chain", "--", *recipes])
    assert key in " ".join([*refused.value.subjects, refused.value.problem])


def test_a_run_of_another_job_is_refused_while_that_job_exists_in_slurm(job, monkeypatch):
    job(job="7")
    for queued, expected in ((True, 2), (False, 0)):
        answer = subprocess.CompletedProcess([], 1, "", "Invalid job id")
        if queued:
            answer = subprocess.CompletedProcess([], 0, "RUNNING\n", "")
        monkeypatch.setattr(subprocess, "run", lambda *a, **k: answer)  # noqa: B023
        status, _, err = job(job="8")
        assert status == expected
        assert ("belongs to job 7 (running)" in err) == queued


def test_a_crash_loop_is_found_if_the_batch_script_was_killed_before_the_verdict(job):
    job()
    for _ in range(2):
        assert job(requeued=True)[0] == 0
    status, _, err = job(requeued=True)
    assert status == 2
    assert "3 attempts in a row crashed" in err
    assert job(job="8")[0] == 0


def test_a_job_without_attempts_restarts_until_its_third_crash_and_preemptions_do_not_count(
    tmp_path,
):
    script = f"source {REPOSITORY}/slurm/common.sh; SLURM_JOB_ID=7 STEP_STATUS=139\n"
    script += (
        "for SLURM_RESTART_COUNT in 0 5 9; do may_retry_crash && echo again || echo stop; done"
    )
    crashes = tmp_path / "runs" / ".jobs" / "7.crashes"
    crashes.parent.mkdir(parents=True)
    crashes.write_text("1\n" * 5)  # left by an earlier job with the same ID
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["again", "again", "stop"], done.stderr


def test_a_verdict_is_printed_even_if_the_disk_is_full(job, capfd, monkeypatch):
    job()
    Attempt.open("run", "run/checkpoints", 1).record_end(0, "interrupted", "USR1")

    def fsync(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    assert (
        status_of(lambda: attempt.main([*DECIDE, "--attempt", "1"]), unavailable=EXIT_RESTART) == 0
    )
    output = capfd.readouterr()
    assert output.out == "again USR1; continuing from the checkpoint of step 0\n"
    path = "run/attempts/000001/verdict.json"
    assert output.err == f"warning: {path} cannot be written: No space left on device\n"
    assert read_attempts("run")[0].verdict is None


def test_a_full_disk_while_the_code_is_copied_is_reported_once_with_its_path(job, monkeypatch):
    (job.source / "pretrain" / "evaluate.py").write_text("another file")

    def copy(source, target):
        raise OSError(errno.ENOSPC, "No space left on device", source, None, target)

    monkeypatch.setattr(shutil, "copy2", copy)
    status, variables, err = job()
    assert status not in (0, EXIT_RESTART)
    assert variables == {}
    assert err.count("\n") == err.count("No space left on device") == 1
    assert "code/pretrain/" in err


@pytest.mark.parametrize(
    "end, bad_nodes, printed, detail",
    [
        ((0, "unready", "b: no GPU"), ["b"], ["again b: no GPU; continuing", "exclude b"], ""),
        ((1, "refused", "bad\nsteps", "Traceback x"), [], ["stop bad steps"], "Traceback x"),
    ],
)
def test_a_verdict_and_the_bad_nodes_are_printed_and_the_verdict_is_kept(
    job, capfd, end, bad_nodes, printed, detail
):
    job()
    Attempt.open("run", "run/checkpoints", 1).record_end(*end, bad_nodes=bad_nodes)
    attempt.main([*DECIDE, "--attempt", "1"])
    output = capfd.readouterr()
    assert len(output.out.splitlines()) == len(printed)
    assert detail in output.err
    assert all(line.startswith(start) for line, start in zip(output.out.splitlines(), printed))
    assert read_attempts("run")[0].verdict["verdict"] == printed[0].split()[0]
    for number in ("2", "9" * 30):
        with pytest.raises(UserError, match=f"run/attempts contains no attempt {number}"):
            attempt.main([*DECIDE, "--attempt", number])


def test_an_attempt_whose_processes_did_not_start_is_recorded_as_such_unless_one_has_left_a_record(
    job, capfd
):
    decide = [*DECIDE, "--exit-status", "127", "--attempt"]
    job()
    attempt.main([*decide, "1"])
    assert capfd.readouterr().out.startswith(
        "again the processes did not start on the nodes; see the errors in "
    )
    assert read_attempts("run")[0].outcome == "unready"
    job()
    Attempt.open("run", "run/checkpoints", 2).record_end(1, "failed", "a step failed")
    attempt.main([*decide, "2"])
    assert capfd.readouterr().out.startswith("again rank 1: a step failed; ")
    job()
    beat = {"since": time.time(), "hang_timeout": None, "phase": "training", "step": 7}
    Attempt.open("run", "run/checkpoints", 3).heartbeat(**beat)
    attempt.main([*decide, "3"])
    assert "attempt 3 was killed or its node was lost" in capfd.readouterr().out
