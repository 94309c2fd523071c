"""How a run is doing, in one screen: attempts, step, loss, speed, time left, last checkpoint, last error.

    python -m pretrain.status RUN

RUN is the run's directory (logging.directory). The exit status is 0 while the run goes on, waits in the queue, was
interrupted by hand or is finished; 1 when it is stuck, failed or gone, or its job has left it; 2 when RUN is no run.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_tape.checkpoint.directories import list_checkpoints, problems
from megatron_tape.run.attempts import FINISHED, INTERRUPTED, AttemptRecord, last_error, read_attempts

SILENT_SECONDS = 60
STARTING_SECONDS = 180
TAIL_BYTES = 1 << 18
SHOWN = 8
LONGEST = 120


@dataclass(frozen=True)
class State:
    """One word for a run, whether it is well, and a sentence more."""

    word: str
    well: bool
    explanation: str = ""


def main(argv: list[str] | None = None) -> int:
    """Print the screen and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m pretrain.status", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN", help="the run's directory")
    run = Path(parser.parse_args(argv).run)
    attempts = read_attempts(run)
    if not attempts:
        print(
            f"error: {run} holds no attempt at a run: give the logging.directory of one, or wait for its job to start "
            "(squeue --me)",
            file=sys.stderr,
        )
        return 2
    state = judge(attempts[-1], queue_state(attempts[-1].facts.get("job")), time.time())
    with contextlib.suppress(BrokenPipeError):  # `| head` has seen enough
        print("\n".join(screen(run, attempts, state)), flush=True)
    return 0 if state.well else 1


def queue_state(job: str | None) -> str | None:
    """Return what Slurm says of a job, "" where it is no longer known, None without a job or an answer."""
    if job is None:
        return None
    try:
        told = subprocess.run(
            ["squeue", "--noheader", "--jobs", job, "--format", "%T"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if told.returncode != 0:
        return "" if "Invalid job id" in told.stderr else None
    return told.stdout.strip()


def judge(last: AttemptRecord, queue: str | None, now: float) -> State:
    """Say how a run is whose last attempt is `last` and whose job is `queue` (see `queue_state`) at time `now`."""
    if last.outcome == FINISHED:
        return State("finished", True)
    if last.verdict is not None and last.verdict["verdict"] == "stop":
        return State("failed", False, last.verdict["reason"])
    if queue == "PENDING":
        return State("waiting", True, "requeued, and waiting for nodes")
    ended = last.outcome is not None or last.verdict is not None
    if ended and queue:
        return State("between attempts", True, f"the job is {queue.lower()}")
    if last.outcome == INTERRUPTED and queue is None:
        return State("interrupted", True, "the same command continues")
    if last.outcome == INTERRUPTED or (ended and last.stop_reason):
        return State(
            "stopped", False, "its job has ended; the same command continues, unless a new job is in the queue"
        )
    if ended:
        return State("failed", False, "its job has ended; the same command continues")
    beat = last.heartbeat
    silent = now - beat.get("time", last.facts.get("started", 0))
    if silent > (SILENT_SECONDS if beat else STARTING_SECONDS) or queue == "":
        word, but = ("stuck", ", although its job runs") if queue == "RUNNING" else ("gone", "")
        return State(word, False, f"its processes left no sign for {duration(silent)}{but}")
    if not beat:
        return State("starting", True)
    idle, limit = now - beat["since"], beat.get("hang_timeout")
    if limit is not None and idle > limit:
        return State("stuck", False, f"nothing happened for {duration(idle)} while {beat['stage']}")
    return State("running", True, f"{beat['stage']}, for {duration(idle)}")


def screen(run: Path, attempts: list[AttemptRecord], state: State) -> list[str]:
    """Return the lines to print."""
    config, rows, last = _config(run, attempts[-1]), _rows(run / "metrics.jsonl"), attempts[-1]
    total = config.get("train", {}).get("steps")
    step = max(rows[-1]["step"] if rows else 0, last.heartbeat.get("step") or 0)
    lines = [f"{run}: {state.word}{f' ({state.explanation})' if state.explanation else ''}"]
    share = f" of {total:,} ({min(1, step / total):.1%})" if total else ""
    lines.append(f"step        {step:,}{share}")
    if rows:
        row = rows[-1]
        loss = f"loss        {_number(row['loss'])} at step {row['step']:,}"
        checked = next((r for r in reversed(rows) if "validation_loss" in r), None)
        if checked:
            loss += f"; validation {_number(checked['validation_loss'])} at step {checked['step']:,}"
        lines.append(loss)
        lines.append(f"speed       {row['tokens_per_second']:,.0f} tokens/s{_eta(rows, last, total, state)}")
    lines.append(f"checkpoint  {_last_checkpoint(last.facts.get('checkpoint_directory', run / 'checkpoints'))}")
    errors = [attempt for attempt in attempts if attempt.crashed and attempt.outcome is not None]
    if errors and last.outcome != FINISHED:
        lines.append(f"last error  attempt {errors[-1].number}, {last_error(errors[-1])}")
    if log := last.facts.get("log"):
        lines.append(f"log         {log}")
    lines.append(f"attempts    {len(attempts)}{f', the last {SHOWN}:' if len(attempts) > SHOWN else ':'}")
    for attempt in attempts[-SHOWN:]:
        lines.append("  " + _line(attempt, attempt is last and state.well))
    return lines


def _line(attempt: AttemptRecord, alive: bool) -> str:
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(attempt.facts.get("started", 0)))
    job = attempt.facts.get("job")
    where = f"{f'job {job} on ' if job else ''}{_nodes(attempt.facts.get('nodes', []))}"
    where += f", from step {attempt.facts.get('checkpoint_step', 0):,}"
    if attempt.outcome is not None:
        told = last_error(attempt) if attempt.crashed else attempt.message
        end = f"{attempt.outcome}: {told if len(told) <= LONGEST else told[:LONGEST] + ' ...'}"
    elif attempt.stop_reason:
        end = f"ended by {attempt.stop_reason}"
    else:
        end = "" if alive else "killed, or its node was lost"
    return f"{attempt.number:>4}  {started}  {where}  {end}".rstrip()


def _nodes(names: list[str]) -> str:
    return ",".join(names) if len(names) <= 4 else f"{names[0]} .. {names[-1]} ({len(names)} nodes)"


def _config(run: Path, last: AttemptRecord) -> dict[str, Any]:
    import yaml

    for path in (run / "jobs" / str(last.facts.get("job")) / "config.yaml", run / "config.yaml"):
        if path.is_file():
            return yaml.safe_load(path.read_text(encoding="utf-8"))
    return {}


def _rows(path: Path) -> list[dict[str, Any]]:
    """Read the last rows of a file that may be growing."""
    if not path.is_file():
        return []
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = file.read().splitlines(keepends=True)
    rows = []
    for line in lines:
        try:
            rows.append(json.loads(line))
        except ValueError:  # the first line is cut, the last may be half written
            continue
    return rows


def _eta(rows: list[dict[str, Any]], last: AttemptRecord, total: int | None, state: State) -> str:
    recent = [row for row in rows if row.get("time", 0) >= last.facts.get("started", 0)][-20:]
    if state.word != "running" or len(recent) < 2 or not total:
        return ""
    seconds = (recent[-1]["time"] - recent[0]["time"]) / (recent[-1]["step"] - recent[0]["step"])
    return f", ETA {duration(seconds * (total - recent[-1]['step']))}"


def _last_checkpoint(root: str | Path) -> str:
    for step, path in list_checkpoints(root):
        if not problems(path, deep=False):
            return f"step {step:,}, {duration(time.time() - path.stat().st_mtime)} ago: {path}"
    return "none yet"


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def duration(seconds: float) -> str:
    """Write seconds as days, hours, minutes and seconds."""
    minutes, seconds = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return (f"{days}d " if days else "") + f"{hours}:{minutes:02d}:{seconds:02d}"


if __name__ == "__main__":
    sys.exit(main())
