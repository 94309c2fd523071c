"""The model in training as an `EvaluatedModel`, and the hook that evaluates tasks on it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_tape.evaluation.during_training import build_tasks
from megatron_tape.evaluation.model_source import info_of_run
from megatron_tape.evaluation.ranks import Ranks
from megatron_tape.evaluation.results import Score
from megatron_tape.evaluation.task import Task, Unit
from megatron_tape.training.hooks import Hook, HookResult

if TYPE_CHECKING:
    from megatron_tape.config.schema import RunConfig
    from megatron_tape.training.trainer import Trainer

logger = logging.getLogger(__name__)


class TrainingModel:
    """The model in training as an `EvaluatedModel`. Data-parallel ranks may evaluate different
    texts.

    Under ZeRO 3, all ranks have to take part in every forward pass. Before a pass, the ranks agree
    whether any of them still has work. A rank that has none takes part with a dummy input
    (`join_other_ranks`).
    """

    def __init__(self, trainer: Trainer, phase: str):
        """Wrap the model of a run. `phase` is what the heartbeat shows during forward passes."""
        self.tokenizer = trainer.tokenizer
        self.info = info_of_run(trainer.config, self.tokenizer)
        self._engine = trainer.engine
        self._watch = trainer.watch
        self._phase = phase
        self._token_layout = trainer.layout.token_layout
        self._device = trainer.layout.device

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without beginning-of-text and end-of-text tokens."""
        return self.tokenizer.encode(text)

    def decode(self, tokens: list[int]) -> str:
        """Return the text of token ids."""
        return self.tokenizer.decode(tokens)

    @property
    def bos(self) -> list[int]:
        """The beginning-of-text token: a list of one id, or an empty list."""
        if self.tokenizer is None:
            return []
        return self.tokenizer.prefix_ids

    def losses(self, tokens: np.ndarray, first: int) -> np.ndarray:
        """Return the losses (N - first,), float64, of `tokens[first:]` for tokens (N,)."""
        ids = torch.tensor(tokens, dtype=torch.int64)[None]  # a batch of one text
        inputs = ids[:, :-1]
        labels = ids[:, 1:]
        losses = self._forward(self._engine.losses, inputs, labels)
        # The loss at position i is that of token i + 1.
        return losses[0, first - 1 :].double().cpu().numpy()

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits (B, S, V) of tokens (B, S), in float32 on the CPU."""
        logits = self._forward(self._engine.logits, tokens)
        # Without the rows that pad the vocabulary.
        return logits[..., : self.info.vocab_size].float().cpu()

    def _forward(self, function: Any, *tokens_BS: Tensor) -> Tensor:
        """Call a function of the engine; return its output (B, S, ...) for the tokens (B, S)."""
        # A long evaluation must not look like a hang.
        self._watch.progress(self._phase)
        # Under ZeRO 3, this call tells ranks without work to take part in the pass.
        self._any_rank_works(this_rank=True)
        length = tokens_BS[0].shape[1]
        # All shards of a sequence must have the same length, so the sequence is padded at its end.
        # Padding has no effect on earlier tokens.
        padding = -length % self._token_layout.sequence_shards
        padded_BS = [F.pad(part, (0, padding)).to(self._device) for part in tokens_BS]
        return function(*padded_BS)[:, :length]

    def join_other_ranks(self) -> None:
        """Take part in forward passes of other ranks until all have finished. Each rank calls this
        after its last pass."""
        # The shortest input that has a token for each shard.
        dummy = torch.zeros(
            1, self._token_layout.sequence_shards, dtype=torch.int64, device=self._device
        )
        while self._any_rank_works(this_rank=False):
            self._watch.progress(self._phase)
            self._engine.losses(dummy, dummy)

    def _any_rank_works(self, this_rank: bool) -> bool:
        """Return whether any data-parallel rank has a forward pass to run, given whether
        `this_rank` has one. This is a collective call under ZeRO 3. Without ZeRO 3, ranks need not
        agree, and the result is False.
        """
        if self._engine.zero_stage < 3:
            return False
        works = torch.tensor(float(this_rank), device=self._device)
        return self._token_layout.total(works).item() > 0


class TaskHook(Hook):
    """A hook that evaluates a task every `every` steps and after the last step, on all
    data-parallel ranks together.
    """

    def __init__(self, task: Task, every: int):
        self._task = task
        self._every = every
        self._units: list[Unit] = []
        """Filled by `before_step`."""

    def before_step(self, trainer: Trainer, step: int) -> None:
        """Read the task's data before the first step, so that errors in the data appear at once."""
        if not self._units:
            trainer.watch.progress(f"reading the data of {self._task.name}")
            self._units = self._task.units(self._model(trainer))

    def due(self, trainer: Trainer, step: int) -> bool:
        """Return whether the task is evaluated after this step."""
        return step % self._every == 0 or step == trainer.config.train.steps

    def evaluate(self, trainer: Trainer, step: int) -> HookResult:
        """Return the scores by tag, `evaluation/TASK/METRIC/GROUP/LENGTH`. If the task fails, log a
        warning instead.
        """
        name = self._task.name
        model = self._model(trainer)
        group = trainer.layout.token_layout.data_group
        rank = group.rank()
        values = {}
        failures = []
        for unit in Ranks(rank, group.size()).assign(self._units)[rank]:
            try:
                values[unit.key] = self._task.evaluate(unit, model)
            except ValueError as error:  # such as an infinite loss of a diverged model
                failures.append(str(error))
        # Under ZeRO 3, a rank that waits in `all_gather_object` below could not take part in the
        # forward passes of others.
        model.join_other_ranks()

        gathered: list[Any] = [None] * group.size()
        dist.all_gather_object(gathered, (values, failures), group=group)
        all_values = {}
        all_failures = []
        for rank_values, rank_failures in gathered:
            all_values |= rank_values
            all_failures += rank_failures
        if all_failures:
            logger.warning(
                "warning: the evaluation %s of step %d has no result: %s",
                name,
                step,
                all_failures[0],
            )
            return HookResult()

        # Tasks expect the values in the order of their units.
        in_order = {unit.key: all_values[unit.key] for unit in self._units}
        scores = self._task.summarize(in_order, model.info).scores
        scalars = {f"evaluation/{self._tag(score)}": score.value for score in scores}
        if trainer.writer is not None:  # on the rank that logs
            shown = [f"{self._tag(score)} {score.value:.4g}" for score in scores]
            logger.info("evaluation at step %d | %s", step, " | ".join(shown))
        return HookResult(scalars=scalars)

    def _model(self, trainer: Trainer) -> TrainingModel:
        """Return the model in training, as tasks see it."""
        return TrainingModel(trainer, f"evaluating {self._task.name}")

    def _tag(self, score: Score) -> str:
        """Return `TASK/METRIC/GROUP/LENGTH` without empty parts."""
        length = str(score.length or "")
        return "/".join(filter(None, (self._task.name, score.metric, score.group, length)))


def task_hooks(config: RunConfig) -> dict[str, Hook]:
    """Return the hooks for the tasks of the section `evaluation`, by name."""
    return {
        f"evaluation.{name}": TaskHook(task, config.evaluation.every)
        for name, task in build_tasks(config).items()
    }
