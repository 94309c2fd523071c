"""Log a run's metrics to the console, `metrics.jsonl`, TensorBoard and Weights & Biases.

Each logged step is one line on the console and one row (a JSON object) in `metrics.jsonl`. A metric
has the same name everywhere, such as `train/loss`. TensorBoard groups charts by the part before the
slash.

Only rank 0 writes. A resumed run continues the files of earlier attempts as if it had never been
interrupted: it drops the rows after the step that it resumes from, and an earlier attempt that is
still alive can no longer add rows.

A full disk does not stop training. Rows stay in memory until they can be written. TensorBoard
misses the metrics from the first failure to the next `sync` with enough space. This module does not
import torch.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from megatron_tape.io.files import SUFFIX, write_whole
from megatron_tape.io.records import parse_record
from megatron_tape.run.weights_and_biases import WandbRun
from megatron_tape.text import LOG_TIME, duration, flop_count

logger = logging.getLogger(__name__)

LOSS = "train/loss"
GRAD_NORM = "train/grad_norm"
LEARNING_RATE = "train/learning_rate"
Z_LOSS = "train/z_loss"
TOKENS = "train/tokens"
DATA_STAGE = "train/data_stage"
VALIDATION_LOSS = "validation/loss"
VALIDATION_PERPLEXITY = "validation/perplexity"
VALIDATION_LOSS_AVERAGED = "validation/loss_averaged_weights"
TOKENS_PER_SECOND = "throughput/tokens_per_second"
TFLOPS_PER_SECOND = "throughput/tflops_per_second"
MFU = "throughput/mfu"

RECENT = 20
"""Number of recent logged steps whose times are used to estimate the remaining time."""


class MetricsWriter:
    """Writes the metrics of a run to all its outputs; the run's directory is `directory`."""

    def __init__(
        self,
        directory: str | Path,
        total_steps: int,
        resume_step: int = 0,
        tensorboard: bool = True,
        clock: Callable[[], float] = time.monotonic,
        staging: Path | None = None,
        work: Callable[[int], int] = lambda steps: steps,
        wandb: WandbRun | None = None,
    ):
        """Open the files, and drop the rows of earlier attempts after `resume_step` (0: all rows).

        Args:
            directory: directory for `metrics.jsonl`, and for TensorBoard files in its subdirectory
                `tensorboard`.
            total_steps: number of steps of the whole run.
            resume_step: step that the run continues from.
            tensorboard: whether to write TensorBoard files.
            clock: returns the current time in seconds.
            staging: directory for the copy of `metrics.jsonl` without the dropped rows, which
                replaces the file. Once a newer attempt has removed it, the file cannot be replaced.
                Ignored on another file system.
            work: returns the amount of work in the first n steps, such as the number of sequences.
                The remaining time is estimated in proportion to the remaining work.
            wandb: W&B run that also receives the scalars.

        Raises:
            OSError: if the files cannot be created, or the disk has no space for the copy.
        """
        self.total_steps = total_steps
        self._work = work
        self._wandb = wandb
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self._last_step = resume_step
        self._clock = clock
        self._recent = deque([(resume_step, clock())], maxlen=RECENT + 1)
        path = directory / "metrics.jsonl"
        _rewrite(path, _rows_up_to(path, resume_step), staging)
        self._rows = _RecordFile(path)
        self._events: _EventFile | None = None
        self._tensorboard = directory / "tensorboard" if tensorboard else None
        self._warned = False
        # A new run also drops step 0, with which the configuration is shown.
        self._open_events(resume_step + 1 if resume_step > 0 else 0)

    def log(
        self, step: int, scalars: Mapping[str, float], words: Mapping[str, str] | None = None
    ) -> None:
        """Log the scalars of `step` by metric. Does not raise if the disk is full or fails.

        The row in `metrics.jsonl` also contains the time and the texts `words`. Numbers that are
        not finite become null in it.
        """
        assert step > self._last_step, "log every step once, in order"
        self._last_step = step
        self._recent.append((step, self._clock()))
        values = {name: float(value) for name, value in scalars.items()}
        row = {
            "step": step,
            "time": time.time(),
            **{k: v if math.isfinite(v) else None for k, v in values.items()},
            **(words or {}),
            "seconds_left": round(self._seconds_left(), 1),
        }
        self._rows.append(json.dumps(row, allow_nan=False).encode() + b"\n")
        self._show("scalars", values, step)
        if self._wandb is not None:
            self._wandb.log(step, values)
        with suppress(OSError):  # stdout may be a file on a full disk
            print(time.strftime(LOG_TIME), self._line(step, values), flush=True)

    def text(self, tag: str, text: str, step: int) -> None:
        """Show `text`, such as a sample or the configuration, verbatim in TensorBoard under
        `tag`.
        """
        self._show("text", tag, "\n".join("    " + line for line in text.splitlines()), step)

    def sync(self) -> None:
        """Flush all outputs and sync `metrics.jsonl` to disk. Call it before a checkpoint is
        saved.
        """
        self._rows.sync()
        if self._events is None:
            with suppress(OSError):
                self._open_events(self._last_step + 1)

    def close(self) -> None:
        """Close all outputs. Warns if rows are lost because they could not be written."""
        self._rows.close()
        self._show("close")
        self._events = self._tensorboard = None
        if self._wandb is not None:
            self._wandb.close()

    def _open_events(self, purge_step: int) -> None:
        if self._tensorboard is not None:
            self._events = _EventFile(self._tensorboard, purge_step)

    def _show(self, method: str, *arguments: Any) -> None:
        """Call a method of the event file. Drop the file if it fails, since its last record may be
        incomplete.
        """
        if self._events is not None:
            try:
                getattr(self._events, method)(*arguments)
            except OSError as error:
                self._events = None
                if not self._warned:
                    logger.warning(
                        "warning: TensorBoard files are not written until the disk has space (%s)",
                        error,
                    )
                self._warned = True

    def _line(self, step: int, values: Mapping[str, float]) -> str:
        formats = {
            LOSS: "loss {:.4f}".format,
            GRAD_NORM: "grad norm {:.3f}".format,
            LEARNING_RATE: "lr {:.3e}".format,
            TOKENS_PER_SECOND: "{:,.0f} tokens/s".format,
            TFLOPS_PER_SECOND: lambda value: f"{flop_count(1e12 * value)}/s",
            MFU: "MFU {:.1%}".format,
        }
        parts = [f"step {step:>{len(str(self.total_steps))}}/{self.total_steps}"]
        parts += [
            format_metric(values[name]) for name, format_metric in formats.items() if name in values
        ]
        parts.append(f"ETA {duration(self._seconds_left())}")
        if VALIDATION_LOSS in values:
            parts.append(f"validation loss {values[VALIDATION_LOSS]:.4f}")
        if VALIDATION_PERPLEXITY in values:
            parts.append(f"perplexity {values[VALIDATION_PERPLEXITY]:.2f}")
        return " | ".join(parts)

    def _seconds_left(self) -> float:
        (first_step, first_time), (last_step, last_time) = self._recent[0], self._recent[-1]
        first, last, total = map(self._work, (first_step, last_step, self.total_steps))
        return (last_time - first_time) / (last - first) * max(0, total - last)


class _EventFile:
    """A new event file of TensorBoard, which drops earlier files' values of `purge_step` and later
    steps.

    TensorBoard reads the files of a directory in the order of their names, which contain a Unix
    time in seconds, and never returns to an earlier name. Torch's SummaryWriter takes the time from
    this node's clock, so that the file of a later attempt may come first if that clock is slow.
    Here, the time is also above those of all existing files.
    """

    def __init__(self, directory: Path, purge_step: int):
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        directory.mkdir(parents=True, exist_ok=True)
        names = [
            re.match(r"events\.out\.tfevents\.([0-9]{10})\.", path.name)
            for path in directory.iterdir()
        ]
        later = [int(name[1]) + 1 for name in names if name]
        number = max(int(time.time()), *later, 0)
        path = directory / f"events.out.tfevents.{number:010d}.{os.uname().nodename}.{os.getpid()}"
        self._file = open(path, "xb")
        self._records = RecordWriter(self._file)
        try:
            self._append(file_version="brain.Event:2", step=purge_step)
            self._append(session_log=SessionLog(status=SessionLog.START), step=purge_step)
            self._file.flush()
        except OSError:  # each new try on a full disk would leave an empty file
            path.unlink()
            raise

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        for tag, value in values.items():
            self._append(
                summary=Summary(value=[Summary.Value(tag=tag, simple_value=value)]), step=step
            )
        self._file.flush()

    def text(self, tag: str, text: str, step: int) -> None:
        from torch.utils.tensorboard import summary

        self._append(summary=summary.text(tag, text), step=step)
        self._file.flush()

    def _append(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._records.write(Event(wall_time=time.time(), **fields).SerializeToString())

    def close(self) -> None:
        self._file.close()


class _RecordFile:
    """Appends records to a file. Records that cannot be written wait in memory and are written
    before later ones.

    Records that are appended after `close` are dropped.
    """

    def __init__(self, path: Path):
        self._path = path
        self._file = open(path, "ab", buffering=0)
        self._waiting = b""
        self._failing = False

    def append(self, record: bytes) -> None:
        """Write as much as possible of the waiting records and this one, without buffering."""
        if self._file.closed:
            return
        self._waiting += record
        try:
            while self._waiting:
                self._waiting = self._waiting[os.write(self._file.fileno(), self._waiting) :]
        except OSError as error:
            if not self._failing:
                message = "warning: metrics are kept in memory, since %s cannot be written (%s)"
                logger.warning(message, self._path, error)
            self._failing = True
        else:
            self._failing = False

    def sync(self) -> None:
        """Sync the file to disk. Ignores errors."""
        with suppress(OSError):
            if not self._file.closed:
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Try once more to write the waiting records. Log a warning if some are lost."""
        if self._file.closed:
            return
        self.append(b"")
        if self._waiting:
            message = "warning: the last %d bytes of metrics are lost, since %s cannot be written"
            logger.warning(message, len(self._waiting), self._path)
        with suppress(OSError):
            self._file.close()


def _rewrite(path: Path, chunks: Iterable[bytes], staging: Path | None) -> None:
    """Replace `path` durably by a new file with the contents `chunks`, which may be read from the
    old file.

    An earlier attempt that is still alive keeps writing to the old, now unlinked file. The new file
    is first written to the directory `staging` if that is on the same file system. If this fails,
    the old file is unchanged, and an OSError with `path` is raised.
    """
    try:
        if staging is not None and staging.stat().st_dev != path.parent.stat().st_dev:
            staging = None
        for leftover in path.parent.glob(
            f".*{SUFFIX}"
        ):  # of a process that was killed while it wrote a file
            leftover.unlink(missing_ok=True)
        write_whole(path, chunks, staging=staging)
    except OSError as error:
        reason = f"{error.strerror}, while copying a file of an earlier attempt"
        raise OSError(error.errno, reason, str(path)) from error


class _Row(TypedDict):
    step: float


def _rows_up_to(path: Path, step: int) -> Iterator[bytes]:
    """Yield the rows of a file up to `step`, if the file exists. Skips rows that a killed process
    left incomplete.
    """
    for line in read_lines(path):
        with suppress(ValueError):
            if parse_record(line, _Row)["step"] <= step:
                yield line.removesuffix(b"\n") + b"\n"


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file with their line ends. Yields nothing if the file does not exist."""
    if path.exists():
        with open(path, "rb") as file:
            yield from file


def last_rows(path: Path, shape: Any, tail: int) -> list[Any]:
    """Return the rows in the last `tail` bytes of a file, validated as the TypedDict `shape`.

    Skips invalid rows, since another process may be writing the file. Returns [] if the file does
    not exist.
    """
    rows: list[Any] = []
    if path.is_file():
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - tail))
            for line in file.read(tail).split(b"\n"):
                with suppress(
                    ValueError
                ):  # the first row may be cut off, and the last one incomplete
                    rows.append(parse_record(line, shape))
    return rows
