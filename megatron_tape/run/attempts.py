"""Attempts at a run: who owns its directory, how each attempt ended, and whether another one is worth starting.

A run that is preempted, crashes or is requeued takes several attempts, each a group of processes. An attempt's records
lie in `RUN/attempts/NNNNNN`. It writes checkpoints through a directory of its own, `CHECKPOINTS/.attempt-NNNNNN`: its
fencing token. The next attempt renames that directory away before it looks for a checkpoint, so an attempt that lives
on somewhere (a node cut off the network) has no place left to write into, whatever it believes: its next save fails,
and the ranks that look whether the directory is still there end. No lock and no clock is involved. Nothing here
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
from megatron_tape.files import remove, sync_directory
from megatron_tape.records import RECORD_BYTES, read_record, read_small, write_record

logger = logging.getLogger(__name__)

CRASH_LIMIT = 3
"""Crashes in a row without a new checkpointed step after which a job stops."""
IDLE_LIMIT = 10
"""The same for attempts that ended in whatever way: one can be interrupted for ever before its first step."""

RECORDS = 32
"""Ranks whose end is recorded, beside rank 0: of a thousand that fail the others only echo the first."""
STOP_BYTES = 1000

FINISHED, INTERRUPTED, REFUSED, FAILED, HUNG, STALE = "finished", "interrupted", "refused", "failed", "hung", "stale"
UNREADY = "unready"
"""Nodes that could not train together, for a reason that may not last; REFUSED is what another start would repeat."""


class Facts(TypedDict, total=False):
    """What `attempt.json` says of an attempt: what began it, and where."""

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
    """How a rank ended, and which nodes are to blame for it: `rank-RRRRR.json`."""

    bad_nodes: list[str]


class Verdict(TypedDict):
    """What a batch script was to do after an attempt: `verdict.json`."""

    verdict: Literal["done", "again", "stop"]
    reason: str


class _Beat(TypedDict):
    time: float
    since: float
    stage: str
    step: int | None
    hang_timeout: float | None


class Heartbeat(_Beat, total=False):
    """When rank 0 last gave a sign of life, and what it had been doing since when: `heartbeat.json`."""


@dataclass(frozen=True)
class Attempt:
    """One attempt: its records in `directory`, its right to write checkpoints in `home`."""

    number: int
    directory: Path
    home: Path

    @classmethod
    def claim(cls, run_directory: str | Path, checkpoint_directory: str | Path, facts: dict[str, Any]) -> "Attempt":
        """Begin the next attempt and take the run over from every earlier one.

        `facts` (JSON: job, nodes, ...) are kept in `attempt.json`, with the step of the newest checkpoint. When this
        returns no earlier attempt can publish a checkpoint any more. Raises CheckpointError, before it changes
        anything, where the newest checkpoint is of a newer version.
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
        """Return an attempt that was claimed before."""
        directory = Path(run_directory) / "attempts" / f"{number:06d}"
        return cls(number, directory, Path(checkpoint_directory) / f".attempt-{number:06d}")

    def is_owner(self) -> bool:
        """Tell whether the run is still this attempt's. Raises OSError where the file system does not answer."""
        return self.home.is_dir()

    def check_owner(self) -> None:
        """Raise StaleAttempt when a newer attempt has taken over."""
        if not self.is_owner():
            raise StaleAttempt(f"attempt {self.number} ends: a newer attempt has taken over this run")

    def request_stop(self, reason: str) -> None:
        """Ask the attempt, from whatever process, to checkpoint and end after its current step."""
        (self.directory / "stop").write_text(reason + "\n", encoding="utf-8")

    def stop_reason(self) -> str | None:
        """Return the reason that `request_stop` was given, if it was called."""
        return _stop_reason(self.directory)

    def heartbeat(self, **facts: Any) -> None:
        """Record that the attempt is alive, and where it stands."""
        write_record(self.directory / "heartbeat.json", {"time": time.time(), **facts}, durable=False)

    def record_end(
        self, rank: int, outcome: str, message: str, detail: str = "", bad_nodes: Iterable[str] = ()
    ) -> None:
        """Record how `rank` ended; `detail` is a traceback, and `bad_nodes` are better left out of the next attempt.

        A rank's first record stays. Beside rank 0's at most RECORDS are written.
        """
        path = self.directory / f"rank-{rank:05d}.json"
        if not path.exists() and (rank == 0 or len(list(self.directory.glob("rank-*.json"))) < RECORDS):
            end = {"rank": rank, "outcome": outcome, "message": message, "detail": detail, "time": time.time()}
            write_record(path, end | {"bad_nodes": list(bad_nodes)})


@dataclass(frozen=True)
class AttemptRecord:
    """What the records say of an attempt. `outcome` is None while it runs, and for ever if it was killed."""

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
        """Whether the only error is that of losing the connection to another rank, which left none."""
        return self.outcome == FAILED and _is_echo(self.message)

    @property
    def crashed(self) -> bool:
        """Whether it ended, or vanished, for no reason that a scheduler gave.

        After a warning some ranks are killed sooner than others, which then fail.
        """
        warned = self.stop_reason is not None and self.outcome in (None, FAILED)
        return self.outcome not in (FINISHED, INTERRUPTED) and not warned


def read_attempts(run_directory: str | Path) -> list[AttemptRecord]:
    """Read all attempts of a run, oldest first."""
    attempts = Path(run_directory) / "attempts"
    return [_read(attempts / f"{number:06d}", number) for number in sorted(_numbers(attempts, ""))]


def crash_loop(attempts: list[AttemptRecord], step: int, job: str | None) -> str | None:
    """Say why no further attempt is worth starting, or return None.

    None is when the last CRASH_LIMIT attempts of `job` crashed, or its last IDLE_LIMIT ended in whatever way, without
    a checkpoint beyond the first one's start; `step` is the newest checkpointed step now.
    """
    of_job = [attempt for attempt in attempts if attempt.facts.get("job") == job]
    for limit, what in ((CRASH_LIMIT, "crashed"), (IDLE_LIMIT, "ended")):
        last = of_job[-limit:]
        counts = len(last) == limit and (limit == IDLE_LIMIT or all(attempt.crashed for attempt in last))
        if counts and step <= last[0].facts.get("checkpoint_step", 0):
            return f"{limit} attempts in a row {what} without a checkpoint beyond step {step}"
    return None


def decide(run_directory: str | Path, checkpoint_directory: str | Path, number: int) -> tuple[str, str]:
    """Judge an attempt whose processes are gone: `done`, `again` or `stop`, and the reason in one sentence.

    What the run recorded decides; exit codes of a launcher are unreliable after signals.
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
    """Say in one sentence how an attempt that did not finish ended."""
    if not attempt.crashed:
        return attempt.message or f"{attempt.stop_reason} came before the first step, or left no time to save"
    if attempt.lost_peer:
        return f"a rank was killed or its node was lost, and left no error; rank {attempt.rank} lost its connection"
    if attempt.outcome is None:
        return f"attempt {attempt.number} was killed or its node was lost, and left no error"
    return attempt.message if attempt.outcome == UNREADY else f"rank {attempt.rank}: {attempt.message}"


def nodes_to_exclude(attempt: AttemptRecord) -> list[str]:
    """Return the nodes without which the next attempt should go; none where all of several are to blame."""
    nodes = attempt.facts.get("nodes", [])
    bad = [node for node in nodes if node in attempt.bad_nodes]
    return [] if len(nodes) > 1 and len(bad) == len(nodes) else bad


def _read(directory: Path, number: int) -> AttemptRecord:
    ends = [end for path in sorted(directory.glob("rank-*.json")) if (end := _read_advisory(path, End))]
    order = {FINISHED: 0, REFUSED: 1, UNREADY: 2, HUNG: 3, FAILED: 3, STALE: 4, INTERRUPTED: 5}
    # The cause comes first; what fails on other ranks a moment later is its consequence.
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
    # gloo, sockets, and NCCL's last word on one
    "Connection closed by",
    "Connection reset by peer",
    "Broken pipe",
    # NCCL: another process is gone, or this one's communicator was given up because of it
    "remote process exited or there was a network error",
    "ncclRemoteError",
    "NCCL communicator was aborted",
    "Watchdog caught collective operation timeout",
    # torch's store, which lives in rank 0
    "Connection was likely closed",
    "recvValue failed",
    "sendBytes failed",
)
"""What a rank's error says when another rank is gone. An ncclSystemError alone may be the rank's own."""


def _is_echo(message: str) -> bool:
    return any(words in message for words in ECHOES)


def _read_advisory(path: Path, shape: Any) -> dict[str, Any]:
    """Read a record that a run can do without: one that cannot be used is as good as none, with a warning."""
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
    except ValueError:  # whatever it holds, somebody put it there
        reason = ""
    return " ".join(reason.split()) or "a request to stop"


def _numbers(directory: Path, prefix: str) -> list[int]:
    if not directory.is_dir():
        return []
    names = [name.removeprefix(prefix) for name in os.listdir(directory) if name.startswith(prefix)]
    return [int(name) for name in names if name.isdigit()]


def _revoke(home: Path) -> None:
    """Take an earlier attempt's directory away, although its owner may be publishing a checkpoint from it.

    Whatever is staged there is renamed, not emptied: of our rename and the owner's that makes it a checkpoint one wins.
    """
    revoked = home.with_name(home.name.replace("attempt", "revoked"))
    with contextlib.suppress(FileNotFoundError):
        os.rename(home, revoked)
    for staged in list(revoked.glob("step-*")):
        with contextlib.suppress(FileNotFoundError):
            os.rename(staged, home.with_name(f"{revoked.name}-{staged.name}"))
