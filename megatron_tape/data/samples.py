"""Training samples with a loss mask, from sources other than indexed datasets.

S is `model.seq_length`. To add a source, subclass `SampleSource`, add a setting to
`config.data.DataConfig` and its name to `SAMPLE_SOURCES`, validate it in `checks.combinations`, and
create the source in `sample_source`. `Batches` distributes samples in the same order under every
parallel layout. It converts loss masks to weights for the mean loss over a global batch.
"""

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from megatron_tape.config.schema import RunConfig
from megatron_tape.data.examples import example_encoder, parse_example
from megatron_tape.data.tokenizer import load_run_tokenizer
from megatron_tape.errors import FileError
from megatron_tape.synthetic import TRAINING, VALIDATION, sample_random


class SampleSource(Dataset):
    """An endless sequence of samples. Sample i depends only on the settings, the seed and i."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return a sample: `tokens` and `labels` (S,), int64, and `loss_mask` (S,), bool.

        The mask selects the labels that enter the loss. `padded_sample` makes a sample from token
        ids.
        """
        raise NotImplementedError


def padded_sample(tokens: np.ndarray, in_loss: np.ndarray, seq_length: int) -> dict[str, Tensor]:
    """Return a sample of the token ids (N,), N <= S + 1.

    `in_loss` (N,), bool, selects the ids that enter the loss. The first token is never predicted.
    The sequence is padded with zeros to S + 1 tokens. The padding does not enter the loss, and
    because of causal attention, the sequence does not attend to it.
    """
    sequence = torch.zeros(seq_length + 1, dtype=torch.int64)
    mask = torch.zeros(seq_length + 1, dtype=torch.bool)
    sequence[: len(tokens)] = torch.from_numpy(tokens)
    mask[: len(tokens)] = torch.from_numpy(in_loss)
    return {"tokens": sequence[:-1], "labels": sequence[1:], "loss_mask": mask[1:]}


class GeneratedSamples(SampleSource):
    """Sequences of the synthetic task `data.generator`.

    Training and validation use independent random streams.
    """

    def __init__(self, config: RunConfig, purpose: int):
        """Create a source for `purpose`: TRAINING or VALIDATION."""
        self._generator = config.data.generator
        self._seed = config.train.seed
        self._purpose = purpose
        self._seq_length = config.model.seq_length
        self._all_in_loss = config.data.loss_on == "all"

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        random = sample_random(self._seed, self._purpose, index)
        tokens, is_answer = self._generator.sequence(random)
        return padded_sample(tokens, is_answer | self._all_in_loss, self._seq_length)


class ExampleSamples(SampleSource):
    """One sample per line of the file in `data.examples`.

    Training examples are shuffled anew in every epoch.
    """

    def __init__(self, config: RunConfig, validation: bool):
        """Read the offsets of the file's lines. Raises FileError if it has no examples."""
        settings = config.data.examples
        tokenizer = load_run_tokenizer(config)
        self._path = settings.path
        self._seed = config.train.seed
        if validation:
            self._path = settings.validation
            self._seed = None  # not shuffled
        self._encode = example_encoder(config, tokenizer)
        self._eod = tokenizer.eod
        self._seq_length = config.model.seq_length
        self._all_in_loss = config.data.loss_on == "all"

        # Only offsets are kept, since the texts may not fit in memory.
        lines = []
        start = 0
        with open(self._path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    lines.append((number, start, len(line)))
                start += len(line)
        if not lines:
            raise FileError(
                self._path, "contains no examples", "choose another file for data.examples"
            )
        self.lines = np.array(lines)
        """The number, offset and length of each line that is not blank."""
        # The epoch of the last sample, or -1 before the first one, and its order of the lines.
        self._epoch = -1
        self._order = np.empty(0, int)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return sample `index`, counted from the beginning of the first epoch.

        Raises FileError if its line has become invalid.
        """
        epoch, index_in_epoch = divmod(index, len(self.lines))
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = self._order_of(epoch)
        line_index = self._order[index_in_epoch]
        number, start, length = self.lines[line_index].tolist()
        # Opened for each sample: loader processes must not share the position in the file.
        with open(self._path, "rb") as file:
            file.seek(start)
            line = file.read(length)
        example = parse_example(f"{self._path}:{number}", line)
        encoded = self._encode(example.input, example.target)
        sequence = [*encoded.prompt, *encoded.target]
        # After a truncated target, the end-of-document token would teach the model to end in the
        # middle of an answer.
        if not encoded.target_truncated:
            sequence.append(self._eod)
        tokens = np.array(sequence, dtype=np.int64)
        in_loss = np.arange(len(tokens)) >= len(encoded.prompt)
        return padded_sample(tokens, in_loss | self._all_in_loss, self._seq_length)

    def _order_of(self, epoch: int) -> np.ndarray:
        """Return the order of the lines in an epoch, as indices into `lines`."""
        count = len(self.lines)
        if self._seed is None:
            return np.arange(count)
        return sample_random(self._seed, TRAINING, epoch).permutation(count)


def sample_source(config: RunConfig, validation: bool) -> SampleSource:
    """Return the source of a run with `data.generator` or `data.examples`."""
    if config.data.source == "examples":
        return ExampleSamples(config, validation)
    purpose = VALIDATION if validation else TRAINING
    return GeneratedSamples(config, purpose)
