"""`python -m pretrain.status`: the state that it shows in each situation, and its exit status."""

import json
import os
import time

import pytest

from megatron_tape.checkpoint.directories import FORMAT_VERSION
from megatron_tape.command_line import status_of
from megatron_tape.io.records import write_record
from megatron_tape.run.attempts import Attempt
from megatron_tape.run.judging import AttemptRecord
from pretrain import status

NOW = 1_800_000_000.0
FAST = 1000.0
"""Seconds that the clock of the run's node is ahead of the file system's."""
BEAT = {
    "time": NOW - 3 + FAST,
    "since": NOW - 4 + FAST,
    "phase": "training",
    "step": 7,
    "hang_timeout": 100.0,
}
BEAT |= {"from_step": 0}


def record(started=NOW - 600, beaten=NOW - 3, **known):
    dates = {"claimed_at": started, "beaten_at": beaten}
    return AttemptRecord(
        **{"number": 1, "facts": {"started": started + FAST, "job": "5"}, **dates, **known}
    )


@pytest.mark.parametrize(
    "last, queue, word, well",
    [
        (record(heartbeat=BEAT), "RUNNING", "running", True),
        (record(heartbeat=BEAT), None, "running", True),
        (record(heartbeat=BEAT | {"since": NOW - 101 + FAST}), "RUNNING", "stuck", False),
        (record(heartbeat=BEAT, beaten=NOW - 61), "RUNNING", "stuck", False),
        (record(heartbeat=BEAT, beaten=NOW - 61), None, "gone", False),
        (record(heartbeat=BEAT), "", "gone", False),
        (record(heartbeat=BEAT), "PENDING", "waiting", True),
        (record(NOW - 20), "RUNNING", "starting", True),
        (record(NOW - 2000), "RUNNING", "stuck", False),
        (record(), None, "gone", False),
        (record(), "RUNNING", "starting", True),
        (record(outcome="finished"), "", "finished", True),
        (record(outcome="interrupted", message="USR1"), "PENDING", "waiting", True),
        (record(outcome="interrupted", message="USR1"), "COMPLETING", "between attempts", True),
        (record(outcome="interrupted", message="USR1"), "", "stopped", False),
        (record(outcome="interrupted", message="USR1"), None, "interrupted", True),
        (record(outcome="failed", message="x"), "", "failed", False),
        (record(outcome="failed", message="x"), "PENDING", "waiting", True),
        (record(outcome="unready", message="x"), "PENDING", "waiting", True),
        (record(outcome="unready", message="x"), "", "failed", False),
        (
            record(outcome="refused", verdict={"verdict": "stop", "reason": "bad"}),
            "RUNNING",
            "failed",
            False,
        ),
    ],
)
def test_each_situation_has_one_state(last, queue, word, well):
    state = status.judge(last, queue, NOW)
    assert (state.word, state.well) == (word, well)


@pytest.mark.parametrize(
    "job, advice", [(None, "run the same command"), ("5", "submit the same command")]
)
def test_a_job_is_named_only_where_there_was_one(job, advice):
    failed = record(outcome="failed", message="x", facts={"started": NOW - 600, "job": job})
    explanation = status.judge(failed, None if job is None else "", NOW).explanation
    assert advice in explanation and ("job" in explanation) == (job is not None)


@pytest.fixture
def run(tmp_path):
    attempt = Attempt.claim(
        tmp_path, tmp_path / "checkpoints", {"job": None, "nodes": ["alpha"], "log": "job.out"}
    )
    rows = [
        {"step": step, "train/loss": 5 - step / 10, "throughput/tokens_per_second": 1000.0}
        for step in range(1, 11)
    ]
    rows = [
        row | {"time": time.time() + row["step"], "seconds_left": 40.0 - row["step"]}
        for row in rows
    ]
    rows[4]["validation/loss"] = 4.75
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows) + '{"step": 11, "lo'
    )
    (tmp_path / "config.yaml").write_text("train: {steps: 40}\n")
    write_record(
        attempt.directory / "heartbeat.json",
        BEAT | {"time": time.time(), "since": time.time(), "step": 12},
    )
    return tmp_path


def test_the_screen_shows_how_the_run_is_doing(run, capsys):
    assert status.main([str(run)]) == 0
    output = capsys.readouterr().out
    assert output.splitlines()[0].startswith(f"{run}: running (training, for 0:00:0")
    for expected in (
        "step        12 of 40 (30.0%)",
        "loss        4.0000 at step 10; validation 4.7500 at step 5",
        "speed       1,000 tokens/s, ETA 0:00:30",
        "checkpoint  none yet",
        "log         job.out",
        "attempts    1:",
    ):
        assert expected in output
    assert "alpha, from step 0" in output


def test_the_screen_shows_goodput_and_the_last_spike(run, capsys):
    attempt = Attempt.open(run, run / "checkpoints", 1)
    path = attempt.directory / "heartbeat.json"
    now = time.time()
    write_record(attempt.directory / "attempt.json", {"started": now - 100, "nodes": ["alpha"]})
    times = {
        "began": now - 90,
        "since": now,
        "time": now,
        "phases": {"training": 80.0, "saving": 10.0},
    }
    write_record(path, json.loads(path.read_text()) | times | {"from_step": 0})
    for number, step in ((1, 7), (2, 1040)):
        spike = {"step": step, "loss": 9.5, "grad_norm": 31.76, "action": "skip", "number": number}
        attempt.record_spike(spike)
    with open(attempt.directory / "spikes.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 9, "lo')
    assert status.main([str(run)]) == 0
    output = capsys.readouterr().out
    assert "goodput     80.0% of the time; saves 10.0%, start 10.0%\n" in output
    assert (
        "spikes      2, the last at step 1,040 (skip): loss 9.5000, gradient norm 31.76\n" in output
    )


@pytest.mark.parametrize("seconds_slow", [90, -90])
def test_the_clocks_of_the_nodes_do_not_decide_whether_a_run_is_alive(
    run, capsys, monkeypatch, seconds_slow
):
    attempt = Attempt.open(run, run / "checkpoints", 1)
    now = time.time()
    with monkeypatch.context() as on_node:
        on_node.setattr(time, "time", lambda: now - seconds_slow)
        attempt.heartbeat(**BEAT | {"since": time.time() - 1, "time": time.time()})
    assert status.main([str(run)]) == 0
    output = capsys.readouterr().out
    assert (
        f"{run}: running (training, for 0:00:0" in output.splitlines()[0]
        and "ETA 0:00:30" in output
    )
    # No heartbeat for longer than a run may be silent.
    written = time.time() - status.SILENT_SECONDS - 10
    os.utime(attempt.directory / "heartbeat.json", (written, written))
    with monkeypatch.context() as on_this_node:
        on_this_node.setattr(time, "time", lambda: now - seconds_slow)
        assert status.main([str(run)]) == 1
    assert f"{run}: gone (no heartbeat" in capsys.readouterr().out.splitlines()[0]


def test_rows_of_an_earlier_attempt_predict_no_end(run, capsys):
    attempt = Attempt.claim(run, run / "checkpoints", {"job": None})
    attempt.heartbeat(
        **BEAT | {"from_step": 10, "step": 10, "since": time.time(), "time": time.time()}
    )
    assert status.main([str(run)]) == 0
    assert "ETA" not in capsys.readouterr().out


def test_several_runs_get_one_line_each_and_a_problem_exits_with_2(run, tmp_path_factory, capsys):
    other = tmp_path_factory.mktemp("other")
    Attempt.claim(other, other / "checkpoints", {"job": None}).record_end(
        0, "failed", "RuntimeError: boom"
    )
    assert status.main([str(run), str(other)]) == 1
    columns, first, second = capsys.readouterr().out.splitlines()
    assert columns.split() == [
        "run",
        "state",
        "step",
        "loss",
        "validation",
        "tokens/s",
        "ETA",
        "checkpoint",
    ]
    figures = ["running", "12", "of", "40", "(30.0%)", "4.0000", "4.7500", "1,000", "0:00:30"]
    assert first.split() == [str(run), *figures] and second.split() == [str(other), "failed", "0"]
    assert status.main([str(run), str(tmp_path_factory.mktemp("empty"))]) == 2
    found = capsys.readouterr()
    assert len(found.out.splitlines()) == 2 and "contains no attempts" in found.err


def test_a_directory_of_runs_shows_its_runs_and_files_are_skipped(run, tmp_path_factory, capsys):
    runs = tmp_path_factory.mktemp("runs")
    for name in ("b", "a"):
        Attempt.claim(runs / name, runs / name / "checkpoints", {"job": None}).record_end(
            0, "failed", "boom"
        )
    (runs / "notes.txt").write_text("notes")
    for arguments in ([runs], sorted(runs.iterdir()), [runs / "a", runs]):
        assert status.main(list(map(str, arguments))) == 1
        found = capsys.readouterr()
        assert [line.split()[0] for line in found.out.splitlines()] == [
            "run",
            str(runs / "a"),
            str(runs / "b"),
        ]
        assert found.err == ""
    assert status.main([str(runs / "notes.txt"), str(runs / "c")]) == 2
    file, missing = capsys.readouterr().err.splitlines()
    assert "notes.txt is not a directory; give" in file and "c does not exist; give" in missing


def test_json_output_equals_the_screen(run, capsys):
    assert status.main([str(run), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    expected = {
        "run": str(run),
        "state": "running",
        "well": True,
        "step": 12,
        "total_steps": 40,
        "loss": 4.0,
    }
    expected |= {
        "loss_step": 10,
        "validation_loss": 4.75,
        "validation_step": 5,
        "tokens_per_second": 1000.0,
    }
    expected |= {
        "seconds_left": 30.0,
        "checkpoint": None,
        "log": "job.out",
        "last_error": None,
        "spikes": 0,
    }
    assert {name: found[name] for name in expected} == expected and len(found["attempts"]) == 1


@pytest.mark.parametrize("installed", [True, False])
def test_the_queue_is_shown_only_if_slurm_is_installed(tmp_path, capsys, monkeypatch, installed):
    monkeypatch.setattr(status.shutil, "which", lambda name: f"/bin/{name}" if installed else None)
    assert status.main([str(tmp_path)]) == 2
    assert ("squeue" in capsys.readouterr().err) == installed


def test_a_failed_run_exits_with_1_and_shows_the_last_error(run, capsys):
    Attempt.open(run, run / "checkpoints", 1).record_end(3, "failed", "RuntimeError: boom")
    assert status.main([str(run)]) == 1
    output = capsys.readouterr().out
    assert (
        "failed" in output.splitlines()[0]
        and "last error  attempt 1, rank 3: RuntimeError: boom" in output
    )


def test_checkpoints_of_a_moved_run_are_found(run, capsys):
    before = run / "before" / "checkpoints"
    path = run / "attempts" / "000001" / "attempt.json"
    write_record(path, json.loads(path.read_text()) | {"checkpoint_directory": str(before)})
    (run / "checkpoints" / "step-00000010").mkdir()
    write_record(
        run / "checkpoints" / "step-00000010" / "manifest.json",
        {"format_version": FORMAT_VERSION + 1},
    )
    status.main([str(run)])
    found = capsys.readouterr().out
    assert str(run / "checkpoints" / "step-00000010") in found and str(before) not in found
    before.parent.mkdir()
    (run / "checkpoints").rename(before)
    status.main([str(run)])
    assert str(before / "step-00000010") in capsys.readouterr().out


def test_an_invalid_or_unreadable_run_is_reported_in_one_sentence(tmp_path, capsys, monkeypatch):
    def fails(path):
        raise PermissionError(13, "Permission denied", str(path))

    assert status_of(lambda: status.main([str(tmp_path)])) == 2
    assert "contains no attempt" in capsys.readouterr().err
    monkeypatch.setattr(status, "read_attempts", fails)
    assert status_of(lambda: status.main([str(tmp_path)])) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path} cannot be read: ")
