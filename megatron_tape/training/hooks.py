"""Hooks of the training loop, which run before and after steps and evaluate the model.

To add a hook, subclass `Hook`, `register` it under a name, and add the name to `train.evaluations`.
All ranks call a hook together, so it may use collective operations. The result of rank 0 is logged.
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
    """What a hook logs, by name."""

    scalars: dict[str, float] = field(default_factory=dict)
    """Numbers for `metrics.jsonl`, TensorBoard and Weights & Biases, under the same name in each.
    """
    texts: dict[str, str] = field(default_factory=dict)
    """Texts for TensorBoard."""
    words: dict[str, str] = field(default_factory=dict)
    """Short strings for `metrics.jsonl`, such as the name of a node."""


class Training(Protocol):
    """The part of `training.trainer.Trainer` that hooks may use: the state of the run on this
    rank.
    """

    config: RunConfig
    watch: Watch
    layout: ParallelLayout
    tokenizer: Tokenizer | None
    batches: Batches
    model: LanguageModel
    engine: Engine
    progress: dict[str, Any]
    """JSON that is saved in checkpoints and restored when the run continues. Assign a new dict
    instead of modifying it, since a save in the background may be using it."""
    writer: MetricsWriter | None
    """Writes metrics; None except on rank 0."""
    step: int
    """The last completed step."""
    samples: int
    """The number of sequences that the run has trained on or skipped."""
    enters_stage: bool
    """Whether the next step is the first one of a new stage of `data.stages`."""

    def logs(self, step: int) -> bool:
        """Return whether the metrics of `step` are logged."""

    def evaluates(self, step: int) -> bool:
        """Return whether the model is evaluated after `step`."""


class Hook:
    """Base class of hooks, whose methods do nothing. Store state that a resumed run needs in
    `trainer.progress`.
    """

    def before_step(self, trainer: Training, step: int) -> None:
        """Run before training step `step`, which `trainer.logs(step)` and `trainer.evaluates(step)`
        describe.
        """

    def after_step(self, trainer: Training, step: int, result: StepResult) -> HookResult:
        """Run after training step `step`. The result is logged if `trainer.logs(step)`."""
        return HookResult()

    def due(self, trainer: Training, step: int) -> bool:
        """Return whether to call `evaluate` after `step`.

        By default, this is every `train.eval_interval` steps and after the last step; only after
        the last step if the interval is null, and never if it is 0.
        """
        return trainer.config.train.evaluates(step)

    def evaluate(self, trainer: Training, step: int) -> HookResult:
        """Evaluate the model after `step`, and return what to log."""
        return HookResult()


HOOKS: dict[str, Callable[[], Hook] | None] = dict.fromkeys(EVALUATIONS)
"""Functions that create hooks, by the names in `train.evaluations`. `built_in_hooks` adds those of
the project.
"""


def register(name: str, create: Callable[[], Hook]) -> None:
    """Add `name` to the names that `train.evaluations` accepts; `create()` must return the hook,
    such as a class.

    Call this before the settings are read.
    """
    HOOKS[name] = create


def merge_results(results: Iterable[tuple[str, HookResult]]) -> HookResult:
    """Merge (hook name, result) pairs. Raises ValueError if two results contain the same name."""
    merged = HookResult()
    for hook, result in results:
        for attribute in ("scalars", "texts", "words"):
            old = getattr(merged, attribute)
            new = getattr(result, attribute)
            if duplicates := old.keys() & new.keys():
                name = sorted(duplicates)[0]
                raise ValueError(
                    f"evaluation {hook} returns {name}, which another evaluation returns, too;"
                    " rename it"
                )
            old.update(new)
    return merged
