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

from megatron_tape.parallel.launcher import SHARED_GPU

TESTS = Path(__file__).parent
ON_GPU = os.environ.get("TESTS_ON") == "gpu"
"""Whether tests run on GPUs, those that the variable TESTED_GPUS lists."""
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
IN_PROCESSES = {
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
ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
FORKS = multiprocessing.get_context("forkserver")
SPAWNS = multiprocessing.get_context("spawn")
"""Starts processes that may use a GPU. Imports can initialize CUDA, which forks cannot use then."""
FORKS.set_forkserver_preload(
    ["launch", "megatron_tape.training.trainer", "megatron_tape.evaluation.training_model"]
)


def alone():
    """Return the environment of a process on the CPU, without variables of a launcher, which
    earlier runs in this process may have set.
    """
    return without_launcher() | ON_CPU


def without_launcher():
    """Return the environment of a process, without variables of a launcher."""
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    return kept | IN_PROCESSES


def environment(rank, size, port):
    """Return the environment of a rank on the CPU."""
    values = (rank, rank, size, "127.0.0.1", port)
    return alone() | dict(zip(LAUNCHER, map(str, values)))


def environment_on_device(rank, size, port):
    """Return the environment of a rank that has a GPU of its own, or shares the only GPU, or shares
    the CPU if there is none.
    """
    gpus = []
    if ON_GPU:
        gpus = os.environ["TESTED_GPUS"].split(",")[:size]
    local_rank = rank
    variables = {}
    # All ranks use the first device.
    if len(gpus) < size:
        local_rank = 0
        variables[SHARED_GPU] = "1"

    values = (rank, local_rank, size, "127.0.0.1", port)
    variables |= dict(zip(LAUNCHER, map(str, values)))
    variables["LOCAL_WORLD_SIZE"] = str(size)
    if not ON_GPU:
        return alone() | variables

    variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    # By default, gloo uses the address of the hostname, which may not work on a machine that was
    # lent for a trial.
    variables["GLOO_SOCKET_IFNAME"] = "lo"
    return without_launcher() | variables


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
    """Start call(*arguments) in a process with this environment and working directory, and return
    the process. Its output is added to `log`.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    begin_arguments = (call, arguments, log, environment, os.path.abspath(folder))
    if environment.get("CUDA_VISIBLE_DEVICES"):
        process = SPAWNS.Process(target=_begin, args=begin_arguments)
        # The new process imports libraries before `_begin` could set its environment.
        with mock.patch.dict(os.environ, environment, clear=True):
            process.start()
    else:
        # The server keeps the environment in which it starts.
        with mock.patch.dict(os.environ, alone(), clear=True):
            multiprocessing.forkserver.ensure_running()
        process = FORKS.Process(target=_begin, args=begin_arguments)
        process.start()
    # As in `subprocess.Popen`.
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
    """Call call(*arguments) in a new process; the other arguments are those of `start`."""
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
    """Run a script or, after -m, a module."""
    sys.argv = arguments
    run = runpy.run_path
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        run = runpy.run_module
    run(sys.argv[0], run_name="__main__")


def _case(module, folder, arguments):
    """Run a rank of a group. Rank 0 saves what `main` of the module returns."""
    result = importlib.import_module(module).main(str(folder), *arguments)
    if os.environ["RANK"] == "0":
        torch.save(result, folder / "result.pt")


def _end_together(processes, timeout):
    """Wait until all processes have ended, one has failed, or `timeout` seconds are over. Kill
    those that still run.
    """
    deadline = time.monotonic() + timeout
    try:
        while any(process.is_alive() for process in processes):
            if any(process.exitcode for process in processes):
                break
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.join()


def run_group(module, size, *arguments, timeout=600):
    """Run `module`.main(folder, *arguments) on `size` ranks; return what rank 0's call returned.

    `folder` is a new one. Raises AssertionError with the output of a rank that fails.
    """
    return run_groups(module, [size], *arguments, timeout=timeout)[0]


def run_groups(module, sizes, *arguments, timeout=600, environment_of_rank=environment):
    """Run a group of ranks of each size at the same time, as `run_group` does for one; return the
    list of what rank 0 of each group returned.

    `environment_of_rank(rank, size, port)` returns the environment of a rank.
    """
    folders = [Path(tempfile.mkdtemp(prefix="group-")) for _ in sizes]
    # By the log.
    processes = {}
    for folder, size in zip(folders, sizes):
        port = free_port()
        case_arguments = (module, folder, list(map(str, arguments)))
        for rank in range(size):
            log = folder / f"rank{rank}.log"
            variables = environment_of_rank(rank, size, port)
            processes[log] = start(_case, case_arguments, log, variables, folder)
    _end_together(processes.values(), timeout)

    failed = [log for log, process in processes.items() if process.exitcode]
    if failed:
        # The ranks that were killed here have the exit code -9.
        culprit = next((log for log in failed if processes[log].exitcode != -9), failed[0])
        raise AssertionError(
            f"{culprit} of {module} ended with {processes[culprit].exitcode}:\n"
            f"{culprit.read_text()[-6000:]}"
        )
    return [torch.load(folder / "result.pt", weights_only=True) for folder in folders]
