"""Megatron's datasets, indexed once by rank 0, and training data of which a share comes from long documents.

Both are opened with `build` by rank 0 alone, in an empty directory that `index_cache` gives it, if the cache lacks the
index, and then by all ranks from the cache.
"""

import contextlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch.distributed as dist
from megatron.core.datasets import helpers
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from torch import Tensor
from torch.utils.data import Dataset

from megatron_tape.config.schema import RunConfig
from megatron_tape.data.index_cache import DamagedIndex, cached, load_array
from megatron_tape.data.long_documents import Pools, passes_in_words, training_lengths
from megatron_tape.data.windows import DocumentWindows, cut_documents
from megatron_tape.parallel import megatron_patches

logger = logging.getLogger(__name__)

_THREADS = 8
"""Most datasets of a blend that are opened at the same time."""


megatron_patches.read_indices(load_array)


@dataclass
class DatasetSettings(GPTDatasetConfig):
    """What Megatron's datasets are built from; `ShorterDocuments` have less than `documents_below` tokens.

    All splits and stages with the same `opened` share the indexed datasets in it, by prefix.
    """

    documents_below: int | None = None
    opened: dict[str, IndexedDataset] = field(default_factory=dict)

    def open(self, prefix: str) -> IndexedDataset:
        """Return the indexed dataset of this prefix."""
        if prefix not in self.opened:
            dataset = self.opened[prefix] = IndexedDataset(prefix)
            # The tokens are mapped. Megatron would keep this second descriptor, too, which a blend of hundreds lacks.
            dataset.bin_reader._bin_file_reader.close()
        return self.opened[prefix]


class AllDocuments(GPTDataset):
    """A `GPTDataset` that is not longer than what was asked for, which Megatron would read a whole index to know."""

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: DatasetSettings) -> IndexedDataset:
        """Return the indexed dataset that the splits share."""
        return config.open(dataset_path)

    def __len__(self) -> int:
        return super().__len__() if self.sample_index is not None else self.num_samples

    def __getitem__(self, idx: int) -> dict[str, Tensor]:
        """Return a sample; raises LookupError for one that is not a whole sequence of consecutive documents."""
        if self.shuffle_index is None:
            self.shuffle_index = load_array(self.path_to_shuffle_index)
            self.sample_index = load_array(self.path_to_sample_index)
            self.document_index = load_array(self.path_to_document_index)
        place = int(self.shuffle_index[idx])
        count = int(self.sample_index[place + 1, 0]) - int(self.sample_index[place, 0])
        more = count - self.config.sequence_length - 1  # documents than tokens, unless some are empty
        if count < 0 or (more > 0 and more > np.count_nonzero(self.dataset.sequence_lengths == 0)):
            raise LookupError(f"it would have {count} documents")
        sample = super().__getitem__(idx)
        if not sample["loss_mask"].all():  # of what Megatron has added
            raise LookupError("its documents are too short")
        return sample


class ShorterDocuments(AllDocuments):
    """One of those documents only that have less than `documents_below` tokens."""

    def __init__(self, indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config):
        if indexed_indices is not None:  # they are cached
            indexed_indices = indexed_indices[
                indexed_dataset.sequence_lengths[indexed_indices] < config.documents_below
            ]
        super().__init__(indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config)


class Mixed(Dataset):
    """`size` samples of several datasets in fixed proportions, spread evenly by Megatron's rule for blends.

    Which sample is which dataset's is mapped from `directory`, a cache. `counts` says how many come from each; add
    `datasets` in the order of `weights`.
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
        sizes = [sum(self.counts), len(self._dataset), len(self._sample)]
        if len(self.counts) != len(shares) or min(self.counts) < 0 or sizes != [size] * 3:
            raise DamagedIndex.of(directory, f"a mix of {len(shares)} datasets has the wrong size")

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.datasets[self._dataset[index]][int(self._sample[index])]


def open_split(kind: type[AllDocuments], settings: DatasetSettings, split: int, size: int, build: bool) -> Dataset:
    """Return at least `size` samples of one split: 0 for training, 1 for validation.

    `build` indexes what is not cached. Without it, all ranks call this together, and none reads an index: of one, a
    sample maps what it needs.
    """
    threads = min(_THREADS, len(settings.blend[0]), len(os.sched_getaffinity(0)))
    alone = replace(settings, num_dataset_builder_threads=threads)  # type: ignore[call-arg]
    alone.split_matrix = [bounds if i == split else None for i, bounds in enumerate(settings.split_matrix)]
    sizes = [size if i == split else 0 for i in range(len(alone.split_matrix))]
    # Megatron's constructor refuses these beside a split, which the cached indices already follow.
    alone.fast_cache_load = alone.defer_npy_index_mmap = not build
    with megatron_patches.without_barriers() if build else contextlib.nullcontext():
        return BlendedMegatronDatasetBuilder(kind, sizes, lambda: True, alone).build()[split]


def mix_with_long_documents(
    config: RunConfig, settings: DatasetSettings, pools: Pools, size: int, build: bool
) -> Mixed:
    """Return `size` training samples of `settings.blend`, a share of them windows of long documents.

    All ranks have the same `pools`. `build` indexes what is not cached; otherwise rank 0 logs what is drawn.
    """
    minimum, share = config.data.long_documents.minimum, config.data.long_documents.share
    cache, seq_length = settings.path_to_cache, config.model.seq_length
    mix = Mixed(cache, [share, 1 - share] if pools.others else [1.0], size)
    long = Mixed(cache, [member.weight for member in pools.long], mix.counts[0])
    for member in pools.long:

        def make(prefix: str = member.prefix) -> dict[str, np.ndarray]:
            lengths = training_lengths(prefix, config.data.split)
            return cut_documents(lengths, np.flatnonzero(lengths >= minimum), seq_length)

        cut = cached(cache, "DocumentWindows", ("documents", "ends_of_whole", "left"), member.prefix, make)
        dataset = settings.open(member.prefix)
        windows = None
        if {len(array) for array in cut.values()} == {member.documents} and cut["left"].min() >= 0:
            windows = DocumentWindows(dataset, cut, seq_length, config.train.seed)
        if windows is None or not 0 < windows.samples_per_epoch <= member.tokens // seq_length:
            raise DamagedIndex.of(cache, f"the windows of the long documents in {member.prefix} do not suit it")
        long.datasets.append(windows)
    mix.datasets.append(long)
    if pools.others and mix.counts[1]:
        of_others = [member.weight for member in pools.others] if len(pools.others) > 1 else None
        blend_of_others = ([member.prefix for member in pools.others], of_others)
        shorter = replace(settings, blend=blend_of_others, documents_below=minimum)  # type: ignore[call-arg]
        mix.datasets.append(open_split(ShorterDocuments, shorter, 0, mix.counts[1], build))
    if not build and dist.get_rank() == 0:
        for sentence, warning in passes_in_words(pools, minimum, share, size * config.model.seq_length):
            logger.info(sentence)
            if warning:
                logger.warning("warning: %s", warning)
    return mix
