"""Show the state of runs: attempts, step, loss, speed, time left, last checkpoint, last error.

    python -m pretrain.status RUN [RUN ...] [--json]

RUN is the directory of a run (logging.directory), or a directory that directly contains runs. One
run is shown in several lines, several runs in a table. The exit status is 0 if every run is in
progress, waiting in the queue, interrupted by hand or finished; 1 if a run is stuck, failed or
gone, or its job has ended before the run was finished; 2 if a RUN contains no run or cannot be
read.
"""

import contextlib
import dataclasses
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from megatron_tape import command_line
from megatron_tape.checkpoint.directories import newest_complete, read_manifest
from megatron_tape.errors import EXIT_REFUSED, FileError, UserError
from megatron_tape.io.files import file_system_time
from megatron_tape.io.records import read_yaml
from megatron_tape.run.attempts import FINISHED, INTERRUPTED, attempt_numbers
from megatron_tape.run.curves import METRICS, SETTINGS
from megatron_tape.run.goodput import seconds_by_kind, shares
from megatron_tape.run.judging import AttemptRecord, last_error, queue_state, read_attempts
from megatron_tape.run.metrics import LOSS, TOKENS_PER_SECOND, VALIDATION_LOSS, last_rows
from megatron_tape.run.weights_and_biases import read_wandb
from megatron_tape.text import LOG_TIME, duration

SILENT_SECONDS = 60
"""Seconds without a heartbeat after which a run counts as stuck or gone."""
STARTING_SECONDS = 180
STARTING_SECONDS_OF_JOBS = 1800
"""Seconds that a run may take to write its first heartbeat, without and with a job. A job first
checks its nodes.
"""
TAIL_BYTES = 1 << 22
"""Bytes read from the end of metrics.jsonl: a row of 126 layers has 13 KB, and validations may be
100 rows apart.
"""
ATTEMPTS_SHOWN = 8
"""Maximum number of attempts that are shown of one run."""
MESSAGE_CHARACTERS = 120
"""Maximum characters shown of the message with which an attempt ended."""
NOT_WELL = ("failed", "gone", "stopped", "stuck")
"""Names of the states in which a run needs an action."""
COLUMNS = ("run", "state", "step", "loss", "validation", "tokens/s", "ETA", "checkpoint")


class Row(TypedDict):
    """The row of a step in metrics.jsonl. Its other keys are metrics, whose values may be None if
    they are not finite.
    """

    step: int


@dataclass(frozen=True)
class RunState:
    """The state of a run, such as `running`."""

    name: str
    explanation: str = ""

    @property
    def well(self) -> bool:
        """Whether the run needs no action."""
        return self.name not in NOT_WELL


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

    statuses = []
    problems: list[UserError] = []
    runs = list(dict.fromkeys(run for path in options.runs for run in find_runs(Path(path))))
    for run in runs:
        try:
            statuses.append(read_status(run))
        except OSError as error:
            problems.append(FileError(run, f"cannot be read: {error}"))
        except UserError as error:
            problems.append(error)

    if options.json:
        print(json.dumps([dataclasses.asdict(status) for status in statuses], indent=2))
    elif len(runs) > 1 and statuses:
        print(*table(statuses), sep="\n")
    elif statuses:
        print(*screen(statuses[0]), sep="\n")
    for problem in problems:
        command_line.log(f"error: {problem}")
    if problems:
        return EXIT_REFUSED
    return int(not all(status.well for status in statuses))


def find_runs(path: Path) -> list[Path]:
    """Return the runs directly below the directory `path`.

    If it is a run itself, or contains none, return only `path`.
    """
    runs = []
    with contextlib.suppress(OSError):  # `read_status` raises the error again
        if not _is_run(path):
            runs = [run for run in sorted(path.iterdir()) if _is_run(run)]
    return runs or [path]


def _is_run(path: Path) -> bool:
    """Return whether a directory is that of a run; false if it cannot be read."""
    with contextlib.suppress(OSError):  # such as a directory of another user
        return bool(attempt_numbers(path))
    return False


def read_status(run: Path) -> RunStatus:
    """Return the status of the run in the directory `run`.

    Raises FileError if there is no run or a record is invalid, and OSError if one cannot be read.
    """
    attempts = read_attempts(run)
    if not attempts:
        raise FileError(
            run,
            "contains no attempts, or does not exist",
            "give the logging.directory of a run, or wait until its job starts",
        )
    last = attempts[-1]
    now = file_system_time(run)
    state = state_of(last, queue_state(last.facts.get("job")), now)

    # An empty row stands for a run that has logged nothing yet.
    rows: list[Any] = [{}, *last_rows(run / METRICS, Row, TAIL_BYTES)]
    last_row = rows[-1]
    # The last row with a validation loss.
    validated = next((row for row in reversed(rows) if VALIDATION_LOSS in row), {})

    seconds_left = None
    # The last row is of the last attempt only if it is after the step that the attempt began with.
    first_step = last.heartbeat.get("from_step")
    if state.name == "running" and first_step is not None and last_row.get("step", 0) > first_step:
        seconds_left = last_row.get("seconds_left")

    # The shares of time are computed up to here; None stands for the end of the last attempt.
    until = None
    if state.name in ("waiting", "between attempts"):
        until = now  # the time since the last attempt counts, too

    crash = None
    # An attempt without an outcome counts as crashed too, but it may still be running.
    crashes = [attempt for attempt in attempts if attempt.crashed and attempt.outcome is not None]
    if crashes and last.outcome != FINISHED:
        crash = f"attempt {crashes[-1].number}, {last_error(crashes[-1])}"

    # Prefer the run's own subdirectory: the recorded path is wrong if the run has been moved or
    # copied.
    checkpoints = run / "checkpoints"
    if not checkpoints.is_dir():
        checkpoints = Path(last.facts.get("checkpoint_directory", checkpoints))
    return RunStatus(
        run=str(run),
        state=state.name,
        well=state.well,
        explanation=state.explanation,
        step=max(last_row.get("step", 0), last.heartbeat.get("step") or 0),
        total_steps=_total_steps(run),
        loss=last_row.get(LOSS),
        loss_step=last_row.get("step"),
        validation_loss=validated.get(VALIDATION_LOSS),
        validation_step=validated.get("step"),
        tokens_per_second=last_row.get(TOKENS_PER_SECOND),
        seconds_left=seconds_left,
        time_shares=shares(seconds_by_kind(attempts, until)),
        layout=last.facts.get("layout"),
        **_newest_checkpoint(checkpoints),
        last_error=crash,
        spikes=sum(len(attempt.spikes) for attempt in attempts),
        wandb=_wandb(run),
        log=last.facts.get("log") or None,
        attempts=[
            _describe_attempt(attempt, alive=attempt is last and state.well) for attempt in attempts
        ],
    )


def state_of(last: AttemptRecord, queue: str | None, now: float) -> RunState:
    """Return a run's state from its last attempt and the state of its job (`queue_state`).

    `now` is the Unix time by the file system's clock, with which the ages of files are compared.
    """
    if last.outcome == FINISHED:
        return RunState("finished")
    if last.verdict is not None and last.verdict["verdict"] == "stop":
        return RunState("failed", last.verdict["reason"])
    if queue == "PENDING":
        return RunState("waiting", "requeued, and waiting for nodes")
    if last.outcome is not None or last.verdict is not None:
        return _state_after_end(last, queue)
    return _state_before_end(last, queue, now)


def _state_after_end(last: AttemptRecord, queue: str | None) -> RunState:
    """Return the state of a run whose last attempt has ended, but is not the end of the run.

    `queue` is the state of its job (see `queue_state`): "" if Slurm no longer has the job, and None
    without a job, or if Slurm does not answer.
    """
    if queue:
        return RunState("between attempts", f"the job is {queue.lower()}")
    # Probably by Ctrl-C. If Slurm does not answer, the run may also have been interrupted in a job.
    if last.outcome == INTERRUPTED and queue is None:
        return RunState("interrupted", "run the same command to continue")
    # Slurm has sent the job a signal, for example because its time was nearly over.
    if last.outcome == INTERRUPTED or last.stop_reason:
        return RunState(
            "stopped",
            "its job has ended; submit the same command to continue, unless a new job is queued",
        )
    if last.facts.get("job") is None:
        return RunState("failed", "run the same command to continue")
    return RunState("failed", "its job has ended; submit the same command to continue")


def _state_before_end(last: AttemptRecord, queue: str | None, now: float) -> RunState:
    """Return the state of a run whose last attempt has not recorded an end: it is in progress,
    stuck or killed.

    `queue` is the state of its job, "" if Slurm no longer has the job, or None. `now` is the Unix
    time by the file system's clock.
    """
    # Times of files, not those in the heartbeat: the clocks of the run's nodes may differ from
    # those of this node and of the file system.
    beat = last.heartbeat
    written_at = last.beaten_at if beat else last.claimed_at
    silent = max(0.0, now - written_at)
    allowed = STARTING_SECONDS
    if beat:
        allowed = SILENT_SECONDS
    elif queue == "RUNNING":
        allowed = STARTING_SECONDS_OF_JOBS
    # If `queue` is "", Slurm no longer has the job.
    if silent > allowed or queue == "":
        explanation = f"no heartbeat from its processes for {duration(silent)}"
        if queue == "RUNNING":
            return RunState("stuck", f"{explanation}, although its job runs")
        return RunState("gone", explanation)
    if not beat:
        return RunState("starting")

    # Seconds without progress: those before the heartbeat, by the clock of the node that wrote it,
    # and those after it.
    idle = silent + beat["time"] - beat["since"]
    limit = beat.get("hang_timeout")
    if limit is not None and idle > limit:
        return RunState("stuck", f"no progress for {duration(idle)} while {beat['phase']}")
    return RunState("running", f"{beat['phase']}, for {duration(idle)}")


def screen(status: RunStatus) -> list[str]:
    """Return the lines that show one run in detail: a title, values by name, and its attempts.

    Empty values are left out.
    """
    rows = {"step": _progress(status)}
    if status.loss_step is not None:
        rows["loss"] = f"{_format_loss(status.loss)} at step {status.loss_step:,}"
        rows["speed"] = f"{status.tokens_per_second or 0:,.0f} tokens/s"
    if status.validation_step is not None:
        loss = _format_loss(status.validation_loss)
        rows["loss"] += f"; validation {loss} at step {status.validation_step:,}"
    if status.seconds_left is not None:
        rows["speed"] += f", ETA {duration(status.seconds_left)}"

    shares = [f"{kind} {share:.1%}" for kind, share in status.time_shares.items()]
    rows["goodput"] = ", ".join(shares)
    rows["layout"] = status.layout or ""

    rows["checkpoint"] = status.checkpoint_problem or "none yet"
    if status.checkpoint_step is not None and status.checkpoint_age is not None:
        age = duration(status.checkpoint_age)
        rows["checkpoint"] = f"step {status.checkpoint_step:,}, {age} ago: {status.checkpoint}"
    rows["last error"] = status.last_error or ""
    if status.spikes:
        rows["spikes"] = f"{status.spikes}, in attempts/*/spikes.jsonl"
    rows["wandb"] = status.wandb or ""
    rows["log"] = status.log or ""

    title = f"{status.run}: {status.state}"
    if status.explanation:
        title += f" ({status.explanation})"

    attempts = f"attempts    {len(status.attempts)}"
    if len(status.attempts) > ATTEMPTS_SHOWN:
        attempts += f", the last {ATTEMPTS_SHOWN}"
    return [
        title,
        *(f"{name:<12}{value}" for name, value in rows.items() if value),
        f"{attempts}:",
        *(f"  {attempt}" for attempt in status.attempts[-ATTEMPTS_SHOWN:]),
    ]


def table(statuses: list[RunStatus]) -> list[str]:
    """Return the lines of a table with a header and a row per run."""
    rows = [COLUMNS, *map(_cells, statuses)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for row in rows:
        # The run and its state are aligned to the left, the numbers to the right.
        words = map(str.ljust, row[:2], widths)
        numbers = map(str.rjust, row[2:], widths[2:])
        lines.append("  ".join([*words, *numbers]).rstrip())
    return lines


def _cells(status: RunStatus) -> tuple[str, ...]:
    """Return the cells of a run's row, one for each of COLUMNS; empty if nothing is recorded."""
    left = ""
    if status.seconds_left is not None:
        left = duration(status.seconds_left)
    return (
        status.run,
        status.state,
        _progress(status),
        _format_loss(status.loss) if status.loss_step is not None else "",
        _format_loss(status.validation_loss) if status.validation_step is not None else "",
        _cell(status.tokens_per_second, ",.0f"),
        left,
        _cell(status.checkpoint_step, ","),
    )


def _cell(value: float | None, format_spec: str) -> str:
    """Return a formatted value, or "" for None."""
    if value is None:
        return ""
    return format(value, format_spec)


def _progress(status: RunStatus) -> str:
    """Return the step, and what share of the run it is, if the number of steps is known."""
    if not status.total_steps:
        return f"{status.step:,}"
    # A run that continues with fewer steps may already be beyond its end.
    share = min(1, status.step / status.total_steps)
    return f"{status.step:,} of {status.total_steps:,} ({share:.1%})"


def _describe_attempt(attempt: AttemptRecord, alive: bool) -> str:
    """Return the line of an attempt: number, start, nodes, first step, and how it ended.

    `alive` means that it is in progress.
    """
    started = "at an unknown time"
    if "started" in attempt.facts:
        started = time.strftime(LOG_TIME, time.localtime(attempt.facts["started"]))

    nodes = attempt.facts.get("nodes", [])
    where = ",".join(nodes)
    if len(nodes) > 4:
        where = f"{nodes[0]} .. {nodes[-1]} ({len(nodes)} nodes)"
    job = attempt.facts.get("job")
    if job:
        where = f"job {job} on {where}"

    # The step of the newest checkpoint when the attempt started, which may have been damaged.
    checkpointed = attempt.facts.get("checkpoint_step", 0)
    first_step = attempt.heartbeat.get("from_step", checkpointed)
    where += f", from step {first_step:,}"
    if first_step < checkpointed:
        where += f" (the checkpoint of step {checkpointed:,} was not used; the log says why)"

    end = ""
    if attempt.outcome is not None:
        reason = last_error(attempt) if attempt.crashed else attempt.message
        end = f"{attempt.outcome}: {reason[:MESSAGE_CHARACTERS]}"
    elif attempt.stop_reason:
        end = f"ended by {attempt.stop_reason}"
    elif not alive:
        end = "killed, or its node was lost"
    return f"{attempt.number:>4}  {started}  {where}  {end}".rstrip()


def _total_steps(run: Path) -> int | None:
    """Return `train.steps` of a run, or None if its settings cannot be read."""
    try:
        settings = read_yaml(run / SETTINGS, dict[str, dict[str, Any]])
    # The run may not have written the file yet, or be writing it.
    except (FileNotFoundError, ValueError):
        return None
    return settings.get("train", {}).get("steps")


def _newest_checkpoint(root: Path) -> dict:
    """Return the `checkpoint...` fields of RunStatus for the newest checkpoint in a directory."""
    names = ("checkpoint", "checkpoint_step", "checkpoint_age", "checkpoint_problem")
    fields: dict[str, Any] = dict.fromkeys(names)
    try:
        # Reading all files to check them would take minutes.
        path = newest_complete(root, deep=False)
        if path is not None:
            fields["checkpoint_step"] = read_manifest(path)["step"]
            fields["checkpoint_age"] = max(0.0, file_system_time(root) - path.stat().st_mtime)
            fields["checkpoint"] = str(path)
    except (ValueError, OSError) as error:
        fields["checkpoint_problem"] = str(error)
    return fields


def _wandb(run: Path) -> str | None:
    """Return the address of a run at Weights & Biases, or how to upload it; None if neither."""
    try:
        record = read_wandb(run)
    except ValueError:
        return None
    if record is None:
        return None
    return record["url"] or f"offline; upload with: wandb sync {run}/wandb/offline-run-*"


def _format_loss(value: float | None) -> str:
    """Return a logged loss as text; None stands for a value that is not finite."""
    if value is None:
        return "not finite"
    return f"{value:.4f}"


if __name__ == "__main__":
    command_line.run(main)
