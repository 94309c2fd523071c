"""What a synthetic task is: sequences of tokens drawn at random, some of which are answers that can be known.

A task is one file with a subclass of `Generator`, a documented dataclass of its settings, entered in `GENERATORS`. The
trainer trains on its sequences (`data.generator`) and the evaluation of the same name scores models on them. Only
numpy is used. A sequence depends on nothing but the settings and the random generator it is drawn with, for which
`random_of` gives every sample its own stream.
"""

import numpy as np

TRAINING, VALIDATION, EVALUATION = range(3)
"""Purposes of samples; those of different purposes are drawn from independent streams, whatever the seed."""


def random_of(seed: int, purpose: int, index: int) -> np.random.Generator:
    """Return the stream of random numbers of sample `index` >= 0: it depends on these three numbers alone."""
    return np.random.Generator(np.random.Philox(counter=[0, 0, index, 0], key=[seed, purpose]))


class Generator:
    """Draws sequences of one task. Subclasses are dataclasses whose fields, with documented defaults, are its settings.

    Tokens are numbered from 0 to `vocab_size` - 1. Sequences may be shorter than `length`.
    """

    task: str
    """Its name, by which `data.generator` chooses it."""

    def check(self) -> None:
        """Raise ConfigError, whose key is the setting's name, if a setting cannot work."""
        raise NotImplementedError

    @property
    def vocab_size(self) -> int:
        """How many different tokens the sequences consist of."""
        raise NotImplementedError

    @property
    def length(self) -> int:
        """Tokens (N) of the longest sequence."""
        raise NotImplementedError

    def sequence(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draw a sequence; return its tokens (N,), int64, and which of them are answers (N,), bool.

        An answer follows from the tokens before it, and is what a model is to predict.
        """
        raise NotImplementedError
