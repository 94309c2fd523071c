"""The datasets of a run: Megatron's, indexed once by rank 0, and mixes with long documents.

Rank 0 plans what to draw from each dataset, which requires their whole indices. If the cache lacks the index, rank 0
opens the datasets with `build` in a temporary directory of `index_cache`. All ranks then open them from the cache.
"""

import contextlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.datasets import helpers
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from torch import Tensor
from torch.utils.data import Dataset

from megatron_tape.config.data import blend
from megatron_tape.config.schema import RunConfig
from megatron_tape.data.index_cache import cached, load_array
from megatron_tape.data.indexed_dataset import IndexedDatasetReader, dataset_paths
from megatron_tape.data.inputs import large_enough
from megatron_tape.data.long_documents import (
    MANY_EPOCHS,
    DocumentPools,
    epochs_by_dataset,
    find_pools,
    training_lengths,
)
from megatron_tape.errors import ConfigError
from megatron_tape.parallel import megatron_patches

logger = logging.getLogger(__name__)

Blend = tuple[list[str], list[float] | None]
"""Prefixes of datasets and, if there are several, their weights."""
_THREADS = 8
"""Maximum number of datasets of a blend that are opened at the same time."""


megatron_patches.load_cached_indices_with(load_array)


@dataclass(frozen=True)
class Plan:
    """The datasets that all ranks draw samples from."""

    identity: dict[str, list[int]]
    """Size and modification time (ns) of each file of the datasets, as seen by rank 0; changed data has a new index."""
    whole: Blend
    splits: list[Blend | None]
    """The blend of each required split, training first; None if `pools` replace it."""
    pools: DocumentPools | None
    """The parts of the training data with `data.long_documents`."""


def plan_for_all(config: RunConfig, evaluates: bool) -> Plan:
    """Return rank 0's plan on all ranks, which call this together. Only rank 0 reads the indices.

    A dataset of a blend that is too small for a split is excluded from it, with a warning. Raises ConfigError, on all
    ranks, if a required split does not contain a whole sequence, or a dataset cannot be read.
    """
    found: list[Plan | ConfigError | None] = [None]
    if dist.get_rank() == 0:
        try:
            found[0] = _plan(config, evaluates)
        except ConfigError as error:
            found[0] = error
        except (OSError, ValueError) as error:
            found[0] = ConfigError(
                "data.prefix", f"contains datasets that cannot be read any more ({error})", "check their files"
            )
    dist.broadcast_object_list(found, src=0)
    if isinstance(found[0], ConfigError):
        raise found[0]
    return found[0]


def _plan(config: RunConfig, evaluates: bool) -> Plan:
    prefixes, weights = blend(config.data.prefix)
    if weights is None and len(prefixes) > 1:
        # Without weights, Megatron would stop after one epoch over the list.
        weights = [float(IndexedDatasetReader(prefix).lengths.sum(dtype=np.int64)) for prefix in prefixes]
    splits: list[Blend | None] = []
    for name in ("training", "validation") if evaluates else ("training",):
        if name == "training" and config.data.long_documents is not None:
            splits.append(None)
        else:
            kept, problems = large_enough(config, name)
            for problem in problems:
                logger.warning("warning: data.split %s; it is left out of the %s data", problem, name)
            splits.append(([prefixes[i] for i in kept], None if weights is None else [weights[i] for i in kept]))
    pools = None if config.data.long_documents is None else find_pools(config)
    return Plan(_identify(prefixes), (prefixes, weights), splits, pools)


def _identify(prefixes: list[str]) -> dict[str, list[int]]:
    status = {str(path): path.stat() for prefix in prefixes for path in dataset_paths(prefix)}
    return {path: [found.st_size, found.st_mtime_ns] for path, found in status.items()}


class NoTokenizer:
    """The attributes of a tokenizer that `GPTDataset` requires, although it only reads token ids here."""

    unique_identifiers: dict = {}
    eod, pad, vocab_size = -2, -1, None


@dataclass
class DatasetSettings(GPTDatasetConfig):
    """Settings of Megatron's datasets. `documents_below` is the length limit of `ShorterDocuments`.

    All splits and stages with the same `opened` share its indexed datasets, by prefix.
    """

    documents_below: int | None = None
    opened: dict[str, IndexedDataset] = field(default_factory=dict)

    def open(self, prefix: str) -> IndexedDataset:
        """Return the indexed dataset of this prefix."""
        if prefix not in self.opened:
            dataset = self.opened[prefix] = IndexedDataset(prefix)
            # The tokens are mapped. Megatron would keep this second descriptor open, too many for a blend of hundreds.
            dataset.bin_reader._bin_file_reader.close()
        return self.opened[prefix]


class AllDocuments(GPTDataset):
    """A `GPTDataset` whose length is the requested one; Megatron would read a whole index to find a longer one."""

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: DatasetSettings) -> IndexedDataset:
        """Return the indexed dataset, which all splits share."""
        return config.open(dataset_path)

    def __len__(self) -> int:
        return super().__len__() if self.sample_index is not None else self.num_samples


class ShorterDocuments(AllDocuments):
    """A dataset of the documents with less than `documents_below` tokens."""

    def __init__(self, indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config):
        if indexed_indices is not None:  # None if the index is cached
            indexed_indices = indexed_indices[
                indexed_dataset.sequence_lengths[indexed_indices] < config.documents_below
            ]
        super().__init__(indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config)


class Mixed(Dataset):
    """`size` samples of several datasets in fixed proportions, distributed evenly by Megatron's blending rule.

    The dataset of each sample is mapped from the cache `directory`. `counts` is the number of samples of each dataset.
    Append to `datasets` in the order of `weights`.
    """

    def __init__(self, directory: str, weights: Sequence[float], size: int):
        self.datasets: list[Dataset] = []
        shares = [weight / sum(weights) for weight in weights]

        def make() -> dict[str, np.ndarray]:
            dataset, sample = np.zeros(size, np.int16), np.zeros(size, np.int64)
            helpers.build_blending_indices(dataset, sample, shares, len(shares), size, False)
            return {"counts": np.bincount(dataset, minlength=len(shares)), "dataset": dataset, "sample": sample}

        index = cached(directory, "Mixed", ("counts", "dataset", "sample"), [shares, size], make)
        self.counts, self._dataset, self._sample = index["counts"].tolist(), index["dataset"], index["sample"]

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.datasets[self._dataset[index]][int(self._sample[index])]


def open_split(kind: type[AllDocuments], settings: DatasetSettings, split: int, size: int, build: bool) -> Dataset:
    """Return at least `size` samples of one split: 0 for training, 1 for validation.

    With `build`, missing indices are built. Otherwise all ranks call this together; indices are mapped, not read.
    """
    threads = min(_THREADS, len(settings.blend[0]), len(os.sched_getaffinity(0)))
    alone = replace(settings, num_dataset_builder_threads=threads)  # type: ignore[call-arg]
    alone.split_matrix = [bounds if i == split else None for i, bounds in enumerate(settings.split_matrix)]
    sizes = [size if i == split else 0 for i in range(len(alone.split_matrix))]
    # Set here because Megatron's constructor rejects these together with a split, which cached indices already follow.
    alone.fast_cache_load = alone.defer_npy_index_mmap = not build
    with megatron_patches.barriers_disabled() if build else contextlib.nullcontext():
        return BlendedMegatronDatasetBuilder(kind, sizes, lambda: True, alone).build()[split]


def mix_with_long_documents(
    config: RunConfig, settings: DatasetSettings, pools: DocumentPools, size: int, build: bool
) -> Mixed:
    """Return `size` training samples of `settings.blend`, a fraction of them from long documents.

    All ranks pass the same `pools`. With `build`, missing indices are built; otherwise rank 0 logs the epochs.
    """
    minimum, share = config.data.long_documents.minimum, config.data.long_documents.share
    cache, seq_length = settings.path_to_cache, config.model.seq_length
    mix = Mixed(cache, [share, 1 - share] if pools.others else [1.0], size)
    long = Mixed(cache, [part.weight for part in pools.long], mix.counts[0])
    for part in pools.long:

        def make(prefix: str = part.prefix) -> dict[str, np.ndarray]:
            lengths = training_lengths(prefix, config.data.split)
            return cut_documents(lengths, np.flatnonzero(lengths >= minimum), seq_length)

        cut = cached(cache, "DocumentWindows", ("documents", "ends_of_whole", "left"), part.prefix, make)
        long.datasets.append(DocumentWindows(settings.open(part.prefix), cut, seq_length, config.train.seed))
    mix.datasets.append(long)
    if pools.others and mix.counts[1]:
        of_others = [part.weight for part in pools.others] if len(pools.others) > 1 else None
        blend_of_others = ([part.prefix for part in pools.others], of_others)
        shorter = replace(settings, blend=blend_of_others, documents_below=minimum)  # type: ignore[call-arg]
        mix.datasets.append(open_split(ShorterDocuments, shorter, 0, mix.counts[1], build))
    if not build and dist.get_rank() == 0:
        for kind, parts, count in zip(("long", "other"), (pools.long, pools.others), mix.counts):
            for prefix, times in epochs_by_dataset(parts, count * seq_length).items():
                level, start = (logging.WARNING, "warning: ") if times > MANY_EPOCHS else (logging.INFO, "")
                logger.log(level, "%sthe run trains %.2f epochs on the %s documents of %s", start, times, kind, prefix)
    return mix


def open_datasets(config: RunConfig, plan: Plan, size: int, cache: str, build: bool, opened: dict) -> list[Dataset]:
    """Open the datasets of each split; the training split has `size` samples. With `build`, missing indices are built.

    `opened` contains the indexed datasets that stages share (see `DatasetSettings`).
    """
    settings = DatasetSettings(
        random_seed=config.train.seed,
        sequence_length=config.model.seq_length,
        blend=plan.whole,
        split=config.data.split,
        path_to_cache=cache,
        tokenizer=NoTokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        opened=opened,
    )
    datasets = []
    # Open each split separately, since each has its own datasets. Unused splits and datasets that are too small are
    # excluded, because Megatron loops forever when it indexes a split without documents.
    for i, split_blend in enumerate(plan.splits):
        if split_blend is None:
            datasets.append(mix_with_long_documents(config, settings, plan.pools, size, build))
            continue
        samples = size if i == 0 else config.train.eval_steps * config.train.global_batch_size
        split_settings = replace(settings, blend=split_blend)  # type: ignore[call-arg]
        datasets.append(open_split(AllDocuments, split_settings, i, samples, build))
    return datasets


def cut_documents(lengths: np.ndarray, documents: np.ndarray, seq_length: int) -> dict[str, np.ndarray]:
    """Divide `documents` (D,), indices into `lengths`, into windows; return arrays (D,), int64.

    `ends_of_whole` is the cumulative number of whole windows, including those of the document itself. `left` is the
    number of remaining tokens. Windows of a document are consecutive from its start, and the token after each window,
    its last label, belongs to the document too. A single remaining token is only a label and is not counted.
    """
    lengths = lengths[documents].astype(np.int64)
    whole = np.maximum(lengths - 1, 0) // seq_length
    left = lengths - whole * seq_length
    left[(whole > 0) & (left == 1)] = 0
    return {"documents": documents, "ends_of_whole": np.cumsum(whole), "left": left}


class DocumentWindows(Dataset):
    """Endless epochs over documents of a dataset, each shuffled differently.

    Megatron's `GPTDataset` splits its stream of documents at arbitrary places, so a document of one and a half windows
    rarely fills a window. Here, each document provides as many whole windows as possible, from its start. The
    remaining tokens of all documents are shuffled, concatenated and split into windows as in `GPTDataset`. An epoch
    contains each token once, except for the last incomplete window. `cut` is the result of `cut_documents` for
    documents with more than `seq_length` tokens in total.
    """

    def __init__(self, dataset: IndexedDataset, cut: dict[str, np.ndarray], seq_length: int, seed: int):
        self._dataset, self._seq_length, self._seed = dataset, seq_length, seed
        self._documents, self._ends_of_whole, self._left = cut["documents"], cut["ends_of_whole"], cut["left"]
        self.samples_per_epoch = int(self._ends_of_whole[-1]) + max(0, int(self._left.sum()) - 1) // seq_length
        self._epoch = None

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        epoch, index = divmod(int(index), self.samples_per_epoch)
        if epoch != self._epoch:
            self._begin(epoch)
        index = int(self._samples[index])
        whole = index < self._ends_of_whole[-1]
        text = self._whole_window(index) if whole else self._window_of_rests(index - int(self._ends_of_whole[-1]))
        text = torch.from_numpy(text.astype(np.int64))
        return {"tokens": text[:-1], "labels": text[1:]}

    def _begin(self, epoch: int) -> None:
        # NumPy guarantees that this generator's stream never changes.
        random = np.random.RandomState([self._seed, epoch])
        self._samples = random.permutation(self.samples_per_epoch)
        self._order = random.permutation(np.flatnonzero(self._left))
        self._ends_of_rests = np.cumsum(self._left[self._order])
        self._epoch = epoch

    def _first_whole(self, place: int) -> int:
        """Return the index of a document's first whole window."""
        return int(self._ends_of_whole[place - 1]) if place else 0

    def _whole_window(self, index: int) -> np.ndarray:
        place = int(np.searchsorted(self._ends_of_whole, index, side="right"))
        window = index - self._first_whole(place)
        return self._dataset.get(
            int(self._documents[place]), offset=window * self._seq_length, length=self._seq_length + 1
        )

    def _window_of_rests(self, index: int) -> np.ndarray:
        start = index * self._seq_length
        missing, parts = self._seq_length + 1, []
        number = int(np.searchsorted(self._ends_of_rests, start, side="right"))
        while missing:
            place = int(self._order[number])
            left, begun = int(self._left[place]), int(self._ends_of_rests[number]) - int(self._left[place])
            skipped = max(0, start - begun)
            length = min(missing, left - skipped)
            offset = (int(self._ends_of_whole[place]) - self._first_whole(place)) * self._seq_length + skipped
            parts.append(self._dataset.get(int(self._documents[place]), offset=offset, length=length))
            missing -= length
            number += 1
        return np.concatenate(parts)
