"""Train and evaluate several positional encodings with several seeds, and compare them on one page.

    python -m pretrain.compare --recipe RECIPE --encodings rope,tape+token_mixing=per_head --seeds 3

An encoding with changed settings is a variant of its own: tape+token_mixing=per_head changes a
setting of the model or of the encoding, tape+optimizer.lr=1e-3 one of `optimizer` or `schedule`.
There is one run per variant and seed. A run trains with pretrain.train, and then evaluates the
tasks in the recipe's section `evaluation` with pretrain.evaluate. The results of all runs are in
comparison.json, comparison.md and report.html in the output directory. The same command continues
an interrupted comparison; a command with more seeds or encodings adds runs to it.

    python -m pretrain.compare --ladder RECIPE

compares the variants of a ladder's recipe at several model sizes and amounts of training, with
learning rates that are tuned for each variant. The results are in ladder.json, ladder.md and
report.html.
"""

import argparse
import fcntl
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from megatron_tape import command_line
from megatron_tape.command_line import Interrupted, log
from megatron_tape.errors import EXIT_RESTART, ConfigError, FileError
from megatron_tape.evaluation.comparison_file import NAME, write_comparison
from megatron_tape.evaluation.ladder_file import NAME as LADDER
from megatron_tape.evaluation.ladder_file import write_ladder
from megatron_tape.io.files import write_whole
from megatron_tape.parallel.launcher import refuse_launcher
from megatron_tape.text import counted
from pretrain import report
from pretrain.comparison.jobs import Jobs, find_gpus, start_program
from pretrain.comparison.ladder import LadderPlan, Tuning, plan_ladder
from pretrain.comparison.planned_runs import ComparisonPlan, PlannedRun, make_plan


def read_command(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line.

    Returns the options, and the arguments `--section.key value` that override settings of the
    recipe. Raises ConfigError for an unknown option.
    """
    parser = command_line.Parser(
        prog="python -m pretrain.compare",
        usage=(
            "%(prog)s --recipe RECIPE --encodings A,B,... [--seeds N] [--section.key value ...]\n"
            "       %(prog)s --ladder RECIPE [--extend-grid] [--section.key value ...]"
        ),
        description=__doc__,
        epilog=(
            "--section.key value changes a setting of the recipe for all runs, with --ladder for"
            " the language models."
        ),
    )
    add = parser.add_argument
    add(
        "--recipe",
        metavar="RECIPE",
        help="recipe of all runs, as for --config of pretrain.train",
    )
    add(
        "--ladder",
        metavar="RECIPE",
        help="recipe of a ladder: sizes, amounts of training, variants, learning rates and seeds,"
        " such as compare/ladder",
    )
    add(
        "--extend-grid",
        action="store_true",
        help="add learning rates to a ladder's grid until the best one is not at its end",
    )
    add(
        "--encodings",
        type=str,
        metavar="A,B,...",
        help="variants to train: encodings, optionally with settings as in tape+x=y; the first is"
        " the baseline. With --ladder: names of its variants (default: all)",
    )
    add(
        "--seeds",
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
    _check_kind(options)
    # Settings are checked later. A mistyped option has no dot.
    for text in overrides:
        if text.startswith("--") and "." not in text.partition("=")[0]:
            raise ConfigError(
                text,
                "is not an option",
                "see --help; write settings of the recipe as --section.key value",
            )
    return options, overrides


def _check_kind(options: argparse.Namespace) -> None:
    """Raise ConfigError for options that are missing, or that do not apply."""
    if options.ladder is None:
        if options.recipe is None or options.encodings is None:
            raise ConfigError(
                ("--recipe", "--encodings"),
                "are not both given",
                "give --recipe RECIPE --encodings A,B,..., or --ladder RECIPE",
            )
        if options.extend_grid:
            raise ConfigError("--extend-grid", "requires a ladder", "remove it, or give --ladder")
        return
    for name in ("recipe", "seeds", "evaluation", "trust_remote_code"):
        if getattr(options, name):
            raise ConfigError(
                f"--{name.replace('_', '-')}",
                "does not apply to a ladder",
                "remove it, and change the recipe of the ladder",
            )


def main(argv: list[str] | None = None) -> int:
    """Run the comparison and return the exit status, 1 if runs are not finished.

    Raises UserError for invalid settings before training begins.
    """
    options, overrides = read_command(argv)
    refuse_launcher("pretrain.compare", "starts its own processes")
    execute = _run_comparison if options.ladder is None else _run_ladder
    try:
        return execute(options, overrides)
    except Interrupted as interruption:
        if options.check or options.report_only:
            raise
        # No run is active, such as between two rounds of tuning: `Jobs` handles other signals.
        name = signal.Signals(interruption.number).name
        log(f"ended by {name}; run the same command to continue")
        return _status_after(interruption.number)


def _run_comparison(options: argparse.Namespace, overrides: list[str]) -> int:
    """Execute the runs of a comparison and return the exit status, 1 if runs are not finished.

    Raises UserError for invalid settings before training begins.
    """
    plan = make_plan(options, overrides)
    count = len(plan.runs)
    to_execute = plan.unfinished  # a new list; runs that finish later stay in it
    if options.check:
        finished = count - len(to_execute)
        print(f"{counted(count, 'run')}, {finished} finished, output in {plan.output}")
        return 0
    if options.only is not None:
        _check_only(options, count)
        to_execute = [run for run in to_execute if run is plan.runs[options.only]]

    def record(run: PlannedRun, seconds: float, gpu_model: str | None) -> None:
        plan.record(run, seconds, gpu_model)
        # The tasks of an array would overwrite each other's files.
        if options.only is None:
            _write_tables(plan)

    stopping_signal = None
    if not options.report_only:
        finished_before = [run for run in plan.runs if run not in to_execute]
        stopping_signal = _execute(to_execute, plan.output, options, record, finished_before)
    if options.only is None:
        tables = _conclude(plan)
        # After a signal, the message about what is not finished would be below many tables.
        if stopping_signal is None and tables:
            print(tables)

    # With --only, as in a task of a job array, the exit status is about that run alone.
    missing = [run for run in plan.unfinished if options.only is None or run in to_execute]
    return _status(missing, count, stopping_signal)


def _run_ladder(options: argparse.Namespace, overrides: list[str]) -> int:
    """Execute the runs of a ladder and return the exit status, 1 if runs are not finished.

    Raises UserError for invalid settings before training begins, and after tuning if the best
    learning rate of a variant is at the end of its grid.
    """
    names = None
    if options.encodings is not None:
        names = [name.strip() for name in options.encodings.split(",")]
    output = Path(options.output or f"runs/compare/{Path(options.ladder).stem}")
    ladder = plan_ladder(options.ladder, output, names, overrides)
    if options.check:
        gpus, gpu_model = find_gpus()
        print(ladder.describe())
        print(ladder.estimate(_slots(options, gpus), gpu_model))
        return 0
    if options.only is not None:
        return _run_ladder_task(ladder, options)

    stopping_signal = None
    if not options.report_only:
        gpus, gpu_model = find_gpus()
        log(ladder.describe())
        log(ladder.estimate(_slots(options, gpus), gpu_model))
        stopping_signal = _tune(ladder, ladder.tunings, options)
        if stopping_signal is None and ladder.is_tuned:
            ladder.plan_final_runs()
            to_execute = [run for run in ladder.final_runs if run in ladder.unfinished]
            stopping_signal = _execute_of_ladder(ladder, to_execute, options)
    tables = _conclude_ladder(ladder)
    if stopping_signal is None:
        # After a signal, the message about what is not finished would be below many tables.
        if tables:
            print(tables)
        ladder.require_complete_grids()
    return _status(ladder.unfinished, len(ladder.runs), stopping_signal)


def _run_ladder_task(ladder: LadderPlan, options: argparse.Namespace) -> int:
    """Execute one task of a job array: one for each tuning, followed by one for each final run.

    Returns the exit status, 1 if a run of the task is not finished. Raises UserError if the
    learning rate of a final run is not known yet, and like `_run_ladder`.
    """
    tunings = ladder.tunings
    _check_only(options, len(tunings) + len(ladder.final_runs))
    if options.only < len(tunings):
        tuning = tunings[options.only]
        stopping_signal = _tune(ladder, [tuning], options)
        if stopping_signal is None:
            ladder.require_complete_grids([tuning])
        return _status(tuning.plan.unfinished, len(tuning.plan.runs), stopping_signal)

    ladder.require_complete_grids()
    if not ladder.is_tuned:
        raise ConfigError(
            "--only",
            f"is {options.only}, a run whose learning rate is not known: tuning is not finished",
            f"first finish the tasks 0 to {len(tunings) - 1}",
        )
    run = ladder.final_runs[options.only - len(tunings)]
    to_execute = [run for run in [run] if run in ladder.unfinished]
    stopping_signal = _execute_of_ladder(ladder, to_execute, options)
    return _status([run for run in to_execute if run in ladder.unfinished], 1, stopping_signal)


def _tune(ladder: LadderPlan, tunings: list[Tuning], options: argparse.Namespace) -> int | None:
    """Execute the runs of these tunings, and with --extend-grid extend grids whose best rate is at
    their end; return the signal that ended them, or None.
    """
    while True:
        to_execute = [run for tuning in tunings for run in tuning.plan.unfinished]
        stopping_signal = _execute_of_ladder(ladder, to_execute, options)
        # A tuning without all its losses has no missing rate.
        at_end = [tuning for tuning in tunings if tuning.missing_rate is not None]
        if stopping_signal is not None or not at_end or not options.extend_grid:
            return stopping_signal
        for tuning in at_end:
            tuning.extend()


def _execute_of_ladder(
    ladder: LadderPlan, runs: list[PlannedRun], options: argparse.Namespace
) -> int | None:
    """Execute unfinished runs of a ladder; return the signal that ended them, or None."""
    if not runs:
        return None
    others = [run for run in ladder.runs if run not in runs]
    unfinished = ladder.unfinished
    return _execute(
        runs,
        ladder.output,
        options,
        ladder.record_run,
        finished_before=[run for run in others if run not in unfinished],
        later=[run for run in others if run in unfinished],
    )


def _check_only(options: argparse.Namespace, count: int) -> None:
    """Raise ConfigError if --only is not the number of one of `count` tasks."""
    if not 0 <= options.only < count:
        raise ConfigError("--only", f"is {options.only}", f"give a number from 0 to {count - 1}")


def _status(missing: Sequence[PlannedRun], count: int, stopping_signal: int | None) -> int:
    """Return the exit status, given the runs of `count` that are not finished and the signal that
    ended them; name their number.
    """
    if missing:
        log(
            f"not finished: {len(missing)} of {counted(count, 'run')}; run the same command to"
            " continue"
        )
    if stopping_signal is not None:
        return _status_after(stopping_signal)
    return int(bool(missing))


def _status_after(number: int) -> int:
    """Return the exit status after a signal: Ctrl-C ends the command, others restart it."""
    if number == signal.SIGINT:
        return 128 + number
    return EXIT_RESTART


def _slots(options: argparse.Namespace, gpus: Sequence[str]) -> int:
    """Return the number of concurrent runs: --jobs, or one per GPU or, without GPUs, per core."""
    return options.jobs or len(gpus) or len(os.sched_getaffinity(0))


def _execute(
    runs: list[PlannedRun],
    output: Path,
    options: argparse.Namespace,
    record: Callable[[PlannedRun, float, str | None], None],
    finished_before: Sequence[PlannedRun] = (),
    later: Sequence[PlannedRun] = (),
) -> int | None:
    """Execute runs with their results below `output`; return the signal that ended them, or None.

    `options` are those of the command line. `record(run, seconds, gpu_model)` is called when a run
    is finished. `finished_before` and `later` are the other runs, as in `Jobs`.
    """
    if not runs:
        log("all runs are finished already")
        return None

    gpus, gpu_model = find_gpus()
    in_array = options.only is not None
    if in_array:
        # A task of an array does not know what the others have finished.
        finished_before = later = ()
    with _locked(output, shared=in_array) as lock:
        jobs = Jobs(
            runs,
            _slots(options, gpus),
            partial(start_program, gpus=gpus, lock=lock),
            on_finished=lambda run, seconds: record(run, seconds, gpu_model),
            finished_before=finished_before,
            later=later,
        )
        jobs.run()
    return jobs.stopped


@contextmanager
def _locked(output: Path, shared: bool) -> Iterator[int]:
    """Lock the output directory against other comparisons, and yield the file descriptor that holds
    the lock.

    The tasks of a job array share the lock. Runs inherit the descriptor: if this process is killed,
    the directory stays locked until its runs have ended.
    """
    output.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(output, os.O_RDONLY | os.O_DIRECTORY)
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise FileError(
            output,
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


def _conclude(plan: ComparisonPlan) -> str:
    """Write the results of all finished runs and the page, and return the tables as plain text;
    empty if no run is finished.
    """
    plan.collect()
    if not plan.results.runs:
        return ""
    plan.output.mkdir(parents=True, exist_ok=True)
    tables = _write_tables(plan)
    missing = [run.name for run in plan.unfinished]
    report.write_report([plan.output], plan.output / "report.html", missing)
    return tables


def _conclude_ladder(ladder: LadderPlan) -> str:
    """Write the results of all finished runs of a ladder and the page, and return the tables as
    plain text; empty if no run is finished.
    """
    from megatron_tape.evaluation.figures import clean
    from megatron_tape.evaluation.report.ladder_tables import markdown

    # Other processes, such as tasks of a job array, may have finished runs.
    ladder.collect()
    if not ladder.write_comparisons():
        return ""
    results = ladder.results()
    write_ladder(ladder.output / LADDER, results)
    # A ladder has too many runs to name each of them.
    counts = Counter(run.where for run in ladder.unfinished)
    missing = [f"{counted(count, 'run')} ({where})" for where, count in counts.items()]
    write_whole(ladder.output / "ladder.md", [markdown(results, missing).encode()])
    report.write_report([ladder.output], ladder.output / "report.html", missing)
    # `clean` replaces control characters, which a terminal could interpret.
    return markdown(results, missing, clean)


if __name__ == "__main__":
    command_line.run(main)
