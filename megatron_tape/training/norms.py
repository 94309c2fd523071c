"""Hooks that log gradient norms by parameter kind, and norms of the position state by layer."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_tape.model.names import KINDS, kind_of
from megatron_tape.training.gradients import local_gradient
from megatron_tape.training.hooks import Hook, HookResult, Training

if TYPE_CHECKING:
    from megatron_tape.model.language_model import LanguageModel
    from megatron_tape.model.pipeline import Pipeline
    from megatron_tape.training.engine import Engine, StepResult

NAMES = ("state_norm", "update_norm")


class GradientNorms(Hook):
    """Logs the norms of the gradients by parameter kind (embeddings, attention, ...), before
    clipping.

    Each rank sums the squares in its partition of the gradients, so only these sums are
    communicated. The norms are computed only in logged steps.
    """

    def __init__(self) -> None:
        self._squares = torch.empty(0)

    def before_step(self, trainer: Training, step: int) -> None:
        if trainer.logs(step):
            trainer.engine.before_update = functools.partial(self._measure, trainer.engine)

    def due(self, trainer: Training, step: int) -> bool:
        return False

    def after_step(self, trainer: Training, step: int, result: StepResult) -> HookResult:
        """Return `grad_norm/KIND` for each of `KINDS` with trained parameters."""
        if not trainer.logs(step):
            return HookResult()
        trainer.engine.before_update = None
        dist.all_reduce(self._squares)
        squares, counts = self._squares.tolist()
        of_kinds = zip(KINDS, squares, counts)
        return HookResult(
            scalars={f"grad_norm/{kind}": square**0.5 for kind, square, count in of_kinds if count}
        )

    def _measure(self, engine: Engine) -> None:
        self._squares = squares_by_kind(engine)


@torch.no_grad()
def squares_by_kind(engine: Engine) -> Tensor:
    """Return two rows by parameter kind (2, len(KINDS)) in fp64: sums of squared gradients, and
    numbers of parameters.

    This rank's values cover its partition of the gradients. In the sum over all ranks, each element
    is counted once. Call this before the optimizer's step.
    """
    layout = engine.layout
    gradients: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}
    for name, parameter in engine.trained.items():
        replicated = not getattr(parameter, "tensor_model_parallel", False)
        if replicated and layout.tensor_parallel_rank > 0:
            continue  # tensor-parallel rank 0 counts it
        if (gradient := local_gradient(parameter, engine.zero_stage)) is not None:
            gradients[kind_of(name)].append(gradient)
    sums = torch.zeros(2, len(KINDS), dtype=torch.float64, device=layout.device)
    for number, of_kind in enumerate(gradients.values()):
        if of_kind:
            norms = torch.stack(torch._foreach_norm(of_kind)).to(layout.device, torch.float64)
            sums[0, number], sums[1, number] = norms.square().sum(), len(of_kind)
    return sums


class PositionNorms(Hook):
    """Logs the root mean squares of the position state's complex numbers and of their last update.

    For RoPE they are 1 (with yarn, the attention factor) and 0, so they show how far TAPE is from
    RoPE. Every logged step returns them by layer, and as root mean squares over the layers. Nothing
    is logged if no layer updates the state.
    """

    def before_step(self, trainer: Training, step: int) -> None:
        """Record the norms in this step if it is logged."""
        self._record(trainer, trainer.logs(step))

    def after_step(self, trainer: Training, step: int, result: StepResult) -> HookResult:
        """Return `position/state_norm`, `position/update_norm` and, by layer,
        `position/state_norm/layer_LL` ...
        """
        self._record(trainer, False)
        if not trainer.logs(step) or (norms := _norms(trainer.model)) is None:
            return HookResult()
        totals = {layer: sums.sum(-1) for layer, sums in norms.items()}
        by_layer = {layer: (sums[:2] / sums[2:]).sqrt().tolist() for layer, sums in totals.items()}
        scalars = {}
        for name, values in zip(NAMES, zip(*by_layer.values())):
            scalars[f"position/{name}"] = math.hypot(*values) / math.sqrt(len(values))
            scalars |= {
                f"position/{name}/layer_{layer:02d}": value
                for layer, value in zip(by_layer, values)
            }
        return HookResult(scalars=scalars)

    def _record(self, trainer: Training, record: bool) -> None:
        for update in trainer.model.updating_encodings():
            update.record_norms = record


def _norms(model: LanguageModel | Pipeline) -> dict[int, Tensor] | None:
    """Return `LayerEncoding.norms` (3, G) by layer, summed over all ranks; None if no layer updates
    the state.
    """
    layers = [layer for layer in range(model.model.num_layers) if model.encoding.updates(layer)]
    if not layers:
        return None
    local = {update.layer: update.norms for update in model.updating_encodings()}
    zeros = torch.zeros(3, model.model.query_groups, device=next(model.parameters()).device)
    totals = torch.stack([local.get(layer, zeros) for layer in layers])
    dist.all_reduce(totals)
    return dict(zip(layers, totals))
