"""Attempts at a run: who owns its directory, how each attempt ended, and whether another one is worth starting.

A run that is preempted, crashes or is requeued takes several attempts, each a group of processes. An attempt's records
lie in `RUN/attempts/NNNNNN`. It writes checkpoints through a directory of its own, `CHECKPOINTS/.attempt-NNNNNN`: its
fencing token. The next attempt renames that directory away before it looks for a checkpoint, so an attempt that lives
on somewhere (a node cut off the network) has no place left to write into, whatever it believes: its next save fails,
and the ranks that look whether the directory is still there end. No lock and no clock is involved. Nothing here
imports torch.
"""

import contextlib
import json
import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_tape.checkpoint import directories as checkpoint_files
from megatron_tape.errors import StaleAttempt
from megatron_tape.files import SUFFIX, sync_directory

CRASH_LIMIT = 3
"""Crashes in a row without a new checkpointed step after which a job stops."""
IDLE_LIMIT = 10
"""The same for attempts that ended in whatever way: one can be interrupted for ever before its first step."""

RECORDS = 32
"""Ranks whose end is noted, beside rank 0: of a thousand that fail the others only echo the first."""

FINISHED, INTERRUPTED, REFUSED, FAILED, HUNG, STALE = "finished", "interrupted", "refused", "failed", "hung", "stale"


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
        returns no earlier attempt can publish a checkpoint any more.
        """
        attempts, root = Path(run_directory) / "attempts", Path(checkpoint_directory)
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
            shutil.rmtree(revoked, ignore_errors=True)
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
        """Name an attempt that was claimed before."""
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
        """Return what `request_stop` was told, if it was called."""
        try:
            return (self.directory / "stop").read_text(encoding="utf-8").strip() or "a request to stop"
        except FileNotFoundError:
            return None

    def heartbeat(self, **facts: Any) -> None:
        """Say that the attempt lives, and where it stands."""
        write_record(self.directory / "heartbeat.json", {"time": time.time(), **facts}, durable=False)

    def record_end(self, rank: int, outcome: str, message: str, detail: str = "") -> None:
        """Note how `rank` ended; `detail` is a traceback. The first note of a rank stays, and enough are enough."""
        path = self.directory / f"rank-{rank:05d}.json"
        if not path.exists() and (rank == 0 or len(list(self.directory.glob("rank-*.json"))) < RECORDS):
            end = {"rank": rank, "outcome": outcome, "message": message, "detail": detail, "time": time.time()}
            write_record(path, end)


@dataclass(frozen=True)
class AttemptRecord:
    """What the records say of an attempt. `outcome` is None while it runs, and for ever if it was killed."""

    number: int
    facts: dict[str, Any]
    outcome: str | None = None
    message: str = ""
    detail: str = ""
    rank: int | None = None
    stop_reason: str | None = None
    verdict: dict[str, Any] | None = None
    heartbeat: dict[str, Any] = field(default_factory=dict)

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


def checkpointed_step(checkpoint_directory: str | Path) -> int:
    """Return the step of the newest checkpoint of complete size, 0 without one; contents are not read."""
    found = checkpoint_files.list_checkpoints(checkpoint_directory)
    return next((step for step, path in found if not checkpoint_files.problems(path, deep=False)), 0)


def crash_loop(attempts: list[AttemptRecord], step: int, job: str | None) -> str | None:
    """Say why no further attempt is worth starting, or return None.

    So it is when the last CRASH_LIMIT attempts of `job` crashed, or its last IDLE_LIMIT ended in whatever way, without
    a checkpoint beyond the first one's start; `step` is the newest checkpointed step now.
    """
    mine = [attempt for attempt in attempts if attempt.facts.get("job") == job]
    for limit, what in ((CRASH_LIMIT, "crashed"), (IDLE_LIMIT, "ended")):
        last = mine[-limit:]
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
    step = checkpointed_step(checkpoint_directory)
    if attempt.outcome == FINISHED:
        return "done", attempt.message
    if attempt.outcome == REFUSED:
        return "stop", attempt.message
    if attempts[-1].number > number:
        return "stop", f"attempt {attempts[-1].number} has taken over this run"
    told = last_error(attempt)
    if loop := crash_loop(attempts, step, attempt.facts.get("job")):
        return "stop", f"{loop}; the last: {told}"
    if not attempt.crashed:
        return "again", f"{told}; the newest checkpoint is of step {step}"
    return "again", f"{told}; continuing from the checkpoint of step {step}"


def last_error(attempt: AttemptRecord) -> str:
    """Tell in one sentence how an attempt that did not finish ended."""
    if not attempt.crashed:
        return attempt.message or f"{attempt.stop_reason} came before the first step, or left no time to save"
    if attempt.lost_peer:
        return f"a rank was killed or its node was lost, and left no error; rank {attempt.rank} lost its connection"
    if attempt.outcome is None:
        return f"attempt {attempt.number} was killed or its node was lost, and left no error"
    return f"rank {attempt.rank}: {attempt.message}"


def write_record(path: Path, value: dict[str, Any], durable: bool = True) -> None:
    """Write a small JSON file, whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}{SUFFIX}")
    with open(partial, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.write("\n")
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(partial, path)


def _read(directory: Path, number: int) -> AttemptRecord:
    ends = [end for path in sorted(directory.glob("rank-*.json")) if (end := _json(path))]
    order = {FINISHED: 0, REFUSED: 1, HUNG: 2, FAILED: 2, STALE: 3, INTERRUPTED: 4}
    # The cause comes first; what fails on other ranks a moment later is its consequence.
    ends.sort(key=lambda end: (order[end["outcome"]], _is_echo(end["message"]), end["time"]))
    first = ends[0] if ends else {}
    stop = directory / "stop"
    return AttemptRecord(
        number=number,
        facts=_json(directory / "attempt.json"),
        outcome=first.get("outcome"),
        message=first.get("message", ""),
        detail=first.get("detail", ""),
        rank=first.get("rank"),
        stop_reason=stop.read_text(encoding="utf-8").strip() if stop.is_file() else None,
        verdict=_json(directory / "verdict.json") or None,
        heartbeat=_json(directory / "heartbeat.json"),
    )


def _is_echo(message: str) -> bool:
    return any(told in message for told in ("Connection closed by peer", "Connection reset by peer", "Broken pipe"))


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}


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
