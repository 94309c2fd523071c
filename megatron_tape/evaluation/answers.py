"""What the evaluations of synthetic tasks share: which answers a model gets right.

Answers are read from one forward pass over the whole sequence, right answers included. Each token is counted by whether
it is the likeliest one after the right tokens before it. Greedy decoding gives a whole answer exactly if that holds for
all its tokens: up to the first wrong token it sees the same tokens. So exact match is the same number either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_tape.errors import ConfigError, refuse

if TYPE_CHECKING:
    from megatron_tape.evaluation.base import LanguageModel, ModelInfo
    from megatron_tape.synthetic import Generator

LARGEST_SEED = 2**32 - 1


def right_answers(
    model: LanguageModel, sequences: Sequence[tuple[np.ndarray, np.ndarray]], batch_size: int
) -> list[np.ndarray]:
    """Return for every sequence, given as `Generator.sequence` returns it, which of its answers are right, bool."""
    import torch

    found = []
    for start in range(0, len(sequences), batch_size):
        part = sequences[start : start + batch_size]
        padded = np.zeros((len(part), max(len(tokens) for tokens, _ in part)), dtype=np.int64)
        for row, (tokens, _) in zip(padded, part):
            row[: len(tokens)] = tokens
        # What follows a sequence does not change the logits before it.
        likeliest = model.logits(torch.from_numpy(padded[:, :-1])).argmax(-1).numpy()
        for row, (tokens, answers) in zip(likeliest, part):
            found.append((row[: len(tokens) - 1] == tokens[1:])[answers[1:]])
    return found


def check_sizes(task: str, settings: Any, least: dict[str, int]) -> None:
    """Raise ConfigError if a setting is less than its least value; null is allowed."""
    for key, value in ((key, getattr(settings, key)) for key in least):
        refuse(
            value is not None and value < least[key],
            f"{task}.{key} is {value}; set it to at least {least[key]}",
        )
    refuse(
        not 0 <= settings.seed <= LARGEST_SEED,
        f"{task}.seed is {settings.seed}; set it to at least 0 and at most {LARGEST_SEED}",
    )


def check_generator(task: str, generator: Generator, info: ModelInfo) -> None:
    """Raise ConfigError if a generator's settings cannot work, or it makes tokens that the model does not know."""
    try:
        generator.check()
    except ConfigError as error:
        raise ConfigError(f"{task}: {error}") from None
    refuse(
        generator.vocab_size > info.vocab_size,
        f"{task} uses {generator.vocab_size} different tokens, but {info.label} knows {info.vocab_size}; give the "
        "settings with which it was trained, or a model that was trained on this task",
    )
