"""Log a run's metrics to the console, `metrics.jsonl`, TensorBoard and Weights & Biases.

Each logged step is one line on the console and one row (a JSON object) in `metrics.jsonl`. A metric
has the same name everywhere, such as `train/loss`. TensorBoard groups charts by the part before the
slash.

Only rank 0 writes. A resumed run continues the files of earlier attempts as if it had never been
interrupted: it drops the rows after the step that it resumes from, and an earlier attempt that is
still alive can no longer add rows.

A full disk does not stop training. Rows stay in memory until they can be written. TensorBoard
misses the metrics from the first failure to the next `sync` with enough space. This module imports
torch only to write TensorBoard files.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import TypedDict

from megatron_tape.io.files import write_whole
from megatron_tape.io.records import parse_record
from megatron_tape.run.weights_and_biases import WandbRun
from megatron_tape.text import LOG_TIME, duration, flop_count

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

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
            clock: a function that returns the current time in seconds.
            staging: directory in which a copy of `metrics.jsonl` without the dropped rows is
                written before it replaces the file. A newer attempt renames this directory, so
                that this attempt can no longer replace the file. Default: `directory`, which is
                also used if `staging` is on another file system.
            work: a function that returns the amount of work in the first n steps, such as their
                number of sequences. The remaining time is estimated in proportion to the remaining
                work. By default, all steps are the same amount of work.
            wandb: W&B run that also receives the scalars.

        Raises:
            OSError: if the files cannot be created, or the disk has no space for the copy.
        """
        self.total_steps = total_steps
        self._work = work
        self._wandb = wandb
        self._last_step = resume_step
        self._clock = clock
        # The last logged steps, and when they were logged, by `clock`. RECENT intervals lie between
        # RECENT + 1 steps.
        self._recent = deque([(resume_step, clock())], maxlen=RECENT + 1)

        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "metrics.jsonl"
        # A file cannot be renamed from one file system to another.
        if staging is not None and staging.stat().st_dev != directory.stat().st_dev:
            staging = None
        # An earlier attempt that is still alive keeps writing to the old, now unlinked file.
        write_whole(path, _rows_up_to(path, resume_step), staging=staging)
        self._rows = _RecordFile(path)

        self._events: SummaryWriter | None = None
        self._events_directory = directory / "tensorboard" if tensorboard else None
        # TensorBoard hides what earlier attempts logged from `first_step` on. In a run that starts
        # at the beginning, these are all steps, also step 0, at which an earlier attempt without a
        # checkpoint has shown its configuration.
        first_step = resume_step + 1 if resume_step else 0
        self._open_events(first_step)

    def log(
        self, step: int, scalars: Mapping[str, float], words: Mapping[str, str] | None = None
    ) -> None:
        """Log the scalars of `step` by metric. Does not raise if the disk is full or fails.

        The row in `metrics.jsonl` also contains the time and `words`, texts by key. Numbers that
        are not finite become null in it.
        """
        assert step > self._last_step, "log every step once, in order"
        self._last_step = step
        self._recent.append((step, self._clock()))
        values = {name: float(value) for name, value in scalars.items()}
        seconds_left = self._seconds_left()

        # JSON has no NaN.
        row: dict[str, Any] = {"step": step, "time": time.time()}
        for name, value in values.items():
            row[name] = value if math.isfinite(value) else None
        row |= words or {}
        row["seconds_left"] = round(seconds_left, 1)
        self._rows.append(json.dumps(row, allow_nan=False).encode() + b"\n")

        def add_scalars(events: SummaryWriter) -> None:
            for name, value in values.items():
                events.add_scalar(name, value, step)

        self._write_events(add_scalars)
        if self._wandb is not None:
            self._wandb.log(step, values)

        with suppress(OSError):  # stdout may be a file on a full disk
            print(time.strftime(LOG_TIME), self._line(step, values, seconds_left), flush=True)

    def text(self, tag: str, text: str, step: int) -> None:
        """Show `text`, such as a sample or the configuration, verbatim in TensorBoard under
        `tag`.
        """
        # TensorBoard reads texts as Markdown, in which indented lines are code.
        verbatim = "\n".join(f"    {line}" for line in text.splitlines())
        self._write_events(lambda events: events.add_text(tag, verbatim, step))

    def sync(self) -> None:
        """Flush all outputs and sync `metrics.jsonl` to disk. Call it before a checkpoint is
        saved.
        """
        self._rows.sync()
        # After a failure, start a new TensorBoard file as soon as the disk has space for rows.
        if self._events is None and not self._rows.failing:
            self._open_events(self._last_step + 1)

    def close(self) -> None:
        """Close all outputs. Warns if rows are lost because they could not be written."""
        self._rows.close()
        self._write_events(lambda events: events.close())
        self._events = self._events_directory = None
        if self._wandb is not None:
            self._wandb.close()

    def _open_events(self, purge_step: int) -> None:
        """Create a TensorBoard file, if TensorBoard is enabled and the disk has space.

        TensorBoard then hides the values of `purge_step` and later steps in earlier files.
        """
        if self._events_directory is not None:
            from torch.utils.tensorboard import SummaryWriter

            with suppress(OSError):  # the disk is full
                self._events = SummaryWriter(str(self._events_directory), purge_step=purge_step)

    def _write_events(self, add: Callable[[SummaryWriter], None]) -> None:
        """Call `add` with the TensorBoard writer, if there is one, and flush the file.

        If that fails, the file is not continued: its last record may be incomplete, and readers
        stop there.
        """
        if self._events is None:
            return
        try:
            add(self._events)
            self._events.flush()
        except OSError as error:
            self._events = None
            logger.warning(
                "warning: TensorBoard files are not written until the disk has space (%s)", error
            )

    def _line(self, step: int, values: Mapping[str, float], seconds_left: float) -> str:
        """Return the line of a step on the console: step, metrics and remaining time."""
        width = len(str(self.total_steps))
        parts = [f"step {step:>{width}}/{self.total_steps}"]
        formats = {
            LOSS: "loss {:.4f}".format,
            GRAD_NORM: "grad norm {:.3f}".format,
            LEARNING_RATE: "lr {:.3e}".format,
            TOKENS_PER_SECOND: "{:,.0f} tokens/s".format,
            TFLOPS_PER_SECOND: lambda value: f"{flop_count(1e12 * value)}/s",
            MFU: "MFU {:.1%}".format,
            VALIDATION_LOSS: "validation loss {:.4f}".format,
            VALIDATION_PERPLEXITY: "perplexity {:.2f}".format,
        }
        for name, show in formats.items():
            # The remaining time comes before the validation, also in steps without validation.
            if name == VALIDATION_LOSS:
                parts.append(f"ETA {duration(seconds_left)}")
            if name in values:
                parts.append(show(values[name]))
        return " | ".join(parts)

    def _seconds_left(self) -> float:
        """Estimate the remaining time from the seconds per unit of work in recent steps."""
        # Only recent steps count: the first ones are slower, and evaluations take time now and
        # then.
        first_step, first_time = self._recent[0]
        last_step, last_time = self._recent[-1]
        work_done = self._work(last_step) - self._work(first_step)
        work_left = self._work(self.total_steps) - self._work(last_step)
        return (last_time - first_time) / work_done * max(0, work_left)


class _RecordFile:
    """Appends records to a file. Records that cannot be written wait in memory and are written
    before later ones.

    Records that are appended after `close` are dropped.
    """

    def __init__(self, path: Path):
        self._path = path
        # Python's buffer would lose its contents if flushing them fails.
        self._file = open(path, "ab", buffering=0)
        self._waiting = b""
        """Bytes of records that are not written yet."""
        self.failing = False
        """Whether the last record could not be written."""

    def append(self, record: bytes) -> None:
        """Write as much as possible of the waiting records and this one. Log a warning if that
        fails for the first time, and do not raise.
        """
        if self._file.closed:
            return
        self._waiting += record
        try:
            # A disk that becomes full may take only a part of the bytes.
            while self._waiting:
                written = os.write(self._file.fileno(), self._waiting)
                self._waiting = self._waiting[written:]
            self.failing = False
        except OSError as error:
            if not self.failing:
                logger.warning(
                    "warning: metrics are kept in memory, since %s cannot be written (%s)",
                    self._path,
                    error,
                )
            self.failing = True

    def sync(self) -> None:
        """Sync the file to disk. Ignores errors."""
        with suppress(OSError):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Try once more to write the waiting records. Log a warning if some are lost."""
        self.append(b"")
        if self._waiting:
            logger.warning(
                "warning: the last %d bytes of metrics are lost, since %s cannot be written",
                len(self._waiting),
                self._path,
            )
        with suppress(OSError):
            self._file.close()


class Row(TypedDict):
    """The key that every row of `metrics.jsonl` has."""

    step: int


def _rows_up_to(path: Path, step: int) -> Iterator[bytes]:
    """Yield the rows of a file up to `step` with their line ends, if the file exists. Skips rows
    that a killed process left incomplete.
    """
    for line in read_lines(path):
        with suppress(ValueError):
            if parse_record(line, Row)["step"] <= step:
                # The last row may be complete but lack its line end.
                yield line.removesuffix(b"\n") + b"\n"


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file with their line ends. Yields nothing if the file does not exist."""
    if path.exists():
        with open(path, "rb") as file:
            yield from file


def last_rows(path: Path, shape: Any, tail_bytes: int) -> list[Any]:
    """Return the rows in the last `tail_bytes` of a file, validated as the TypedDict `shape`.

    Skips invalid rows, since another process may be writing the file. Returns [] if the file does
    not exist.
    """
    if not path.is_file():
        return []

    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - tail_bytes))
        lines = file.read(tail_bytes).split(b"\n")
    rows = []
    for line in lines:
        # The reading may begin within the first row, and the last row may not be complete yet.
        with suppress(ValueError):
            rows.append(parse_record(line, shape))
    return rows
