"""Text sampled from a model under training, without a cache: enough to read what it has learnt."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from megatron_tape.data.tokenizer import Tokenizer
    from megatron_tape.training.engine import Engine


def sample_text(
    engine: Engine, tokenizer: Tokenizer, prompt: str, length: int, max_length: int, temperature: float = 0.8
) -> str:
    """Continue `prompt` by `length` tokens; all ranks call it together and get the same text.

    A separate generator with a fixed seed leaves training's random numbers unchanged. The model sees at most
    `max_length` tokens at once, and each new token costs one forward pass over them. Ends early at the end of a
    document, or where logits are not finite.
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
