"""Show how a run is doing, on one screen: attempts, step, loss, speed, time left, last checkpoint, last error.

    python -m pretrain.status RUN

RUN is the run's directory (logging.directory). The exit status is 0 if the run is in progress, waiting in the queue,
interrupted by hand or finished; 1 if it is stuck, failed or gone, or its job has ended without finishing it; 2 if RUN
is not the directory of a run, or cannot be read.
"""

import contextlib
import logging
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NotRequired

from typing_extensions import TypedDict

from megatron_tape import command_line
from megatron_tape.checkpoint.directories import newest_whole, read_manifest
from megatron_tape.errors import FileError
from megatron_tape.io.records import read_yaml
from megatron_tape.run.attempts import FINISHED, INTERRUPTED
from megatron_tape.run.goodput import KEPT, seconds_by_kind, shares
from megatron_tape.run.judging import AttemptRecord, last_error, queue_state, read_attempts
from megatron_tape.run.metrics import last_rows
from megatron_tape.run.weights_and_biases import read_wandb
from megatron_tape.text import duration

SILENT_SECONDS = 60
STARTING_SECONDS, STARTING_SECONDS_OF_JOBS = 180, 1800
"""How long a run may take to start without a sign of life: by hand, and in a job, which compares its nodes before."""
TAIL_BYTES = 1 << 22
"""What is read of the metrics; a row of 126 layers has 13 KB, and validations may be 100 rows apart."""
SHOWN = 8
LONGEST = 120

logger = logging.getLogger(__name__)


Row = TypedDict(
    "Row",
    {
        "step": int,
        "time": NotRequired[float],
        "seconds_left": NotRequired[float],
        "train/loss": float | None,
        "validation/loss": NotRequired[float | None],
        "throughput/tokens_per_second": NotRequired[float | None],
    },
)
"""The keys of a row of `metrics.jsonl` that are shown; null stands for a number that was not finite."""


class _Train(TypedDict, total=False):
    steps: int


class _Config(TypedDict, total=False):
    train: _Train


@dataclass(frozen=True)
class State:
    """The state of a run in one word, whether the run is well, and an explanation."""

    word: str
    well: bool
    explanation: str = ""


def main(argv: list[str] | None = None) -> int:
    """Print the screen and return the exit status."""
    parser = command_line.Parser(prog="python -m pretrain.status", description=__doc__)
    parser.add_argument("run", metavar="RUN", help="the run's directory")
    run = Path(parser.parse_args(argv).run)
    if hasattr(sys.stdout, "reconfigure"):  # a record may contain characters that the terminal cannot show
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return show(run)
    except OSError as error:
        raise FileError(str(run), f"cannot be read: {error}") from None


def show(run: Path) -> int:
    """Print the screen of a run and return the exit status. Raises OSError or FileError if it cannot be read."""
    attempts = read_attempts(run)
    if not attempts:
        fix = "give the logging.directory of a run, or wait for its job to start (squeue --me)"
        raise FileError(str(run), "holds no attempts of a run", fix)
    state = judge(attempts[-1], queue_state(attempts[-1].facts.get("job")), time.time())
    with contextlib.suppress(BrokenPipeError):  # the reader, such as `head`, has closed the pipe
        print("\n".join(screen(run, attempts, state)), flush=True)
    return 0 if state.well else 1


def judge(last: AttemptRecord, queue: str | None, now: float) -> State:
    """Return a run's state at time `now`, given its last attempt and its job's state (see `queue_state`)."""
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
        return State("interrupted", True, "run the same command to continue")
    if last.outcome == INTERRUPTED or (ended and last.stop_reason):
        return State(
            "stopped", False, "its job has ended; submit the same command to continue, unless a new job is in the queue"
        )
    if ended:
        return State("failed", False, "its job has ended; submit the same command to continue")
    beat = last.heartbeat
    silent = now - beat.get("time", last.facts.get("started", 0))
    starting = STARTING_SECONDS_OF_JOBS if queue == "RUNNING" else STARTING_SECONDS
    if silent > (SILENT_SECONDS if beat else starting) or queue == "":
        word, but = ("stuck", ", although its job runs") if queue == "RUNNING" else ("gone", "")
        return State(word, False, f"no sign of life from its processes for {duration(silent)}{but}")
    if not beat:
        return State("starting", True)
    idle, limit = now - beat["since"], beat.get("hang_timeout")
    if limit is not None and idle > limit:
        return State("stuck", False, f"nothing happened for {duration(idle)} while {beat['stage']}")
    return State("running", True, f"{beat['stage']}, for {duration(idle)}")


def screen(run: Path, attempts: list[AttemptRecord], state: State) -> list[str]:
    """Return the lines to print."""
    total, rows, last = _total_steps(run), last_rows(run / "metrics.jsonl", Row, TAIL_BYTES), attempts[-1]
    step = max(rows[-1]["step"] if rows else 0, last.heartbeat.get("step") or 0)
    lines = [f"{run}: {state.word}{f' ({state.explanation})' if state.explanation else ''}"]
    share = f" of {total:,} ({min(1, step / total):.1%})" if total and total > 0 else ""
    lines.append(f"step        {step:,}{share}")
    if rows:
        row = rows[-1]
        loss = f"loss        {_number(row['train/loss'])} at step {row['step']:,}"
        evaluated = next((r for r in reversed(rows) if "validation/loss" in r), None)
        if evaluated:
            loss += f"; validation {_number(evaluated['validation/loss'])} at step {evaluated['step']:,}"
        lines.append(loss)
        speed = row.get("throughput/tokens_per_second") or 0
        lines.append(f"speed       {speed:,.0f} tokens/s{_eta(row, last, state)}")
    waits = state.word in ("waiting", "between attempts")
    if of_kinds := shares(seconds_by_kind(attempts, time.time() if waits else None)):
        rest = ", ".join(f"{kind} {share:.1%}" for kind, share in of_kinds.items() if kind != KEPT)
        lines.append(f"goodput     {of_kinds.get(KEPT, 0):.1%} of the time{f'; {rest}' if rest else ''}")
    if layout := last.facts.get("layout"):
        lines.append(f"layout      {layout}")
    own = run / "checkpoints"
    # The directory may have been moved or copied since it was recorded.
    lines.append(
        f"checkpoint  {_last_checkpoint(own if own.is_dir() else last.facts.get('checkpoint_directory', own))}"
    )
    errors = [attempt for attempt in attempts if attempt.crashed and attempt.outcome is not None]
    if errors and last.outcome != FINISHED:
        lines.append(f"last error  attempt {errors[-1].number}, {last_error(errors[-1])}")
    if spikes := [spike for attempt in attempts for spike in attempt.spikes]:
        newest = spikes[-1]
        figures = f"loss {_number(newest['loss'])}, gradient norm {newest['grad_norm']:.4g}"
        lines.append(f"spikes      {len(spikes)}, the last at step {newest['step']:,} ({newest['action']}): {figures}")
    with contextlib.suppress(ValueError):
        if (shown := read_wandb(run)) is not None:
            lines.append(f"wandb       {shown['url'] or f'offline; wandb sync {run}/wandb/offline-run-* sends it'}")
    if log := last.facts.get("log"):
        lines.append(f"log         {log}")
    lines.append(f"attempts    {len(attempts)}{f', the last {SHOWN}:' if len(attempts) > SHOWN else ':'}")
    for attempt in attempts[-SHOWN:]:
        lines.append("  " + _line(attempt, attempt is last and state.well))
    return lines


def _line(attempt: AttemptRecord, alive: bool) -> str:
    try:
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(attempt.facts["started"]))
    except (KeyError, ValueError, OverflowError, OSError):  # not recorded, or outside the range that can be shown
        started = "at an unknown time"
    job = attempt.facts.get("job")
    nodes = attempt.facts.get("nodes", [])
    shown = ",".join(nodes) if len(nodes) <= 4 else f"{nodes[0]} .. {nodes[-1]} ({len(nodes)} nodes)"
    where = f"{f'job {job} on ' if job else ''}{shown}"
    newest = attempt.facts.get("checkpoint_step", 0)
    begun = attempt.heartbeat.get("from_step", newest)
    where += f", from step {begun:,}"
    if begun < newest:
        where += f" (the checkpoint of step {newest:,} was not used; the log says why)"
    if attempt.outcome is not None:
        reason = last_error(attempt) if attempt.crashed else attempt.message
        end = f"{attempt.outcome}: {reason if len(reason) <= LONGEST else reason[:LONGEST] + ' ...'}"
    elif attempt.stop_reason:
        end = f"ended by {attempt.stop_reason}"
    else:
        end = "" if alive else "killed, or its node was lost"
    return f"{attempt.number:>4}  {started}  {where}  {end}".rstrip()


def _total_steps(run: Path) -> int | None:
    try:
        return read_yaml(run / "config.yaml", _Config).get("train", {}).get("steps")
    except FileNotFoundError:
        return None
    except ValueError as error:
        logger.warning("warning: %s", error)
        return None


def _eta(row: Row, last: AttemptRecord, state: State) -> str:
    fresh = state.word == "running" and row.get("time", 0) >= last.facts.get("started", 0)
    return f", ETA {duration(row['seconds_left'])}" if fresh and "seconds_left" in row else ""


def _last_checkpoint(root: str | Path) -> str:
    try:
        path = newest_whole(root, deep=False)
        if path is None:
            return "none yet"
        step, age = read_manifest(path)["step"], time.time() - path.stat().st_mtime
    except (ValueError, OSError) as error:
        return str(error)
    return f"step {step:,}, {duration(age)} ago: {path}"


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


if __name__ == "__main__":
    command_line.run(main)
