"""How far the position state has moved from RoPE: its norms and those of its last update, by layer and head group."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_tape.training.hooks import Hook, HookResult, Training

if TYPE_CHECKING:
    from megatron_tape.training.engine import StepResult

NAMES = ("state_norm", "update_norm")


class PositionNorms(Hook):
    """Root mean squares of the position state's complex numbers and of their last update; nothing without updates.

    For RoPE the state's is 1 (with yarn, its attention factor) and the update's 0; together they show how far TAPE has
    moved from RoPE. Every logged step gives figures by layer, and evaluations give a picture by layer and head group.
    """

    def before_step(self, trainer: Training, step: int) -> None:
        """Let the updates record their norms if the step is logged."""
        trainer.model.record_position_norms(trainer.logs(step))

    def after_step(self, trainer: Training, step: int, result: StepResult) -> HookResult:
        """Return `position/state_norm/layer_LL` and `position/update_norm/layer_LL`."""
        trainer.model.record_position_norms(False)
        norms = [update.norms for update in trainer.model.position_updates()]
        if not norms or not trainer.logs(step):
            return HookResult()
        totals = torch.stack(norms).sum(-1)
        dist.all_reduce(totals)
        means = (totals[:, :2] / totals[:, 2:]).sqrt().tolist()
        return HookResult(
            scalars={
                f"position/{name}/layer_{layer:02d}": value
                for layer, pair in enumerate(means)
                for name, value in zip(NAMES, pair)
            }
        )

    def evaluate(self, trainer: Training, step: int) -> HookResult:
        """Return the picture `position/norms` if TensorBoard files are written."""
        updates = trainer.model.position_updates()
        if not updates or not trainer.config.logging.tensorboard:
            return HookResult()
        totals = torch.stack([update.norms for update in updates])
        dist.all_reduce(totals)
        if trainer.writer is None:
            return HookResult()
        return HookResult(pictures={"position/norms": picture((totals[:, :2] / totals[:, 2:]).sqrt())})


def picture(norms_L2G: Tensor) -> bytes:
    """Draw, as PNG, the norms of the state and of its update (layers, 2, head groups)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    layers, _, groups = norms_L2G.shape
    figure = Figure(figsize=(9, 2 + 0.15 * layers), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, name, norms_LG in zip(figure.subplots(1, 2), NAMES, norms_L2G.cpu().unbind(1)):
        image = axes.imshow(norms_LG.numpy(), aspect="auto", interpolation="nearest")
        axes.set(title=name.replace("_", " "), xlabel="head group", ylabel="layer")
        axes.set_xticks(range(0, groups, max(1, groups // 8)))
        axes.set_yticks(range(0, layers, max(1, layers // 16)))
        figure.colorbar(image, ax=axes)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()
