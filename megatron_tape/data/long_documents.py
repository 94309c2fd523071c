"""Which documents `data.long_documents` draws from. Does not import torch.

A document is here what Megatron-core shuffles: a sequence of the indexed dataset, which our preprocessing and
Megatron's make of every document.
"""

from dataclasses import dataclass

import numpy as np

from megatron_tape.config.data import blend, split_shares
from megatron_tape.config.schema import RunConfig
from megatron_tape.data.indexed_dataset import IndexedDatasetReader
from megatron_tape.errors import ConfigError

MANY_PASSES = 4
"""Repeated up to four times, text teaches a model nearly as much as new text (Muennighoff et al., "Scaling
Data-Constrained Language Models", 2023)."""


@dataclass(frozen=True)
class Member:
    """A dataset's long documents, or its others, as one part of a mix; `weight` is in no unit."""

    prefix: str
    weight: float
    tokens: int


@dataclass(frozen=True)
class Pools:
    """What a mix is drawn from: `long` with the setting's share, `others` with the rest.

    In both, datasets keep the proportions of `data.prefix`; without weights there, every token is equally likely.
    Datasets whose part is less than a sequence are left out. `others` is empty if the share is 1.
    """

    long: list[Member]
    others: list[Member]


def find_pools(config: RunConfig) -> Pools:
    """Divide the training documents by `data.long_documents`; ConfigError if a needed pool is less than a sequence."""
    seq_length, minimum = config.model.seq_length, config.data.long_documents.minimum
    share = config.data.long_documents.share
    prefixes, weights = blend(config.data.prefix)
    all_lengths = [training_lengths(prefix, config.data.split) for prefix in prefixes]
    pools = Pools([], [])
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
                pool.append(Member(prefix, weight, tokens))
        if not pool:
            dataset = "the largest dataset" if len(prefixes) > 1 else prefixes[0]
            raise ConfigError(
                (f"data.long_documents.{key}", "data.prefix", "model.seq_length"),
                f"is {getattr(config.data.long_documents, key)}, but the training documents of {relation} {minimum} "
                f"tokens in {dataset} hold {largest:,} tokens, too few for a sequence of model.seq_length {seq_length}",
                fix,
            )
    return pools


def passes(members: list[Member], tokens: int) -> dict[str, float]:
    """Return how many times a run that draws `tokens` tokens from these parts passes over each, by its prefix."""
    total = sum(member.weight for member in members)
    return {member.prefix: tokens * member.weight / total / member.tokens for member in members}


def training_lengths(prefix: str, split: str) -> np.ndarray:
    """Return the lengths (int32) in tokens of the documents in the training share of `data.split`."""
    lengths = IndexedDatasetReader(prefix).lengths
    return lengths[: round(split_shares(split)[0] * len(lengths))]
