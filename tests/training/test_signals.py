"""Tests of signals, hangs and failing disks in one training process; tests/slurm has tests on a
cluster.
"""

import contextlib
import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from datasets_for_tests import write_all
from launch import alone, environment, free_port, start
from training_cases import RECIPE, option, rows, steps_saved

from megatron_tape.checkpoint import directories as checkpoint_files
from megatron_tape.checkpoint import writing
from megatron_tape.errors import EXIT_RESTART, CheckpointError
from megatron_tape.run import watch
from megatron_tape.run.attempts import Attempt
from megatron_tape.run.judging import read_attempts
from megatron_tape.training import checkpoint_saver as saving
from megatron_tape.training.engine import Engine
from pretrain import train


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_all(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def uninterrupted(data, tmp_path_factory):
    """The rows of `metrics.jsonl` of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    assert train.main(arguments(data, folder)) == 0
    return rows(folder)


@pytest.fixture
def run(data, tmp_path):
    def start(*overrides):
        return train.main(arguments(data, tmp_path / "run", *overrides))

    start.folder = tmp_path / "run"
    return start


def arguments(data, folder, *overrides):
    prefix = option("data.prefix", f"{data}/a")
    return ["--config", str(RECIPE), prefix, f"--logging.directory={folder}", *overrides]


def interrupt_at(monkeypatch, place, name, count, number):
    """Send this process a signal during call number `count` of `place.name`."""
    original = getattr(place, name)
    calls = itertools.count(1)

    def wrapped(*args, **kwargs):
        if next(calls) == count:
            os.kill(os.getpid(), number)
        return original(*args, **kwargs)

    monkeypatch.setattr(place, name, wrapped)


def before_each_step(action, monkeypatch=None):
    """Call `action(number)` before each training step, in a test or else in the whole process."""
    original = Engine.train_step
    numbers = itertools.count(1)

    def step(self, *args):
        action(next(numbers))
        return original(self, *args)

    if monkeypatch is None:
        Engine.train_step = step
    else:
        monkeypatch.setattr(Engine, "train_step", step)


MOMENTS = {
    "in a step": (Engine, "train_step", 3, [3]),
    "in an evaluation": (Engine, "evaluate", 1, [5]),
    "in a save": (checkpoint_files, "publish", 1, [4]),
    "before the first step": (Engine, "__init__", 1, []),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_signal_saves_and_the_continued_run_equals_the_uninterrupted_one(
    run, uninterrupted, monkeypatch, moment
):
    number, (place, name, count, saved) = signal.SIGUSR1, MOMENTS[moment]
    with monkeypatch.context() as patched:
        interrupt_at(patched, place, name, count, number)
        assert run("--checkpoint.interval=4") == EXIT_RESTART
    assert steps_saved(run.folder)[-1:] == saved
    (attempt,) = read_attempts(run.folder)
    assert attempt.outcome == "interrupted"
    assert number.name in attempt.message
    assert run("--checkpoint.interval=4") == 0
    assert rows(run.folder) == uninterrupted
    assert signal.getsignal(number) is signal.SIG_DFL


def test_the_first_ctrl_c_saves_and_is_logged_and_the_second_ends_at_once(
    run, uninterrupted, monkeypatch, capfd
):
    with monkeypatch.context() as patched:
        interrupt_at(patched, Engine, "train_step", 3, signal.SIGINT)
        assert run() == 130
    said = capfd.readouterr().err
    assert "Ctrl-C: saving a checkpoint after this step; press Ctrl-C again to end at once" in said
    assert "Ctrl-C stopped the run after step 3; run the same command to continue" in said
    assert steps_saved(run.folder) == [3]
    with monkeypatch.context() as patched:
        steps = []

        def press_twice(number):
            steps.append(number)
            if number == 2:
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)

        before_each_step(press_twice, patched)
        assert run() == 130
    assert steps_saved(run.folder) == [3]
    assert steps == [1, 2]
    assert [attempt.outcome for attempt in read_attempts(run.folder)] == ["interrupted"] * 2
    assert run() == 0
    assert rows(run.folder) == uninterrupted
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("place, name", [(train, "check"), (Engine, "__init__")])
def test_ctrl_c_before_training_ends_at_once(run, monkeypatch, place, name):
    interrupt_at(monkeypatch, place, name, 1, signal.SIGINT)
    assert run() == 130
    assert steps_saved(run.folder) == []


def interrupted_without_reader(given):
    """Train with Ctrl-C in the third step, after the reader of stdout and stderr has ended, as `|
    tee log` does.
    """

    def close_and_interrupt(number):
        if number == 3:
            reader, writer = os.pipe()
            os.close(reader)
            os.dup2(writer, 1)
            os.dup2(writer, 2)
            os.kill(os.getpid(), signal.SIGINT)

    before_each_step(close_and_interrupt)
    os._exit(train.main(given))


def test_ctrl_c_saves_if_it_also_ends_the_reader_of_the_output(data, tmp_path):
    folder = tmp_path / "run"
    process = start(
        interrupted_without_reader, (arguments(data, folder),), tmp_path / "log", alone()
    )
    process.join(300)
    assert process.exitcode == 130
    assert steps_saved(folder) == [3]
    assert [attempt.outcome for attempt in read_attempts(folder)] == ["interrupted"]


def test_a_signal_while_libraries_load_ends_the_run_before_it_waits_for_other_ranks(
    run, monkeypatch
):
    interrupt_at(monkeypatch, train, "load_libraries", 1, signal.SIGTERM)
    monkeypatch.setattr("megatron_tape.training.trainer.Trainer", None)
    assert run() == EXIT_RESTART


def test_a_signal_waits_for_the_asynchronous_save_that_is_on_its_way(run, monkeypatch):
    original = checkpoint_files.publish

    def publish(staging, root, step, files):
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)
        return original(staging, root, step, files)

    monkeypatch.setattr(checkpoint_files, "publish", publish)
    settings = ("--checkpoint.interval=4", "--checkpoint.asynchronous=true", "--train.steps=1000")
    assert run(*settings) == EXIT_RESTART
    (attempt,) = read_attempts(run.folder)
    first, last = steps_saved(run.folder)
    assert first == 4
    assert attempt.message == f"SIGTERM stopped the run after step {last}"
    assert all(
        checkpoint_files.problems(path) == []
        for _, path in checkpoint_files.list_checkpoints(run.folder / "checkpoints")
    )


def test_a_launcher_can_ask_an_attempt_to_stop(data, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    attempt = Attempt.claim(folder, folder / "checkpoints", {"job": "7"})
    monkeypatch.setenv("TAPE_ATTEMPT", "1")

    def ask(number):
        if number == 2:
            attempt.request_stop("USR1")
        elif number > 2:
            time.sleep(0.5)

    before_each_step(ask, monkeypatch)
    assert train.main(arguments(data, folder)) == EXIT_RESTART
    assert 2 <= steps_saved(folder)[-1] < 8
    assert read_attempts(folder)[0].message.startswith("USR1 stopped the run after step")


WAYS = pytest.mark.parametrize("asynchronous", ["false", "true"])


@WAYS
@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), MemoryError("No space left in memory")]
)
def test_a_failed_save_is_reported_and_the_next_interval_saves(
    run, monkeypatch, capfd, asynchronous, error
):
    original = writing.write_record
    calls = []

    def write_record(path, value):
        if path.name == "state.json":
            calls.append(value["step"])
            if value["step"] in (2, 4):
                raise error
        return original(path, value)

    monkeypatch.setattr(writing, "write_record", write_record)
    assert run("--checkpoint.interval=2", f"--checkpoint.asynchronous={asynchronous}") == 0
    assert calls == [2, 4, 6, 8, 10]
    assert steps_saved(run.folder) == [6, 8, 10]
    said = capfd.readouterr().err
    assert said.count("No space left") == said.count("again at the next checkpoint.interval") == 2
    assert not (run.folder / "checkpoints" / ".attempt-000001").exists()


@WAYS
@pytest.mark.parametrize("interval", [2, 100])
def test_a_save_that_can_never_succeed_ends_the_run_at_the_first_one(
    run, monkeypatch, capfd, asynchronous, interval
):
    """With an interval of 100, only the last step is saved, whose save is otherwise retried."""
    calls = []

    def write_safetensors(path, tensors):
        calls.append(path)
        raise RuntimeError("a bug in this test")

    monkeypatch.setattr(writing, "write_safetensors", write_safetensors)
    assert (
        run(f"--checkpoint.interval={interval}", f"--checkpoint.asynchronous={asynchronous}") == 1
    )
    assert len(calls) == 1
    assert steps_saved(run.folder) == []
    (attempt,) = read_attempts(run.folder)
    # Slurm's job does not start a refused run again.
    assert attempt.outcome == "refused"
    assert "(RuntimeError: a bug in this test)" in attempt.message
    said = capfd.readouterr().err
    assert "Traceback (most recent call last):" in said
    assert "every later save would fail too" in said


@pytest.mark.parametrize(
    "failing, status, saved, outcome", [(2, 0, [10], "finished"), (1000, 1, [], "failed")]
)
def test_the_last_step_waits_for_the_disk_and_without_it_the_run_is_not_finished(
    run, monkeypatch, failing, status, saved, outcome
):
    original = writing.Writer.save
    failures = []

    def save(*args):
        if len(failures) < failing:
            failures.append(1)
            raise CheckpointError("checkpoint 10", "could not be written: disk full")
        return original(*args)

    monkeypatch.setattr(writing.Writer, "save", save)
    monkeypatch.setattr(saving, "LAST_SAVE_WAIT", 0.01)
    monkeypatch.setattr(saving, "POLL_SECONDS", 0.01)
    assert run() == status
    assert steps_saved(run.folder) == saved
    assert read_attempts(run.folder)[0].outcome == outcome


def test_a_signal_ends_the_wait_for_the_disk_at_the_last_step(run, monkeypatch):
    def save(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        raise CheckpointError("checkpoint 10", "could not be written: disk full")

    with monkeypatch.context() as patched:
        patched.setattr(writing.Writer, "save", save)
        started = time.monotonic()
        assert run() == EXIT_RESTART
    assert time.monotonic() - started < saving.LAST_SAVE_WAIT
    assert steps_saved(run.folder) == []
    (attempt,) = read_attempts(run.folder)
    assert attempt.outcome == "interrupted"
    assert attempt.message == "SIGTERM stopped the run after step 10, which is not saved"
    assert run() == 0
    assert steps_saved(run.folder) == [10]


@WAYS
def test_an_attempt_that_was_taken_over_saves_nothing_and_ends(run, monkeypatch, asynchronous):
    monkeypatch.setattr(watch, "POLL_SECONDS", 1000)  # its thread would end this process

    def take_over(number):
        if number == 2:
            newer = Attempt.claim(run.folder, run.folder / "checkpoints", {"job": None})
            newer.record_end(0, "failed", "only in this test")

    before_each_step(take_over, monkeypatch)
    assert run("--checkpoint.interval=2", f"--checkpoint.asynchronous={asynchronous}") == 76
    assert steps_saved(run.folder) == []
    assert read_attempts(run.folder)[0].outcome == "stale"


def begin(given, hangs=False):
    """Train in a new process group, as under torchrun."""

    os.setsid()
    if hangs:
        before_each_step(lambda number: time.sleep(600))
    sys.exit(train.main(given))


def test_a_hang_ends_the_process_with_its_stack_on_disk(data, tmp_path):
    folder = tmp_path / "run"
    log = tmp_path / "log"
    process = start(
        begin,
        (arguments(data, folder, "--train.hang_timeout=4"), True),
        log,
        alone(),
    )
    process.join(120)
    assert process.exitcode == 77
    assert "train.hang_timeout" in log.read_text()
    directory = folder / "attempts" / "000001"
    assert "in step" in (directory / "stacks-00000.txt").read_text()
    (attempt,) = read_attempts(folder)
    assert attempt.outcome == "hung"
    assert "while training" in attempt.message
    collectives = json.loads((directory / "collectives-00000.json").read_text())
    assert any("all_reduce" in entry["profiling_name"] for entry in collectives["entries"])


def test_the_collectives_of_the_recorder_that_was_used_are_written(tmp_path, monkeypatch):
    """A build of torch with CUDA has a recorder for NCCL and one for gloo. The other one has no
    entries.
    """
    attempt = Attempt.claim(tmp_path, tmp_path / "checkpoints", {"job": None})
    watchdog = watch.Watch(None)
    watchdog.close()
    watchdog.attempt = attempt
    recorders = torch._C._distributed_c10d
    empty = b'{"version":"2.10"}'
    used = b'{"entries":[{"profiling_name":"gloo:all_reduce"}],"version":"2.10"}'
    path = attempt.directory / "collectives-00000.json"
    for nccl, gloo in ((empty, empty), (empty, used), (used, empty), (b"", used)):
        path.unlink(missing_ok=True)
        nccl_dump = lambda trace=nccl: trace  # noqa: E731
        monkeypatch.setattr(recorders, "_dump_nccl_trace_json", nccl_dump, raising=False)
        monkeypatch.setattr(recorders, "_dump_fr_trace_json", lambda trace=gloo: trace)
        watchdog._dump_collectives()
        if used in (nccl, gloo):
            assert path.read_bytes() == used
        else:
            assert not path.exists()


@pytest.fixture
def ranks(data, tmp_path):
    """Two training ranks with loader processes."""
    folder = tmp_path / "run"
    port = free_port()
    given = arguments(
        data, folder, "--data.num_workers=2", "--train.steps=100000", "--train.eval_interval=0"
    )
    started = [
        start(begin, (given,), tmp_path / f"{rank}.log", environment(rank, 2, port))
        for rank in range(2)
    ]
    metrics = folder / "metrics.jsonl"
    wait_until(
        lambda: metrics.exists() and metrics.read_text().count("\n") > 3,
        started,
    )
    yield started
    for rank in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.pid, signal.SIGKILL)
        rank.join()


def wait_until(condition, ranks=()):
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        assert all(rank.poll() is None for rank in ranks)
        time.sleep(0.05)


def processes_of_group(group):
    """Return the ids of a process group's processes, without zombies."""
    ids = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state, _, its_group = path.read_text().rsplit(")", 1)[1].split()[:3]
            if int(its_group) == group and state != "Z":
                ids.append(int(path.parent.name))
    return ids


@pytest.mark.parametrize(
    "number, status, reason",
    [(signal.SIGTERM, EXIT_RESTART, "SIGTERM"), (signal.SIGINT, 130, "Ctrl-C")],
)
def test_a_signal_to_every_process_of_the_run_saves_it(ranks, tmp_path, number, status, reason):
    assert all(len(processes_of_group(rank.pid)) > 2 for rank in ranks)
    for rank in ranks:
        os.killpg(rank.pid, number)
    for rank in ranks:
        rank.join(300)
    assert [rank.exitcode for rank in ranks] == [status] * 2
    (attempt,) = read_attempts(tmp_path / "run")
    assert attempt.outcome == "interrupted"
    assert reason in attempt.message
    assert steps_saved(tmp_path / "run") == [rows(tmp_path / "run")[-1]["step"]]
    wait_until(lambda: not any(processes_of_group(rank.pid) for rank in ranks))
