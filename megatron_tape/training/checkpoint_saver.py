"""Save a run's checkpoints, optionally in the background. Only the save of the last step is retried
if it fails.
"""

import contextlib
import logging
import math
import time
from collections.abc import Iterator, Mapping

from megatron_tape.checkpoint.directories import FrozenWeightsSource
from megatron_tape.checkpoint.writing import Save, Writer
from megatron_tape.config.schema import RunConfig
from megatron_tape.errors import CheckpointError, TrainingStopped, UnexpectedCheckpointError
from megatron_tape.run.watch import Watch
from megatron_tape.text import counted
from megatron_tape.training.engine import Engine

logger = logging.getLogger(__name__)

LAST_SAVE_TRIES = 20
"""Maximum number of times to try to save the last step."""
LAST_SAVE_WAIT = 30.0
"""Seconds between two tries."""
NEXT_INTERVAL = "at the next checkpoint.interval"
"""When a failed save is tried again, in the words of the warning."""
POLL_SECONDS = 1.0
"""Seconds between two checks for a signal, while waiting for the next try."""


class CheckpointSaver:
    """Saves the checkpoints of a run. All ranks create a saver and call its methods together.

    With `checkpoint.asynchronous`, files are written while training continues; at most one save is
    pending. If a save fails for a reason that can pass, such as a full disk, a warning is logged,
    and the run saves again at the next `checkpoint.interval`.

    All methods raise StaleAttempt if a newer attempt has taken over the run. They raise
    TrainingStopped if a save fails for another reason, such as a bug, because every later save
    would fail too.
    """

    def __init__(
        self,
        engine: Engine,
        config: RunConfig,
        watch: Watch,
        frozen_from: FrozenWeightsSource | None,
        tokenizer_files: Mapping[str, bytes],
    ):
        """Create the saver of a run.

        Args:
            engine: contains the training state to save.
            config: the run's settings.
            watch: this process's watchdog.
            frozen_from: the checkpoint with the frozen parameters, which are then omitted; None to
                save them.
            tokenizer_files: the contents of the tokenizer's files by name.
        """
        self._engine = engine
        self._config = config
        self._watch = watch
        self._writer = Writer(engine, config, watch.attempt, frozen_from, tokenizer_files)
        self._pending: Save | None = None
        """The save that has been started and is not complete; None if there is none."""

    def save(
        self,
        step: int,
        samples: int,
        progress: dict,
        wait: bool,
    ) -> bool:
        """Save a checkpoint, and return whether it is complete on disk.

        If saves are asynchronous and `wait` is false, the save is only started; `poll` and `finish`
        complete it. The save of the last step is tried up to `LAST_SAVE_TRIES` times, or until a
        signal asks the process to stop. It raises CheckpointError if all tries fail.

        Args:
            step: the last completed step.
            samples: the number of sequences that the run has trained on or skipped.
            progress: other state of the run, as JSON (`Trainer.progress`).
            wait: whether to wait until the checkpoint is complete or has failed.
        """
        # At most one save is pending, since each has its own copy of the training state.
        self.finish()
        if step == self._config.train.steps:
            return self._save_last(step, samples, progress)

        self._watch.progress("saving")
        in_thread = self._config.checkpoint.asynchronous and not wait
        with self._failure_reported(NEXT_INTERVAL):
            self._pending = Save(self._writer, step, samples, progress, in_thread=in_thread)
        if in_thread:
            return False
        return self.finish()

    def poll(self) -> None:
        """Advance a pending save if its threads have finished on all ranks. Call this between
        steps.
        """
        if self._pending is not None and not self._engine.layout.any_rank(self._pending.is_busy):
            self._advance()

    def finish(self) -> bool:
        """Wait for the pending save, and return whether it succeeded; False if none is pending."""
        is_complete = False
        while self._pending is not None:
            self._watch.progress("saving")
            is_complete = self._advance()
        return is_complete

    def _advance(self) -> bool:
        """Advance the pending save, and return whether it is now complete.

        If the save fails, return False; no save is pending then.
        """
        path = None
        with self._failure_reported(NEXT_INTERVAL):
            path = self._pending.advance()
        if path is not None:
            self._pending = None
            logger.info("saved %s", path)
        return path is not None

    @contextlib.contextmanager
    def _failure_reported(self, next_try: str | None) -> Iterator[None]:
        """Log a warning if the save in the context fails, and set `_pending` to None.

        `next_try` says in the warning when the run saves again. If it is None, the run does not try
        again, and the error is raised instead.
        """
        try:
            yield
        except UnexpectedCheckpointError as error:
            self._pending = None
            raise TrainingStopped(
                f"{error}; every later save would fail too, so the run ends; earlier checkpoints"
                " are intact; the log has the traceback: report it, and try another"
                " deepspeed.zero_stage or layout"
            ) from None
        except CheckpointError as error:
            self._pending = None
            if next_try is None:
                raise
            logger.warning(
                "warning: %s; earlier checkpoints are intact, and saving is tried again %s",
                error,
                next_try,
            )

    def _save_last(self, step: int, samples: int, progress: dict) -> bool:
        """Save the last step, and return whether that succeeded before a signal asked to stop.

        Raises CheckpointError if the last try fails.
        """
        for tries_left in reversed(range(LAST_SAVE_TRIES)):
            self._watch.progress("saving")
            next_try = None
            if tries_left:
                next_try = f"in {LAST_SAVE_WAIT:g} s, at most {counted(tries_left, 'time')}"
            with self._failure_reported(next_try):
                path = self._writer.save(step, samples, progress)
                logger.info("saved %s", path)
                return True

            # The save has failed. Wait for the next try, or for a signal. All ranks must notice the
            # signal in the same iteration, so the number of iterations does not depend on a clock.
            for _ in range(math.ceil(LAST_SAVE_WAIT / POLL_SECONDS)):
                if self._engine.layout.any_rank(self._watch.stop is not None):
                    return False
                self._watch.progress("waiting to save")
                time.sleep(POLL_SECONDS)
        return False  # not reached: the last try returns or raises
