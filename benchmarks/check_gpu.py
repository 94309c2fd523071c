"""Check and measure this project on the GPUs of this machine; every slice takes less than nine minutes.

    make check-gpu                                     what has not been done yet, then the table of goals
    make check-gpu SLICE=attention                     only this slice, by its name or its number, even if it is done
    make check-gpu MINUTES=9                           start no slice that might not end in time; call again to continue
    make check-gpu WHEELS=wheels PYTHON=python3        with this Python's own torch and the wheels of that folder
    make check-gpu PROFILE=1                           also write traces of training steps

or `python -m benchmarks.check_gpu` with the options below. Every slice writes its results at once to the output folder,
and goals.md there says which goals have been met. Slices whose results come from this code and these GPUs are not run
again. Without a GPU it says what it would do, and runs every slice's code at toy size on the CPU, where kernels are
interpreted; figures from there mean nothing and are not kept in benchmarks/results.
"""

import argparse
import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.goals import table
from benchmarks.slices import (
    DONE,
    FAILED,
    ROOT,
    SLICES,
    STOPPED,
    Machine,
    Outcome,
    Slice,
    command,
    environment,
    look_at_machine,
    read_results,
    run,
    tail,
    write_outcome,
)
from benchmarks.wheels import described, differences, install
from megatron_tape.io.files import write_whole

LIMIT = 9.0
"""Minutes after which a slice's program is ended."""
SHORTEST = 1.0
"""Minutes below which no slice is started; behind another one it must have those that it asks for."""
TOY_OUTPUT = ROOT / "runs" / "check-gpu-toy"
CODE = ("megatron_tape", "pretrain", "benchmarks")


def main(argv: list[str] | None = None) -> int:
    """Run slices and print the goals; return 1 if a slice failed or was ended, 2 for a mistake, otherwise 0."""
    started = time.monotonic()
    arguments = _parser().parse_args(argv)
    if arguments.list:
        for number, part in enumerate(SLICES, 1):
            print(f"{number} {part.name:16} {part.purpose}")
        return 0
    try:
        chosen = [_chosen(text) for text in arguments.slice or ()]
        site = _install(arguments.wheels)
        machine = look_at_machine(site, arguments.toy)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGHUP):  # so that the slice's program is ended, too
        signal.signal(number, lambda ended_by, _: sys.exit(128 + ended_by))
    output = arguments.output or default_output(machine)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"error: --output {output} cannot be made ({error.strerror}); give another folder", file=sys.stderr)
        return 2
    check = _Check(machine, output, site, arguments.commit, arguments.profile)
    print("\n".join(check.introduction(chosen)), flush=True)
    try:
        statuses = check.run(chosen, None if arguments.minutes is None else started + 60 * arguments.minutes)
    except KeyboardInterrupt:
        print(f"\ninterrupted; results so far are in {shown(output)}, and the same command continues", file=sys.stderr)
        return 130
    print("", *check.write_goals(), sep="\n")
    print(f"\nresults: {shown(output)}, this table: {shown(output / 'goals.md')}")
    check.update_measured()
    return int(any(status != DONE for status in statuses))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.check_gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slice", action="append", metavar="K", help="number or name; may be repeated (default: all)")
    parser.add_argument("--list", action="store_true", help="only list the slices")
    parser.add_argument("--output", type=Path, metavar="DIR", help="default: a folder of benchmarks/results per GPU")
    parser.add_argument("--minutes", type=_minutes, metavar="M", help="end within this time; call again to continue")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="folder of wheels to use, made by benchmarks.wheels")
    parser.add_argument("--profile", action="store_true", help="write a trace of a training step of every shape")
    parser.add_argument("--toy", action="store_true", help="toy size on the CPU, even where there is a GPU")
    parser.add_argument("--commit", help="commit of this code, if git cannot determine it")
    return parser


def _minutes(text: str) -> float:
    try:
        if 0 < float(text) < 1e6:
            return float(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text} is not a number of minutes above zero")


def _chosen(text: str) -> Slice:
    for number, part in enumerate(SLICES, 1):
        if text in (part.name, str(number)):
            return part
    known = ", ".join(f"{number} {part.name}" for number, part in enumerate(SLICES, 1))
    raise ValueError(f"--slice {text} is none of: {known}")


def _install(wheels: Path | None) -> Path | None:
    """Install wheels into a folder of their own, and return it."""
    if wheels is None:
        return None
    return install(wheels, ROOT / "build" / "check-gpu-packages")


def default_output(machine: Machine) -> Path:
    """Return the folder of this kind and number of GPUs."""
    if machine.toy:
        return TOY_OUTPUT
    name = re.sub(r"[^a-z0-9]+", "-", machine.gpus[0].lower()).strip("-")
    return ROOT / "benchmarks" / "results" / f"{len(machine.gpus)}x-{name}"


def shown(path: Path) -> str:
    """Return a path as the reader knows it: relative to the repository if it lies there."""
    path = path.resolve()
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def digest() -> str:
    """Return a digest of the code that slices run, which decides whether results belong to it."""
    whole = hashlib.sha256()
    for folder in CODE:
        for path in sorted((ROOT / folder).rglob("*.py")):
            whole.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return whole.hexdigest()[:16]


class _Check:
    def __init__(self, machine: Machine, output: Path, site: Path | None, commit: str | None, profile: bool):
        self.machine, self.output, self.site, self.commit, self.profile = machine, output, site, commit, profile
        self.code = digest()

    def path(self, part: Slice) -> Path:
        return self.output / f"{part.name}.json"

    def results(self) -> dict[str, dict]:
        """Return the records of all slices that have one; a damaged one counts as none."""
        found = {}
        for part in SLICES:
            try:
                record = read_results(self.path(part))
            except ValueError as error:
                print(f"warning: {error}", file=sys.stderr)
                continue
            if record is not None:
                found[part.name] = record
        return found

    def _status(self, part: Slice) -> str | None:
        try:
            return (read_results(self.path(part)) or {}).get("outcome", {}).get("status")
        except ValueError:
            return None

    def is_done(self, part: Slice) -> bool:
        """Return whether the slice's results come from this code on these GPUs."""
        try:
            outcome = (read_results(self.path(part)) or {}).get("outcome", {})
        except ValueError:
            return False
        here = (DONE, self.code, list(self.machine.gpus))
        return (outcome.get("status"), outcome.get("code"), outcome.get("gpus")) == here

    def introduction(self, chosen: list[Slice]) -> list[str]:
        """Say what this machine is and what will be done."""
        machine = self.machine
        lines = [f"Python {machine.python}, torch {machine.torch}, triton {machine.triton or 'not installed'}"]
        if machine.gpus:
            size = f"{machine.memory_gib} GiB, compute capability {machine.capability[0]}.{machine.capability[1]}"
            lines.append(f"{len(machine.gpus)} x {machine.gpus[0]}, {size}, CUDA {machine.cuda}")
        else:
            lines.append(
                "No GPU can be used here. On one, the slices below would run at full size. Now their code runs at toy "
                "size on the CPU, with interpreted kernels; it measures nothing."
            )
        lines += self._other_versions()
        for number, part in enumerate(SLICES, 1):
            why = part.why_not(machine)
            state = f"cannot run: {why}" if why else "done before" if self.is_done(part) else "to do"
            state = "to do" if part in chosen and not why else "not chosen" if chosen else state
            lines.append(f"{number} {part.name:16} {part.purpose} [{state}]")
        return lines

    def _other_versions(self) -> list[str]:
        """Say which versions are not those that this project is tested with."""
        found = described(differences(self.site))
        return [f"Not the tested versions, which may be why something fails: {found}"] if found else []

    def run(self, chosen: list[Slice], deadline: float | None) -> list[str]:
        """Run the chosen slices, or else all that are not done; return their statuses.

        All of it ends before `deadline`, as `time.monotonic` counts.
        """
        statuses: list[str] = []
        parts = chosen or [part for part in SLICES if not self.is_done(part)]
        parts = [part for part in parts if chosen or not part.why_not(self.machine)]
        for index, part in enumerate(parts, 1):
            left = LIMIT if deadline is None else min(LIMIT, (deadline - time.monotonic()) / 60)
            if why := part.why_not(self.machine):
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
        lines = table(self.results(), self.machine)
        write_whole(self.output / "goals.md", [("\n".join(lines) + "\n").encode()])
        return lines

    def _run(self, part: Slice, place: str, minutes: float) -> str:
        path, log = self.path(part), self.output / f"{part.name}.log"
        arguments = command(part, self.machine, path, self.commit, self.profile)
        print(f"\n=== {place}: {part.name} (at most {minutes:.0f} min): python {' '.join(arguments[1:])}", flush=True)
        if self._status(part) == DONE:
            # A repetition that is interrupted does not replace it.
            os.replace(path, path.with_suffix(".previous.json"))
        path.unlink(missing_ok=True)
        started = time.monotonic()
        try:
            status, seconds = run(arguments, environment(self.machine, self.site), log, 60 * minutes)
        except BaseException:
            seconds = round(time.monotonic() - started, 1)
            write_outcome(path, Outcome(STOPPED, seconds, self.code, self.machine.gpus, "interrupted"))
            self.write_goals()
            raise
        outcome = Outcome(DONE, round(seconds, 1), self.code, self.machine.gpus)
        if status is None:
            outcome.status, outcome.reason = STOPPED, f"took more than {minutes:.1f} minutes"
        elif status:
            outcome.status, outcome.reason = FAILED, f"exit status {status}"
        elif not path.exists():
            outcome.status, outcome.reason = FAILED, "wrote no results"
        if outcome.status != DONE:
            outcome.last_lines = tail(log)
        write_outcome(path, outcome)
        because = f" ({outcome.reason}; see {shown(log)})" if outcome.reason else ""
        print(f"=== {part.name}: {outcome.status} after {seconds:.0f} s{because}", flush=True)
        return outcome.status

    def update_measured(self) -> None:
        """Let `attention_backend: auto` choose by what was measured on these GPUs."""
        if self.machine.toy or not self.path(_chosen("attention")).exists():
            return
        subprocess.run(
            [sys.executable, "-m", "benchmarks.measured", str(self.path(_chosen("attention")))],
            cwd=ROOT,
            env=environment(self.machine, self.site),
            check=False,
        )


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
