"""Execute runs concurrently, each training and then evaluation, in their own processes with a log each."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from megatron_tape import command_line
from megatron_tape.errors import EXIT_RESTART, UserError
from megatron_tape.io.files import open_to_append
from megatron_tape.text import counted, duration
from pretrain.comparison.planned_runs import PlannedRun

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_COUNT_GPUS = "import torch; n = torch.cuda.device_count(); print(n, torch.cuda.get_device_name(0) if n else '')"


class Programs:
    """Starts programs, each on one of `gpus` or, without GPUs, on one thread.

    A program inherits the descriptor `lock`, and saves and ends when this process ends.
    """

    def __init__(self, gpus: list[str], lock: int):
        self._gpus, self._lock = gpus, lock

    def __call__(self, module: str, arguments: list[str], log: Path, slot: int) -> subprocess.Popen:
        """Start the `main` of a module on the GPU of its slot; append its output to `log`."""
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


@dataclass
class _Active:
    """A run in progress."""

    run: PlannedRun
    process: subprocess.Popen
    stage: int = 0
    requested: str = ""
    """The last way in which the process was told to end."""
    started: float = field(default_factory=time.monotonic)

    def end(self, how: str) -> None:
        """End the process with its method `terminate` or `kill`."""
        if self.requested != how:
            getattr(self.process, how)()
            self.requested = how


class Jobs:
    """Executes runs, `slots` at a time; calls `finish` with a run and its seconds when all its stages have succeeded.

    `start` starts a module, given its arguments, log and slot. A failed run does not stop the others; `failed` holds
    the reasons by the name of the run.
    """

    def __init__(
        self,
        runs: list[PlannedRun],
        slots: int,
        start: Callable[[str, list[str], Path, int], subprocess.Popen],
        finish: Callable[[PlannedRun, float], None],
        pause: float = 0.2,
    ):
        self._waiting, self._slots, self._start, self._finish, self._pause = list(runs), slots, start, finish, pause
        self._active: dict[int, _Active] = {}
        self._total, self._done = len(runs), 0
        self._progress = command_line.Progress(len(runs))
        self._signals: list[int] = []
        self.failed: dict[str, str] = {}

    @property
    def stopped(self) -> int | None:
        """The signal that interrupted the runs, if any."""
        return self._signals[0] if self._signals else None

    def run(self) -> None:
        """Execute all runs; after a signal such as Ctrl-C, let the active runs save and end, and return."""
        handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # nohup ignores one
        handlers = {number: signal.signal(number, lambda number, _: self._signals.append(number)) for number in handled}
        try:
            while self._active or (self._waiting and not self._signals):
                self._start_and_stop()
                for slot in list(self._active):
                    self._look_at(slot)
                self._progress.update(self._done + len(self.failed), self._line)
                time.sleep(self._pause)
        finally:
            self._progress.end()
            for active in self._active.values():
                active.end("kill")
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _start_and_stop(self) -> None:
        """Fill free slots; after a signal, let active runs save and end; after a second Ctrl-C, kill them."""
        for slot in range(self._slots):
            if self._waiting and slot not in self._active and not self._signals:
                run = self._waiting.pop(0)
                self._active[slot] = _Active(run, self._started(run, 0, slot))
        if self._signals:
            for active in self._active.values():
                active.end("kill" if self._signals.count(signal.SIGINT) > 1 else "terminate")

    def _started(self, run: PlannedRun, stage: int, slot: int) -> subprocess.Popen:
        _, module, arguments = run.stages[stage]
        return self._start(module, arguments, run.log, slot)

    def _look_at(self, slot: int) -> None:
        """Continue the run in a slot if its process has ended."""
        active = self._active[slot]
        run, status, stage = active.run, active.process.poll(), active.stage + 1
        if status is None:
            return
        if status == EXIT_RESTART and self.stopped is None:
            status, stage = 0, active.stage  # start the same stage again
        if status == 0 and stage < len(run.stages) and self.stopped is None:
            active.process, active.stage, active.requested = self._started(run, stage, slot), stage, ""
            return
        del self._active[slot]
        if status == 0 and stage == len(run.stages):
            self._conclude(run, time.monotonic() - active.started)
        elif self.stopped is None:
            self._fail(run, f"{run.stages[stage - 1][0]} ended with status {status}{_last_words(run)}")

    def _conclude(self, run: PlannedRun, seconds: float) -> None:
        try:
            self._finish(run, seconds)
        except (UserError, OSError) as error:
            self._fail(run, str(error))
            return
        self._done += 1
        self._progress.end()
        took = duration(seconds)
        command_line.log(f"{self._done} of {counted(self._total, 'run')}: {run.name}, finished in {took}")

    def _fail(self, run: PlannedRun, reason: str) -> None:
        self.failed[run.name] = f"{reason}; its output is in {run.log}"
        self._progress.end()
        command_line.log(f"failed: {run.name}: {self.failed[run.name]}")

    def _line(self, _: float) -> str:
        line = f"{self._done} of {counted(self._total, 'run')} finished"
        if self._active:
            shown = (f"{active.run.name} ({active.run.stages[active.stage][0]})" for active in self._active.values())
            line += f"; running: {', '.join(shown)}"
            line += "; saving and ending" if self._signals else ""
        return line


def _last_words(run: PlannedRun) -> str:
    """Return the last line of a run's output that reports an error."""
    lines = run.log.read_text(encoding="utf-8", errors="replace")[-8192:].splitlines()
    errors = [line for line in lines if "error" in line.lower()]
    return f" ({errors[-1][:600]})" if errors else ""
