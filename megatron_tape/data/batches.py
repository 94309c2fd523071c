"""Batches of packed tokens from Megatron's indexed datasets, in an order that only the seed decides."""

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from torch.utils.data import DataLoader, Dataset

from megatron_tape.config.schema import RunConfig, blend, split_shares
from megatron_tape.errors import ConfigError
from megatron_tape.model.language_model import documents_from_tokens
from megatron_tape.parallel.layout import ParallelLayout

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _NoTokenizer:
    """What `GPTDataset` asks a tokenizer for: it only reads tokens, and `documents_from_tokens` finds the documents.

    `unique_identifiers` go into the name of the cached index, which by itself would not notice new data under an old
    path.
    """

    unique_identifiers: dict
    eod: int = -2
    pad: int = -1
    vocab_size: None = None


def _identify(prefixes: list[str]) -> dict[str, list[int]]:
    """Return size and modification time (ns) of the datasets' files."""
    files = [Path(f"{prefix}.{ending}") for prefix in prefixes for ending in ("bin", "idx")]
    return {str(file): [file.stat().st_size, file.stat().st_mtime_ns] for file in files}


@dataclass(frozen=True)
class Batches:
    """The run's batches: sample i of the training data is the same whatever the layout, and so is batch i."""

    train: Dataset
    validation: Dataset | None
    config: RunConfig
    layout: ParallelLayout
    eod: int | None

    def training(self, first_step: int) -> Iterator[dict[str, torch.Tensor]]:
        """Yield this rank's micro-batches from step `first_step` (from 1) to the last, in order, without end marks."""
        return self._iterate(self.train, first_step, self.config.train.steps)

    def evaluation(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield this rank's micro-batches of the validation data: the same ones at every evaluation."""
        return self._iterate(self.validation, 1, self.config.train.eval_steps)

    def _iterate(self, dataset: Dataset, first_step: int, last_step: int) -> Iterator[dict[str, torch.Tensor]]:
        train, layout = self.config.train, self.layout
        sampler = _Indices(
            first=(first_step - 1) * train.global_batch_size,
            stop=last_step * train.global_batch_size,
            micro_batch_size=train.micro_batch_size,
            rank=layout.data_parallel_rank,
            ranks=layout.data_parallel_size,
        )
        loader = DataLoader(
            _TokensAndLabels(dataset, self.config.model.vocab_size),
            batch_sampler=sampler,
            num_workers=self.config.data.num_workers,
            pin_memory=layout.device.type == "cuda",
        )
        for batch in loader:
            batch = {key: value.to(layout.device, non_blocking=True) for key, value in batch.items()}
            if self.config.data.reset_attention_mask:
                batch["documents"] = documents_from_tokens(batch["tokens"], self.eod)
            yield batch


class _TokensAndLabels(Dataset):
    """Only what the model takes of a `GPTDataset` sample; ConfigError for a token the model does not have."""

    def __init__(self, samples: Dataset, vocab_size: int):
        self._samples = samples
        self._vocab_size = vocab_size

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = self._samples[index]
        largest = max(int(sample["tokens"].max()), int(sample["labels"][-1]))
        if largest >= self._vocab_size:
            raise ConfigError(
                f"data.prefix holds the token {largest}, but model.vocab_size is {self._vocab_size}; raise it, or use "
                "data made with the model's tokenizer"
            )
        return {"tokens": sample["tokens"], "labels": sample["labels"]}


@dataclass(frozen=True)
class _Indices:
    """A batch sampler: consecutive micro-batches go to consecutive data-parallel ranks."""

    first: int
    stop: int
    micro_batch_size: int
    rank: int
    ranks: int

    def __len__(self) -> int:
        return (self.stop - self.first) // (self.micro_batch_size * self.ranks)

    def __iter__(self) -> Iterator[list[int]]:
        for i in range(len(self)):
            start = self.first + (i * self.ranks + self.rank) * self.micro_batch_size
            yield list(range(start, start + self.micro_batch_size))


def _weighted_blend(config: RunConfig) -> tuple[list[str], list[float] | None]:
    """Weigh datasets given without weights by their tokens; Megatron would stop after one pass over such a list."""
    prefixes, weights = blend(config.data.prefix)
    if weights is None and len(prefixes) > 1:
        datasets = [IndexedDataset(prefix) for prefix in prefixes]
        weights = [float(dataset.sequence_lengths.sum()) for dataset in datasets]
    return prefixes, weights


def _refuse_empty(name: str, bounds: tuple[float, float] | None, config: RunConfig) -> None:
    """Refuse a split in which a dataset holds less than one sequence."""
    for prefix in blend(config.data.prefix)[0]:
        dataset = IndexedDataset(prefix)  # a name of its own: its arrays are views of a file it closes when it goes
        lengths = dataset.sequence_lengths
        first, last = (round(bound * len(lengths)) for bound in bounds or (0, 0))
        tokens = int(lengths[first:last].sum())
        if tokens <= config.model.seq_length:
            raise ConfigError(
                f"the {name} share of data.split {config.data.split} gives {tokens:,} tokens of {prefix}, less "
                f"than one sequence of model.seq_length {config.model.seq_length}; raise the share, or use more data"
            )


def build_batches(config: RunConfig, layout: ParallelLayout, eod: int | None = None) -> Batches:
    """Open the datasets and build (or read from `data.cache_directory`) their shuffled indices.

    `eod` is the end-of-document id, needed with `data.reset_attention_mask`. Raises ConfigError when a split that is
    needed holds no whole sequence.
    """
    if config.data.reset_attention_mask and eod is None:
        raise ConfigError(
            "data.reset_attention_mask needs a tokenizer with an end-of-document token; data.tokenizer has none"
        )
    train = config.train
    evaluates = train.eval_interval is not None and split_shares(config.data.split)[1] > 0
    sizes = [train.steps * train.global_batch_size, train.eval_steps * train.global_batch_size if evaluates else 0, 0]
    settings = GPTDatasetConfig(
        random_seed=train.seed,
        sequence_length=config.model.seq_length,
        blend=_weighted_blend(config),
        split=config.data.split,
        path_to_cache=config.data.resolved_cache_directory,
        tokenizer=_NoTokenizer(_identify(blend(config.data.prefix)[0])),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    needed = ["training", "validation"][: 1 + evaluates]
    # Megatron never returns from indexing a split without documents, so the unneeded ones are left out.
    settings.split_matrix = [bounds if i < len(needed) else None for i, bounds in enumerate(settings.split_matrix)]
    for name, bounds in zip(needed, settings.split_matrix):
        _refuse_empty(name, bounds, config)
    started = time.monotonic()
    if layout.rank == 0:
        logger.info("building the index of %s training sequences", f"{sizes[0]:,}")
    training, validation, _ = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, settings).build()
    if layout.rank == 0:
        logger.info("index ready after %.1f s", time.monotonic() - started)
    return Batches(training, validation if evaluates else None, config, layout, eod)
