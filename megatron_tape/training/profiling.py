"""Trace training steps with torch's profiler, for chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from torch.profiler import ProfilerActivity, profile

from megatron_tape.config.train import ProfileSettings
from megatron_tape.training.hooks import Hook, HookResult

if TYPE_CHECKING:
    from megatron_tape.training.engine import StepResult
    from megatron_tape.training.trainer import Trainer

logger = logging.getLogger(__name__)

ON_SIGNAL = 2
"""Number of steps to profile after a signal."""


class Profiling(Hook):
    """Profiles the steps `train.profile.steps`, and the next `ON_SIGNAL` steps after a signal.

    Each rank in `train.profile.ranks` writes a trace to the directory `profile` of the run.
    """

    def __init__(self, settings: ProfileSettings):
        self._settings = settings
        self._requested = settings.steps
        """First and last step of the next trace, or of the one that is being recorded; None if no
        trace is due.
        """
        self._active: profile | None = None
        """The profiler of the trace that is being recorded; None if there is none."""
        self._first = 0
        """First step that `_active` has recorded."""

    def before_step(self, trainer: Trainer, step: int) -> None:
        # A signal that arrives while a trace is being recorded is ignored.
        if trainer.watch.take_profile_request() and self._active is None:
            self._requested = [step, step + ON_SIGNAL - 1]
        if self._requested is None or self._active is not None:
            return

        # Not only at the first step: a run may resume between the first and the last step, and then
        # profiles the rest of them.
        first, last = self._requested
        if first <= step <= last and trainer.layout.rank in self._settings.ranks:
            activities = [ProfilerActivity.CPU]
            if trainer.layout.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._active = profile(activities=activities)
            self._first = step
            self._active.start()

    def after_step(self, trainer: Trainer, step: int, result: StepResult) -> HookResult:
        if self._active is not None and step in (self._requested[1], trainer.config.train.steps):
            self._write_trace(trainer, step)
        return HookResult()

    def _write_trace(self, trainer: Trainer, step: int) -> None:
        """Stop the profiler after `step`, and write its trace; log a warning if that fails."""
        profiler = self._active
        self._active = None
        self._requested = None
        profiler.stop()
        directory = Path(trainer.config.logging.directory) / "profile"
        path = directory / f"steps-{self._first}-{step}-rank-{trainer.layout.rank}.json.gz"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:  # a full disk must not end the run
            logger.warning("warning: the profile %s cannot be written: %s", path, error)
        else:
            logger.info("wrote the profile %s", path)
