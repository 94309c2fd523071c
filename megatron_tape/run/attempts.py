"""Attempts of a run: ownership of its directory, and the records that each attempt writes (read by `judging`).

A run that is preempted, crashes or is requeued takes several attempts, each a group of processes. An attempt's records
are in `RUN/attempts/NNNNNN`. It writes checkpoints through a directory of its own, `CHECKPOINTS/.attempt-NNNNNN`, which
is its fencing token. The next attempt renames that directory before it looks for a checkpoint. An attempt that is still
alive, for example on a node that lost its network connection, can then no longer write: its next save fails, and ranks
that check for the directory exit. No locks or clocks are involved. This module does not import torch.
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
from megatron_tape.io.files import open_to_append, remove, sync_directory, write_whole
from megatron_tape.io.records import read_record, read_small, write_record
from megatron_tape.parallel.launcher import environment_number

ATTEMPT_VARIABLE = "TAPE_ATTEMPT"
"""Number of the attempt that the launcher has started. If it is not set, the run starts an attempt itself."""
RECORDS = 32
"""Maximum number of ranks, in addition to rank 0, that record their end. Most others would repeat the first error."""
STOP_BYTES = 1000

FINISHED, INTERRUPTED, REFUSED, FAILED, HUNG, STALE = "finished", "interrupted", "refused", "failed", "hung", "stale"
TRAINING = "training"
"""The heartbeat's stage during training steps."""
SPIKES = "spikes.jsonl"
SKIPPED = "skipped_data.json"
"""File in the checkpoint directory with the data that a run with `train.spikes.action: rewind` skips."""
UNREADY = "unready"
"""Outcome: the nodes could not train together, for a possibly temporary reason. (After REFUSED, a retry would fail.)"""


class Facts(TypedDict, total=False):
    """The contents of `attempt.json`: the job, time and place of an attempt's start."""

    job: str | None
    started: float
    checkpoint_directory: str
    checkpoint_step: int
    nodes: list[str]
    layout: str
    log: str


class End(TypedDict):
    """The contents of `rank-RRRRR.json`: how a rank ended, and which nodes were the cause."""

    rank: int
    outcome: Literal["finished", "interrupted", "refused", "unready", "failed", "hung", "stale"]
    message: str
    detail: str
    time: float
    bad_nodes: NotRequired[list[str]]


class Verdict(TypedDict):
    """The contents of `verdict.json`: what the batch script should do after an attempt."""

    verdict: Literal["done", "again", "stop"]
    reason: str


class Heartbeat(TypedDict):
    """The contents of `heartbeat.json`: when rank 0 was last alive, its activity, and since when."""

    time: float
    since: float
    stage: str
    step: int | None
    hang_timeout: float | None
    from_step: NotRequired[int]
    """The step that the attempt continued from, once it is known; it may skip damaged checkpoints."""
    began: NotRequired[float]
    """When training began."""
    stages: NotRequired[dict[str, float]]
    """Seconds by stage from `began` to `since`."""


class Spike(TypedDict):
    """A line of `spikes.jsonl`: a spike that `train.spikes` detected."""

    step: int
    loss: float
    grad_norm: float
    action: str
    """warn, skip or rewind."""
    number: int
    """Counted from 1 over the whole run."""


class SkippedData(TypedDict):
    """The contents of `skipped_data.json`: where a run continues in the data after a spike.

    A run that starts from a checkpoint with fewer `samples` skips the data up to these.
    """

    step: int
    """Step of the spike."""
    samples: int
    """Number of sequences up to and including that step."""
    spikes: int
    """Number of spikes so far."""


@dataclass(frozen=True)
class Attempt:
    """One attempt. Its records are in `directory`; it may write checkpoints as long as `home` exists."""

    number: int
    directory: Path
    home: Path

    @classmethod
    def claim(cls, run_directory: str | Path, checkpoint_directory: str | Path, facts: dict[str, Any]) -> "Attempt":
        """Start the next attempt and take over the run from all earlier ones.

        `facts` (JSON: job, nodes, ...) are stored in `attempt.json` with the step of the newest checkpoint. After this
        returns, earlier attempts cannot publish checkpoints. Raises CheckpointError, before any change, if another
        version of this project wrote the newest checkpoint.
        """
        attempts, root = Path(run_directory) / "attempts", Path(checkpoint_directory)
        checkpointed_step(root)
        attempts.mkdir(parents=True, exist_ok=True)
        root.mkdir(parents=True, exist_ok=True)
        while True:
            number = 1 + max([*_numbers(attempts, ""), *_numbers(root, ".attempt-")], default=0)
            attempt = cls.open(run_directory, checkpoint_directory, number)
            try:
                attempt.directory.mkdir()
                attempt.home.mkdir()
                break
            except FileExistsError:
                time.sleep(0.05)
        for earlier in sorted(set(_numbers(root, ".attempt-"))):
            if earlier < number:
                _revoke(root / f".attempt-{earlier:06d}")
        sync_directory(root)
        for revoked in root.glob(".revoked-*"):
            with contextlib.suppress(OSError):
                remove(revoked)
        started = {
            "attempt": number,
            "started": time.time(),
            "checkpoint_directory": str(root.resolve()),
            "checkpoint_step": checkpointed_step(root),
            **facts,
        }
        write_record(attempt.directory / "attempt.json", started)
        return attempt

    @classmethod
    def open(cls, run_directory: str | Path, checkpoint_directory: str | Path, number: int) -> "Attempt":
        """Return an attempt that has already been claimed."""
        directory = Path(run_directory) / "attempts" / f"{number:06d}"
        return cls(number, directory, Path(checkpoint_directory) / f".attempt-{number:06d}")

    @classmethod
    def launched(cls, run_directory: str | Path, checkpoint_directory: str | Path) -> "Attempt | None":
        """Return the attempt TAPE_ATTEMPT, which the launcher has started, or None if that variable is not set.

        Raises UserError if the run has no such attempt, or it cannot be read.
        """
        fix = "unset it, so that the run starts an attempt itself, or start the program with a script in slurm/"
        number = environment_number(ATTEMPT_VARIABLE, 0, least=1, most=999_999, fix=fix)
        if number == 0:
            return None
        attempt = cls.open(run_directory, checkpoint_directory, number)
        if not os.path.isdir(attempt.directory):  # False also after an error
            problem = f"is {number}, but {attempt.directory} is not a directory or cannot be read"
            raise UserError(ATTEMPT_VARIABLE, problem, fix)
        return attempt

    def is_owner(self) -> bool:
        """Return whether the run still belongs to this attempt. Raises OSError if the file system fails."""
        return self.home.is_dir()

    def check_owner(self) -> None:
        """Raise StaleAttempt unless the run belongs to this attempt."""
        if not self.is_owner():
            raise self.loss()

    def loss(self) -> StaleAttempt:
        """Return the error to raise if the run no longer belongs to this attempt."""
        why = f"a newer attempt has taken over this run, or {self.home} was removed or is no longer mounted"
        return StaleAttempt(f"attempt {self.number} ends: {why}")

    def leave(self) -> None:
        """Remove the directory for writing checkpoints, after all ranks have finished writing."""
        with contextlib.suppress(OSError):  # it is not empty
            self.home.rmdir()

    def request_stop(self, reason: str) -> None:
        """Ask the attempt, from any process, to save a checkpoint and stop after its current step."""
        write_whole(self.directory / "stop", [f"{reason}\n".encode()], durable=False)

    def heartbeat(self, **facts: Any) -> None:
        write_record(self.directory / "heartbeat.json", {"time": time.time(), **facts}, durable=False)

    def record_spike(self, spike: Spike) -> None:
        """Add a line to `spikes.jsonl`."""
        with open_to_append(self.directory / SPIKES) as file:
            file.write(f"{json.dumps(spike)}\n".encode())

    def record_skipped_data(self, skipped: SkippedData) -> None:
        """Make the next attempt skip data. The record is published from `home`, like a checkpoint.

        Raises OSError if a newer attempt has taken over the run, or the disk fails.
        """
        write_whole(self.home.parent / SKIPPED, [f"{json.dumps(skipped)}\n".encode()], staging=self.home)

    def record_end(
        self, rank: int, outcome: str, message: str, detail: str = "", bad_nodes: Iterable[str] = ()
    ) -> None:
        """Record how `rank` ended. `detail` is a traceback; the next attempt should exclude `bad_nodes`.

        Only a rank's first record is kept. At most RECORDS ranks write one, in addition to rank 0.
        """
        path = self.directory / f"rank-{rank:05d}.json"
        if not path.exists() and (rank == 0 or len(list(self.directory.glob("rank-*.json"))) < RECORDS):
            end = {"rank": rank, "outcome": outcome, "message": message, "detail": detail, "time": time.time()}
            write_record(path, end | {"bad_nodes": list(bad_nodes)})


def stop_reason(directory: Path) -> str | None:
    """Return why the attempt with its records in `directory` was asked to stop, or None if it was not."""
    try:
        reason = read_small(directory / "stop", STOP_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return None
    except ValueError:  # the file exists, so a stop was requested, whatever it contains
        reason = ""
    return " ".join(reason.split()) or "a request to stop"


def read_skipped_data(checkpoint_directory: Path) -> SkippedData | None:
    """Return the data that the run with these checkpoints skips, or None. Raises FileError for a damaged record."""
    try:
        return read_record(checkpoint_directory / SKIPPED, SkippedData)
    except FileNotFoundError:
        return None


def attempt_numbers(run_directory: str | Path) -> list[int]:
    """Return the numbers of a run's attempts, in order."""
    attempts = Path(run_directory) / "attempts"
    return sorted(number for number in _numbers(attempts, "") if (attempts / f"{number:06d}").is_dir())


def _numbers(directory: Path, prefix: str) -> list[int]:
    if not directory.is_dir():
        return []
    names = [name.removeprefix(prefix) for name in os.listdir(directory) if name.startswith(prefix)]
    return [int(name) for name in names if re.fullmatch("[0-9]{6}", name)]


def _revoke(home: Path) -> None:
    """Remove an earlier attempt's directory, even while its owner may be publishing a checkpoint from it.

    Staged checkpoints are renamed rather than emptied: either this rename or the owner's rename, which publishes the
    checkpoint, succeeds, but never both.
    """
    revoked = home.with_name(home.name.replace("attempt", "revoked"))
    with contextlib.suppress(FileNotFoundError):
        os.rename(home, revoked)
    if revoked.is_symlink():  # its target does not belong to this run
        return
    for staged in list(revoked.glob("step-*")):
        with contextlib.suppress(FileNotFoundError):
            os.rename(staged, home.with_name(f"{revoked.name}-{staged.name}"))
