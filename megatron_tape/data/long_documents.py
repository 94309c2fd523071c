"""Divide the training documents into long and other ones, for `data.long_documents`.

Here, a document is a sequence of the indexed dataset, the unit that Megatron-core shuffles.
This module does not import torch.
"""

import logging
from dataclasses import dataclass

import numpy as np

from megatron_tape.config.data import blend, split_shares
from megatron_tape.config.schema import RunConfig
from megatron_tape.data.indexed_dataset import IndexedDatasetReader
from megatron_tape.errors import ConfigError

logger = logging.getLogger(__name__)

MANY_EPOCHS = 4
"""Up to four epochs, repeated text is nearly as useful as new text (Muennighoff et al., "Scaling
Data-Constrained Language Models", 2023)."""


@dataclass(frozen=True)
class DatasetBlend:
    """Datasets, or parts of datasets, that samples are drawn from."""

    prefixes: list[str]
    weights: list[float] | None
    """None if there is only one dataset, to which `data.prefix` gives no weight."""
    tokens: list[int]
    """The number of training tokens of each dataset that belong to the blend."""


@dataclass(frozen=True)
class DocumentPools:
    """The training documents in two pools.

    A run draws `data.long_documents.share` of its tokens from the pool `long`. Within each pool,
    datasets have the weights of `data.prefix` or, by default, weights proportional to their tokens
    in the pool. A dataset with less than one sequence in a pool is not part of it. `others` is
    empty if the share is 1.
    """

    long: DatasetBlend
    others: DatasetBlend


def find_pools(config: RunConfig) -> DocumentPools:
    """Return both pools of documents. Raises ConfigError if a required pool lacks a sequence."""
    seq_length = config.model.seq_length
    minimum = config.data.long_documents.minimum
    share = config.data.long_documents.share
    prefixes, weights = blend(config.data.prefix)
    long = DatasetBlend([], [], [])
    others = DatasetBlend([], [], [])
    for index, prefix in enumerate(prefixes):
        lengths = split_lengths(prefix, config.data.split, "training")
        for pool, is_in_pool in ((long, lengths >= minimum), (others, lengths < minimum)):
            tokens = int(lengths.sum(where=is_in_pool, dtype=np.int64))
            # A sequence takes one token more than its length, the label of its last token.
            if tokens > seq_length:
                weight = float(tokens)
                if weights is not None:
                    weight = weights[index]
                pool.prefixes.append(prefix)
                pool.weights.append(weight)
                pool.tokens.append(tokens)

    if not long.prefixes:
        raise ConfigError(
            ("data.long_documents.minimum", "data.prefix", "model.seq_length"),
            f"is {minimum}, but no dataset has enough training documents of at least {minimum}"
            f" tokens for a sequence of model.seq_length {seq_length}",
            "lower minimum, or add longer documents",
        )
    if share == 1:
        others = DatasetBlend([], [], [])
    elif not others.prefixes:
        raise ConfigError(
            ("data.long_documents.share", "data.prefix", "model.seq_length"),
            f"is {share}, but no dataset has enough training documents of less than {minimum}"
            f" tokens for a sequence of model.seq_length {seq_length}",
            "set share to 1, or raise minimum",
        )
    return DocumentPools(long, others)


def epochs_by_dataset(datasets: DatasetBlend, tokens: int) -> dict[str, float]:
    """Return the epochs over each dataset, by prefix, for a run that draws `tokens` tokens."""
    weights = datasets.weights or datasets.tokens
    epochs = dict.fromkeys(datasets.prefixes, 0.0)
    for prefix, weight, size in zip(datasets.prefixes, weights, datasets.tokens):
        # Added, not set, because a blend may name the same prefix several times.
        epochs[prefix] += tokens * weight / sum(weights) / size
    return epochs


def log_epochs(epochs: float, data: str) -> None:
    """Log how many epochs a run trains on `data`; warn above MANY_EPOCHS."""
    line = f"the run trains {epochs:,.2f} epochs on {data}"
    if epochs <= MANY_EPOCHS:
        logger.info(line)
        return
    logger.warning("warning: %s; lower train.steps or train.global_batch_size, or add data", line)


def split_lengths(prefix: str, split: str, name: str) -> np.ndarray:
    """Return the lengths (int32), in tokens, of the documents in one split of a dataset.

    `split` is the value of `data.split`, and `name` is training or validation. Raises FileError if
    the dataset cannot be read.
    """
    train, validation, _ = split_shares(split)
    start, end = {"training": (0.0, train), "validation": (train, train + validation)}[name]
    lengths = IndexedDatasetReader(prefix).lengths
    # Rounded in the same way as Megatron's datasets round the bounds of their splits.
    return lengths[round(start * len(lengths)) : round(end * len(lengths))]
