"""Start Python processes forked from a server that has already imported the libraries."""

import contextlib
import gc
import importlib
import multiprocessing
import multiprocessing.forkserver
import os
import random
import runpy
import socket
import sys
import tempfile
import time
import warnings
from pathlib import Path
from unittest import mock

import torch

TESTS = Path(__file__).parent
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
IN_PROCESSES = {
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(
        [
            str(TESTS),
            str(TESTS.parent),
            *filter(None, [os.environ.get("PYTHONPATH")]),
        ]
    ),
    "PYTHONWARNINGS": "ignore",
}
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["launch", "megatron_tape.training.trainer", "megatron_tape.evaluation.training_model"]
)


def alone():
    """Return the environment without variables of a launcher, which earlier runs in this process
    may have set.
    """
    return {
        name: value for name, value in os.environ.items() if name not in LAUNCHER
    } | IN_PROCESSES


def environment(rank, size, port):
    """Return the environment of a rank."""
    values = (rank, rank, size, "127.0.0.1", port)
    return alone() | dict(zip(LAUNCHER, map(str, values)))


def free_port():
    """Return a free port outside Linux's ephemeral range, so that no other connection takes it
    before it is used.
    """
    while True:
        port = random.SystemRandom().randrange(15000, 32000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def start(call, arguments, log, environment, folder="."):
    """Start call(*arguments) in a process with this environment and working directory; its output
    is added to `log`.
    """
    with mock.patch.dict(os.environ, alone(), clear=True):
        multiprocessing.forkserver.ensure_running()
    log.parent.mkdir(parents=True, exist_ok=True)
    process = FORKS.Process(
        target=_begin, args=(call, arguments, log, environment, os.path.abspath(folder))
    )
    process.start()
    process.poll = lambda: process.exitcode
    return process


def start_python(arguments, log, environment=None, folder="."):
    """Start what `python ARGUMENTS...` would: a script, or a module after -m."""
    return start(
        _run,
        (list(map(str, arguments)),),
        log,
        environment or alone(),
        folder,
    )


def _begin(call, arguments, log, environment, folder):
    with open(log, "ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    warnings.simplefilter("ignore")
    gc.freeze()  # garbage collection would dominate the time of a small run
    call(*arguments)


def _run(arguments):
    sys.argv = arguments[1:] if arguments[0] == "-m" else arguments
    run = runpy.run_module if arguments[0] == "-m" else runpy.run_path
    run(sys.argv[0], run_name="__main__")


def _case(module, folder, arguments):
    """Run a rank of a group."""
    result = importlib.import_module(module).main(str(folder), *arguments)
    if os.environ["RANK"] == "0":
        torch.save(result, folder / "result.pt")


def run_group(module, size, *arguments, timeout=600):
    """Run `module`.main(folder, *arguments) on `size` ranks; return what rank 0's call returned."""
    folder = Path(tempfile.mkdtemp(prefix="group-"))
    port = free_port()
    logs = [folder / f"rank{rank}.log" for rank in range(size)]
    given = (module, folder, list(map(str, arguments)))
    processes = [
        start(_case, given, log, environment(rank, size, port), folder)
        for rank, log in enumerate(logs)
    ]
    deadline = time.monotonic() + timeout
    try:
        while any(process.is_alive() for process in processes):
            if any(process.exitcode for process in processes) or time.monotonic() > deadline:
                break
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.join()
    if any(process.exitcode for process in processes):
        culprit = next(
            (r for r, p in enumerate(processes) if p.exitcode not in (0, -9)),
            0,
        )
        tail = logs[culprit].read_text()[-6000:]
        raise AssertionError(
            f"rank {culprit} of {module} ended with {processes[culprit].exitcode}:\n{tail}"
        )
    return torch.load(folder / "result.pt", weights_only=True)
