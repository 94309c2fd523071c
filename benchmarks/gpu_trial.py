"""Check and benchmark this project on a GPU within a few minutes.

    python3 -m benchmarks.gpu_trial [--minutes 12] --output DIR [--wheels DIR] [--part NAME ...]

The most important parts run first. Each runs in its own process with its own time limit, so a
part that hangs or crashes takes at most that time. A part that needs more time than is left is
skipped.

For each part, DIR contains NAME.json (results, written as they arrive), NAME.log (output) and
traces. After every part, results.json (the results of all parts) and summary.md (problems and
tables) are rewritten.

Requirements: a C compiler, and Python with torch, Triton, numpy, PyYAML and pydantic. The packages
in the folder of `--wheels`, which benchmarks.wheels writes, are installed into a temporary folder.
Without a GPU, every part runs at toy size on the CPU. The exit status is 0 on success, 1 if a
part failed, found a problem, or none ran, 2 if the trial cannot start, and 128 plus the signal's
number if a signal ended it (130 after Ctrl-C).
"""

import argparse
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.tables import attention_table, profile_table, results_by_batch, step_table
from megatron_tape import command_line
from megatron_tape.errors import ConfigError, FileError
from megatron_tape.io.versions import ROOT, commit

GRACE_SECONDS = 3.0
"""Seconds to wait for a part to end after SIGTERM, and again after SIGKILL."""
RESERVED_SECONDS = 5.0
"""Seconds at the end of the trial that no part may use."""
REQUIRED_MODULES = ("numpy", "torch", "triton", "typing_extensions", "pydantic", "yaml")
"""Modules that every part needs."""
NOT_STARTED = ("skipped", "not run")
"""Statuses of parts that have not started."""


@dataclass(frozen=True)
class Part:
    """A check or benchmark of the trial, which runs in its own process."""

    name: str
    purpose: str
    min_seconds: float
    """Time that must be left for the part to start."""
    limit: float
    """Seconds after which the part is stopped."""


# Each has a name, a purpose, `min_seconds` and `limit`.
PARTS = (
    Part("machine", "measure matmul rate, copy bandwidth and the host's time for a launch", 15, 40),
    Part("step-155m", "time and profile steps of 155M at 1,024 tokens, in 3 batch sizes", 40, 150),
    Part("compile", "compile the kernels of the recipes' shapes in bf16", 20, 100),
    Part(
        "correctness",
        "compare outputs and gradients of kernels and libraries with float64",
        20,
        110,
    ),
    Part("step-1.3b", "time and profile training steps of 1.3B at 4,096 tokens", 70, 150),
    Part("attention", "time every attention backend, with TAPE and RoPE", 30, 100),
    Part("training", "compare 20 training steps with losses and gradients on the CPU", 45, 150),
    Part("two-ranks", "train on two ranks that share the GPU", 45, 120),
    Part("commands", "train, kill, continue, evaluate, extend, export and generate", 40, 120),
    Part("sanitizer", "run kernels under compute-sanitizer, if it is installed", 20, 60),
    Part("ladder", "train the largest model that fits with RoPE, TAPE, Wall and FoX", 240, 480),
)


class Trial:
    """Runs parts, and keeps a record of the status and the results of each one."""

    def __init__(self, options: argparse.Namespace, parts: list[Part], packages: Path):
        self.options = options
        self.output = options.output
        self.started = time.monotonic()
        origin = {
            "command": shlex.join(["python3", *sys.orig_argv[1:]]),
            "commit": options.commit or commit() or "unknown",
            "minutes": options.minutes,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        # The entry of a part until it runs.
        not_run = {
            "status": "not run",
            "seconds": 0.0,
            "reason": "the trial ended before this part",
        }
        self.record: dict = {
            "trial": origin,
            "problems": [],
            "stages": dict.fromkeys((part.name for part in parts), not_run),
        }
        # The environment variables of the parts' processes. With these, the parts use no network,
        # and can import the packages in `packages`.
        paths = [str(ROOT), str(packages), os.environ.get("PYTHONPATH", "")]
        self.variables = os.environ | {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
        self.variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))

    def command(self, part: Part, seconds: float) -> list[str]:
        """Return the command that runs a part with a time limit of `seconds`."""
        command = [
            sys.executable,
            "-m",
            "benchmarks.trial_parts",
            part.name,
            f"--seconds={seconds:.0f}",
            f"--output={self.output / part.name}.json",
            f"--commit={self.record['trial']['commit']}",
        ]
        if self.options.toy:
            command.append("--toy")
        if self.options.also:
            command += ["--also", self.options.also]
        return command

    def run(self, part: Part, deadline: float) -> None:
        """Run a part, or skip it if too little time is left before `deadline` (of
        `time.monotonic`).

        Its status and results are added to the record, which is saved before and after.
        """
        entry = self.record["stages"][part.name] = {"status": "skipped", "seconds": 0.0}
        left = deadline - time.monotonic() - RESERVED_SECONDS
        if left < part.min_seconds:
            entry["reason"] = (
                f"it needs {part.min_seconds:.0f} s, but {max(0, left):.0f} s are left"
            )
            print(f"=== {part.name}: skipped: {entry['reason']}", flush=True)
            return

        seconds = min(part.limit, left)
        started = time.monotonic()
        log = self.output / f"{part.name}.log"
        print(f"=== {part.name}: {part.purpose} (at most {seconds:.0f} s)", flush=True)
        # What the record says if this program is killed in the meantime.
        entry |= {
            "status": "interrupted",
            "limit": seconds,
            "reason": "it was still running when this was written",
        }
        self.save()

        program = self._start(part, seconds, log)
        try:
            status = program.wait(seconds)
            if status == 0:
                entry["status"] = "done"
                del entry["reason"]
            elif status < 0:  # minus the number of the signal that ended the program
                entry |= {"status": "failed", "reason": signal.Signals(-status).name}
            else:
                last = _last_line(log.read_text(errors="replace"))
                entry |= {"status": "failed", "reason": f"exit status {status}: {last}"}
        except subprocess.TimeoutExpired:
            entry |= {"status": "out of time", "reason": f"it was stopped after {seconds:.0f} s"}
        finally:
            terminate(program)
            entry["seconds"] = round(time.monotonic() - started, 1)
            with suppress(OSError, ValueError):  # the part may have written nothing
                entry["results"] = json.loads((self.output / f"{part.name}.json").read_bytes())
            self.save()

        # Only the end of the log. If the part failed, this has the error.
        print(log.read_text(errors="replace")[-3000:].strip())
        print(f"=== {part.name}: {entry['status']} after {entry['seconds']:.0f} s", flush=True)

    def _start(self, part: Part, seconds: float, log: Path) -> subprocess.Popen:
        """Start the process of a part, whose output goes to the file `log`."""
        with open(log, "wb") as file:
            return subprocess.Popen(
                self.command(part, seconds),
                cwd=ROOT,
                env=self.variables,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                preexec_fn=os.setpgrp,  # a process group, so that `terminate` reaches children
            )

    def save(self) -> None:
        """Write results.json and summary.md."""
        self.record["problems"] = [f"{where}: {why}" for where, why in problems(self.record)]
        self.record["seconds"] = round(time.monotonic() - self.started, 1)
        texts = {
            "results.json": json.dumps(self.record, indent=1),
            "summary.md": "\n".join(summary(self.record)),
        }
        for name, text in texts.items():
            partial = self.output / f"{name}.partial"
            partial.write_text(f"{text}\n", encoding="utf-8")
            os.replace(partial, self.output / name)  # atomic, so that the file is always complete


def terminate(program: subprocess.Popen) -> None:
    """Terminate a program and its children, and kill them if they still run after GRACE_SECONDS.

    The program must lead a process group.
    """
    # SIGKILL is sent even if the program has ended, since its children may still run.
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(program.pid, number)
            program.wait(GRACE_SECONDS)
        except ProcessLookupError:
            return  # no process of the group is left
        except subprocess.TimeoutExpired:
            continue


def problems(record: dict) -> Iterator[tuple[str, str]]:
    """Yield a pair of place and problem for every failed part and every wrong result.

    `record` has the format of results.json.
    """
    # Records have called parts `stages` since the first trials.
    parts = record["stages"]
    if all(part["status"] in NOT_STARTED for part in parts.values()):
        yield "nothing ran", next(iter(parts.values()))["reason"]
    for name, part in parts.items():
        if part["status"] not in ("done", *NOT_STARTED):
            yield name, f"{part['status']} ({part['reason']})"
        results = part.get("results", {})
        # Each kind of part writes other keys: `correctness` writes cases, and `attention` results.
        # The parts that time steps write rejected_rivals, which are models that TAPE and RoPE are
        # compared with, and failed_profiles. Parts that run tests, commands or the sanitizer write
        # their outcomes as tests.
        for case in results.get("cases", []):
            if why := case.get("error") or "; ".join(case.get("inexact", [])):
                yield f"{name} of {case['shape']} {case['name']} at {case['length']} tokens", why
        for result in results.get("results", []):
            for candidate, why in result["rejected"].items():
                # A name such as `triton` is a backend that cannot run here, which is no problem.
                # One such as `tape triton` is an encoding with a backend that should have run.
                if " " in candidate:
                    yield f"{result['shape']} {candidate}", why
        for rival, why in results.get("rejected_rivals", {}).items():
            yield f"{rival} in {name}", why
        for result in (results, *results.get("batches", {}).values()):
            for model, why in result.get("failed_profiles", {}).items():
                yield f"profile of {model} in {name}", why
        for test, outcome in results.get("tests", {}).items():
            if outcome.startswith("failed"):
                yield test, outcome


def summary(record: dict) -> list[str]:
    """Return the lines of summary.md. `record` has the format of results.json; the results of
    failed parts may be missing.
    """
    results_by_part = {name: part.get("results", {}) for name, part in record["stages"].items()}
    origin = record["trial"]
    lines = ["# GPU trial", ""]
    environments = [
        results["environment"] for results in results_by_part.values() if "environment" in results
    ]
    if environments and not environments[0]["gpus"]:
        lines += ["**No GPU: toy size on a CPU. The figures say nothing about a GPU.**", ""]
    lines += [
        f"Machine: {_machine_line(environments, results_by_part.get('machine', {}))}",
        "",
        f"Commit {origin['commit']}, {origin['date']}: `{origin['command']}`",
        "",
    ]
    if problem_lines := [f"- {where}: {why}" for where, why in problems(record)]:
        lines += ["Problems:", "", *problem_lines]
    else:
        lines.append("No problems were found.")

    # One table has the steps of both parts, and of all their batches.
    steps = {}
    for name in ("step-155m", "step-1.3b"):
        if name in results_by_part:
            steps |= results_by_batch(name, results_by_part[name])
    tables = (
        _part_table(record),
        step_table(steps),
        *(profile_table(name, results) for name, results in steps.items()),
        _case_table(results_by_part),
        attention_table(results_by_part.get("attention", {}).get("results", [])),
        *(_test_table(name, results) for name, results in results_by_part.items()),
    )
    for name, results in steps.items():
        if "ratio_time" in results:
            lines += ["", f"{name}: TAPE's step takes {results['ratio_time']:.3f} times RoPE's."]
        for batch, of_batch in results.get("batches", {}).items():
            if "error" in of_batch:
                lines += ["", f"{name} {batch}: {of_batch['error']}"]
    for table in tables:
        if rows := list(table):
            lines += ["", *rows]
    return lines


def _machine_line(environments: list[dict], rates: dict) -> str:
    """Return the line of summary.md about the machine.

    `environments` are those in the records of the parts, and `rates` the results of the part
    `machine`.
    """
    if not environments:
        return "unknown"
    environment = environments[0]
    packages = environment["packages"]
    fields = [
        " + ".join(environment["gpus"]) or environment["cpu"],
        f"Python {environment['python']}",
        f"torch {packages.get('torch', 'missing')}",
        f"triton {packages.get('triton', 'missing')}",
        *environment["gpu_software"].values(),
    ]
    if "copy_bytes_per_second" in rates:
        fields.append(f"matmul {rates['matmul_flops'] / 1e12:,.1f} TFLOP/s")
        fields.append(f"copy {rates['copy_bytes_per_second'] / 1e12:.2f} TB/s")
    for library, seconds in rates.get("launch_seconds", {}).items():
        fields.append(f"launch by {library} {1e6 * seconds:.1f} us")
    return ", ".join(fields)


def _part_table(record: dict) -> Iterator[str]:
    """Yield the lines of the table of all parts, which are the `stages` of `record`."""
    yield "| part | status | seconds | cases | reason |"
    yield "|---|---|--:|--:|---|"
    for name, part in record["stages"].items():
        results = part.get("results", {})
        cases = ""
        if "cases" in results:
            cases = f"{len(results['cases'])} of {results['planned']}"
        reason = part.get("reason", "")
        yield f"| {name} | {part['status']} | {part['seconds']:.0f} | {cases} | {reason} |"


def _case_table(results_by_part: dict) -> Iterator[str]:
    """Yield the lines of a table of the largest errors, divided by the allowed errors, by kernel
    and shape. There are no lines without results.
    """
    # By column, such as 12x64@320, and kernel: the result of the case.
    cases = {}
    for case in results_by_part.get("correctness", {}).get("cases", []):
        cases[f"{case['shape']}@{case['length']}", case["name"]] = case
    columns = sorted({column for column, _ in cases})
    names = sorted({name for _, name in cases})
    if cases:
        yield f"| error / allowed error | {' | '.join(columns)} |"
        yield "|---" + "|--:" * len(columns) + "|"
    for name in names:
        cells = [_error_cell(cases.get((column, name), {})) for column in columns]
        yield f"| {name} | {' | '.join(cells)} |"


def _error_cell(case: dict) -> str:
    """Return the largest error of a case divided by the allowed one, in bold if it is a problem; ""
    if the case has not run.
    """
    if "error" in case:
        return "**fails**"
    if "worst" not in case:
        return ""
    if case["worst"] is None:
        return "**NaN**"
    worst = f"{case['worst']:.2f}"
    if case["inexact"]:
        return f"**{worst}**"
    return worst


def _test_table(name: str, results: dict) -> Iterator[str]:
    """Yield the lines of the table of the tests or other checks that the part `name` has run. There
    are no lines without them.
    """
    if tests := results.get("tests", {}):
        yield f"| {name} | |"
        yield "|---|---|"
        for test, outcome in tests.items():
            yield f"| {test} | {outcome} |"


def install_requirements(options: argparse.Namespace, packages: Path) -> None:
    """Create the output folder, install wheels into `packages`, and check that parts can run.

    Raises ConfigError if no part could run, and FileError if the folder has results.
    """
    if (options.output / "results.json").exists():
        raise FileError(
            str(options.output), "contains the results of another trial", "choose another --output"
        )
    options.output.mkdir(parents=True, exist_ok=True)
    python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    if options.wheels:
        print(f"=== installing {options.wheels} into a temporary folder", flush=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        pip += ["--no-index", "--no-deps", "--no-compile", "--target", str(packages)]
        pip += sorted(options.wheels.glob("*.whl"))
        installation = subprocess.run(pip, capture_output=True, text=True)
        if installation.returncode != 0:
            raise ConfigError(
                f"--wheels {options.wheels}",
                f"cannot be installed for {python}: {_last_line(installation.stderr)}",
                "collect them with: python -m benchmarks.wheels DIR",
            )
        sys.path.insert(0, str(packages))  # find_spec below must find them
    if missing := [name for name in REQUIRED_MODULES if importlib.util.find_spec(name) is None]:
        fix = (
            "use .venv/bin/python of `make install`, or install torch, Triton and numpy, and the"
            " others with --wheels"
        )
        raise ConfigError(f"{sys.executable} ({python})", f"lacks {', '.join(missing)}", fix)


def _last_line(text: str) -> str:
    """Return the last line of a program's output, which has the error, in at most 200
    characters.
    """
    return text.strip().rpartition("\n")[2][:200]


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line, or `argv` if it is not None."""
    parts = "\n".join(f"  {part.name:12} {part.purpose}" for part in PARTS)
    parser = command_line.Parser(
        prog="python3 -m benchmarks.gpu_trial", description=f"{__doc__}\nparts:\n{parts}"
    )
    add = parser.add_argument
    names = [part.name for part in PARTS]
    add(
        "--minutes", type=float, default=12.0, help="time limit of the trial (default: %(default)s)"
    )
    add("--output", type=Path, required=True, metavar="DIR", help="folder for the results")
    add("--wheels", type=Path, metavar="DIR", help="folder of wheels, written by benchmarks.wheels")
    add(
        "--part",
        nargs="+",
        choices=names,
        default=names,
        metavar="NAME",
        help="parts to run (default: all)",
    )
    add("--also", choices=["flex"], help="also time FlexAttention")
    add("--toy", action="store_true", help="run at toy size on the CPU, even if there is a GPU")
    add("--commit", help="commit of this code, if git cannot determine it")
    options = parser.parse_args(argv)
    options.output = options.output.resolve()  # parts run in the repository
    return options


def main(argv: list[str] | None = None) -> int:
    """Run the parts, print the summary, and return 1 if there were problems, otherwise 0."""
    started = time.monotonic()
    options = parse(argv)
    deadline = started + 60 * options.minutes
    parts = [part for part in PARTS if part.name in options.part]
    with tempfile.TemporaryDirectory(prefix="gpu-trial-") as work:
        install_requirements(options, Path(work))
        trial = Trial(options, parts, Path(work))
        # Whatever ends the trial, such as Ctrl-C, must leave a complete record.
        try:
            for part in parts:
                trial.run(part, deadline)
        finally:
            trial.save()
            print("", *summary(trial.record), sep="\n")
    # `save` has listed the problems.
    return int(bool(trial.record["problems"]))


if __name__ == "__main__":
    command_line.run(main, interrupted="the results so far are in the output folder")
