"""Open the checkpoint that a run continues and check every byte of it; each file is read by one rank."""

import functools
import itertools
import logging
from pathlib import Path

import torch.distributed as dist

from megatron_tape.checkpoint import directories as files
from megatron_tape.checkpoint.agreement import Agreement, on_rank_0
from megatron_tape.checkpoint.index import readers
from megatron_tape.checkpoint.locate import check_complete, find_source, resolve_resume
from megatron_tape.checkpoint.reading import Checkpoint, check_files
from megatron_tape.checkpoint.saved_settings import check_same_model
from megatron_tape.config.schema import RunConfig
from megatron_tape.errors import CheckpointError
from megatron_tape.parallel.layout import ParallelLayout

logger = logging.getLogger(__name__)


def open_to_resume(config: RunConfig, layout: ParallelLayout) -> Checkpoint | None:
    """Open the checkpoint of `checkpoint.resume`, or return None to start from scratch; all ranks call it together.

    `auto` takes the newest complete checkpoint, and warns about broken ones that it skips. A path outside the run's
    directory means the same once the run has checkpoints of its own. Raises CheckpointError if a given path is not a
    complete checkpoint, if every checkpoint in the directory is broken, or if a file of the newest cannot be read.
    """
    directory = Path(config.checkpoint.directory)
    resume = resolve_resume(config.checkpoint.resume, directory)
    broken: set[Path] = set()
    warned: set[str] = set()
    while True:
        path = on_rank_0(layout, directory, "cannot start", lambda: _choose(resume, config, broken, warned))
        if path is None:
            return None
        checkpoint, found = _open(path, layout)
        if not found:
            break
        if resume != "auto":
            raise CheckpointError(str(path), f"is not a complete checkpoint: {'; '.join(found)}", "resume another")
        broken.add(path)
        if layout.rank == 0:
            logger.warning("checkpoint %s is skipped: %s", path, "; ".join(found))
    _open_source(checkpoint, layout)
    on_rank_0(layout, path, "cannot continue", lambda: check_same_model(path, config))
    return checkpoint


def open_base(path: Path, layout: ParallelLayout) -> Checkpoint:
    """Open the checkpoint with the initial weights of a run; all ranks call it together.

    Raises CheckpointError if it is not complete.
    """
    checkpoint, found = _open(path, layout)
    if found:
        problem = f"has the initial weights of the run and is not complete: {'; '.join(found)}"
        raise CheckpointError(str(path), problem, "fetch or write it again, or choose another as extension.from")
    _open_source(checkpoint, layout)
    return checkpoint


def _open(path: Path, layout: ParallelLayout) -> tuple[Checkpoint | None, list[str]]:
    """Open a checkpoint and check its bytes; return it, or its problems.

    The ranks read in parallel, each the files that it will load. Raises CheckpointError on all ranks if one cannot read
    a file.
    """
    with Agreement(layout) as agreement:
        if not path.is_dir():
            raise CheckpointError(
                str(path), "does not exist on this node", "use a checkpoint.directory that all nodes can read"
            )
    agreement.check(path, "cannot read a checkpoint")
    checkpoint, found = on_rank_0(layout, path, "cannot read a checkpoint", lambda: _records(path))
    if found:
        return None, found
    sizes = {name: entry["bytes"] for name, entry in checkpoint.files.items()}
    saved_size = checkpoint.state["tensor_model_parallel_size"]
    chosen = readers(sizes, saved_size, layout.tensor_parallel_size, layout.replica_size, layout.pipeline_size)
    mine = [name for name, rank in chosen.items() if rank == layout.rank]
    problems: list[str] = []
    with Agreement(layout) as agreement:
        checkpoint.cached, problems = check_files(path, checkpoint.files, mine)
    agreement.check(path, "cannot read a checkpoint")
    all_problems: list[list[str]] = [[]] * layout.world_size
    dist.all_gather_object(all_problems, problems)
    if found := list(itertools.chain(*all_problems)):
        return None, found
    return checkpoint, []


def _records(path: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the checkpoint with its manifest, state and index, or the problems of these and of the file sizes."""
    if found := files.problems(path, deep=False):
        return None, found
    try:
        checkpoint = Checkpoint(path, files.read_state(path))
        checkpoint.read_records()
    except (ValueError, FileNotFoundError) as error:
        return None, [str(error)]
    return checkpoint, []


def _open_source(checkpoint: Checkpoint, layout: ParallelLayout) -> None:
    """Also open the checkpoint with the weights that this one omits. Raises CheckpointError if it is not complete."""
    find = functools.partial(find_source, checkpoint.path, checkpoint.state)
    source = on_rank_0(layout, checkpoint.path, "cannot continue", find)
    if source is None:
        return
    checkpoint.source, found = _open(source, layout)
    if found:
        problem = f"has the frozen parameters of {checkpoint.path} and is not complete: {'; '.join(found)}"
        raise CheckpointError(str(source), problem, "put the original checkpoint back")
    _open_source(checkpoint.source, layout)


def _choose(resume: str, config: RunConfig, broken: set[Path], warned: set[str]) -> Path | None:
    """Return the checkpoint to continue, checked by its file sizes, but none of the `broken` ones.

    The start must not be before an existing checkpoint: the run's new checkpoints would count as older and be removed.
    """

    def warn(message: str) -> None:
        if message not in warned:
            logger.warning("%s", message)
        warned.add(message)

    directory = Path(config.checkpoint.directory)
    if resume == "auto":
        path = files.newest_complete(directory, warn, deep=False, excluding=broken, strict=True)
        if path is None and files.list_checkpoints(directory):
            raise CheckpointError(
                str(directory), "has no complete checkpoint", "move its checkpoints away to start from scratch"
            )
        return path
    path, start = None, 0
    if resume != "none":
        path = Path(resume)
        check_complete(path, deep=False)
        start = files.read_manifest(path)["step"]
    newest = files.checkpointed_step(directory)
    if newest > start:
        raise CheckpointError(
            str(directory),
            f"has checkpoints up to step {newest}, beyond step {start} where this run would start",
            f"move them away, {config.to_start_another_run}, or continue with checkpoint.resume: auto",
        )
    return path
