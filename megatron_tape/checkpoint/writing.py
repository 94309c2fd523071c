"""Save a run: some of the ranks write the tensors, and rank 0 writes the other files.

The state is first copied to host memory, so that a thread can write it while training continues.
The checkpoint's directory is renamed to its final name when all files are written.
"""

from __future__ import annotations

import itertools
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megatron_tape.checkpoint import directories as files
from megatron_tape.checkpoint.index import INDEX, tensor_file, writers
from megatron_tape.checkpoint.random_state import RANDOM, pack_states, random_state
from megatron_tape.checkpoint.rank_errors import RankErrors
from megatron_tape.checkpoint.saved_tokenizer import write_tokenizer_files
from megatron_tape.config.schema import RunConfig, config_dict
from megatron_tape.errors import CheckpointError
from megatron_tape.io.files import FileDigest, digest
from megatron_tape.io.records import write_record
from megatron_tape.io.safetensors import write_safetensors
from megatron_tape.parallel.layout import ParallelLayout

if TYPE_CHECKING:
    from megatron_tape.run.attempts import Attempt
    from megatron_tape.training.engine import Engine


@dataclass(frozen=True)
class Writer:
    """Saves an engine's state as checkpoints of a run."""

    engine: Engine
    config: RunConfig
    attempt: Attempt
    """This attempt at the run. Only the newest attempt may write."""
    frozen_from: files.FrozenWeightsSource | None = None
    """The checkpoint with the frozen parameters, which are then omitted; None to write them."""
    tokenizer_files: Mapping[str, bytes] = field(default_factory=dict)
    """The contents of the tokenizer's files by name."""

    def save(self, step: int, samples: int, progress: dict) -> Path:
        """Save a checkpoint of `step`, and return its directory. All ranks call this together.

        `samples` is the number of sequences that the run has trained on or skipped. `progress` is
        JSON for `state.json`. Raises StaleAttempt if a newer attempt owns the run, and
        CheckpointError if a rank could not write.
        """
        save = Save(self, step, samples, progress, in_thread=False)
        while (path := save.advance()) is None:
            pass
        return path


class Save:
    """A save in progress: call `advance` until it returns the checkpoint's directory. All ranks do
    this together.

    `step` is the last completed step; by then the run has trained on or skipped `samples`
    sequences. `progress` is JSON for `state.json`. The constructor copies the state, so training
    may continue when it returns. With `in_thread`, a background thread writes the files.

    The constructor and `advance` raise the same error on all ranks: StaleAttempt if a newer attempt
    owns the run, CheckpointError if a rank could not write. Earlier checkpoints are then unchanged,
    and no files of this one remain.
    """

    def __init__(
        self,
        writer: Writer,
        step: int,
        samples: int,
        progress: dict,
        *,
        in_thread: bool,
    ):
        self._writer = writer
        self._layout = writer.engine.layout
        self._attempt = writer.attempt
        self._step = step
        self._root = Path(writer.config.checkpoint.directory)
        self._staging = self._attempt.staging / f"step-{step:08d}"
        self._in_thread = in_thread
        self._thread: threading.Thread | None = None
        self._is_publishing = False
        """Whether `_publish`, the second part of the save after `_write`, has been started."""
        self._entries: dict[str, FileDigest] = {}
        """The manifest's entries by file: those of this rank; in `_publish`, rank 0 has all."""
        self._index: dict[str, dict] = {}
        """The entries of `index.json` by file: those of this rank; in `_publish`, of all ranks."""

        with RankErrors(self._layout, self._attempt.check_owner) as errors:
            if self._layout.rank == 0:
                files.staging_directory(self._attempt.staging, step)
        errors.check(self._root, f"could not prepare checkpoint {step}")

        # Copy everything before training changes it.
        self._state = _state(writer, step, samples, progress)
        self._copy_tensors()
        self._random_states = _gather_on_rank_0(random_state(), self._layout)
        self._begin(f"could not write checkpoint {step}", self._write)

    @property
    def is_busy(self) -> bool:
        """Whether this rank's thread is running."""
        return self._thread is not None and self._thread.is_alive()

    def advance(self) -> Path | None:
        """Wait for the current part of the save, then start the next one.

        Return None or, after the last part, the checkpoint's directory. All ranks call this
        together. It does not wait for files if `is_busy` is false on all ranks.
        """
        self._end()
        if self._is_publishing:
            return self._root / self._staging.name

        # Rank 0 needs the digests and index entries of all ranks' files.
        for entries, index in _gather_on_rank_0((self._entries, self._index), self._layout):
            self._entries |= entries
            self._index |= index
        self._is_publishing = True
        self._begin(f"could not finish checkpoint {self._step}", self._publish)
        return None

    def _begin(self, failure: str, action: Callable[[], None]) -> None:
        """Start a part of the save, in a thread if saves are asynchronous.

        If `action` fails on this rank, `_end` raises its error on all ranks, introduced by
        `failure`.
        """
        self._failure = failure
        self._errors = errors = RankErrors(self._layout, self._attempt.check_owner)

        def run() -> None:
            with errors:
                action()

        if self._in_thread:
            # A daemon thread, so that a failing process ends without waiting for the files.
            self._thread = threading.Thread(target=run, name="save", daemon=True)
            self._thread.start()
        else:
            run()

    def _end(self) -> None:
        """Wait for the part that `_begin` has started, and raise its error on all ranks.

        After an error, rank 0 removes the checkpoint's files.
        """
        if self._thread is not None:
            self._thread.join()
        try:
            self._errors.check(self._root, self._failure)
        except CheckpointError:
            if self._layout.rank == 0:
                shutil.rmtree(self._staging, ignore_errors=True)
            raise

    def _copy_tensors(self) -> None:
        """Copy the tensors that this rank writes to `_tensors`, and set `_file_number`.

        `_file_number` is None if this rank writes no file. The files of a tensor-parallel rank are
        numbered in the order of pipeline stages, and within a stage in that of replica ranks.
        """
        layout = self._layout
        engine = self._writer.engine
        with_frozen = self._writer.frozen_from is None
        # The replica rank that writes each tensor, by the tensor's key.
        writer_of = writers(
            engine.state_sizes(with_frozen),
            layout.tensor_parallel_size * layout.pipeline_size,
            layout.replica_size,
            self._writer.config.checkpoint.writers,
        )
        self._tensors = engine.training_state(writer_of.__getitem__, with_frozen)

        # (pipeline rank, replica rank) of the ranks that write for this tensor-parallel rank.
        ranks_of_stages = layout.gather_pipeline_stages(sorted(set(writer_of.values())))
        writing_ranks = [
            (pipeline_rank, rank)
            for pipeline_rank, ranks in enumerate(ranks_of_stages)
            for rank in ranks
        ]
        this_rank = layout.pipeline_rank, layout.replica_rank
        self._file_number = None
        if this_rank in writing_ranks:
            self._file_number = writing_ranks.index(this_rank)

    def _write(self) -> None:
        """Write this rank's tensors and, on rank 0, the random states of all ranks."""
        if self._file_number is not None:
            name = tensor_file(self._layout.tensor_parallel_rank, self._file_number)
            self._entries[name], self._index[name] = write_safetensors(
                self._staging / name, dict(sorted(self._tensors.items()))
            )
        if self._random_states:  # empty except on rank 0
            self._entries[RANDOM], _ = write_safetensors(
                self._staging / RANDOM, pack_states(self._random_states)
            )
        # Free the memory of the copies.
        self._tensors = self._random_states = None

    def _publish(self) -> None:
        """On rank 0, write the other files, publish the checkpoint, and remove old ones."""
        if self._layout.rank != 0:
            return

        write_record(self._staging / INDEX, {"files": self._index})
        write_record(self._staging / files.STATE, self._state)
        names = [INDEX, files.STATE]
        if self._writer.tokenizer_files:
            names += write_tokenizer_files(self._writer.tokenizer_files, self._staging)
        for name in names:
            self._entries[name] = digest(self._staging / name)

        self._attempt.check_owner()
        files.publish(self._staging, self._root, self._step, self._entries)

        # A newer attempt may have started during `publish`. Its checkpoints must not be removed.
        self._attempt.check_owner()
        checkpoint = self._writer.config.checkpoint
        files.prune(self._root, checkpoint.keep, checkpoint.keep_every, self._step)


def _gather_on_rank_0(value: Any, layout: ParallelLayout) -> list[Any]:
    """Return the `value` of each rank on rank 0, and an empty list on the others."""
    values: list[Any] = []
    if layout.rank == 0:
        values = [None] * layout.world_size
    # On other ranks, `gather_object` requires None.
    dist.gather_object(value, values or None)
    return values


def _state(writer: Writer, step: int, samples: int, progress: dict) -> dict:
    """Return the contents of `state.json`, a `CheckpointState`. All ranks call this together.

    `samples` is the number of sequences that the run has trained on or skipped.
    """
    engine = writer.engine
    layout = engine.layout
    sharded_here = {
        name: {"dim": parameter.partition_dim, "stride": parameter.partition_stride}
        for name, parameter in engine.parameters.items()
        if getattr(parameter, "tensor_model_parallel", False)
    }
    frozen_here = [name for name in engine.parameters if name not in engine.trained]
    sharded: dict[str, dict] = {}
    for sharded_in_stage in layout.gather_pipeline_stages(sharded_here):
        sharded |= sharded_in_stage
    return {
        "step": step,
        "optimizer_steps": engine.optimizer_steps,
        "consumed_samples": samples,
        "progress": progress,
        "tensor_model_parallel_size": layout.tensor_parallel_size,
        # Data- times context-parallel ranks.
        "data_parallel_size": layout.replica_size,
        "sharded": sharded,
        "frozen": list(itertools.chain(*layout.gather_pipeline_stages(frozen_here))),
        "frozen_from": writer.frozen_from,
        "config": config_dict(writer.config),
    }
