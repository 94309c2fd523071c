"""Saving with retries: a failing disk may cost the run a checkpoint, but not the last one."""

import logging
import math
import time

from megatron_tape.checkpoint import saving as checkpoints
from megatron_tape.checkpoint.directories import Source
from megatron_tape.command_line import counted
from megatron_tape.config.schema import RunConfig
from megatron_tape.errors import CheckpointError
from megatron_tape.run.watch import Watch
from megatron_tape.training.engine import Engine

logger = logging.getLogger(__name__)

LAST_SAVE_TRIES = 20
LAST_SAVE_WAIT = 30.0
"""Seconds between two attempts to save."""
POLL_SECONDS = 1.0


def save(
    engine: Engine,
    config: RunConfig,
    step: int,
    progress: dict,
    watch: Watch,
    frozen_from: Source | None = None,
) -> bool:
    """Save a checkpoint after `step` steps (see `save_checkpoint`); return whether that succeeded.

    All ranks call it together.

    If the disk fails, the next checkpoint is due as usual. At the last step, the save is tried again until `watch` is
    asked to stop.

    Raises StaleAttempt if a newer attempt has taken over the run, CheckpointError if the last step cannot be saved.
    """
    last = step == config.train.steps
    for tries_left in reversed(range(LAST_SAVE_TRIES if last else 1)):
        watch.progress("saving")
        try:
            path = checkpoints.save_checkpoint(engine, config, step, progress, watch.attempt, frozen_from)
        except CheckpointError as error:
            if last and tries_left == 0:
                raise
            when = f"in {LAST_SAVE_WAIT:g} s, {counted(tries_left, 'time')} more" if last else "at the next interval"
            logger.warning("warning: %s; the checkpoints before are whole, the next try is %s", error, when)
            if last and _asked_to_stop(engine, watch, LAST_SAVE_WAIT):
                return False
        else:
            logger.info("saved %s", path)
            return True
    return False


def _asked_to_stop(engine: Engine, watch: Watch, seconds: float) -> bool:
    """Wait between attempts; every rank returns at once if any rank is asked to stop."""
    for _ in range(math.ceil(seconds / POLL_SECONDS)):
        if engine.layout.any_rank(watch.stop is not None):
            return True
        watch.progress("waiting to save")
        time.sleep(min(seconds, POLL_SECONDS))
    return engine.layout.any_rank(watch.stop is not None)
