"""Open a run's training and validation datasets: Megatron's `GPTDataset`, and long documents.

Rank 0 reads the datasets' .idx files and plans which datasets each split draws from
(`plan_for_all`). If the cache lacks the run's index, which defines the order of its samples, rank 0
calls `open_datasets` with `build` in a temporary directory of `index_cache`. All ranks then call it
without `build`, and map the index from the cache into memory. S is `model.seq_length`.
"""

import itertools
import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.datasets import helpers
from megatron.core.datasets.blended_megatron_dataset_builder import (
    BlendedMegatronDatasetBuilder,
    _get_size_per_split_per_dataset,
)
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import normalize
from torch import Tensor
from torch.utils.data import Dataset

from megatron_tape.config.data import blend
from megatron_tape.config.schema import RunConfig
from megatron_tape.config.stages import Stage, stages_of
from megatron_tape.data.index_cache import cached, load_array
from megatron_tape.data.indexed_dataset import IndexedDatasetReader, dataset_paths, first_invalid_id
from megatron_tape.data.inputs import check_token_ids, find_large_enough, missing_validation
from megatron_tape.data.long_documents import (
    DatasetBlend,
    DocumentPools,
    epochs_by_dataset,
    find_pools,
    log_epochs,
    split_lengths,
)
from megatron_tape.errors import ConfigError
from megatron_tape.parallel import megatron_patches

logger = logging.getLogger(__name__)

_THREADS = 8
"""Maximum number of datasets of a blend that are opened at the same time."""


# Megatron then reads the arrays of cached indices with `load_array`, which checks them.
megatron_patches.load_cached_indices_with(load_array)


@dataclass(frozen=True)
class DatasetPlan:
    """The datasets that each split draws samples from, the same on all ranks."""

    identity: dict[str, list[int]]
    """Size in bytes and modification time in ns of each dataset file, by path. Changed files
    require a new index.
    """
    splits: list[DatasetBlend | None]
    """The blend of each required split, training first; None if `pools` replace it."""
    pools: DocumentPools | None
    """The long and the other training documents with `data.long_documents`, otherwise None."""


def plan_for_all(config: RunConfig, evaluates: bool) -> DatasetPlan:
    """Return rank 0's plan on all ranks, which call this together.

    Only rank 0 reads the .idx files. If `evaluates` is true, the plan includes the validation
    split. Without `train.eval_interval`, that split is left out if it has no whole sequence. A
    dataset of a blend that is too small for a split is excluded from the split, with a warning.

    Raises ConfigError, on all ranks, if a required split does not contain a whole sequence, or a
    dataset cannot be read.
    """
    plan: list[DatasetPlan | ConfigError | None] = [None]
    if dist.get_rank() == 0:
        try:
            plan[0] = _plan(config, evaluates)
        # The other ranks wait for the plan, so errors are sent to them instead of raised here.
        except ConfigError as error:
            plan[0] = error
        # The datasets were read before, by `check_datasets`.
        except (OSError, ValueError) as error:
            plan[0] = ConfigError(
                "data.prefix", f"contains a dataset that can no longer be read: {error}"
            )
    # Replaces the item of the list on the other ranks.
    dist.broadcast_object_list(plan, src=0)
    if isinstance(plan[0], ConfigError):
        raise plan[0]
    return plan[0]


def _plan(config: RunConfig, evaluates: bool, log: bool = True) -> DatasetPlan:
    """Return the plan, on this process alone. `log` enables warnings about excluded datasets.

    If `evaluates` is true, the plan includes the validation split, as in `plan_for_all`.

    Raises OSError or UserError if a dataset cannot be read.
    """
    prefixes, weights = blend(config.data.prefix)
    if weights is None and len(prefixes) > 1:
        # Without weights, Megatron would stop after one epoch over the list.
        weights = [float(len(IndexedDatasetReader(prefix).tokens)) for prefix in prefixes]

    splits = []
    pools = None
    names = ["training"]  # of the splits that need a blend
    if config.data.long_documents is not None:
        pools = find_pools(config)
        splits.append(None)
        names = []
    # With `train.eval_interval`, validation data is required, and `find_large_enough` raises below
    # if there is too little.
    if evaluates and (config.train.eval_interval or missing_validation(config) is None):
        names.append("validation")
    for name in names:
        tokens_by_index, problems = find_large_enough(config, name)
        if log:
            for problem in problems:
                logger.warning(
                    "warning: data.split %s; the dataset is excluded from the %s data",
                    problem,
                    name,
                )
        split_weights = None
        if weights is not None:
            split_weights = [weights[i] for i in tokens_by_index]
        split_prefixes = [prefixes[i] for i in tokens_by_index]
        splits.append(DatasetBlend(split_prefixes, split_weights, [*tokens_by_index.values()]))

    identity = {}
    for prefix in prefixes:
        for path in dataset_paths(prefix):
            status = path.stat()
            identity[str(path)] = [status.st_size, status.st_mtime_ns]
    return DatasetPlan(identity, splits, pools)


class NoTokenizer:
    """Stands in for the tokenizer that `GPTDataset` requires, although it only reads ids here.

    Megatron compares ids with `eod` and `pad`, so these are ids that no dataset contains.
    """

    unique_identifiers: dict = {}
    eod = -2
    pad = -1
    vocab_size = None


class CheckedDataset(IndexedDataset):
    """An indexed dataset that refuses token ids outside the model's vocabulary when they are read.

    On a GPU, they would cause a CUDA error. Megatron's `GPTDataset` treats -1 as padding and
    replaces it by 0.
    """

    def __init__(self, prefix: str, vocab_size: int):
        super().__init__(prefix)
        self._vocab_size = vocab_size
        # Tokens are read from a memory map, so this open file is not needed. One more descriptor
        # for each dataset is too much for a blend of hundreds.
        self.bin_reader._bin_file_reader.close()

    def __reduce__(self) -> tuple:
        # Megatron's would recreate the dataset with its own arguments, without the vocabulary size.
        return CheckedDataset, (self.path_prefix, self._vocab_size)

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return `length` token ids of sequence `idx` from `offset` on.

        Raises ConfigError for an invalid id.
        """
        ids = super().get(idx, offset, length)
        if first_invalid_id(ids, self._vocab_size) is not None:
            # The last document that begins at or before this sequence contains it.
            document = int(np.searchsorted(self.document_indices, idx, side="right")) - 1
            check_token_ids(ids, self._vocab_size, self.path_prefix, document)
        return ids


@dataclass
class DatasetSettings(GPTDatasetConfig):
    """Settings of Megatron's datasets."""

    documents_below: int | None = None
    """The length limit of `ShorterDocuments` in tokens; None for other datasets."""
    model_vocab_size: int = 0
    opened: dict[str, CheckedDataset] = field(default_factory=dict)
    """The opened indexed datasets by prefix, shared by all splits and stages of a run."""
    build: bool = False
    """Whether to build the index in `path_to_cache`. Rank 0 then opens the datasets alone.
    Otherwise, all ranks open them together and only read the index.
    """

    def open(self, prefix: str) -> CheckedDataset:
        """Return the indexed dataset `prefix`, which is opened only once."""
        if prefix not in self.opened:
            self.opened[prefix] = CheckedDataset(prefix, self.model_vocab_size)
        return self.opened[prefix]


class AllDocuments(GPTDataset):
    """A `GPTDataset` whose length is the requested number of samples until its index is loaded.

    Megatron's `__len__` would read the lengths of all documents to return the number of samples in
    whole epochs.
    """

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: DatasetSettings) -> IndexedDataset:
        """Return the indexed dataset at `dataset_path`, which all splits share."""
        return config.open(dataset_path)

    def __len__(self) -> int:
        if self.sample_index is not None:  # loaded, or just built
            return super().__len__()
        return self.num_samples


class ShorterDocuments(AllDocuments):
    """A `GPTDataset` of the documents with less than `config.documents_below` tokens."""

    def __init__(
        self, indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config
    ):
        # `indexed_indices` are the indices of the split's documents. Megatron passes None if the
        # index is cached, which then contains only the shorter documents.
        if indexed_indices is not None:
            lengths = indexed_dataset.sequence_lengths[indexed_indices]
            indexed_indices = indexed_indices[lengths < config.documents_below]
        super().__init__(
            indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config
        )


def interleave(shares: list[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the dataset that each sample is drawn from, and the sample's index in that dataset.

    These are arrays (size,), int16 and int64. `shares` are the datasets' fractions of all samples.
    """
    dataset_of_sample = np.zeros(size, np.int16)
    index_in_dataset = np.zeros(size, np.int64)
    # This fills both arrays. The last argument makes it print messages.
    helpers.build_blending_indices(
        dataset_of_sample, index_in_dataset, shares, len(shares), size, False
    )
    return dataset_of_sample, index_in_dataset


class Mixed(Dataset):
    """`size` samples of several datasets, interleaved evenly in the proportions `weights`.

    The caller must append the datasets to `datasets` in the order of `weights`. The `dataset_id` of
    a sample is the index of its dataset in this list. `counts` is the number of samples drawn from
    each dataset; it is known before the datasets are opened. The results of `interleave` are arrays
    in the cache.
    """

    def __init__(self, settings: DatasetSettings, weights: Sequence[float], size: int):
        self.datasets: list[Dataset] = []
        shares = [weight / sum(weights) for weight in weights]

        def make() -> dict[str, np.ndarray]:
            dataset_of_sample, index_in_dataset = interleave(shares, size)
            return {
                "counts": np.bincount(dataset_of_sample, minlength=len(shares)),
                "dataset": dataset_of_sample,
                "sample": index_in_dataset,
            }

        names = ("counts", "dataset", "sample")
        key = [shares, size]
        arrays = cached(settings.path_to_cache, "Mixed", names, key, make, settings.build)
        self.counts = arrays["counts"].tolist()
        self._dataset_of_sample = arrays["dataset"]
        self._index_in_dataset = arrays["sample"]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        dataset_id = self._dataset_of_sample[index]
        sample = self.datasets[dataset_id][int(self._index_in_dataset[index])]
        return {**sample, "dataset_id": dataset_id}


def open_split(
    dataset_class: type[AllDocuments],
    settings: DatasetSettings,
    datasets: DatasetBlend,
    split: int,
    size: int,
) -> Dataset:
    """Return a dataset with at least `size` samples of one split: 0 for training, 1 for validation.

    Each dataset of the blend `datasets` is opened as a `dataset_class`. Unless `settings.build` is
    true, indices are mapped into memory when they are first used.
    """
    threads = min(_THREADS, len(datasets.prefixes), len(os.sched_getaffinity(0)))
    one_split = replace(  # type: ignore[call-arg]
        settings, blend=(datasets.prefixes, datasets.weights), num_dataset_builder_threads=threads
    )
    # Megatron skips a split whose entry is None.
    count = len(settings.split_matrix)
    sizes = [0] * count
    sizes[split] = size
    one_split.split_matrix = [None] * count
    one_split.split_matrix[split] = settings.split_matrix[split]
    # Set after construction: Megatron's constructor rejects these options together with `split`,
    # even though the cached indices already take the split into account.
    one_split.fast_cache_load = one_split.defer_npy_index_mmap = not settings.build
    # Megatron asks the lambda whether this rank opens datasets: every rank that is here does.
    builder = BlendedMegatronDatasetBuilder(dataset_class, sizes, lambda: True, one_split)
    if not settings.build:
        return builder.build()[split]
    # The other ranks do not build, so Megatron's barriers would wait forever.
    with megatron_patches.barriers_disabled():
        return builder.build()[split]


def mix_with_long_documents(
    config: RunConfig, settings: DatasetSettings, pools: DocumentPools, size: int
) -> Mixed:
    """Return `size` training samples with a fixed share from long documents.

    All ranks pass the same `pools`. Unless the index is being built, rank 0 logs the number of
    epochs over the long and the other documents of each dataset.
    """
    long_documents = config.data.long_documents
    has_others = bool(pools.others.prefixes)
    # There are no other documents if the share of the long ones is 1.
    shares = [1.0]
    if has_others:
        shares = [long_documents.share, 1 - long_documents.share]
    mix = Mixed(settings, shares, size)

    mix.datasets.append(_mix_of_windows(config, settings, pools.long, mix.counts[0]))
    # A short run may draw no sample from the other documents.
    if has_others and mix.counts[1]:
        limit = long_documents.minimum  # all documents with fewer tokens are other ones
        shorter = replace(settings, documents_below=limit)  # type: ignore[call-arg]
        others = _without_single_weight(pools.others)
        dataset = open_split(ShorterDocuments, shorter, others, split=0, size=mix.counts[1])
        mix.datasets.append(dataset)

    if not settings.build and dist.get_rank() == 0:
        kinds = {"long": pools.long, "other": pools.others}
        for (kind, pool), count in zip(kinds.items(), mix.counts):
            tokens = count * config.model.seq_length
            for prefix, epochs in epochs_by_dataset(pool, tokens).items():
                log_epochs(epochs, f"the {kind} documents of {prefix}")
    return mix


def _mix_of_windows(
    config: RunConfig, settings: DatasetSettings, datasets: DatasetBlend, size: int
) -> Mixed:
    """Return `size` samples of the `DocumentWindows` of the long documents of `datasets`."""
    seq_length = config.model.seq_length
    mix = Mixed(settings, datasets.weights, size)
    for prefix in datasets.prefixes:
        # The default binds this prefix, and not the one of the last iteration.
        def make(prefix: str = prefix) -> dict[str, np.ndarray]:
            lengths = split_lengths(prefix, config.data.split, "training")
            long = np.flatnonzero(lengths >= config.data.long_documents.minimum)
            return divide_documents(lengths, long, seq_length)

        names = ("documents", "ends_of_whole", "left")
        cache = settings.path_to_cache
        # The prefix is enough as a key: the directory's name is a digest of all other settings.
        divided = cached(cache, "DocumentWindows", names, prefix, make, settings.build)
        dataset = settings.open(prefix)
        mix.datasets.append(DocumentWindows(dataset, divided, seq_length, config.train.seed))
    return mix


def _without_single_weight(datasets: DatasetBlend) -> DatasetBlend:
    """Return the blend, without weights if it has only one dataset.

    Megatron would draw more samples than necessary from a single dataset with a weight.
    """
    if len(datasets.prefixes) > 1:
        return datasets
    return replace(datasets, weights=None)


def open_datasets(
    config: RunConfig, plan: DatasetPlan, size: int, cache: str, build: bool, opened: dict
) -> list[Dataset]:
    """Return one dataset per split of `plan`; that of the training split has `size` samples.

    `cache` is the directory of the index, which this builds if `build` is true. `opened` keeps the
    indexed datasets that are open, by prefix.
    """
    settings = DatasetSettings(
        random_seed=config.train.seed,
        sequence_length=config.model.seq_length,
        blend=blend(config.data.prefix),  # replaced by `open_split`; without one, data is mocked
        split=config.data.split,
        path_to_cache=cache,
        tokenizer=NoTokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        model_vocab_size=config.model.vocab_size,
        opened=opened,
        build=build,
    )
    # The number of samples by split. Every evaluation uses the same validation samples.
    sizes = [size, config.train.eval_steps * config.train.global_batch_size]
    datasets = []
    # Open each split separately, since the plan may exclude different datasets from each. Megatron
    # would loop forever while indexing a split without documents.
    for split, datasets_of_split in enumerate(plan.splits):
        if datasets_of_split is None:
            datasets.append(mix_with_long_documents(config, settings, plan.pools, size))
        else:
            datasets.append(
                open_split(AllDocuments, settings, datasets_of_split, split, sizes[split])
            )
    return datasets


def sample_order(config: RunConfig, samples: int, consumed: int) -> list:
    """Return a value to compare the order of samples in two runs.

    If the values of two runs are equal, then so are the first `consumed` samples of both. `samples`
    is the number of training samples of the whole run. Megatron shuffles a dataset over all epochs
    of the run, so the order depends on the number of epochs.
    """
    stages = stages_of(config)
    return [
        (
            stage.start,
            stage.config.data.prefix,
            stage.config.train.seed,
            _shuffled_epochs(stage.config, size),
        )
        for stage, size in zip(stages, stage_sizes(stages, samples))
        if stage.start < consumed
    ]


def stage_sizes(stages: list[Stage], end: int) -> list[int]:
    """Return the number of samples of each stage of a run that ends after `end` samples."""
    bounds = [*(stage.start for stage in stages), end]
    return [last - first for first, last in itertools.pairwise(bounds)]


def _shuffled_epochs(config: RunConfig, size: int) -> list[tuple[int, bool]]:
    """Return `shuffled_epochs` of each dataset of `GPTDataset`, for `size` training samples in
    total.
    """
    plan = _plan(config, evaluates=False, log=False)
    datasets = plan.splits[0]
    # With `data.long_documents`, only the order of the other documents depends on `size`:
    # `DocumentWindows` has the same order for every number of samples.
    if datasets is None:
        share = config.data.long_documents.share
        datasets = _without_single_weight(plan.pools.others)
        dataset_of_sample, _ = interleave([share, 1 - share], size)
        size = int(np.count_nonzero(dataset_of_sample))  # dataset 1 is the others
    sizes = [size]
    if datasets.weights is not None:
        # Megatron requests more samples of each dataset than its weight requires.
        surplus = GPTDatasetConfig.mid_level_dataset_surplus
        weights = normalize(datasets.weights)
        per_dataset = _get_size_per_split_per_dataset(weights, [size], surplus)
        sizes = [split_sizes[0] for split_sizes in per_dataset]
    seq_length = config.model.seq_length
    return [
        shuffled_epochs(tokens, samples, seq_length)
        for tokens, samples in zip(datasets.tokens, sizes)
    ]


def shuffled_epochs(tokens: int, samples: int, seq_length: int) -> tuple[int, bool]:
    """Return the epochs of a `GPTDataset`, and whether it shuffles the last one separately.

    `tokens` is the size of the dataset, and `samples` the number of requested samples of
    `seq_length` tokens. Two requests with equal results shuffle the dataset in the same way.
    Follows Megatron's `GPTDataset._build_document_sample_shuffle_indices`.
    """
    # The last of the tokens needs one more as its label.
    epochs = max(1, math.ceil((samples * seq_length + 1) / tokens))
    if epochs == 1:
        return 1, False
    samples_before_last = ((epochs - 1) * tokens - 1) // seq_length
    samples_per_epoch = (tokens - 1) // seq_length
    # Megatron's threshold: less than 80 % of the last epoch is used.
    return epochs, samples - samples_before_last < int(0.8 * samples_per_epoch)


def divide_documents(
    lengths: np.ndarray, documents: np.ndarray, seq_length: int
) -> dict[str, np.ndarray]:
    """Divide D documents into windows of S tokens. Return arrays (D,), int64, by name.

    `documents` (D,) are indices into `lengths` (N,), the numbers of tokens of all documents of a
    dataset. The windows of a document are consecutive from its start. A window is whole if its
    document also contains its last label, which is the next token. The arrays are:

    - `documents`: the argument.
    - `ends_of_whole`: the number of whole windows of this document and all before it.
    - `left`: the number of tokens after the document's whole windows, the remainder. It is 0 if the
      only such token is already the last label of a whole window.
    """
    lengths = lengths[documents].astype(np.int64)
    # The first token of a document is no label.
    whole = np.maximum(lengths - 1, 0) // seq_length
    left = lengths - whole * seq_length
    left[(whole > 0) & (left == 1)] = 0
    return {"documents": documents, "ends_of_whole": np.cumsum(whole), "left": left}


class DocumentWindows(Dataset):
    """Training samples from the documents of a dataset, shuffled again in every epoch.

    A sample is a window: `tokens` and `labels` (S,), int64. Megatron's `GPTDataset` splits its
    stream of documents at arbitrary positions, so a document of one and a half windows rarely fills
    a window. Here, each document provides as many whole windows as possible, from its start. The
    remainders of all documents are shuffled, concatenated and split into windows as in
    `GPTDataset`. An epoch contains each token once, except for the last incomplete window.
    `divided` is the result of `divide_documents` for documents with more than S tokens in total.

    In a window of remainders, the label of a remainder's last token is the first token of the next
    remainder's document, as if that document followed as a whole. The next remainder itself can
    begin in the middle of its document.
    """

    def __init__(
        self, dataset: IndexedDataset, divided: dict[str, np.ndarray], seq_length: int, seed: int
    ):
        self._dataset = dataset
        self._seq_length = seq_length
        self._seed = seed
        self._documents = divided["documents"]
        self._ends_of_whole = divided["ends_of_whole"]
        self._left = divided["left"]
        self._whole_windows = int(self._ends_of_whole[-1])
        # The last token of all remainders is only a label.
        remainder_windows = max(0, int(self._left.sum()) - 1) // seq_length
        self.samples_per_epoch = self._whole_windows + remainder_windows
        # The epoch for which `_shuffle` was last called; None before the first sample.
        self._epoch: int | None = None

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return sample `index`, counted from the beginning of the first epoch."""
        epoch, index_in_epoch = divmod(int(index), self.samples_per_epoch)
        if epoch != self._epoch:
            self._shuffle(epoch)
        # The windows are numbered: first all whole ones, then those of remainders.
        window = int(self._windows[index_in_epoch])
        if window < self._whole_windows:
            # The first document with more whole windows up to its end than precede this one.
            document = int(np.searchsorted(self._ends_of_whole, window, side="right"))
            offset = (window - self._first_whole(document)) * self._seq_length
            ids = self._read(document, offset, self._seq_length + 1)
            tokens = ids[:-1]
            labels = ids[1:]
        else:
            tokens, labels = self._remainder_window(window - self._whole_windows)
        return {
            "tokens": torch.from_numpy(tokens.astype(np.int64)),
            "labels": torch.from_numpy(labels.astype(np.int64)),
        }

    def _shuffle(self, epoch: int) -> None:
        """Shuffle the windows and the remainders for an epoch.

        `_windows` are the numbers of the windows in their new order, and `_order` those of the
        documents with a remainder. `_ends_of_remainders` are the ends of the remainders in tokens,
        in the concatenation of all remainders.
        """
        # NumPy guarantees that this generator's stream never changes.
        random = np.random.RandomState([self._seed, epoch])
        self._windows = random.permutation(self.samples_per_epoch)
        self._order = random.permutation(np.flatnonzero(self._left))
        self._ends_of_remainders = np.cumsum(self._left[self._order])
        self._epoch = epoch

    def _first_whole(self, document: int) -> int:
        """Return the index of the first whole window of `documents[document]`."""
        if document:
            return int(self._ends_of_whole[document - 1])
        return 0

    def _read(self, document: int, offset: int, length: int) -> np.ndarray:
        """Return `length` token ids of `documents[document]` from `offset` on."""
        return self._dataset.get(int(self._documents[document]), offset=offset, length=length)

    def _remainder_window(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens and the labels (S,) of window `index` among those of remainders."""
        start = index * self._seq_length
        missing = self._seq_length + 1  # with the label of the last token
        parts = []
        labels = []
        # The first remainder that ends after the window's start.
        number = int(np.searchsorted(self._ends_of_remainders, start, side="right"))
        while missing:
            document = int(self._order[number])
            remainder_length = int(self._left[document])
            remainder_start = int(self._ends_of_remainders[number]) - remainder_length
            # The previous window may end in this remainder.
            skipped = max(0, start - remainder_start)
            length = min(missing, remainder_length - skipped)

            # The remainder begins after the document's whole windows.
            whole = int(self._ends_of_whole[document]) - self._first_whole(document)
            part = self._read(document, whole * self._seq_length + skipped, length)
            if parts:
                # The label of the previous remainder's last token.
                labels.append(self._read(document, offset=0, length=1))
            labels.append(part[1:])
            parts.append(part)
            missing -= length
            number += 1
        return np.concatenate(parts)[:-1], np.concatenate(labels)
