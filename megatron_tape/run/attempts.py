"""Attempts at a run: who owns its directory, and the records that each leaves; `judging` reads these.

A run that is preempted, crashes or is requeued takes several attempts, each a group of processes. An attempt's records
are in `RUN/attempts/NNNNNN`. It writes checkpoints through a directory of its own, `CHECKPOINTS/.attempt-NNNNNN`, which
is its fencing token. The next attempt renames that directory away before it looks for a checkpoint, so an attempt that
is still alive somewhere (for example on a node cut off from the network) has nowhere left to write: its next save
fails, and ranks that check whether the directory still exists exit. No lock and no clock is involved. Nothing here
imports torch.
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
"""The number of the attempt that a launcher has begun; if it is not set, the run begins one itself."""
RECORDS = 32
"""How many ranks' ends are recorded besides rank 0's; when a thousand ranks fail, most only repeat the first error."""
STOP_BYTES = 1000

FINISHED, INTERRUPTED, REFUSED, FAILED, HUNG, STALE = "finished", "interrupted", "refused", "failed", "hung", "stale"
TRAINING = "training"
"""The stage in which steps are made."""
SPIKES = "spikes.jsonl"
SKIPPED = "skipped_data.json"
"""Which data a run with `train.spikes.action: rewind` skips, among its checkpoints."""
UNREADY = "unready"
"""The nodes could not train together, for a reason that may pass. After REFUSED, another start would fail again."""


class Facts(TypedDict, total=False):
    """The contents of `attempt.json`: what started an attempt, when and where."""

    job: str | None
    started: float
    checkpoint_directory: str
    checkpoint_step: int
    nodes: list[str]
    layout: str
    log: str


class End(TypedDict):
    """How a rank ended, and which nodes caused it: the contents of `rank-RRRRR.json`."""

    rank: int
    outcome: Literal["finished", "interrupted", "refused", "unready", "failed", "hung", "stale"]
    message: str
    detail: str
    time: float
    bad_nodes: NotRequired[list[str]]


class Verdict(TypedDict):
    """What the batch script should do after an attempt: the contents of `verdict.json`."""

    verdict: Literal["done", "again", "stop"]
    reason: str


class Heartbeat(TypedDict):
    """When rank 0 was last known to be alive, what it was doing, and since when: the contents of `heartbeat.json`."""

    time: float
    since: float
    stage: str
    step: int | None
    hang_timeout: float | None
    from_step: NotRequired[int]
    """The step after which the attempt has continued, once it is known: of damaged checkpoints, earlier ones serve."""
    began: NotRequired[float]
    """When training began."""
    stages: NotRequired[dict[str, float]]
    """Seconds by stage from then to `since`."""


class Spike(TypedDict):
    """A step that `train.spikes` noticed: a line of `spikes.jsonl`."""

    step: int
    loss: float
    grad_norm: float
    action: str
    """warn, skip or rewind."""
    number: int
    """Counted from 1 over the whole run."""


class SkippedData(TypedDict):
    """Where a run continues after a spike: the contents of `skipped_data.json`.

    A run that starts from a checkpoint with fewer `samples` continues with the data after these.
    """

    step: int
    """Of the spike."""
    samples: int
    """Sequences up to and including those of that step."""
    spikes: int
    """How many the run has had."""


@dataclass(frozen=True)
class Attempt:
    """One attempt: its records are in `directory`, and it may write checkpoints as long as `home` exists."""

    number: int
    directory: Path
    home: Path

    @classmethod
    def claim(cls, run_directory: str | Path, checkpoint_directory: str | Path, facts: dict[str, Any]) -> "Attempt":
        """Begin the next attempt and take the run over from every earlier one.

        `facts` (JSON: job, nodes, ...) are stored in `attempt.json` with the step of the newest checkpoint. Once this
        returns, no earlier attempt can publish a checkpoint any more. Raises CheckpointError, before it changes
        anything, if another version of this project wrote the newest checkpoint.
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
        """Return the attempt that a launcher has begun, as TAPE_ATTEMPT says, or None if that is not set.

        Raises UserError if it is no attempt of the run, or cannot be read.
        """
        fix = "unset it, so that the run begins an attempt, or start the program with a script in slurm/"
        number = environment_number(ATTEMPT_VARIABLE, 0, least=1, most=999_999, fix=fix)
        if number == 0:
            return None
        attempt = cls.open(run_directory, checkpoint_directory, number)
        if not os.path.isdir(attempt.directory):  # False also after an error
            problem = f"is {number}, but {attempt.directory} is not a directory, or cannot be read"
            raise UserError(ATTEMPT_VARIABLE, problem, fix)
        return attempt

    def is_owner(self) -> bool:
        """Return whether the run still belongs to this attempt. Raises OSError if the file system does not answer."""
        return self.home.is_dir()

    def check_owner(self) -> None:
        """Raise StaleAttempt unless the run belongs to this attempt."""
        if not self.is_owner():
            raise self.loss()

    def loss(self) -> StaleAttempt:
        """Return why the run does not belong to this attempt any more."""
        why = f"a newer attempt has taken over this run, or {self.home} was removed or is no longer mounted"
        return StaleAttempt(f"attempt {self.number} ends: {why}")

    def leave(self) -> None:
        """Remove the directory through which checkpoints were written, once no rank writes any more."""
        with contextlib.suppress(OSError):  # it holds something
            self.home.rmdir()

    def request_stop(self, reason: str) -> None:
        """Ask the attempt, from any process, to save a checkpoint and end after its current step."""
        write_whole(self.directory / "stop", [f"{reason}\n".encode()], durable=False)

    def heartbeat(self, **facts: Any) -> None:
        write_record(self.directory / "heartbeat.json", {"time": time.time(), **facts}, durable=False)

    def record_spike(self, spike: Spike) -> None:
        """Add a line to `spikes.jsonl`."""
        with open_to_append(self.directory / SPIKES) as file:
            file.write(f"{json.dumps(spike)}\n".encode())

    def record_skipped_data(self, skipped: SkippedData) -> None:
        """Make the next attempt skip data; raises OSError if a newer attempt has taken over the run, or the disk fails.

        As a checkpoint, the record is published from `home`.
        """
        write_whole(self.home.parent / SKIPPED, [f"{json.dumps(skipped)}\n".encode()], staging=self.home)

    def record_end(
        self, rank: int, outcome: str, message: str, detail: str = "", bad_nodes: Iterable[str] = ()
    ) -> None:
        """Record how `rank` ended; `detail` is a traceback, and `bad_nodes` should be left out of the next attempt.

        Only a rank's first record is kept. At most RECORDS are written besides rank 0's.
        """
        path = self.directory / f"rank-{rank:05d}.json"
        if not path.exists() and (rank == 0 or len(list(self.directory.glob("rank-*.json"))) < RECORDS):
            end = {"rank": rank, "outcome": outcome, "message": message, "detail": detail, "time": time.time()}
            write_record(path, end | {"bad_nodes": list(bad_nodes)})


def stop_reason(directory: Path) -> str | None:
    """Return the reason why an attempt, with its records in `directory`, was asked to stop; None if it was not."""
    try:
        reason = read_small(directory / "stop", STOP_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return None
    except ValueError:  # the file exists, so a stop was requested, whatever it contains
        reason = ""
    return " ".join(reason.split()) or "a request to stop"


def read_skipped_data(checkpoint_directory: Path) -> SkippedData | None:
    """Return which data the run with these checkpoints skips, or None. Raises FileError for a damaged record."""
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
    """Take an earlier attempt's directory away, although its owner may be publishing a checkpoint from it.

    Staged checkpoints are renamed rather than emptied: either this rename or the owner's rename, which publishes the
    checkpoint, succeeds, but never both.
    """
    revoked = home.with_name(home.name.replace("attempt", "revoked"))
    with contextlib.suppress(FileNotFoundError):
        os.rename(home, revoked)
    if revoked.is_symlink():  # what it leads to is not this run's
        return
    for staged in list(revoked.glob("step-*")):
        with contextlib.suppress(FileNotFoundError):
            os.rename(staged, home.with_name(f"{revoked.name}-{staged.name}"))
