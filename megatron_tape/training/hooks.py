"""What runs in addition to the training steps: evaluations, and figures of every logged step.

A new one is a subclass of `Hook`, which `register` adds by name and `train.evaluations` switches on. All ranks call a
hook together, so it may communicate; what rank 0 returns is written.
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
    """What a hook found, by name; a scalar has its name in every record."""

    scalars: dict[str, float] = field(default_factory=dict)
    """Numbers for `metrics.jsonl`, TensorBoard and Weights & Biases."""
    texts: dict[str, str] = field(default_factory=dict)
    """Texts for TensorBoard."""
    words: dict[str, str] = field(default_factory=dict)
    """Words for `metrics.jsonl`, such as the name of a node."""


class Training(Protocol):
    """What hooks may read of the run on this rank, a `training.trainer.Trainer`."""

    config: RunConfig
    watch: Watch
    layout: ParallelLayout
    tokenizer: Tokenizer | None
    batches: Batches
    model: LanguageModel
    engine: Engine
    progress: dict[str, Any]
    """JSON that is saved with a checkpoint, and is there again when the run continues; to be replaced, not changed."""
    writer: MetricsWriter | None
    """None except on rank 0."""
    step: int
    """The last completed step."""
    samples: int
    """How many sequences the run has seen, and skipped, by then."""
    enters_stage: bool
    """Whether the next step is the first to read another stage of `data.stages`."""

    def logs(self, step: int) -> bool:
        """Return whether the metrics of `step` are logged."""

    def evaluates(self, step: int) -> bool:
        """Return whether the model is evaluated after `step`."""


class Hook:
    """Does nothing. A hook keeps what a resumed run would miss in `trainer.progress`."""

    def before_step(self, trainer: Training, step: int) -> None:
        """Prepare for training step `step`; `trainer.logs(step)` and `trainer.evaluates(step)` say what follows it."""

    def after_step(self, trainer: Training, step: int, result: StepResult) -> HookResult:
        """Look at what the step did; what this returns is written where the step is logged."""
        return HookResult()

    def due(self, trainer: Training, step: int) -> bool:
        """Return whether to evaluate after `step`: here, every `train.eval_interval` steps and after the last."""
        interval, last = trainer.config.train.eval_interval, step == trainer.config.train.steps
        return interval is not None and (step % interval == 0 or last)

    def evaluate(self, trainer: Training, step: int) -> HookResult:
        """Evaluate the model after `step`."""
        return HookResult()


HOOKS: dict[str, Callable[[], Hook] | None] = dict.fromkeys(EVALUATIONS)
"""What makes the hook of each name that `train.evaluations` may have; `built_in_hooks` adds our own."""


def register(name: str, kind: Callable[[], Hook]) -> None:
    """Let `train.evaluations` switch on the hook that `kind` makes; call it before the configuration is checked."""
    HOOKS[name] = kind


def merge_results(results: Iterable[tuple[str, HookResult]]) -> HookResult:
    """Return the results of several hooks, each with the hook's name, as one; ValueError where two share a name."""
    whole = HookResult()
    for hook, found in results:
        for kind in ("scalars", "texts", "words"):
            held, new = getattr(whole, kind), getattr(found, kind)
            if twice := held.keys() & new.keys():
                raise ValueError(f"the evaluation {hook} returns {sorted(twice)[0]}, which another one returned before")
            held.update(new)
    return whole
