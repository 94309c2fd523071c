"""Which share of a run's time became steps that were kept, and where the rest went. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_tape.run.attempts import HUNG, TRAINING
from megatron_tape.run.judging import AttemptRecord

KEPT, REPEATED, SAVES, EVALUATION = "kept steps", "repeated steps", "saves", "evaluation"
START, STALLS, BETWEEN, OTHER = "start", "stalls", "between attempts", "other"
KINDS = (KEPT, REPEATED, SAVES, EVALUATION, START, STALLS, BETWEEN, OTHER)
"""Kinds of time, in the order in which they are shown."""


LONGEST = 1e11
"""Seconds: no clock that is right shows more, and no attempt takes longer."""


@dataclass(frozen=True)
class Spent:
    """How an attempt spent its time."""

    number: int
    started: float
    ended: float
    """When it ended, or was last known to be alive."""
    seconds: dict[str, float]
    """By kind of time; together `ended - started`."""


def spent(attempts: Sequence[AttemptRecord]) -> list[Spent]:
    """Return how each attempt spent its time, as far as it is recorded; those without a start are left out.

    Steps after the one from which a later attempt continued are repeated. Seconds of steps are divided evenly.
    """
    attempts = [attempt for attempt in attempts if abs(attempt.facts.get("started", LONGEST)) < LONGEST]
    found: list[Spent] = []
    next_start = oldest = float("inf")
    """When the attempt after this one began, and the first step from which any later one continued."""
    for attempt in reversed(attempts):
        one = _spent(attempt, next_start, oldest)
        oldest = min(oldest, attempt.heartbeat.get("from_step", oldest))
        next_start = one.started
        found.insert(0, one)
    return found


def _spent(attempt: AttemptRecord, next_start: float, oldest: float) -> Spent:
    started, beat = attempt.facts["started"], attempt.heartbeat
    ended = attempt.ended if attempt.ended is not None else beat.get("time", started)
    ended = max(started, min(ended, next_start, started + LONGEST))
    seconds = dict.fromkeys(KINDS, 0.0)
    idle, limit = max(0.0, ended - max(started, beat.get("since", ended))), beat.get("hang_timeout")
    stalled = attempt.outcome == HUNG or (limit is not None and idle > limit)
    if stalled:
        seconds[STALLS] = idle
    if "began" not in beat:
        seconds[START] = ended - started - seconds[STALLS]
        return Spent(attempt.number, started, ended, seconds)
    seconds[START] = min(max(0.0, beat["began"] - started), ended - started - seconds[STALLS])
    stages = dict(beat.get("stages", {}))
    if not stalled:
        stages[beat["stage"]] = stages.get(beat["stage"], 0.0) + idle
    for stage, duration in stages.items():
        seconds[_kind(stage)] += min(max(0.0, duration), LONGEST)
    first, last = beat.get("from_step", 0), beat.get("step") or 0
    kept = max(0, min(last, oldest) - first) / (last - first) if last > first else 0
    seconds |= {KEPT: kept * seconds[KEPT], REPEATED: (1 - kept) * seconds[KEPT]}
    seconds[OTHER] = max(0.0, ended - started - sum(seconds.values()))
    return Spent(attempt.number, started, ended, seconds)


def _kind(stage: str) -> str:
    if stage == TRAINING:
        return KEPT
    return SAVES if stage in ("saving", "waiting to save") else EVALUATION


def totals(attempts: Sequence[Spent], until: float | None = None) -> dict[str, float]:
    """Return the seconds of each kind from the start of the first attempt to the end of the last, or `until`."""
    seconds = {kind: sum(attempt.seconds[kind] for attempt in attempts) for kind in KINDS}
    ends = [attempt.started for attempt in attempts[1:]] + [until or 0.0]
    seconds[BETWEEN] = sum(max(0.0, later - attempt.ended) for attempt, later in zip(attempts, ends))
    return seconds


def shares(seconds: dict[str, float]) -> dict[str, float]:
    """Return the share of each kind in the whole, without those below 0.05 %; none if no time has passed."""
    whole = sum(seconds.values())
    return {kind: part / whole for kind, part in seconds.items() if whole > 0 and part / whole >= 0.0005}
