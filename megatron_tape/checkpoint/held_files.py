"""Checks files of a checkpoint and holds them in memory until they are used, as far as the host has memory."""

import contextlib
import hashlib
import mmap
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

from megatron_tape.checkpoint.directories import START_AGAIN
from megatron_tape.checkpoint.index import shard_of
from megatron_tape.errors import CheckpointError
from megatron_tape.io.files import FileDigest

HELD_SHARE = 4
"""Files are held from their check to their use in at most one part in so many of the job's memory on a host."""
_BLOCK = 1 << 22
"""Bytes that are read and hashed at once."""
_CGROUP_FILES = {"": ("", "memory.max"), "memory": ("memory", "memory.limit_in_bytes")}
"""Where version 2 (which names no controller) and version 1 of cgroups mount the limits, and what they call them."""

Content = bytearray | mmap.mmap
"""All bytes of a file."""


def check_files(
    path: Path, files: Mapping[str, FileDigest], names: Iterable[str], processes: int
) -> tuple[dict[str, Content], list[str]]:
    """Read files of a checkpoint and compare their checksums; return what they hold and what is wrong with them.

    Only as much is held as fits this process's share of the memory, one of `processes` on its host; the rest will be
    read again. Raises CheckpointError if a file cannot be read: that may be the fault of a disk or a network, and says
    nothing about the checkpoint.
    """
    left = memory_of_job() // HELD_SHARE // processes
    held, problems = {}, []
    for name in names:
        keep = shard_of(name) is not None and files[name]["bytes"] <= left
        try:
            sha256, content = read_whole(path / name, keep)
        except OSError as error:
            raise CheckpointError(str(path / name), f"cannot be read ({error})", START_AGAIN) from None
        if sha256 != files[name]["sha256"]:
            problems.append(f"{name} has sha256 {sha256} instead of {files[name]['sha256']}")
        if content is not None:
            held[name], left = content, left - len(content)
    return held, problems


def read_whole(path: Path, keep: bool) -> tuple[str, Content | None]:
    """Return the sha256 of a file, and its bytes if `keep` and there is memory; it is opened once and read once."""
    hasher = hashlib.sha256()
    with open(path, "rb") as file:
        content = _memory(os.fstat(file.fileno()).st_size) if keep else None
        if content is None:
            while block := file.read(_BLOCK):
                hasher.update(block)
            return hasher.hexdigest(), None
        view, end = memoryview(content), 0
        while count := file.readinto(view[end : end + _BLOCK]):
            hasher.update(view[end : end + count])
            end += count
    return hasher.hexdigest(), content


def _memory(size: int) -> Content | None:
    """Return so many bytes, or None if there is no room for them.

    Processes that are forked do not get them: data loaders would keep them for as long as the run lasts.
    """
    if size == 0:
        return bytearray()
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, MemoryError):
        return None
    memory.madvise(mmap.MADV_DONTFORK)
    return memory


def memory_of_job(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many bytes all processes on this host can use: what is available, and not more than cgroups allow."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *_available(proc), *_limits(proc, cgroups)])


def _available(proc: Path) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for kib in re.findall(r"^MemAvailable: +([0-9]+) kB$", (proc / "meminfo").read_text(), re.MULTILINE):
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
