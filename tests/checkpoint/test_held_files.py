"""Files that are checked and held in memory, and how much of a host a process may use for that."""

import errno
from pathlib import Path

import pytest
import torch

from megatron_tape.checkpoint import held_files
from megatron_tape.checkpoint.held_files import memory_of_job, read_whole
from megatron_tape.io.files import digest

MIB = 1 << 20


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    "own, files, mib",
    [
        (
            "0::/job/step/task\n",
            {"job/memory.max": 24, "job/step/memory.max": 32, "job/step/task/memory.max": "max"},
            24,
        ),
        ("0::/job/step/task\n", {"job/memory.max": 24, "job/step/task/memory.max": 8}, 8),
        ("0::/\n", {"memory.max": 24}, 24),
        ("2:cpu,cpuacct:/x\n1:cpuset,memory:/job\n0::/\n", {"memory/job/memory.limit_in_bytes": 24}, 24),
        ("1:memory:/docker/not/visible/inside\n", {"memory/memory.limit_in_bytes": 24}, 24),
        ("1:memory:/\n0::/\n", {"memory/memory.limit_in_bytes": 2**40}, 40),
        (None, {}, 40),
    ],
)
def test_the_memory_of_a_job_is_what_is_available_within_its_cgroups(tmp_path, own, files, mib):
    write(tmp_path / "meminfo", f"MemTotal:       999999 kB\nMemFree:        1 kB\nMemAvailable:   {40 * 1024} kB\n")
    if own is not None:
        write(tmp_path / "self" / "cgroup", own)
    for name, limit in files.items():
        write(tmp_path / "cgroups" / name, f"{limit if limit == 'max' else limit * MIB}\n")
    assert memory_of_job(tmp_path, tmp_path / "cgroups") == mib * MIB


def test_what_is_held_does_not_live_on_in_forked_data_loaders(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 64)
    sha256, content = read_whole(path, keep=True)
    assert sha256 == digest(path)["sha256"] and bytes(content) == path.read_bytes()
    address = torch.frombuffer(content, dtype=torch.uint8).data_ptr()
    mappings = Path("/proc/self/smaps").read_text()
    start = mappings.index(f"\n{address:x}-")
    flags = next(line for line in mappings[start:].splitlines() if line.startswith("VmFlags:"))
    assert "dc" in flags.split()  # "do not copy on fork"
    path.write_bytes(b"")
    assert read_whole(path, keep=True) == (digest(path)["sha256"], b"")


def test_where_there_is_no_memory_files_are_checked_without_being_held(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"content")

    def fail(*arguments, **options):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(held_files.mmap, "mmap", fail)
    assert read_whole(path, keep=True) == (digest(path)["sha256"], None)
