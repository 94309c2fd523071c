"""Start programs of this package in processes of their own, with a log each."""

from __future__ import annotations

import fcntl
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_COUNT_GPUS = "import torch; n = torch.cuda.device_count(); print(n, torch.cuda.get_device_name(0) if n else '')"


Start = Callable[[str, list[str], Path, int], BaseProcess]
"""Starts a module's `main` with arguments; its output is added to a file. The last argument is its slot."""


class Programs:
    """Starts programs: each on one of `gpus`, or without any on one thread, from a process that has loaded libraries.

    `preload` names the module that is loaded first. While a program runs, nobody else gets an exclusive lock on the
    directory `output`.
    """

    def __init__(self, gpus: list[str], output: Path, preload: str):
        self._gpus, self._output = gpus, output
        self._context = multiprocessing.get_context("spawn" if gpus else "forkserver")
        if not gpus:
            os.environ["OMP_NUM_THREADS"] = "1"
            self._context.set_forkserver_preload(["pretrain.comparison.libraries", preload])
            first = self._context.Process(target=os.getpid)
            first.start()
            first.join()

    def __call__(self, module: str, arguments: list[str], log: Path, slot: int) -> BaseProcess:
        """Start a program on the GPU of its slot."""
        gpu = self._gpus[slot % len(self._gpus)] if self._gpus else None
        log.parent.mkdir(parents=True, exist_ok=True)
        process = self._context.Process(target=run_program, args=(module, arguments, log, gpu, self._output))
        process.start()
        return process


def run_program(module: str, arguments: list[str], log: Path, gpu: str | None, output: Path) -> None:
    """Run a program in this process, which was started for it, and exit."""
    os.setsid()  # Ctrl-C reaches only the process that started this one, which asks it to end
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="replace")
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    with suppress(OSError):  # some network file systems have no locks
        fcntl.flock(os.open(output, os.O_RDONLY | os.O_DIRECTORY), fcntl.LOCK_SH | fcntl.LOCK_NB)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.exit(importlib.import_module(module).main(arguments))


def _end_with_parent() -> None:
    """Have this process save and end when the one that started it is gone."""
    multiprocessing.parent_process().join()
    os.kill(os.getpid(), signal.SIGTERM)


def find_gpus() -> tuple[list[str], str | None]:
    """Return the GPUs as CUDA_VISIBLE_DEVICES calls them, and the name of the first, without touching them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not Path("/dev/nvidiactl").exists() or visible == "":
        return [], None
    asked = subprocess.run([sys.executable, "-c", _COUNT_GPUS], capture_output=True, text=True)
    count, _, name = asked.stdout.strip().partition(" ")
    names = visible.split(",") if visible else list(map(str, range(int(count or 0))))
    return names[: int(count or 0)], name or None
