"""Start programs of this package as processes: copies of this one, or fresh ones.

torch, megatron-core and deepspeed take seconds to load, as long as a small model takes for a hundred steps. A process
that has loaded them and has neither threads nor process groups nor a GPU may be copied at any time (fork), and each
copy runs one program.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import pretrain

_LIBRARIES = (
    "megatron_tape.training.trainer",
    "megatron_tape.huggingface.export.to_transformers",
    "megatron_tape.evaluation.transformers_model",
    "transformers.generation.utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
)
_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
# Not as a script, whose directory would come first: libraries that import the package `evaluate` would find ours there.
_RUN_MODULE = """import runpy, sys
sys.path[0] = sys.argv.pop(1)
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)"""
_COUNT_GPUS = "import torch; n = torch.cuda.device_count(); print(n, torch.cuda.get_device_name(0) if n else '')"


class Process(Protocol):
    """A program that has been started."""

    def poll(self) -> int | None:
        """Return its exit status (minus the number of a signal that ended it), None while it runs."""

    def send_signal(self, number: int) -> None:
        """Send it a signal; do nothing if it has ended."""


Start = Callable[[str, list[str], Path, int], Process]
"""Starts a module's `main` with arguments; its output is added to a file. The last argument is its slot."""


class _Copy:
    """A copy of this process that runs a program."""

    def __init__(self, pid: int):
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        if self._status is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if ended else None
        return self._status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def copy_of_this(module: str, arguments: list[str], log: Path, slot: int) -> Process:
    """Start a program in a copy of this process."""
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            _redirect(log)
            status = _call(module, arguments)
        finally:
            # Without what this process would do at exit, and without its pending output.
            os._exit(status)
    return _Copy(pid)


def _redirect(log: Path) -> None:
    os.setsid()  # Ctrl-C reaches only the process that was copied, which asks this one to end
    for number in _HANDLED:
        signal.signal(number, signal.SIG_DFL)
    target, nothing = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666), os.open(os.devnull, os.O_RDONLY)
    for source, descriptor in ((nothing, 0), (target, 1), (target, 2)):
        os.dup2(source, descriptor)
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False)
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False)


def _call(module: str, arguments: list[str]) -> int:
    try:
        status = importlib.import_module(module).main(arguments)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status or 0


class Fresh:
    """Starts programs in fresh processes, each of which sees one of `gpus`, if there are any."""

    def __init__(self, gpus: list[str], environment: dict[str, str]):
        self._gpus, self._environment = gpus, environment

    def __call__(self, module: str, arguments: list[str], log: Path, slot: int) -> Process:
        """Start a program on the GPU of its slot."""
        log.parent.mkdir(parents=True, exist_ok=True)
        root = Path(pretrain.__file__).parents[1]
        paths = [str(root), *filter(None, [self._environment.get("PYTHONPATH")])]
        own = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
        if self._gpus:
            own["CUDA_VISIBLE_DEVICES"] = self._gpus[slot % len(self._gpus)]
        command = [sys.executable, "-c", _RUN_MODULE, str(root), module, *arguments]
        with open(log, "ab") as output:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env={**self._environment, **own},
                start_new_session=True,
            )  # fmt: skip


def load_libraries() -> bool:
    """Load what the programs need; return whether this process may be copied after that: if it has one thread."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed warns that it found no accelerator
    for noisy in ("DeepSpeed", "megatron", "torch", "numba", "matplotlib"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in _LIBRARIES:
            importlib.import_module(name)
    return len(os.listdir("/proc/self/task")) == 1


def find_gpus() -> tuple[list[str], str | None]:
    """Return the GPUs as CUDA_VISIBLE_DEVICES calls them, and the name of the first, without touching them."""
    if not Path("/dev/nvidiactl").exists() or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return [], None
    asked = subprocess.run([sys.executable, "-c", _COUNT_GPUS], capture_output=True, text=True)
    count, _, name = asked.stdout.strip().partition(" ")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else list(map(str, range(int(count or 0))))
    return names[: int(count or 0)], name or None
