"""Sources of training samples in place of indexed datasets: only some of a sample's tokens enter the loss.

A new source is a subclass of `SampleSource` in a file of its own, with a setting in `data` whose name is entered in
`config.schema.SAMPLE_SOURCES`; `config.checks` checks that setting, and `sample_source` builds the source from it.
`Batches` gives each sample to the ranks in the same order under every parallel layout, and turns the masks into weights
with which the loss is the mean over a global batch.
"""

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from megatron_tape.config.generators import generator_of
from megatron_tape.config.schema import RunConfig
from megatron_tape.synthetic import TRAINING, VALIDATION, random_of


class SampleSource(Dataset):
    """An endless sequence of samples. Sample i depends on nothing but the settings, the seed and i."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return sample `index` >= 0: `tokens` and `labels` (S,), int64, and which labels enter the loss.

        The latter is `loss_mask` (S,), bool. `padded_sample` makes all three of a sequence.
        """
        raise NotImplementedError


def padded_sample(tokens: np.ndarray, in_loss: np.ndarray, seq_length: int) -> dict[str, Tensor]:
    """Return the sample of a sequence (N,) of which the tokens `in_loss` (N,), bool, enter the loss; N <= S + 1.

    The first token is never predicted. Zeros fill the rest of the `seq_length` (S) tokens; no token before them sees
    them, and they do not enter the loss.
    """
    sequence = torch.zeros(seq_length + 1, dtype=torch.int64)
    mask = torch.zeros(seq_length + 1, dtype=torch.bool)
    sequence[: len(tokens)] = torch.from_numpy(tokens)
    mask[: len(tokens)] = torch.from_numpy(in_loss)
    return {"tokens": sequence[:-1], "labels": sequence[1:], "loss_mask": mask[1:]}


class GeneratedSamples(SampleSource):
    """Sequences of `data.generator`; those of training and of validation are drawn from independent streams."""

    def __init__(self, config: RunConfig, purpose: int):
        self._generator = generator_of(config.data.generator)
        self._seed, self._purpose = config.train.seed, purpose
        self._seq_length, self._all = config.model.seq_length, config.data.loss_on == "all"

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens, answers = self._generator.sequence(random_of(self._seed, self._purpose, index))
        return padded_sample(tokens, answers | self._all, self._seq_length)


def sample_source(config: RunConfig, validation: bool) -> SampleSource:
    """Return the source that `config.data` names, one of `SAMPLE_SOURCES`, for training or for validation."""
    return GeneratedSamples(config, VALIDATION if validation else TRAINING)
