"""Open the checkpoint that a run continues or starts from, and check its bytes; one rank reads each
file.
"""

import itertools
import logging
from pathlib import Path

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
    """Return the checkpoint of `checkpoint.resume`, or None if the run starts without one.

    `auto` selects the newest complete checkpoint, and warns about broken ones that it skips. A path
    outside of `checkpoint.directory` acts like `auto` once the run has checkpoints of its own. All
    ranks call this together.

    Raises:
        CheckpointError: if the path is not a complete checkpoint, if all checkpoints of the run are
            broken, or if a file of the selected checkpoint cannot be read.
    """
    directory = Path(config.checkpoint.directory)
    resume = resolve_resume(config.checkpoint.resume, directory)
    # Rank 0 chooses a checkpoint whose files have the expected sizes. All ranks then compare the
    # checksums. If a checksum is wrong, the checkpoint is added to `broken`, and rank 0 chooses
    # another one.
    broken: set[Path] = set()
    while True:
        path = on_rank_0(
            layout,
            directory,
            "cannot start",
            lambda: _choose_checkpoint(resume, config, broken),
        )
        if path is None:
            return None
        checkpoint, damage = _open(path, layout)
        if checkpoint is not None:
            break
        if resume != "auto":
            raise CheckpointError(
                path,
                f"is not a complete checkpoint: {'; '.join(damage)}",
                "set checkpoint.resume to another checkpoint",
            )

        broken.add(path)
        if layout.rank == 0:
            logger.warning("checkpoint %s is skipped: %s", path, "; ".join(damage))

    _open_source(checkpoint, layout)
    on_rank_0(layout, path, "cannot continue", lambda: check_same_model(path, config))
    return checkpoint


def open_base(path: Path, layout: ParallelLayout) -> Checkpoint:
    """Return the checkpoint with the initial weights of a run (`extension.from`).

    Raises CheckpointError if it is not complete or cannot be read. All ranks call this together.
    """
    fix = "download or write it again, or change extension.from"
    checkpoint = _open_complete(path, layout, role="has the initial weights of the run", fix=fix)
    _open_source(checkpoint, layout)
    return checkpoint


def _open_source(checkpoint: Checkpoint, layout: ParallelLayout) -> None:
    """Set `checkpoint.source` to the checkpoint with the frozen weights, if `checkpoint` omits
    them.

    Raises CheckpointError if that checkpoint is not complete. All ranks call this together.
    """
    source = on_rank_0(
        layout,
        checkpoint.path,
        "cannot continue",
        lambda: find_source(checkpoint.path, checkpoint.state),
    )
    if source is not None:
        role = f"has the frozen parameters of {checkpoint.path}"
        checkpoint.source = _open_complete(source, layout, role, "restore the original checkpoint")
        # The source may itself omit frozen weights that are in a third checkpoint.
        _open_source(checkpoint.source, layout)


def _open_complete(path: Path, layout: ParallelLayout, role: str, fix: str) -> Checkpoint:
    """Return the checkpoint at `path`. Raises CheckpointError if it is not complete.

    In the message, `role` is what the checkpoint has, such as `has the initial weights of the run`.
    `fix` says what to do.
    """
    checkpoint, damage = _open(path, layout)
    if checkpoint is None:
        raise CheckpointError(path, f"{role}, but is not complete: {'; '.join(damage)}", fix)
    return checkpoint


def _open(path: Path, layout: ParallelLayout) -> tuple[Checkpoint | None, list[str]]:
    """Open a checkpoint, and compare the checksums of its files.

    Return the checkpoint and no problems; or None, and a sentence for each problem. Each rank
    compares the files that it will load, so no file is read by two ranks. Raises CheckpointError on
    all ranks if one of them cannot read a file.
    """
    with RankErrors(layout) as errors:
        if not path.is_dir():
            raise CheckpointError(
                str(path),
                f"does not exist on node {node_name()}",
                "set checkpoint.directory to a directory that all nodes share",
            )
    errors.check(path, _READING)

    checkpoint, damage = on_rank_0(layout, path, _READING, lambda: _read_records(path))
    if checkpoint is None:
        return None, damage

    # Each rank compares the checksums of some files, and then gathers the results of all ranks.
    own_files = [name for name, rank in checkpoint.readers(layout).items() if rank == layout.rank]
    own_damage: list[str] = []
    with RankErrors(layout) as errors:
        own_damage = checkpoint.damage(own_files)
    errors.check(path, _READING)

    damage = list(itertools.chain(*layout.gather(own_damage)))
    if damage:
        return None, damage
    return checkpoint, []


def _read_records(path: Path) -> tuple[Checkpoint | None, list[str]]:
    """Read the manifest, state and index of a checkpoint, and compare the sizes of its files.

    Return the checkpoint and no problems; or None, and a sentence for each problem.
    """
    if damage := files.problems(path, deep=False):
        return None, damage
    try:
        checkpoint = Checkpoint(path, files.read_state(path))
        checkpoint.read_records()
    except (ValueError, FileNotFoundError) as error:
        return None, [str(error)]
    return checkpoint, []


def _choose_checkpoint(resume: str, config: RunConfig, broken: set[Path]) -> Path | None:
    """Return the checkpoint to continue, or None to start without one.

    `resume` is `auto`, `none` or a path, as `resolve_resume` returns it. Compares only the sizes of
    files. With `auto`, the checkpoints in `broken` are skipped. Raises CheckpointError if the run
    has checkpoints of later steps than the one where it would start: its new checkpoints would be
    older than these, and be removed.
    """
    directory = Path(config.checkpoint.directory)
    if resume == "auto":
        try:
            path = files.newest_complete(directory, logger.warning, deep=False, excluding=broken)
        except OSError as error:
            raise CheckpointError(
                str(error.filename or directory),
                f"cannot be read ({error})",
                files.START_AGAIN,
            ) from None
        if path is None and files.list_checkpoints(directory):
            raise CheckpointError(
                directory,
                "has no complete checkpoint",
                "to start from step 0, move its checkpoints away",
            )
        return path

    path = None
    start_step = 0
    if resume != "none":
        path = Path(resume)
        check_complete(path)
        start_step = files.read_manifest(path)["step"]
    newest_step = files.checkpointed_step(directory)
    if newest_step > start_step:
        raise CheckpointError(
            directory,
            f"has checkpoints up to step {newest_step}, but this run would start at step"
            f" {start_step}",
            f"move them away, {config.to_start_another_run}, or set checkpoint.resume to auto",
        )
    return path
