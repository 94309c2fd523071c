"""Find the checkpoint that a user means by a path. Imports no torch."""

from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

from megatron_tape.checkpoint import directories as files
from megatron_tape.io.records import read_yaml


class _Checkpoints(TypedDict):
    directory: str


class _Config(TypedDict):
    checkpoint: _Checkpoints


class NoCheckpoint(ValueError):
    """A directory that holds no checkpoint, be it whole or broken."""


def find_checkpoint(path: str | Path, warn: Callable[[str], None] = lambda message: None, deep: bool = True) -> Path:
    """Return the step directory for `path`: itself, or the newest complete one of a run or its checkpoints.

    Only `deep` reads every byte of it. Raises ValueError or FileNotFoundError, in one sentence, if there is none.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"checkpoint {path} does not exist; give a run, its checkpoints or one step")
    if (path / files.MANIFEST).exists() or (path / files.STATE).exists():
        if found := files.problems(path, deep):
            raise ValueError(f"checkpoint {path} is not whole: {'; '.join(found)}; choose another step")
        return path
    root = path
    if not files.list_checkpoints(root):
        root = path / "checkpoints" if (path / "checkpoints").is_dir() else _configured(path) or path
    if not files.list_checkpoints(root):
        raise NoCheckpoint(f"{path} holds no checkpoint; give a run, its checkpoints or one step")
    newest = files.newest_whole(root, warn, deep)
    if newest is None:
        raise ValueError(f"no checkpoint in {root} is whole; write or fetch it again")
    return newest


def _configured(run: Path) -> Path | None:
    """Return where a run keeps its checkpoints according to its configuration."""
    try:
        return Path(read_yaml(run / "config.yaml", _Config)["checkpoint"]["directory"])
    except (OSError, ValueError):
        return None
