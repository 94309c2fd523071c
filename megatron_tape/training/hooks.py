"""What runs in addition to the training steps: evaluations, and figures of every logged step.

A new one is a subclass of `Hook` in a file of its own, entered by name in `training.evaluations` and switched on by
`train.evaluations`. All ranks call a hook together, so it may communicate; rank 0's findings are written.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron_tape.training.evaluations import EVALUATIONS, TASK_HOOKS
from megatron_tape.training.sampling import sample_text

if TYPE_CHECKING:
    from megatron_tape.config.schema import RunConfig
    from megatron_tape.training.engine import StepResult
    from megatron_tape.training.trainer import Trainer


@dataclass(frozen=True)
class HookResult:
    """What a hook found, by name; names with a slash are used as TensorBoard tags unchanged."""

    scalars: dict[str, float] = field(default_factory=dict)
    """Figures for TensorBoard and `metrics.jsonl`."""
    texts: dict[str, str] = field(default_factory=dict)
    """Texts for TensorBoard."""
    pictures: dict[str, bytes] = field(default_factory=dict)
    """Pictures for TensorBoard, as PNG."""


class Hook:
    """Does nothing. A hook may keep state between the calls, but none that a resumed run would miss."""

    def before_step(self, trainer: Trainer, step: int) -> None:
        """Prepare for training step `step`; `trainer.logs(step)` and `trainer.evaluates(step)` say what follows it."""

    def after_step(self, trainer: Trainer, step: int, result: StepResult) -> HookResult:
        """Look at what the step did; the findings are written where the step is logged."""
        return HookResult()

    def due(self, trainer: Trainer, step: int) -> bool:
        """Return whether to evaluate after `step`: here, every `train.eval_interval` steps and after the last."""
        interval, last = trainer.config.train.eval_interval, step == trainer.config.train.steps
        return interval is not None and (step % interval == 0 or last)

    def evaluate(self, trainer: Trainer, step: int) -> HookResult:
        """Evaluate the model after `step`."""
        return HookResult()


class ValidationLoss(Hook):
    """The mean loss of `train.eval_steps` global batches of the validation split."""

    def evaluate(self, trainer: Trainer, step: int) -> HookResult:
        """Return `validation_loss`."""
        batches = trainer.watch.each("evaluating", trainer.batches.evaluation())
        return HookResult(scalars={"validation_loss": trainer.engine.evaluate(batches)})


class Sample(Hook):
    """Text that continues `logging.sample_prompt`; nothing without a tokenizer, or if `sample_tokens` is 0."""

    def evaluate(self, trainer: Trainer, step: int) -> HookResult:
        """Return the text `sample`."""
        settings = trainer.config.logging
        if trainer.tokenizer is None or settings.sample_tokens == 0:
            return HookResult()
        trainer.watch.progress("sampling text")
        prompt, length, context = settings.sample_prompt, settings.sample_tokens, trainer.config.model.seq_length
        return HookResult(texts={"sample": sample_text(trainer.engine, trainer.tokenizer, prompt, length, context)})


def build_hooks(config: RunConfig) -> dict[str, Hook]:
    """Return the hooks that `train.evaluations` names, in their order, and those of the section `evaluation`."""
    hooks = {}
    for name in config.train.evaluations:
        module, _, kind = EVALUATIONS[name].partition(":")
        hooks[name] = getattr(importlib.import_module(module), kind)()
    return hooks | (importlib.import_module(TASK_HOOKS).task_hooks(config) if config.evaluation.given() else {})


def joined(findings: Iterable[tuple[str, HookResult]]) -> HookResult:
    """Return the findings of several hooks, each with the hook's name, as one; ValueError where two share a name."""
    whole = HookResult()
    for hook, found in findings:
        for kind in ("scalars", "texts", "pictures"):
            held, new = getattr(whole, kind), getattr(found, kind)
            if twice := held.keys() & new.keys():
                raise ValueError(f"the evaluation {hook} returns {sorted(twice)[0]}, which another one returned before")
            held.update(new)
    return whole
