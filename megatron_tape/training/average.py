"""Average the fp32 weights over training steps (`train.average`), sharded over ranks like the
optimizer's state.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from megatron_tape.config.train import TrainConfig
from megatron_tape.model.names import AVERAGE


class WeightAverage:
    """The average of `weights`, the fp32 tensors that `optimizer` updates.

    From the first update on, the optimizer's state contains the average. It is therefore sharded,
    saved and restored with the moments. `update` must copy `weights` to the model.
    """

    def __init__(
        self,
        config: TrainConfig,
        optimizer: torch.optim.Optimizer,
        weights: list[Tensor],
        update: Callable[[], None],
    ):
        self._settings = config.average
        self._steps = config.steps
        self._state = optimizer.state
        self._weights = weights
        self._update = update

    @torch.no_grad()
    def add(self, step: int, updates: int, skipped: bool) -> None:
        """Update the average with the weights after `step`; see `AverageSettings.share` for the
        arguments.
        """
        fraction = self._settings.share(step, self._steps, updates, skipped)
        for tensor in self._weights:
            state = self._state[tensor]
            if AVERAGE not in state:
                state[AVERAGE] = tensor.detach().clone()
            elif fraction:
                state[AVERAGE].lerp_(tensor, fraction)

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Swap the model's weights and their average within the context."""
        self._exchange()
        yield
        self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for tensor in self._weights:
            average = self._state[tensor][AVERAGE]
            tensor.data, average.data = average.data, tensor.data
        self._update()
