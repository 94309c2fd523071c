"""Do runs side by side, each training and then evaluation, and tell how far they are."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from megatron_tape import command_line
from megatron_tape.errors import EXIT_RESTART, UserError
from megatron_tape.text import counted, duration
from pretrain.comparison.planned_runs import PlannedRun
from pretrain.comparison.programs import SIGNALS

_TRAINING = 0.95
"""Share of a run's time that goes into training, for the estimate of the time left."""


@dataclass
class _Active:
    """A run that is being done."""

    run: PlannedRun
    process: subprocess.Popen
    stage: int = 0
    asked: str = ""
    """How its process was last asked to end."""
    started: float = field(default_factory=time.monotonic)

    @property
    def share(self) -> float:
        return _TRAINING * self.run.share_done() if self.stage == 0 else _TRAINING

    def ask(self, how: str) -> None:
        """Have the process end, by its method `terminate` or `kill`."""
        if self.asked != how:
            getattr(self.process, how)()
            self.asked = how

    def __str__(self) -> str:
        name, steps = self.run.stages[self.stage][0], self.run.config.train.steps
        step = round(self.run.share_done() * steps)
        return f"{self.run.name} ({f'step {step:,} of {steps:,}' if self.stage == 0 else name})"


class Jobs:
    """Does runs, `slots` at a time; `finish` is called with a run and its seconds when all its stages have ended well.

    `start` starts a module, given its arguments, log and slot. A run that fails does not keep the others from being
    done; `failed` says why, by the run's name.
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
        self._total, self._done, self._before = len(runs), 0, {run.name: run.share_done() for run in runs}
        # Work is counted in shares of runs, of which those of earlier commands are left out.
        self._ended = 0.0
        self._progress = command_line.Progress(round(1000 * sum(map(self._work, runs))))
        self._signals: list[int] = []
        self.failed: dict[str, str] = {}

    @property
    def stopped(self) -> int | None:
        """The signal that ended the work before its end, if there was one."""
        return self._signals[0] if self._signals else None

    def _work(self, run: PlannedRun) -> float:
        return 1 - _TRAINING * self._before[run.name]

    def run(self) -> None:
        """Do all runs; after a signal such as Ctrl-C, have those that are being done save and end, and return."""
        kept = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # as nohup does
        handlers = {number: signal.signal(number, lambda number, _: self._signals.append(number)) for number in kept}
        try:
            while self._active or (self._waiting and not self._signals):
                self._start_and_stop()
                for slot in list(self._active):
                    self._look_at(slot)
                gone = sum(active.share - _TRAINING * self._before[active.run.name] for active in self._active.values())
                self._progress.update(max(0, round(1000 * (self._ended + gone))), self._line)
                time.sleep(self._pause)
        finally:
            self._progress.end()
            for active in self._active.values():
                active.ask("kill")
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _start_and_stop(self) -> None:
        """Start what there is room for; after a signal ask what runs to save and end, after a second Ctrl-C end it."""
        for slot in range(self._slots):
            if self._waiting and slot not in self._active and not self._signals:
                run = self._waiting.pop(0)
                if (process := self._started(run, 0, slot)) is not None:
                    self._active[slot] = _Active(run, process)
        if self._signals:
            for active in self._active.values():
                active.ask("kill" if self._signals.count(signal.SIGINT) > 1 else "terminate")

    def _started(self, run: PlannedRun, stage: int, slot: int) -> subprocess.Popen | None:
        """Start a stage of a run; return its process, or None if that fails, which counts as the run's failure."""
        name, module, arguments = run.stages[stage]
        try:
            return self._start(module, arguments, run.log, slot)
        except (UserError, OSError, subprocess.SubprocessError) as error:
            self._ended += self._work(run)
            self._fail(run, f"{name} cannot be started ({error})")
            return None

    def _look_at(self, slot: int) -> None:
        """Go on with the run of a slot if its process has ended."""
        active = self._active[slot]
        run, status, stage = active.run, active.process.poll(), active.stage + 1
        if status is None:
            return
        if status == EXIT_RESTART and self.stopped is None:
            status, stage = 0, active.stage  # once more
        if status == 0 and stage < len(run.stages) and self.stopped is None:
            if (process := self._started(run, stage, slot)) is None:
                del self._active[slot]
            else:
                active.process, active.stage, active.asked = process, stage, ""
            return
        del self._active[slot]
        self._ended += self._work(run)
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
        command_line.say(f"{self._done} of {counted(self._total, 'run')}: {run.name}, finished in {took}")

    def _fail(self, run: PlannedRun, reason: str) -> None:
        self.failed[run.name] = f"{reason}; its output is in {run.log}"
        self._progress.end()
        command_line.say(f"failed: {run.name}: {self.failed[run.name]}")

    def _line(self, _: float) -> str:
        line = f"{self._done} of {counted(self._total, 'run')} finished"
        if self._active:
            line += f"; running: {', '.join(map(str, self._active.values()))}"
            line += "; they save and end" if self._signals else ""
        return line


def _last_words(run: PlannedRun) -> str:
    """Return the last line of a run's output that reports an error."""
    try:
        with open(run.log, "rb") as file:
            file.seek(-min(8192, file.seek(0, 2)), 2)
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    errors = [line for line in lines if "error" in line.lower()]
    return f" ({errors[-1][:600]})" if errors else ""
