"""Compile every fused kernel for many shapes and number types, and compare it with plain torch and with float64.

    python -m benchmarks.check_kernels --output kernels.json [--shapes 12x64 32/8x128] [--precisions bf16]

This is the first program to run on a new kind of GPU; it needs only torch. A shape and a number type are checked by a
process of their own, several at once, because compiling takes most of the time and because a kernel that writes where
it must not spoils all further results of its process. A check that fails is recorded, and the others go on. At the end,
with pytest, the tests of the kernels (tests/ops) run on the GPU in the time that is left. On a CPU, Triton interprets
the kernels: two tiny shapes, in fp32.

The exit status is 1 if a kernel made CUDA fail, and otherwise 0, even if kernels are inexact: see the record.
"""

import argparse
import importlib.util
import os
import re
import sys
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.environment import RESULTS, Record
from benchmarks.kernel_units import PRECISIONS, Unit
from benchmarks.programs import environment_of_cpu, environment_of_gpu, follow, run_checks
from benchmarks.timing import positive

SHAPES = ("12x64", "32x128", "32/8x64", "32/8x128", "16x128", "8x32", "8x80", "8x96")
"""Heads, or heads/groups, times their width: the 155M recipe, a 7B model, the 1B recipe, and other widths."""

FIRST = (
    Unit("12x64", "bf16"),
    Unit("32x128", "bf16"),
    Unit("12x64", "bf16", "lengths"),
    Unit("32/8x64", "bf16"),
    Unit("32x128", "bf16", "lengths"),
    Unit("12x64", "fp32"),
    Unit("32/8x128", "bf16"),
)
"""What is most worth knowing."""

TOY = (Unit("2x32", "fp32", "sizes", 17), Unit("4/2x64", "fp32", "lengths", 17))

GIB_PER_JOB = 9
"""Memory of a GPU per process; float64's scores of 4,096 tokens take most of it."""


class Units:
    """Runs units side by side, each in a process of its own, and writes what they find to a record."""

    def __init__(self, units: list[Unit], record: Record, device: str, deadline: float):
        self.checks: list[dict] = []
        self.units = {unit.name: "not reached" for unit in units}
        self.tests: dict | None = None
        self.faults: list[str] = []
        self._record, self._device, self._deadline = record, device, deadline
        self._started, self._lock = time.monotonic(), threading.Lock()

    def run(self, units: list[Unit], jobs: int) -> None:
        """Run the units in their order, `jobs` at once; those that the deadline leaves no time for are not run."""
        with ThreadPoolExecutor(jobs) as pool:
            for future in [pool.submit(self._run, unit) for unit in units]:
                future.result()

    def write(self) -> None:
        """Write everything that is known."""
        failed = [check for check in self.checks if not check["passed"]]
        self._record.write(
            {
                "device": self._device,
                "passed": len(self.checks) - len(failed),
                "failed": len(failed),
                "faults": self.faults,
                "seconds": round(time.monotonic() - self._started, 1),
                "units": self.units,
                "checks": [*failed, *(check for check in self.checks if check["passed"])],
                "tests": self.tests,
            }
        )

    def _run(self, unit: Unit) -> None:
        started = time.monotonic()
        finished = run_checks(
            lambda skip: [sys.executable, "-m", "benchmarks.kernel_units", *unit.arguments(), str(skip)],
            environment_of_cpu() if self._device == "cpu" else environment_of_gpu(),
            self._deadline,
            lambda check: self._add(unit, check),
        )
        with self._lock:
            seconds = time.monotonic() - started
            self.units[unit.name] = f"done after {seconds:.0f} s" if finished else "unfinished"
            self.write()

    def _add(self, unit: Unit, check: dict) -> None:
        with self._lock:
            if check.pop("fault", False):
                self.faults.append(f"{unit.name}: {check['name']}")
            self.checks.append({"unit": unit.name, **check})
            state = "exact" if check["passed"] else f"FAILED: {check['why']}"
            if check["passed"]:
                state += f": off by {check['error']:.1e}, plain torch by {check['rounding']:.1e}"
            taken = f" ({check['seconds']:.1f} s)" if "seconds" in check else ""
            now = time.monotonic() - self._started
            print(f"[{now:4.0f} s] {unit.name}: {check['name']}: {state}{taken}", flush=True)
            self.write()


OUTCOME = re.compile(r"(?P<name>tests/\S+::.+?) +(?P<outcome>PASSED|FAILED|ERROR|SKIPPED)\b")
OUTCOME_OF_WORKER = re.compile(r"\[gw\d+\].* (?P<outcome>PASSED|FAILED|ERROR|SKIPPED) (?P<name>tests/\S+::.+?) *$")


def run_tests(seconds: float, jobs: int) -> dict:
    """Run the tests of the kernels on the GPU; return how many had which outcome, and the names of the failures."""
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-v", "--tb=line", "-p", "no:cacheprovider"]
    # `check_gpu` runs the benchmarks themselves.
    command += ["tests/ops", "--ignore=tests/ops/test_benchmarks.py"]
    command += ["-n", str(jobs)] if importlib.util.find_spec("xdist") else []
    numbers: dict[str, int] = {}
    failures: list[str] = []
    last: deque[str] = deque(maxlen=15)

    def read(line: str) -> None:
        last.append(line)
        if found := OUTCOME_OF_WORKER.match(line) or OUTCOME.match(line):
            name, outcome = found["name"], found["outcome"].lower()
            numbers[outcome] = numbers.get(outcome, 0) + 1
            if outcome in ("failed", "error"):
                failures.append(name)
                print(f"{outcome}: {name}", flush=True)

    status = follow(command, environment_of_gpu() | {"TESTS_ON": "gpu"}, seconds, read)
    result = {"numbers": numbers, "failures": failures, "finished": status is not None, "status": status}
    return result if status == 0 else result | {"last_lines": list(last)}


def planned(shapes: list[str], precisions: list[str] | None) -> list[Unit]:
    """Return the units of the shapes on a GPU, the most important ones first."""
    every = [Unit(shape, precision) for precision in PRECISIONS for shape in shapes]
    every += [Unit(shape, "bf16", "lengths") for shape in shapes]
    units = [unit for unit in dict.fromkeys([*FIRST, *every]) if unit.shape in shapes]
    return [unit for unit in units if precisions is None or unit.precision in precisions]


def main() -> int:
    """Run the checks; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", metavar="HxD", help=f"default: {' '.join(SHAPES)}, or two tiny ones")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, help="default: all; on a CPU only fp32 is right")
    parser.add_argument("--minutes", type=float, default=7.0, help="all checks end in time (default: %(default)s)")
    parser.add_argument("--jobs", type=positive, help="processes at once (default: by cores and GPU memory)")
    parser.add_argument("--no-tests", action="store_true", help="do not run tests/ops afterwards")
    parser.add_argument(
        "--output", type=Path, default=RESULTS, help="a .json file, or a directory (default: %(default)s)"
    )
    parser.add_argument("--commit", help="commit of this code, if git cannot determine it")
    arguments = parser.parse_args()
    for shape in arguments.shapes or ():
        try:
            Unit(shape, "fp32").sizes()
        except ValueError as error:
            parser.error(f"argument --shapes: {error}")
    import torch

    deadline = time.monotonic() + 60 * arguments.minutes
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        units = planned(arguments.shapes or list(SHAPES), arguments.precisions)
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        jobs = arguments.jobs or max(1, min(8, (os.cpu_count() or 1) // 2, int(memory // GIB_PER_JOB)))
    else:
        units = list(TOY)
        if arguments.shapes:
            units = [
                Unit(shape, precision, "sizes", 17)
                for precision in arguments.precisions or ["fp32"]
                for shape in arguments.shapes
            ]
        jobs = arguments.jobs or 1
    device = torch.cuda.get_device_name() if on_gpu else "cpu"
    checks = Units(units, Record("check_kernels", arguments.output, arguments.commit), device, deadline)
    print(f"{len(units)} shapes and types on {device}, {jobs} at once", flush=True)
    checks.write()
    checks.run(units, jobs)
    left = deadline - time.monotonic()
    if on_gpu and not arguments.no_tests and importlib.util.find_spec("pytest") and left > 30:
        print(f"tests/ops on the GPU, for at most {left:.0f} s", flush=True)
        checks.tests = run_tests(left, jobs)
        checks.write()
    failed = [check for check in checks.checks if not check["passed"]]
    print(f"{len(checks.checks) - len(failed)} checks passed, {len(failed)} failed", flush=True)
    for check in failed:
        print(f"  {check['unit']}: {check['name']}: {check['why']}", flush=True)
    return 1 if checks.faults else 0


if __name__ == "__main__":
    sys.exit(main())
