"""How far the position state has moved from RoPE: its norms and those of its last update, by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_tape.training.hooks import Hook, HookResult, Training

if TYPE_CHECKING:
    from megatron_tape.model.language_model import LanguageModel
    from megatron_tape.model.pipeline import Pipeline
    from megatron_tape.training.engine import StepResult

NAMES = ("state_norm", "update_norm")


class PositionNorms(Hook):
    """Root mean squares of the position state's complex numbers and of their last update; nothing without updates.

    For RoPE the state's is 1 (with yarn, its attention factor) and the update's 0; together they show how far TAPE has
    moved from RoPE. Every logged step gives figures by layer.
    """

    def before_step(self, trainer: Training, step: int) -> None:
        """Let the updates record their norms if the step is logged."""
        self._record(trainer, trainer.logs(step))

    def after_step(self, trainer: Training, step: int, result: StepResult) -> HookResult:
        """Return `position/state_norm/layer_LL` and `position/update_norm/layer_LL`."""
        self._record(trainer, False)
        if not trainer.logs(step) or (norms := _norms(trainer.model)) is None:
            return HookResult()
        totals = {layer: sums.sum(-1) for layer, sums in norms.items()}
        means = {layer: (sums[:2] / sums[2:]).sqrt().tolist() for layer, sums in totals.items()}
        return HookResult(
            scalars={
                f"position/{name}/layer_{layer:02d}": value
                for layer, pair in means.items()
                for name, value in zip(NAMES, pair)
            }
        )

    def _record(self, trainer: Training, record: bool) -> None:
        for update in trainer.model.position_updates():
            update.record_norms = record


def _norms(model: LanguageModel | Pipeline) -> dict[int, Tensor] | None:
    """Return `LayerPosition.norms` (3, G), summed over all ranks, by layer; None if no layer rewrites the state."""
    layers = [layer for layer in range(model.model.num_layers) if model.encoding.updates(layer)]
    if not layers:
        return None
    own = {update.layer: update.norms for update in model.position_updates()}
    some = torch.zeros(3, model.model.query_groups, device=next(model.parameters()).device)
    totals = torch.stack([own.get(layer, some) for layer in layers])
    dist.all_reduce(totals)
    return dict(zip(layers, totals))
