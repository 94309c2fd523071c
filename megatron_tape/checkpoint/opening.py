"""Finds and checks the checkpoint that a run continues, and reads this rank's share of its tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_tape.checkpoint import directories as files
from megatron_tape.checkpoint.agreement import Agreement
from megatron_tape.checkpoint.frozen import find_source
from megatron_tape.checkpoint.settings import check_same_model, problem_of_resume
from megatron_tape.checkpoint.shares import Shares, check_shares
from megatron_tape.config.schema import RunConfig
from megatron_tape.errors import CheckpointError
from megatron_tape.model.weights import shard, unshard
from megatron_tape.parallel.layout import ParallelLayout

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk, opened for this rank."""

    path: Path
    state: dict
    source: Checkpoint | None = None
    """The checkpoint with the weights of the frozen parameters, if this one leaves them out."""

    @property
    def step(self) -> int:
        """The step after which it was saved."""
        return self.state["step"]

    def weight_names(self) -> set[str]:
        """Return the names of the parameters whose weights it, or the checkpoint with what it leaves out, holds."""
        names = Shares(self.path, 0).weight_names()
        return names if self.source is None else names | self.source.weight_names()

    def reader(self, parameters: dict[str, torch.nn.Parameter], layout: ParallelLayout) -> Callable[[str], Tensor]:
        """Return a function from a key such as `exp_avg/NAME` to this rank's share of that tensor.

        If the tensor-parallel size is the one it was saved with, a share is read unchanged; otherwise it is cut from
        the whole tensor.
        """
        size = self.state["tensor_model_parallel_size"]
        shares = [Shares(self.path, rank) for rank in range(size)]
        # Every rank checks all of them, so that all ranks reject the checkpoint if one is wrong.
        check_shares(self.path, shares, parameters, layout.tensor_parallel_size)
        left_out = None if self.source is None else self.source.reader(parameters, layout)

        def read(key: str) -> Tensor:
            if key not in shares[0]:
                if left_out is None:
                    raise CheckpointError(f"{self.path} holds no {key}; choose another checkpoint")
                return left_out(key)
            if size == layout.tensor_parallel_size:
                return shares[layout.tensor_parallel_rank].read(key)
            parameter = parameters[key.partition("/")[2]]
            whole = unshard([held.read(key) for held in shares], parameter)
            return shard(whole, parameter, layout.tensor_parallel_rank, layout.tensor_parallel_size)

        return read


def find_checkpoint(config: RunConfig, layout: ParallelLayout) -> Checkpoint | None:
    """Return the checkpoint that `checkpoint.resume` asks for, or None to start afresh; all ranks call it together.

    `auto` takes the newest complete checkpoint and warns about broken ones that it skips; so does a path outside the
    run's directory once the run has checkpoints of its own. Raises CheckpointError if a given path is not a complete
    checkpoint, or if every checkpoint in the directory is broken.
    """
    resume = files.what_to_resume(config.checkpoint.resume, config.checkpoint.directory)
    found: list[str | None] = [None]
    with Agreement(layout) as agreement:
        if layout.rank == 0:
            found[0] = None if resume == "none" else _choose(resume, Path(config.checkpoint.directory))
            if resume != "auto":
                _refuse_later(Path(config.checkpoint.directory), found[0])
    agreement.check("cannot start")
    dist.broadcast_object_list(found, src=0)
    if found[0] is None:
        return None
    checkpoint = None
    with Agreement(layout) as agreement:
        checkpoint = _open(Path(found[0]), deep=layout.rank == 0)
        check_same_model(checkpoint.path, config)
    agreement.check("cannot continue")
    return checkpoint


def open_base(path: Path, layout: ParallelLayout) -> Checkpoint:
    """Open the checkpoint whose weights a run begins with; all ranks call it together, rank 0 reads every byte.

    Raises CheckpointError if it is not complete.
    """
    checkpoint = None
    with Agreement(layout) as agreement:
        if layout.rank == 0 and (found := files.problems(path)):
            raise CheckpointError(
                f"{path}, whose weights the run begins with, is not whole: {'; '.join(found)}; fetch or write it "
                "again, or choose another"
            )
        checkpoint = _open(path, deep=layout.rank == 0)
    agreement.check("cannot begin")
    return checkpoint


def _open(path: Path, deep: bool) -> Checkpoint:
    """Open a complete checkpoint, and the one that holds what it leaves out; `deep` reads every byte of the latter."""
    state = files.read_state(path)
    _check_ranks_files(path, state)
    source = find_source(path, state)
    if source is None:
        return Checkpoint(path, state)
    if deep and (found := files.problems(source)):
        raise CheckpointError(
            f"{source}, which has the frozen parameters of {path}, is not whole: {'; '.join(found)}; put the original "
            "checkpoint back"
        )
    return Checkpoint(path, state, _open(source, deep))


def _choose(resume: str, directory: Path) -> str | None:
    if resume == "auto":
        path = files.newest_whole(directory, lambda message: logger.warning("%s", message))
        if path is None and files.list_checkpoints(directory):
            raise CheckpointError(f"no checkpoint in {directory} is whole; move them away to start afresh")
        return None if path is None else str(path)
    if problem := problem_of_resume(Path(resume)):
        raise CheckpointError(problem)
    return resume


def _check_ranks_files(path: Path, state: dict) -> None:
    """Refuse a checkpoint if this rank does not see every tensor file of it."""
    for rank in range(state["tensor_model_parallel_size"]):
        found = len(list(path.glob(f"tensors-tp{rank:02d}-*.safetensors")))
        if found != state["data_parallel_size"]:
            raise CheckpointError(
                f"{path} has {found} of {state['data_parallel_size']} files tensors-tp{rank:02d}-*; all nodes must see "
                "checkpoint.directory"
            )


def _refuse_later(directory: Path, chosen: str | None) -> None:
    """Refuse a start before an existing checkpoint: the run's new ones would count as older and be removed."""
    start = 0 if chosen is None else files.read_manifest(chosen)["step"]
    newest = files.checkpointed_step(directory)
    if newest > start:
        raise CheckpointError(
            f"checkpoint.directory {directory} holds checkpoints up to step {newest}, beyond step {start} where this "
            "run would start; move them away, choose another directory, or continue with checkpoint.resume: auto"
        )
