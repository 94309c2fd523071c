"""Execute the runs of a comparison concurrently. A run has stages, training and evaluation, each in
its own process.
"""

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
from megatron_tape.text import counted, duration
from pretrain.comparison.planned_runs import PlannedRun

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_COUNT_GPUS = (
    "import torch; n = torch.cuda.device_count(); print(n, torch.cuda.get_device_name(0) if n"
    " else '')"
)


class Programs:
    """Starts programs, each on one of `gpus` (as in CUDA_VISIBLE_DEVICES) or, without GPUs, with
    one CPU thread.

    A program inherits the file descriptor `lock`. If this process is killed, the program is sent
    SIGTERM.
    """

    def __init__(self, gpus: list[str], lock: int):
        self._gpus = gpus
        self._lock = lock

    def __call__(self, module: str, arguments: list[str], log: Path, slot: int) -> subprocess.Popen:
        """Start the `main` of a module, with one GPU per slot if there are enough; append its
        output to `log`.
        """
        if self._gpus:
            gpu = {"CUDA_VISIBLE_DEVICES": self._gpus[slot % len(self._gpus)]}
        else:
            gpu = {"OMP_NUM_THREADS": "1"}
        code = (
            f"import sys; sys.path = {sys.path}; from {module} import main;"
            " sys.exit(main(sys.argv[1:]))"
        )
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as output:
            return subprocess.Popen(
                [sys.executable, "-u", "-c", code, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | gpu,
                pass_fds=[self._lock],
                # so that Ctrl-C reaches only this process, which then ends the program
                start_new_session=True,
                preexec_fn=lambda: ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
            )


def find_gpus() -> tuple[list[str], str | None]:
    """Return the GPUs, named as in CUDA_VISIBLE_DEVICES, and the model name of the first one, or
    None without GPUs.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not Path("/dev/nvidiactl").exists() or visible == "":
        return [], None
    # In another process, since counting them here would initialize CUDA.
    done = subprocess.run([sys.executable, "-c", _COUNT_GPUS], capture_output=True, text=True)
    count, _, name = done.stdout.strip().partition(" ")
    if visible:
        names = visible.split(",")
    else:
        names = list(map(str, range(int(count or 0))))
    return names[: int(count or 0)], name or None


@dataclass
class _Active:
    """A run in progress; `stage` is the index of its current stage, which `process` executes."""

    run: PlannedRun
    process: subprocess.Popen
    stage: int = 0
    ended_by: str = ""
    """`terminate` or `kill` if this has been called on the process, otherwise empty."""
    started: float = field(default_factory=time.monotonic)

    def end(self, how: str) -> None:
        """Call the process's method `how` (`terminate` or `kill`), but not twice in a row."""
        if self.ended_by != how:
            getattr(self.process, how)()
            self.ended_by = how


class Jobs:
    """Executes runs, at most `slots` at a time, in the order given.

    `start(module, arguments, log, slot)` starts a stage. `finish(run, seconds)` is called when all
    stages of a run have succeeded. A failed run does not stop the others; `failed` maps its name to
    the reason. `finished` is the number of other runs of the comparison, which have finished
    before; the log counts them. `pause` is the number of seconds between two checks of the
    processes.
    """

    def __init__(
        self,
        runs: list[PlannedRun],
        slots: int,
        start: Callable[[str, list[str], Path, int], subprocess.Popen],
        finish: Callable[[PlannedRun, float], None],
        finished: int = 0,
        pause: float = 0.2,
    ):
        self._waiting = list(runs)
        self._slots = slots
        self._start = start
        self._finish = finish
        self._pause = pause
        self._active: dict[int, _Active] = {}
        self._total = finished + len(runs)
        self._done = finished
        self._progress = command_line.Progress(self._total, start=finished)
        self._signals: list[int] = []
        self.failed: dict[str, str] = {}

    @property
    def stopped(self) -> int | None:
        """The number of the first signal that arrived while the runs were executed, or None."""
        if self._signals:
            return self._signals[0]
        return None

    def run(self) -> None:
        """Execute all runs. After a signal, such as that of Ctrl-C, wait until the active runs have
        saved and ended.
        """
        # nohup ignores SIGHUP, which must stay ignored.
        handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        handlers = {
            number: signal.signal(number, lambda number, _: self._signals.append(number))
            for number in handled
        }
        try:
            while self._active or (self._waiting and not self._signals):
                self._start_and_stop()
                for slot in list(self._active):
                    self._check_slot(slot)
                self._progress.update(self._done + len(self.failed), self._line)
                time.sleep(self._pause)
        finally:
            self._progress.end()
            for active in self._active.values():
                active.end("kill")
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _start_and_stop(self) -> None:
        """Start runs in free slots; after a signal, terminate the active runs, or kill them after a
        second Ctrl-C.
        """
        for slot in range(self._slots):
            if self._waiting and slot not in self._active and not self._signals:
                run = self._waiting.pop(0)
                self._active[slot] = _Active(run, self._start_stage(run, 0, slot))
        if self._signals:
            for active in self._active.values():
                active.end("kill" if self._signals.count(signal.SIGINT) > 1 else "terminate")

    def _start_stage(self, run: PlannedRun, stage: int, slot: int) -> subprocess.Popen:
        _, module, arguments = run.stages[stage]
        return self._start(module, arguments, run.log, slot)

    def _check_slot(self, slot: int) -> None:
        """If the process in a slot has ended, start the next stage of its run, or record how the
        run ended.
        """
        active = self._active[slot]
        run = active.run
        status = active.process.poll()
        stage = active.stage + 1
        if status is None:
            return
        if status == EXIT_RESTART and self.stopped is None:
            status = 0
            stage = active.stage  # repeat the stage, which continues from its checkpoint
        if status == 0 and stage < len(run.stages) and self.stopped is None:
            active.process = self._start_stage(run, stage, slot)
            active.stage = stage
            active.ended_by = ""
            return
        del self._active[slot]
        if status == 0 and stage == len(run.stages):
            self._conclude(run, time.monotonic() - active.started)
        elif self.stopped is None:
            self._fail(
                run, f"{run.stages[stage - 1][0]} ended with status {status}{_last_error(run)}"
            )

    def _conclude(self, run: PlannedRun, seconds: float) -> None:
        try:
            self._finish(run, seconds)
        except (UserError, OSError) as error:
            self._fail(run, str(error))
            return
        self._done += 1
        self._progress.end()
        done = f"{self._done} of {counted(self._total, 'run')}"
        command_line.log(f"{done}: {run.name}, finished in {duration(seconds)}")

    def _fail(self, run: PlannedRun, reason: str) -> None:
        self.failed[run.name] = f"{reason}; the output is in {run.log}"
        self._progress.end()
        command_line.log(f"failed: {run.name}: {self.failed[run.name]}")

    def _line(self, _: float) -> str:
        line = f"{self._done} of {counted(self._total, 'run')} finished"
        if self._active:
            shown = (
                f"{active.run.name} ({active.run.stages[active.stage][0]})"
                for active in self._active.values()
            )
            line += f"; running: {', '.join(shown)}"
            line += "; saving and ending" if self._signals else ""
        return line


def _last_error(run: PlannedRun) -> str:
    """Return, in parentheses, the last line of a run's log that contains "error", or "" without
    one.
    """
    lines = run.log.read_text(encoding="utf-8", errors="replace")[-8192:].splitlines()
    errors = [line for line in lines if "error" in line.lower()]
    if errors:
        return f" ({errors[-1][:600]})"
    return ""
