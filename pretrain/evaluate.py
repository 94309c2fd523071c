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
from typing import TYPE_CHECKING, Any

from megatron_tape import command_line
from megatron_tape.config.parse import read_settings, settings_parser
from megatron_tape.config.sections import build
from megatron_tape.data.inputs import check_writable
from megatron_tape.errors import EXIT_REFUSED, EXIT_RESTART, ConfigError, UserError
from megatron_tape.evaluation.model_source import ModelSource, check_trained_on, find_model
from megatron_tape.evaluation.results import NAME, ModelRecord
from megatron_tape.evaluation.task import Task
from megatron_tape.evaluation.tasks import TASKS, with_group_names
from megatron_tape.extension.rope_scaling import read_options
from megatron_tape.home import provide_caches
from megatron_tape.io.files import remove
from megatron_tape.parallel.launcher import check_launcher_environment
from megatron_tape.text import duration

if TYPE_CHECKING:
    from megatron_tape.evaluation.ranks import Ranks
    from megatron_tape.evaluation.runner import TaskPlan

EXAMPLE = (
    "python -m pretrain.evaluate perplexity --model runs/tape --output results/tape "
    "--perplexity.data held_out.jsonl --perplexity.lengths '[1024, 2048]'"
)


def main(argv: list[str] | None = None) -> int:
    """Evaluate a model and return the exit status. Invalid arguments are reported before torch is
    imported.

    SIGTERM and SIGUSR1 interrupt the evaluation, so that a Slurm job can be requeued.
    """
    command_line.escape_unprintable()
    old_handlers = {
        number: signal.signal(number, _interrupt) for number in (signal.SIGTERM, signal.SIGUSR1)
    }
    failure_mark = os.environ.get("TAPE_FAILURE")  # the path of a file
    status = 1  # stays so if `_main` raises an exception
    try:
        status = _main(argv)
        return status
    finally:
        # If this file exists, a rank has failed, and the Slurm script does not requeue the job.
        if failure_mark is not None and status not in (0, EXIT_RESTART):
            with suppress(OSError):
                Path(failure_mark).touch()
            # A signal must not change the exit status of a failed process.
            old_handlers = dict.fromkeys(old_handlers, signal.SIG_IGN)
        for number, handler in old_handlers.items():
            signal.signal(number, handler)


def _main(argv: list[str] | None) -> int:
    """Evaluate a model; report an expected error in one sentence, and return the exit status."""
    rank = os.environ.get("RANK", "0")
    try:
        check_launcher_environment()
    except UserError as error:
        # On every rank: RANK may come from an earlier launcher and be wrong.
        command_line.print_error(error)
        return EXIT_REFUSED
    try:
        options, tasks = read_command(argv)
        provide_caches()
        scaling = read_options(options.rope_scaling, options.rope_scaling_factor)
        model_source = find_model(options.model, options.label, options.average, scaling)
        model_source.check_code(options.trust_remote_code)
        for task in tasks:
            check_task(task, model_source)
        # An unusable directory shows now, not after hours of evaluation.
        output = Path(options.output or model_source.default_output)
        check_writable("--output", str(output))
        if not options.check:
            evaluate(options, tasks, model_source, output)
        return 0
    except KeyboardInterrupt:
        command_line.log("interrupted; run the same command to continue")
        return 128 + signal.SIGINT
    except command_line.Interrupted:
        command_line.log("interrupted; run the same command to continue")
        return EXIT_RESTART
    except UserError as error:
        if rank == "0":  # the other ranks find the same error
            command_line.log(f"error: {error}")
        return EXIT_REFUSED
    except BaseException as error:
        # One rank may fail alone, so each reports its error. A sentence is enough for a full disk,
        # invalid data or missing memory. Without a sentence, the error is a bug.
        sentence = command_line.describe_fatal_error(error)
        if isinstance(error, OSError) and error.filename:
            sentence = f"{error.strerror}: {error.filename}"
        elif isinstance(error, (ValueError, OSError)):
            sentence = str(error)
        if sentence is None:
            raise
        command_line.log(f"error (rank {rank}): {sentence}")
        return 1


def _interrupt(number: int, frame: object) -> None:
    """Raise Interrupted. This is the handler of signal `number`."""
    raise command_line.Interrupted(number)


def read_command(argv: list[str] | None) -> tuple[argparse.Namespace, list[Task]]:
    """Parse the command line; return the options and the tasks to evaluate. Raises ConfigError."""
    # A dataclass with a field per task, the section of its settings: name, type and default.
    fields = [(name, task.Settings | None, None) for name, task in TASKS.items()]
    sections = dataclasses.make_dataclass("Tasks", fields, frozen=True, kw_only=True)
    parser = settings_parser(
        sections,
        usage="%(prog)s TASK... --model MODEL [--output DIR] [--config FILE.yaml] [--TASK.setting"
        " value ...]",
        description=f"{__doc__}\nTasks: {', '.join(TASKS)}. By default, all tasks with a section in"
        f" --config.\n\nAn example:\n  {EXAMPLE}",
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
    command_line.add_rope_scaling(add)
    add(
        "--output",
        metavar="DIR",
        help="output directory (default: RUN/evaluation/STEP or evaluations/NAME, with the name of"
        " --rope-scaling)",
    )
    add(
        "--label",
        metavar="NAME",
        help="name of the model in the results (default: the directory's name); --rope-scaling"
        " adds the scaling's name, such as -yarn-x4",
    )
    add(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="device of the model; auto is a GPU if there is one, else the CPU (default: auto)",
    )
    add(
        "--dtype",
        choices=("fp32", "bf16"),
        help="dtype of the model (default: bf16 on a GPU, fp32 on a CPU)",
    )
    add(
        "--trust-remote-code",
        action="store_true",
        help="run Python files in MODEL that differ from this project's, and lm_eval tasks from"
        " your own files",
    )
    add("--check", action="store_true", help="validate the command and exit")
    add("--overwrite", action="store_true", help="evaluate finished tasks again")

    parsed = read_settings(parser, sections, argv)
    options = parsed.options
    if options.model is None:
        raise ConfigError(
            "--model", "is missing", "give a run, a checkpoint, or a transformers directory"
        )

    names = list(dict.fromkeys(options.tasks))  # each once
    if not names:
        names = [name for name in TASKS if parsed.values.get(name) is not None]
    choices = f"choose from {', '.join(TASKS)}"
    if not names:
        raise ConfigError("TASK", "is missing", choices)
    for name in names:
        if name not in TASKS:
            raise ConfigError(name, "is not a task", choices)

    # Sections of other tasks in --config are ignored.
    values = {name: parsed.values.get(name) or {} for name in names}
    with parsed.add_places_to_errors():
        settings = build(sections, values, fix="give --{key} VALUE, or --config FILE.yaml")
        tasks = [TASKS[name](getattr(settings, name)) for name in names]
        if not options.trust_remote_code:
            for task in tasks:
                task.refuse_code()
    return options, tasks


def check_evaluation(arguments: list[str], model_source: ModelSource) -> None:
    """Raise ConfigError if a model cannot be evaluated with `arguments`, those of this program
    without --model.

    The model of `model_source` need not exist yet.
    """
    _, tasks = read_command([*arguments, "--model", str(model_source.path)])
    for task in tasks:
        check_task(task, model_source)


def check_task(task: Task, model_source: ModelSource) -> None:
    """Raise ConfigError if a task cannot evaluate a model, for example because it needs a
    tokenizer.
    """
    path = model_source.path
    if task.needs_tokenizer and not model_source.info.has_tokenizer:
        fix = "save the model's tokenizer into that directory with save_pretrained of transformers"
        if model_source.is_checkpoint:
            fix = "export it with a tokenizer T: tools/convert_checkpoint.py to-hf --tokenizer T"
        raise ConfigError(task.name, f"needs a tokenizer, but {path} has none", fix)
    if task.needs_tokenizer and task.generates:
        if problem := model_source.tokenizer_problem():
            raise ConfigError(
                task.name,
                f"needs a tokenizer that transformers can load, but that of {path} {problem}",
                "choose tasks that do not generate text, such as perplexity",
            )
    check_trained_on(task.name, model_source)
    # This reads the data, which one rank can do for all.
    if os.environ.get("RANK", "0") == "0":
        task.check(model_source.info)


def evaluate(
    options: argparse.Namespace, tasks: list[Task], model_source: ModelSource, output: Path
) -> None:
    """Evaluate a model on all ranks; rank 0 writes results and figures to `output`.

    `options` are those of the command line.
    """
    warnings.filterwarnings("ignore", category=FutureWarning)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if os.environ.get("RANK", "0") == "0":
        output.mkdir(parents=True, exist_ok=True)
        command_line.log("loading torch and transformers")
    # Only now, since importing them takes seconds.
    from megatron_tape.evaluation.ranks import Ranks
    from megatron_tape.evaluation.runner import plan_task, unfinished
    from megatron_tape.evaluation.transformers_model import choose_device, load_model

    ranks = Ranks.join()
    # A missing GPU is the same error on all ranks, so one of them reports it.
    with ranks.rank_0_reports():
        device = choose_device(options.device)
    default_dtype = "bf16" if device.startswith("cuda") else "fp32"
    dtype = options.dtype or default_dtype

    # Only rank 0 calls this, since reading the model for its digest takes long.
    def unfinished_plans() -> list[TaskPlan]:
        command_line.log(f"reading {model_source.path}")
        digest = model_source.digest()
        plans = [plan_task(task, digest, dtype) for task in tasks]
        return unfinished(plans, output, options.overwrite)

    plans = ranks.run_on_rank_0(unfinished_plans)
    if plans:
        with _in_transformers_format(model_source, output, dtype, ranks) as directory:
            with ranks.rank_0_reports():
                model = load_model(
                    model_source.info,
                    directory,
                    dtype,
                    device,
                    trust_remote_code=model_source.needs_trust,
                    saved_tokenizer=model_source.load_saved_tokenizer(),
                )
            tasks_by_name = {task.name: task for task in tasks}
            for plan in plans:
                _run(tasks_by_name[plan.task], model, ranks, output, plan, model_source)
    if ranks.rank == 0:
        command_line.log(f"results: {output / NAME}")
    ranks.leave()


def _run(
    task: Task, model: Any, ranks: Ranks, output: Path, plan: TaskPlan, model_source: ModelSource
) -> None:
    """Run a task on all ranks; rank 0 records its results and prints its scores."""
    from megatron_tape.evaluation.figures import clean
    from megatron_tape.evaluation.report.tables import markdown, score_tables
    from megatron_tape.evaluation.runner import add_result, draw, run_task

    started = time.monotonic()
    result = run_task(task, model, ranks, output, plan)
    if result is None:  # not rank 0
        return
    label = model.info.label
    scaling = None
    if model_source.scaling is not None:
        scaling = model_source.scaling.name
    record = ModelRecord(
        path=model_source.user_path,
        digest=plan.model_digest,
        parameters=model.model.num_parameters(),
        trained_length=model.info.trained_length,
        config=model.info.config,
        run=model_source.run,
        rope_scaling=scaling,
    )
    results = add_result(output, label, record, plan, result)
    pictures = draw(output, task, results)

    print(f"{task.name}: {label}, {duration(time.monotonic() - started)}")
    # The table shows groups of scores by their names for readers.
    for table in score_tables({label: with_group_names(task.name, result)}):
        print("\n".join(markdown(table, clean)))
    for note in result.notes:
        print(f"  note: {note}")
    for picture in pictures:
        print(f"  {picture}")
    sys.stdout.flush()


@contextmanager
def _in_transformers_format(
    model_source: ModelSource, output: Path, dtype: str, ranks: Ranks
) -> Iterator[Path]:
    """Yield a directory with the model in a format that transformers can load.

    A checkpoint, or a model with scaled positions, is exported to a temporary directory in
    `output`. All ranks can read it there.
    """
    if not model_source.needs_export:
        yield model_source.path
        return
    temporary = ranks.run_on_rank_0(lambda: Path(tempfile.mkdtemp(prefix=".exported-", dir=output)))
    try:
        ranks.run_on_rank_0(lambda: model_source.export(temporary / "model", dtype))
        yield temporary / "model"
    finally:
        # Other ranks may still be in the last task, but have loaded the model long before.
        if ranks.rank == 0:
            remove(temporary)


if __name__ == "__main__":
    sys.exit(main())
