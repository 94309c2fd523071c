"""Read the records of a run's attempts, and decide from them how each attempt ended and whether to
start another.
"""

import contextlib
import logging
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_tape.checkpoint.directories import checkpointed_step
from megatron_tape.errors import CheckpointError, FileError
from megatron_tape.io.records import (
    RECORD_BYTES,
    check_shape,
    parse_record,
    read_record,
    read_small,
)
from megatron_tape.run.attempts import (
    FAILED,
    FINISHED,
    HUNG,
    INTERRUPTED,
    REFUSED,
    SPIKES,
    STALE,
    UNREADY,
    End,
    Facts,
    Heartbeat,
    Spike,
    Verdict,
    attempt_numbers,
    stop_reason,
)

logger = logging.getLogger(__name__)

CRASH_LIMIT = 3
"""Number of crashes in a row without a new checkpoint after which a job stops. slurm/common.sh has
the same number.
"""
IDLE_LIMIT = 10
"""Number of attempts in a row without a new checkpoint after which a job stops, even if they did
not crash. This ends jobs that are interrupted again and again before their first step."""


@dataclass(frozen=True)
class AttemptRecord:
    """The records of an attempt.

    `outcome`, `message`, `detail` and `bad_nodes` are from the record of one `rank`: the one whose
    end caused the end of the others.
    """

    number: int
    facts: Facts
    """Contents of `attempt.json`; empty if it is missing."""
    outcome: str | None = None
    """How the attempt ended. None while it runs, or if it was killed."""
    message: str = ""
    detail: str = ""
    rank: int | None = None
    bad_nodes: tuple[str, ...] = ()
    stop_reason: str | None = None
    """Why the attempt was asked to stop, such as the name of a signal; None if it was not asked."""
    verdict: Verdict | None = None
    heartbeat: Heartbeat | dict = field(default_factory=dict)
    """Contents of `heartbeat.json`; empty if it is missing."""
    claimed_at: float = 0.0
    """When `attempt.json` was written, by the file system's clock (`file_system_time`), unlike the
    times in records.
    """
    beaten_at: float = 0.0
    """When `heartbeat.json` was written, by the file system's clock."""
    spikes: tuple[Spike, ...] = ()
    ended: float | None = None
    """Unix time at which the last rank recorded its end."""

    @property
    def crashed(self) -> bool:
        """Whether the attempt failed or disappeared, except after a warning from the scheduler.

        After a warning, some ranks are killed first, which makes others fail. This is not a crash.
        """
        warned = self.stop_reason is not None and self.outcome in (None, FAILED)
        return self.outcome not in (FINISHED, INTERRUPTED) and not warned


def read_attempts(run_directory: str | Path) -> list[AttemptRecord]:
    """Read the records of all attempts of a run, oldest first."""
    attempts = Path(run_directory) / "attempts"
    return [_read(attempts / f"{number:06d}", number) for number in attempt_numbers(run_directory)]


def crash_loop(attempts: list[AttemptRecord], step: int, job: str | None) -> str | None:
    """Return why `job` should not start another attempt, or None if it should.

    It should not if its last CRASH_LIMIT attempts crashed, or its last IDLE_LIMIT attempts ended in
    any way, and none of them saved a checkpoint. `attempts` are those of the run, and `step` is the
    step of its newest checkpoint.
    """
    job_attempts = [attempt for attempt in attempts if attempt.facts.get("job") == job]
    for limit, verb in ((CRASH_LIMIT, "crashed"), (IDLE_LIMIT, "ended")):
        last = job_attempts[-limit:]
        if len(last) < limit or step > last[0].facts.get("checkpoint_step", 0):
            continue
        if limit == IDLE_LIMIT or all(attempt.crashed for attempt in last):
            return f"{limit} attempts in a row {verb} without a checkpoint beyond step {step}"
    return None


def decide(
    run_directory: str | Path,
    checkpoint_directory: str | Path,
    number: int,
    exit_status: int = 0,
) -> tuple[str, str]:
    """Return the verdict on attempt `number`, which has ended, and its reason in one sentence; see
    `Verdict`.

    The verdict depends on the records of the run. `exit_status` is that of the launcher, which is
    above 128 if a signal ended a process. It appears in the reason.
    """
    attempts = read_attempts(run_directory)
    attempt = next((record for record in attempts if record.number == number), None)
    if attempt is None:
        fix = "check whether the run's directory still exists"
        raise FileError(str(Path(run_directory) / "attempts"), f"contains no attempt {number}", fix)
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
    if attempt.crashed and exit_status > 128:
        with contextlib.suppress(ValueError):
            ended += f" (a process was ended by {signal.Signals(exit_status - 128).name})"
    if loop := crash_loop(attempts, step, attempt.facts.get("job")):
        return "stop", f"{loop}; the last: {ended}"
    return "again", f"{ended}; continuing from the checkpoint of step {step}"


def last_error(attempt: AttemptRecord) -> str:
    """Return one sentence about how an attempt ended that did not finish the run."""
    if not attempt.crashed:
        too_early = f"{attempt.stop_reason} came before the first step, or left no time to save"
        return attempt.message or too_early
    if attempt.outcome is None:
        return f"attempt {attempt.number} was killed or its node was lost, without an error"
    if attempt.outcome == UNREADY:
        return attempt.message
    return f"rank {attempt.rank}: {attempt.message}"


def queue_state(job: str | None) -> str | None:
    """Return the state of a Slurm job, such as `RUNNING`.

    Returns "" if Slurm has no such job, and None if `job` is None or Slurm does not answer.
    """
    if job is None:
        return None

    command = ["squeue", "--noheader", "--jobs", job, "--format", "%T"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None

    if answer.returncode == 0:
        return answer.stdout.strip()
    if "Invalid job id" in answer.stderr:
        return ""
    return None


def nodes_to_exclude(attempt: AttemptRecord) -> list[str]:
    """Return the nodes that made the attempt fail, which the next one should exclude; none if all
    of several did.
    """
    nodes = attempt.facts.get("nodes", [])
    bad = [node for node in nodes if node in attempt.bad_nodes]
    if len(nodes) > 1 and len(bad) == len(nodes):
        return []
    return bad


_URGENCY = {FINISHED: 0, REFUSED: 1, UNREADY: 2, HUNG: 3, FAILED: 3, STALE: 4, INTERRUPTED: 5}
"""The end of a rank with the lowest number decides. Among equals, the first one caused the others:
a rank records its error before it exits, and only then the others lose their connection to it.
"""


def _read(directory: Path, number: int) -> AttemptRecord:
    ends: list[tuple[End, float]] = []
    for path in directory.glob("rank-*.json"):
        if end := _read_advisory(path, End):
            ends.append((end, _written_at(path)))
    # The clocks of two nodes differ, so the file system's clock comes before the recorded time.
    ends.sort(key=lambda item: (_URGENCY[item[0]["outcome"]], item[1], item[0]["time"]))
    first: Any = ends[0][0] if ends else {}

    return AttemptRecord(
        number=number,
        facts=_read_advisory(directory / "attempt.json", Facts),
        outcome=first.get("outcome"),
        message=first.get("message", ""),
        detail=first.get("detail", ""),
        rank=first.get("rank"),
        bad_nodes=tuple(first.get("bad_nodes", ())),
        stop_reason=stop_reason(directory),
        verdict=_read_advisory(directory / "verdict.json", Verdict) or None,
        heartbeat=_read_heartbeat(directory / "heartbeat.json"),
        claimed_at=_written_at(directory / "attempt.json"),
        beaten_at=_written_at(directory / "heartbeat.json"),
        ended=max((end["time"] for end, _ in ends), default=None),
        spikes=tuple(_read_spikes(directory / SPIKES)),
    )


def _written_at(path: Path) -> float:
    """Return when a file was written, by the file system's clock, or 0 if it is missing."""
    # Reading the record has refreshed the attributes that a network file system caches.
    return path.stat().st_mtime if path.exists() else 0.0


def _read_spikes(path: Path) -> Iterator[Spike]:
    """Yield the spikes in `spikes.jsonl`. Skips invalid lines, since a run may still be writing the
    file.
    """
    if path.exists():
        for line in read_small(path, RECORD_BYTES).splitlines():
            with contextlib.suppress(ValueError):
                yield parse_record(line, Spike)


def _read_heartbeat(path: Path) -> Any:
    """Read `heartbeat.json` like `_read_advisory`. Earlier versions called phases stages."""
    record = _read_advisory(path, dict[str, Any])
    for earlier, current in (("stage", "phase"), ("stages", "phases")):
        if earlier in record:
            record[current] = record.pop(earlier)
    if record:
        try:
            check_shape(record, Heartbeat)
        except ValueError as error:
            logger.warning("warning: %s cannot be used: %s", path, error)
            return {}
    return record


def _read_advisory(path: Path, shape: Any) -> Any:
    """Read a record, or return {} if it is missing. An invalid record is ignored with a warning."""
    try:
        return read_record(path, shape, RECORD_BYTES)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        logger.warning("warning: %s", error)
        return {}
