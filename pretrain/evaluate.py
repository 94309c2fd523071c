"""Evaluate a model: `python -m pretrain.evaluate TASK... --model MODEL`, or under `torchrun
--nproc-per-node N -m`.

MODEL is the directory of a run, one of its checkpoints, or a directory with a causal language model
that transformers can load. results.json in the output directory receives the scores of each task
and each example, the settings, and the versions of the software and data; a figure per task is
written next to it. pretrain.report compares the results of several models on one page. The same
command continues an interrupted evaluation and skips finished tasks.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_tape import command_line
from megatron_tape.config.parse import read_settings, settings_parser
from megatron_tape.config.sections import build
from megatron_tape.errors import EXIT_REFUSED, EXIT_RESTART, ConfigError, UserError
from megatron_tape.evaluation.model_source import ModelSource, check_trained_on, find_model
from megatron_tape.evaluation.results import NAME, EvaluatedModel
from megatron_tape.evaluation.task import Task
from megatron_tape.evaluation.tasks import TASKS, with_group_names
from megatron_tape.home import provide_caches
from megatron_tape.io.files import remove
from megatron_tape.parallel.launcher import check_launcher_environment
from megatron_tape.text import duration

if TYPE_CHECKING:
    from megatron_tape.evaluation.ranks import Ranks
    from megatron_tape.evaluation.runner import TaskPlan
    from megatron_tape.evaluation.transformers_model import HFModel

EXAMPLE = (
    "python -m pretrain.evaluate perplexity --model runs/tape --output results/tape "
    "--perplexity.data held_out.jsonl --perplexity.lengths '[1024, 2048]'"
)


def main(argv: list[str] | None = None) -> int:
    """Evaluate a model and return the exit status. Invalid arguments are reported before torch is
    imported.
    """
    command_line.escape_unprintable()
    before = {
        number: signal.signal(number, _interrupt) for number in (signal.SIGTERM, signal.SIGUSR1)
    }
    status = 1
    mark = os.environ.get("TAPE_FAILURE")  # the status after an exception
    try:
        status = _main(argv)
        return status
    finally:
        # The Slurm script requeues the job unless this file shows that a rank failed.
        failed_in_job = mark is not None and status not in (0, EXIT_RESTART)
        if failed_in_job:
            with suppress(OSError):
                Path(mark).touch()
        for number, handler in before.items():
            signal.signal(
                number, signal.SIG_IGN if failed_in_job else handler
            )  # until the process has ended


def _main(argv: list[str] | None) -> int:
    rank = os.environ.get("RANK", "0")
    try:
        check_launcher_environment()
    except UserError as error:
        command_line.print_error(
            error
        )  # on every rank: RANK may come from an earlier launcher and be wrong
        return EXIT_REFUSED
    try:
        options, tasks = read_command(argv)
        provide_caches()
        source = find_model(options.model, options.label, options.average)
        if options.output:
            output = Path(options.output)
        else:
            output = source.default_output
        source.check_code(options.trust_remote_code)
        for task in tasks:
            check_task(task, source)
        existing = next(path for path in (output, *output.absolute().parents) if path.exists())
        writable = existing.is_dir() and os.access(existing, os.W_OK)
        if not writable:
            raise ConfigError(
                "--output",
                f"is {output}, but {existing} is not a writable directory",
                "choose another",
            )
        if not options.check:
            evaluate(options, tasks, source, output)
    except (command_line.Interrupted, KeyboardInterrupt) as error:
        command_line.log("interrupted; run the same command to continue")
        if isinstance(error, KeyboardInterrupt):
            return 130
        return EXIT_RESTART
    except UserError as error:
        if rank == "0":
            command_line.log(f"error: {error}")
        return EXIT_REFUSED
    except (ValueError, OSError) as error:
        if isinstance(error, OSError) and error.filename:
            message = f"{error.strerror}: {error.filename}"
        else:
            message = str(error)
        command_line.log(f"error{'' if rank == '0' else f' (rank {rank})'}: {message}")
        return 1
    except BaseException as error:
        if (sentence := command_line.describe_fatal_error(error)) is None:
            raise
        command_line.log(f"error (rank {rank}): {sentence}")
        return 1
    return 0


def _interrupt(number: int, frame: object) -> None:
    raise command_line.Interrupted(number)


def read_command(argv: list[str] | None) -> tuple[argparse.Namespace, list[Task]]:
    """Parse the command line; return the options and the tasks to evaluate. Raises ConfigError."""
    # Each task has a section with its settings.
    fields = [(name, task.Settings | None, None) for name, task in TASKS.items()]
    sections = dataclasses.make_dataclass("Tasks", fields, frozen=True, kw_only=True)
    parser = settings_parser(
        sections,
        usage=(
            "%(prog)s TASK... --model MODEL [--output DIR] [--config FILE.yaml] [--TASK.setting"
            " value ...]"
        ),
        description=(
            f"{__doc__}\nTasks: {', '.join(TASKS)}. By default, all tasks with a section in"
            f" --config.\n\nAn example:\n  {EXAMPLE}"
        ),
    )
    add = parser.add_argument
    add("tasks", nargs="*", metavar="TASK", help="task to evaluate")
    add(
        "--model",
        metavar="MODEL",
        help="a run, a checkpoint, or a directory that transformers can load",
    )
    add(
        "--average",
        action="store_true",
        help="evaluate the averaged weights of a run with train.average",
    )
    add(
        "--output",
        metavar="DIR",
        help="output directory (default: RUN/evaluation/STEP or evaluations/NAME)",
    )
    add(
        "--label",
        type=str,
        metavar="NAME",
        help="name of the model in the results (default: the directory's name)",
    )
    device_help = (
        "device of the model; auto is a GPU if there is one, otherwise the CPU (default: auto)"
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help=device_help)
    add(
        "--dtype",
        choices=("fp32", "bf16"),
        help="dtype of the model (default: bf16 on a GPU, fp32 on a CPU)",
    )
    trusted = (
        "run Python files in MODEL that differ from this project's, and lm_eval tasks from your own"
        " files"
    )
    add("--trust-remote-code", action="store_true", help=trusted)
    add("--check", action="store_true", help="validate the command and exit")
    add("--overwrite", action="store_true", help="evaluate finished tasks again")
    parsed = read_settings(parser, sections, argv)
    options = parsed.options
    if options.model is None:
        raise ConfigError(
            "--model", "is missing", "give a run, a checkpoint, or a transformers directory"
        )
    names = list(dict.fromkeys(options.tasks)) or [
        name for name in TASKS if parsed.values.get(name) is not None
    ]
    choices = f"choose from {', '.join(TASKS)}"
    if not names:
        raise ConfigError("TASK", "is missing", choices)
    for name in names:
        if name not in TASKS:
            raise ConfigError(name, "is not a task", choices)
    values = {name: parsed.values.get(name) or {} for name in names}
    with parsed.add_places_to_errors():
        fix = "give --{key} VALUE, or --config FILE.yaml"
        settings = build(sections, values, fix=fix)
        tasks = [TASKS[name](getattr(settings, name)) for name in names]
        for task in tasks if not options.trust_remote_code else ():
            task.refuse_code()
    return options, tasks


def check_evaluation(arguments: list[str], source: ModelSource) -> None:
    """Raise ConfigError if `source`, which need not exist yet, cannot be evaluated with these
    arguments.
    """
    _, tasks = read_command([*arguments, "--model", str(source.path)])
    for task in tasks:
        check_task(task, source)


def check_task(task: Task, source: ModelSource) -> None:
    """Raise ConfigError if a task cannot evaluate a model, for example because it needs a
    tokenizer.
    """
    if source.is_checkpoint:
        fix = "export the model with a tokenizer T: tools/convert_checkpoint.py to-hf --tokenizer T"
    else:
        fix = "save the model's tokenizer into that directory with save_pretrained of transformers"
    needed = task.needs_tokenizer and not source.info.has_tokenizer
    if needed:
        raise ConfigError(task.name, f"needs a tokenizer, but {source.path} has none", fix)
    if task.needs_tokenizer and task.generates and (problem := source.tokenizer_problem()):
        if True:
            raise ConfigError(
                task.name,
                f"needs a tokenizer that transformers can load, but that of {source.path}"
                f" {problem}",
                "choose tasks that do not generate text, such as perplexity",
            )
    check_trained_on(task.name, source)
    if os.environ.get("RANK", "0") == "0":
        task.check(source.info)


def evaluate(
    options: argparse.Namespace, tasks: list[Task], source: ModelSource, output: Path
) -> None:
    """Evaluate the model of `source` on all ranks; rank 0 writes results and figures to
    `output`.
    """
    warnings.filterwarnings("ignore", category=FutureWarning)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if os.environ.get("RANK", "0") == "0":
        output.mkdir(parents=True, exist_ok=True)
        command_line.log("loading torch and transformers")
    from megatron_tape.evaluation.ranks import Ranks
    from megatron_tape.evaluation.runner import plan_task, unfinished
    from megatron_tape.evaluation.transformers_model import choose_device

    ranks = Ranks.join()
    with ranks.rank_0_reports():
        device = choose_device(options.device)
    dtype = options.dtype or ("bf16" if device.startswith("cuda") else "fp32")

    def plan() -> list[TaskPlan]:
        progress = command_line.Progress(sum(file.stat().st_size for file in source.files()))
        digest = source.digest(
            lambda done: progress.update(done, lambda _: f"reading {source.path}")
        )
        progress.end()
        return unfinished(
            [plan_task(task, digest, dtype) for task in tasks], output, options.overwrite
        )

    planned = ranks.run_on_rank_0(plan)
    if planned:
        by_name = {task.name: task for task in tasks}
        with _as_transformers(source, output, dtype, ranks) as directory:
            model = _load(source, directory, device, dtype, ranks)
            for each in planned:
                _run(by_name[each.task], model, ranks, output, each, source)
    if ranks.rank == 0:
        command_line.log(f"results: {output / NAME}")
    ranks.leave()


def _run(
    task: Task, model: HFModel, ranks: Ranks, output: Path, planned: TaskPlan, source: ModelSource
) -> None:
    """Run a task on all ranks; rank 0 records its results and prints its scores."""
    from megatron_tape.evaluation.figures import clean
    from megatron_tape.evaluation.report.tables import markdown, score_table
    from megatron_tape.evaluation.runner import add_result, draw, run_task

    started = time.monotonic()
    result = run_task(task, model, ranks, output, planned)
    if result is None:
        return
    info = model.info
    digest = planned.model_digest
    evaluated = EvaluatedModel(
        source.given, digest, model.parameters, info.trained_length, info.config, source.run
    )
    results = add_result(output, info.label, evaluated, planned, result)
    pictures = draw(output, task, results)
    print(f"{task.name}: {info.label}, {duration(time.monotonic() - started)}")
    for table in score_table({info.label: with_group_names(task.name, result)}):
        print("\n".join(markdown(table, clean)))
    for note in result.notes:
        print(f"  note: {note}")
    for picture in pictures:
        print(f"  {picture}")
    sys.stdout.flush()


@contextmanager
def _as_transformers(source: ModelSource, output: Path, dtype: str, ranks: Ranks) -> Iterator[Path]:
    """Yield a directory that transformers can load; a checkpoint is exported to a temporary one in
    `output`.
    """
    if not source.is_checkpoint:
        yield source.path
        return
    temporary = ranks.run_on_rank_0(lambda: Path(tempfile.mkdtemp(prefix=".exported-", dir=output)))
    try:
        ranks.run_on_rank_0(lambda: source.export(temporary / "model", dtype))
        yield temporary / "model"
    finally:
        if ranks.rank == 0:
            remove(temporary)


def _load(source: ModelSource, directory: Path, device: str, dtype: str, ranks: Ranks) -> HFModel:
    from megatron_tape.evaluation.transformers_model import load_model

    with ranks.rank_0_reports():
        return load_model(
            source.info, directory, dtype, device, source.needs_trust, source.load_saved_tokenizer()
        )


if __name__ == "__main__":
    sys.exit(main())
