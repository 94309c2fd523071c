"""Runs a module of test cases in a group of gloo processes, once: imports cost each process seconds."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

TESTS = Path(__file__).parent


def environment(rank, size, port, threads=1):
    return os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONWARNINGS": "ignore",
    }


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_group(module, size, *arguments, timeout=600):
    """Run `module`.main(folder, *arguments) on `size` ranks; return what rank 0's call returned."""
    folder = Path(tempfile.mkdtemp(prefix="group-"))
    port = free_port()
    program = (
        f"import sys, torch; torch.set_num_threads(1); import {module} as m; r = m.main(*sys.argv[1:]); "
        f"m_rank = int(__import__('os').environ['RANK']); "
        f"torch.save(r, {str(folder / 'result.pt')!r}) if m_rank == 0 else None"
    )
    logs = [open(folder / f"rank{rank}.log", "w+") for rank in range(size)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(folder), *map(str, arguments)],
            env=environment(rank, size, port),
            stdout=logs[rank],
            stderr=subprocess.STDOUT,
            cwd=folder,
        )
        for rank in range(size)
    ]
    deadline = time.monotonic() + timeout
    try:
        while any(process.poll() is None for process in processes):
            failed = [rank for rank, process in enumerate(processes) if process.poll() not in (None, 0)]
            if failed or time.monotonic() > deadline:
                break
            time.sleep(0.05)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
    for rank, process in enumerate(processes):
        if process.returncode != 0:
            culprit = next((r for r, p in enumerate(processes) if p.returncode not in (0, -9)), rank)
            tail = (folder / f"rank{culprit}.log").read_text()[-6000:]
            raise AssertionError(f"rank {culprit} of {module} ended with {processes[culprit].returncode}:\n{tail}")
    return torch.load(folder / "result.pt", weights_only=True)
