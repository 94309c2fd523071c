"""How much of the host's memory a process may hold files in. Imports no torch."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_CGROUP_FILES = {"": ("", "memory.max"), "memory": ("memory", "memory.limit_in_bytes")}
"""Where version 2 (which names no controller) and version 1 of cgroups mount the limits, and what they call them."""


def memory_of_job(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many bytes all processes on this host can use: what is available, and not more than cgroups allow."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *_available(proc), *_limits(proc, cgroups)])


def processes_of_host(gpus: int) -> int:
    """Return how many of the run's processes share this host, judged by launchers' variables.

    If neither torchrun nor Slurm says so, each of the `gpus` that this process sees has a process. Of hosts with
    different numbers of tasks, the fullest counts.
    """
    if local := int(os.environ.get("LOCAL_WORLD_SIZE") or 0):
        return local
    tasks = os.environ.get("SLURM_STEP_TASKS_PER_NODE") or os.environ.get("SLURM_NTASKS_PER_NODE") or ""
    return max([1, gpus, *(int(count) for count in re.findall(r"(\d+)(?:\(x\d+\))?", tasks))])


def _available(proc: Path) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for kib in re.findall(r"^MemAvailable: +(\d+) kB$", (proc / "meminfo").read_text(), re.MULTILINE):
            yield 1024 * int(kib)


def _limits(proc: Path, cgroups: Path) -> Iterator[int]:
    """Yield the limits of this process's cgroups and of all above them, as far as they can be seen from here."""
    with contextlib.suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for controller in _CGROUP_FILES.keys() & controllers.split(","):
                mount, file = _CGROUP_FILES[controller]
                parts = PurePosixPath(path).parts[1:]
                for depth in range(len(parts) + 1):
                    with contextlib.suppress(OSError, ValueError):  # not visible here, or "max"
                        yield int(cgroups.joinpath(mount, *parts[:depth], file).read_text())
