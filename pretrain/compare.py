"""Train and evaluate several positional encodings with several seeds, and compare them on one page.

    python -m pretrain.compare --recipe RECIPE --encodings rope,tape+token_mixing=per_head --seeds 3

An encoding with changed settings is a variant of its own: tape+token_mixing=per_head changes a
setting of the model or of the encoding, tape+optimizer.lr=1e-3 one of `optimizer` or `schedule`.
There is one run per variant and seed. A run trains with pretrain.train, and then evaluates the
tasks in the recipe's section `evaluation` with pretrain.evaluate. The results of all runs are in
comparison.json, comparison.md and report.html in the output directory. The same command continues
an interrupted comparison; a command with more seeds or encodings adds runs to it.
"""

import argparse
import fcntl
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from megatron_tape import command_line
from megatron_tape.command_line import log
from megatron_tape.errors import EXIT_RESTART, ConfigError, FileError
from megatron_tape.evaluation.comparison_file import NAME, write_comparison
from megatron_tape.io.files import write_whole
from megatron_tape.parallel.launcher import refuse_launcher
from megatron_tape.text import counted
from pretrain import report
from pretrain.comparison.jobs import Jobs, find_gpus, start_program
from pretrain.comparison.planned_runs import ComparisonPlan, PlannedRun, make_plan


def read_command(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line.

    Returns the options, and the arguments `--section.key value` that override settings of the
    recipe. Raises ConfigError for an unknown option.
    """
    parser = command_line.Parser(
        prog="python -m pretrain.compare",
        usage="%(prog)s --recipe RECIPE --encodings A,B,... [--seeds N] [--section.key value ...]",
        description=__doc__,
        epilog="--section.key value changes a setting of the recipe for all runs.",
    )
    add = parser.add_argument
    add(
        "--recipe",
        required=True,
        metavar="RECIPE",
        help="recipe of all runs, as for --config of pretrain.train",
    )
    add(
        "--encodings",
        type=str,
        required=True,
        metavar="A,B,...",
        help="variants to train: encodings, optionally with settings as in tape+x=y; the first is"
        " the baseline",
    )
    add(
        "--seeds",
        default="3",
        metavar="N or A-B",
        help="seeds of each variant: 1 to N, or A to B (default: 3)",
    )
    add(
        "--output",
        metavar="DIR",
        help="output directory (default: runs/compare/<name of the recipe>)",
    )
    add(
        "--evaluation",
        metavar="FILE.yaml",
        help="file of tasks, as for pretrain.evaluate --config; replaces "
        "the recipe's section evaluation",
    )
    add("--trust-remote-code", action="store_true", help="run lm_eval tasks from your own files")
    add(
        "--jobs",
        type=command_line.whole_number,
        metavar="N",
        help="concurrent runs (default: one per GPU or, without GPUs, per CPU core)",
    )
    add(
        "--check",
        action="store_true",
        help="validate the command, print the number of runs, and exit",
    )
    add(
        "--only",
        type=int,
        metavar="K",
        help="execute only run K, counted from 0, and write no tables and no page (for job arrays)",
    )
    add(
        "--report-only",
        action="store_true",
        help="start no runs; write the tables and the page of the finished runs",
    )

    options, overrides = parser.parse_known_args(argv)
    # Settings are checked later. A mistyped option has no dot.
    for text in overrides:
        if text.startswith("--") and "." not in text.partition("=")[0]:
            raise ConfigError(
                text,
                "is not an option",
                "see --help; write settings of the recipe as --section.key value",
            )
    return options, overrides


def main(argv: list[str] | None = None) -> int:
    """Run the comparison and return the exit status, 1 if runs are not finished.

    Raises UserError for invalid settings before training begins.
    """
    options, overrides = read_command(argv)
    refuse_launcher("pretrain.compare", "starts its own processes")
    plan = make_plan(options, overrides)
    count = len(plan.runs)
    to_execute = plan.unfinished  # a new list; runs that finish later stay in it
    if options.check:
        finished = count - len(to_execute)
        print(f"{counted(count, 'run')}, {finished} finished, output in {plan.output}")
        return 0
    if options.only is not None:
        if not 0 <= options.only < count:
            raise ConfigError(
                "--only", f"is {options.only}", f"give a number from 0 to {count - 1}"
            )
        to_execute = [run for run in to_execute if run is plan.runs[options.only]]

    stopping_signal = None
    if not options.report_only:
        stopping_signal = _execute(plan, to_execute, options)
    if options.only is None:
        _conclude(plan)

    # With --only, as in a task of a job array, the exit status is about that run alone.
    missing = [run for run in plan.unfinished if options.only is None or run in to_execute]
    if missing:
        log(
            f"not finished: {len(missing)} of {counted(count, 'run')}; run the same command to"
            " continue"
        )
    if stopping_signal == signal.SIGINT:
        return 128 + signal.SIGINT
    if stopping_signal is not None:
        return EXIT_RESTART
    return int(bool(missing))


def _execute(
    plan: ComparisonPlan, runs: list[PlannedRun], options: argparse.Namespace
) -> int | None:
    """Execute unfinished runs of the plan; return the signal that ended them, or None.

    `options` are those of the command line.
    """
    if not runs:
        log("all runs are finished already")
        return None

    gpus, gpu_model = find_gpus()
    slots = options.jobs or len(gpus) or len(os.sched_getaffinity(0))
    in_array = options.only is not None

    def record(run: PlannedRun, seconds: float) -> None:
        plan.record(run, seconds, gpu_model)
        # The tasks of an array would overwrite each other's files.
        if not in_array:
            _write_tables(plan)

    with _locked(plan, shared=in_array) as lock:
        # A task of an array does not know what the others have finished.
        finished_before = 0 if in_array else len(plan.runs) - len(runs)
        start = partial(start_program, gpus=gpus, lock=lock)
        jobs = Jobs(runs, slots, start, on_finished=record, finished_before=finished_before)
        jobs.run()
    return jobs.stopped


@contextmanager
def _locked(plan: ComparisonPlan, shared: bool) -> Iterator[int]:
    """Lock the output directory against other comparisons, and yield the file descriptor that holds
    the lock.

    The tasks of a job array share the lock. Runs inherit the descriptor: if this process is killed,
    the directory stays locked until its runs have ended.
    """
    plan.output.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(plan.output, os.O_RDONLY | os.O_DIRECTORY)
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise FileError(
            plan.output,
            "is in use by another comparison, or by a run of a killed one",
            "wait until it ends, or choose another --output",
        ) from None
    except OSError:
        pass  # some network file systems have no locks
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _write_tables(plan: ComparisonPlan) -> str:
    """Write the results to comparison.json and comparison.md, and return the tables as plain text.

    The text has no characters that a terminal could interpret.
    """
    from megatron_tape.evaluation.figures import clean
    from megatron_tape.evaluation.report.comparison_tables import markdown

    # Variants are in the order of the command line, with the baseline first.
    order = list(dict.fromkeys(run.variant.label for run in plan.runs))
    order += plan.results.variants  # other variants, of earlier commands
    plan.results.runs.sort(key=lambda run: (order.index(run.variant), run.seed))
    write_comparison(plan.output / NAME, plan.results)
    missing = [run.name for run in plan.unfinished]
    write_whole(plan.output / "comparison.md", [markdown(plan.results, missing).encode()])
    # `clean` replaces control characters, which a terminal could interpret.
    return markdown(plan.results, missing, clean)


def _conclude(plan: ComparisonPlan) -> None:
    """Write and print the results of all finished runs, and write the page.

    Does nothing if no run is finished.
    """
    plan.collect()
    if not plan.results.runs:
        return
    plan.output.mkdir(parents=True, exist_ok=True)
    print(_write_tables(plan))
    missing = [run.name for run in plan.unfinished]
    report.write_report([plan.output], plan.output / "report.html", missing)


if __name__ == "__main__":
    command_line.run(main)
