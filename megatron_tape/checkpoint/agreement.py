"""Makes sure that when an operation fails on some ranks, every rank raises an error."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from megatron_tape.errors import CheckpointError, ConfigError, StaleAttempt
from megatron_tape.parallel.layout import ParallelLayout

if TYPE_CHECKING:
    from megatron_tape.run.attempts import Attempt


class Agreement:
    """Runs a block that may fail on some ranks, so that all ranks find out instead of waiting for each other."""

    def __init__(self, layout: ParallelLayout, attempt: Attempt | None = None):
        self._layout = layout
        self._attempt = attempt
        self._error: str | None = None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if not isinstance(error, Exception):
            return False
        self._error = str(error) if isinstance(error, (CheckpointError, ConfigError)) else f"{kind.__name__}: {error}"
        return True

    def check(self, what: str) -> None:
        """Raise the same error on every rank if the block failed on any; all ranks call this together after the block.

        Raises StaleAttempt if a newer attempt has taken over the run, otherwise CheckpointError with `what` and the
        reason.
        """
        failures: list[tuple[str | None, bool]] = [(None, False)] * self._layout.world_size
        dist.all_gather_object(failures, (self._error, self._error is not None and self._is_stale()))
        if any(stale for _, stale in failures):
            raise StaleAttempt(f"attempt {self._attempt.number} ends: a newer attempt has taken over this run")
        failed = [(rank, error) for rank, (error, _) in enumerate(failures) if error is not None]
        if failed:
            rank, error = failed[0]
            where = f" (rank {rank})" if self._layout.world_size > 1 else ""
            raise CheckpointError(f"{what}{where}: {error}")

    def _is_stale(self) -> bool:
        try:
            return self._attempt is not None and not self._attempt.is_owner()
        except OSError:  # a failing disk cannot say
            return False
