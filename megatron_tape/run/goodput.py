"""Goodput: the fraction of a run's time that was spent on kept steps, and on other uses. Does not
import torch.

A step is kept unless a later attempt continued from an earlier checkpoint and repeated it.
"""

from collections.abc import Sequence

from megatron_tape.run.attempts import HUNG, TRAINING
from megatron_tape.run.judging import AttemptRecord

KEPT = "kept steps"
REPEATED = "repeated steps"
SAVES = "saves"
EVALUATION = "evaluation"
START = "start"
STALLS = "stalls"
BETWEEN = "between attempts"
OTHER = "other"
KINDS = (KEPT, REPEATED, SAVES, EVALUATION, START, STALLS, BETWEEN, OTHER)
"""Uses of a run's time, in the order in which programs show them."""
_USES = {TRAINING: KEPT, "saving": SAVES, "waiting to save": SAVES}
"""The uses of phases in the heartbeat; all others are evaluations."""


def seconds_by_kind(attempts: Sequence[AttemptRecord], until: float | None) -> dict[str, float]:
    """Return the seconds that a run has spent on each use in `KINDS`.

    They cover the time from the start of its first attempt to the end of its last one, or to the
    Unix time `until`, such as the present. `attempts` are all attempts, oldest first. Those without
    a recorded start are ignored. All steps of an attempt are assumed to take equally long.
    """
    totals = dict.fromkeys(KINDS, 0.0)
    # The start of the attempt after the current one, and the earliest step that a later attempt
    # continued from. They are infinite for the newest attempt, which comes first.
    next_start = float("inf")
    resumed_step = float("inf")
    # Newest first, since later attempts decide which steps of an attempt are kept.
    for attempt in reversed(attempts):
        if "started" not in attempt.facts:
            continue
        started = attempt.facts["started"]
        heartbeat = attempt.heartbeat
        ended = attempt.ended
        # An attempt that was killed has recorded no end. Its last heartbeat is the last sign of it.
        if ended is None:
            ended = heartbeat.get("time", started)
        # The clocks of nodes differ, and an attempt may live on after a newer one has started.
        ended = max(started, min(ended, next_start))

        for kind, seconds in _attempt_seconds(attempt, ended, resumed_step).items():
            totals[kind] += seconds
        # The time from the end of this attempt to the start of the next one, or from the end of
        # the newest attempt to `until`.
        totals[BETWEEN] += max(0.0, min(next_start, until or ended) - ended)

        resumed_step = min(resumed_step, heartbeat.get("from_step", resumed_step))
        next_start = started
        # The time of the earlier attempts ends here.
        until = started
    return totals


def _attempt_seconds(attempt: AttemptRecord, ended: float, resumed_step: float) -> dict[str, float]:
    """Return the seconds that an attempt has spent on each use in `KINDS`.

    The attempt ended at the Unix time `ended`. Later attempts repeated its steps after
    `resumed_step`, which is infinite if there was no later attempt.
    """
    started = attempt.facts["started"]
    heartbeat = attempt.heartbeat
    seconds = dict.fromkeys(KINDS, 0.0)
    # The seconds of the phases in the heartbeat do not include the time after the last progress.
    # This time belongs to the current phase, unless the attempt hung.
    idle = max(0.0, ended - max(started, heartbeat.get("since", ended)))
    hang_timeout = heartbeat.get("hang_timeout") or float("inf")
    stalled = attempt.outcome == HUNG or idle > hang_timeout
    if stalled:
        seconds[STALLS] = idle

    busy = ended - started - seconds[STALLS]
    # The attempt ended before its training began.
    if "began" not in heartbeat:
        seconds[START] = busy
        return seconds

    seconds[START] = min(max(0.0, heartbeat["began"] - started), busy)
    phases = dict(heartbeat.get("phases", {}))
    if not stalled:
        current = heartbeat["phase"]
        phases[current] = phases.get(current, 0.0) + idle
    for phase, duration in phases.items():
        seconds[_USES.get(phase, EVALUATION)] += max(0.0, duration)

    # The fraction of the attempt's steps that no later attempt repeated.
    first = heartbeat.get("from_step", 0)
    last = heartbeat.get("step") or 0
    kept_fraction = 0.0
    if last > first:
        kept_fraction = max(0, min(last, resumed_step) - first) / (last - first)
    # So far, seconds[KEPT] is the time of all steps. Move the part of the repeated ones.
    seconds[REPEATED] = (1 - kept_fraction) * seconds[KEPT]
    seconds[KEPT] *= kept_fraction
    seconds[OTHER] = max(0.0, ended - started - sum(seconds.values()))
    return seconds


def shares(seconds: dict[str, float]) -> dict[str, float]:
    """Return each use's fraction of the total time. Uses below 0.05 % are left out."""
    total = sum(seconds.values())
    return {kind: part / total for kind, part in seconds.items() if part > 0.0005 * total}
