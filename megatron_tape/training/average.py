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
    saved and restored with the moments. `copy_to_model` must copy `weights` to the model, in the
    model's precision.
    """

    def __init__(
        self,
        config: TrainConfig,
        optimizer: torch.optim.Optimizer,
        weights: list[Tensor],
        copy_to_model: Callable[[], None],
    ):
        self._settings = config.average
        self._steps = config.steps
        self._state = optimizer.state
        self._weights = weights
        self._copy_to_model = copy_to_model

    @torch.no_grad()
    def add(self, step: int, updates: int, skipped: bool) -> None:
        """Update the average with the weights after `step`.

        `updates` is the number of updates so far, without skipped steps. `skipped` is whether
        `step` skipped its update.
        """
        # The average moves toward the weights by this fraction of the difference.
        fraction = self._settings.share(step, self._steps, updates, skipped)
        for tensor in self._weights:
            state = self._state[tensor]
            # The average starts as the weights after the first update.
            if AVERAGE not in state:
                state[AVERAGE] = tensor.detach().clone()
            elif fraction:
                state[AVERAGE].lerp_(tensor, fraction)

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Give the model the averaged weights within the context, and its own weights after it.

        If the context raises, the weights stay swapped, because an error ends the run.
        """
        self._exchange()
        yield
        self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        """Swap the weights and their average in the optimizer, and copy the result to the model."""
        # ZeRO refers to these tensor objects. So keep the objects, and exchange their storage.
        for tensor in self._weights:
            average = self._state[tensor][AVERAGE]
            tensor.data, average.data = average.data, tensor.data
        self._copy_to_model()
