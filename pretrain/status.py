"""Show the state of runs: attempts, step, loss, speed, time left, last checkpoint, last error.

    python -m pretrain.status RUN [RUN ...] [--json]

RUN is the directory of a run (logging.directory), or a directory that directly contains runs. One
run is shown in several lines, several runs in a table. Files are skipped if a run is among the
arguments. The exit status is 0 if every run is in progress, waiting in the queue, interrupted by
hand or finished; 1 if a run is stuck, failed or gone, or its job has ended before the run was
finished; 2 if a RUN contains no run or cannot be read.
"""

import contextlib
import dataclasses
import json
import logging
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired

from typing_extensions import TypedDict

from megatron_tape import command_line
from megatron_tape.checkpoint.directories import newest_complete, read_manifest
from megatron_tape.errors import EXIT_REFUSED, FileError, UserError
from megatron_tape.io.files import file_system_time
from megatron_tape.io.records import read_yaml
from megatron_tape.run.attempts import FINISHED, INTERRUPTED, Spike, attempt_numbers
from megatron_tape.run.goodput import KEPT, seconds_by_kind, shares
from megatron_tape.run.judging import AttemptRecord, last_error, queue_state, read_attempts
from megatron_tape.run.metrics import LOSS, TOKENS_PER_SECOND, VALIDATION_LOSS, last_rows
from megatron_tape.run.weights_and_biases import read_wandb
from megatron_tape.text import LOG_TIME, duration

SILENT_SECONDS = 60
"""Seconds without a heartbeat after which a run counts as stuck or gone."""
STARTING_SECONDS = 180
STARTING_SECONDS_OF_JOBS = 1800
"""Seconds that a run may take to write its first heartbeat, without and with a job, which first
checks its nodes.
"""
TAIL_BYTES = 1 << 22
"""Bytes read from the end of metrics.jsonl: a row of 126 layers has 13 KB, and validations may be
100 rows apart.
"""
ATTEMPTS_SHOWN = 8
MESSAGE_CHARACTERS = 120
"""Maximum characters shown of the message with which an attempt ended."""
COLUMNS = ("run", "state", "step", "loss", "validation", "tokens/s", "ETA", "checkpoint")

logger = logging.getLogger(__name__)

Row = TypedDict(
    "Row",
    {
        "step": int,
        "seconds_left": NotRequired[float],
        LOSS: float | None,
        VALIDATION_LOSS: NotRequired[float | None],
        TOKENS_PER_SECOND: NotRequired[float | None],
    },
)
"""The keys that are read from the row of a step in metrics.jsonl. None is a value that is not
finite.
"""


class _Train(TypedDict, total=False):
    steps: int


class _Config(TypedDict, total=False):
    train: _Train


@dataclass(frozen=True)
class RunState:
    """The state of a run, such as `running`, whether it needs no action (`well`), and an
    explanation.
    """

    word: str
    well: bool
    explanation: str = ""


@dataclass(frozen=True)
class RunStatus:
    """Everything that is shown about a run. None means that the run has not recorded the value."""

    run: str
    state: str
    well: bool
    explanation: str
    step: int
    total_steps: int | None
    loss: float | None
    """The last logged loss; None also if it is not finite. Without a logged loss, `loss_step` is
    None, too.
    """
    loss_step: int | None
    validation_loss: float | None
    validation_step: int | None
    tokens_per_second: float | None
    seconds_left: float | None
    """Estimated seconds to the end of the run; None unless the run is training."""
    time_shares: dict[str, float]
    """Fraction of the time since the first attempt by use (`goodput.KINDS`); that of `kept steps`
    is the goodput.
    """
    layout: str | None
    checkpoint: str | None
    checkpoint_step: int | None
    checkpoint_age: float | None
    """Seconds since the checkpoint was written."""
    checkpoint_problem: str | None
    last_error: str | None
    spikes: int
    last_spike: str | None
    wandb: str | None
    log: str | None
    attempts: list[str]
    """A line per attempt, oldest first."""


def main(argv: list[str] | None = None) -> int:
    """Print the status of runs; return the exit status that --help describes."""
    parser = command_line.Parser(prog="python -m pretrain.status", description=__doc__)
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="the directory of a run, or of several runs"
    )
    parser.add_argument(
        "--json", action="store_true", help="print a JSON list with an object per run"
    )
    options = parser.parse_args(argv)
    if hasattr(
        sys.stdout, "reconfigure"
    ):  # a record may contain characters that the terminal cannot show
        sys.stdout.reconfigure(errors="backslashreplace")
    statuses = []
    problems = []
    runs = list(dict.fromkeys(run for path in options.runs for run in find_runs(Path(path))))
    if any(map(_is_run, runs)):
        runs = [run for run in runs if not os.path.isfile(run)]
    for run in runs:
        try:
            statuses.append(read_status(run))
        except OSError as error:
            problems.append(FileError(str(run), f"cannot be read: {error}"))
        except UserError as error:
            problems.append(error)
    if options.json:
        lines = [
            json.dumps(
                [dataclasses.asdict(status) for status in statuses], indent=2, allow_nan=False
            )
        ]
    elif len(runs) == 1:
        lines = [line for status in statuses for line in screen(status)]
    else:
        lines = table(statuses) if statuses else []
    with contextlib.suppress(BrokenPipeError):  # the reader, such as `head`, has closed the pipe
        print(*lines, sep="\n", end="\n" if lines else "", flush=True)
    for problem in problems:
        command_line.log(f"error: {problem}")
    if problems:
        return EXIT_REFUSED
    if all(status.well for status in statuses):
        return 0
    return 1


def find_runs(path: Path) -> list[Path]:
    """Return the runs directly below a directory; only `path` if it is a run itself or contains
    none.
    """
    below = []
    with contextlib.suppress(OSError):  # read_status reports it
        below = [] if _is_run(path) else sorted(path.iterdir())
    return [run for run in below if _is_run(run)] or [path]


def _is_run(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return bool(attempt_numbers(path))
    return False


def read_status(run: Path) -> RunStatus:
    """Return the status of the run in a directory. Raises OSError or UserError if its records
    cannot be read.
    """
    attempts = read_attempts(run)
    if not attempts:
        if shutil.which("squeue"):
            in_queue = ", or wait for its job to start (squeue --me)"
        else:
            in_queue = ""
        if run.is_dir():
            problem = "contains no attempts"
        elif run.exists():
            problem = "is not a directory"
        else:
            problem = "does not exist"
        raise FileError(str(run), problem, f"give the logging.directory of a run{in_queue}")
    last = attempts[-1]
    now = file_system_time(run)
    state = judge(last, queue_state(last.facts.get("job")), now)
    rows = last_rows(run / "metrics.jsonl", Row, TAIL_BYTES)
    row = rows[-1] if rows else {}
    evaluated = next((one for one in reversed(rows) if VALIDATION_LOSS in one), {})
    # Rows after the step that the last attempt continued from are its own.
    is_fresh = state.word == "running" and row.get("step", 0) > last.heartbeat.get(
        "from_step", float("inf")
    )
    waits = state.word in ("waiting", "between attempts")
    errors = [attempt for attempt in attempts if attempt.crashed and attempt.outcome is not None]
    if errors and last.outcome != FINISHED:
        error = f"attempt {errors[-1].number}, {last_error(errors[-1])}"
    else:
        error = None
    spikes = [spike for attempt in attempts for spike in attempt.spikes]
    in_run = run / "checkpoints"
    # The recorded path is wrong if the run's directory has been moved or copied.
    checkpoint = _newest_checkpoint(
        in_run if in_run.is_dir() else last.facts.get("checkpoint_directory", in_run)
    )
    return RunStatus(
        run=str(run),
        state=state.word,
        well=state.well,
        explanation=state.explanation,
        step=max(row.get("step", 0), last.heartbeat.get("step") or 0),
        total_steps=_total_steps(run),
        loss=row.get(LOSS),
        loss_step=row.get("step"),
        validation_loss=evaluated.get(VALIDATION_LOSS),
        validation_step=evaluated.get("step"),
        tokens_per_second=row.get(TOKENS_PER_SECOND),
        seconds_left=row.get("seconds_left") if is_fresh else None,
        time_shares=shares(seconds_by_kind(attempts, now if waits else None)),
        layout=last.facts.get("layout"),
        **checkpoint,
        last_error=error,
        spikes=len(spikes),
        last_spike=_described_spike(spikes[-1]) if spikes else None,
        wandb=_wandb(run),
        log=last.facts.get("log") or None,
        attempts=[
            _described_attempt(attempt, attempt is last and state.well) for attempt in attempts
        ],
    )


def judge(last: AttemptRecord, queue: str | None, now: float) -> RunState:
    """Return a run's state from its last attempt and the state of its job (`queue_state`).

    `now` is the Unix time by the file system's clock, with which the ages of files are compared.
    """
    if last.outcome == FINISHED:
        return RunState("finished", True)
    if last.verdict is not None and last.verdict["verdict"] == "stop":
        return RunState("failed", False, last.verdict["reason"])
    if queue == "PENDING":
        return RunState("waiting", True, "requeued, and waiting for nodes")
    ended = last.outcome is not None or last.verdict is not None
    if ended and queue:
        return RunState("between attempts", True, f"the job is {queue.lower()}")
    if last.outcome == INTERRUPTED and queue is None:
        return RunState("interrupted", True, "run the same command to continue")
    if last.outcome == INTERRUPTED or (ended and last.stop_reason):
        explanation = (
            "its job has ended; submit the same command to continue, unless a new job is in the"
            " queue"
        )
        return RunState("stopped", False, explanation)
    if ended:
        by_hand = last.facts.get("job") is None
        if by_hand:
            how = "run the same command"
        else:
            how = "its job has ended; submit the same command"
        return RunState("failed", False, f"{how} to continue")
    beat = last.heartbeat
    # The clocks of the run's nodes may differ from those of this node and of the file system.
    silent = max(0.0, now - (last.beaten_at if beat else last.claimed_at))
    if queue == "RUNNING":
        starting = STARTING_SECONDS_OF_JOBS
    else:
        starting = STARTING_SECONDS
    if silent > (SILENT_SECONDS if beat else starting) or queue == "":
        word, suffix = ("stuck", ", although its job runs") if queue == "RUNNING" else ("gone", "")
        return RunState(
            word, False, f"no heartbeat from its processes for {duration(silent)}{suffix}"
        )
    if not beat:
        return RunState("starting", True)
    idle = silent + beat["time"] - beat["since"]
    limit = beat.get("hang_timeout")
    if limit is not None and idle > limit:
        return RunState("stuck", False, f"no progress for {duration(idle)} while {beat['phase']}")
    return RunState("running", True, f"{beat['phase']}, for {duration(idle)}")


def screen(status: RunStatus) -> list[str]:
    """Return the lines that show one run in detail."""
    explanation = f" ({status.explanation})" if status.explanation else ""
    lines = [f"{status.run}: {status.state}{explanation}", f"step        {_progress(status)}"]
    if status.loss_step is not None:
        validation = ""
        if status.validation_step is not None:
            validation = (
                f"; validation {_number(status.validation_loss)} at step {status.validation_step:,}"
            )
        lines.append(f"loss        {_number(status.loss)} at step {status.loss_step:,}{validation}")
        if status.seconds_left is not None:
            left = f", ETA {duration(status.seconds_left)}"
        else:
            left = ""
        lines.append(f"speed       {status.tokens_per_second or 0:,.0f} tokens/s{left}")
    if status.time_shares:
        others = ", ".join(
            f"{kind} {share:.1%}" for kind, share in status.time_shares.items() if kind != KEPT
        )
        lines.append(
            f"goodput     {status.time_shares.get(KEPT, 0):.1%} of the"
            f" time{f'; {others}' if others else ''}"
        )
    newest = status.checkpoint_problem or "none yet"
    if status.checkpoint is not None:
        newest = (
            f"step {status.checkpoint_step:,}, {duration(status.checkpoint_age)} ago:"
            f" {status.checkpoint}"
        )
    described = {
        "layout": status.layout,
        "checkpoint": newest,
        "last error": status.last_error,
        "spikes": status.last_spike and f"{status.spikes}, the last at {status.last_spike}",
        "wandb": status.wandb,
        "log": status.log,
    }
    lines += [f"{name:<12}{value}" for name, value in described.items() if value]
    count = len(status.attempts)
    lines.append(
        f"attempts    {count}{f', the last {ATTEMPTS_SHOWN}:' if count > ATTEMPTS_SHOWN else ':'}"
    )
    return lines + [f"  {attempt}" for attempt in status.attempts[-ATTEMPTS_SHOWN:]]


def table(statuses: list[RunStatus]) -> list[str]:
    """Return the lines of a table with a header and a row per run."""
    rows = [COLUMNS, *map(_cells, statuses)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    # Words are aligned on the left, numbers on the right.
    aligned = [
        [
            f"{cell:<{w}}" if n < 2 else f"{cell:>{w}}"
            for n, (cell, w) in enumerate(zip(row, widths))
        ]
        for row in rows
    ]
    return ["  ".join(row).rstrip() for row in aligned]


def _cells(status: RunStatus) -> tuple[str, ...]:
    return (
        status.run,
        status.state,
        _progress(status),
        "" if status.loss_step is None else _number(status.loss),
        "" if status.validation_step is None else _number(status.validation_loss),
        "" if status.tokens_per_second is None else f"{status.tokens_per_second:,.0f}",
        "" if status.seconds_left is None else duration(status.seconds_left),
        "" if status.checkpoint_step is None else f"{status.checkpoint_step:,}",
    )


def _progress(status: RunStatus) -> str:
    total = status.total_steps or 0
    return f"{status.step:,}" + (
        f" of {total:,} ({min(1, status.step / total):.1%})" if total > 0 else ""
    )


def _described_attempt(attempt: AttemptRecord, alive: bool) -> str:
    try:
        started = time.strftime(LOG_TIME, time.localtime(attempt.facts["started"]))
    except (KeyError, ValueError, OverflowError, OSError):  # not recorded, or out of range
        started = "at an unknown time"
    job = attempt.facts.get("job")
    nodes = attempt.facts.get("nodes", [])
    if len(nodes) <= 4:
        shown = ",".join(nodes)
    else:
        shown = f"{nodes[0]} .. {nodes[-1]} ({len(nodes)} nodes)"
    where = f"{f'job {job} on ' if job else ''}{shown}"
    newest = attempt.facts.get("checkpoint_step", 0)
    begun = attempt.heartbeat.get("from_step", newest)
    where += f", from step {begun:,}"
    if begun < newest:
        where += f" (the checkpoint of step {newest:,} was not used; the log says why)"
    if attempt.outcome is not None:
        reason = last_error(attempt) if attempt.crashed else attempt.message
        end = (
            f"{attempt.outcome}:"
            f" {reason[:MESSAGE_CHARACTERS]}{' ...' if len(reason) > MESSAGE_CHARACTERS else ''}"
        )
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


def _newest_checkpoint(root: str | Path) -> dict[str, Any]:
    """Return the `checkpoint...` fields of RunStatus for the newest checkpoint in a directory."""
    fields = dict.fromkeys(
        ("checkpoint", "checkpoint_step", "checkpoint_age", "checkpoint_problem")
    )
    try:
        if (path := newest_complete(root, deep=False)) is None:
            return fields
        step = read_manifest(path)["step"]
        age = max(0.0, file_system_time(root) - path.stat().st_mtime)
    except (ValueError, OSError) as error:
        return fields | {"checkpoint_problem": str(error)}
    return fields | {"checkpoint": str(path), "checkpoint_step": step, "checkpoint_age": age}


def _described_spike(spike: Spike) -> str:
    figures = f"loss {_number(spike['loss'])}, gradient norm {spike['grad_norm']:.4g}"
    return f"step {spike['step']:,} ({spike['action']}): {figures}"


def _wandb(run: Path) -> str | None:
    try:
        record = read_wandb(run)
    except ValueError:
        return None
    return record and (
        record["url"] or f"offline; upload with: wandb sync {run}/wandb/offline-run-*"
    )


def _number(value: float | None) -> str:
    if value is None:
        return "not finite"
    return f"{value:.4f}"


if __name__ == "__main__":
    command_line.run(main)
