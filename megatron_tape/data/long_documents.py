"""Divide the training documents into long and other ones, for `data.long_documents`. Does not
import torch.

Here, a document is a sequence of the indexed dataset, the unit that Megatron-core shuffles.
"""

import logging
from collections import defaultdict
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
class DatasetPart:
    """All long documents of a dataset, or all its other documents."""

    prefix: str
    weight: float
    """Weight relative to the parts of other datasets in the same pool."""
    tokens: int
    """Number of tokens in these documents."""


@dataclass(frozen=True)
class DocumentPools:
    """The training documents in two pools. A run draws `data.long_documents.share` of its tokens
    from the pool `long`.

    Within each pool, datasets have the weights of `data.prefix` or, by default, weights
    proportional to their tokens in the pool. A dataset with less than one sequence in a pool is not
    part of it. `others` is empty if the share is 1.
    """

    long: list[DatasetPart]
    others: list[DatasetPart]


def find_pools(config: RunConfig) -> DocumentPools:
    """Return both pools of documents. Raises ConfigError if a required pool has less than one
    sequence.
    """
    seq_length = config.model.seq_length
    minimum = config.data.long_documents.minimum
    share = config.data.long_documents.share
    prefixes, weights = blend(config.data.prefix)
    all_lengths = [training_lengths(prefix, config.data.split) for prefix in prefixes]
    pools = DocumentPools([], [])
    for pool, key, relation, fix in (
        (pools.long, "minimum", "at least", "lower minimum, or add longer documents"),
        (pools.others, "share", "less than", "set share to 1, or raise minimum"),
    ):
        if pool is pools.others and share == 1:
            break
        largest = 0
        for index, (prefix, lengths) in enumerate(zip(prefixes, all_lengths)):
            part = lengths >= minimum if pool is pools.long else lengths < minimum
            tokens = int(lengths.sum(where=part, dtype=np.int64))
            largest = max(largest, tokens)
            if tokens > seq_length:
                weight = float(tokens) if weights is None else weights[index]
                pool.append(DatasetPart(prefix, weight, tokens))
        if not pool:
            if len(prefixes) > 1:
                dataset = "the dataset with most of them"
            else:
                dataset = prefixes[0]
            raise ConfigError(
                (f"data.long_documents.{key}", "data.prefix", "model.seq_length"),
                f"is {getattr(config.data.long_documents, key)}, but the training documents of"
                f" {relation} {minimum} tokens in {dataset} have {largest:,} tokens in total, too"
                f" few for a sequence of model.seq_length {seq_length}",
                fix,
            )
    return pools


def epochs_by_dataset(parts: list[DatasetPart], tokens: int) -> dict[str, float]:
    """Return the epochs over each part of a pool, by prefix, for a run that draws `tokens` tokens
    from the pool.
    """
    total = sum(part.weight for part in parts)
    epochs: defaultdict[str, float] = defaultdict(float)
    for part in parts:  # a blend may contain a prefix twice
        epochs[part.prefix] += tokens * part.weight / total / part.tokens
    return epochs


def log_epochs(times: float, data: str) -> None:
    """Log how many epochs a run trains on `data`; warn above MANY_EPOCHS."""
    line = f"the run trains {times:,.2f} epochs on {data}"
    if times > MANY_EPOCHS:
        logger.warning(
            "warning: %s; lower train.steps or train.global_batch_size, or add data", line
        )
    else:
        logger.info("%s", line)


def training_lengths(prefix: str, split: str) -> np.ndarray:
    """Return the lengths (int32), in tokens, of the documents in the training split."""
    lengths = IndexedDatasetReader(prefix).lengths
    return lengths[: round(split_shares(split)[0] * len(lengths))]
