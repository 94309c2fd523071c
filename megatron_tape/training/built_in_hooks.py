"""The built-in evaluations of `train.evaluations`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_tape.run.metrics import VALIDATION_LOSS, VALIDATION_LOSS_AVERAGED, VALIDATION_PERPLEXITY
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
    """Mean loss over `train.eval_steps` global batches of the validation split, also with averaged weights."""

    def evaluate(self, trainer: Training, step: int) -> HookResult:
        loss = self._loss(trainer)
        found = {VALIDATION_LOSS: loss, VALIDATION_PERPLEXITY: _exp(loss)}
        if trainer.engine.averages:
            with trainer.engine.averaged_weights():
                found[VALIDATION_LOSS_AVERAGED] = self._loss(trainer)
        return HookResult(scalars=found)

    def _loss(self, trainer: Training) -> float:
        return trainer.engine.evaluate(trainer.watch.each("evaluating", trainer.batches.evaluation()))


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


class Sample(Hook):
    """Text that continues `logging.sample_prompt`. Disabled without a tokenizer, or if `sample_tokens` is 0."""

    def evaluate(self, trainer: Training, step: int) -> HookResult:
        settings = trainer.config.logging
        if trainer.tokenizer is None or settings.sample_tokens == 0:
            return HookResult()
        trainer.watch.progress("sampling text")
        prompt, length, context = settings.sample_prompt, settings.sample_tokens, trainer.config.model.seq_length
        return HookResult(texts={"sample": sample_text(trainer.engine, trainer.tokenizer, prompt, length, context)})


def sample_text(
    engine: Engine, tokenizer: Tokenizer, prompt: str, length: int, max_length: int, temperature: float = 0.8
) -> str:
    """Sample `length` tokens that continue `prompt`. All ranks call this together and return the same text.

    A separate generator with a fixed seed leaves training's random numbers unchanged. The context is limited to the
    last `max_length` tokens. There is no key-value cache: each new token costs a full forward pass. Sampling ends early
    at the end of a document, or if logits are not finite.
    """
    layout = engine.layout
    ids = tokenizer.encode(prompt) or [tokenizer.eod or 0]
    generator = torch.Generator().manual_seed(0)
    for _ in range(length):
        seen = ids[-max_length:]
        padding = -len(seen) % layout.tokens.sequence_shards
        tokens = torch.tensor([seen + [0] * padding], device=layout.device)
        logits = engine.logits(tokens)[0, len(seen) - 1, : tokenizer.vocab_size].float().cpu()
        if torch.isfinite(logits).all():
            chosen = torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator)
        else:
            chosen = torch.tensor([-1])
        chosen = chosen.to(layout.device)
        dist.broadcast(chosen, src=0)
        if int(chosen) in (-1, tokenizer.eod):
            break
        ids.append(int(chosen))
    return tokenizer.decode(ids)


HOOKS |= {
    "validation_loss": ValidationLoss,
    "sample": Sample,
    "position_norms": PositionNorms,
    "gradient_norms": GradientNorms,
}


def build_hooks(config: RunConfig) -> dict[str, Hook]:
    """Return the run's hooks by name: those of every run, spike detection if enabled, and `train.evaluations`."""
    found: dict[str, Hook] = {"step_times": StepTimes(), "profile": Profiling(config.train.profile)}
    if config.train.spikes is not None:
        found["spikes"] = SpikeHook(config.train.spikes)
    return found | {name: HOOKS[name]() for name in config.train.evaluations}
