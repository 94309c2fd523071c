"""`python -m pretrain.attempt`: what a batch script receives; tests/slurm runs whole jobs."""

import json
import shlex
import subprocess

import pytest
from datasets_for_tests import write_all
from training_cases import RECIPE

from megatron_tape.checkpoint import directories
from megatron_tape.checks.arguments import parse_run_config
from megatron_tape.command_line import status_of
from megatron_tape.config.schema import config_dict
from megatron_tape.errors import EXIT_RESTART
from megatron_tape.io.files import digest
from megatron_tape.io.records import write_record
from megatron_tape.run.attempts import Attempt
from megatron_tape.run.judging import read_attempts
from pretrain import attempt


@pytest.fixture
def job(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    write_all(tmp_path)
    source = tmp_path / "source"
    (source / "pretrain").mkdir(parents=True)
    (source / "pretrain" / "train.py").write_text("first version")

    def begin(*overrides, job="7", requeued=False, module="pretrain.train", recipe=str(RECIPE)):
        options = ["--module", module, "--job", job, "--source", str(source), "--job-link", f"links/{job}"]
        options += ["--nodes", "a,b", "--processes", "2", *(["--requeued"] if requeued else [])]
        chosen = [recipe, "--data.prefix=a", "--logging.directory=run", *overrides]
        status = status_of(lambda: attempt.main(["begin", *options, "--", *chosen]), unavailable=EXIT_RESTART)
        output = capfd.readouterr()
        variables = dict(shlex.split(line)[0].split("=", 1) for line in output.out.splitlines())
        return status, variables, output.err

    begin.folder = tmp_path
    begin.source = source
    return begin


def test_a_job_gets_every_path_and_continues_with_its_copy_of_the_code(job):
    status, variables, _ = job("--train.steps=20")
    assert status == 0
    assert variables["ATTEMPT"] == "1" and variables["RUN_DIRECTORY"] == "run" and variables["RESUME"] == "auto"
    assert {"PREFLIGHT_PORT", "TRAINING_PORT", "CHECKPOINT_DIRECTORY", "ATTEMPT_DIRECTORY"} <= set(variables)
    (job.source / "pretrain" / "train.py").write_text("second version")
    status, again, error = job("--train.steps=30", requeued=True)
    assert status == 0 and again["ATTEMPT"] == "2" and "attempt 1 was killed" in error
    assert again["CONFIG"] == variables["CONFIG"] and "steps: 20" in open(again["CONFIG"]).read()
    assert open(f"{again['ROOT']}/pretrain/train.py").read() == "first version"
    assert json.loads((job.folder / "run/attempts/000002/attempt.json").read_text())["nodes"] == ["a", "b"]


def test_a_requeued_job_continues_its_own_checkpoints_not_those_it_started_from(job):
    status, variables, _ = job("--checkpoint.resume=none")
    assert status == 0 and variables["RESUME"] == "none"
    _, variables, _ = job(requeued=True)
    assert variables["RESUME"] == "none"
    staging = directories.staging_directory(Attempt.open("run", "run/checkpoints", 2).home, 5)
    (staging / "weights").write_text("w")
    found = digest(staging / "weights")
    directories.publish(staging, "run/checkpoints", 5, {"weights": found})
    _, variables, _ = job(requeued=True)
    assert variables["RESUME"] == "auto"


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["--model.num_attention_heads=5"], "model.num_attention_heads 5"),
        (["--data.prefix=nowhere"], "nowhere.idx"),
        (["--train.global_batch_size=3"], "train.global_batch_size 3"),
    ],
)
def test_mistakes_end_with_one_sentence_and_leave_nothing(job, overrides, message):
    status, variables, err = job(*overrides)
    assert status == 2 and variables == {}
    assert err.count("\n") == 1 and err.startswith("error: ") and message in err
    assert not (job.folder / "run").exists()


def test_a_missing_recipe_is_named(job):
    assert "recipe nowhere.yaml does not exist" in job(recipe="nowhere.yaml")[2]


def test_a_run_of_another_job_is_refused_while_slurm_knows_that_job(job, monkeypatch):
    job(job="7")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 0, "RUNNING\n", ""))
    status, _, err = job(job="8")
    assert status == 2 and "belongs to job 7, which is running" in err
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 1, "", "Invalid job id"))
    assert job(job="8")[0] == 0


def test_git_and_squeue_may_be_missing(job, monkeypatch):
    job()

    def absent(*_, **__):
        raise FileNotFoundError(2, "No such file or directory", "git")

    monkeypatch.setattr(subprocess, "run", absent)
    assert job(job="8")[0] == 0


def test_a_crash_loop_is_found_even_if_the_batch_script_was_killed_before_the_verdict(job):
    job()
    for _ in range(2):
        assert job(requeued=True)[0] == 0
    status, _, err = job(requeued=True)
    assert status == 2 and "3 attempts in a row crashed" in err
    assert job(job="8")[0] == 0


def test_a_failing_file_system_and_a_mistake_have_different_exit_statuses(job, monkeypatch):
    def fails(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Attempt, "claim", fails)
    assert job()[0] == EXIT_RESTART


def test_another_vocabulary_is_refused_before_the_run_is_taken_over(job):
    state = {
        "step": 5,
        "optimizer_steps": 5,
        "consumed_samples": 20,
        "progress": {"vocabulary": "0" * 64},
        "sharded": {},
    }
    state |= {"tensor_model_parallel_size": 1, "data_parallel_size": 1}
    job()
    home = Attempt.open("run", "run/checkpoints", 1).home
    config = parse_run_config(["--config", str(RECIPE), "--data.prefix=a"])
    staging = directories.staging_directory(home, 5)
    write_record(staging / "state.json", state | {"config": config_dict(config)})
    found = digest(staging / "state.json")
    directories.publish(staging, "run/checkpoints", 5, {"state.json": found})
    status, _, err = job("--data.tokenizer=tokenizer.json", job="8")
    assert status == 2 and "data.tokenizer is tokenizer.json" in err and home.is_dir()
    assert job("--data.tokenizer=tokenizer.json", "--train.steps=5", job="8")[0] == 0


def test_bad_nodes_are_printed_for_the_batch_script(job, capfd):
    job()
    Attempt.open("run", "run/checkpoints", 1).record_end(0, "unready", "b: no GPU", bad_nodes=["b"])
    attempt.main(["decide", "--run", "run", "--checkpoints", "run/checkpoints", "--attempt", "1"])
    verdict, exclude = capfd.readouterr().out.splitlines()
    assert verdict.startswith("again b: no GPU") and exclude == "exclude b"


def test_a_verdict_is_printed_and_kept(job, capfd):
    job()
    Attempt.open("run", "run/checkpoints", 1).record_end(1, "refused", "bad\nsteps", "Traceback x")
    attempt.main(["decide", "--run", "run", "--checkpoints", "run/checkpoints", "--attempt", "1"])
    output = capfd.readouterr()
    assert output.out == "stop bad steps\n" and "Traceback x" in output.err
    assert read_attempts("run")[0].verdict["verdict"] == "stop"
