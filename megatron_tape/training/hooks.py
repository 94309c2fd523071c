"""Hooks of the training loop: the base class, the built-in evaluations, and their names.

To add a hook, subclass `Hook`, `register` it under a name, and add the name to `train.evaluations`.
All ranks call a hook together, so it may use collective operations. The result of rank 0 is logged.

Importing this module does not import torch, since settings are checked against `HOOKS`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron_tape.model.names import KINDS, kind_of
from megatron_tape.run import metrics

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_tape.model.language_model import LanguageModel
    from megatron_tape.model.pipeline import Pipeline
    from megatron_tape.training.engine import Batch, Engine, StepResult
    from megatron_tape.training.trainer import Trainer

TEMPERATURE = 0.8
"""Temperature of sampled text."""


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


class Hook:
    """Base class of hooks, whose methods do nothing. Store state that a resumed run needs in
    `trainer.progress`.
    """

    def before_step(self, trainer: Trainer, step: int) -> None:
        """Run before training step `step`.

        `trainer.logs(step)` and `trainer.evaluates(step)` tell whether the step will be logged and
        evaluated.
        """

    def on_micro_batch(self, trainer: Trainer, step: int, batch: Batch) -> None:
        """Run before this rank trains on a micro-batch of `step`. Do not change `batch`.

        `batch` has `tokens` and `labels` (B, S), and `documents` or `loss_weights` (B, S) if the
        model gets them, on the rank's device. Reading values on the host waits for the GPU: sum up
        on the device, and read the sum in `after_step`. Tensor-, context- and pipeline-parallel
        ranks have the same batches, so sum over `trainer.layout.token_layout.data_group`.

        With several datasets, `batch` also has `dataset_id` (B,), int64, on the CPU: the index of
        each sequence's dataset in `data.prefix` of the run or the data stage. Datasets that are too
        small for the training split are not counted. With `data.long_documents`, it is 0 for long
        documents, and 1 for others.
        """

    def after_step(self, trainer: Trainer, step: int, result: StepResult) -> HookResult:
        """Run after training step `step`. The result is logged if `trainer.logs(step)`."""
        return HookResult()

    def due(self, trainer: Trainer, step: int) -> bool:
        """Return whether to call `evaluate` after `step`.

        By default, a hook that overrides `evaluate` is due every `train.eval_interval` steps and
        after the last step. It is due only after the last step if the interval is null, and never
        if it is 0.
        """
        overrides = type(self).evaluate is not Hook.evaluate
        return overrides and trainer.config.train.evaluates(step)

    def evaluate(self, trainer: Trainer, step: int) -> HookResult:
        """Evaluate the model after `step`, and return what to log."""
        return HookResult()


def merge_results(results: Iterable[tuple[str, HookResult]]) -> HookResult:
    """Merge pairs of a hook's name and its result into one result.

    Raises ValueError if two results contain the same name.
    """
    merged = HookResult()
    for hook, result in results:
        for kind, values in vars(result).items():
            earlier = getattr(merged, kind)
            duplicates = earlier.keys() & values.keys()
            if duplicates:
                raise ValueError(
                    f"evaluation {hook} returns {min(duplicates)}, which another evaluation"
                    " returns, too; rename it"
                )
            earlier.update(values)
    return merged


class ValidationLoss(Hook):
    """Logs the loss and perplexity on the validation split, and the loss of the averaged weights if
    there are any.

    The loss is the mean over `train.eval_steps` global batches. Nothing is logged if there is no
    validation data.
    """

    def evaluate(self, trainer: Trainer, step: int) -> HookResult:
        if trainer.batches.validation is None:
            return HookResult()

        loss = self._loss(trainer)
        # The loss of a run that diverges can be too large for `exp`.
        try:
            perplexity = math.exp(loss)
        except OverflowError:
            perplexity = math.inf
        scalars = {
            metrics.VALIDATION_LOSS: loss,
            metrics.VALIDATION_PERPLEXITY: perplexity,
        }

        if trainer.engine.has_average:
            with trainer.engine.averaged_weights():
                scalars[metrics.VALIDATION_LOSS_AVERAGED] = self._loss(trainer)
        return HookResult(scalars)

    def _loss(self, trainer: Trainer) -> float:
        """Return the loss of the model's current weights on the validation split."""
        batches = trainer.watch.each("evaluating", trainer.batches.evaluation())
        return trainer.engine.evaluate(batches)


class Sample(Hook):
    """Logs text that continues `logging.sample_prompt`, if the run has a tokenizer and
    `logging.sample_tokens` > 0.
    """

    def evaluate(self, trainer: Trainer, step: int) -> HookResult:
        if trainer.tokenizer is None or trainer.config.logging.sample_tokens == 0:
            return HookResult()

        trainer.watch.progress("sampling text")
        return HookResult(texts={"sample": self._text(trainer)})

    def _text(self, trainer: Trainer) -> str:
        """Sample up to `logging.sample_tokens` tokens, and return the prompt and its continuation.

        All ranks call this together and return the same text. Each token costs a full forward pass
        over the tokens so far, at most `model.seq_length`. Sampling ends early at the end of a
        document, or if logits are not finite.
        """
        import torch
        import torch.distributed as dist

        layout = trainer.layout
        tokenizer = trainer.tokenizer
        settings = trainer.config.logging
        # With a generator of its own, sampling does not change the random numbers of training.
        generator = torch.Generator().manual_seed(0)
        # The model needs at least one token, even if the prompt is empty.
        ids = tokenizer.encode(settings.sample_prompt) or [tokenizer.eod or 0]
        for _ in range(settings.sample_tokens):
            context = ids[-trainer.config.model.seq_length :]
            length = len(context)
            # With sequence or context parallelism, ranks need shards of equal length. So pad to the
            # next multiple of their number.
            padding = -length % layout.token_layout.sequence_shards
            padded = context + [0] * padding
            tokens = torch.tensor([padded], device=layout.device)
            logits = trainer.engine.logits(tokens)[0, length - 1]
            # The model's vocabulary is padded with ids that have no token.
            logits = logits[: tokenizer.vocab_size]
            logits = logits.float().cpu()

            token = torch.tensor([-1])  # stands for logits that are not finite
            if torch.isfinite(logits).all():
                probabilities = torch.softmax(logits / TEMPERATURE, dim=-1)
                token = torch.multinomial(probabilities, num_samples=1, generator=generator)
            # Logits may differ between ranks by rounding, but all must continue the same text.
            token = token.to(layout.device)
            dist.broadcast(token, src=0)

            sampled = int(token)
            if sampled in (-1, tokenizer.eod):
                break
            ids.append(sampled)
        return tokenizer.decode(ids)


class GradientNorms(Hook):
    """Logs the norms of the gradients by parameter kind (embeddings, attention, ...), before
    clipping.

    Each rank sums the squares in its partition of the gradients, so only these sums are
    communicated. The norms are computed only in logged steps.
    """

    _sums: Tensor
    """Sums of squared gradients, and numbers of gradients, by kind in the current step: (2, kinds).
    """

    def before_step(self, trainer: Trainer, step: int) -> None:
        if trainer.logs(step):
            trainer.engine.before_update = functools.partial(self._measure, trainer.engine)

    def after_step(self, trainer: Trainer, step: int, result: StepResult) -> HookResult:
        """Return `grad_norm/KIND` for each of `KINDS` with trained parameters."""
        import torch.distributed as dist

        if not trainer.logs(step):
            return HookResult()

        # Stop measuring: `before_step` sets the function again for the next logged step.
        trainer.engine.before_update = lambda: None
        dist.all_reduce(self._sums)
        scalars = {}
        for kind, sum_of_squares, count in zip(KINDS, *self._sums.tolist()):
            if count:  # some parameter of this kind is trained
                scalars[f"grad_norm/{kind}"] = sum_of_squares**0.5
        return HookResult(scalars)

    def _measure(self, engine: Engine) -> None:
        """Set `_sums` to an fp64 tensor (2, len(KINDS)) with this rank's sums by parameter kind.

        Row 0 has the sums of squared gradients, and row 1 the numbers of gradients. A rank has only
        its partition of the gradients, so over all ranks each element is counted once.
        """
        import torch

        from megatron_tape.parallel.partitions import is_sharded
        from megatron_tape.training.gradients import local_gradient, sum_of_squares

        layout = engine.layout
        gradients: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}
        for name, parameter in engine.trained.items():
            if not is_sharded(parameter) and layout.tensor_parallel_rank > 0:
                continue  # tensor-parallel rank 0 counts it

            gradient = local_gradient(parameter, engine.zero_stage)
            if gradient is not None:
                gradients[kind_of(name)].append(gradient)

        sums = torch.zeros(2, len(KINDS), dtype=torch.float64, device=layout.device)
        for column, kind_gradients in enumerate(gradients.values()):
            sums[0, column] = sum_of_squares(kind_gradients, layout.device)
            sums[1, column] = len(kind_gradients)
        self._sums = sums


class PositionNorms(Hook):
    """Logs the root mean squares of the position state's complex numbers and of their last update.

    For RoPE, that of the state is 1 (with yarn, the attention factor), and that of the update is 0.
    Both thus show how far TAPE is from RoPE. Every logged step returns them by layer, and as root
    mean squares over the layers. Nothing is logged if no layer updates the state.
    """

    def before_step(self, trainer: Trainer, step: int) -> None:
        """Record the norms in this step if it is logged."""
        self._set_recording(trainer, trainer.logs(step))

    def after_step(self, trainer: Trainer, step: int, result: StepResult) -> HookResult:
        """Return `position/state_norm` and `position/update_norm`, and both for each layer, such as
        `position/state_norm/layer_03`.
        """
        self._set_recording(trainer, enabled=False)
        if not trainer.logs(step):
            return HookResult()

        scalars = {}
        norms = _position_norms(trainer.model)
        # `norms` maps each layer to its norm of the state and its norm of the update.
        for index, name in enumerate(("state_norm", "update_norm")):
            values = [layer_norms[index] for layer_norms in norms.values()]
            if values:
                root_mean_square = math.hypot(*values) / math.sqrt(len(values))
                scalars[f"position/{name}"] = root_mean_square
            for layer, value in zip(norms, values):
                scalars[f"position/{name}/layer_{layer:02d}"] = value
        return HookResult(scalars)

    def _set_recording(self, trainer: Trainer, enabled: bool) -> None:
        """Set whether the model's layers compute the norms in their forward pass."""
        for encoding in trainer.model.updating_encodings():
            encoding.record_norms = enabled


def _position_norms(model: LanguageModel | Pipeline) -> dict[int, list[float]]:
    """Return by layer a list of two root mean squares over all ranks: of the position state, and of
    its last update.

    Only layers that update the state are included. All ranks call this together.
    """
    import torch
    import torch.distributed as dist

    num_layers = model.model_config.num_layers
    layers = [layer for layer in range(num_layers) if model.encoding.updates(layer)]
    if not layers:
        return {}

    # The rows of a layer's `norms` are the sum of squares of the state, that of its update, and the
    # number of elements of both. The columns are the query groups.
    local = {encoding.layer: encoding.norms for encoding in model.updating_encodings()}
    # This rank has zeros for the layers of other pipeline stages, whose ranks contribute the values
    # to the all-reduce.
    device = next(model.parameters()).device
    zeros = torch.zeros(3, model.model_config.query_groups, device=device)
    totals = torch.stack([local.get(layer, zeros) for layer in layers])
    dist.all_reduce(totals)

    # Each of these has a value for each layer.
    state_squares, update_squares, counts = totals.sum(dim=-1).T
    mean_squares = torch.stack([state_squares, update_squares]) / counts
    norms = mean_squares.sqrt()
    return dict(zip(layers, norms.T.tolist()))


HOOKS: dict[str, Callable[[], Hook]] = {
    "validation_loss": ValidationLoss,
    "sample": Sample,
    "position_norms": PositionNorms,
    "gradient_norms": GradientNorms,
}
"""Functions that create hooks, by the names in `train.evaluations`."""


def register(name: str, create: Callable[[], Hook]) -> None:
    """Add `name` to the names that `train.evaluations` accepts.

    `create` is called without arguments and returns the hook; it may be the hook's class. Call this
    before the settings are read.
    """
    HOOKS[name] = create
