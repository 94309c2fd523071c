"""Describe the machine, the packages and the code with which a number was measured."""

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

from megatron_tape.io.files import atomic_output

RESULTS = Path(__file__).parent / "results"

_PACKAGES = ("torch", "megatron-core", "deepspeed", "triton", "flash-attn", "numpy", "sentencepiece", "tokenizers")


def describe() -> dict:
    """Return hardware, versions, git commit, command and time, ready for JSON.

    `commit` ends in "+changes" when tracked files differ from it. GPUs are listed when this process has imported torch.
    """
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *_program(), *sys.argv[1:]]),
        "commit": _commit(),
        "cpu": _cpu(),
        "threads": torch.get_num_threads() if (torch := sys.modules.get("torch")) else None,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": _gpus(),
        "gpu_software": _gpu_software(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
    }


class Record:
    """A file that is rewritten as further results come in.

    It is `output` if that ends in .json, otherwise NAME-DATE.json in the directory `output`.
    """

    def __init__(self, name: str, output: Path = RESULTS, commit: str | None = None):
        self.origin = describe()
        if commit is not None:
            self.origin["commit"] = commit
        dated = f"{name}-{self.origin['date'].replace(':', '')[:17]}.json"
        self.path = output if output.suffix == ".json" else output / dated
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.announced = False

    def write(self, result: dict) -> None:
        """Write `result` with its origin; print the path the first time."""
        with atomic_output(self.path, "w", overwrite=True) as file:
            file.write(json.dumps({"environment": self.origin, **result}, indent=1) + "\n")
        if not self.announced:
            root = Path(__file__).resolve().parent.parent
            path = self.path.resolve()
            print(f"recorded in {path.relative_to(root) if path.is_relative_to(root) else path}", flush=True)
        self.announced = True


def record(name: str, result: dict) -> None:
    """Write `result` with its origin to benchmarks/results/NAME-DATE.json and print the path."""
    Record(name).write(result)


def _program() -> list[str]:
    """Name the program by its module or its path in the repository, as absolute paths mean nothing elsewhere."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None:
        return ["-m", spec.name]
    root, program = Path(__file__).resolve().parent.parent, Path(sys.argv[0]).resolve()
    return [program.relative_to(root).as_posix() if program.is_relative_to(root) else program.name]


def _commit() -> str | None:
    try:
        commit = _git("rev-parse", "HEAD")
        return f"{commit}+changes" if _git("status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _gpus() -> list[str]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def _gpu_software() -> dict[str, str]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return {}
    found = {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found["driver"] = subprocess.run(query, check=True, capture_output=True, text=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        pass
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
