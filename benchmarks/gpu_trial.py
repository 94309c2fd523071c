"""Check and benchmark this project on a GPU within a few minutes.

    python3 -m benchmarks.gpu_trial --minutes 8 --output DIR [--wheels DIR] [--stage NAME ...]

The most important stages run first. Each runs in its own process with its own time limit, so a
stage that hangs or crashes takes at most that time. A stage that needs more time than is left is
skipped.

For each stage, DIR contains NAME.json (results, written as they arrive), NAME.log (output) and
traces. After every stage, results.json (the results of all stages) and summary.md (problems, goals,
tables) are rewritten.

Requirements: a C compiler, and Python with torch, Triton, numpy, PyYAML and pydantic. The packages
in the folder of `--wheels`, which benchmarks.wheels writes, are installed into a temporary folder.
Without a GPU, every stage runs at toy size on the CPU. The exit status is 0 on success, 1 if a
stage failed, found a problem, or none ran, 2 if the trial cannot start, and 128 plus the signal's
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

from benchmarks.tables import attention_table, step_table
from megatron_tape import command_line
from megatron_tape.errors import ConfigError, FileError
from megatron_tape.io.versions import ROOT, commit

GRACE = 3.0
"""Seconds to wait for a stage to end after SIGTERM, and again after SIGKILL."""
RESERVE = 5.0
"""Seconds at the end of the trial that no stage may use."""
NEEDED = ("numpy", "torch", "triton", "typing_extensions", "pydantic", "yaml")
"""Modules that every stage needs."""
NOT_BEGUN = ("skipped", "not run")
"""Statuses of stages that have not started."""


@dataclass(frozen=True)
class Stage:
    """A check or benchmark of the trial, which runs in its own process."""

    name: str
    purpose: str
    min_seconds: float
    """Time that must be left for the stage to start."""
    limit: float
    """Seconds after which the stage is stopped."""


STAGES = (
    Stage("machine", "record versions, matmul rate and copy bandwidth", 15, 60),
    Stage("compile", "compile the kernels of the recipes' shapes in bf16", 20, 100),
    Stage(
        "correctness",
        "compare outputs and gradients of kernels and libraries with float64",
        20,
        110,
    ),
    Stage("attention", "time every attention backend, with TAPE and RoPE", 30, 120),
    Stage("step-155m", "time training steps of the 155M model at 1,024 tokens", 40, 120),
    Stage(
        "step-1.3b", "time training steps of a 1.3B model at 4,096 tokens, with a trace", 70, 180
    ),
    Stage("training", "compare 20 training steps with losses and gradients on the CPU", 45, 150),
)
GOALS = (
    (
        "step-155m",
        "TAPE's step, as a multiple of RoPE's",
        "at most 1.10",
        lambda results: f"{results['ratio_time']:.3f}",
    ),
    (
        "step-1.3b",
        "RoPE's MFU",
        "at least 45 %",
        lambda results: f"{100 * results['models']['rope']['mfu']:.1f} %",
    ),
    (
        "step-1.3b",
        "TAPE's MFU",
        "at least 40 %",
        lambda results: f"{100 * results['models']['tape']['mfu']:.1f} %",
    ),
)
"""The goals of docs/gpu.md: stage, name of the figure, goal, and a function that formats the figure
from results.
"""


class Trial:
    """Runs stages, and keeps a record of the status and the results of each one."""

    def __init__(self, options: argparse.Namespace, stages: list[Stage], packages: Path):
        self.options, self.output, self.started = options, options.output, time.monotonic()
        origin = {"command": shlex.join(["python3", *sys.orig_argv[1:]])}
        origin |= {"commit": options.commit or commit() or "unknown", "minutes": options.minutes}
        origin["date"] = datetime.now(UTC).isoformat(timespec="seconds")
        ahead = {"status": "not run", "seconds": 0.0, "reason": "the trial ended before this stage"}
        self.record: dict = {
            "trial": origin,
            "problems": [],
            "stages": {stage.name: ahead for stage in stages},
        }
        paths = [str(ROOT), str(packages), os.environ.get("PYTHONPATH", "")]
        self.variables = os.environ | {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
        self.variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))

    def command(self, stage: Stage, seconds: float) -> list[str]:
        """Return the command that runs a stage with a time limit of `seconds`."""
        command = [
            sys.executable,
            "-m",
            "benchmarks.trial_stages",
            stage.name,
            "--seconds",
            f"{seconds:.0f}",
        ]
        command += [
            "--output",
            str(self.output / f"{stage.name}.json"),
            "--commit",
            self.record["trial"]["commit"],
        ]
        command += ["--toy"] if self.options.toy else []
        return command + (["--also", *self.options.also] if self.options.also else [])

    def run(self, stage: Stage, deadline: float) -> None:
        """Run a stage, or skip it if too little time is left before `deadline` (of
        `time.monotonic`).
        """
        entry = self.record["stages"][stage.name] = {"status": "skipped", "seconds": 0.0}
        left = deadline - time.monotonic() - RESERVE
        if left < stage.min_seconds:
            entry["reason"] = (
                f"it needs {stage.min_seconds:.0f} s, but {max(0, left):.0f} s are left"
            )
            print(f"=== {stage.name}: skipped: {entry['reason']}", flush=True)
            return
        seconds = min(stage.limit, left)
        started = time.monotonic()
        log = self.output / f"{stage.name}.log"
        print(f"=== {stage.name}: {stage.purpose} (at most {seconds:.0f} s)", flush=True)
        entry |= {
            "status": "interrupted",
            "limit": seconds,
            "reason": "it was still running when this was written",
        }
        self.save()
        with open(log, "wb") as file:
            program = subprocess.Popen(
                self.command(stage, seconds),
                cwd=ROOT,
                env=self.variables,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                preexec_fn=os.setpgrp,  # a process group, so that `end` also reaches children
            )
        try:
            if status := program.wait(seconds):
                last = _last_line(log.read_text(errors="replace"))
                if status > 0:
                    cause = f"exit status {status}: {last}"
                else:
                    cause = signal.Signals(-status).name
                entry |= {"status": "failed", "reason": cause}
            else:
                entry["status"] = "done"
                del entry["reason"]
        except subprocess.TimeoutExpired:
            entry |= {"status": "out of time", "reason": f"it was stopped after {seconds:.0f} s"}
        finally:
            end(program)
            entry["seconds"] = round(time.monotonic() - started, 1)
            with suppress(OSError, ValueError):  # the stage may have written nothing
                entry["results"] = json.loads((self.output / f"{stage.name}.json").read_bytes())
            self.save()
        print(log.read_text(errors="replace")[-3000:].strip())
        print(f"=== {stage.name}: {entry['status']} after {entry['seconds']:.0f} s", flush=True)

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


def end(program: subprocess.Popen) -> None:
    """Terminate a program and its children, and kill them if they still run after GRACE seconds."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(program.pid, number)
            program.wait(GRACE)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def problems(record: dict) -> Iterator[tuple[str, str]]:
    """Yield a pair of place and problem for every failed stage and every wrong result."""
    stages = record["stages"]
    if all(stage["status"] in NOT_BEGUN for stage in stages.values()):
        yield "nothing ran", next(iter(stages.values()))["reason"]
    for name, stage in stages.items():
        if stage["status"] not in ("done", *NOT_BEGUN):
            yield name, f"{stage['status']} ({stage['reason']})"
        results = stage.get("results", {})
        for case in results.get("cases", []):
            if why := case.get("error") or "; ".join(case.get("inexact", [])):
                yield f"{name} of {case['shape']} {case['name']} at {case['length']} tokens", why
        for result in results.get("results", []):
            yield from (
                (f"{result['shape']} {c}", why) for c, why in result["rejected"].items() if " " in c
            )
        yield from (
            (f"{baseline} in {name}", why)
            for baseline, why in results.get("rejected_rivals", {}).items()
        )
        yield from (
            (test, how)
            for test, how in results.get("tests", {}).items()
            if how.startswith("failed")
        )


def summary(record: dict) -> list[str]:
    """Return the lines of summary.md; the results of failed stages may be missing."""
    found = {name: stage.get("results", {}) for name, stage in record["stages"].items()}
    origin, lines = record["trial"], ["# GPU trial", ""]
    environment = next(
        (each["environment"] for each in found.values() if "environment" in each), None
    )
    if environment and not environment["gpus"]:
        lines += ["**No GPU: toy size on a CPU. The figures say nothing about a GPU.**", ""]
    lines += [f"Machine: {_machine(environment, found.get('machine', {}))}", ""]
    lines += [f"Commit {origin['commit']}, {origin['date']}: `{origin['command']}`", ""]
    listed = [f"- {where}: {why}" for where, why in problems(record)]
    lines += ["Problems:", "", *listed] if listed else ["No problems were found."]
    tables = [_stages(record), _goals(found), _cases(found)]
    tables.append(attention_table(found.get("attention", {}).get("results", [])))
    tables.append(
        step_table({name: found[name] for name in ("step-155m", "step-1.3b") if name in found})
    )
    tables.append(_training(found))
    for table in tables:
        if rows := list(table):
            lines += ["", *rows]
    return lines


def _machine(environment: dict | None, rates: dict) -> str:
    if environment is None:
        return "unknown"
    parts = [
        " + ".join(environment["gpus"]) or environment["cpu"],
        f"Python {environment['python']}",
    ]
    parts += [
        f"{name} {environment['packages'].get(name, 'missing')}" for name in ("torch", "triton")
    ]
    parts += environment["gpu_software"].values()
    if "copy_bytes_per_second" in rates:
        parts.append(f"matmul {rates['matmul_flops'] / 1e12:,.1f} TFLOP/s")
        parts.append(f"copy {rates['copy_bytes_per_second'] / 1e12:.2f} TB/s")
    return ", ".join(parts)


def _stages(record: dict) -> Iterator[str]:
    yield "| stage | status | seconds | cases | reason |"
    yield "|---|---|--:|--:|---|"
    for name, stage in record["stages"].items():
        results = stage.get("results", {})
        if "cases" in results:
            cases = f"{len(results['cases'])} of {results['planned']}"
        else:
            cases = ""
        yield (
            f"| {name} | {stage['status']} | {stage['seconds']:.0f} | {cases} |"
            f" {stage.get('reason', '')} |"
        )


def _goals(found: dict) -> Iterator[str]:
    if figures := [
        goal
        for goal in GOALS
        if found.get(goal[0], {}).get("peak_flops") and "parity" in found[goal[0]]
    ]:
        yield "| | measured | goal |"
        yield "|---|--:|--:|"
        yield from (
            f"| {stage}: {what} | {figure(found[stage])} | {goal} |"
            for stage, what, goal, figure in figures
        )


def _cases(found: dict) -> Iterator[str]:
    """Yield a table of the largest errors, divided by the allowed errors, by kernel and shape."""
    cases = {
        (f"{case['shape']}@{case['length']}", case["name"]): case
        for case in found.get("correctness", {}).get("cases", [])
    }
    columns, names = (sorted({key[i] for key in cases}) for i in (0, 1))
    if cases:
        yield "| error / allowed error | " + " | ".join(columns) + " |"
        yield "|---" + "|--:" * len(columns) + "|"
    for name in names:
        yield (
            f"| {name} | "
            + " | ".join(_worst(cases.get((column, name))) for column in columns)
            + " |"
        )


def _worst(case: dict | None) -> str:
    if case is None:
        return ""
    if "error" in case:
        return "**fails**"
    if case["worst"] is None:
        return "**NaN**"
    if case["inexact"]:
        return f"**{case['worst']:.2f}**"
    return f"{case['worst']:.2f}"


def _training(found: dict) -> Iterator[str]:
    if tests := found.get("training", {}).get("tests", {}):
        yield "| training | |"
        yield "|---|---|"
        yield from (f"| {test} | {how} |" for test, how in tests.items())


def prepare(options: argparse.Namespace, packages: Path) -> None:
    """Create the output folder and install wheels into `packages`. Raises ConfigError if no stage
    could run.
    """
    if (options.output / "results.json").exists():
        raise FileError(
            str(options.output), "contains the results of another trial", "choose another --output"
        )
    options.output.mkdir(parents=True, exist_ok=True)
    python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    if options.wheels:
        print(f"=== installing {options.wheels} into a temporary folder", flush=True)
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-index",
            "--no-deps",
            "--no-compile",
        ]
        pip += [
            "--disable-pip-version-check",
            "--target",
            str(packages),
            *sorted(options.wheels.glob("*.whl")),
        ]
        done = subprocess.run(pip, capture_output=True, text=True)
        if done.returncode != 0:
            raise ConfigError(
                f"--wheels {options.wheels}",
                f"cannot be installed for {python}: {_last_line(done.stderr)}",
            )
        sys.path.insert(0, str(packages))  # find_spec below must find them
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        fix = (
            "use .venv/bin/python of `make install`, or install torch, Triton and numpy, and the"
            " others with --wheels"
        )
        raise ConfigError(f"{sys.executable} ({python})", f"lacks {', '.join(missing)}", fix)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1][:200]


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    stages = "\n".join(f"  {stage.name:12} {stage.purpose}" for stage in STAGES)
    parser = command_line.Parser(
        prog="python3 -m benchmarks.gpu_trial", description=f"{__doc__}\nstages:\n{stages}"
    )
    add = parser.add_argument
    names = [stage.name for stage in STAGES]
    add("--minutes", type=float, default=8.0, help="time limit of the trial (default: %(default)s)")
    add("--output", type=Path, required=True, metavar="DIR", help="folder for the results")
    add("--wheels", type=Path, metavar="DIR", help="folder of wheels, written by benchmarks.wheels")
    add(
        "--stage",
        nargs="+",
        choices=names,
        default=names,
        metavar="NAME",
        help="stages to run (default: all)",
    )
    add(
        "--also",
        nargs="+",
        choices=("flex", "megatron"),
        default=[],
        help="also time FlexAttention (flex) or Megatron-core's GPTModel (megatron)",
    )
    add("--toy", action="store_true", help="run at toy size on the CPU, even if there is a GPU")
    add("--commit", help="commit of this code, if git cannot determine it")
    options = parser.parse_args(argv)
    if not 0 < options.minutes <= 600:
        raise ConfigError("--minutes", f"is {options.minutes:g}, which is not between 0 and 600")
    if options.wheels and not any(options.wheels.glob("*.whl")):
        fix = "collect them with: python -m benchmarks.wheels DIR"
        raise ConfigError("--wheels", f"is {options.wheels}, which contains no wheels", fix)
    options.output = options.output.resolve()  # stages run in the repository
    return options


def main(argv: list[str] | None = None) -> int:
    """Run the stages, print the summary, and return 1 if there were problems, otherwise 0."""
    deadline = time.monotonic()
    options = parse(argv)
    deadline += 60 * options.minutes
    stages = [stage for stage in STAGES if stage.name in options.stage]
    with tempfile.TemporaryDirectory(prefix="gpu-trial-") as work:
        prepare(options, Path(work))
        trial = Trial(options, stages, Path(work))
        try:
            for stage in stages:
                trial.run(stage, deadline)
        finally:
            trial.save()
            print("", *summary(trial.record), sep="\n")
    return int(bool(trial.record["problems"]))


if __name__ == "__main__":
    command_line.run(main, interrupted="the results so far are in the output folder")
