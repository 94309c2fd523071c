"""Protocols that higher packages implement: the engine whose state is saved, and the claim to write for a run."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from megatron_tape.parallel.layout import ParallelLayout


class EngineState(Protocol):
    """The part of `training.engine.Engine` that checkpoints use; keys look like `exp_avg/NAME`."""

    layout: ParallelLayout
    names: Mapping[str, nn.Parameter]
    trained: Mapping[str, nn.Parameter]
    optimizer_steps: int
    """Number of optimizer steps taken."""

    def state_sizes(self, frozen: bool) -> dict[str, int]:
        """Return the size in bytes of every tensor of this rank's shard, with or without the `frozen` parameters."""

    def training_state(self, owner: Callable[[str], int], frozen: bool) -> dict[str, Tensor]:
        """Return the tensors that this rank owns; `owner` maps a key to a rank among those with the same weights.

        All ranks call it together.
        """

    def load_training_state(
        self, read: Callable[[str], Tensor | None], optimizer_steps: int, names: Sequence[str]
    ) -> None:
        """Restore the state; `read` returns the tensor of a key, and `names` are the trained ones of all stages."""


class Claim(Protocol):
    """The part of `run.attempts.Attempt` that lets only one attempt at a run write checkpoints."""

    home: Path
    """The directory for files that are being written."""

    def check_owner(self) -> None:
        """Raise StaleAttempt if a newer attempt has taken over."""
