"""Goodput: the uses of a run's time, computed from the records of its attempts."""

import time

import pytest

from megatron_tape.io.records import write_record
from megatron_tape.run import watch as watching
from megatron_tape.run.attempts import Attempt
from megatron_tape.run.goodput import (
    BETWEEN,
    EVALUATION,
    KEPT,
    KINDS,
    OTHER,
    REPEATED,
    SAVES,
    STALLS,
    START,
    seconds_by_kind,
    shares,
)
from megatron_tape.run.judging import read_attempts
from megatron_tape.run.watch import Watch


def record(run, number, started, ended=None, outcome="failed", **beat):
    """Write the records of an attempt: its start, and its end and heartbeat if they are given."""
    attempt = Attempt.open(run, run / "checkpoints", number)
    attempt.directory.mkdir(parents=True)
    write_record(attempt.directory / "attempt.json", {"started": started, "nodes": []})
    if beat:
        defaults = {"time": beat["since"], "phase": "training", "step": None, "hang_timeout": None}
        write_record(attempt.directory / "heartbeat.json", defaults | beat)
    if ended is not None:
        end = {"rank": 0, "outcome": outcome, "message": "", "detail": "", "time": ended}
        write_record(attempt.directory / "rank-00000.json", end)


def totals(run, until=None):
    found = seconds_by_kind(read_attempts(run), until)
    assert list(found) == list(KINDS)
    return {kind: seconds for kind, seconds in found.items() if seconds}


def test_the_time_of_an_uninterrupted_run_is_divided_by_phase(tmp_path):
    phases = {"training": 70.0, "saving": 6.0, "waiting to save": 1.0}
    phases |= {"evaluating": 9.0, "sampling text": 1.0}
    beat = {"since": 1098, "began": 1011, "from_step": 0, "step": 50, "phases": phases}
    record(tmp_path, 1, 1000, 1100, "finished", **beat)
    found = totals(tmp_path)
    assert found == {KEPT: 72.0, SAVES: 7.0, EVALUATION: 10.0, START: 11.0}
    assert sum(found.values()) == 100
    assert shares(found)[KEPT] == 0.72


def test_a_heartbeat_of_an_earlier_version_with_stages_is_read(tmp_path):
    beat = {"since": 1100, "began": 1010, "from_step": 0, "step": 9}
    record(tmp_path, 1, 1000, 1100, **beat, phase="saving", phases={"training": 80.0})
    path = tmp_path / "attempts" / "000001" / "heartbeat.json"
    path.write_text(path.read_text().replace("phase", "stage"))
    assert "stages" in path.read_text()
    assert totals(tmp_path) == {KEPT: 80.0, START: 10.0, OTHER: 10.0}


def test_steps_that_a_later_attempt_runs_again_count_as_repeated(tmp_path):
    # The third attempt continues from a checkpoint of the first one, since those of the second are
    # damaged.
    for number, (start, end, first, last) in enumerate(
        [
            (0, 110, 0, 10),
            (120, 180, 8, 13),
            (180, 250, 6, 12),
        ],
        1,
    ):
        phases = {"training": end - start - 10.0}
        beat = {"since": end, "began": start + 10, "phases": phases}
        record(tmp_path, number, start, end, from_step=first, step=last, **beat)
    kept = 60.0 + 60
    repeated = 40.0 + 50
    assert totals(tmp_path) == {KEPT: kept, REPEATED: repeated, START: 30.0, BETWEEN: 10.0}
    assert totals(tmp_path, until=300)[BETWEEN] == 10 + 50


@pytest.mark.parametrize("outcome, limit", [("hung", 1000.0), ("failed", 29.0)])
def test_the_time_without_progress_before_a_hang_is_a_stall(tmp_path, outcome, limit):
    beat = {"since": 50, "time": 80, "began": 10, "from_step": 0, "step": 4}
    beat |= {"phases": {"training": 40.0}, "hang_timeout": limit}
    record(tmp_path, 1, 0, 80, outcome, **beat)
    assert totals(tmp_path) == {KEPT: 40.0, START: 10.0, STALLS: 30.0}


def test_a_killed_attempt_ended_at_its_last_heartbeat_or_the_next_start(tmp_path):
    beat = {
        "since": 20,
        "began": 10,
        "from_step": 0,
        "step": 4,
        "phases": {"training": 10.0},
    }
    record(tmp_path, 1, 0, time=25, **beat)
    record(
        tmp_path,
        2,
        40,
        time=90,
        **beat | {"since": 60, "began": 50, "from_step": 4, "step": 8},
    )
    record(tmp_path, 3, 80)
    assert totals(tmp_path) == {
        KEPT: 10.0 + 5 + 10 + 20,
        START: 20.0,
        BETWEEN: 15.0,
    }


def test_the_watchdog_measures_each_phase_since_training_began(tmp_path, monkeypatch):
    moment = [100.0]
    monkeypatch.setattr(watching.time, "monotonic", lambda: moment[0])
    monkeypatch.setattr(watching.threading.Thread, "start", lambda thread: None)
    watch = Watch(None)
    try:
        watch.attach(Attempt.claim(tmp_path, tmp_path / "checkpoints", {"nodes": []}), 0)
        for seconds, call in (
            (7, lambda: watch.progress("building the model")),
            (8, lambda: watch.begin_training(3)),
            (1, lambda: watch.progress("training", 4)),
            (2, lambda: watch.progress("saving")),
            (4, lambda: watch.progress("training")),
            (8, lambda: watch.progress("training", 5)),
        ):
            moment[0] += seconds
            call()
        before = time.time()
        watch.record_end("finished", "")
    finally:
        watch.close()
    (attempt,) = read_attempts(tmp_path)
    assert attempt.heartbeat["phases"] == {"training": 1.0 + 2 + 8, "saving": 4.0}
    assert (attempt.heartbeat["from_step"], attempt.heartbeat["step"]) == (3, 5)
    assert attempt.heartbeat["began"] <= before <= attempt.ended
