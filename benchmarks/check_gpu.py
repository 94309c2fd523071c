"""Check and measure this project on the GPUs of this machine; every slice takes less than nine minutes.

    make check-gpu                                     what has not been done yet, then the table of goals
    make check-gpu SLICE=attention                     only this slice, by its name or its number, even if it is done
    make check-gpu MINUTES=9                           start no slice that might not end in time; call again to continue
    make check-gpu WHEELS=wheels PYTHON=python3        with this Python's own torch and the wheels of that folder
    make check-gpu PROFILE=1                           also write traces of training steps

or `python -m benchmarks.check_gpu` with the options below. A slice is a call of pytest or of a benchmark (see
goals.py), which writes its results to the output folder; slices.json there says how each one ended, and goals.md which
goals have been met. Slices whose results come from this code and these GPUs are not run again. Without a GPU it says
what it would do, and runs every slice's code at toy size on the CPU, where kernels are interpreted; figures from there
mean nothing and are not kept in benchmarks/results.
"""

import argparse
import json
import os
import re
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks.environment import ROOT, minutes, shown
from benchmarks.goals import SLICES, Slice
from benchmarks.machine import DONE, FAILED, STOPPED, Machine, Outcome, look_at_machine, program_variables, run
from benchmarks.report import table
from benchmarks.wheels import install
from megatron_tape.io.files import write_whole
from megatron_tape.io.versions import code_digest

CODE = ("megatron_tape", "pretrain", "benchmarks", "tests/gpu", "tests/ops")
TOY_OUTPUT = ROOT / "runs" / "check-gpu-toy"

LIMIT = 9.0
"""Minutes after which a slice's program is ended."""
SHORTEST = 1.0
"""Minutes below which no slice is started; behind another one it must have those that it asks for."""
RESERVE = 45.0
"""Seconds before the limit at which pytest begins no further test, so that it can write its report."""


class Check:
    """The slices on one machine, with their results in one folder."""

    def __init__(self, machine: Machine, output: Path, variables: dict[str, str], options: argparse.Namespace):
        self.machine, self.output, self.variables, self.options = machine, output, variables, options
        self.code = code_digest(CODE)
        self.outcomes: dict[str, Outcome] = {}
        try:
            record = json.loads((output / "slices.json").read_text(encoding="utf-8"))
            self.outcomes = {name: Outcome(**(each | {"gpus": tuple(each["gpus"])})) for name, each in record.items()}
        except FileNotFoundError:
            pass
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            print(f"warning: {shown(output / 'slices.json')} is damaged, so every slice is to do: {error}")

    def results(self, part: Slice) -> Path:
        """Return the file of a slice's results."""
        return self.output / f"{part.name}.{'xml' if part.is_pytest else 'json'}"

    def is_done(self, part: Slice) -> bool:
        """Return whether the slice's results come from this code on these GPUs."""
        ended = self.outcomes.get(part.name)
        here = (DONE, self.code, self.machine.gpus)
        return ended is not None and (ended.status, ended.code, ended.gpus) == here and self.results(part).exists()

    def was_tried(self, part: Slice) -> bool:
        """Return whether a slice has run with this code, but did not come to its end."""
        ended = self.outcomes.get(part.name)
        return ended is not None and ended.code == self.code and ended.status != DONE

    def introduction(self, chosen: list[Slice]) -> list[str]:
        """Say what this machine is and what will be done."""
        machine = self.machine
        lines = [", ".join([f"Python {machine.python}", *machine.versions(), *machine.gpu_software.values()])]
        if machine.toy:
            lines.append(
                "No GPU can be used here. On one, the slices below would run at full size. Now their code runs at toy "
                "size on the CPU, with interpreted kernels; it measures nothing."
            )
        else:
            size = f"{machine.gpu_memory_gib} GiB, compute capability {machine.capability}"
            lines.append(f"{len(machine.gpus)} x {machine.gpus[0]}, {size}")
        for number, part in enumerate(SLICES, 1):
            why = machine.why_not(part)
            state = f"cannot run: {why}" if why else "done before" if self.is_done(part) else "to do"
            state = "to do" if part in chosen and not why else "not chosen" if chosen else state
            lines.append(f"{number} {part.name:16} {part.purpose} [{state}]")
        return lines

    def run(self, chosen: list[Slice], deadline: float | None) -> list[str]:
        """Run the chosen slices, or else all that are not done; return their statuses.

        All of it ends before `deadline`, as `time.monotonic` counts.
        """
        statuses: list[str] = []
        todo = [part for part in SLICES if not self.is_done(part) and not self.machine.why_not(part)]
        # What failed or was ended before comes last, so that it does not take the others' time again and again.
        parts = chosen or sorted(todo, key=self.was_tried)
        for index, part in enumerate(parts, 1):
            left = LIMIT if deadline is None else min(LIMIT, (deadline - time.monotonic()) / 60)
            if why := self.machine.why_not(part):
                print(f"\n{part.name} {why}", file=sys.stderr)
                statuses.append(FAILED)
                continue
            if left < min(LIMIT, part.minutes if DONE in statuses else SHORTEST):
                names = ", ".join(other.name for other in parts[index - 1 :])
                print(f"\nthe time is used up; still to do: {names}. Run the same command again.")
                statuses.append(STOPPED)
                break
            statuses.append(self._run(part, f"{index} of {len(parts)}", left))
            self.write_goals()  # at once, as this command may be ended during the next slice
        return statuses

    def write_goals(self) -> list[str]:
        """Write the table of goals as far as they are known; return its lines."""
        files = {part.name: self.results(part) for part in SLICES}
        lines = table(self.machine, self.outcomes, files)
        write_whole(self.output / "goals.md", [("\n".join(lines) + "\n").encode()])
        return lines

    def command(self, part: Slice, seconds: float) -> list[str]:
        """Return the command of a slice that has `seconds` of time."""
        command = part.toy if self.machine.toy and part.toy else part.command
        launcher = ["-m"]
        if part.every_gpu:
            processes = str(self.machine.processes)
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes, "-m"]
        if part.is_pytest:
            options = [f"--junitxml={self.results(part)}", f"--session-timeout={seconds - RESERVE:.0f}"]
        else:
            options = ["--output", str(self.results(part))]
            options += ["--commit", self.options.commit] if self.options.commit else []
            options += ["--profile"] if self.options.profile and part.traces else []
        return [sys.executable, *launcher, *command, *options]

    def _run(self, part: Slice, place: str, minutes: float) -> str:
        results, log = self.results(part), self.output / f"{part.name}.log"
        command = self.command(part, 60 * minutes)
        print(f"\n=== {place}: {part.name} (at most {minutes:.0f} min): python {' '.join(command[1:])}", flush=True)
        results.unlink(missing_ok=True)
        ended = Outcome(STOPPED, 0.0, self.code, self.machine.gpus, "interrupted")
        started = time.monotonic()
        try:
            status = run(command, self.variables, log, 60 * minutes)
            if status is None:
                ended.reason = f"took more than {minutes:.1f} minutes"
            elif part.is_pytest and status == 2 and results.exists():
                ended.reason = "the time was used up before all tests had run"
            elif not results.exists():
                ended.status, ended.reason = FAILED, f"wrote no results; exit status {status}"
            elif status and not (part.is_pytest and status == 1):  # 1: the report says which tests failed
                ended.status, ended.reason = FAILED, f"exit status {status}"
            else:
                ended.status, ended.reason = DONE, None
        finally:
            ended.seconds = round(time.monotonic() - started, 1)
            self.outcomes[part.name] = ended
            record = {name: asdict(each) for name, each in self.outcomes.items()}
            write_whole(self.output / "slices.json", [(json.dumps(record, indent=1) + "\n").encode()])
        because = f" ({ended.reason}; see {shown(log)})" if ended.reason else ""
        print(f"=== {part.name}: {ended.status} after {ended.seconds:.0f} s{because}", flush=True)
        return ended.status


def default_output(machine: Machine) -> Path:
    """Return the folder of this kind and number of GPUs."""
    if machine.toy:
        return TOY_OUTPUT
    name = re.sub(r"[^a-z0-9]+", "-", machine.gpus[0].lower()).strip("-")
    return ROOT / "benchmarks" / "results" / f"{len(machine.gpus)}x-{name}"


def _chosen(text: str) -> Slice:
    for number, part in enumerate(SLICES, 1):
        if text in (part.name, str(number)):
            return part
    known = ", ".join(f"{number} {part.name}" for number, part in enumerate(SLICES, 1))
    raise argparse.ArgumentTypeError(f"{text} is none of: {known}")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.check_gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--slice", type=_chosen, action="append", metavar="K", help="number or name; may be repeated (default: all)"
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="default: a folder of benchmarks/results per GPU")
    parser.add_argument("--minutes", type=minutes, metavar="M", help="end within this time; call again to continue")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="folder of wheels to use, made by benchmarks.wheels")
    parser.add_argument("--profile", action="store_true", help="write a trace of a training step of every shape")
    parser.add_argument("--toy", action="store_true", help="toy size on the CPU, even where there is a GPU")
    parser.add_argument("--commit", help="commit of this code, if git cannot determine it")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run slices and print the goals; return 1 if a slice failed or was ended, 2 for a mistake, otherwise 0."""
    started = time.monotonic()
    arguments = parse(argv)
    try:
        site = arguments.wheels and install(arguments.wheels, ROOT / "build" / "check-gpu-packages")
        machine = look_at_machine(site, arguments.toy)
        output = arguments.output or default_output(machine)
        output.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGHUP):  # so that the slice's program is ended, too
        signal.signal(number, lambda ended_by, _: sys.exit(128 + ended_by))
    check = Check(machine, output.resolve(), program_variables(site, machine.toy), arguments)
    chosen = arguments.slice or []
    print("\n".join(check.introduction(chosen)), flush=True)
    try:
        statuses = check.run(chosen, None if arguments.minutes is None else started + 60 * arguments.minutes)
    except KeyboardInterrupt:
        print(f"\ninterrupted; results so far are in {shown(output)}, and the same command continues", file=sys.stderr)
        return 130
    print("", *check.write_goals(), sep="\n")
    print(f"\nresults: {shown(output)}, this table: {shown(output / 'goals.md')}")
    return int(any(status != DONE for status in statuses))


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
