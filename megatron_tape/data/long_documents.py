"""Find the documents that `data.long_documents` draws from. Does not import torch.

A document is a sequence of the indexed dataset, the unit that Megatron-core shuffles.
"""

from dataclasses import dataclass

import numpy as np

from megatron_tape.config.data import blend, split_shares
from megatron_tape.config.schema import RunConfig
from megatron_tape.data.indexed_dataset import IndexedDatasetReader
from megatron_tape.errors import ConfigError

MANY_EPOCHS = 4
"""Up to four epochs, repeated text is nearly as useful as new text (Muennighoff et al., "Scaling Data-Constrained
Language Models", 2023)."""


@dataclass(frozen=True)
class DatasetPart:
    """The long documents of a dataset, or its other documents, as one part of a mix. Only ratios of weights matter."""

    prefix: str
    weight: float
    tokens: int


@dataclass(frozen=True)
class DocumentPools:
    """The parts of a mix: `long` gets the fraction `share`, `others` the rest.

    Within both, datasets have the weights of `data.prefix`, or weights by tokens if it has none. Parts with less than
    one sequence are excluded. `others` is empty if the share is 1.
    """

    long: list[DatasetPart]
    others: list[DatasetPart]


def find_pools(config: RunConfig) -> DocumentPools:
    """Divide the training documents by length. Raises ConfigError if a required pool has less than one sequence."""
    seq_length, minimum = config.model.seq_length, config.data.long_documents.minimum
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
            dataset = "the largest dataset" if len(prefixes) > 1 else prefixes[0]
            raise ConfigError(
                (f"data.long_documents.{key}", "data.prefix", "model.seq_length"),
                f"is {getattr(config.data.long_documents, key)}, but the training documents of {relation} {minimum} "
                f"tokens in {dataset} have {largest:,} tokens, too few for a sequence of model.seq_length {seq_length}",
                fix,
            )
    return pools


def epochs_by_dataset(parts: list[DatasetPart], tokens: int) -> dict[str, float]:
    """Return the number of epochs over each part, by prefix, for a run that draws `tokens` tokens from all parts."""
    total = sum(part.weight for part in parts)
    return {part.prefix: tokens * part.weight / total / part.tokens for part in parts}


def training_lengths(prefix: str, split: str) -> np.ndarray:
    """Return the lengths (int32), in tokens, of the documents in the training split."""
    lengths = IndexedDatasetReader(prefix).lengths
    return lengths[: round(split_shares(split)[0] * len(lengths))]
