"""The machine that `benchmarks.check_gpu` runs on, and a program that runs there. Imports no torch."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.environment import ROOT
from benchmarks.goals import Slice

DONE, FAILED, STOPPED = "done", "failed", "stopped"
GRACE = 20.0
"""Seconds that a program has to end after it is interrupted."""


@dataclass(frozen=True)
class Machine:
    """What the slices run on."""

    gpus: tuple[str, ...]
    python: str
    packages: dict[str, str]
    """Versions of the packages that are there."""
    gpu_memory_gib: float | None = None
    capability: str | None = None
    gpu_software: dict[str, str] = field(default_factory=dict)
    toy: bool = False

    def versions(self) -> list[str]:
        """Return the versions of what compiles and runs kernels."""
        return [f"{name} {self.packages.get(name, 'not installed')}" for name in ("torch", "triton")]

    @property
    def processes(self) -> int:
        """How many processes use all GPUs; at toy size two, so that this code runs as well."""
        return 2 if self.toy else len(self.gpus)

    def why_not(self, part: Slice) -> str | None:
        """Return why a slice cannot run here, as the predicate of a sentence, or None."""
        if missing := [name for name in part.packages if name not in self.packages]:
            return f"needs {' and '.join(missing)}, which cannot be found here (see --wheels)"
        if part.every_gpu and self.processes < 2:
            return "needs two or more GPUs"
        return None


@dataclass
class Outcome:
    """How a slice's program ended; stored in slices.json by the slice's name."""

    status: str
    seconds: float
    code: str
    """Digest of the code that ran."""
    gpus: tuple[str, ...] = ()
    reason: str | None = None


def program_variables(site: Path | None, toy: bool) -> dict[str, str]:
    """Return the environment variables of every program."""
    paths = [str(ROOT), *([str(site)] if site else []), os.environ.get("PYTHONPATH", "")]
    found = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path), "PYTHONUNBUFFERED": "1"}
    # Otherwise kernels would be compiled once for each program that chooses a place of its own.
    found.setdefault("TRITON_CACHE_DIR", str(ROOT / "build" / "triton-cache"))
    if not toy:
        return found | {"TESTS_ON": "gpu"}
    found.pop("TESTS_ON", None)
    found |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "DS_ACCELERATOR": "cpu"}
    return {"OMP_NUM_THREADS": "1"} | found


def look_at_machine(site: Path | None, toy: bool) -> Machine:
    """Ask a Python of its own what this machine has; with `toy`, as if it had no GPU. Raises RuntimeError."""
    command = [sys.executable, "-m", "benchmarks.environment"]
    try:
        variables = program_variables(site, toy)
        answer = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=180)
    except subprocess.TimeoutExpired:
        raise RuntimeError("torch did not answer within three minutes; does nvidia-smi work?") from None
    if answer.returncode:
        reason = (answer.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise RuntimeError(f"torch cannot be imported by {sys.executable}: {reason}")
    found = json.loads(answer.stdout)
    names = ("python", "packages", "gpu_memory_gib", "capability", "gpu_software")
    facts = {name: found[name] for name in names if name in found}
    return Machine(gpus=tuple(found["gpus"]), toy=toy or not found["gpus"], **facts)


def run(command: list[str], variables: dict[str, str], log: Path, limit: float) -> int | None:
    """Run a program, show its output and write it to `log`; whatever ends this process also ends the program.

    Returns its exit status, or None if it took more than `limit` seconds and was ended.
    """

    def copy(lines: Iterable[str]) -> None:
        with open(log, "w", encoding="utf-8") as file:
            for line in lines:
                file.write(line)
                file.flush()
                print(f"    {line}", end="", flush=True)

    program = subprocess.Popen(
        command,
        cwd=ROOT,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        preexec_fn=os.setpgrp,  # of the same session, which some launchers end as a whole
    )
    copier = threading.Thread(target=copy, args=(program.stdout,), daemon=True)
    copier.start()
    try:
        return program.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end(program)
        copier.join(GRACE)


def _end(program: subprocess.Popen) -> None:
    """End what is left of a program and its children: first by an interruption, at which pytest writes its report."""
    for number in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(program.pid, number)
            program.wait(GRACE)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
