"""Hooks of the training loop: evaluations, and metrics of every logged step.

To add one, subclass `Hook`, `register` it by name, and list the name in `train.evaluations`. All ranks call a hook
together, so it may communicate. The result of rank 0 is logged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from megatron_tape.config.train import EVALUATIONS

if TYPE_CHECKING:
    from megatron_tape.config.schema import RunConfig
    from megatron_tape.data.batches import Batches
    from megatron_tape.data.tokenizer import Tokenizer
    from megatron_tape.model.language_model import LanguageModel
    from megatron_tape.parallel.layout import ParallelLayout
    from megatron_tape.run.metrics import MetricsWriter
    from megatron_tape.run.watch import Watch
    from megatron_tape.training.engine import Engine, StepResult


@dataclass(frozen=True)
class HookResult:
    """Results of a hook by name. A scalar has the same name in every log."""

    scalars: dict[str, float] = field(default_factory=dict)
    """Numbers for `metrics.jsonl`, TensorBoard and Weights & Biases."""
    texts: dict[str, str] = field(default_factory=dict)
    """Texts for TensorBoard."""
    words: dict[str, str] = field(default_factory=dict)
    """Short strings for `metrics.jsonl`, such as the name of a node."""


class Training(Protocol):
    """The part of `training.trainer.Trainer` that hooks may use; the state of the run on this rank."""

    config: RunConfig
    watch: Watch
    layout: ParallelLayout
    tokenizer: Tokenizer | None
    batches: Batches
    model: LanguageModel
    engine: Engine
    progress: dict[str, Any]
    """JSON that is saved in checkpoints and restored when the run continues. Replace it, do not modify it in place."""
    writer: MetricsWriter | None
    """None except on rank 0."""
    step: int
    """The last completed step."""
    samples: int
    """The number of sequences that the run has trained on or skipped."""
    enters_stage: bool
    """Whether the next step is the first one of another stage of `data.stages`."""

    def logs(self, step: int) -> bool:
        """Return whether the metrics of `step` are logged."""

    def evaluates(self, step: int) -> bool:
        """Return whether the model is evaluated after `step`."""


class Hook:
    """Base class of hooks; does nothing. Store state that a resumed run needs in `trainer.progress`."""

    def before_step(self, trainer: Training, step: int) -> None:
        """Run before training step `step`. See `trainer.logs(step)` and `trainer.evaluates(step)`."""

    def after_step(self, trainer: Training, step: int, result: StepResult) -> HookResult:
        """Run after training step `step`; the results are logged if the step is."""
        return HookResult()

    def due(self, trainer: Training, step: int) -> bool:
        """Return whether to evaluate after `step`. By default, every `train.eval_interval` steps and after the last."""
        interval, last = trainer.config.train.eval_interval, step == trainer.config.train.steps
        return interval is not None and (step % interval == 0 or last)

    def evaluate(self, trainer: Training, step: int) -> HookResult:
        """Evaluate the model after `step`."""
        return HookResult()


HOOKS: dict[str, Callable[[], Hook] | None] = dict.fromkeys(EVALUATIONS)
"""Functions that create hooks, by the names in `train.evaluations`; `built_in_hooks` adds the built-in ones."""


def register(name: str, kind: Callable[[], Hook]) -> None:
    """Register the hook that `kind()` creates under `name`, for `train.evaluations`, before settings are read."""
    HOOKS[name] = kind


def merge_results(results: Iterable[tuple[str, HookResult]]) -> HookResult:
    """Merge results of several hooks, given with the hooks' names. Raises ValueError if two share a name."""
    merged = HookResult()
    for hook, result in results:
        for kind in ("scalars", "texts", "words"):
            old, new = getattr(merged, kind), getattr(result, kind)
            if duplicates := old.keys() & new.keys():
                raise ValueError(f"evaluation {hook} returns {sorted(duplicates)[0]}, and so does another evaluation")
            old.update(new)
    return merged
