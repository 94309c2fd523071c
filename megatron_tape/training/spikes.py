"""Detect spikes: steps whose loss or gradient norm is far above those of recent updates
(`train.spikes`).
"""

from __future__ import annotations

import contextlib
import logging
from statistics import median
from typing import TYPE_CHECKING

from megatron_tape.checkpoint.rank_errors import RankErrors
from megatron_tape.config.train import SpikeSettings
from megatron_tape.errors import Diverged, FileError
from megatron_tape.run.attempts import Spike
from megatron_tape.training.hooks import Hook, HookResult

if TYPE_CHECKING:
    from megatron_tape.training.engine import StepResult
    from megatron_tape.training.trainer import Trainer

logger = logging.getLogger(__name__)

STANDARD_PER_ABSOLUTE = 1.4826
"""Ratio of the standard deviation to the median absolute deviation of a normal distribution."""
SMALLEST_DEVIATION = 1e-3
"""Minimum of the standard deviation as a fraction of the median, so that noise on a plateau is no
spike.
"""
RECENT_VALUES = "spike_values"
SPIKE_COUNT = "spikes_found"
"""Keys in a checkpoint's `progress`: of `Spikes.values`, and of the number of spikes so far."""


class Rewind(Exception):
    """Raised on every rank to restart the run from its newest checkpoint. The message is the
    reason.
    """


class Spikes:
    """Detects spikes from the losses and gradient norms of the last `train.spikes.window`
    updates.
    """

    def __init__(self, settings: SpikeSettings, values: list[list[float]] | None = None):
        """Start with `values`, a list of recent losses and a list of recent gradient norms. None
        starts with empty lists.
        """
        self._settings = settings
        self.values = values or [[], []]
        """Recent losses, and recent gradient norms. `add` replaces the lists, which a checkpoint
        may refer to.
        """

    def is_spike(self, loss: float, norm: float) -> bool:
        """Return whether a step with this loss and gradient norm is a spike.

        In a spike, one of them exceeds the median of its recent values by more than
        `train.spikes.threshold` standard deviations. The standard deviation is estimated from the
        median absolute deviation. NaN is no spike, and neither is a step before `window` updates.
        """
        window = self._settings.window
        for values, value in zip(self.values, (loss, norm)):
            recent = values[-window:]
            if len(recent) == window:
                middle = median(recent)
                deviation = STANDARD_PER_ABSOLUTE * median(abs(x - middle) for x in recent)
                deviation = max(deviation, SMALLEST_DEVIATION * abs(middle))
                if value > middle + self._settings.threshold * deviation:
                    return True
        return False

    def add(self, loss: float, norm: float) -> None:
        """Add the loss and the gradient norm of an update."""
        losses, norms = self.values
        # Keep the last window - 1 of the earlier values.
        start = 1 - self._settings.window
        self.values = [[*losses[start:], loss], [*norms[start:], norm]]


class SpikeHook(Hook):
    """Detects spikes, and warns, skips the update, or raises `Rewind`, according to
    `train.spikes.action`.

    All ranks come to the same decision, since they have the same values.
    """

    def __init__(self, settings: SpikeSettings):
        self._settings = settings
        # Created in the first `before_step`, when `trainer.progress` has been restored.
        self._spikes: Spikes | None = None

    def before_step(self, trainer: Trainer, step: int) -> None:
        if self._spikes is None:
            self._spikes = Spikes(self._settings, trainer.progress.get(RECENT_VALUES))
            if self._settings.action == "skip":
                trainer.engine.set_skip_predicate(self._spikes.is_spike)
        if trainer.enters_stage:
            # Losses on the data of different stages are not comparable.
            self._spikes.values = [[], []]

    def after_step(self, trainer: Trainer, step: int, result: StepResult) -> HookResult:
        if result.finite:
            values = result.loss, result.grad_norm
            if self._settings.action == "skip":
                # The engine has called `is_spike` before the update, and skipped it for a spike.
                is_spike = result.skipped
            else:
                is_spike = trainer.layout.any_rank(self._spikes.is_spike(*values))
            if is_spike:
                self._handle_spike(trainer, step, *values)
            if not result.skipped:
                self._spikes.add(*values)
            trainer.progress = trainer.progress | {RECENT_VALUES: self._spikes.values}
        return HookResult()

    def _handle_spike(
        self,
        trainer: Trainer,
        step: int,
        loss: float,
        norm: float,
    ) -> None:
        """Log a spike, and record it in the attempt's directory.

        Raises Diverged after more than `train.spikes.limit` spikes, otherwise Rewind if the
        action is rewind.
        """
        action = self._settings.action
        number = trainer.progress.get(SPIKE_COUNT, 0) + 1
        trainer.progress = trainer.progress | {SPIKE_COUNT: number}
        if trainer.layout.rank == 0:
            spike = Spike(
                step=step,
                loss=loss,
                grad_norm=norm,
                action=action,
                number=number,
            )
            # This record is only a log, so a full disk must not end the run.
            with contextlib.suppress(OSError, FileError):
                trainer.watch.attempt.record_spike(spike)
        logger.warning(
            "spike at step %d (%s): loss %.4g, gradient norm %.4g (recent medians %.4g and %.4g)",
            step,
            action,
            loss,
            norm,
            *map(median, self._spikes.values),
        )

        if action == "warn":
            return
        if number > self._settings.limit:
            raise Diverged(
                f"step {step} is spike number {number} (loss {loss:.4g}, gradient norm {norm:.4g}),"
                f" but train.spikes.limit is {self._settings.limit}; lower optimizer.lr, check the"
                " data, or raise the limit"
            )
        if action == "rewind":
            # The restarted run reads this record, and skips the data up to the spike. Without the
            # record, it would train on the same data, and meet the same spike again.
            attempt = trainer.watch.attempt
            with RankErrors(trainer.layout, attempt.check_owner) as errors:
                if trainer.layout.rank == 0:
                    attempt.record_skipped_data(
                        {"step": step, "samples": trainer.samples, "spikes": number}
                    )
            errors.check(attempt.staging, "cannot record which data is skipped")
            raise Rewind(f"spike at step {step}: the run returns to its newest checkpoint")
