"""Attempts at a run: who owns its directory, how each attempt ended, and whether another one is worth starting.

A run that is preempted, crashes or is requeued takes several attempts, each a group of processes. An attempt's records
are in `RUN/attempts/NNNNNN`. It writes checkpoints through a directory of its own, `CHECKPOINTS/.attempt-NNNNNN`, which
is its fencing token. The next attempt renames that directory away before it looks for a checkpoint, so an attempt that
is still alive somewhere (for example on a node cut off from the network) has nowhere left to write: its next save
fails, and ranks that check whether the directory still exists exit. No lock and no clock is involved. Nothing here
imports torch.
"""

import contextlib
import logging
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict

from megatron_tape.checkpoint.directories import checkpointed_step
from megatron_tape.errors import CheckpointError, StaleAttempt
from megatron_tape.io.files import remove, sync_directory
from megatron_tape.io.records import RECORD_BYTES, read_record, read_small, write_record

logger = logging.getLogger(__name__)

CRASH_LIMIT = 3
"""A job stops after this many crashes in a row without a new checkpointed step."""
IDLE_LIMIT = 10
"""The same limit for attempts that ended in any way: a run could be interrupted before its first step forever."""

RECORDS = 32
"""How many ranks' ends are recorded besides rank 0's; when a thousand ranks fail, most only repeat the first error."""
STOP_BYTES = 1000

FINISHED, INTERRUPTED, REFUSED, FAILED, HUNG, STALE = "finished", "interrupted", "refused", "failed", "hung", "stale"
UNREADY = "unready"
"""The nodes could not train together, for a reason that may pass. After REFUSED, another start would fail again."""


class Facts(TypedDict, total=False):
    """The contents of `attempt.json`: what started an attempt, when and where."""

    job: str | None
    started: float
    checkpoint_directory: str
    checkpoint_step: int
    nodes: list[str]
    log: str


class _End(TypedDict):
    rank: int
    outcome: Literal["finished", "interrupted", "refused", "unready", "failed", "hung", "stale"]
    message: str
    detail: str
    time: float


class End(_End, total=False):
    """How a rank ended, and which nodes caused it: the contents of `rank-RRRRR.json`."""

    bad_nodes: list[str]


class Verdict(TypedDict):
    """What the batch script should do after an attempt: the contents of `verdict.json`."""

    verdict: Literal["done", "again", "stop"]
    reason: str


class _Beat(TypedDict):
    time: float
    since: float
    stage: str
    step: int | None
    hang_timeout: float | None


class Heartbeat(_Beat, total=False):
    """When rank 0 was last known to be alive, what it was doing, and since when: the contents of `heartbeat.json`."""

    from_step: int
    """The step after which the attempt has continued, once it is known: of damaged checkpoints, earlier ones serve."""


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
        anything, if a newer version of this project wrote the newest checkpoint.
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

    def is_owner(self) -> bool:
        """Return whether the run still belongs to this attempt. Raises OSError if the file system does not answer."""
        return self.home.is_dir()

    def check_owner(self) -> None:
        """Raise StaleAttempt if a newer attempt has taken over."""
        if not self.is_owner():
            raise StaleAttempt(f"attempt {self.number} ends: a newer attempt has taken over this run")

    def request_stop(self, reason: str) -> None:
        """Ask the attempt, from any process, to save a checkpoint and end after its current step."""
        (self.directory / "stop").write_text(reason + "\n", encoding="utf-8")

    def stop_reason(self) -> str | None:
        """Return the reason passed to `request_stop`, or None if it was not called."""
        return _stop_reason(self.directory)

    def heartbeat(self, **facts: Any) -> None:
        """Record that the attempt is alive, and what it is doing."""
        write_record(self.directory / "heartbeat.json", {"time": time.time(), **facts}, durable=False)

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


@dataclass(frozen=True)
class AttemptRecord:
    """What the records say about an attempt. `outcome` is None while it runs, and stays None if it was killed."""

    number: int
    facts: Facts
    outcome: str | None = None
    message: str = ""
    detail: str = ""
    rank: int | None = None
    bad_nodes: tuple[str, ...] = ()
    stop_reason: str | None = None
    verdict: Verdict | None = None
    heartbeat: Heartbeat | dict = field(default_factory=dict)

    @property
    def lost_peer(self) -> bool:
        """Whether the only error is a lost connection to another rank, which recorded no error itself."""
        return self.outcome == FAILED and _is_echo(self.message)

    @property
    def crashed(self) -> bool:
        """Whether the attempt ended or disappeared without a warning from the scheduler.

        After a warning, some ranks may be killed before others, which then fail.
        """
        warned = self.stop_reason is not None and self.outcome in (None, FAILED)
        return self.outcome not in (FINISHED, INTERRUPTED) and not warned


def read_attempts(run_directory: str | Path) -> list[AttemptRecord]:
    """Read all attempts of a run, oldest first."""
    attempts = Path(run_directory) / "attempts"
    return [_read(attempts / f"{number:06d}", number) for number in sorted(_numbers(attempts, ""))]


def crash_loop(attempts: list[AttemptRecord], step: int, job: str | None) -> str | None:
    """Return the reason why another attempt is not worth starting, or None if it is.

    It is not worth starting if the last CRASH_LIMIT attempts of `job` crashed, or its last IDLE_LIMIT ended in any
    way, without a checkpoint beyond the step that the first of them started from. `step` is the newest checkpointed
    step now.
    """
    of_job = [attempt for attempt in attempts if attempt.facts.get("job") == job]
    for limit, what in ((CRASH_LIMIT, "crashed"), (IDLE_LIMIT, "ended")):
        last = of_job[-limit:]
        counts = len(last) == limit and (limit == IDLE_LIMIT or all(attempt.crashed for attempt in last))
        if counts and step <= last[0].facts.get("checkpoint_step", 0):
            return f"{limit} attempts in a row {what} without a checkpoint beyond step {step}"
    return None


def decide(run_directory: str | Path, checkpoint_directory: str | Path, number: int) -> tuple[str, str]:
    """Judge an attempt whose processes have ended: `done`, `again` or `stop`, and the reason in one sentence.

    The decision rests on what the run recorded, since a launcher's exit codes are unreliable after signals.
    """
    attempts = read_attempts(run_directory)
    attempt = next(record for record in attempts if record.number == number)
    if attempt.outcome == FINISHED:
        return "done", attempt.message
    if attempt.outcome == REFUSED:
        return "stop", attempt.message
    try:
        step = checkpointed_step(checkpoint_directory)
    except CheckpointError as error:
        return "stop", str(error)
    if attempts[-1].number > number:
        return "stop", f"attempt {attempts[-1].number} has taken over this run"
    ended = last_error(attempt)
    if loop := crash_loop(attempts, step, attempt.facts.get("job")):
        return "stop", f"{loop}; the last: {ended}"
    if not attempt.crashed:
        return "again", f"{ended}; the newest checkpoint is of step {step}"
    return "again", f"{ended}; continuing from the checkpoint of step {step}"


def last_error(attempt: AttemptRecord) -> str:
    """Return one sentence about how an unfinished attempt ended."""
    if not attempt.crashed:
        return attempt.message or f"{attempt.stop_reason} came before the first step, or left no time to save"
    if attempt.lost_peer:
        return f"a rank was killed or its node was lost, and left no error; rank {attempt.rank} lost its connection"
    if attempt.outcome is None:
        return f"attempt {attempt.number} was killed or its node was lost, and left no error"
    return attempt.message if attempt.outcome == UNREADY else f"rank {attempt.rank}: {attempt.message}"


def nodes_to_exclude(attempt: AttemptRecord) -> list[str]:
    """Return the nodes that the next attempt should avoid; none if every one of several nodes was bad."""
    nodes = attempt.facts.get("nodes", [])
    bad = [node for node in nodes if node in attempt.bad_nodes]
    return [] if len(nodes) > 1 and len(bad) == len(nodes) else bad


def _read(directory: Path, number: int) -> AttemptRecord:
    ends = [end for path in sorted(directory.glob("rank-*.json")) if (end := _read_advisory(path, End))]
    order = {FINISHED: 0, REFUSED: 1, UNREADY: 2, HUNG: 3, FAILED: 3, STALE: 4, INTERRUPTED: 5}
    # The cause comes first; other ranks fail a moment later as a consequence.
    ends.sort(key=lambda end: (order[end["outcome"]], _is_echo(end["message"]), end["time"]))
    first = ends[0] if ends else {}
    return AttemptRecord(
        number=number,
        facts=_read_advisory(directory / "attempt.json", Facts),
        outcome=first.get("outcome"),
        message=first.get("message", ""),
        detail=first.get("detail", ""),
        rank=first.get("rank"),
        bad_nodes=tuple(first.get("bad_nodes", ())),
        stop_reason=_stop_reason(directory),
        verdict=_read_advisory(directory / "verdict.json", Verdict) or None,
        heartbeat=_read_advisory(directory / "heartbeat.json", Heartbeat),
    )


ECHOES = (
    # gloo and sockets, also where NCCL quotes a socket's error
    "Connection closed by",
    "Connection reset by peer",
    "Broken pipe",
    # NCCL: another process is gone, or this one's communicator was aborted because of that
    "remote process exited or there was a network error",
    "ncclRemoteError",
    "NCCL communicator was aborted",
    "Watchdog caught collective operation timeout",
    # torch's store, which rank 0 hosts
    "Connection was likely closed",
    "recvValue failed",
    "sendBytes failed",
)
"""Phrases in a rank's error when another rank is gone. An ncclSystemError alone may be caused by the rank itself."""


def _is_echo(message: str) -> bool:
    return any(words in message for words in ECHOES)


def _read_advisory(path: Path, shape: Any) -> dict[str, Any]:
    """Read a record that a run can do without: one that cannot be used is ignored with a warning."""
    try:
        return read_record(path, shape, RECORD_BYTES >> 6)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        logger.warning("warning: %s", error)
        return {}


def _stop_reason(directory: Path) -> str | None:
    try:
        reason = read_small(directory / "stop", STOP_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return None
    except ValueError:  # the file exists, so a stop was requested, whatever it contains
        reason = ""
    return " ".join(reason.split()) or "a request to stop"


def _numbers(directory: Path, prefix: str) -> list[int]:
    if not directory.is_dir():
        return []
    names = [name.removeprefix(prefix) for name in os.listdir(directory) if name.startswith(prefix)]
    return [int(name) for name in names if name.isdigit()]


def _revoke(home: Path) -> None:
    """Take an earlier attempt's directory away, although its owner may be publishing a checkpoint from it.

    Staged checkpoints are renamed rather than emptied: either this rename or the owner's rename, which publishes the
    checkpoint, succeeds, but never both.
    """
    revoked = home.with_name(home.name.replace("attempt", "revoked"))
    with contextlib.suppress(FileNotFoundError):
        os.rename(home, revoked)
    for staged in list(revoked.glob("step-*")):
        with contextlib.suppress(FileNotFoundError):
            os.rename(staged, home.with_name(f"{revoked.name}-{staged.name}"))
