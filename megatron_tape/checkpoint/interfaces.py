"""Protocols that higher packages implement: the engine whose state is saved, and the run's
attempt.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from megatron_tape.parallel.layout import ParallelLayout


class EngineState(Protocol):
    """The part of `training.engine.Engine` that checkpoints use. Tensors have keys such as
    `exp_avg/NAME`.
    """

    layout: ParallelLayout
    names: Mapping[str, nn.Parameter]
    """All parameters by name."""
    trained: Mapping[str, nn.Parameter]
    """The parameters that are not frozen."""
    optimizer_steps: int
    """Number of updates so far; skipped steps do not count."""

    def state_sizes(self, frozen: bool) -> dict[str, int]:
        """Return the size in bytes of each tensor of this rank's shard; `frozen` includes frozen
        parameters.
        """

    def training_state(self, owner: Callable[[str], int], frozen: bool) -> dict[str, Tensor]:
        """Return the tensors that this rank owns, by key. All ranks call this together.

        `owner(key)` is the owner's index among the ranks with the same weights. `frozen` includes
        frozen parameters.
        """

    def load_training_state(
        self, read: Callable[[str], Tensor | None], optimizer_steps: int, names: Sequence[str]
    ) -> None:
        """Restore the state: `read(key)` returns a tensor, and `names` are the trained parameters
        of all stages.
        """


class Claim(Protocol):
    """The part of `run.attempts.Attempt` which ensures that only one attempt at a run writes
    checkpoints.
    """

    home: Path
    """The attempt's directory for files that are being written."""

    def check_owner(self) -> None:
        """Raise StaleAttempt if a newer attempt has taken over the run."""
