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
    """Return the records of all attempts of a run, oldest first. Invalid records count as missing,
    and a warning is logged.
    """
    attempts = Path(run_directory) / "attempts"
    numbers = attempt_numbers(run_directory)
    return [_read_attempt(attempts / f"{number:06d}", number) for number in numbers]


def crash_loop(attempts: list[AttemptRecord], step: int, job: str | None) -> str | None:
    """Return why `job` must not start another attempt, or None if it may.

    A job stops after CRASH_LIMIT crashes in a row, or after IDLE_LIMIT attempts in a row that ended
    in any way, if none of them saved a checkpoint.

    Args:
        attempts: all attempts of the run, oldest first.
        step: the step of the run's newest checkpoint, or 0.
        job: the id of the Slurm job, or None for attempts outside of jobs. Attempts of other jobs
            are ignored: a user who submits a new job may have removed the cause of the crashes.
    """
    job_attempts = [attempt for attempt in attempts if attempt.facts.get("job") == job]
    for limit, verb in ((CRASH_LIMIT, "crashed"), (IDLE_LIMIT, "ended")):
        newest = job_attempts[-limit:]
        # `checkpoint_step` is the step of the newest checkpoint when an attempt started. If `step`
        # is larger, one of the attempts in `newest` has saved a checkpoint.
        if len(newest) < limit or step > newest[0].facts.get("checkpoint_step", 0):
            continue
        if limit == IDLE_LIMIT or all(attempt.crashed for attempt in newest):
            return f"{limit} attempts in a row {verb} without a checkpoint beyond step {step}"
    return None


def decide(
    run_directory: str | Path,
    checkpoint_directory: str | Path,
    number: int,
    exit_status: int,
) -> tuple[str, str]:
    """Decide from a run's records what to do after attempt `number` has ended. Return `verdict` and
    `reason` of `Verdict`.

    `exit_status` is that of the launcher: 128 + N if signal N ended a process. It only appears in
    the reason. Raises FileError if the run has no such attempt.
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

    # The next attempt would refuse the newest checkpoint with the same error.
    try:
        step = checkpointed_step(checkpoint_directory)
    except CheckpointError as error:
        return "stop", str(error)

    # A newer attempt, such as that of another job, owns the run. If this job started another one,
    # that attempt would take the run over in turn and end the newer one.
    if attempts[-1].number > number:
        return "stop", f"attempt {attempts[-1].number} has taken over this run"

    ended = last_error(attempt)
    if attempt.crashed and exit_status > 128:
        with contextlib.suppress(ValueError):  # not the number of a signal
            ended += f" (a process was ended by {signal.Signals(exit_status - 128).name})"
    if loop := crash_loop(attempts, step, attempt.facts.get("job")):
        return "stop", f"{loop}; the last: {ended}"
    return "again", f"{ended}; continuing from the checkpoint of step {step}"


def last_error(attempt: AttemptRecord) -> str:
    """Return one sentence about the end of an attempt that did not finish the run."""
    if not attempt.crashed:
        # Without a message, all ranks were killed before they could record how they ended.
        too_early = f"{attempt.stop_reason} came before the first step, or left no time to save"
        return attempt.message or too_early
    if attempt.outcome is None:
        return f"attempt {attempt.number} was killed or its node was lost, without an error"
    if attempt.outcome == UNREADY:
        return attempt.message
    return f"rank {attempt.rank}: {attempt.message}"


def queue_state(job: str | None) -> str | None:
    """Return the state of a Slurm job, such as `RUNNING`.

    Returns "" if Slurm has no such job, so that it has ended. Returns None if `job` is None or
    Slurm does not answer.
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
    # Slurm forgets a job a few minutes after its end.
    if "Invalid job id" in answer.stderr:
        return ""
    return None


def nodes_to_exclude(attempt: AttemptRecord) -> list[str]:
    """Return the nodes that the next attempt should exclude, because they made this one fail.

    The list is empty if all of several nodes failed: a cause that they share, such as a file
    system, is more likely than several bad nodes.
    """
    nodes = attempt.facts.get("nodes", [])
    bad = [node for node in nodes if node in attempt.bad_nodes]
    if len(nodes) > 1 and len(bad) == len(nodes):
        return []
    return bad


_PRIORITY = {FINISHED: 0, REFUSED: 1, UNREADY: 2, HUNG: 3, FAILED: 3, STALE: 4, INTERRUPTED: 5}
"""The rank whose outcome has the lowest number tells how the attempt ended. Among equals, it is the
rank that ended first, since it caused the others to end: a rank records its error before it exits,
and the others lose their connection to it only then.
"""


def _read_attempt(directory: Path, number: int) -> AttemptRecord:
    """Return the records of attempt `number` in `directory`. Invalid records count as missing."""
    # The record of each rank, and the time by the file system's clock at which it was written.
    ends: list[tuple[End, float]] = []
    for path in directory.glob("rank-*.json"):
        if end := _read_if_valid(path, End):
            ends.append((end, _written_at(path)))
    # The clocks of nodes differ, so ranks are compared by the file system's time. The recorded time
    # only decides between records that were written at the same time.
    ends.sort(key=lambda item: (_PRIORITY[item[0]["outcome"]], item[1], item[0]["time"]))
    # The record of the rank that tells how the attempt ended, or {} if there is no record.
    decisive: Any = ends[0][0] if ends else {}

    return AttemptRecord(
        number=number,
        facts=_read_if_valid(directory / "attempt.json", Facts),
        outcome=decisive.get("outcome"),
        message=decisive.get("message", ""),
        detail=decisive.get("detail", ""),
        rank=decisive.get("rank"),
        bad_nodes=tuple(decisive.get("bad_nodes", ())),
        stop_reason=stop_reason(directory),
        verdict=_read_if_valid(directory / "verdict.json", Verdict) or None,
        heartbeat=_read_heartbeat(directory / "heartbeat.json"),
        claimed_at=_written_at(directory / "attempt.json"),
        beaten_at=_written_at(directory / "heartbeat.json"),
        ended=max((end["time"] for end, _ in ends), default=None),
        spikes=tuple(_read_spikes(directory / SPIKES)),
    )


def _written_at(path: Path) -> float:
    """Return the Unix time at which a file was written, by the file system's clock, or 0 if it is
    missing. Call it after the file is read.
    """
    # Reading the record has refreshed the attributes that a network file system caches.
    return path.stat().st_mtime if path.exists() else 0.0


def _read_spikes(path: Path) -> Iterator[Spike]:
    """Yield the spikes in the file `spikes.jsonl`, if it exists. Invalid lines are skipped, since a
    run may still be writing the last one.
    """
    if path.exists():
        for line in read_small(path, RECORD_BYTES).splitlines():
            with contextlib.suppress(ValueError):
                yield parse_record(line, Spike)


def _read_heartbeat(path: Path) -> Any:
    """Return the contents of `heartbeat.json` as a Heartbeat, or {} if it is missing or invalid."""
    record = _read_if_valid(path, dict[str, Any])
    # Earlier versions called phases stages.
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


def _read_if_valid(path: Path, shape: Any) -> Any:
    """Return a record of the type `shape`, or {} if it is missing or invalid, with a warning in the
    second case.

    A damaged record must not stop a job from starting its next attempt.
    """
    try:
        return read_record(path, shape)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        logger.warning("warning: %s", error)
        return {}
