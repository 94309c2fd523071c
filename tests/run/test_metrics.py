import errno
import io
import itertools
import json
import logging
import math
import os
import stat
import struct
import sys
import time

import PIL.Image
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

from megatron_tape.config.schema import TrainConfig
from megatron_tape.errors import FileError
from megatron_tape.run.event_files import _framed
from megatron_tape.run.metrics import LINE_BYTES, MetricsWriter, read_lines

SCALARS = {"loss": 2.5, "grad_norm": 0.5, "lr": 1e-3, "tokens_per_second": 12345.0, "tflops_per_second": 1.5}


def rows(directory):
    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    content = (directory / "metrics.jsonl").read_text()
    assert content == "" or content.endswith("\n")
    found = [json.loads(line, parse_constant=refuse) for line in content.splitlines()]
    for row in found:
        del row["time"], row["seconds_left"]
    return found


def steps(directory):
    return [row["step"] for row in rows(directory)]


def events(directory):
    return EventAccumulator(str(directory / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def curve(directory, tag="train/loss"):
    return [(event.step, event.value) for event in events(directory).Scalars(tag)]


def texts(directory, tag):
    found = events(directory).Tensors(f"{tag}/text_summary")
    return [(event.step, event.tensor_proto.string_val[0].decode().strip()) for event in found]


def event_file(directory):
    (path,) = (directory / "tensorboard").iterdir()
    return path


def plain(directory, **settings):
    return MetricsWriter(directory, 100, tensorboard=False, **settings)


def write(directory, steps, tensorboard=False, **settings):
    writer = MetricsWriter(directory, 100, tensorboard=tensorboard, **settings)
    for step in steps:
        writer.log(step, SCALARS)
    writer.close()


def test_a_row_holds_the_step_every_scalar_and_the_time_of_day_as_soon_as_it_is_logged(tmp_path):
    before, writer = time.time(), plain(tmp_path)
    writer.log(10, SCALARS)
    assert rows(tmp_path) == [{"step": 10, **SCALARS}]
    assert before <= json.loads((tmp_path / "metrics.jsonl").read_text())["time"] <= time.time()
    writer.log(20, {"loss": 1.0})
    # The usual keys are present even if nothing was measured.
    assert rows(tmp_path)[1] == {"step": 20, "loss": 1.0, "grad_norm": None, "lr": None, "tokens_per_second": None}
    writer.close()


def test_validation_loss_brings_its_perplexity_and_what_is_not_finite_is_written_as_null(tmp_path):
    writer = plain(tmp_path)
    for step, value in enumerate((2.0, 1e4, math.nan, math.inf, -math.inf), 1):
        writer.log(step, {**SCALARS, "loss": value, "validation_loss": value})
    writer.close()
    assert [row["loss"] for row in rows(tmp_path)] == [2.0, 1e4, None, None, None]
    assert [row["validation_loss"] for row in rows(tmp_path)] == [2.0, 1e4, None, None, None]
    perplexities = [row["validation_perplexity"] for row in rows(tmp_path)[:3]]
    assert perplexities == [pytest.approx(math.exp(2.0)), None, None]


def test_a_resumed_run_leaves_one_line_without_gaps_or_repeats_and_a_fresh_one_starts_an_empty_file(tmp_path):
    write(tmp_path, [10, 20, 30, 40])
    write(tmp_path, [30, 40, 50], resume_step=20)
    assert steps(tmp_path) == [10, 20, 30, 40, 50]
    write(tmp_path, [5])
    assert steps(tmp_path) == [5]


def test_a_file_torn_at_any_byte_resumes(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1.7e9)
    write(tmp_path, [10, 20, 30], clock=lambda: 1.0)
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    first = whole.index(b"\n") + 1
    for length in range(first, len(whole)):
        (tmp_path / "metrics.jsonl").write_bytes(whole[:length])
        write(tmp_path, [20, 30], resume_step=10, clock=lambda: 1.0)
        assert (tmp_path / "metrics.jsonl").read_bytes() == whole


def test_an_interrupted_rewrite_leaves_the_old_file(tmp_path, monkeypatch):
    write(tmp_path, [10, 20, 30])
    whole = (tmp_path / "metrics.jsonl").read_bytes()

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        plain(tmp_path, resume_step=10)
    assert (tmp_path / "metrics.jsonl").read_bytes() == whole


def test_the_console_line_names_everything_once(tmp_path, capsys):
    times = iter([0.0, 30.0])
    writer = plain(tmp_path, clock=lambda: next(times))
    writer.log(10, {**SCALARS, "validation_loss": 2.0, "position/state_norm/layer_00": 1.0})
    writer.close()
    assert capsys.readouterr().out == (
        "step  10/100 | loss 2.5000 | grad norm 0.500 | lr 1.000e-03 | 12,345 tokens/s | 1.50 TFLOP/s | ETA 0:04:30"
        " | validation loss 2.0000, perplexity 7.39\n"
    )


def test_the_time_left_follows_the_recent_steps_and_forgets_a_slow_start(tmp_path, capsys):
    times = iter([0.0, 1000.0, *(1000.0 + step for step in range(2, 41))])
    writer = plain(tmp_path, clock=lambda: next(times))
    for step in range(1, 41):
        writer.log(step, SCALARS)
    writer.close()
    assert capsys.readouterr().out.splitlines()[-1].endswith("ETA 0:01:00")


def test_the_time_left_counts_sequences_as_a_ramp_makes_later_steps_larger(tmp_path, capsys):
    train = TrainConfig(steps=20, global_batch_size=32, batch_ramp={"from": 16, "over_samples": 160})
    seconds = itertools.accumulate([0, *train.batch_sizes(0, 20)])  # a second for each sequence
    writer = MetricsWriter(tmp_path, 20, tensorboard=False, clock=lambda: next(seconds), work=train.samples_after)
    for step in range(1, 11):
        writer.log(step, SCALARS)
    writer.close()
    assert train.samples_after(10) == 10 * 16 and train.samples_after(20) == 10 * 16 + 10 * 32
    assert capsys.readouterr().out.splitlines()[-1].endswith("ETA 0:05:20")
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["seconds_left"] == 320


def test_tensorboard_opens_on_losses_and_mean_norms_and_shows_each_scalar_and_text_under_its_tag(tmp_path):
    writer = MetricsWriter(tmp_path, 4)
    norms = {f"position/state_norm/layer_{layer:02d}": norm for layer, norm in enumerate((1.0, 7.0))}
    norms |= {name.replace("state", "update"): 0.0 for name in norms}
    writer.log(1, {**SCALARS, **norms, "validation_loss": 2.0, "skipped": 0.0})
    writer.text("configuration", "model:\n  num_layers: 2", 1)
    writer.close()
    assert sorted(events(tmp_path).Tags()["scalars"]) == [
        "loss/train",  # the first two groups are opened
        "loss/validation",
        "position/state_norm",
        "position/update_norm",
        "speed/tflops_per_second",
        "speed/tokens_per_second",
        "train/gradient_norm",
        "train/learning_rate",
        "train/loss",
        "train/skipped",
        "validation/loss",
        "validation/perplexity",
        *(f"z_by_layer/{name}_norm/{layer}" for name in ("state", "update") for layer in ("00", "01")),
    ]
    assert curve(tmp_path, "loss/train") == [(1, 2.5)] and curve(tmp_path, "loss/validation") == [(1, 2.0)]
    assert curve(tmp_path, "position/state_norm") == [(1, pytest.approx(5))]  # the root of the mean square
    assert curve(tmp_path, "position/update_norm") == [(1, 0.0)]
    assert curve(tmp_path, "z_by_layer/state_norm/01") == [(1, 7.0)]
    assert {name: rows(tmp_path)[0][name] for name in norms} == norms
    (found,) = events(tmp_path).Tensors("configuration/text_summary")
    assert found.tensor_proto.string_val[0] == b"    model:\n      num_layers: 2"


def png(width, height):
    file = io.BytesIO()
    PIL.Image.new("RGB", (width, height), "red").save(file, "png")
    return file.getvalue()


def test_tensorboard_shows_a_picture_with_its_size_and_forgets_those_past_a_resume(tmp_path):
    for resume_step, steps, width in ((0, (1, 2, 3), 30), (1, (2,), 20)):
        writer = MetricsWriter(tmp_path, 4, resume_step=resume_step)
        for step in steps:
            writer.picture("position/norms", png(width, 10), step)
        writer.close()
    pictures = [event.tensor_proto.string_val for event in events(tmp_path).Tensors("position/norms")]
    assert [list(strings) for strings in pictures] == [[b"30", b"10", png(30, 10)], [b"20", b"10", png(20, 10)]]
    assert events(tmp_path).summary_metadata["position/norms"].plugin_data.plugin_name == "images"


def test_an_attempt_that_is_still_alive_elsewhere_is_shut_out(tmp_path):
    stale = MetricsWriter(tmp_path, 100)
    for step in (1, 2, 3):
        stale.log(step, {"loss": 9.0, "stale": 1.0})
    writer = MetricsWriter(tmp_path, 100, resume_step=2)
    for step in (3, 4, 5):
        stale.log(step + 1, {"loss": 9.0, "stale": 1.0})
        stale.text("sample", "stale", step + 1)
        writer.log(step, {"loss": 5.0})
        writer.text("sample", "fresh", step)
    stale.close()
    writer.close()
    assert [(row["step"], row["loss"]) for row in rows(tmp_path)] == [(1, 9), (2, 9), (3, 5), (4, 5), (5, 5)]
    assert curve(tmp_path) == [(1, 9), (2, 9), (3, 5), (4, 5), (5, 5)]
    assert curve(tmp_path, "train/stale") == [(1, 1), (2, 1)]
    assert texts(tmp_path, "sample") == [(step, "fresh") for step in (3, 4, 5)]


def test_many_attempts_leave_each_step_and_each_text_once(tmp_path):
    for attempt, resume_step in enumerate((0, 4, 4, 2, 2, 6)):
        writer = MetricsWriter(tmp_path, 100, resume_step=resume_step)
        writer.text("configuration", f"attempt {attempt}", resume_step)
        for step in range(resume_step + 1, resume_step + 6):
            writer.log(step, {"loss": attempt})
            writer.text("sample", f"attempt {attempt}", step)
        writer.close()
    attempts = [0, 0, 4, 4, 4, 4, 5, 5, 5, 5, 5]
    expected = list(enumerate(attempts, 1))
    assert [(row["step"], row["loss"]) for row in rows(tmp_path)] == expected
    assert curve(tmp_path) == expected
    assert texts(tmp_path, "sample") == [(step, f"attempt {attempt}") for step, attempt in expected]
    assert texts(tmp_path, "configuration") == [(0, "attempt 0"), (2, "attempt 4"), (6, "attempt 5")]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 3


@pytest.mark.parametrize("tensorboard", [True, False])
def test_a_fresh_run_keeps_no_event(tmp_path, tensorboard):
    writer = MetricsWriter(tmp_path, 100)
    writer.text("configuration", "a: 1", 0)
    writer.log(1, SCALARS)
    writer.close()
    write(tmp_path, [5], tensorboard=tensorboard)
    if tensorboard:
        assert curve(tmp_path) == [(5, 2.5)]
        assert "configuration/text_summary" not in events(tmp_path).Tags()["tensors"]
    else:
        assert list((tmp_path / "tensorboard").iterdir()) == []


def test_events_of_a_run_that_went_on_without_tensorboard_are_dropped_too(tmp_path):
    write(tmp_path, [1, 2, 3, 4], tensorboard=True)
    write(tmp_path, [3, 4, 5, 6], tensorboard=False, resume_step=2)
    write(tmp_path, [6], tensorboard=True, resume_step=5)
    assert [step for step, _ in curve(tmp_path)] == [1, 2, 6]


def test_a_clock_that_is_behind_does_not_hide_earlier_steps(tmp_path, monkeypatch):
    for attempt, now in enumerate((3e9, 2e9, 1e9)):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        write(tmp_path, [attempt + 1], tensorboard=True, resume_step=attempt)
    assert [step for step, _ in curve(tmp_path)] == [1, 2, 3]


def test_a_running_tensorboard_forgets_the_steps_past_a_resume(tmp_path):
    write(tmp_path, [1, 2, 3, 4], tensorboard=True)
    watching = events(tmp_path)
    write(tmp_path, [3], tensorboard=True, resume_step=2)
    assert [event.step for event in watching.Reload().Scalars("train/loss")] == [1, 2, 3]


def test_an_event_file_torn_or_damaged_at_any_byte_resumes(tmp_path):
    write(tmp_path, [1], tensorboard=True)
    first = event_file(tmp_path).stat().st_size
    write(tmp_path, [1, 2], tensorboard=True)
    name, whole = event_file(tmp_path).name, event_file(tmp_path).read_bytes()
    for length in range(first, len(whole)):
        for path in (tmp_path / "tensorboard").iterdir():
            path.unlink()
        tail = bytes(64 * (length % 2))
        (tmp_path / "tensorboard" / name).write_bytes(whole[:length] + tail)
        write(tmp_path, [3], tensorboard=True, resume_step=2)
        assert [step for step, _ in curve(tmp_path)] == [1, 3]


def test_a_file_in_place_of_the_event_files_directory_is_named(tmp_path):
    (tmp_path / "tensorboard").touch()
    with pytest.raises(FileError, match="tensorboard is not a directory; remove it, or set logging.tensorboard"):
        MetricsWriter(tmp_path, 100)


class Disk:
    """Makes os.write fail like a full disk: it writes what still fits, and only the next call raises."""

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


def test_a_disk_that_fills_at_any_byte_loses_and_tears_nothing(tmp_path, monkeypatch):
    disk = Disk(monkeypatch)
    for room in range(0, 600, 7):
        disk.room = math.inf
        writer = MetricsWriter(tmp_path, 100)
        writer.log(1, SCALARS)
        disk.room = room
        for step in (2, 3, 4):
            writer.log(step, SCALARS)
            writer.text("sample", "a b c", step)
        assert curve(tmp_path)[0] == (1, 2.5)
        disk.room = math.inf
        writer.log(5, SCALARS)
        writer.close()
        assert rows(tmp_path) == [{"step": step, **SCALARS} for step in range(1, 6)]
        assert curve(tmp_path) == [(step, 2.5) for step in range(1, 6)]
        assert texts(tmp_path, "sample") == [(step, "a b c") for step in (2, 3, 4)]


def test_a_full_disk_is_reported_once_until_it_ends_and_so_is_the_end(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    disk = Disk(monkeypatch)
    writer = plain(tmp_path)
    for step in range(1, 9):
        disk.room = 0 if step in (2, 3, 4, 7) else math.inf
        writer.log(step, SCALARS)
    messages = [record.getMessage() for record in caplog.records]
    assert ["cannot be written" in message for message in messages] == [True, False, True, False]
    assert "No space left on device" in messages[0] and "metrics.jsonl" in messages[0]
    writer.close()
    assert len(caplog.records) == 4


def test_closing_on_a_full_disk_says_what_is_lost_and_raises_nothing(tmp_path, monkeypatch, caplog):
    disk = Disk(monkeypatch)
    writer = MetricsWriter(tmp_path, 100)
    writer.log(1, SCALARS)
    disk.room = 0
    writer.log(2, SCALARS)
    writer.log(3, SCALARS)
    writer.close()
    writer.close()
    writer.log(4, SCALARS)
    writer.sync()
    assert ["is closed without its last" in record.getMessage() for record in caplog.records[-2:]] == [True, True]
    assert steps(tmp_path) == [1]


def test_a_console_on_a_full_disk_does_not_stop_training(tmp_path, monkeypatch):
    class Full(io.StringIO):
        def flush(self):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stdout", Full())
    write(tmp_path, [1, 2])
    assert steps(tmp_path) == [1, 2]


def test_starting_on_a_full_disk_names_the_file_and_leaves_it(tmp_path, monkeypatch):
    write(tmp_path, [1, 2, 3], tensorboard=True)

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device.*metrics.jsonl"):
        plain(tmp_path, resume_step=2)
    assert steps(tmp_path) == [1, 2, 3]
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_refused_or_left_alone(tmp_path, make):
    (tmp_path / "tensorboard").mkdir()
    other = tmp_path / "tensorboard" / "events.out.tfevents.\u0661.x"
    make(other)
    write(tmp_path, [1], tensorboard=True)
    assert stat.S_IFMT(other.stat().st_mode) != stat.S_IFREG
    (tmp_path / "metrics.jsonl").unlink()
    make(tmp_path / "metrics.jsonl")
    with pytest.raises(FileError, match="metrics.jsonl is not a regular file"):
        plain(tmp_path)


def test_rows_and_events_that_cannot_be_used_are_left_out(tmp_path):
    write(tmp_path, [1, 2], tensorboard=True)
    long, path = b'{"step": 1, "x": "' + b"y" * (3 << 20) + b'"}\n', tmp_path / "metrics.jsonl"
    path.write_bytes(long + b"[" * 100_000 + b"\n" + path.read_bytes() + long + b'{"step": 3}')
    lengths = []
    for line in read_lines(path):
        lengths.append(len(line))
        assert line.endswith(b"\n") or line == b'{"step": 3}'
    assert len(lengths) == 6 and max(lengths) == LINE_BYTES + 1
    with open(event_file(tmp_path), "ab") as file:
        file.write(_framed(b"\xff" * 9))
    write(tmp_path, [4], tensorboard=True, resume_step=3)
    kept = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert kept == [1, 2, 3, 4] and [step for step, _ in curve(tmp_path)] == [1, 2, 4]


def test_an_event_that_says_it_has_more_bytes_than_there_are_ends_its_file(tmp_path):
    write(tmp_path, [1, 2], tensorboard=True)
    header = struct.pack("<Q", 1 << 62)
    with open(event_file(tmp_path), "ab") as file:
        file.write(header + struct.pack("<I", masked_crc32c(header)) + b"abc")
    write(tmp_path, [3], tensorboard=True, resume_step=2)
    assert [step for step, _ in curve(tmp_path)] == [1, 2, 3]
