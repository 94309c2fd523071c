"""Begin and judge the attempts of a run for a batch script, which calls this before and after the training processes.

    python -m pretrain.attempt check -- RECIPE [--section.key value ...]
    python -m pretrain.attempt chain -- RECIPE [--section.key value ...] --extend RECIPE [--section.key value ...]
        [--evaluate TASK... [--TASK.setting value ...]]
    python -m pretrain.attempt begin --job ID ... -- RECIPE [--section.key value ...]
    python -m pretrain.attempt decide --run RUN --checkpoints DIR --attempt N

`check` refuses settings that cannot work. `chain` does so for a run, for the extension of the model that this run will
make, and for the evaluation of what the extension makes, and prints the directories of both runs. `begin` also
refuses, copies the code and the resolved configuration into RUN/jobs/ID (a requeued job continues with that copy),
takes the run over, and prints shell variables. `decide` prints `done`, `again` or `stop` with the reason, and which
nodes to `exclude` from the next attempt.
"""

import argparse
import contextlib
import errno
import os
import random
import shlex
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from megatron_tape.checkpoint.directories import STATE, checkpointed_step, read_state
from megatron_tape.checkpoint.locate import what_to_resume
from megatron_tape.checkpoint.run_directories import check_directories
from megatron_tape.checkpoint.saved_settings import check_same_vocabulary, check_start
from megatron_tape.checks.arguments import parse_run_config
from megatron_tape.checks.settings import validate
from megatron_tape.config.schema import RunConfig, to_yaml
from megatron_tape.data.inputs import check_data_files, check_datasets
from megatron_tape.data.tokenizer import load_run_tokenizer
from megatron_tape.errors import EXIT_REFUSED, EXIT_RESTART, ConfigError, refuse
from megatron_tape.evaluation.during_training import check_tasks
from megatron_tape.evaluation.model_source import made_by
from megatron_tape.extension.base import Base, begins_with_base, check_base, check_command, with_base_settings
from megatron_tape.io.files import SUFFIX, atomic_directory, remove
from megatron_tape.io.records import write_record
from megatron_tape.position import replaced
from megatron_tape.run.attempts import Attempt
from megatron_tape.run.judging import crash_loop, decide, last_error, nodes_to_exclude, read_attempts
from pretrain.evaluate import check_evaluation

CODE = ("megatron_tape", "pretrain", "tools", "slurm", "requirements.txt", "requirements-gpu.txt", "pyproject.toml")


def main(argv: list[str] | None = None) -> int:
    """Run one of the verbs; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m pretrain.attempt", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    begin_parser = verbs.add_parser("begin", help="refuse, copy, take over, and print shell variables")
    add = begin_parser.add_argument
    add("--module", default="pretrain.train", help="what each process will run (default: %(default)s)")
    add("--job", required=True, help="the scheduler's id of the job")
    add("--source", required=True, help="directory of the code to copy")
    add("--job-link", required=True, help="where to leave a link to the job's directory, for when it is requeued")
    add("--requeued", action="store_true", help="the job has run before and continues with its copy")
    add("--nodes", required=True, help="names of the nodes, separated by commas")
    add("--processes", type=int, required=True, help="number of ranks of the job")
    add("--scratch", default="", help="run directories are in SCRATCH/runs unless the configuration says otherwise")
    add("--log", default="", help="the job's log")
    add("arguments", nargs="*", help="after --: RECIPE and overrides")
    check_parser = verbs.add_parser("check", help="refuse what cannot work, before a job is submitted")
    check_parser.add_argument("arguments", nargs="*", help="after --: RECIPE and overrides")
    chain_parser = verbs.add_parser("chain", help="refuse a run, its extension and the evaluation if they cannot work")
    chain_parser.add_argument("--scratch", default="", help="as for begin")
    chain_parser.add_argument("arguments", nargs="*", help="after --: as above")
    decide_parser = verbs.add_parser("decide", help="judge an attempt whose processes have ended")
    decide_parser.add_argument("--run", required=True, help="the run's directory")
    decide_parser.add_argument("--checkpoints", required=True, help="its checkpoint directory")
    decide_parser.add_argument("--attempt", type=int, required=True, help="which attempt")
    options = parser.parse_args(argv)
    try:
        if options.verb == "check":
            config = parse_run_config(_arguments(options.arguments, ""), with_base_settings)
            validate(config, config.parallel.ranks_per_sequence)
            check_directories(config)
            check_data_files(config)
        elif options.verb == "chain":
            print(*check_chain(options.arguments, options.scratch), sep="\n")
        elif options.verb == "decide":
            judge(Path(options.run), options.checkpoints, options.attempt)
        else:
            begin(options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        # A file system that does not answer may do so later; a configuration that cannot work never will.
        return EXIT_RESTART if isinstance(error, OSError) else EXIT_REFUSED
    return 0


def check_chain(arguments: list[str], scratch: str) -> tuple[str, str]:
    """Check a run, the extension of the model that it will make, and the evaluation; return the runs' directories.

    The arguments are those of the run, `--extend`, those of the extension and, if anything is to be evaluated,
    `--evaluate` and its arguments. Raises ConfigError in one sentence.
    """
    refuse("--extend" not in arguments, "--extend RECIPE is missing; name the recipe of the extension")
    at, evaluation = arguments.index("--extend"), []
    if "--evaluate" in arguments[at:]:
        end = at + arguments[at:].index("--evaluate")
        arguments, evaluation = arguments[:end], arguments[end + 1 :]
    first = parse_run_config(_arguments(arguments[:at], scratch), with_base_settings)
    check_command(first, extends=False)
    base = Base.made_by(first)

    def completed(values: dict[str, Any]) -> dict[str, Any]:
        given = values.get("extension.from")
        refuse(given is not None, f"extension.from is {given}, but the chain extends what it pretrains; remove it")
        return with_base_settings(values | {"extension.from": str(base.path)}, base)

    second = parse_run_config(_arguments(arguments[at + 1 :], scratch), completed)
    for config in (first, second):
        validate(config, config.parallel.ranks_per_sequence)
        check_directories(config)
        check_data_files(config)
    check_base(second, base)
    refuse(
        Path(first.logging.directory).resolve() == Path(second.logging.directory).resolve(),
        f"logging.directory is {first.logging.directory} for both pretraining and extension; choose another for one",
    )
    if evaluation:
        check_evaluation(evaluation, made_by(second))
    return first.logging.directory, second.logging.directory


def begin(options: argparse.Namespace) -> None:
    """Claim the next attempt for a job. Raises ConfigError if there should not be one."""
    link = Path(options.job_link)
    requeued = options.requeued and (link / "config.yaml").is_file()
    if requeued:
        config = parse_run_config(["--config", str(link.resolve() / "config.yaml")], with_base_settings)
    else:
        config = parse_run_config(_arguments(options.arguments, options.scratch), with_base_settings)
    check_command(config, extends=options.module == "pretrain.extend_context")
    run, checkpoints = Path(config.logging.directory), config.checkpoint.directory
    attempts = read_attempts(run)
    # A new job may always start, since the user submitted it; a requeued job is judged by its own attempts.
    of_job = [attempt for attempt in attempts if attempt.facts.get("job") == options.job] if requeued else []
    resume = what_to_resume(config.checkpoint.resume, checkpoints)
    if of_job and checkpointed_step(checkpoints) > of_job[0].facts.get("checkpoint_step", 0):
        resume = "auto"  # the job has passed the checkpoint that it was to start from
    config = replaced(config, {"checkpoint.resume": resume})
    validate(config, options.processes)
    check_directories(config)
    check_data_files(config)
    check_datasets(config)
    check_tasks(config)
    if begins_with_base(config):
        check_base(config)
    start = check_start(config)
    if start is not None and (start / STATE).is_file():
        state, tokenizer = read_state(start), load_run_tokenizer(config)
        if tokenizer is not None and state["step"] < config.train.steps:
            check_same_vocabulary(start, state, tokenizer, config)
    _check_directories(config)
    _refuse_other_job(run, attempts, options.job)
    if of_job:
        last = of_job[-1]
        if loop := crash_loop(of_job, checkpointed_step(checkpoints), options.job):
            raise ConfigError(f"{loop}; the last: {last_error(last)}")
        if last.verdict is None:
            print(f"attempt {last.number}: {last_error(last)}", file=sys.stderr)
    directory = run / "jobs" / options.job
    if not requeued:
        _copy(Path(options.source), directory, config)
        link.parent.mkdir(parents=True, exist_ok=True)
        partial = link.with_name(f".{link.name}{SUFFIX}")
        remove(partial)
        partial.symlink_to(directory.resolve())
        os.replace(partial, link)
    facts = {
        "job": options.job,
        "restart": int(os.environ.get("SLURM_RESTART_COUNT", "0")),
        "nodes": options.nodes.split(","),
        "processes": options.processes,
        "log": options.log,
    }
    attempt = Attempt.claim(run, checkpoints, facts)
    step = checkpointed_step(checkpoints)
    print(f"attempt {attempt.number} of {run}, from step {step} of {config.train.steps}", file=sys.stderr)
    ports = _free_ports(2)
    variables = {
        "RUN_DIRECTORY": run,
        "CHECKPOINT_DIRECTORY": checkpoints,
        "ATTEMPT": attempt.number,
        "ATTEMPT_DIRECTORY": attempt.directory,
        "ROOT": (directory / "code").resolve(),
        "CONFIG": (directory / "config.yaml").resolve(),
        "RESUME": resume,
        "PREFLIGHT_PORT": ports[0],
        "TRAINING_PORT": ports[1],
    }
    for name, value in variables.items():
        print(f"{name}={shlex.quote(str(value))}")


def judge(run: Path, checkpoints: str, number: int) -> None:
    """Print the verdict on an attempt, its reason and bad nodes, and the traceback if the run stops because of it."""
    verdict, reason = decide(run, checkpoints, number)
    attempt = next(record for record in read_attempts(run) if record.number == number)
    write_record(
        run / "attempts" / f"{number:06d}" / "verdict.json", {"verdict": verdict, "reason": reason, "time": time.time()}
    )
    print(f"{verdict} {' '.join(reason.split())}")
    if verdict == "again" and (bad := nodes_to_exclude(attempt)):
        print(f"exclude {','.join(bad)}")
    if verdict == "stop" and attempt.detail:
        print(attempt.detail.rstrip(), file=sys.stderr)


def _arguments(arguments: list[str], scratch: str) -> list[str]:
    """Turn `RECIPE --section.key value ...` into the training command's arguments."""
    recipe, rest = (
        (arguments[0], arguments[1:]) if arguments and not arguments[0].startswith("-") else (None, arguments)
    )
    before = []
    if recipe is not None:
        refuse(
            not Path(recipe).is_file(),
            f"recipe {recipe} does not exist in {Path.cwd()}; give its path relative to that, before all settings",
        )
        before = ["--config", recipe]
        if scratch:
            before += ["--logging.directory", f"{scratch}/runs/{Path(recipe).stem}"]
    return [*before, *rest]


def _check_directories(config: RunConfig) -> None:
    """Raise ConfigError, naming the key, if a directory of the run cannot be created."""
    for key, directory in (
        ("logging.directory", config.logging.directory),
        ("checkpoint.directory", config.checkpoint.directory),
        ("data.cache_directory", config.data.cache_directory),
    ):
        try:
            if directory is not None:
                Path(directory).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
                raise ConfigError(
                    f"{key} is {directory}, which cannot be created ({error.strerror}); choose another"
                ) from None
            raise


def _refuse_other_job(run: Path, attempts: list, job: str) -> None:
    """Refuse a run directory that another job is using; if Slurm does not answer, assume that none is."""
    other = attempts[-1].facts.get("job") if attempts else None
    if other in (None, job) or attempts[-1].verdict is not None:
        return
    try:
        answer = subprocess.run(
            ["squeue", "--noheader", "--jobs", other, "--format", "%T"], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return
    refuse(
        answer.returncode == 0 and answer.stdout.strip() != "",
        f"{run} belongs to job {other}, which is {answer.stdout.strip().lower()}; cancel that job, or choose another "
        "logging.directory",
    )


def _copy(source: Path, directory: Path, config: RunConfig) -> None:
    """Copy the code and the resolved configuration of a job, completely or not at all."""
    remove(directory)
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc", "*.partial")
    with atomic_directory(directory) as partial:
        (partial / "code").mkdir()
        for name in CODE:
            path = source / name
            if path.is_dir():
                shutil.copytree(path, partial / "code" / name, ignore=ignored)
            elif path.is_file():
                shutil.copy2(path, partial / "code" / name)
        if (source / ".venv").exists():
            (partial / "code" / ".venv").symlink_to((source / ".venv").resolve())
        (partial / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
        commit = ""
        with contextlib.suppress(OSError):  # git is not installed
            command = ["git", "-C", str(source), "describe", "--always", "--dirty", "--abbrev=12"]
            commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        write_record(partial / "job.json", {"commit": commit or None})


def _free_ports(count: int) -> list[int]:
    """Return ports that are free on this node, the head node, below the range that outgoing connections are given."""
    found = []
    for port in random.sample(range(20000, 32000), 1000):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("", port))
            found.append(port)
        if len(found) == count:
            break
    return found


if __name__ == "__main__":
    sys.exit(main())
