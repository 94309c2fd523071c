"""The interface of synthetic tasks: random sequences of tokens, some of which are answers.

A task is one file with a subclass of `Generator`, a documented dataclass of its settings, listed in `GENERATORS`. The
trainer trains on its sequences (`data.generator`), and the evaluation of the same name scores models on them. Only
numpy is used. A sequence depends only on the settings and on its random stream, which `random_of` makes for each
sample.
"""

import numpy as np

TRAINING, VALIDATION, EVALUATION = range(3)
"""Purposes of samples. Each has independent random streams, whatever the seed."""


def random_of(seed: int, purpose: int, index: int) -> np.random.Generator:
    """Return the random stream of sample `index` >= 0, which depends only on the three arguments."""
    return np.random.Generator(np.random.Philox(counter=[0, 0, index, 0], key=[seed, purpose]))


class Generator:
    """Draws sequences of one task. Subclasses are dataclasses whose fields, with documented defaults, are its settings.

    Tokens are numbered from 0 to `vocab_size` - 1. Sequences may be shorter than `length`.
    """

    task: str
    """The name of the task in `data.generator`."""

    def check(self) -> None:
        """Raise ConfigError for an invalid setting; its key is the setting's name."""
        raise NotImplementedError

    @property
    def vocab_size(self) -> int:
        """Number of distinct tokens."""
        raise NotImplementedError

    @property
    def length(self) -> int:
        """Length (N) of the longest sequence in tokens."""
        raise NotImplementedError

    def sequence(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draw a sequence; return its tokens (N,), int64, and a mask of the answers (N,), bool.

        An answer is determined by the tokens before it, and the model has to predict it.
        """
        raise NotImplementedError
