"""Train and evaluate several positional encodings with several seeds, and compare them on one page.

    python -m pretrain.compare --recipe RECIPE --encodings rope,tape,tape+token_mixing=per_head --seeds 3

An encoding may be followed by settings of `model`, and by those of `optimizer` or `schedule` as in
tape+optimizer.lr=1e-3. Every run is a training as pretrain.train does it and an evaluation
as pretrain.evaluate does it, of what the recipe's section `evaluation` names. The same command continues a comparison
that was interrupted, and more seeds or encodings add to it. Results go to comparison.json, comparison.md and
report.html in the output directory.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from megatron_tape import command_line
from megatron_tape.command_line import say
from megatron_tape.errors import EXIT_RESTART, FileError, refuse
from megatron_tape.evaluation.comparison_file import NAME, write_comparison
from megatron_tape.io.files import write_whole
from megatron_tape.parallel.launcher import refuse_launcher
from megatron_tape.text import counted
from pretrain import report
from pretrain.comparison.jobs import Jobs, Programs, find_gpus
from pretrain.comparison.planned_runs import Plan, PlannedRun, make_plan


def read_command(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and the settings of the recipe that the command changes."""
    parser = command_line.Parser(
        prog="python -m pretrain.compare",
        usage="%(prog)s --recipe RECIPE --encodings A,B,... [--seeds N] [--section.key value ...]",
        description=__doc__,
        epilog="--section.key value changes a setting of the recipe for all runs.",
    )
    add = parser.add_argument
    add("--recipe", required=True, metavar="RECIPE", help="what is trained, as --config of pretrain.train")
    add(
        "--encodings",
        type=str,
        required=True,
        metavar="A,B,...",
        help="the variants: encodings, with settings as in tape+x=y; the first is what the others are compared with",
    )
    add("--seeds", default="3", metavar="N or A-B", help="train each with the seeds 1 to N, or A to B (default: 3)")
    add("--output", metavar="DIR", help="where everything goes (default: runs/compare/<name of the recipe>)")
    add("--evaluation", metavar="FILE.yaml", help="tasks, as pretrain.evaluate --config takes them, in place of those "
        "of the recipe's section evaluation")  # fmt: skip
    add("--trust-remote-code", action="store_true", help="run tasks of lm_eval in files of your own")
    add("--jobs", type=int, metavar="N", help="runs side by side (default: one per GPU or, without any, per CPU core)")
    add("--check", action="store_true", help="only check the command, and print the number of runs")
    add("--only", type=int, metavar="K", help="do the K-th run alone, from 0, and make no page (for arrays of jobs)")
    add("--report-only", action="store_true", help="only make the tables and the page of the runs that are finished")
    options, overrides = parser.parse_known_args(argv)
    for text in overrides:
        unknown = text.startswith("--") and "." not in text.partition("=")[0]
        refuse(unknown, text, "is no option", "settings of the recipe are given as --section.key value")
    return options, overrides


def main(argv: list[str] | None = None) -> int:
    """Compare, and return the exit status. Raises UserError for mistakes, before anything is trained."""
    options, overrides = read_command(argv)
    refuse_launcher("pretrain.compare", "starts its own processes")
    refuse(options.jobs is not None and options.jobs < 1, "--jobs", f"is {options.jobs}", "give at least 1")
    plan = make_plan(options, overrides)
    count, left = len(plan.runs), plan.left
    if options.check:
        print(f"{counted(count, 'run')}, of which {count - len(left)} are finished, in {plan.output}")
        return 0
    if options.only is not None:
        refuse(not 0 <= options.only < count, "--only", f"is {options.only}", f"give a number from 0 to {count - 1}")
        left = [run for run in left if run is plan.runs[options.only]]
    failed, stopped = ({}, None) if options.report_only else _do(plan, left, options)
    if options.only is None:
        _conclude(plan)
    for name, reason in failed.items():
        print(f"error: {name}: {reason}", file=sys.stderr)
    missing = [run.name for run in plan.left if options.only is None or run in left]
    if missing:
        say(f"{counted(len(missing), 'run')} of {count} not finished; run the same command to continue")
    if stopped is not None:
        return 128 + signal.SIGINT if stopped == signal.SIGINT else EXIT_RESTART
    return 1 if missing else 0


def _do(plan: Plan, left: list[PlannedRun], options: argparse.Namespace) -> tuple[dict[str, str], int | None]:
    """Do the runs that are left; return why some have failed, and the signal that ended the work."""
    if not left:
        say("all runs are finished already")
        return {}, None
    gpus, device = find_gpus()
    slots = min(options.jobs or len(gpus) or len(os.sched_getaffinity(0)), len(left))

    def finish(run: PlannedRun, seconds: float) -> None:
        plan.record(run, seconds, device)
        if options.only is None:
            _write(plan)

    with _locked(plan, alone=options.only is None) as lock:
        programs = Programs(gpus, lock)
        jobs = Jobs(left, slots, programs, finish)
        jobs.run()
    return jobs.failed, jobs.stopped


@contextmanager
def _locked(plan: Plan, alone: bool) -> Iterator[int]:
    """Keep other comparisons out of the output directory; the jobs of an array are told apart by what they do.

    The runs inherit the lock's descriptor, so that those which a killed comparison has left behind are waited for.
    """
    plan.output.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(plan.output, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # some network file systems have no locks
            try:
                fcntl.flock(descriptor, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            except BlockingIOError:
                problem = "is where another comparison, or a run that one has left behind, is at work"
                raise FileError(str(plan.output), problem, "wait for it") from None
        yield descriptor
    finally:
        os.close(descriptor)


def _write(plan: Plan) -> str:
    """Write the results as JSON and as tables; return the tables as a terminal shows them."""
    from megatron_tape.evaluation.figures import clean
    from megatron_tape.evaluation.report.comparison_tables import markdown

    order = {run.variant.label: number for number, run in reversed([*enumerate(plan.runs)])}
    plan.known.runs.sort(key=lambda run: (order.get(run.variant, len(order)), run.variant, run.seed))
    write_comparison(plan.output / NAME, plan.known)
    left = [run.name for run in plan.left]
    write_whole(plan.output / "comparison.md", [markdown(plan.known, left).encode()])
    return markdown(plan.known, left, clean)


def _conclude(plan: Plan) -> None:
    plan.collect()
    if not plan.known.runs:
        return
    plan.output.mkdir(parents=True, exist_ok=True)
    print(_write(plan))
    report.make([plan.output], plan.output / "report.html", [run.name for run in plan.left])


if __name__ == "__main__":
    command_line.run(main)
