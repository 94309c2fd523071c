"""Load the micro-batches of a run from Megatron's indexed datasets or from a `SampleSource`.

The order of the samples depends only on the settings and the seed. B is the micro-batch size, S the
sequence length.
"""

import bisect
import functools
import itertools
import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from megatron_tape.config.data import SAMPLE_SOURCES, split_shares
from megatron_tape.config.schema import RunConfig
from megatron_tape.config.stages import Stage, stage_at, stages_of
from megatron_tape.data.index_cache import build_on_rank_0, digest_of
from megatron_tape.data.indexed_dataset import raise_file_limit
from megatron_tape.data.inputs import missing_validation
from megatron_tape.data.long_documents import DatasetBlend, epochs_by_dataset, log_epochs
from megatron_tape.data.megatron_datasets import open_datasets, plan_for_all, stage_sizes
from megatron_tape.data.samples import ExampleSamples, SampleSource, sample_source
from megatron_tape.errors import ConfigError, UserError
from megatron_tape.parallel.layout import ParallelLayout

logger = logging.getLogger(__name__)

NOT_FOR_WORKERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
"""Signals that schedulers and terminals send to all processes of a run. Only the training process
handles them.
"""


@dataclass(frozen=True)
class Batches:
    """Iterate over this rank's micro-batches of training and validation data.

    A micro-batch is a dict of tensors (B, S) on the rank's device: `tokens` and `labels`, int64.
    With `data.reset_attention_mask`, it also has `documents` (see `documents_from_tokens`); with a
    `SampleSource`, `loss_weights`, float32. With several datasets, training micro-batches have
    `dataset_id` (B,), int64, on the CPU, which the model does not get (see `model_inputs`).
    Training sample i is the same under every parallel layout.
    """

    train: Dataset
    validation: Dataset | None
    """None if the run evaluates no validation data."""
    config: RunConfig
    layout: ParallelLayout
    eod: int | None
    """Id of the end-of-document token."""
    samples: range
    """Indices of the training samples of the remaining steps."""
    steps: int
    """Number of remaining steps."""

    def training(self) -> Iterator[dict[str, Tensor]]:
        """Return this rank's micro-batches of all remaining steps, in order.

        Starts `data.num_workers` loader processes.
        """
        batch_sizes = self.config.train.batch_sizes(self.samples.start, self.steps)
        return self._load(self.train, self.samples, self.config.data.num_workers, batch_sizes)

    def evaluation(self) -> Iterator[dict[str, Tensor]]:
        """Return this rank's micro-batches of the validation data.

        They are the same at every evaluation.
        """
        samples = range(self.config.train.eval_steps * self.config.train.global_batch_size)
        # The loss is averaged over all samples, as if they were one global batch.
        batch_sizes = iter([len(samples)])
        # No workers (0): the training process loads the same few sequences every time, which remain
        # in the page cache. Workers would either be forked while NCCL threads are running, or be
        # idle between evaluations.
        batches = self._load(self.validation, samples, 0, batch_sizes)
        return map(model_inputs, batches)

    def _load(
        self, dataset: Dataset, samples: range, num_workers: int, batch_sizes: Iterator[int]
    ) -> Iterator[dict[str, Tensor]]:
        """Yield this rank's micro-batches of `samples`, indices into `dataset`.

        `batch_sizes` are the sizes of consecutive global batches, over which the loss of a
        `SampleSource` is averaged.
        """
        keys = ["tokens", "labels"]
        eod = None  # `_MicroBatches` then adds no `documents`
        if isinstance(dataset, SampleSource):
            keys.append("loss_mask")
        # Not for a `SampleSource`: each of its samples is a single document.
        elif self.config.data.reset_attention_mask:
            eod = self.eod
        size = self.config.train.micro_batch_size
        loader = DataLoader(
            _MicroBatches(dataset, keys, eod),
            batch_size=None,  # `_MicroBatches` returns whole micro-batches
            # Yields the list of sample indices of each of this rank's micro-batches.
            sampler=self.layout.token_layout.micro_batches(samples.start, samples.stop, size),
            num_workers=num_workers,
            pin_memory=self.layout.device.type == "cuda",
            worker_init_fn=functools.partial(_obey_only_the_parent, os.getpid()),
            # Without this, the loader would draw its seed from torch's global generator, and
            # thereby change the random numbers of the run.
            generator=torch.Generator(),
        )
        batches = self._on_device(_start_workers(loader))
        if "loss_mask" in keys:
            return self._weighted(batches, batch_sizes)
        return batches

    def _weighted(
        self, batches: Iterator[dict[str, Tensor]], batch_sizes: Iterator[int]
    ) -> Iterator[dict[str, Tensor]]:
        """Replace the `loss_mask` of each micro-batch by `loss_weights`.

        `batch_sizes` are the sizes of the global batches. The loss of a micro-batch is the weighted
        sum of its tokens' losses. Averaged over all micro-batches of a global batch, it is the mean
        loss of the tokens that the masks select.
        """
        shards = self.layout.token_layout.data_shards  # ranks with different sequences
        for batch_size in batch_sizes:
            # The weight depends on all of this rank's micro-batches of the global batch.
            count = batch_size // (self.config.train.micro_batch_size * shards)
            group = list(itertools.islice(batches, count))
            in_loss = torch.stack([batch["loss_mask"].sum() for batch in group]).sum()
            # The loss is averaged over the `count * shards` micro-batches of all ranks. The factor
            # undoes the division by their number. Without any token in the loss, a division by 0
            # would make the weights NaN.
            weight = count * shards / self.layout.token_layout.total(in_loss).clamp(min=1)
            for batch in group:
                mask = batch.pop("loss_mask")
                yield batch | {"loss_weights": mask * weight.float()}

    def _on_device(self, batches: Iterator[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
        """Yield the micro-batches with their tensors on the rank's device.

        Raises the UserError that `_MicroBatches` returns in place of a micro-batch.
        """
        device = self.layout.device
        try:
            for batch in batches:
                if isinstance(batch, UserError):
                    raise batch
                # `dataset_id` stays on the CPU, where its readers need it.
                inputs = model_inputs(batch)
                yield batch | {
                    key: value.to(device, non_blocking=True) for key, value in inputs.items()
                }
        finally:
            # Dropping the loader's iterator stops its processes at once, even if something, such as
            # a traceback, still refers to this frame.
            del batches


def model_inputs(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a micro-batch that the model gets: all but `dataset_id`."""
    return {key: value for key, value in batch.items() if key != "dataset_id"}


class _InStages(Dataset):
    """The samples of a run with stages: `stages[n].start + i` is sample i of `datasets[n]`."""

    def __init__(self, datasets: list[Dataset], stages: list[Stage]):
        self._datasets = datasets
        self._stages = stages

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        number = stage_at(self._stages, index)
        return self._datasets[number][index - self._stages[number].start]


class _MicroBatches(Dataset):
    """Micro-batches of samples. The index of a micro-batch is the list of its samples' indices.

    A micro-batch contains the tensors `keys` of each sample, `documents` unless `eod` is None, and
    `dataset_id` if the samples have one. A UserError is returned, not raised, because `DataLoader`
    would change its type.
    """

    def __init__(self, samples: Dataset, keys: list[str], eod: int | None):
        self._samples = samples
        self._keys = keys
        self._eod = eod

    def __getitem__(self, indices: list[int]) -> dict[str, Tensor] | UserError:
        """Return the micro-batch of the samples with these indices."""
        try:
            samples = [self._samples[index] for index in indices]
        except UserError as error:
            return error
        batch = {key: torch.stack([sample[key] for sample in samples]) for key in self._keys}
        if "dataset_id" in samples[0]:  # one number for each sample, not a tensor
            dataset_ids = [sample["dataset_id"] for sample in samples]
            batch["dataset_id"] = torch.tensor(dataset_ids, dtype=torch.int64)
        if self._eod is not None:
            batch["documents"] = documents_from_tokens(batch["tokens"], self._eod)
        return batch


def documents_from_tokens(tokens: Tensor, eod: int) -> Tensor:
    """Return the number of each token's document within its sequence, from 0.

    The token ids (..., S) give numbers (..., S), int64. The token `eod` is the last token of its
    document.
    """
    ends = tokens == eod
    return ends.cumsum(-1) - ends.long()  # an end belongs to the document before it


def _start_workers(loader: DataLoader) -> Iterator[dict[str, Tensor]]:
    """Return an iterator over `loader`, whose workers are started with NOT_FOR_WORKERS blocked."""
    # The workers that are forked here inherit the mask of blocked signals.
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, NOT_FOR_WORKERS)
    try:
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)


def _obey_only_the_parent(parent: int, worker: int) -> None:
    """Make this loader process exit if `parent` sends it a signal of NOT_FOR_WORKERS, and ignore
    these signals from other processes.

    `parent` is the process ID of the training process. `os.getppid()` would be another one if a
    fork server starts the workers. `worker` is the number that torch passes, which is not used.

    Slurm and torchrun send signals to every process of a step. If a signal killed a worker, torch
    would raise an error in the training process before it could save. The parent, in contrast,
    sends SIGTERM to its workers when Python exits. If the parent is killed, torch's worker loop
    notices this and exits.
    """
    # A worker of a fork server has not inherited the mask that `_start_workers` sets.
    signal.pthread_sigmask(signal.SIG_BLOCK, NOT_FOR_WORKERS)

    def exit_with_parent() -> None:
        while signal.sigwaitinfo(NOT_FOR_WORKERS).si_pid != parent:
            pass
        os._exit(0)  # `sys.exit` would only end this thread

    threading.Thread(target=exit_with_parent, name="signals", daemon=True).start()


def build_batches(
    config: RunConfig,
    layout: ParallelLayout,
    eod: int | None = None,
    step: int = 0,
    consumed: int = 0,
    on_progress: Callable[[], None] = lambda: None,
) -> Batches:
    """Open the run's training and validation data and return its batches.

    All ranks call this together. If the cache lacks the index of the datasets, rank 0 builds it. A
    dataset of a blend that is too small for a split is excluded from that split; the other datasets
    keep their proportions.

    Args:
        config: the run's settings.
        layout: the parallel layout.
        eod: the id of the end-of-document token; required with `data.reset_attention_mask`.
        step: the number of completed steps.
        consumed: the number of training samples that the run has consumed or skipped.
        on_progress: called repeatedly while the index is being built.

    Raises:
        ConfigError: a required split does not contain a whole sequence, or the index cannot be
            stored.
    """
    assert eod is not None or not config.data.reset_attention_mask, "eod is required"
    steps = config.train.steps - step
    samples = range(consumed, config.train.samples_after(steps, consumed))
    if config.data.source in SAMPLE_SOURCES:
        training: Dataset = sample_source(config, validation=False)
        validation: Dataset | None = None
        if missing_validation(config) is None:
            validation = sample_source(config, validation=True)
        if isinstance(training, ExampleSamples) and layout.rank == 0:
            log_epochs(samples.stop / len(training.lines), config.data.examples.path)
    else:
        stages = stages_of(config)
        # A continued run may have fewer sequences left than when its stages were checked.
        if stages[-1].start >= samples.stop:
            raise ConfigError(
                ("data.stages", "train.steps"),
                f"starts its last stage after {stages[-1].start:,} sequences, but this run ends"
                f" after {samples.stop:,}, because its batch size has changed",
                "raise the share of that stage, or train.steps",
            )
        raise_file_limit()
        training, validation = _open_indexed(config, stages, samples.stop, on_progress)
        if layout.rank == 0:
            # The first stage needs no message unless the run continues in a later one.
            for stage in stages[max(1, stage_at(stages, consumed)) :]:
                # The number of steps from now on until the stage begins.
                steps_before = bisect.bisect_left(
                    range(steps), stage.start, key=lambda n: config.train.samples_after(n, consumed)
                )
                logger.info(
                    "from step %s on, the training data is %s",
                    f"{step + steps_before + 1:,}",
                    stage.config.data.prefix,
                )
    return Batches(training, validation, config, layout, eod, samples, steps)


def _open_indexed(
    config: RunConfig, stages: list[Stage], end: int, on_progress: Callable[[], None]
) -> tuple[Dataset, Dataset | None]:
    """Return the training data of all stages, up to sample `end`, and the validation data.

    All ranks call this together. Rank 0 builds the index if the cache lacks it. The validation data
    is None if there is none, or not enough.
    """
    is_rank_0 = dist.get_rank() == 0
    if is_rank_0:
        logger.info("building the index of %s training sequences", f"{end:,}")
    started = time.monotonic()
    train = config.train
    _, validation_share, _ = split_shares(config.data.split)
    evaluates = train.validates and validation_share > 0
    plans = []
    for stage in stages:
        with stage.rename_error_subjects():
            # Validation uses the data of the first stage.
            plans.append(plan_for_all(stage.config, evaluates=evaluates and stage.number == 0))
    # `plan_for_all` leaves the validation split out if its data is not enough.
    evaluates = len(plans[0].splits) > 1

    # The index is in a directory named by a digest of everything that the index depends on.
    sizes = stage_sizes(stages, end)
    validation_size = 0
    if evaluates:
        validation_size = train.eval_steps * train.global_batch_size
    digest = digest_of(
        config.model.seq_length,
        config.data.split,
        config.data.long_documents,
        train.seed,
        sizes,
        validation_size,
        plans,
    )
    directory = os.path.join(config.data.resolved_cache_directory, digest)

    def open_all(directory: str, build: bool) -> list[list[Dataset]]:
        """Return a list per stage: its training dataset and, for the first stage, the validation
        dataset.
        """
        opened: dict = {}  # datasets by prefix; stages may have some in common
        return [
            open_datasets(stage.config, plan, size, directory, build, opened)
            for stage, plan, size in zip(stages, plans, sizes)
        ]

    build_on_rank_0(directory, lambda temporary: open_all(temporary, build=True), on_progress)
    splits_by_stage = open_all(directory, build=False)
    if is_rank_0:
        _log_epochs([plan.splits[0] for plan in plans], sizes, config.model.seq_length)
        logger.info("index ready after %.1f s", time.monotonic() - started)

    validation = splits_by_stage[0][1] if evaluates else None
    training = [splits[0] for splits in splits_by_stage]
    if len(stages) == 1:
        return training[0], validation
    return _InStages(training, stages), validation


def _log_epochs(blends: list[DatasetBlend | None], sizes: list[int], seq_length: int) -> None:
    """Log how often the run repeats the most repeated dataset of the stages' training data.

    `blends` and `sizes`, the numbers of samples, have an entry per stage.
    """
    epochs: Counter = Counter()
    for datasets, size in zip(blends, sizes):
        # None with `data.long_documents`: `mix_with_long_documents` has logged the epochs then.
        if datasets is not None:
            epochs.update(epochs_by_dataset(datasets, size * seq_length))
    for prefix, most_epochs in epochs.most_common(1):
        name = prefix
        if len(epochs) > 1:
            name = f"{prefix}, the most repeated of {len(epochs)} datasets"
        log_epochs(most_epochs, name)
