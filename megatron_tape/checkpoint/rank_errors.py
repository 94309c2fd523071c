"""Make every rank raise an error when an operation fails on some ranks."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron_tape.errors import CheckpointError, StaleAttempt, UnexpectedCheckpointError, UserError
from megatron_tape.parallel.layout import ParallelLayout

T = TypeVar("T")
_CAN_PASS = (OSError, MemoryError, torch.OutOfMemoryError)
"""Errors whose cause can pass, such as a full disk, so that a retry may succeed."""
logger = logging.getLogger(__name__)


def on_rank_0(
    layout: ParallelLayout,
    path: Path,
    failure: str,
    action: Callable[[], T],
) -> T:
    """Run `action` on rank 0, and return its result on all ranks. All ranks call this together.

    If `action` raises, all ranks raise CheckpointError. Its subject is `path`, or that of the
    UserError that `action` has raised. `failure` introduces the message, such as `cannot start`.
    """
    result: list[T | None] = [None]
    with RankErrors(layout) as errors:
        if layout.rank == 0:
            result[0] = action()
    errors.check(path, failure)
    dist.broadcast_object_list(result, src=0)
    return result[0]


class RankErrors:
    """A context that catches this rank's exception, for `check` to raise it on all ranks.

    Without this, the other ranks would wait in the next collective operation forever.
    """

    def __init__(self, layout: ParallelLayout, check_owner: Callable[[], None] = lambda: None):
        """Create a context. `check_owner` must raise StaleAttempt if a newer attempt owns the
        run.
        """
        self._layout = layout
        self._check_owner = check_owner
        self._error: Exception | None = None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        self._error = error
        # KeyboardInterrupt and SystemExit end the process.
        return isinstance(error, Exception)

    def check(self, path: Path, failure: str) -> None:
        """Raise the same error on all ranks if the block failed on any. All ranks call this
        together after the block.

        Args:
            path: the subject of the error, unless it is a UserError, which has its own subject.
            failure: introduces the error in the message, such as `cannot read a checkpoint`.

        Raises:
            StaleAttempt: if a newer attempt owns the run. This error precedes the others.
            UnexpectedCheckpointError: if a rank failed with an error that is neither a UserError
                nor one that can pass. That rank logs its traceback.
            CheckpointError: if a rank failed with another error. If several ranks failed in this
                way, the error of the first of them is raised.
        """
        own_failure = None if self._error is None else self._failure(path)
        failures = self._layout.gather(own_failure)

        # Ranks may fail with different errors. An unexpected error precedes one that can pass, such
        # as a full disk, because a retry would meet the unexpected one again.
        for kind in (StaleAttempt, UnexpectedCheckpointError, CheckpointError):
            for rank, error in enumerate(failures):
                if isinstance(error, kind):
                    if isinstance(error, CheckpointError):
                        error = error.at(f"{failure} (rank {rank})")
                    raise error

    def _failure(self, path: Path) -> StaleAttempt | CheckpointError:
        """Return this rank's error as one that can be sent to the other ranks.

        The error of an attempt that no longer owns the run is StaleAttempt, whatever has failed.
        """
        try:
            self._check_owner()
        except StaleAttempt as error:
            return error
        except OSError:  # the disk fails, so who owns the run is unknown
            pass

        error = self._error
        if isinstance(error, UserError):
            return CheckpointError(error.subjects, error.problem, error.fix)

        problem = f"cannot be used ({type(error).__name__}: {error})"
        if isinstance(error, _CAN_PASS):
            return CheckpointError(path, problem)
        logger.error("unexpected error, to be reported by all ranks:", exc_info=error)
        return UnexpectedCheckpointError(str(path), problem)
