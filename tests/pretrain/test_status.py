"""`python -m pretrain.status`: the state that it shows in each situation, and its exit status."""

import json
import os
import time

import pytest

from megatron_tape.checkpoint.directories import FORMAT_VERSION
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
    "from_step": 0,
}


def record(claimed_at=NOW - 600, beaten_at=NOW - 3, **known):
    facts = {"started": claimed_at + FAST, "job": "5"}
    return AttemptRecord(
        1,
        facts,
        claimed_at=claimed_at,
        beaten_at=beaten_at,
        **known,
    )


@pytest.mark.parametrize(
    "last, queue, name, well",
    [
        (record(heartbeat=BEAT), "RUNNING", "running", True),
        (record(heartbeat=BEAT | {"since": NOW - 101 + FAST}), "RUNNING", "stuck", False),
        (record(heartbeat=BEAT, beaten_at=NOW - 61), "RUNNING", "stuck", False),
        (record(heartbeat=BEAT, beaten_at=NOW - 61), None, "gone", False),
        (record(heartbeat=BEAT), "", "gone", False),
        (record(heartbeat=BEAT), "PENDING", "waiting", True),
        (record(NOW - 20), "RUNNING", "starting", True),
        (record(NOW - 2000), "RUNNING", "stuck", False),
        (record(), None, "gone", False),
        (record(outcome="finished"), "", "finished", True),
        (record(outcome="interrupted", message="USR1"), "COMPLETING", "between attempts", True),
        (record(outcome="interrupted", message="USR1"), "", "stopped", False),
        (record(outcome="interrupted", message="USR1"), None, "interrupted", True),
        (record(outcome="failed", message="x"), "", "failed", False),
        (record(outcome="unready", message="x"), "", "failed", False),
        (
            record(outcome="refused", verdict={"verdict": "stop", "reason": "bad"}),
            "RUNNING",
            "failed",
            False,
        ),
    ],
)
def test_each_situation_has_one_state(last, queue, name, well):
    state = status.state_of(last, queue, NOW)
    assert (state.name, state.well) == (name, well)


def claim(run, **facts):
    return Attempt.claim(run, run / "checkpoints", {"job": None, **facts})


def beat(run, **changes):
    """Write the heartbeat of a run's first attempt."""
    now = {"time": time.time(), "since": time.time(), "step": 12}
    path = run / "attempts" / "000001" / "heartbeat.json"
    write_record(path, BEAT | now | changes)
    return path


@pytest.fixture
def run(tmp_path):
    claim(tmp_path, nodes=["alpha"], log="job.out")
    beat(tmp_path)
    rows = [
        {
            "step": step,
            "time": time.time() + step,
            "train/loss": 5 - step / 10,
            "throughput/tokens_per_second": 1000.0,
            "seconds_left": 40.0 - step,
        }
        for step in range(1, 11)
    ]
    rows[4]["validation/loss"] = 4.75
    lines = [json.dumps(row) + "\n" for row in rows]
    (tmp_path / "metrics.jsonl").write_text("".join(lines) + '{"step": 11, "lo')
    (tmp_path / "config.yaml").write_text("train: {steps: 40}\n")
    return tmp_path


@pytest.fixture
def failed(tmp_path_factory):
    """A directory with the failed runs `a` and `b`, and a file."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("b", "a"):
        claim(folder / name).record_end(3, "failed", "RuntimeError: boom")
    (folder / "notes.txt").write_text("notes")
    return folder


def shown(capsys, *paths, exits=0):
    """Return what the program prints."""
    assert status.main(list(map(str, paths))) == exits
    return capsys.readouterr().out


def test_the_screen_shows_how_the_run_is_doing(run, capsys):
    attempt = Attempt.open(run, run / "checkpoints", 1)
    for step in (7, 1040):
        spike = {"step": step, "loss": 9.5, "grad_norm": 31.76, "action": "skip", "number": 1}
        attempt.record_spike(spike)
    output = shown(capsys, run)
    assert output.startswith(f"{run}: running (training, for 0:00:0")
    for line in (
        "step        12 of 40 (30.0%)",
        "loss        4.0000 at step 10; validation 4.7500 at step 5",
        "speed       1,000 tokens/s, ETA 0:00:30",
        "checkpoint  none yet",
        "spikes      2, in attempts/*/spikes.jsonl",
        "log         job.out",
        "attempts    1:",
    ):
        assert f"{line}\n" in output
    assert "alpha, from step 0" in output


def test_the_screen_shows_goodput(run, capsys):
    now = time.time()
    started = {"started": now - 100, "nodes": ["alpha"]}
    write_record(run / "attempts" / "000001" / "attempt.json", started)
    beat(run, began=now - 90, phases={"training": 80.0, "saving": 10.0})
    assert "goodput     kept steps 80.0%, saves 10.0%, start 10.0%\n" in shown(capsys, run)


@pytest.mark.parametrize("seconds_slow", [90, -90])
def test_the_clocks_of_the_nodes_do_not_decide_whether_a_run_is_alive(
    run, capsys, monkeypatch, seconds_slow
):
    now = time.time()
    path = beat(run, since=now - seconds_slow - 1, time=now - seconds_slow)
    output = shown(capsys, run)
    assert output.startswith(f"{run}: running (training, for 0:00:0")
    assert "ETA 0:00:30" in output
    # No heartbeat for longer than a run may be silent.
    written = now - status.SILENT_SECONDS - 10
    os.utime(path, (written, written))
    monkeypatch.setattr(time, "time", lambda: now - seconds_slow)
    assert shown(capsys, run, exits=1).startswith(f"{run}: gone (no heartbeat")


def test_rows_of_an_earlier_attempt_predict_no_end(run, capsys):
    beat(run, from_step=10, step=10)
    assert "ETA" not in shown(capsys, run)


def test_several_runs_get_one_line_each(run, failed, capsys):
    heading, first, second = shown(capsys, run, failed / "a", exits=1).splitlines()
    assert tuple(heading.split()) == status.COLUMNS
    cells = ["running", "12", "of", "40", "(30.0%)", "4.0000", "4.7500", "1,000", "0:00:30"]
    assert first.split() == [str(run), *cells]
    assert second.split() == [str(failed / "a"), "failed", "0"]


def test_the_table_shows_that_a_loss_is_not_finite(run, failed, capsys):
    (run / "metrics.jsonl").write_text('{"step": 1, "train/loss": null}\n')
    assert "not finite" in shown(capsys, run, failed / "a", exits=1)


def test_an_unreadable_folder_does_not_hide_the_runs_next_to_it(failed, capsys, monkeypatch):
    def attempt_numbers(path):
        if path.name == "b":
            raise PermissionError(13, "Permission denied", str(path))
        return [1] * (path == failed / "a")

    monkeypatch.setattr(status, "attempt_numbers", attempt_numbers)
    assert shown(capsys, failed, exits=1).startswith(f"{failed / 'a'}: failed")


def test_a_directory_of_runs_shows_its_runs(failed, capsys):
    for paths in ([failed], [failed / "a", failed]):
        _, *lines = shown(capsys, *paths, exits=1).splitlines()
        assert [line.split()[0] for line in lines] == [str(failed / "a"), str(failed / "b")]


def test_what_is_no_run_or_unreadable_is_reported_and_the_others_are_shown(
    run, tmp_path_factory, capsys, monkeypatch
):
    empty = tmp_path_factory.mktemp("empty")
    assert status.main([str(run), str(empty), str(empty / "missing")]) == 2
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 2
    assert printed.err.count("contains no attempts, or does not exist") == 2

    def fails(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(status, "read_attempts", fails)
    assert status.main([str(run)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {run} cannot be read: ")


def test_json_output_has_the_values_of_the_screen(run, capsys):
    (values,) = json.loads(shown(capsys, run, "--json"))
    expected = {
        "run": str(run),
        "state": "running",
        "well": True,
        "step": 12,
        "total_steps": 40,
        "loss": 4.0,
        "loss_step": 10,
        "validation_loss": 4.75,
        "validation_step": 5,
        "tokens_per_second": 1000.0,
        "seconds_left": 30.0,
        "checkpoint": None,
        "log": "job.out",
        "last_error": None,
        "spikes": 0,
    }
    assert {name: values[name] for name in expected} == expected
    assert len(values["attempts"]) == 1


def test_a_failed_run_exits_with_1_and_shows_the_last_error(failed, capsys):
    output = shown(capsys, failed / "a", exits=1)
    assert "failed" in output.splitlines()[0]
    assert "last error  attempt 1, rank 3: RuntimeError: boom" in output


def test_checkpoints_of_a_moved_run_are_found(run, capsys):
    recorded = run / "before" / "checkpoints"
    path = run / "attempts" / "000001" / "attempt.json"
    facts = json.loads(path.read_text())
    write_record(path, facts | {"checkpoint_directory": str(recorded)})
    checkpoint = run / "checkpoints" / "step-00000010"
    checkpoint.mkdir()
    write_record(checkpoint / "manifest.json", {"format_version": FORMAT_VERSION + 1})
    output = shown(capsys, run)
    assert str(checkpoint) in output
    assert str(recorded) not in output
    recorded.parent.mkdir()
    (run / "checkpoints").rename(recorded)
    assert str(recorded / "step-00000010") in shown(capsys, run)
