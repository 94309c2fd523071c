"""Ownership of a run by its newest attempt, and the verdict that follows from the records of its
attempts.
"""

import contextlib
import os
import time

import pytest

from megatron_tape.checkpoint import directories as checkpoint_files
from megatron_tape.checkpoint.directories import checkpointed_step
from megatron_tape.errors import CheckpointError, FileError, StaleAttempt
from megatron_tape.io.files import digest
from megatron_tape.run import watch as watching
from megatron_tape.run.attempts import SKIPPED, Attempt, read_skipped_data
from megatron_tape.run.judging import decide, nodes_to_exclude, read_attempts


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


def claim(run, job="7"):
    return Attempt.claim(run, run / "checkpoints", {"job": job})


def stage(attempt, step):
    staging = checkpoint_files.staging_directory(attempt.staging, step)
    (staging / "weights").write_text("w")
    return staging


def save(attempt, step):
    staging = stage(attempt, step)
    files = {"weights": digest(staging / "weights")}
    return checkpoint_files.publish(staging, attempt.staging.parent, step, files)


def verdict(run, exit_status=1):
    return decide(run, run / "checkpoints", read_attempts(run)[-1].number, exit_status)


def test_the_newest_attempt_owns_the_run_and_only_it_can_change_checkpoints(run):
    first = claim(run)
    assert first.number == 1
    assert first.is_owner()
    save(first, 5)
    second = claim(run)
    assert second.number == 2
    assert second.is_owner()
    assert not first.is_owner()
    with pytest.raises(StaleAttempt, match="attempt 1 ends"):
        first.check_owner()
    with pytest.raises(FileNotFoundError):
        checkpoint_files.staging_directory(first.staging, 15)
    assert checkpointed_step(run / "checkpoints") == 5


@pytest.mark.parametrize(
    "moment", ["before the rename", "after the rename", "before the staged rename"]
)
def test_a_checkpoint_published_during_a_takeover_is_complete_or_absent(run, monkeypatch, moment):
    checkpoints = run / "checkpoints"
    first = claim(run)
    save(first, 5)
    staging = stage(first, 10)
    rename = os.rename

    def publish(path):
        with contextlib.suppress(FileNotFoundError):
            checkpoint_files.publish(path, checkpoints, 10, {"weights": digest(path / "weights")})
            checkpoint_files.prune(checkpoints, 1)

    def renamed(source, target):
        """The first rename is that of the first attempt's staging directory."""
        monkeypatch.setattr(os, "rename", rename)
        if moment == "before the rename":
            publish(staging)
        rename(source, target)
        if moment == "after the rename":
            publish(staging)
        if moment == "before the staged rename":  # with a path that a network file system cached
            publish(target / staging.name)

    monkeypatch.setattr(os, "rename", renamed)
    claim(run)
    step = 5 if moment == "after the rename" else 10
    assert checkpointed_step(checkpoints) == step
    newest = checkpoint_files.newest_complete(checkpoints, pytest.fail)
    assert newest.name == f"step-{step:08d}"
    assert not list(checkpoints.glob(".revoked*"))


def test_a_run_stops_if_the_directory_of_its_records_vanishes(run, monkeypatch):
    attempt = Attempt.claim(run, run.parent / "elsewhere", {})
    monkeypatch.setattr(watching, "POLL_SECONDS", 0.01)
    with contextlib.closing(watching.Watch(None)) as watch:
        run.rename(run.with_name("moved"))
        watch.attach(attempt, 0)
        deadline = time.monotonic() + 10
        while watch.stop is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert watch.stop == f"the loss of {attempt.directory}"


@pytest.mark.parametrize(
    "ends, word, reason",
    [
        ([(0, "finished", "why")], "done", "why"),
        ([(0, "interrupted", "why")], "again", "why"),
        ([(0, "refused", "why")], "stop", "why"),
        ([(0, "failed", "why")], "again", "why"),
        ([(0, "unready", "why")], "again", "why"),
        ([(1, "failed", "an error"), (0, "refused", "bad steps")], "stop", "bad steps"),
        # Only the first record of a rank is kept.
        ([(0, "hung", "first"), (0, "failed", "second")], "again", "rank 0: first"),
    ],
)
def test_the_verdict_follows_from_the_records_of_the_ranks(run, ends, word, reason):
    attempt = claim(run)
    for end in ends:
        attempt.record_end(*end)
    assert verdict(run)[0] == word
    assert reason in verdict(run)[1]


def test_a_killed_attempt_is_repeated_and_a_stopped_attempt_did_not_crash(run):
    claim(run)
    assert verdict(run)[0] == "again"
    assert "killed or its node was lost" in verdict(run)[1]
    attempt = claim(run)
    attempt.request_stop("USR1")
    word, reason = verdict(run)
    assert word == "again"
    assert reason.startswith("USR1 came before the first step")


def test_the_first_error_is_the_cause_whatever_the_clocks_of_the_nodes_say(run, monkeypatch):
    attempt = claim(run)
    now = time.time()
    for rank, (clock, message) in enumerate([(now, "a consequence"), (now + 90, "the cause")]):
        with monkeypatch.context() as on_node:
            on_node.setattr(time, "time", lambda: clock)  # noqa: B023
            attempt.record_end(rank, "failed", message)
    for rank, written in ((0, now - 10), (1, now - 20)):
        os.utime(attempt.directory / f"rank-{rank:05d}.json", (written, written))
    assert read_attempts(run)[0].message == "the cause"


def test_the_reason_names_the_signal_that_ended_a_process(run):
    claim(run).record_end(0, "failed", "RuntimeError: connection closed")
    assert verdict(run, 137)[1].startswith("rank 0: RuntimeError: connection closed (a process was")
    assert "SIGKILL" in verdict(run, 137)[1]
    assert "a process was" not in verdict(run, 1)[1] + verdict(run, 255)[1]


def crash(run, job="7", step=None):
    attempt = claim(run, job)
    if step is not None:
        save(attempt, step)
    attempt.record_end(0, "failed", f"error {attempt.number}")
    return attempt


def test_a_job_stops_after_three_crashes_without_a_new_checkpoint(run):
    for expected in ("again", "again", "stop"):
        crash(run)
        word, reason = verdict(run)
        assert word == expected
    assert reason.startswith("3 attempts in a row crashed without a checkpoint beyond step 0")
    assert reason.endswith("the last: rank 0: error 3")


@pytest.mark.parametrize("when", [0, 1, 2])
def test_a_job_continues_after_three_crashes_with_a_new_checkpoint(run, when):
    for index in range(3):
        crash(run, step=10 if index == when else None)
    assert verdict(run)[0] == "again"


def test_crashes_before_an_interruption_or_of_another_job_are_not_counted(run):
    crash(run)
    crash(run)
    claim(run).record_end(0, "interrupted", "USR1")
    crash(run)
    assert verdict(run)[0] == "again"
    crash(run, job="8")
    crash(run, job="8")
    assert verdict(run)[0] == "again"


def test_a_job_stops_after_ten_interruptions_before_its_first_step(run):
    for count in range(1, 11):
        claim(run).request_stop("USR1")
        assert verdict(run)[0] == ("again" if count < 10 else "stop")
    assert "the last: USR1 came before the first step" in verdict(run)[1]


def test_a_failure_after_a_warning_is_no_crash_but_a_stale_attempt_without_a_newer_one_is(run):
    attempt = claim(run)
    attempt.request_stop("TERM")
    attempt.record_end(1, "failed", "connection closed by peer")
    assert verdict(run)[0] == "again"
    assert not read_attempts(run)[-1].crashed
    claim(run).record_end(0, "stale", "a newer attempt has taken over this run")
    assert verdict(run)[0] == "again"
    assert read_attempts(run)[-1].crashed


@pytest.mark.parametrize(
    "nodes, bad, excluded",
    [
        ("abc", "b", "b"),
        ("abc", "xc", "c"),
        ("abc", "abc", ""),
        ("abc", "", ""),
        ("a", "a", "a"),
    ],
)
def test_bad_nodes_are_excluded_unless_no_node_would_remain(run, nodes, bad, excluded):
    attempt = Attempt.claim(run, run / "checkpoints", {"nodes": list(nodes)})
    attempt.record_end(1, "failed", "an error")
    attempt.record_end(0, "unready", "preflight: b: no answer", bad_nodes=bad)
    (record,) = read_attempts(run)
    assert record.outcome == "unready"
    assert nodes_to_exclude(record) == list(excluded)
    assert verdict(run)[1].startswith("preflight: b: no answer; continuing")


def test_only_the_newest_attempt_records_skipped_data(run):
    first = claim(run)
    newest = claim(run)
    assert read_skipped_data(run / "checkpoints") is None
    with pytest.raises(FileNotFoundError):
        first.record_skipped_data({"step": 9, "samples": 36, "spikes": 1})
    newest.record_skipped_data({"step": 6, "samples": 24, "spikes": 1})
    assert read_skipped_data(run / "checkpoints")["samples"] == 24
    (run / "checkpoints" / SKIPPED).write_text('{"step": 6}')
    with pytest.raises(FileError, match="samples is missing"):
        read_skipped_data(run / "checkpoints")


@pytest.mark.parametrize(
    "name, contents",
    [
        ("rank-00000.json", ['{"outcome": "fin', '{"outcome": "finished"}', "[]", b"\xff"]),
        ("heartbeat.json", ['{"time": "now"}']),
        ("verdict.json", ['{"verdict": "unknown", "reason": ""}']),
        ("attempt.json", ['{"checkpoint_step": "5"}']),
    ],
)
def test_invalid_records_are_ignored_with_a_warning(run, caplog, name, contents):
    path = claim(run).directory / name
    for content in contents:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        caplog.clear()
        (record,) = read_attempts(run)
        assert record.outcome is None
        assert record.heartbeat == {}
        assert record.verdict is None
        assert verdict(run)[0] == "again"
        assert f"{path} cannot be used: " in caplog.text


def test_a_run_with_a_checkpoint_of_a_newer_version_is_not_taken_over(run):
    first = claim(run)
    manifest = save(first, 5) / "manifest.json"
    version = checkpoint_files.FORMAT_VERSION
    manifest.write_text(
        manifest.read_text().replace(
            f'"format_version": {version}', f'"format_version": {version + 1}'
        )
    )
    with pytest.raises(CheckpointError, match="newer version"):
        claim(run)
    assert first.is_owner()
    assert len(read_attempts(run)) == 1
    word, reason = verdict(run)
    assert word == "stop"
    assert "newer version" in reason
