"""Start and evaluate the attempts of a run. A Slurm script calls this before and after the training
processes.

An attempt is one start of a run's training processes. A job that is requeued starts a new attempt
each time.


    python -m pretrain.attempt check -- RECIPE [--section.key value ...]
    python -m pretrain.attempt chain -- RECIPE [--section.key value ...]
        [--extend RECIPE [--section.key value ...]] [--evaluate TASK... [--TASK.setting value ...]]
    python -m pretrain.attempt begin --job ID ... -- RECIPE [--section.key value ...]
    python -m pretrain.attempt decide --run RUN --checkpoints DIR --attempt N

- `check` validates the settings of a run.
- `chain` validates a run and, if given, the extension of its model and the evaluation of the last
  model. It prints the directory of the run and that of the extension.
- `begin` validates the settings, creates the record of the next attempt, and prints shell variables
  for its processes. It copies the code and the complete configuration to RUN/jobs/ID, from where a
  requeued job continues.
- `decide` prints the verdict on an ended attempt with its reason: `done` (the run is finished),
  `again` (requeue the job) or `stop`. After `again`, a second line may list nodes to `exclude` from
  the next attempt.
"""

import argparse
import contextlib
import random
import shlex
import shutil
import socket
import sys
import time
from pathlib import Path

from megatron_tape import command_line
from megatron_tape.checkpoint.directories import checkpointed_step
from megatron_tape.checkpoint.locate import resolve_resume
from megatron_tape.checks import Level, check
from megatron_tape.checks.arguments import parse_run_config, with_config_option
from megatron_tape.config.schema import RunConfig, replace_settings, to_yaml
from megatron_tape.errors import EXIT_RESTART, ConfigError, FileError
from megatron_tape.evaluation.model_source import model_of_run
from megatron_tape.extension.base_model import Base, find_base, starts_from_base
from megatron_tape.io.files import atomic_directory, remove
from megatron_tape.io.records import write_record
from megatron_tape.parallel.launcher import restart_count
from megatron_tape.run.attempts import UNREADY, Attempt
from megatron_tape.run.judging import (
    AttemptRecord,
    crash_loop,
    decide,
    last_error,
    nodes_to_exclude,
    queue_state,
    read_attempts,
)
from pretrain.evaluate import check_evaluation

EXTENDING = "pretrain.extend_context"
"""The program whose runs extend another model."""
CODE = (
    "megatron_tape",
    "pretrain",
    "tools",
    "slurm",
    "requirements.txt",
    "requirements-gpu.txt",
    "pyproject.toml",
)
"""Files and directories of the repository that are copied for a job."""
NOT_STARTED = (119, 126, 127, 255)
"""Exit statuses of srun if the processes did not start: SLURM_EXIT_ERROR in slurm/common.sh, Python
was not found, an unknown option of srun, or an error of the container.
"""


def main(argv: list[str] | None = None) -> None:
    """Run the subcommand `check`, `chain`, `begin` or `decide`, which the module's docstring
    describes.
    """
    parser = command_line.Parser(prog="python -m pretrain.attempt", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    # `parse_run_config` parses these arguments later. They are texts, but by default, this parser
    # takes arguments as paths.
    recipe_arguments = {"nargs": "*", "type": str, "help": "after --: RECIPE --section.key ..."}

    check_parser = verbs.add_parser("check", help="validate settings before a job is submitted")
    check_parser.add_argument("--module", help="module that each process will run")
    check_parser.add_argument("arguments", **recipe_arguments)

    chain = verbs.add_parser("chain", help="validate a run, and its extension and evaluation")
    chain.add_argument("--scratch", default="", help="as for begin")
    chain.add_argument("arguments", **recipe_arguments)

    add = verbs.add_parser(
        "begin", help="create the next attempt of a run, and print shell variables"
    ).add_argument
    add("--module", default="pretrain.train", help="module of each process (default: %(default)s)")
    add("--job", required=True, help="Slurm's ID of the job")
    add("--source", required=True, help="directory of the code to copy")
    add("--job-link", required=True, type=Path, help="link to RUN/jobs/ID, for a requeued job")
    add("--requeued", action="store_true", help="use the configuration behind --job-link")
    add("--nodes", required=True, help="comma-separated names of the nodes")
    add("--processes", type=int, required=True, help="number of ranks of the job")
    add("--scratch", default="", help="directory of runs/RECIPE unless logging.directory is set")
    add("--log", default="", help="path of the job's output, to be recorded")
    add("arguments", **recipe_arguments)

    add = verbs.add_parser("decide", help="print what to do: done, again or stop").add_argument
    add("--run", required=True, type=Path, help="the run's directory")
    add("--checkpoints", required=True, help="the run's checkpoint directory")
    add("--attempt", type=int, required=True, help="number of the attempt")
    add("--exit-status", type=int, default=0, help="exit status of srun (default: %(default)s)")

    options = parser.parse_args(argv)
    if options.verb == "check":
        check_job(_training_arguments(options.arguments, scratch=""), options.module)
    elif options.verb == "chain":
        print(*checked_chain_directories(options.arguments, options.scratch), sep="\n")
    elif options.verb == "decide":
        judge(options.run, options.checkpoints, options.attempt, options.exit_status)
    else:
        begin(options)


def check_job(arguments: list[str], module: str | None) -> None:
    """Validate the arguments of the program `module` before a job is submitted.

    If `module` is None, the recipe may be for any program. Raises ConfigError for invalid settings,
    also if they do not fit the model that the run extends.
    """
    config = parse_run_config(arguments)
    # None skips the check that the program fits the recipe.
    extends = None if module is None else module == EXTENDING
    base = None
    if extends and starts_from_base(config):
        base = find_base(config.extension.from_)
    check(config, Level.FILES, extends=extends, base=base)


def checked_chain_directories(arguments: list[str], scratch: str) -> list[str]:
    """Validate a run, its extension and the evaluation of the last model.

    `arguments` is RECIPE ... [--extend RECIPE ...] [--evaluate TASK ...]. Returns the directory of
    the run and, if there is an extension, that of the extension. `scratch` is the parent directory
    of runs without `logging.directory`. Raises ConfigError for invalid settings.
    """
    training, evaluation = _split(arguments, "--evaluate")
    pretraining, extension = _split(training, "--extend")

    config = parse_run_config(_training_arguments(pretraining, scratch))
    check(config, Level.FILES, extends=False)
    directories = [config.logging.directory]
    if extension:
        # The model that the first run will save; nothing of it exists yet.
        base = Base.made_by(config)
        config = parse_run_config(_training_arguments(extension, scratch), base=base)
        check(config, Level.FILES, extends=True, base=base)
        directories.append(config.logging.directory)
        if Path(directories[0]).resolve() == Path(directories[1]).resolve():
            raise ConfigError(
                "logging.directory",
                f"is {directories[0]} for both pretraining and extension",
                "give one of them --logging.directory NEW, after its recipe",
            )
    if evaluation:
        # `config` is now that of the last run.
        check_evaluation(evaluation, model_of_run(config))
    return directories


def _split(arguments: list[str], option: str) -> tuple[list[str], list[str]]:
    """Return the arguments before and after `option`; none after it if it is not given."""
    if option not in arguments:
        return arguments, []
    position = arguments.index(option)
    return arguments[:position], arguments[position + 1 :]


def begin(options: argparse.Namespace) -> None:
    """Create the next attempt for a job and print its shell variables.

    Raises ConfigError if the attempt must not start: the settings are invalid, another job uses the
    run's directory, or the job crashes again and again.
    """
    # A requeued job continues with its first configuration, even if the recipe has changed. A job
    # that was requeued before it copied that configuration begins anew.
    copied_config = options.job_link.resolve() / "config.yaml"
    requeued = options.requeued and copied_config.is_file()
    if requeued:
        config = parse_run_config(["--config", str(copied_config)])
    else:
        config = parse_run_config(_training_arguments(options.arguments, options.scratch))
    run = Path(config.logging.directory)
    checkpoints = config.checkpoint.directory

    step = checkpointed_step(checkpoints)
    attempts = read_attempts(run)
    # The attempts of this job before it was requeued.
    earlier = [attempt for attempt in attempts if attempt.facts.get("job") == options.job]
    resume = resolve_resume(config.checkpoint.resume, checkpoints)
    if requeued and earlier and step > earlier[0].facts.get("checkpoint_step", 0):
        resume = "auto"  # the job has newer checkpoints than the one it started from
    config = replace_settings(config, {"checkpoint.resume": resume})
    check(config, Level.START, options.processes, extends=options.module == EXTENDING)

    for path in (run, checkpoints, config.data.cache_directory):
        if path is not None:
            Path(path).mkdir(parents=True, exist_ok=True)

    # Checked after the settings, since this check asks Slurm.
    _refuse_other_job(run, attempts, options.job)

    # Only a requeued job can be in a crash loop. A new job may always start, since a user has
    # submitted it.
    if requeued and earlier:
        _check_last_attempt(run, earlier, step, options.job)

    # A requeued job has its copy of the code already.
    directory = run / "jobs" / options.job
    if not requeued:
        _copy_code_and_config(Path(options.source), directory, config)
        _link(options.job_link, directory)

    facts = {
        "job": options.job,
        "restart": restart_count(),
        "nodes": options.nodes.split(","),
        "processes": options.processes,
        "layout": config.parallel.describe(options.processes),
        "log": options.log,
    }
    attempt = Attempt.claim(run, checkpoints, facts)
    # An earlier attempt may have saved a checkpoint meanwhile.
    step = checkpointed_step(checkpoints)
    command_line.log(f"attempt {attempt.number} of {run}, from step {step} of {config.train.steps}")

    preflight_port, training_port = _free_ports(2)
    variables = {
        "RUN_DIRECTORY": run,
        "CHECKPOINT_DIRECTORY": checkpoints,
        "ATTEMPT": attempt.number,
        "ATTEMPT_DIRECTORY": attempt.directory,
        "ROOT": (directory / "code").resolve(),
        "CONFIG": (directory / "config.yaml").resolve(),
        "RESUME": resume,
        "PREFLIGHT_PORT": preflight_port,
        "TRAINING_PORT": training_port,
    }
    for name, value in variables.items():
        print(f"{name}={shlex.quote(str(value))}")


def _check_last_attempt(run: Path, earlier: list[AttemptRecord], step: int, job: str) -> None:
    """Raise ConfigError if a job is in a crash loop; otherwise log why its last attempt ended.

    `earlier` are the job's attempts, and `step` is that of the newest checkpoint.
    """
    last = earlier[-1]
    if loop := crash_loop(earlier, step, job):
        raise ConfigError(
            "logging.directory", f"is {run}, where {loop}; the last attempt: {last_error(last)}"
        )
    # Without a verdict, the job was killed before it could judge this attempt, so its log lacks the
    # reason.
    if last.verdict is None:
        command_line.log(f"attempt {last.number}: {last_error(last)}")


def judge(run: Path, checkpoints: str, number: int, exit_status: int) -> None:
    """Print and record the verdict on attempt `number`, which has ended: done, again or stop.

    After `stop`, also print the traceback. `exit_status` is that of srun; those in
    NOT_STARTED show that the processes did not start.
    """
    if exit_status in NOT_STARTED:
        _record_missing_start(run, checkpoints, number)
    verdict, reason = decide(run, checkpoints, number, exit_status)
    attempt = next(record for record in read_attempts(run) if record.number == number)
    # The Slurm script reads one line, so the reason must not contain line breaks.
    print(f"{verdict} {' '.join(reason.split())}")
    if verdict == "again" and (bad := nodes_to_exclude(attempt)):
        print(f"exclude {','.join(bad)}")
    sys.stdout.flush()

    # The Slurm script needs only the output above, so a full disk must not stop the job here.
    path = run / "attempts" / f"{number:06d}" / "verdict.json"
    try:
        write_record(path, {"verdict": verdict, "reason": reason, "time": time.time()})
    except OSError as error:
        command_line.log(f"warning: {path} cannot be written: {error.strerror or error}")
    if verdict == "stop" and attempt.detail:
        command_line.log(attempt.detail.rstrip())


def _record_missing_start(run: Path, checkpoints: str, number: int) -> None:
    """Record that the processes of an attempt did not start.

    Does nothing if one of them has recorded its end or a heartbeat: a process that has started may
    also end with a status in NOT_STARTED, such as 255.
    """
    for attempt in read_attempts(run):
        if attempt.number == number and attempt.outcome is None and not attempt.heartbeat:
            log = attempt.facts.get("log") or "the output of the job"
            # The end is recorded as that of rank 0, since no rank started to record its own.
            Attempt.open(run, checkpoints, number).record_end(
                0, UNREADY, f"the processes did not start on the nodes; see the errors in {log}"
            )


def _training_arguments(arguments: list[str], scratch: str) -> list[str]:
    """Turn `RECIPE --section.key value ...` into arguments of pretrain.train.

    If `scratch` is not empty, the default directory of the run is SCRATCH/runs/RECIPE.
    """
    arguments = with_config_option(arguments)
    # Parsed only to find the name of the last recipe.
    parser = command_line.Parser(add_help=False)
    parser.add_argument("--config", action="append", default=[])
    options, _ = parser.parse_known_args(arguments)
    if scratch and options.config:
        name = Path(options.config[-1]).stem
        # Placed first, so that a logging.directory in a recipe, such as a run's config.yaml,
        # overrides it.
        arguments = [f"--logging.directory={scratch}/runs/{name}", *arguments]
    return arguments


def _refuse_other_job(run: Path, attempts: list[AttemptRecord], job: str) -> None:
    """Raise ConfigError if Slurm still lists another job that uses the run's directory."""
    # An attempt with a verdict has ended.
    if not attempts or attempts[-1].verdict is not None:
        return
    owner = attempts[-1].facts.get("job")
    if owner in (None, job):  # None: the run was started without Slurm
        return
    if state := queue_state(owner):
        raise ConfigError(
            "logging.directory",
            f"is {run}, which belongs to job {owner} ({state.lower()})",
            "cancel that job, or give --logging.directory NEW",
        )


def _link(link: Path, directory: Path) -> None:
    """Make `link` a symbolic link to `directory`, replacing an old one."""
    link.parent.mkdir(parents=True, exist_ok=True)
    remove(link)
    link.symlink_to(directory.resolve())


def _copy_code_and_config(source: Path, directory: Path, config: RunConfig) -> None:
    """Copy the code in `source` and the complete configuration to RUN/jobs/ID."""
    remove(directory)
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc", "*.partial")
    with atomic_directory(directory) as partial:
        code = partial / "code"
        code.mkdir()
        for name in CODE:
            path = source / name
            if path.is_dir():
                shutil.copytree(path, code / name, ignore=ignored, copy_function=_copy_file)
            elif path.is_file():
                _copy_file(path, code / name)
        # A virtual environment is large, and its scripts contain its path.
        if (source / ".venv").exists():
            (code / ".venv").symlink_to((source / ".venv").resolve())
        (partial / "config.yaml").write_text(to_yaml(config), encoding="utf-8")


def _copy_file(source: str | Path, target: str | Path) -> None:
    """Copy a file. Raises FileError for an error that a retry does not fix, such as a full disk."""
    try:
        shutil.copy2(source, target)
    except OSError as error:
        if error.errno not in command_line.LASTING_ERRORS:
            raise
        # After an OSError, copytree would try all other files, and report each of them.
        raise FileError(
            target, f"cannot be written: {error.strerror}", "free space, or correct the rights"
        ) from None


def _free_ports(count: int) -> list[int]:
    """Return `count` free TCP ports of this node. Raises OSError if it has not so many."""
    ports = []
    # Below the range of ports that Linux gives to outgoing connections: one of these could take a
    # port before the job uses it.
    for port in random.sample(range(20000, 32000), 1000):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("", port))
            ports.append(port)
        if len(ports) == count:
            return ports
    raise OSError(f"this node has no {count} free ports between 20000 and 32000")


if __name__ == "__main__":
    # The Slurm script tries again if the file system does not respond, but not for a full disk or
    # invalid settings.
    command_line.run(main, unavailable=EXIT_RESTART)
