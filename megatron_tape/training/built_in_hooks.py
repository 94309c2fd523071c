"""The built-in evaluations of `train.evaluations`, and the list of a run's hooks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_tape.run.metrics import (
    VALIDATION_LOSS,
    VALIDATION_LOSS_AVERAGED,
    VALIDATION_PERPLEXITY,
)
from megatron_tape.training.hooks import HOOKS, Hook, HookResult, Training
from megatron_tape.training.norms import GradientNorms, PositionNorms
from megatron_tape.training.profiling import Profiling
from megatron_tape.training.spikes import SpikeHook
from megatron_tape.training.step_times import StepTimes

if TYPE_CHECKING:
    from megatron_tape.config.schema import RunConfig
    from megatron_tape.data.tokenizer import Tokenizer
    from megatron_tape.training.engine import Engine


class ValidationLoss(Hook):
    """Logs the loss and perplexity on the validation split, and the loss of the averaged weights if
    there are any.

    The loss is the mean over `train.eval_steps` global batches. Nothing is logged if there is no
    validation data.
    """

    def evaluate(self, trainer: Training, step: int) -> HookResult:
        if trainer.batches.validation is None:
            return HookResult()
        loss = self._loss(trainer)
        scalars = {VALIDATION_LOSS: loss, VALIDATION_PERPLEXITY: _exp(loss)}
        if trainer.engine.averages:
            with trainer.engine.averaged_weights():
                scalars[VALIDATION_LOSS_AVERAGED] = self._loss(trainer)
        return HookResult(scalars=scalars)

    def _loss(self, trainer: Training) -> float:
        return trainer.engine.evaluate(
            trainer.watch.each("evaluating", trainer.batches.evaluation())
        )


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


class Sample(Hook):
    """Logs text that continues `logging.sample_prompt`, if the run has a tokenizer and
    `logging.sample_tokens` > 0.
    """

    def evaluate(self, trainer: Training, step: int) -> HookResult:
        settings = trainer.config.logging
        if trainer.tokenizer is None or settings.sample_tokens == 0:
            return HookResult()
        trainer.watch.progress("sampling text")
        prompt = settings.sample_prompt
        length = settings.sample_tokens
        context = trainer.config.model.seq_length
        return HookResult(
            texts={
                "sample": sample_text(trainer.engine, trainer.tokenizer, prompt, length, context)
            }
        )


def sample_text(
    engine: Engine,
    tokenizer: Tokenizer,
    prompt: str,
    length: int,
    max_length: int,
    temperature: float = 0.8,
) -> str:
    """Sample up to `length` tokens that continue `prompt`, and return both as text.

    All ranks call this together and return the same text. It uses a generator with a fixed seed, so
    that training's random numbers do not change. Each token costs a full forward pass over the last
    `max_length` tokens. Sampling ends early at the end of a document, or if logits are not finite.
    """
    layout = engine.layout
    ids = tokenizer.encode(prompt) or [tokenizer.eod or 0]
    generator = torch.Generator().manual_seed(0)
    for _ in range(length):
        context = ids[-max_length:]
        padding = -len(context) % layout.token_layout.sequence_shards
        tokens = torch.tensor([context + [0] * padding], device=layout.device)
        logits = engine.logits(tokens)[0, len(context) - 1, : tokenizer.vocab_size].float().cpu()
        if torch.isfinite(logits).all():
            token = torch.multinomial(
                torch.softmax(logits / temperature, -1), 1, generator=generator
            )
        else:
            token = torch.tensor([-1])
        token = token.to(layout.device)
        dist.broadcast(token, src=0)
        if int(token) in (-1, tokenizer.eod):
            break
        ids.append(int(token))
    return tokenizer.decode(ids)


HOOKS |= {
    "validation_loss": ValidationLoss,
    "sample": Sample,
    "position_norms": PositionNorms,
    "gradient_norms": GradientNorms,
}


def build_hooks(config: RunConfig) -> dict[str, Hook]:
    """Return the run's hooks by name: timing, profiling, spike detection if enabled, and
    `train.evaluations`.
    """
    hooks: dict[str, Hook] = {"step_times": StepTimes(), "profile": Profiling(config.train.profile)}
    if config.train.spikes is not None:
        hooks["spikes"] = SpikeHook(config.train.spikes)
    return hooks | {name: HOOKS[name]() for name in config.train.evaluations}
