"""Find the checkpoint that a path, a setting or another checkpoint refers to, and check a run's directories.

Imports no torch.
"""

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_tape.checkpoint import directories as files
from megatron_tape.checkpoint.directories import MANIFEST, Source, State
from megatron_tape.config.schema import RunConfig
from megatron_tape.data.inputs import check_writable, convert_path_errors
from megatron_tape.errors import CheckpointError, refuse
from megatron_tape.io.files import digest
from megatron_tape.io.records import read_yaml
from megatron_tape.model.names import AVERAGE

IMPORTED = "base"
"""The directory, inside that of a run, with the imported Hugging Face model that the run extends."""


class NoCheckpoint(CheckpointError):
    """A directory without any checkpoint, complete or broken."""


def find_checkpoint(path: str | Path, warn: Callable[[str], None] = lambda message: None, deep: bool = True) -> Path:
    """Return the step directory for `path`: itself, or the newest complete one of a run or its checkpoints.

    Only `deep` reads every byte. Raises CheckpointError if there is none.
    """
    path = Path(path)
    fix = "give a run, its checkpoints or one step"
    if not path.exists():
        raise CheckpointError(f"checkpoint {path}", "does not exist", fix)
    if (path / MANIFEST).exists() or (path / files.STATE).exists():
        if found := files.problems(path, deep):
            raise CheckpointError(f"checkpoint {path}", f"is not complete: {'; '.join(found)}", "choose another step")
        return path
    root = path
    if not files.list_checkpoints(root):
        root = path / "checkpoints" if (path / "checkpoints").is_dir() else _configured(path) or path
    if not files.list_checkpoints(root):
        raise NoCheckpoint(str(path), "has no checkpoint", fix)
    newest = files.newest_complete(root, warn, deep)
    if newest is None:
        raise CheckpointError(str(root), "has no complete checkpoint", "write or fetch it again")
    return newest


def _configured(run: Path) -> Path | None:
    """Return the directory of a run's checkpoints according to its configuration, or None."""
    try:
        return Path(read_yaml(run / "config.yaml", dict[str, dict[str, Any]])["checkpoint"]["directory"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def resolve_resume(resume: str, root: str | Path) -> str:
    """Return `checkpoint.resume`, or auto where a run in `root` continues its own checkpoints instead.

    A run starts from a checkpoint outside `root` only until it has checkpoints of its own.
    """
    elsewhere = resume not in ("auto", "none") and Path(root).resolve() not in Path(resume).resolve().parents
    return "auto" if elsewhere and files.list_checkpoints(root) else resume


def checkpoint_to_continue(config: RunConfig) -> Path | None:
    """Return the checkpoint that a run will continue, checked by its file sizes, or None to start from scratch."""
    root = config.checkpoint.directory or ""
    resume = resolve_resume(config.checkpoint.resume, root)
    if resume == "auto":
        return files.newest_complete(root, deep=False)
    return None if resume == "none" else Path(resume)


def check_complete(path: Path, deep: bool = True) -> None:
    """Raise CheckpointError if the path in `checkpoint.resume` is not a complete checkpoint.

    Only `deep` reads the files' bytes.
    """
    found = files.problems(path, deep) if path.is_dir() else ["it is not a directory"]
    if not found:
        return
    inside = [path for folder in (path, path / "checkpoints") for _, path in files.list_checkpoints(folder)]
    subject, problem, fix = (
        f"checkpoint.resume {path}",
        f"is not a complete checkpoint: {'; '.join(found)}",
        "give another",
    )
    if inside:
        problem, fix = "is not a checkpoint, but contains some", f"give one of them, such as {inside[0]}"
    elif (path / "config.json").is_file():
        fix = "import it first: tools/convert_checkpoint.py from-hf"
    raise CheckpointError(subject, problem, fix)


def model_digest(checkpoint: Path, average: bool = False) -> str:
    """Return a SHA-256 of the model in a complete checkpoint, or of its averaged weights."""
    found = digest(checkpoint / MANIFEST)["sha256"]
    return hashlib.sha256(f"{found} {AVERAGE}".encode()).hexdigest() if average else found


def source_record(checkpoint: Path) -> Source:
    """Return the record for `state.json` of the complete checkpoint with the frozen weights."""
    return {"path": str(checkpoint.resolve()), "manifest_sha256": digest(checkpoint / MANIFEST)["sha256"]}


def find_source(checkpoint: Path, state: State) -> Path | None:
    """Return the checkpoint with the frozen weights that `checkpoint` omits, or None if it omits none.

    That is the recorded path or, if the run's directory was moved, the imported model in it. Raises CheckpointError if
    it is gone, or its manifest has changed since `checkpoint` was saved.
    """
    record = state.get("frozen_from")
    if record is None:
        return None
    source = Path(record["path"])
    for place in (source, checkpoint.resolve().parent.parent / IMPORTED):
        if (place / MANIFEST).is_file() and digest(place / MANIFEST)["sha256"] == record["manifest_sha256"]:
            return place
    gone = not (source / MANIFEST).is_file()
    problem = f"has only the trained parameters, and the frozen ones are in {source}, which "
    problem += "is gone" if gone else "has changed since then"
    raise CheckpointError(str(checkpoint), problem, "put it back" if gone else "put the original checkpoint back")


def check_directories(config: RunConfig) -> None:
    """Raise ConfigError if a directory cannot be written or belongs to another run, or checkpoint.resume is wrong.

    Raises OSError if the file system does not answer.
    """
    check_writable("logging.directory", config.logging.directory)
    check_writable("checkpoint.directory", config.checkpoint.directory)
    _refuse_checkpoints_of_another_run(config)
    resume = config.checkpoint.resume
    with convert_path_errors("checkpoint.resume", resume):
        missing = resume not in ("auto", "none") and not Path(resume).is_dir()
    fix = "set it to auto, none or a checkpoint's path"
    refuse(missing, "checkpoint.resume", f"is {resume}, which is not a directory", fix)


def _refuse_checkpoints_of_another_run(config: RunConfig) -> None:
    """Refuse a `checkpoint.directory` of another run that still exists; the default directory is never refused.

    It belongs to the run that contains it, or else to the run that saved its newest checkpoint.
    """
    run, directory = config.logging.directory, config.checkpoint.directory
    if not run or not directory or Path(os.path.abspath(run)) in Path(os.path.abspath(directory)).parents:
        return
    owners = [Path(directory).parent]
    for _, newest in files.list_checkpoints(directory)[:1]:
        with suppress(ValueError, FileNotFoundError):
            owners.append(Path(files.read_state(newest)["config"].get("logging", {}).get("directory") or run))
    for owner in owners:
        refuse(
            (owner / "attempts").is_dir() and owner.resolve() != Path(run).resolve(),
            ("checkpoint.directory", "logging.directory"),
            f"is {directory}, which belongs to the run {owner}, but logging.directory is {run}",
            "remove it to save checkpoints in the run's own directory; to start from a checkpoint of the other run, "
            "give it as checkpoint.resume",
        )
