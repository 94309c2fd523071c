"""Finds the checkpoint that a run continues, and checks every byte of it, each of which one rank reads."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_tape.checkpoint import directories as files
from megatron_tape.checkpoint.agreement import Agreement
from megatron_tape.checkpoint.frozen import find_source
from megatron_tape.checkpoint.index import INDEX, Place, read_index, readers, shard_of
from megatron_tape.checkpoint.reading import Reader, check_files, places_by_key
from megatron_tape.checkpoint.settings import check_same_model, problem_of_resume
from megatron_tape.checkpoint.tensors import Content, TensorFile
from megatron_tape.config.schema import RunConfig
from megatron_tape.errors import CheckpointError
from megatron_tape.io.files import FileDigest
from megatron_tape.parallel.layout import ParallelLayout

logger = logging.getLogger(__name__)


@dataclass
class Checkpoint:
    """A complete checkpoint on disk, opened for this rank."""

    path: Path
    state: dict
    source: Checkpoint | None = None
    """The checkpoint with the weights of the frozen parameters, if this one leaves them out."""
    held: dict[str, Content] = field(default_factory=dict, repr=False)
    """The bytes of files that this rank has read to check them; whoever has loaded everything clears it."""

    @property
    def step(self) -> int:
        """The step after which it was saved."""
        return self.state["step"]

    @cached_property
    def files(self) -> dict[str, FileDigest]:
        """The entries of its manifest."""
        return files.read_manifest(self.path)["files"]

    @cached_property
    def index(self) -> dict[str, dict[str, Place]]:
        """Where its tensors are, by file. Raises CheckpointError if that cannot be read."""
        return _index(self.path, self.files, self.state["tensor_model_parallel_size"])

    def read_records(self) -> None:
        """Read the manifest and the index now, so that ranks to which this object is sent need not."""
        _ = self.files, self.index

    def weight_names(self) -> set[str]:
        """Return the names of the parameters whose weights it, or the checkpoint with what it leaves out, holds."""
        keys = places_by_key(self.index, self.state["tensor_model_parallel_size"])
        names = {key.partition("/")[2] for key in keys if key.startswith("weight/")}
        return names if self.source is None else names | self.source.weight_names()

    def reader(self, parameters: Mapping[str, torch.nn.Parameter], layout: ParallelLayout) -> Reader:
        """Return a function from a key such as `exp_avg/NAME` to this rank's share of that tensor."""
        return Reader(self, parameters, layout)

    def release(self) -> None:
        """Free what is held of the files; they are read again if more of them is asked for."""
        self.held.clear()
        if self.source is not None:
            self.source.release()


def find_checkpoint(config: RunConfig, layout: ParallelLayout) -> Checkpoint | None:
    """Return the checkpoint that `checkpoint.resume` asks for, or None to start afresh; all ranks call it together.

    `auto` takes the newest complete checkpoint and warns about broken ones that it skips; so does a path outside the
    run's directory once the run has checkpoints of its own. Raises CheckpointError if a given path is not a complete
    checkpoint, if every checkpoint in the directory is broken, or if a file of the newest cannot be read.
    """
    directory = Path(config.checkpoint.directory)
    resume = files.what_to_resume(config.checkpoint.resume, directory)
    broken: set[Path] = set()
    warned: set[str] = set()
    while True:
        chosen: list[Path | None] = [None]
        with Agreement(layout) as agreement:
            if layout.rank == 0:
                chosen[0] = None if resume == "none" else _choose(resume, directory, broken, warned)
                if resume != "auto":
                    _refuse_later(directory, chosen[0])
        agreement.check("cannot start")
        dist.broadcast_object_list(chosen, src=0)
        (path,) = chosen
        if path is None:
            return None
        checkpoint, found = _open(path, layout)
        if not found:
            break
        if resume != "auto":
            raise CheckpointError(
                f"cannot start: checkpoint.resume {path} is not a whole checkpoint: {'; '.join(found)}; give another"
            )
        broken.add(path)
        if layout.rank == 0:
            logger.warning("checkpoint %s is skipped: %s", path, "; ".join(found))
    _open_source(checkpoint, layout)
    with Agreement(layout) as agreement:
        if layout.rank == 0:
            check_same_model(path, config)
    agreement.check("cannot continue")
    return checkpoint


def open_base(path: Path, layout: ParallelLayout) -> Checkpoint:
    """Open the checkpoint whose weights a run begins with; all ranks call it together.

    Raises CheckpointError if it is not complete.
    """
    checkpoint, found = _open(path, layout)
    if found:
        raise CheckpointError(
            f"{path}, whose weights the run begins with, is not whole: {'; '.join(found)}; fetch or write it again, or "
            "choose another"
        )
    _open_source(checkpoint, layout)
    return checkpoint


def _open(path: Path, layout: ParallelLayout) -> tuple[Checkpoint | None, list[str]]:
    """Return a checkpoint, or what is wrong with it; all ranks call it together, and read it together.

    Rank 0 reads the records. What it finds wrong about them or the files' sizes spares the others their reading.
    Raises CheckpointError on all ranks if one cannot read a file.
    """
    facts: list = [None, []]
    with Agreement(layout) as agreement:
        if layout.rank == 0:
            facts = [*_records(path)]
        if not path.is_dir():
            raise CheckpointError(f"{path} is not there; all nodes must see checkpoint.directory")
    agreement.check("cannot read a checkpoint")
    dist.broadcast_object_list(facts, src=0)
    checkpoint, found = facts
    if found:
        return None, found
    sizes = {name: entry["bytes"] for name, entry in checkpoint.files.items()}
    saved_size = checkpoint.state["tensor_model_parallel_size"]
    chosen = readers(sizes, saved_size, layout.tensor_parallel_size, layout.replica_size)
    mine = [name for name, rank in chosen.items() if rank == layout.rank]
    problems: list[str] = []
    with Agreement(layout) as agreement:
        checkpoint.held, problems = check_files(path, checkpoint.files, mine)
    agreement.check("cannot read a checkpoint")
    of_ranks: list[list[str]] = [[]] * layout.world_size
    dist.all_gather_object(of_ranks, problems)
    if found := [problem for of_rank in of_ranks for problem in of_rank]:
        return None, found
    return checkpoint, []


def _records(path: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the checkpoint with its manifest, state and index, or what is wrong with these or the files' sizes."""
    if found := files.problems(path, deep=False):
        return None, found
    try:
        checkpoint = Checkpoint(path, files.read_state(path))
        checkpoint.read_records()
    except (CheckpointError, ValueError, FileNotFoundError) as error:
        return None, [str(error)]
    return checkpoint, []


def _index(path: Path, listed: Mapping[str, FileDigest], size: int) -> dict[str, dict[str, Place]]:
    """Read the index or, of a checkpoint that has none, every file's header."""
    if INDEX not in listed:
        return {name: TensorFile(path / name).places() for name in sorted(listed) if shard_of(name) in range(size)}
    index = read_index(path)
    for name in index:
        if name not in listed or shard_of(name) not in range(size):
            raise CheckpointError(f"{path / INDEX} names {name}, which is no file of this checkpoint; choose another")
    return index


def _open_source(checkpoint: Checkpoint, layout: ParallelLayout) -> None:
    """Open the checkpoint that holds what this one leaves out, too. Raises CheckpointError if it is not complete."""
    source: list[Path | None] = [None]
    with Agreement(layout) as agreement:
        if layout.rank == 0:
            source[0] = find_source(checkpoint.path, checkpoint.state)
    agreement.check("cannot continue")
    dist.broadcast_object_list(source, src=0)
    if source[0] is None:
        return
    checkpoint.source, found = _open(source[0], layout)
    if found:
        raise CheckpointError(
            f"{source[0]}, which has the frozen parameters of {checkpoint.path}, is not whole: {'; '.join(found)}; put "
            "the original checkpoint back"
        )
    _open_source(checkpoint.source, layout)


def _choose(resume: str, directory: Path, broken: set[Path], warned: set[str]) -> Path | None:
    """Return the checkpoint to continue, judged by the sizes of its files; none of the `broken` ones."""

    def warn(message: str) -> None:
        if message not in warned:
            logger.warning("%s", message)
        warned.add(message)

    if resume == "auto":
        path = files.newest_whole(directory, warn, deep=False, but=broken, strict=True)
        if path is None and files.list_checkpoints(directory):
            raise CheckpointError(f"no checkpoint in {directory} is whole; move them away to start afresh")
        return path
    if problem := problem_of_resume(Path(resume), deep=False):
        raise CheckpointError(problem)
    return Path(resume)


def _refuse_later(directory: Path, chosen: Path | None) -> None:
    """Refuse a start before an existing checkpoint: the run's new ones would count as older and be removed."""
    start = 0 if chosen is None else files.read_manifest(chosen)["step"]
    newest = files.checkpointed_step(directory)
    if newest > start:
        raise CheckpointError(
            f"checkpoint.directory {directory} holds checkpoints up to step {newest}, beyond step {start} where this "
            "run would start; move them away, choose another directory, or continue with checkpoint.resume: auto"
        )
