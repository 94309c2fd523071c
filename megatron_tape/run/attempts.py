"""Attempts of a run: which attempt may write to the run's directories, and the records that an
attempt writes.

An attempt is one start of the run, a group of processes. A run that is preempted, crashes or is
requeued has several attempts. Each one writes records to `RUN/attempts/NNNNNN`, which `judging`
reads.

An attempt owns the run as long as its staging directory `CHECKPOINTS/.attempt-NNNNNN` exists. It
first writes a checkpoint to this directory, and then renames it to publish it. A new attempt
renames the staging directories of all earlier attempts before it looks for a checkpoint. If an
earlier attempt is still alive, for example on a node that lost its network connection, its next
save fails, and ranks that check for the directory exit. This requires neither locks nor
synchronized clocks. This module does not import torch.
"""

import contextlib
import json
import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from megatron_tape.checkpoint.directories import checkpointed_step
from megatron_tape.errors import StaleAttempt, UserError
from megatron_tape.io.files import remove, sync_directory, write_whole
from megatron_tape.io.records import read_record, write_record
from megatron_tape.parallel.launcher import environment_number

ATTEMPT_VARIABLE = "TAPE_ATTEMPT"
"""Environment variable with the number of the attempt that a script in slurm/ has started. A run
without this variable starts an attempt itself."""
RECORDS = 32
"""Maximum number of ranks, in addition to rank 0, that record how they ended. Most others would
repeat the error.
"""
STOP_CHARACTERS = 1000
"""Maximum number of characters of a reason to stop that are shown."""

FINISHED = "finished"
INTERRUPTED = "interrupted"
REFUSED = "refused"
FAILED = "failed"
HUNG = "hung"
STALE = "stale"
"""Outcomes of a rank. INTERRUPTED: by a signal or a request to stop. REFUSED: a retry would fail
too. HUNG: it made no progress for `train.hang_timeout`. STALE: a newer attempt owns the run."""
UNREADY = "unready"
"""Outcome: the nodes could not train together, possibly for a temporary reason."""
TRAINING = "training"
"""Phase in the heartbeat during training steps."""
SPIKES = "spikes.jsonl"
"""File in the attempt's directory with the spikes that it detected."""
SKIPPED = "skipped_data.json"
"""File in the checkpoint directory with the data that a run with `train.spikes.action: rewind`
skips.
"""


class Facts(TypedDict, total=False):
    """The contents of `attempt.json`: when, where and from which checkpoint an attempt started.

    Times in all records are Unix times in seconds.
    """

    job: str | None
    """Id of the Slurm job."""
    started: float
    checkpoint_directory: str
    checkpoint_step: int
    """Step of the newest checkpoint at the start, or 0."""
    nodes: list[str]
    layout: str
    """Description of the parallel layout, such as `2 tensor parallel x 4 data parallel`."""
    log: str


class End(TypedDict):
    """The contents of `rank-RRRRR.json`: how a rank ended."""

    rank: int
    outcome: Literal["finished", "interrupted", "refused", "unready", "failed", "hung", "stale"]
    message: str
    detail: str
    """A traceback, or an empty string."""
    time: float
    bad_nodes: NotRequired[list[str]]
    """Nodes that the next attempt should exclude, because they caused the failure."""


class Verdict(TypedDict):
    """The contents of `verdict.json`: whether the batch script should end the job or start another
    attempt.
    """

    verdict: Literal["done", "again", "stop"]
    """done: the run is finished. again: start another attempt. stop: another attempt would fail
    too.
    """
    reason: str


class Heartbeat(TypedDict):
    """The contents of `heartbeat.json`: what rank 0 is doing."""

    time: float
    """When the record was written."""
    since: float
    """When rank 0 last made progress."""
    phase: str
    """Activity of rank 0, such as `training` or `saving`."""
    step: int | None
    hang_timeout: float | None
    from_step: NotRequired[int]
    """Step that the attempt continued from. It is missing during start-up."""
    began: NotRequired[float]
    """When training began."""
    phases: NotRequired[dict[str, float]]
    """Seconds spent in each phase from `began` to `since`."""


class Spike(TypedDict):
    """A line of `spikes.jsonl`: a spike that `train.spikes` detected."""

    step: int
    loss: float
    grad_norm: float
    action: str
    """`train.spikes.action`: warn, skip or rewind."""
    number: int
    """Number of the spike in the run, from 1."""


class SkippedData(TypedDict):
    """The contents of `skipped_data.json`: where the run continues in the training data after a
    spike.

    An attempt that continues from a checkpoint before this position skips the data in between.
    """

    step: int
    """Step of the spike."""
    samples: int
    """Number of training sequences up to and including that step."""
    spikes: int
    """Number of spikes of the run so far."""


@dataclass(frozen=True)
class Attempt:
    """An attempt of a run. Attempts are numbered from 1."""

    number: int
    directory: Path
    """Directory of the attempt's records."""
    staging: Path
    """Staging directory of the attempt's checkpoints. The attempt owns the run as long as this
    directory exists.
    """

    @classmethod
    def claim(
        cls, run_directory: str | Path, checkpoint_directory: str | Path, facts: dict[str, Any]
    ) -> "Attempt":
        """Start the next attempt of a run, and revoke the ownership of all earlier attempts.

        When this returns, earlier attempts can no longer publish checkpoints. `facts` are entries
        of `Facts` for `attempt.json`, in addition to the time, directory and step that this method
        records. Raises CheckpointError, before anything is changed, if a different version of this
        project wrote the newest checkpoint.
        """
        attempts = Path(run_directory) / "attempts"
        checkpoints = Path(checkpoint_directory)
        checkpointed_step(checkpoints)  # for its CheckpointError

        attempts.mkdir(parents=True, exist_ok=True)
        checkpoints.mkdir(parents=True, exist_ok=True)
        # Only one process can create a directory, so two that start at once get different numbers.
        while True:
            numbers = _numbers_in(attempts) + _numbers_in(checkpoints, prefix=".attempt-")
            number = 1 + max(numbers, default=0)
            attempt = cls.open(run_directory, checkpoint_directory, number)
            try:
                attempt.directory.mkdir()
                attempt.staging.mkdir()
                break
            except FileExistsError:
                time.sleep(0.05)

        for earlier in _numbers_in(checkpoints, prefix=".attempt-"):
            if earlier < number:
                _revoke(checkpoints / f".attempt-{earlier:06d}")
        sync_directory(checkpoints)
        # An earlier attempt that is still alive may write to its directory, so that the removal
        # fails. The next attempt then removes the directory.
        for revoked in checkpoints.glob(".revoked-*"):
            with contextlib.suppress(OSError):
                remove(revoked)

        record = {
            "attempt": number,
            "started": time.time(),
            "checkpoint_directory": str(checkpoints.resolve()),
            # Read again, since an earlier attempt may have published a checkpoint before it was
            # revoked.
            "checkpoint_step": checkpointed_step(checkpoints),
            **facts,
        }
        write_record(attempt.directory / "attempt.json", record)
        return attempt

    @classmethod
    def open(
        cls, run_directory: str | Path, checkpoint_directory: str | Path, number: int
    ) -> "Attempt":
        """Return attempt `number`, which `claim` has started, possibly in another process."""
        directory = Path(run_directory) / "attempts" / f"{number:06d}"
        return cls(number, directory, Path(checkpoint_directory) / f".attempt-{number:06d}")

    @classmethod
    def launched(
        cls, run_directory: str | Path, checkpoint_directory: str | Path
    ) -> "Attempt | None":
        """Return the attempt whose number is in the environment variable TAPE_ATTEMPT, or None if
        it is not set.

        Raises UserError if the value is not such a number, or if the directory of the attempt is
        missing or cannot be read.
        """
        fix = "unset it, so that the run starts an attempt itself, or use a script in slurm/"
        number = environment_number(ATTEMPT_VARIABLE, least=1, most=999_999, fix=fix)
        if number == 0:  # the variable is not set
            return None

        attempt = cls.open(run_directory, checkpoint_directory, number)
        if not os.path.isdir(attempt.directory):  # also false if the file system fails
            problem = f"is {number}, but {attempt.directory} is not a directory or cannot be read"
            raise UserError(ATTEMPT_VARIABLE, problem, fix)
        return attempt

    def is_owner(self) -> bool:
        """Return whether this attempt owns the run. Raises OSError if the file system fails."""
        return self.staging.is_dir()

    def check_owner(self) -> None:
        """Raise StaleAttempt unless this attempt owns the run."""
        if not self.is_owner():
            raise StaleAttempt(
                f"attempt {self.number} ends: a newer attempt has taken over this run, or"
                f" {self.staging} was removed or is no longer mounted"
            )

    def leave(self) -> None:
        """Remove the staging directory, and with it the ownership. Call it when all ranks have
        finished writing.
        """
        with contextlib.suppress(OSError):  # if the directory holds an unfinished checkpoint
            self.staging.rmdir()

    def request_stop(self, reason: str) -> None:
        """Ask the attempt to save a checkpoint and stop after its current step. Any process may
        call this.
        """
        write_whole(self.directory / "stop", [f"{reason}\n".encode()], durable=False)

    def heartbeat(self, **facts: Any) -> None:
        """Write `heartbeat.json` with the current time and `facts`, the other entries of
        `Heartbeat`.
        """
        write_record(
            self.directory / "heartbeat.json", {"time": time.time(), **facts}, durable=False
        )

    def record_spike(self, spike: Spike) -> None:
        """Append a line to `spikes.jsonl`. Raises OSError if the disk is full or fails."""
        with open(self.directory / SPIKES, "ab") as file:
            file.write(f"{json.dumps(spike)}\n".encode())

    def record_skipped_data(self, skipped: SkippedData) -> None:
        """Write `skipped_data.json`, so that the next attempt skips data.

        Raises OSError if this attempt no longer owns the run, or if the disk fails.
        """
        # Once a newer attempt has renamed the staging directory, this attempt cannot write into it.
        write_whole(
            self.staging.parent / SKIPPED,
            [f"{json.dumps(skipped)}\n".encode()],
            staging=self.staging,
        )

    def record_end(
        self, rank: int, outcome: str, message: str, detail: str = "", bad_nodes: Iterable[str] = ()
    ) -> None:
        """Write `rank-RRRRR.json`, the record of how a rank ended.

        The record contains the outcome, such as FAILED, one line about it (`message`), the
        traceback of an error or "" (`detail`), and the nodes that caused a failure (`bad_nodes`).

        If the rank has already recorded its end, nothing is written, since the first error is the
        cause of later ones. In addition to rank 0, about RECORDS ranks write a record: ranks that
        count the records at the same time may all write one.
        """
        path = self.directory / f"rank-{rank:05d}.json"
        recorded = len(list(self.directory.glob("rank-*.json")))
        if path.exists() or (rank != 0 and recorded >= RECORDS):
            return

        end = {
            "rank": rank,
            "outcome": outcome,
            "message": message,
            "detail": detail,
            "time": time.time(),
            "bad_nodes": list(bad_nodes),
        }
        write_record(path, end)


def stop_reason(directory: Path) -> str | None:
    """Return why an attempt was asked to stop, in one line, or None if it was not asked.

    `directory` has the records of the attempt. Raises OSError if the file system fails.
    """
    try:
        reason = (directory / "stop").read_text(errors="replace")
    except FileNotFoundError:
        return None
    return " ".join(reason.split())[:STOP_CHARACTERS] or "a request to stop"


def read_skipped_data(checkpoint_directory: Path) -> SkippedData | None:
    """Return the contents of `skipped_data.json`, or None if the run skips no data. Raises
    FileError if the record is damaged.
    """
    try:
        return read_record(checkpoint_directory / SKIPPED, SkippedData)
    except FileNotFoundError:
        return None


def attempt_numbers(run_directory: str | Path) -> list[int]:
    """Return the numbers of a run's attempts in ascending order."""
    attempts = Path(run_directory) / "attempts"
    numbers = _numbers_in(attempts)
    return sorted(number for number in numbers if (attempts / f"{number:06d}").is_dir())


def _numbers_in(directory: Path, prefix: str = "") -> list[int]:
    """Return N for each entry of a directory that is called `prefix` + N, where N has six digits.
    Return an empty list if there is no such directory.
    """
    if not directory.is_dir():
        return []
    pattern = f"{re.escape(prefix)}([0-9]{{6}})"
    matches = [re.fullmatch(pattern, name) for name in os.listdir(directory)]
    return [int(match[1]) for match in matches if match]


def _revoke(staging: Path) -> None:
    """End the ownership of an earlier attempt: rename its staging directory `staging`, and then the
    checkpoints in it.

    The earlier attempt may be publishing a checkpoint at the same time, by renaming it. Only one of
    the two renames of a checkpoint can succeed, so the earlier attempt publishes none after this
    function has returned.
    """
    revoked = staging.with_name(staging.name.replace("attempt", "revoked"))
    with contextlib.suppress(FileNotFoundError):  # the attempt has just left
        os.rename(staging, revoked)
    # On a network file system, the earlier attempt can still publish a checkpoint from the renamed
    # directory if it has looked the directory up before. Each checkpoint is therefore renamed, too.
    # `list` reads the whole directory before the loop changes it.
    for staged in list(revoked.glob("step-*")):
        with contextlib.suppress(FileNotFoundError):  # the attempt has just published it
            os.rename(staged, staging.with_name(f"{revoked.name}-{staged.name}"))
