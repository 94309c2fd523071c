"""Start programs of this package in processes of their own, with a log each."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

from megatron_tape.io.files import open_to_append

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_COUNT_GPUS = "import torch; n = torch.cuda.device_count(); print(n, torch.cuda.get_device_name(0) if n else '')"


class Programs:
    """Starts programs: each on one of `gpus`, or without any on one thread.

    A program inherits the descriptor `lock`, and saves and ends when this process is gone.
    """

    def __init__(self, gpus: list[str], lock: int):
        self._gpus, self._lock = gpus, lock

    def __call__(self, module: str, arguments: list[str], log: Path, slot: int) -> subprocess.Popen:
        """Start a module's `main` with arguments on the GPU of its slot; its output is added to a file."""
        gpu = {"CUDA_VISIBLE_DEVICES": self._gpus[slot % len(self._gpus)]} if self._gpus else {"OMP_NUM_THREADS": "1"}
        code = f"import sys; sys.path = {sys.path}; from {module} import main; sys.exit(main(sys.argv[1:]))"
        log.parent.mkdir(parents=True, exist_ok=True)
        with open_to_append(log) as output:
            return subprocess.Popen(
                [sys.executable, "-u", "-c", code, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | gpu,
                pass_fds=[self._lock],
                start_new_session=True,  # Ctrl-C reaches only this process, which asks the program to end
                preexec_fn=lambda: ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
            )


def find_gpus() -> tuple[list[str], str | None]:
    """Return the GPUs as CUDA_VISIBLE_DEVICES calls them, and the name of the first, without touching them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not Path("/dev/nvidiactl").exists() or visible == "":
        return [], None
    asked = subprocess.run([sys.executable, "-c", _COUNT_GPUS], capture_output=True, text=True)
    count, _, name = asked.stdout.strip().partition(" ")
    names = visible.split(",") if visible else list(map(str, range(int(count or 0))))
    return names[: int(count or 0)], name or None
