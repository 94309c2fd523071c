"""Which documents `data.long_documents` draws from, and how far into them a mix reaches. Does not import torch.

A document is here what Megatron-core shuffles: a sequence of the indexed dataset, which our preprocessing and
Megatron's make of every document.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_tape.config.schema import RunConfig, blend, split_shares
from megatron_tape.data.indexed_dataset import IndexedDatasetReader
from megatron_tape.errors import ConfigError
from megatron_tape.text import counted

MANY_PASSES = 4
"""Repeated up to four times, text teaches a model nearly as much as new text (Muennighoff et al., "Scaling
Data-Constrained Language Models", 2023)."""
BLOCK = 1 << 20
"""How many documents are looked at at once: int64 temporaries of all the billions of a dataset would not fit a node."""


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
        for pool, part in ((long, _long(values, minimum)), (others, _others(values, minimum))):
            documents, tokens = _count(part)
            weight = float(tokens) if weights is None else weights[index]
            pool.append(Member(prefix, weight, tokens, documents))
    return Pools(long, others)


def _blocks(lengths: np.ndarray) -> Iterator[np.ndarray]:
    return (lengths[start : start + BLOCK] for start in range(0, len(lengths), BLOCK))


def _long(lengths: np.ndarray, minimum: int) -> Iterator[np.ndarray]:
    return (block[block >= minimum] for block in _blocks(lengths))


def _others(lengths: np.ndarray, minimum: int) -> Iterator[np.ndarray]:
    return (block[block < minimum] for block in _blocks(lengths))


def _count(blocks: Iterable[np.ndarray]) -> tuple[int, int]:
    """Return how many documents, given their lengths, there are, and how many tokens they have."""
    documents = tokens = 0
    for block in blocks:
        documents += len(block)
        tokens += int(block.sum(dtype=np.int64))
    return documents, tokens


def numbers_of_long(lengths: np.ndarray, minimum: int) -> np.ndarray:
    """Return the numbers (int64) of the documents of at least `minimum` tokens, in order."""
    found = [i * BLOCK + np.flatnonzero(block >= minimum) for i, block in enumerate(_blocks(lengths))]
    return np.concatenate([np.empty(0, np.int64), *found])


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
    needed = [(found.long, divided.long, "minimum", minimum, "at least", "lower minimum, or add longer documents")]
    if share < 1:
        fix = "set share to 1, or raise minimum"
        needed.append((found.others, divided.others, "share", share, "less than", fix))
    for left, pool, key, value, relation, fix in needed:
        if left:
            continue
        dataset = "the largest dataset" if len(prefixes) > 1 else prefixes[0]
        raise ConfigError(
            (f"data.long_documents.{key}", "data.prefix", "model.seq_length"),
            f"is {value}, but the training documents of {relation} {minimum} tokens in {dataset} hold "
            f"{max(member.tokens for member in pool):,} tokens, too few for a sequence of model.seq_length "
            f"{seq_length} ({_in_words(all_lengths)})",
            fix,
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
    return _past_in_stream(_blocks(lengths), seq_length, distances)


def _past_in_stream(blocks: Iterable[np.ndarray], seq_length: int, distances: Sequence[int]) -> np.ndarray:
    total, past = 0, np.zeros(len(distances))
    for block in blocks:
        total += int(block.sum(dtype=np.int64))
        past += _tokens_past(block, distances)
    return past / max(1, total) * _past_in_window(seq_length, distances)


def _past_in_windows(blocks: Iterable[np.ndarray], seq_length: int, distances: Sequence[int]) -> np.ndarray:
    """Return the same for documents that are drawn as `windows_of` describes, with what is left as a stream."""
    windows, total, past = 0, 0, np.zeros(len(distances))
    for block in blocks:
        whole, left = windows_of(block, seq_length)
        windows += int(whole.sum())
        total += int(left.sum())
        past += _tokens_past(left, distances)
    in_window = _past_in_window(seq_length, distances)
    of_left = past / max(1, total) * in_window
    parts = np.array([windows, total / seq_length])
    weights = parts / max(parts.sum(), 1e-9)
    return weights[0] * in_window + weights[1] * of_left


def _tokens_past(lengths: np.ndarray, distances: Sequence[int]) -> np.ndarray:
    """Count the tokens that lie so far after their document's start."""
    lengths = lengths.astype(np.int64)
    return np.array([np.maximum(lengths - distance, 0).sum() for distance in distances], dtype=float)


def _past_in_window(seq_length: int, distances: Sequence[int]) -> np.ndarray:
    """Return what share of a window's positions lies so far after its start."""
    return np.array([max(0, 1 - distance / seq_length) for distance in distances])


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
    mixed = (_long, share, _past_in_windows), (_others, 1 - share, _past_in_stream)
    for part_of, of_mix, share_past in mixed:
        tokens = np.array([_count(part_of(values, minimum))[1] for values in lengths], dtype=float)
        parts = np.where(tokens > seq_length, tokens if weights is None else np.asarray(weights, dtype=float), 0.0)
        for values, part in zip(lengths, parts / max(parts.sum(), 1e-9)):
            result += of_mix * part * share_past(part_of(values, minimum), seq_length, distances)
    return result
