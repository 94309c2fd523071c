"""Execute the runs of a comparison concurrently. A run has two phases, training and evaluation,
each in its own process.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_tape import command_line
from megatron_tape.errors import EXIT_DIVERGED, EXIT_RESTART
from megatron_tape.text import counted, duration
from pretrain.comparison.planned_runs import PlannedRun

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals after which a comparison saves its active runs and ends."""
_PR_SET_PDEATHSIG = 1
"""Linux's number of the request for a signal when the parent dies."""
_PRINT_GPUS = (
    "import torch\n"
    "for index in range(torch.cuda.device_count()): print(torch.cuda.get_device_name(index))"
)
"""A program that prints the model name of each GPU."""


def start_program(
    module: str, arguments: list[str], log: Path, slot: int, *, gpus: list[str], lock: int
) -> subprocess.Popen:
    """Start the `main` of a module, and append its output to `log`.

    A program uses one of `gpus` (as in CUDA_VISIBLE_DEVICES), a different one per slot if there are
    enough, or without GPUs one CPU thread. It inherits the file descriptor `lock`. If this process
    is killed, the program is sent SIGTERM.
    """
    device = {"OMP_NUM_THREADS": "1"}
    if gpus:
        device = {"CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)]}
    # Not `python -m`, so that the program finds the same modules as this process.
    code = f"import sys; sys.path = {sys.path}; from {module} import main; sys.exit(main())"
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as output:
        return subprocess.Popen(
            [sys.executable, "-u", "-c", code, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | device,
            pass_fds=[lock],
            # Ctrl-C reaches only this process, which then ends the program.
            start_new_session=True,
            preexec_fn=lambda: ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
        )


def find_gpus() -> tuple[list[str], str | None]:
    """Return the GPUs, named as in CUDA_VISIBLE_DEVICES, and the model name of the first one, or
    None without GPUs.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    # Without a driver, do not spend seconds on importing torch.
    if not Path("/dev/nvidiactl").exists() or visible == "":
        return [], None
    # In another process, since counting the GPUs here would initialize CUDA.
    command = [sys.executable, "-c", _PRINT_GPUS]
    names = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    gpus = [str(index) for index in range(len(names))]
    if visible:
        gpus = visible.split(",")[: len(names)]
    return gpus, next(iter(names), None)


@dataclass
class _Active:
    """A run in progress; `phase` is the index of its current phase, which `process` executes."""

    run: PlannedRun
    process: subprocess.Popen
    phase: int
    started: float
    """When the first phase started, as `time.monotonic()`."""
    terminated: bool = False
    """Whether the process has been sent SIGTERM."""

    @property
    def phase_name(self) -> str:
        return self.run.phases[self.phase][0]


class Jobs:
    """Executes runs, at most `slots` at a time, in the order given.

    `start(module, arguments, log, slot)` starts the process of a phase and returns it, as
    `start_program` does. `on_finished(run, seconds)` is called when all phases of a run have
    succeeded, after `seconds` in total, or if a run that may diverge has diverged. A failed run
    does not stop the others; `failed` maps its name to the reason. The log counts the runs of the
    whole comparison: `finished_before` are those that are finished already, `later` those that
    other jobs execute. `pause` is the number of seconds between two checks of the processes.
    """

    def __init__(
        self,
        runs: list[PlannedRun],
        slots: int,
        start: Callable[[str, list[str], Path, int], subprocess.Popen],
        on_finished: Callable[[PlannedRun, float], None],
        finished_before: Sequence[PlannedRun] = (),
        later: Sequence[PlannedRun] = (),
        pause: float = 0.2,
    ):
        self._waiting = list(runs)
        self._slots = slots
        self._start = start
        self._on_finished = on_finished
        self._pause = pause
        # The runs in progress, by slot.
        self._active: dict[int, _Active] = {}
        self._total = len(finished_before) + len(runs) + len(later)
        self._finished = len(finished_before)
        # The time that is left is estimated from FLOPs, since runs differ in size.
        self._finished_flops = _flops(finished_before)
        total_flops = self._finished_flops + _flops(runs) + _flops(later)
        self._progress = command_line.Progress(total_flops, start=self._finished_flops)
        # The signals that have arrived, in order.
        self._signals: list[int] = []
        self._is_stopping = False
        self.failed: dict[str, str] = {}

    @property
    def stopped(self) -> int | None:
        """The number of the first signal that arrived while the runs were executed, or None."""
        return next(iter(self._signals), None)

    def run(self) -> None:
        """Execute all runs. After a signal, such as that of Ctrl-C, wait until the active runs have
        saved and ended.
        """
        handlers = {}
        for number in SIGNALS:
            # A signal that is ignored, such as SIGHUP under nohup, must stay ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                handlers[number] = signal.signal(number, lambda n, _: self._signals.append(n))
        try:
            while self._active or (self._waiting and not self._signals):
                self._fill_slots()
                self._stop_active()
                for slot in list(self._active):
                    self._check_slot(slot)
                self._progress.update(self._finished_flops, self._line)
                time.sleep(self._pause)
        finally:
            self._progress.end()
            # Runs are still active only after an error. Nothing would record their results.
            for active in self._active.values():
                active.process.kill()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _fill_slots(self) -> None:
        """Start waiting runs in the free slots."""
        for slot in range(self._slots):
            if self._waiting and slot not in self._active and not self._signals:
                run = self._waiting.pop(0)
                self._start_phase(run, slot, time.monotonic())

    def _start_phase(self, run: PlannedRun, slot: int, started: float, phase: int = 0) -> None:
        """Start a phase of a run in a free slot. The first phase was started at `started`."""
        _, module, arguments = run.phases[phase]
        process = self._start(module, arguments, run.log, slot)
        self._active[slot] = _Active(run, process, phase, started)

    def _stop_active(self) -> None:
        """After a signal, terminate the active runs; after a second Ctrl-C, kill them."""
        if self._signals and not self._is_stopping:
            self._is_stopping = True
            self._progress.end()
            message = f"{signal.Signals(self._signals[0]).name}: saving and ending"
            if self._signals[0] == signal.SIGINT:
                message += "; a second Ctrl-C kills the runs"
            command_line.log(message)
        for active in self._active.values():
            if self._signals.count(signal.SIGINT) > 1:
                active.process.kill()
            elif self._signals and not active.terminated:
                active.process.terminate()
                active.terminated = True

    def _check_slot(self, slot: int) -> None:
        """If the process in a slot has ended, start the next phase of its run, or record how the
        run ended.
        """
        active = self._active[slot]
        status = active.process.poll()
        if status is None:
            return
        del self._active[slot]
        run = active.run
        # After EXIT_RESTART, the same phase starts again, and continues from its checkpoint.
        next_phase = active.phase
        if status == 0:
            next_phase += 1
        seconds = time.monotonic() - active.started
        if next_phase == len(run.phases):
            self._conclude(run, seconds)
        elif status == EXIT_DIVERGED and run.may_diverge:
            self._conclude(run, seconds, "diverged")
        elif self._signals:
            return  # the same command continues the run
        elif status in (0, EXIT_RESTART):
            self._start_phase(run, slot, active.started, next_phase)
        else:
            reason = f"{active.phase_name} ended with status {status}"
            self._fail(run, f"{reason}{_last_error(run)}")

    def _conclude(self, run: PlannedRun, seconds: float, end: str = "finished") -> None:
        """Have the results of a run recorded, and log how it ended."""
        try:
            self._on_finished(run, seconds)
        # Invalid results of one run must not end the other runs.
        except (ValueError, KeyError, OSError) as error:
            self._fail(run, f"its results cannot be recorded: {type(error).__name__}: {error}")
            return
        self._finished += 1
        self._finished_flops += run.flops
        self._progress.end()
        finished = f"{self._finished} of {counted(self._total, 'run')}"
        command_line.log(f"{finished}: {run.name}, {end} in {duration(seconds)}")

    def _fail(self, run: PlannedRun, reason: str) -> None:
        """Record and log that a run failed."""
        self.failed[run.name] = f"{reason}; the output is in {run.log}"
        # The time that is left is that of the runs that have not been tried.
        self._finished_flops += run.flops
        self._progress.end()
        command_line.log(f"failed: {run.name}: {self.failed[run.name]}")

    def _line(self, _: float) -> str:
        """Return the line that shows the progress; the argument, the seconds so far, is unused."""
        line = f"{self._finished} of {counted(self._total, 'run')} finished"
        running = [f"{active.run.name} ({active.phase_name})" for active in self._active.values()]
        if running:
            line += f"; running: {', '.join(running)}"
        if self._signals:
            line += "; saving and ending"
        return line


def _flops(runs: Sequence[PlannedRun]) -> int:
    """Return the FLOPs of the training of all `runs`."""
    return sum(run.flops for run in runs)


def _last_error(run: PlannedRun) -> str:
    """Return, in parentheses, the last line of a run's log that contains "error", or "" without
    one.
    """
    # A log that somebody has removed must not end the comparison.
    with contextlib.suppress(OSError):
        # The error that ended a program is at the end of its log.
        lines = run.log.read_text(encoding="utf-8", errors="replace")[-8192:].splitlines()
        for line in reversed(lines):
            if "error" in line.lower():
                return f" ({line[:600]})"
    return ""
