"""Checkpoints of only the trained parameters: where the parameters that they leave out are kept. Imports no torch."""

from pathlib import Path

from megatron_tape.checkpoint.directories import MANIFEST, Source, State
from megatron_tape.errors import CheckpointError
from megatron_tape.io.files import digest

IMPORTED = "base"
"""Where a run that extends a model of transformers keeps its import, within the run's directory."""


def source_record(checkpoint: Path) -> Source:
    """Return the record in `state.json` of the complete checkpoint that holds the frozen weights."""
    return {"path": str(checkpoint.resolve()), "manifest_sha256": digest(checkpoint / MANIFEST)["sha256"]}


def find_source(checkpoint: Path, state: State) -> Path | None:
    """Return the checkpoint with the weights that `checkpoint` leaves out, or None if it leaves none out.

    It is where it was, or it is the model that the run imported, which has moved with the run's directory. Raises
    CheckpointError if it is gone, or its manifest has changed since `checkpoint` was saved.
    """
    record = state.get("frozen_from")
    if record is None:
        return None
    source = Path(record["path"])
    for place in (source, checkpoint.resolve().parent.parent / IMPORTED):
        if (place / MANIFEST).is_file() and digest(place / MANIFEST)["sha256"] == record["manifest_sha256"]:
            return place
    left_out = f"{checkpoint} holds only the trained parameters, and the frozen ones are in {source}"
    if not (source / MANIFEST).is_file():
        raise CheckpointError(f"{left_out}, which is gone; put it back")
    raise CheckpointError(f"{left_out}, which has changed since then; put the original checkpoint back")
