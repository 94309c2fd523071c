"""Train and evaluate several positional encodings with several seeds, and compare them on one page.

    python -m pretrain.compare --recipe RECIPE.yaml --encodings rope,tape,tape+token_mixing=per_head --seeds 3

An encoding may be followed by settings of `model`. Every run is a training as pretrain.train does it and an evaluation
as pretrain.evaluate does it, of what the recipe's section `evaluation` names. The same command continues a comparison
that was interrupted, and more seeds or encodings add to it. Results go to comparison.json, comparison.md and
report.html in the output directory.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from megatron_tape.errors import EXIT_RESTART

if TYPE_CHECKING:
    from pretrain.comparison.plan import Plan


def main(argv: list[str] | None = None) -> int:
    """Compare, and return the exit status. Mistakes end in one sentence, before anything is trained."""
    environment = dict(os.environ)
    # numpy and torch would start threads when they are loaded, and a process with threads cannot be copied.
    os.environ["OMP_NUM_THREADS"] = "1"
    from megatron_tape.errors import ConfigError

    try:
        return _main(argv, environment)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        named = error.strerror and error.filename
        print(f"error: {f'{error.strerror}: {error.filename}' if named else error}", file=sys.stderr)
        return 1


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        from megatron_tape.errors import ConfigError

        raise ConfigError(message)


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m pretrain.compare",
        usage="%(prog)s --recipe RECIPE.yaml --encodings A,B,... [--seeds N] [--section.key value ...]",
        description=__doc__,
        epilog="--section.key value changes a setting of the recipe for all runs.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--recipe", required=True, metavar="RECIPE.yaml", help="what is trained; a file as pretrain.train takes it")
    add("--encodings", required=True, metavar="A,B,...", help="the variants: encodings, with settings as in tape+x=y")
    add("--seeds", type=int, default=3, metavar="N", help="train each with the seeds 1 to N (default: %(default)s)")
    add("--output", metavar="DIR", help="where everything goes (default: runs/compare/<name of the recipe>)")
    add("--evaluation", metavar="FILE.yaml", help="tasks, as pretrain.evaluate --config takes them, in place of those "
        "of the recipe's section evaluation")  # fmt: skip
    add("--baseline", metavar="VARIANT", help="what the others are compared with (default: the first)")
    add("--results", metavar="FILE", help="a comparison.json, made elsewhere, whose runs are not repeated")
    add("--jobs", type=int, metavar="N", help="runs side by side (default: one per GPU or, without any, per CPU core)")
    add("--check", action="store_true", help="only check the command, and print the number of runs")
    add("--only", type=int, metavar="K", help="do the K-th run alone, from 0, and make no page (for arrays of jobs)")
    add("--report-only", action="store_true", help="only make the tables and the page of the runs that are finished")
    return parser


def _main(argv: list[str] | None, environment: dict[str, str]) -> int:
    options, overrides = _parser().parse_known_args(argv)
    from megatron_tape.command_line import counted, say
    from megatron_tape.errors import refuse
    from pretrain.comparison.plan import make_plan

    for text in overrides:
        refuse(
            text.startswith("--") and "." not in text.partition("=")[0],
            f"unknown option {text}; settings of the recipe are given as --section.key value",
        )
    # DeepSpeed leaves RANK behind; only a launcher says where rank 0 is.
    launched = {"RANK", "MASTER_ADDR"} <= environment.keys()
    refuse(launched, "pretrain.compare starts its own processes; run it without torchrun or srun")
    refuse(options.jobs is not None and options.jobs < 1, f"--jobs is {options.jobs}; give at least 1")
    plan = make_plan(options, overrides)
    count, left = len(plan.runs), plan.left
    if options.check:
        print(f"{counted(count, 'run')}, of which {count - len(left)} are finished, in {plan.output}")
        return 0
    if options.only is not None:
        refuse(not 0 <= options.only < count, f"--only is {options.only}; give a number from 0 to {count - 1}")
        left = [run for run in left if run is plan.runs[options.only]]
    failed, stopped = ({}, None) if options.report_only else _do(plan, left, options, environment)
    if options.only is None:
        _conclude(plan)
    for name, reason in failed.items():
        print(f"error: {name}: {reason}", file=sys.stderr)
    missing = [run.name for run in plan.left if options.only is None or run in left]
    if missing:
        say(f"{counted(len(missing), 'run')} of {count} not finished; run the same command to continue")
    if stopped is not None:
        import signal

        return 130 if stopped == signal.SIGINT else EXIT_RESTART
    return 1 if missing else 0


def _do(plan: Plan, left: list, options: argparse.Namespace, environment: dict[str, str]) -> tuple[dict, int | None]:
    """Do the runs that are left; return why some have failed, and the signal that ended the work."""
    from megatron_tape import command_line
    from pretrain.comparison import processes
    from pretrain.comparison.jobs import Jobs

    if not left:
        command_line.say("all runs are finished already")
        return {}, None
    gpus, device = processes.find_gpus()
    slots = options.jobs or len(gpus) or len(os.sched_getaffinity(0))
    with _alone(plan, options):
        if gpus:
            start = processes.Fresh(gpus, environment)
        else:
            with command_line.step("loading torch, megatron-core and deepspeed"):
                alone = processes.load_libraries()
            start = processes.copy_of_this if alone else processes.Fresh([], {**environment, "OMP_NUM_THREADS": "1"})

        def finish(run, seconds):
            plan.record(run, seconds, device)
            if options.only is None:
                _write(plan)

        jobs = Jobs(left, slots, start, finish)
        jobs.run()
    return jobs.failed, jobs.stopped


@contextmanager
def _alone(plan: Plan, options: argparse.Namespace) -> Iterator[None]:
    """Keep other comparisons out of the output directory; the jobs of an array are told apart by what they do."""
    from megatron_tape.errors import refuse

    plan.output.mkdir(parents=True, exist_ok=True)
    # Copies of this process inherit the lock: runs that a killed comparison has left behind are waited for.
    descriptor = os.open(plan.output, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            if options.only is None:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            refuse(
                True, f"another comparison, or a run that one has left behind, is at work in {plan.output}; wait for it"
            )
        except OSError:  # some network file systems have no locks
            pass
        yield
    finally:
        os.close(descriptor)


def _write(plan: Plan) -> str:
    """Write the results as JSON and as tables; return the tables."""
    from megatron_tape.evaluation.comparison import NAME, write_comparison
    from megatron_tape.evaluation.report.comparison import markdown
    from megatron_tape.io.files import write_whole

    order = {run.variant.label: number for number, run in reversed([*enumerate(plan.runs)])}
    plan.known["runs"].sort(key=lambda run: (order.get(run["variant"], len(order)), run["variant"], run["seed"]))
    write_comparison(plan.output / NAME, plan.known)
    text = markdown(plan.known, [run.name for run in plan.left])
    write_whole(plan.output / "comparison.md", [text.encode()])
    return text


def _conclude(plan: Plan) -> None:
    """Collect what there is, show the tables and make the page."""
    from pretrain.report import make

    plan.collect()
    if not plan.known["runs"]:
        return
    plan.output.mkdir(parents=True, exist_ok=True)
    print(_write(plan))
    make([plan.output], plan.output / "report.html")


if __name__ == "__main__":
    sys.exit(main())
