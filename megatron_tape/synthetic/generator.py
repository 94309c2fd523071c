"""The interface of generators of synthetic data: random sequences with tokens that are answers.

A generator is a subclass of `Generator` in a file of its own, listed in `GENERATORS`. With
`data.generator`, a model is trained on its sequences, and the evaluation task of the same name
scores models on them. Generators use only numpy. A sequence depends only on the generator's
settings and on the random numbers of its sample (see `sample_random`).
"""

import numpy as np

from megatron_tape.errors import ConfigError

TRAINING, VALIDATION, EVALUATION = range(3)
"""What a sample is used for. Different purposes have independent random numbers."""


def sample_random(seed: int, purpose: int, index: int) -> np.random.Generator:
    """Return the random generator of sample `index`, from 0, for a purpose such as TRAINING."""
    # Drawing numbers increments the four-word counter from its first word on. The index is in the
    # third word, which is never reached, so that no two samples share numbers.
    return np.random.Generator(np.random.Philox(counter=[0, 0, index, 0], key=[seed, purpose]))


class Generator:
    """Base class: draws token sequences of one task.

    A subclass is a dataclass whose fields are the task's settings. Token ids are below
    `vocab_size`. Sequences have at most `length` tokens.
    """

    task: str
    """The name of the task in `data.generator`."""

    def check(self) -> None:
        """Raise ConfigError if a setting is invalid. Its subject is the name of the setting,
        without a section.
        """
        raise NotImplementedError

    def _require_at_least(self, **bounds: int) -> None:
        """Raise ConfigError if a setting is below its bound. Settings that are None are skipped."""
        for key, least in bounds.items():
            value = getattr(self, key)
            if value is not None and value < least:
                raise ConfigError(key, f"is {value}", f"set it to at least {least}")

    @property
    def vocab_size(self) -> int:
        """Number of distinct token ids."""
        raise NotImplementedError

    @property
    def length(self) -> int:
        """Number of tokens of the longest sequence."""
        raise NotImplementedError

    def sequence(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draw a sequence of N tokens. Return its ids (N,), int64, and a mask (N,), bool, which is
        true for answers.

        An answer is determined by the tokens before it. Models are scored on the answers only.
        """
        raise NotImplementedError
