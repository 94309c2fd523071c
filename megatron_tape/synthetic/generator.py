"""The interface of generators of synthetic data: random token sequences in which some tokens are
answers.

A generator is a subclass of `Generator` in a file of its own, listed in `GENERATORS`. With
`data.generator`, a model is trained on its sequences, and the evaluation task of the same name
scores models on them. Generators use only numpy. A sequence depends only on the generator's
settings and on the random numbers of its sample (see `sample_random`).
"""

import numpy as np

TRAINING, VALIDATION, EVALUATION = range(3)
"""What a sample is used for. Samples of different purposes have independent random numbers, even
with equal seeds.
"""


def sample_random(seed: int, purpose: int, index: int) -> np.random.Generator:
    """Return the random generator of sample `index` (from 0); `purpose` is TRAINING, VALIDATION or
    EVALUATION.
    """
    return np.random.Generator(np.random.Philox(counter=[0, 0, index, 0], key=[seed, purpose]))


class Generator:
    """Base class: draws token sequences of one task. A subclass is a dataclass whose fields are the
    task's settings.

    Token ids are below `vocab_size`. Sequences have at most `length` tokens.
    """

    task: str
    """The name of the task in `data.generator`."""

    def check(self) -> None:
        """Raise ConfigError if a setting is invalid; the subject of the error is the name of the
        setting.
        """
        raise NotImplementedError

    @property
    def vocab_size(self) -> int:
        """Number of distinct token ids."""
        raise NotImplementedError

    @property
    def length(self) -> int:
        """Number of tokens of the longest sequence."""
        raise NotImplementedError

    def sequence(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draw a sequence of N tokens; return their ids (N,), int64, and a mask (N,), bool, of
        those that are answers.

        An answer is determined by the tokens before it. Models are scored on the answers only.
        """
        raise NotImplementedError
