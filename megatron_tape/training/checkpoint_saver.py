"""Save a run's checkpoints, optionally in the background. Failed saves are skipped, except that of the last step."""

import contextlib
import logging
import math
import time
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from megatron_tape.checkpoint.directories import Source
from megatron_tape.checkpoint.writing import Save, Writer
from megatron_tape.config.schema import RunConfig
from megatron_tape.errors import CheckpointError
from megatron_tape.run.watch import Watch
from megatron_tape.text import counted
from megatron_tape.training.engine import Engine

logger = logging.getLogger(__name__)

LAST_SAVE_TRIES = 20
"""Attempts to save the last step."""
LAST_SAVE_WAIT = 30.0
"""Seconds between these attempts."""
POLL_SECONDS = 1.0


class CheckpointSaver:
    """Saves the checkpoints of a run. All ranks create it and call its methods together.

    With `checkpoint.asynchronous`, files are written while training continues; at most one save is pending.

    A failed save is logged and not retried before the next interval. The methods raise StaleAttempt if a newer attempt
    has taken over the run.
    """

    def __init__(
        self,
        engine: Engine,
        config: RunConfig,
        watch: Watch,
        frozen_from: Source | None = None,
        tokenizer_files: Mapping[str, bytes] = MappingProxyType({}),
    ):
        self._engine, self._config, self._watch = engine, config, watch
        self._writer = Writer(engine, config, watch.attempt, frozen_from, tokenizer_files)
        self._current: Save | None = None

    def save(self, step: int, samples: int, progress: dict, wait: bool) -> bool:
        """Save a checkpoint after `step` steps and `samples` sequences; return whether it is complete.

        Without `wait`, an asynchronous save is only started; `poll` and `finish` complete it. The save of the last step
        is retried until the process is asked to stop. Raises CheckpointError if the last step cannot be saved.
        """
        self.finish()
        if step == self._config.train.steps:
            return self._save_last(step, samples, progress)
        self._watch.progress("saving")
        in_thread = self._config.checkpoint.asynchronous and not wait
        with self._failure_reported():
            self._current = Save(self._writer, step, samples, progress, in_thread=in_thread)
        return False if in_thread else self.finish()

    def poll(self) -> None:
        """Advance a pending save if every rank is ready for that; called between steps."""
        if self._current is not None and not self._engine.layout.any_rank(self._current.busy):
            self._advance()

    def finish(self) -> bool:
        """Wait for the pending save, if there is one; return whether it is complete."""
        complete = False
        while self._current is not None:
            self._watch.progress("saving")
            complete = self._advance()
        return complete

    def _advance(self) -> bool:
        path = None
        with self._failure_reported():
            path = self._current.advance()
        if path is not None:
            self._current = None
            logger.info("saved %s", path)
        return path is not None

    @contextlib.contextmanager
    def _failure_reported(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            self._current = None
            _warn(error, "at the next interval")

    def _save_last(self, step: int, samples: int, progress: dict) -> bool:
        for tries_left in reversed(range(LAST_SAVE_TRIES)):
            self._watch.progress("saving")
            try:
                path = self._writer.save(step, samples, progress)
            except CheckpointError as error:
                if tries_left == 0:
                    raise
                _warn(error, f"in {LAST_SAVE_WAIT:g} s, {counted(tries_left, 'time')} more")
                if _wait_to_retry(self._engine, self._watch, LAST_SAVE_WAIT):
                    return False
            else:
                logger.info("saved %s", path)
                return True
        return False


def _warn(error: CheckpointError, next_try: str) -> None:
    logger.warning("warning: %s; earlier checkpoints are intact, the next attempt is %s", error, next_try)


def _wait_to_retry(engine: Engine, watch: Watch, seconds: float) -> bool:
    """Wait before the next attempt; return early, and true, on every rank if any rank is asked to stop."""
    for _ in range(math.ceil(seconds / POLL_SECONDS)):
        if engine.layout.any_rank(watch.stop is not None):
            return True
        watch.progress("waiting to save")
        time.sleep(min(seconds, POLL_SECONDS))
    return engine.layout.any_rank(watch.stop is not None)
