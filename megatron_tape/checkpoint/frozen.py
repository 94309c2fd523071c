"""Checkpoints of only the trained parameters: where the parameters that they leave out are kept. Imports no torch."""

from pathlib import Path

from megatron_tape.checkpoint.directories import MANIFEST, Source, State, digest
from megatron_tape.errors import CheckpointError


def source_record(checkpoint: Path) -> Source:
    """Return the record in `state.json` of the complete checkpoint that holds the frozen weights."""
    return {"path": str(checkpoint.resolve()), "manifest_sha256": digest(checkpoint / MANIFEST)[1]}


def find_source(checkpoint: Path, state: State) -> Path | None:
    """Return the checkpoint with the weights that `checkpoint` leaves out, or None if it leaves none out.

    Raises CheckpointError if that checkpoint is gone, or its manifest has changed since `checkpoint` was saved.
    """
    record = state.get("frozen_from")
    if record is None:
        return None
    source = Path(record["path"])
    left_out = f"{checkpoint} holds only the trained parameters, and the frozen ones are in {source}"
    if not (source / MANIFEST).is_file():
        raise CheckpointError(f"{left_out}, which is gone; put it back")
    if digest(source / MANIFEST)[1] != record["manifest_sha256"]:
        raise CheckpointError(f"{left_out}, which has changed since then; put the original checkpoint back")
    return source
