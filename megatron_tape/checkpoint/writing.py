"""Save a run: some of the ranks write the tensors, and rank 0 writes the other files.

The state is first copied to host memory, so that a thread can write it while training continues.
The checkpoint's directory is renamed to its final name when all files are written.
"""

import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_tape.checkpoint import directories as files
from megatron_tape.checkpoint.index import INDEX, tensor_file, writers
from megatron_tape.checkpoint.interfaces import Claim, EngineState
from megatron_tape.checkpoint.random_state import RANDOM, pack_states, random_state
from megatron_tape.checkpoint.rank_errors import RankErrors
from megatron_tape.checkpoint.saved_tokenizer import write_tokenizer_files
from megatron_tape.config.schema import RunConfig, config_dict
from megatron_tape.errors import CheckpointError
from megatron_tape.io.files import FileDigest, digest
from megatron_tape.io.records import write_record
from megatron_tape.io.safetensors import write_safetensors


@dataclass(frozen=True)
class Writer:
    """Saves an engine's state as checkpoints of a run.

    `claim` is the right of the current attempt to write. Frozen parameters are omitted if
    `frozen_from` refers to a checkpoint that contains them. `tokenizer_files` maps the names of the
    tokenizer's files to their contents.
    """

    engine: EngineState
    config: RunConfig
    claim: Claim
    frozen_from: files.FrozenWeightsSource | None = None
    tokenizer_files: Mapping[str, bytes] = field(default_factory=dict)

    def save(self, step: int, samples: int, progress: dict) -> Path:
        """Save a checkpoint as `Save` does, and return its directory. All ranks call this
        together.
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

    def __init__(self, writer: Writer, step: int, samples: int, progress: dict, *, in_thread: bool):
        self._layout = writer.engine.layout
        self._config = writer.config
        self._step = step
        self._claim = writer.claim
        self._root = Path(self._config.checkpoint.directory)
        self._staging = self._claim.home / f"step-{step:08d}"
        self._in_thread = in_thread
        self._thread = None
        self._tokenizer_files = writer.tokenizer_files
        self._entries: dict[str, FileDigest] = {}
        self._index: dict[str, dict] = {}
        self._begin(f"could not prepare checkpoint {step}", self._prepare, in_thread=False)
        self._end()
        self._copy(writer, samples, progress)
        self._begin(f"could not write checkpoint {step}", self._write, in_thread)
        self._remaining: list[tuple[str, Callable[[], None]]] = [
            (f"could not finish checkpoint {step}", self._publish)
        ]

    @property
    def busy(self) -> bool:
        """Whether this rank's thread is running."""
        return self._thread is not None and self._thread.is_alive()

    def advance(self) -> Path | None:
        """Wait for the current stage of the save, then start the next one. Return the directory
        after the last stage.

        All ranks call this together. It does not block if no rank is `busy`.
        """
        self._end()
        if not self._remaining:
            return self._root / self._staging.name
        self._gather_entries()
        self._begin(*self._remaining.pop(), self._in_thread)
        return None

    def _begin(self, failure: str, action: Callable[[], None], in_thread: bool) -> None:
        """Start an action that may fail on this rank. `_end` raises its error on all ranks,
        introduced by `failure`.
        """
        self._failure, self._agreement = failure, RankErrors(self._layout, self._claim.check_owner)

        def run(errors: RankErrors = self._agreement) -> None:
            with errors:
                action()

        if in_thread:
            self._thread = threading.Thread(target=run, name="save", daemon=True)
        else:
            self._thread = None
        if self._thread is None:
            run()
        else:
            self._thread.start()

    def _end(self) -> None:
        if self._thread is not None:
            self._thread.join()
        try:
            self._agreement.check(self._root, self._failure)
        except CheckpointError:
            if self._layout.rank == 0:
                shutil.rmtree(self._staging, ignore_errors=True)
            raise

    def _prepare(self) -> None:
        if self._layout.rank == 0:
            files.staging_directory(self._claim.home, self._step)

    def _copy(self, writer: Writer, samples: int, progress: dict) -> None:
        layout = self._layout
        engine = writer.engine
        frozen = writer.frozen_from is None
        sizes = engine.state_sizes(frozen)
        limit = self._config.checkpoint.writers
        writer_of = writers(
            sizes, layout.tensor_parallel_size * layout.pipeline_size, layout.replica_size, limit
        )
        self._tensors = engine.training_state(writer_of.__getitem__, frozen)
        # Number the files by pipeline stage, then by rank.
        ranks = layout.gather_pipeline_stages(sorted(set(writer_of.values())))
        writing_ranks = [
            (stage, rank) for stage, stage_ranks in enumerate(ranks) for rank in stage_ranks
        ]
        this_rank = layout.pipeline_rank, layout.replica_rank
        if this_rank in writing_ranks:
            self._number = writing_ranks.index(this_rank)
        else:
            self._number = None
        self._state = _state(writer, self._step, samples, progress)
        is_rank_0 = layout.rank == 0
        random_states: list[Any] | None = [None] * layout.world_size if is_rank_0 else None
        dist.gather_object(random_state(), random_states)
        self._random = pack_states(random_states) if is_rank_0 else None

    def _write(self) -> None:
        if self._number is not None:
            name = tensor_file(self._layout.tensor_parallel_rank, self._number)
            self._entries[name], self._index[name] = write_safetensors(
                self._staging / name, dict(sorted(self._tensors.items()))
            )
        if self._random is not None:
            self._entries[RANDOM], _ = write_safetensors(self._staging / RANDOM, self._random)
        self._tensors = self._random = None

    def _gather_entries(self) -> None:
        """Gather the digests and index entries of all ranks' files on rank 0."""
        of_ranks: list[Any] | None = (
            [None] * self._layout.world_size if self._layout.rank == 0 else None
        )
        dist.gather_object((self._entries, self._index), of_ranks)
        for entries, index in of_ranks or ():
            self._entries |= entries
            self._index |= index

    def _publish(self) -> None:
        if self._layout.rank != 0:
            return
        for name, record in ((INDEX, {"files": self._index}), (files.STATE, self._state)):
            write_record(self._staging / name, record)
            self._entries[name] = digest(self._staging / name)
        for name in (
            write_tokenizer_files(self._tokenizer_files, self._staging)
            if self._tokenizer_files
            else ()
        ):
            self._entries[name] = digest(self._staging / name)
        self._claim.check_owner()
        files.publish(self._staging, self._root, self._step, self._entries)
        checkpoint = self._config.checkpoint
        # A newer attempt may have started meanwhile, and its checkpoints must not be removed.
        self._claim.check_owner()
        files.prune(self._root, checkpoint.keep, checkpoint.keep_every, self._step)


def _state(writer: Writer, step: int, samples: int, progress: dict) -> dict:
    """Return the contents of `state.json`. All ranks call this together."""
    engine = writer.engine
    config = writer.config
    local_sharded = {
        name: {"dim": parameter.partition_dim, "stride": parameter.partition_stride}
        for name, parameter in engine.names.items()
        if getattr(parameter, "tensor_model_parallel", False)
    }
    local_frozen = [name for name in engine.names if name not in engine.trained]
    sharded = {}
    frozen = []
    for stage_sharded, stage_frozen in engine.layout.gather_pipeline_stages(
        (local_sharded, local_frozen)
    ):
        sharded = sharded | stage_sharded
        frozen = frozen + stage_frozen
    return {
        "step": step,
        "optimizer_steps": engine.optimizer_steps,
        "consumed_samples": samples,
        "progress": progress,
        "tensor_model_parallel_size": engine.layout.tensor_parallel_size,
        "data_parallel_size": engine.layout.replica_size,
        "sharded": sharded,
        "frozen": frozen,
        "frozen_from": writer.frozen_from,
        "config": config_dict(config),
    }
