"""Checkpoints of the trained parameters alone: where those are kept that they leave out. Imports no torch."""

from pathlib import Path

from megatron_tape.checkpoint.directories import MANIFEST, Source, State, digest
from megatron_tape.errors import CheckpointError


def source_record(checkpoint: Path) -> Source:
    """Return how `state.json` names the whole checkpoint that keeps the frozen weights."""
    return {"path": str(checkpoint.resolve()), "manifest_sha256": digest(checkpoint / MANIFEST)[1]}


def find_source(checkpoint: Path, state: State) -> Path | None:
    """Return the checkpoint with the weights that `checkpoint` leaves out; None where it leaves none out.

    Raises CheckpointError when that is gone, or has another manifest than when `checkpoint` was saved.
    """
    record = state.get("frozen_from")
    if record is None:
        return None
    source = Path(record["path"])
    left_out = f"{checkpoint} holds the trained parameters alone, and the frozen ones are in {source}"
    if not (source / MANIFEST).is_file():
        raise CheckpointError(f"{left_out}, which is gone; put it back")
    if digest(source / MANIFEST)[1] != record["manifest_sha256"]:
        raise CheckpointError(f"{left_out}, which is another checkpoint now; put the one of that time back")
    return source
