"""Do runs side by side, each training and then evaluation, and tell how far they are."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from megatron_tape import command_line
from megatron_tape.command_line import counted, duration
from megatron_tape.errors import ConfigError
from pretrain.comparison.plan import Run
from pretrain.comparison.processes import Process, Start

_PAUSE = 0.2
_TRAINING = 0.95
"""Share of a run's time that goes into training, for the estimate of the time left."""


@dataclass
class _Active:
    """A run that is being done."""

    run: Run
    process: Process
    stage: int = 0
    asked: int | None = None
    """The last signal that asked its process to end."""
    started: float = field(default_factory=time.monotonic)

    @property
    def share(self) -> float:
        return _TRAINING * self.run.share_done() if self.stage == 0 else _TRAINING

    def __str__(self) -> str:
        name, config = self.run.stages[self.stage][0], self.run.config
        step = round(self.run.share_done() * config.train.steps)
        return f"{self.run.name} ({f'step {step:,} of {config.train.steps:,}' if self.stage == 0 else name})"


class Jobs:
    """Does runs, `slots` at a time; `finish` is called with a run and its seconds when all its stages have ended well.

    A run that fails does not keep the others from being done; `failed` says why, by the run's name.
    """

    def __init__(self, runs: list[Run], slots: int, start: Start, finish: Callable[[Run, float], None]):
        self._waiting, self._slots, self._start, self._finish = list(runs), slots, start, finish
        self._active: dict[int, _Active] = {}
        self._total, self._done, self._before = len(runs), 0, {run.name: run.share_done() for run in runs}
        self._ended = 0.0
        self.failed: dict[str, str] = {}
        self._signals: list[int] = []

    @property
    def stopped(self) -> int | None:
        """The signal that ended the work before its end, if there was one."""
        return self._signals[0] if self._signals else None

    def run(self) -> None:
        """Do all runs; after a signal such as Ctrl-C, have those that are being done save and end, and return."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
        kept = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]  # as nohup does
        handlers = {number: signal.signal(number, self._on_signal) for number in kept}
        # Work is counted in shares of runs, of which those of earlier commands are left out.
        work = sum(1 - _TRAINING * share for share in self._before.values())
        progress = command_line.Progress(round(1000 * work))
        try:
            while self._active or (self._waiting and not self._signals):
                self._fill()
                self._look(progress)
                gone = sum(active.share - _TRAINING * self._before[active.run.name] for active in self._active.values())
                progress.update(max(0, round(1000 * (self._ended + gone))), self._line)
                time.sleep(_PAUSE)
        finally:
            progress.end()
            for active in self._active.values():
                active.process.send_signal(signal.SIGKILL)
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: object) -> None:
        self._signals.append(number)

    def _fill(self) -> None:
        """Start what there is room for; after a signal ask what runs to save and end, after a second Ctrl-C end it."""
        for slot in range(self._slots):
            if self._waiting and slot not in self._active and not self._signals:
                run = self._waiting.pop(0)
                _, module, arguments = run.stages[0]
                self._active[slot] = _Active(run, self._start(module, arguments, run.log, slot))
        ask = signal.SIGKILL if self._signals.count(signal.SIGINT) > 1 else signal.SIGTERM
        for active in self._active.values() if self._signals else ():
            if active.asked != ask:
                active.process.send_signal(ask)
                active.asked = ask

    def _look(self, progress: command_line.Progress) -> None:
        for slot, active in list(self._active.items()):
            status = active.process.poll()
            if status is None:
                continue
            run, stage = active.run, active.stage + 1
            if status == 0 and stage < len(run.stages) and self.stopped is None:
                _, module, arguments = run.stages[stage]
                active.process = self._start(module, arguments, run.log, slot)
                active.stage, active.asked = stage, None
                continue
            del self._active[slot]
            self._ended += 1 - _TRAINING * self._before[run.name]
            if status == 0 and stage == len(run.stages):
                self._conclude(active, progress)
            elif self.stopped is None:
                self._fail(run, f"{run.stages[stage - 1][0]} ended with status {status}{_last_words(run)}", progress)

    def _conclude(self, active: _Active, progress: command_line.Progress) -> None:
        seconds = time.monotonic() - active.started
        try:
            self._finish(active.run, seconds)
        except (ConfigError, OSError) as error:
            self._fail(active.run, str(error), progress)
            return
        self._done += 1
        progress.end()
        command_line.say(
            f"{self._done} of {counted(self._total, 'run')}: {active.run.name}, finished in {duration(seconds)}"
        )

    def _fail(self, run: Run, reason: str, progress: command_line.Progress) -> None:
        self.failed[run.name] = f"{reason}; its output is in {run.log}"
        progress.end()
        command_line.say(f"failed: {run.name}: {self.failed[run.name]}")

    def _line(self, _: float) -> str:
        running = ", ".join(map(str, self._active.values()))
        asked = "; they save and end" if running and self.stopped is not None else ""
        return (
            f"{self._done} of {counted(self._total, 'run')} finished{'; running: ' if running else ''}{running}{asked}"
        )


def _last_words(run: Run) -> str:
    """Return the last line of a run's output that reports an error."""
    try:
        with open(run.log, "rb") as file:
            file.seek(-min(8192, file.seek(0, 2)), 2)
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    errors = [line for line in lines if "error" in line.lower()]
    return f" ({errors[-1][:600]})" if errors else ""
