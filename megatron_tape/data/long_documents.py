"""Which documents `data.long_documents` draws from, and how far into them a mix reaches. Does not import torch.

A document is here what Megatron-core shuffles: a sequence of the indexed dataset, which our preprocessing and
Megatron's make of every document.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_tape.command_line import counted
from megatron_tape.config.schema import RunConfig, blend, split_shares
from megatron_tape.data.indexed_dataset import IndexedDatasetReader
from megatron_tape.errors import refuse

MANY_PASSES = 4
"""Repeated up to four times, text teaches a model nearly as much as new text (Muennighoff et al., "Scaling
Data-Constrained Language Models", 2023)."""


@dataclass(frozen=True)
class Member:
    """A dataset's long documents, or its others, as one part of a mix; `weight` is in no unit."""

    prefix: str
    weight: float
    tokens: int
    documents: int


@dataclass(frozen=True)
class Pools:
    """What a mix is drawn from: `long` with the setting's share, `others` with the rest.

    In both, datasets keep the proportions of `data.prefix`; without weights there, every token is equally likely.
    Datasets whose part is less than a sequence are left out. `others` is empty if the share is 1.
    """

    long: list[Member]
    others: list[Member]


def divide(
    prefixes: Sequence[str], lengths: Sequence[np.ndarray], weights: Sequence[float] | None, minimum: int
) -> Pools:
    """Divide every dataset's documents, given their lengths in tokens, into the long ones and the others."""
    long, others = [], []
    for index, (prefix, values) in enumerate(zip(prefixes, lengths)):
        for pool, part in ((long, values[values >= minimum]), (others, values[values < minimum])):
            tokens = int(part.sum(dtype=np.int64))
            weight = float(tokens) if weights is None else weights[index]
            pool.append(Member(prefix, weight, tokens, len(part)))
    return Pools(long, others)


def drawn_from(pools: Pools, share: float, seq_length: int) -> Pools:
    """Leave out what is less than a sequence and, if `share` is 1, the others."""
    return Pools(
        [member for member in pools.long if member.tokens > seq_length],
        [member for member in pools.others if member.tokens > seq_length and share < 1],
    )


def find_pools(config: RunConfig) -> Pools:
    """Divide the training documents by `data.long_documents`; ConfigError if a needed pool is less than a sequence."""
    setting, seq_length = config.data.long_documents, config.model.seq_length
    minimum, share = setting["minimum"], setting["share"]
    prefixes, weights = blend(config.data.prefix)
    all_lengths = [training_lengths(prefix, config.data.split) for prefix in prefixes]
    divided = divide(prefixes, all_lengths, weights, minimum)
    found = drawn_from(divided, share, seq_length)
    needed = [(found.long, divided.long, f"minimum is {minimum}", "at least", "lower minimum, or add longer documents")]
    if share < 1:
        fix = "set share to 1, or raise minimum"
        needed.append((found.others, divided.others, f"share is {share}", "less than", fix))
    for left, pool, value, relation, fix in needed:
        dataset = "the largest dataset" if len(prefixes) > 1 else prefixes[0]
        refuse(
            not left,
            f"data.long_documents.{value}, but the training documents of {relation} {minimum} tokens in {dataset} hold "
            f"{max(member.tokens for member in pool):,} tokens, too few for a sequence of model.seq_length "
            f"{seq_length} ({_in_words(all_lengths)}); {fix}",
        )
    return found


def passes_in_words(pools: Pools, minimum: int, share: float, tokens: int) -> Iterator[tuple[str, str | None]]:
    """Yield how many times a run of `tokens` tokens passes over either part of each dataset, as a sentence.

    Beside it is a warning with the fix if these are more than MANY_PASSES, else None.
    """
    for members, of_mix, relation, change in (
        (pools.long, share if pools.others else 1.0, "at least", "lower the share or the minimum"),
        (pools.others, 1 - share, "less than", "raise the share or the minimum"),
    ):
        for member in members:
            passes = tokens * of_mix * member.weight / sum(each.weight for each in members) / member.tokens
            part = f"the {counted(member.documents, 'document')} of {relation} {minimum:,} tokens in {member.prefix}"
            warning = (
                f"data.long_documents repeats {part} {passes:.1f} times, and beyond about {MANY_PASSES} times repeated "
                f"text teaches little; {change}, train fewer steps, or add such documents"
            )
            sentence = f"the run passes {passes:.2f} times over {part}, {member.tokens:,} tokens in all"
            yield sentence, warning if passes > MANY_PASSES else None


def training_lengths(prefix: str, split: str) -> np.ndarray:
    """Return the lengths (int32) in tokens of the documents in the training share of `data.split`."""
    lengths = IndexedDatasetReader(prefix).lengths
    return lengths[: round(split_shares(split)[0] * len(lengths))]


def _in_words(all_lengths: list[np.ndarray]) -> str:
    lengths = np.concatenate(all_lengths)
    if not len(lengths):
        return "there is no training document"
    median, high = (int(value) for value in np.quantile(lengths, [0.5, 0.9]))
    return (
        f"of {len(lengths):,} documents the longest has {lengths.max():,} tokens, one in ten has more than {high:,} "
        f"and half have more than {median:,}"
    )


def windows_of(lengths: np.ndarray, seq_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return how many whole windows every document has, and how many tokens (int64) it has left after them.

    Windows of a document begin at its start and lie side by side; the token after each, its last label, is in the
    document too. A single token that is left is only a label, and counts as none.
    """
    lengths = lengths.astype(np.int64)
    whole = np.maximum(lengths - 1, 0) // seq_length
    left = lengths - whole * seq_length
    return whole, np.where((whole > 0) & (left == 1), 0, left)


def share_past_in_stream(lengths: np.ndarray, seq_length: int, distances: Sequence[int]) -> np.ndarray:
    """Return what share of positions lies at least so far after its document's start, within its window.

    For documents (their lengths in tokens) in random order, back to back, and cut into windows of `seq_length`: a
    token's place in its window is uniform, and both its document and its window must have begun that far before.
    """
    lengths = lengths.astype(np.int64)
    total = max(1, int(lengths.sum()))
    far = [
        np.maximum(lengths - distance, 0).sum() / total * max(0, 1 - distance / seq_length) for distance in distances
    ]
    return np.array(far)


def share_past_in_windows(lengths: np.ndarray, seq_length: int, distances: Sequence[int]) -> np.ndarray:
    """Return the same for documents that are drawn as `windows_of` describes, with what is left as a stream."""
    whole, left = windows_of(lengths, seq_length)
    in_whole = np.array([max(0, 1 - distance / seq_length) for distance in distances])
    parts = np.array([whole.sum(), left.sum() / seq_length])
    weights = parts / max(parts.sum(), 1e-9)
    return weights[0] * in_whole + weights[1] * share_past_in_stream(left, seq_length, distances)


def share_past_in_mix(
    lengths: Sequence[np.ndarray],
    weights: Sequence[float] | None,
    seq_length: int,
    distances: Sequence[int],
    minimum: int,
    share: float,
) -> np.ndarray:
    """Return the same for a mix of datasets, given the lengths of each one's documents, with `data.long_documents`.

    Every dataset must have at least a sequence of tokens in one of the pools, and every pool a dataset.
    """
    result = np.zeros(len(distances))
    for pool, of_mix, share_past in (
        ([values[values >= minimum] for values in lengths], share, share_past_in_windows),
        ([values[values < minimum] for values in lengths], 1 - share, share_past_in_stream),
    ):
        tokens = np.array([values.sum(dtype=np.int64) for values in pool], dtype=float)
        parts = np.where(tokens > seq_length, tokens if weights is None else np.asarray(weights, dtype=float), 0.0)
        for values, part in zip(pool, parts / max(parts.sum(), 1e-9)):
            result += of_mix * part * share_past(values, seq_length, distances)
    return result
