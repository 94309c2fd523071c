"""The slices of `benchmarks.check_gpu`: programs that write their results as they come in. Imports no torch."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_tape.io.files import write_whole
from megatron_tape.io.records import read_record

ROOT = Path(__file__).resolve().parent.parent

DONE, FAILED, STOPPED = "done", "failed", "stopped"
LAST_LINES = 40
"""Lines of a program's output that its record keeps if it fails."""
GRACE = 15.0
"""Seconds that a program has to end after SIGTERM."""


@dataclass(frozen=True)
class Slice:
    """A program `python -m benchmarks.MODULE` and its options, on a GPU and at toy size on a CPU."""

    name: str
    purpose: str
    module: str
    options: tuple[str, ...] = ()
    toy: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    """What it imports besides torch."""
    every_gpu: bool = False
    """Whether torchrun starts one process for each GPU; such a slice needs at least two."""
    minutes: float = 4.0
    """What it should be given at least, unless it comes first; the programs that use up their time need more."""
    traces: bool = False
    """Whether it takes `--profile`."""

    def why_not(self, machine: "Machine") -> str | None:
        """Return why this slice cannot run on `machine`, as the predicate of a sentence, or None."""
        if missing := [package for package in self.packages if package not in machine.packages]:
            return f"needs {' and '.join(missing)}, which cannot be imported here (see --wheels)"
        if self.every_gpu and machine.processes < 2:
            return "needs two or more GPUs"
        return None


STACK = ("megatron.core", "deepspeed")

SLICES = (
    Slice(
        "kernels",
        "every fused kernel compiles and agrees with plain torch and float64",
        "check_kernels",
        minutes=7.5,
    ),
    Slice(
        "training",
        "20 steps of TAPE and RoPE: losses, gradient norms and gradients against the CPU's",
        "check_training",
        packages=STACK,
        minutes=8.5,
    ),
    Slice(
        "step-155m-1k",
        "a training step of the 155M model at 1,024 tokens, TAPE beside RoPE",
        "train_step",
        ("--shape", "155m-1k"),
        ("--shape", "toy"),
        STACK,
        traces=True,
    ),
    Slice(
        "attention",
        "attention: ours, FlexAttention, cuDNN, flash-attn, beside the fastest RoPE",
        "attention",
        toy=("--toy",),
        minutes=8.75,
    ),
    Slice(
        "position-update",
        "the update of the position state beside the bandwidth of the memory",
        "position_update",
        toy=("--toy",),
    ),
    Slice(
        "step-1.3b-4k",
        "a training step of a 1.3B model at 4,096 tokens",
        "train_step",
        ("--shape", "1.3b-4k"),
        ("--shape", "toy"),
        STACK,
        traces=True,
    ),
    Slice(
        "step-7b-8k",
        "a training step of layers shaped like a 7B model's at 8,192 tokens",
        "train_step",
        ("--shape", "7b-8k"),
        ("--shape", "toy"),
        STACK,
        traces=True,
    ),
    Slice(
        "decoding",
        "generation with a cache, TAPE beside a plain Llama",
        "generate",
        toy=("--toy",),
        packages=("transformers",),
    ),
    Slice(
        "all-gpus",
        "a training step of the 1.3B model on all GPUs at once",
        "train_step",
        ("--shape", "1.3b-4k"),
        ("--shape", "toy"),
        STACK,
        every_gpu=True,
        traces=True,
    ),
)


@dataclass(frozen=True)
class Machine:
    """What the slices run on."""

    gpus: tuple[str, ...]
    python: str
    torch: str | None
    packages: frozenset[str]
    """Those of the optional packages that can be found."""
    memory_gib: float | None = None
    """Of one GPU."""
    capability: tuple[int, int] | None = None
    triton: str | None = None
    cuda: str | None = None
    toy: bool = False

    @property
    def processes(self) -> int:
        """How many processes use all GPUs; at toy size two, so that this code runs as well."""
        return 2 if self.toy else len(self.gpus)


def environment(machine: Machine, site: Path | None) -> dict[str, str]:
    """Return the environment variables of every program."""
    found = dict(os.environ)
    paths = [str(ROOT), *([str(site)] if site else []), found.get("PYTHONPATH", "")]
    found |= {"PYTHONPATH": os.pathsep.join(path for path in paths if path), "PYTHONUNBUFFERED": "1"}
    # Otherwise kernels would be compiled once for each program that chooses a place of its own.
    found.setdefault("TRITON_CACHE_DIR", str(ROOT / "build" / "triton-cache"))
    if machine.toy:
        found |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "DS_ACCELERATOR": "cpu"}
        found.setdefault("OMP_NUM_THREADS", "1")
    return found


def command(part: Slice, machine: Machine, record: Path, commit: str | None, profile: bool) -> list[str]:
    """Return the command of a slice."""
    launcher = ["-m"]
    if part.every_gpu:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(machine.processes), "-m"]
    options = [*(part.toy if machine.toy else part.options), "--output", str(record)]
    options += ["--commit", commit] if commit else []
    options += ["--profile"] if profile and part.traces else []
    return [sys.executable, *launcher, f"benchmarks.{part.module}", *options]


@dataclass
class Outcome:
    """How a slice's program ended; stored in its record under `outcome`."""

    status: str
    seconds: float
    code: str
    """Digest of the code that ran; see `check_gpu.digest`."""
    gpus: tuple[str, ...] = ()
    reason: str | None = None
    last_lines: list[str] = field(default_factory=list)


def run(arguments: list[str], variables: dict[str, str], log: Path, limit: float) -> tuple[int | None, float]:
    """Run a program, show its output and write it to `log`.

    Returns its exit status, or None if it took more than `limit` seconds and was ended, and how long it took. Whatever
    ends this process also ends the program.
    """
    started = time.monotonic()
    with open(log, "w", encoding="utf-8") as file:
        program = subprocess.Popen(
            arguments,
            cwd=ROOT,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            preexec_fn=os.setpgrp,  # of the same session, which some launchers end as a whole
        )
        copier = threading.Thread(target=_copy, args=(program.stdout, file), daemon=True)
        copier.start()
        try:
            status = program.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(program)
        copier.join(GRACE)
    return status, time.monotonic() - started


def _copy(lines: Iterable[str], file: Any) -> None:
    for line in lines:
        file.write(line)
        file.flush()
        print(f"    {line}", end="", flush=True)


def _end(program: subprocess.Popen) -> None:
    """End what is left of a program and of its own children: first kindly, then at once."""
    for number, patience in ((signal.SIGTERM, GRACE), (signal.SIGKILL, None)):
        try:
            os.killpg(program.pid, number)
        except ProcessLookupError:
            break
        try:
            program.wait(patience)
        except subprocess.TimeoutExpired:
            continue


def read_results(path: Path) -> dict[str, Any] | None:
    """Return a slice's record, or None if there is none. Raises ValueError if the file is damaged."""
    try:
        return read_record(path, dict[str, Any])
    except FileNotFoundError:
        return None


def write_outcome(path: Path, outcome: Outcome) -> None:
    """Add how a program ended to the record that it wrote, or write a record that holds nothing else."""
    try:
        results = read_results(path) or {}
    except ValueError as error:
        results = {"damaged": str(error)}
    write_whole(path, [(json.dumps(results | {"outcome": vars(outcome)}, indent=1) + "\n").encode()])


def tail(log: Path) -> list[str]:
    """Return the last lines of a log."""
    return log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]


_ASK = """
import importlib.util, json, platform, sys

def version(name):
    from importlib import metadata
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

def found(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False

answer = {"python": platform.python_version(), "torch": version("torch"), "triton": version("triton"), "gpus": [],
          "packages": [name for name in sys.argv[1:] if found(name)], "memory_gib": None, "capability": None,
          "cuda": None}
if answer["torch"]:
    import torch
    if torch.cuda.is_available():
        first = torch.cuda.get_device_properties(0)
        answer["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        answer["memory_gib"] = round(first.total_memory / 2**30, 1)
        answer["capability"] = [first.major, first.minor]
        answer["cuda"] = torch.version.cuda
print(json.dumps(answer))
"""


def look_at_machine(site: Path | None, toy: bool) -> Machine:
    """Ask a Python of its own what this machine has; with `toy`, as if it had no GPU. Raises RuntimeError."""
    variables = environment(Machine((), "", None, frozenset(), toy=toy), site)
    packages = sorted({package for part in SLICES for package in part.packages})
    try:
        answer = subprocess.run(
            [sys.executable, "-c", _ASK, *packages], env=variables, capture_output=True, text=True, timeout=180
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError("torch did not answer within three minutes; does nvidia-smi work?") from None
    if answer.returncode:
        reason = (answer.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise RuntimeError(f"torch cannot be imported by {sys.executable}: {reason}")
    found = json.loads(answer.stdout.splitlines()[-1])
    found |= {"gpus": tuple(found["gpus"]), "packages": frozenset(found["packages"])}
    found["capability"] = tuple(found["capability"]) if found["capability"] else None
    return Machine(**found, toy=toy or not found["gpus"])
