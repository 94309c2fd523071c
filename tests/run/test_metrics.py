import errno
import itertools
import json
import math
import os
import time
from datetime import datetime

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter

from megatron_tape.config.train import BatchRampSettings, TrainConfig
from megatron_tape.run.metrics import MetricsWriter

SCALARS = {
    "train/loss": 2.5,
    "train/grad_norm": 0.5,
    "train/learning_rate": 1e-3,
    "throughput/tokens_per_second": 12345.0,
    "throughput/tflops_per_second": 1.5,
}


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Each call is a second later, as TensorBoard sorts the files of attempts by second."""
    monkeypatch.setattr(time, "time", itertools.count(1.7e9).__next__)


def rows(directory):
    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    content = (directory / "metrics.jsonl").read_text()
    assert content == "" or content.endswith("\n")
    parsed = [json.loads(line, parse_constant=refuse) for line in content.splitlines()]
    for row in parsed:
        del row["time"], row["seconds_left"]
    return parsed


def steps(directory):
    return [row["step"] for row in rows(directory)]


def events(directory):
    return EventAccumulator(
        str(directory / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0}
    ).Reload()


def curve(directory, tag="train/loss"):
    return [(event.step, event.value) for event in events(directory).Scalars(tag)]


def plain(directory, **settings):
    return MetricsWriter(directory, 100, tensorboard=False, **settings)


def write(directory, steps, total=100, tensorboard=False, **settings):
    writer = MetricsWriter(directory, total, tensorboard=tensorboard, **settings)
    for step in steps:
        writer.log(step, SCALARS)
    writer.close()


def test_a_row_is_written_at_once_with_step_scalars_and_time(tmp_path):
    before = time.time()
    writer = plain(tmp_path)
    writer.log(10, SCALARS)
    assert rows(tmp_path) == [{"step": 10, **SCALARS}]
    assert before <= json.loads((tmp_path / "metrics.jsonl").read_text())["time"] <= time.time()
    writer.log(20, {"train/loss": 1.0})
    assert rows(tmp_path)[1] == {"step": 20, "train/loss": 1.0}
    writer.close()


def test_numbers_that_are_not_finite_are_written_as_null(tmp_path):
    writer = plain(tmp_path)
    for step, value in enumerate(
        (2.0, 1e4, math.nan, math.inf, -math.inf),
        1,
    ):
        writer.log(step, {**SCALARS, "train/loss": value, "validation/loss": value})
    writer.close()
    assert [row["train/loss"] for row in rows(tmp_path)] == [2.0, 1e4, None, None, None]
    assert [row["validation/loss"] for row in rows(tmp_path)] == [2.0, 1e4, None, None, None]


def test_a_resumed_run_repeats_no_row_and_a_new_run_starts_an_empty_file(tmp_path):
    write(tmp_path, [10, 20, 30, 40])
    write(tmp_path, [30, 40, 50], resume_step=20)
    assert steps(tmp_path) == [10, 20, 30, 40, 50]
    write(tmp_path, [5])
    assert steps(tmp_path) == [5]


def test_a_run_resumes_from_a_file_that_ends_at_any_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1.7e9)
    write(tmp_path, [10, 20, 30], clock=lambda: 1.0)
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    first = whole.index(b"\n") + 1
    for length in range(first, len(whole), 7):
        (tmp_path / "metrics.jsonl").write_bytes(whole[:length])
        write(tmp_path, [20, 30], resume_step=10, clock=lambda: 1.0)
        assert (tmp_path / "metrics.jsonl").read_bytes() == whole


def test_the_console_line_shows_the_time_and_each_metric_once(tmp_path, capsys):
    before = datetime.now().replace(microsecond=0)
    times = iter([0.0, 30.0])
    writer = plain(tmp_path, clock=lambda: next(times))
    writer.log(10, {**SCALARS, "validation/loss": 2.0, "validation/perplexity": 7.389, "toy": 1.0})
    writer.close()
    line = capsys.readouterr().out
    assert before <= datetime.strptime(line[:19], "%Y-%m-%d %H:%M:%S") <= datetime.now()
    assert (
        line[19:]
        == " step  10/100 | loss 2.5000 | grad norm 0.500 | lr 1.000e-03 | 12,345 tokens/s | 1.50"
        " TFLOP/s | ETA 0:04:30 | validation loss 2.0000 | perplexity 7.39\n"
    )


def test_the_remaining_time_is_estimated_from_sequences_during_a_batch_ramp(tmp_path, capsys):
    ramp = BatchRampSettings(from_=16, over_samples=160)
    train = TrainConfig(steps=20, global_batch_size=32, batch_ramp=ramp)
    seconds = itertools.accumulate([0, *train.batch_sizes(0, 20)])  # each sequence takes a second
    write(
        tmp_path,
        range(1, 11),
        20,
        clock=lambda: next(seconds),
        work=train.samples_after,
    )
    assert capsys.readouterr().out.splitlines()[-1].endswith("ETA 0:05:20")
    last = (tmp_path / "metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["seconds_left"] == 10 * 32


def test_a_metric_has_the_same_name_in_a_row_in_tensorboard_and_in_wandb(tmp_path):
    class Wandb:
        logged: dict = {}

        def log(self, step, scalars):
            self.logged = {"step": step, **scalars}

        def close(self):
            pass

    wandb = Wandb()
    writer = MetricsWriter(tmp_path, 4, wandb=wandb)
    values = {
        **SCALARS,
        "position/state_norm": 5.0,
        "position/state_norm/layer_01": 7.0,
        "toy": 0.0,
    }
    writer.log(1, values)
    writer.text("configuration", "model:\n  num_layers: 2", 1)
    writer.close()
    assert sorted(events(tmp_path).Tags()["scalars"]) == sorted(values)
    assert all(
        curve(tmp_path, name) == [(1, pytest.approx(value))] for name, value in values.items()
    )
    assert rows(tmp_path) == [{"step": 1, **values}] == [wandb.logged]
    (event,) = events(tmp_path).Tensors("configuration/text_summary")
    assert event.tensor_proto.string_val[0] == b"    model:\n      num_layers: 2"


def test_an_earlier_attempt_that_is_still_alive_adds_no_rows(tmp_path):
    stale = MetricsWriter(tmp_path, 100)
    for step in (1, 2, 3):
        stale.log(step, {"train/loss": 9.0, "train/stale": 1.0})
    writer = MetricsWriter(tmp_path, 100, resume_step=2)
    for step in (3, 4, 5):
        stale.log(step + 1, {"train/loss": 9.0, "train/stale": 1.0})
        writer.log(step, {"train/loss": 5.0})
    stale.close()
    writer.close()
    expected = [(1, 9), (2, 9), (3, 5), (4, 5), (5, 5)]
    assert [(row["step"], row["train/loss"]) for row in rows(tmp_path)] == expected
    assert curve(tmp_path) == expected
    assert curve(tmp_path, "train/stale") == [(1, 1), (2, 1)]


def test_the_truncated_event_file_of_a_killed_attempt_is_read(tmp_path):
    write(tmp_path, [1, 2], tensorboard=True)
    (path,) = (tmp_path / "tensorboard").iterdir()
    path.write_bytes(path.read_bytes()[:-3])
    write(tmp_path, [3], tensorboard=True, resume_step=2)
    assert [step for step, _ in curve(tmp_path)] == [1, 2, 3]


def test_tensorboard_continues_at_the_first_sync_after_a_full_disk(tmp_path, monkeypatch, caplog):
    writer = MetricsWriter(tmp_path, 100)
    with monkeypatch.context() as full_disk:
        full_disk.setattr(
            RecordWriter, "write", lambda *_: os.write(os.open("/dev/full", os.O_WRONLY), b"x")
        )
        for step in (1, 2, 3):
            writer.log(step, SCALARS)
            writer.sync()
    assert "TensorBoard files are not written until" in caplog.text
    for step in (4, 5, 6):
        writer.log(step, SCALARS)
        writer.sync()
    writer.close()
    shown = [step for step, _ in curve(tmp_path)]
    assert shown[-1] == 6
    assert shown == sorted(set(shown))


class Disk:
    """Makes os.write fail as on a full disk: it writes what fits into `room` bytes, and only the
    next call raises.
    """

    def __init__(self, monkeypatch):
        self.room = math.inf
        self._write = os.write
        monkeypatch.setattr(os, "write", self.write)

    def write(self, descriptor, data):
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = self._write(descriptor, data[: min(len(data), self.room)])
        self.room -= count
        return count


def test_a_full_disk_loses_and_truncates_no_row_and_is_reported_once(tmp_path, monkeypatch, caplog):
    disk = Disk(monkeypatch)
    for room in range(0, 600, 7):
        disk.room = math.inf
        writer = plain(tmp_path)
        writer.log(1, SCALARS)
        disk.room = room
        for step in (2, 3, 4):
            writer.log(step, SCALARS)
        disk.room = math.inf
        writer.log(5, SCALARS)
        writer.close()
        assert rows(tmp_path) == [{"step": step, **SCALARS} for step in range(1, 6)]
        if room < 300:
            assert caplog.text.count("cannot be written") == 1
            caplog.clear()
