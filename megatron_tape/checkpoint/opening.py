"""Open the checkpoint that a run continues or starts from, and check its bytes; one rank reads each
file.
"""

import functools
import itertools
import logging
from pathlib import Path

import torch.distributed as dist

from megatron_tape.checkpoint import directories as files
from megatron_tape.checkpoint.locate import check_complete, find_source, resolve_resume
from megatron_tape.checkpoint.rank_errors import RankErrors, on_rank_0
from megatron_tape.checkpoint.reading import Checkpoint
from megatron_tape.checkpoint.saved_settings import check_same_model
from megatron_tape.config.schema import RunConfig
from megatron_tape.errors import CheckpointError
from megatron_tape.io.versions import node_name
from megatron_tape.parallel.layout import ParallelLayout

logger = logging.getLogger(__name__)

_READING = "cannot read a checkpoint"


def open_to_resume(config: RunConfig, layout: ParallelLayout) -> Checkpoint | None:
    """Open the checkpoint of `checkpoint.resume`, or return None to start without one. All ranks
    call this together.

    `auto` selects the newest complete checkpoint, and warns about broken ones that it skips. A path
    outside of the run's directory acts like `auto` once the run has checkpoints of its own. Raises
    CheckpointError if the path is not a complete checkpoint, if all checkpoints of the run are
    broken, or if a file of the selected checkpoint cannot be read.
    """
    directory = Path(config.checkpoint.directory)
    resume = resolve_resume(config.checkpoint.resume, directory)
    broken: set[Path] = set()
    while True:
        choose = functools.partial(_choose, resume, config, broken)
        path = on_rank_0(layout, directory, "cannot start", choose)
        if path is None:
            return None
        checkpoint, damage = _open(path, layout)
        if checkpoint is not None:
            break
        if resume != "auto":
            problem = f"is not a complete checkpoint: {'; '.join(damage)}"
            raise CheckpointError(path, problem, "set checkpoint.resume to another checkpoint")
        broken.add(path)
        if layout.rank == 0:
            logger.warning("checkpoint %s is skipped: %s", path, "; ".join(damage))

    _open_source(checkpoint, layout)
    on_rank_0(layout, path, "cannot continue", lambda: check_same_model(path, config))
    return checkpoint


def open_base(path: Path, layout: ParallelLayout) -> Checkpoint:
    """Open the checkpoint with the initial weights of a run (`extension.from`). All ranks call this
    together.

    Raises CheckpointError if it is not complete.
    """
    fix = "download or write it again, or change extension.from"
    checkpoint = _open_complete(path, layout, "has the initial weights of the run", fix)
    _open_source(checkpoint, layout)
    return checkpoint


def _open_source(checkpoint: Checkpoint, layout: ParallelLayout) -> None:
    """Open the checkpoint with the frozen weights as `checkpoint.source`, if `checkpoint` omits
    them.
    """
    find = functools.partial(find_source, checkpoint.path, checkpoint.state)
    source = on_rank_0(layout, checkpoint.path, "cannot continue", find)
    if source is not None:
        role = f"has the frozen parameters of {checkpoint.path}"
        checkpoint.source = _open_complete(source, layout, role, "restore the original checkpoint")
        _open_source(checkpoint.source, layout)


def _open_complete(path: Path, layout: ParallelLayout, role: str, fix: str) -> Checkpoint:
    checkpoint, damage = _open(path, layout)
    if checkpoint is None:
        problem = f"{role}, but is not complete: {'; '.join(damage)}"
        raise CheckpointError(path, problem, fix)
    return checkpoint


def _open(path: Path, layout: ParallelLayout) -> tuple[Checkpoint | None, list[str]]:
    """Open a checkpoint and compare its files' checksums. Return it, or None and a sentence for
    each problem.

    Each rank reads the files that it will load. Raises CheckpointError on all ranks if one of them
    cannot read a file.
    """
    with RankErrors(layout) as errors:
        if not path.is_dir():
            fix = "set checkpoint.directory to a directory that all nodes share"
            raise CheckpointError(str(path), f"does not exist on node {node_name()}", fix)
    errors.check(path, _READING)

    checkpoint, damage = on_rank_0(layout, path, _READING, lambda: _read_records(path))
    if checkpoint is None:
        return None, damage

    own_files = [name for name, rank in checkpoint.readers(layout).items() if rank == layout.rank]
    own_damage: list[str] = []
    with RankErrors(layout) as errors:
        own_damage = checkpoint.damage(own_files)
    errors.check(path, _READING)

    all_damage: list[list[str]] = [[]] * layout.world_size
    dist.all_gather_object(all_damage, own_damage)
    damage = list(itertools.chain(*all_damage))
    if damage:
        return None, damage
    return checkpoint, []


def _read_records(path: Path) -> tuple[Checkpoint | None, list[str]]:
    """Do the same as `_open` without the checksums: read the manifest, state and index, and compare
    file sizes.
    """
    if damage := files.problems(path, deep=False):
        return None, damage
    try:
        checkpoint = Checkpoint(path, files.read_state(path))
        checkpoint.read_records()
    except (ValueError, FileNotFoundError) as error:
        return None, [str(error)]
    return checkpoint, []


def _choose(resume: str, config: RunConfig, broken: set[Path]) -> Path | None:
    """Return the checkpoint to continue, or None. Compares only file sizes, and skips the `broken`
    checkpoints.

    Raises CheckpointError if the run has checkpoints of later steps than the one where it would
    start: its new checkpoints would be older than these, and be removed.
    """
    directory = Path(config.checkpoint.directory)
    if resume == "auto":
        try:
            path = files.newest_complete(directory, logger.warning, deep=False, excluding=broken)
        except OSError as error:
            subject = str(error.filename or directory)
            problem = f"cannot be read ({error})"
            raise CheckpointError(subject, problem, files.START_AGAIN) from None
        if path is None and files.list_checkpoints(directory):
            fix = "to start from step 0, move its checkpoints away"
            raise CheckpointError(directory, "has no complete checkpoint", fix)
        return path

    path = None
    start = 0
    if resume != "none":
        path = Path(resume)
        check_complete(path)
        start = files.read_manifest(path)["step"]
    newest = files.checkpointed_step(directory)
    if newest > start:
        raise CheckpointError(
            directory,
            f"has checkpoints up to step {newest}, but this run would start at step {start}",
            f"move them away, {config.to_start_another_run}, or set checkpoint.resume to auto",
        )
    return path
