"""What checkpoints need of the packages above: an engine whose state is saved, and the claim to write for a run."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from megatron_tape.parallel.layout import ParallelLayout


class EngineState(Protocol):
    """The part of `training.engine.Engine` that is saved and restored; keys are such as `exp_avg/NAME`."""

    layout: ParallelLayout
    names: Mapping[str, nn.Parameter]
    trained: Mapping[str, nn.Parameter]
    optimizer_steps: int
    """How many steps Adam has taken."""

    def state_sizes(self, frozen: bool) -> dict[str, int]:
        """Return the bytes of every tensor of this rank's shard, with the `frozen` parameters or without them."""

    def training_state(self, owner: Callable[[str], int], frozen: bool) -> dict[str, Tensor]:
        """Return each tensor on its owner, one of the ranks with the same weights; all call it together."""

    def load_training_state(
        self, read: Callable[[str], Tensor | None], optimizer_steps: int, names: Sequence[str]
    ) -> None:
        """Restore the state from what `read` returns for each key of these trained parameters, those of all stages."""


class Claim(Protocol):
    """The part of `run.attempts.Attempt` that makes sure that only one attempt at a run writes checkpoints."""

    home: Path
    """The directory through which it writes."""

    def check_owner(self) -> None:
        """Raise StaleAttempt if a newer attempt has taken over."""
