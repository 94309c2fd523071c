"""Find the checkpoint that a path, a setting or another checkpoint refers to, and check a run's
directories.

Imports no torch. In this package, `deep` checks compare checksums, which reads every byte; others
compare file sizes.
"""

import hashlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_tape.checkpoint import directories as files
from megatron_tape.checkpoint.directories import MANIFEST, CheckpointState, FrozenWeightsSource
from megatron_tape.checkpoint.index import CHOOSE_ANOTHER
from megatron_tape.config.schema import RunConfig
from megatron_tape.data.inputs import check_writable, convert_path_errors
from megatron_tape.errors import CheckpointError, ConfigError
from megatron_tape.io.files import digest
from megatron_tape.io.records import read_yaml
from megatron_tape.model.names import AVERAGE

IMPORTED = "base"
"""Name of a run's subdirectory for the model that the run extends, imported from Hugging Face as a
checkpoint.
"""


class NoCheckpoint(CheckpointError):
    """A directory without any checkpoint, complete or broken."""


def find_checkpoint(
    path: str | Path, warn: Callable[[str], None] = lambda message: None, deep: bool = True
) -> Path:
    """Return the checkpoint that `path` refers to.

    It is `path` itself if this is a checkpoint. Otherwise `path` is a run or a directory of
    checkpoints, and the result is its newest complete checkpoint. Calls `warn` with a message for
    each broken checkpoint that is skipped. `deep` compares checksums, not only sizes of files.
    Raises CheckpointError if there is no complete checkpoint.
    """
    path = Path(path)
    fix = "give the directory of a run, of its checkpoints, or of one checkpoint"
    if not path.exists():
        raise CheckpointError(f"checkpoint {path}", "does not exist", fix)
    if (path / MANIFEST).exists() or (path / files.STATE).exists():
        if damage := files.problems(path, deep):
            raise CheckpointError(
                f"checkpoint {path}",
                f"is not complete: {'; '.join(damage)}",
                CHOOSE_ANOTHER,
            )
        return path

    roots = [path, path / "checkpoints"]
    # The run may save in another directory, `checkpoint.directory` in its config.yaml. The search
    # goes on if that file is missing or damaged.
    with suppress(OSError, ValueError, KeyError, TypeError):
        settings = read_yaml(path / "config.yaml", dict[str, dict[str, Any]])
        roots.append(Path(settings["checkpoint"]["directory"]))
    root = next((root for root in roots if files.list_checkpoints(root)), None)
    if root is None:
        raise NoCheckpoint(path, "has no checkpoint", fix)
    newest = files.newest_complete(root, warn, deep)
    if newest is None:
        raise CheckpointError(
            root, "has no complete checkpoint", "train or download the model again"
        )
    return newest


def resolve_resume(resume: str, root: str | Path) -> str:
    """Return which checkpoint a run continues, as a value of `checkpoint.resume`.

    `resume` is the setting, and `root` is `checkpoint.directory`. A run starts from a checkpoint
    outside of `root` only once. After that, the result is `auto`, so that the run continues its own
    checkpoints.
    """
    if resume in ("auto", "none"):
        return resume
    is_in_root = Path(root).resolve() in Path(resume).resolve().parents
    if not is_in_root and files.list_checkpoints(root):
        return "auto"
    return resume


def checkpoint_to_continue(config: RunConfig) -> Path | None:
    """Return the checkpoint that a run will continue, or None if it starts without one.

    With `checkpoint.resume: auto`, it is the newest one whose files have the expected sizes. If the
    setting is a path, it is that path, which is not checked.
    """
    root = config.checkpoint.directory or ""
    resume = resolve_resume(config.checkpoint.resume, root)
    if resume == "auto":
        return files.newest_complete(root, deep=False)
    if resume == "none":
        return None
    return Path(resume)


def check_complete(path: Path) -> None:
    """Raise CheckpointError if `path`, the value of `checkpoint.resume`, is not a complete
    checkpoint.

    Compares only the sizes of files. The error says what to do if `path` is a run, a directory of
    checkpoints, or a Hugging Face model.
    """
    subject = f"checkpoint.resume {path}"
    if not path.is_dir():
        raise CheckpointError(subject, "is not a directory", CHOOSE_ANOTHER)
    damage = files.problems(path, deep=False)
    if not damage:
        return

    inner = files.list_checkpoints(path) or files.list_checkpoints(path / "checkpoints")
    if inner:
        raise CheckpointError(
            subject,
            "is a directory of checkpoints, not a checkpoint",
            f"choose one of them, such as {inner[0][1]}",
        )
    fix = CHOOSE_ANOTHER
    if (path / "config.json").is_file():
        fix = "to start from a Hugging Face model, first run tools/convert_checkpoint.py from-hf"
    raise CheckpointError(subject, f"is not a complete checkpoint: {'; '.join(damage)}", fix)


def model_digest(checkpoint: Path, average: bool = False) -> str:
    """Return a sha256 that identifies the model in a complete checkpoint.

    With `average`, it identifies the model with the averaged weights. The manifest has the sha256
    of all other files, so its own sha256 is enough.
    """
    sha256 = digest(checkpoint / MANIFEST)["sha256"]
    if average:
        return hashlib.sha256(f"{sha256} {AVERAGE}".encode()).hexdigest()
    return sha256


def source_record(checkpoint: Path) -> FrozenWeightsSource:
    """Return the reference to a complete checkpoint with frozen weights.

    Checkpoints that omit these weights contain it in their `state.json`.
    """
    return {"path": str(checkpoint.resolve()), "manifest_sha256": model_digest(checkpoint)}


def find_source(checkpoint: Path, state: CheckpointState) -> Path | None:
    """Return the checkpoint with the frozen weights that `checkpoint` omits.

    Return None if it omits none. `state` is the `state.json` of `checkpoint`. The result is at the
    path in `state["frozen_from"]` or, if the run's directory was moved, in the run's subdirectory
    `IMPORTED`. Raises CheckpointError if it does not exist, or its manifest has changed since
    `checkpoint` was saved.
    """
    record = state.get("frozen_from")
    if record is None:
        return None
    expected = record["manifest_sha256"]
    source = Path(record["path"])
    # `checkpoint` is in RUN/checkpoints by default.
    for path in (source, checkpoint.resolve().parent.parent / IMPORTED):
        if (path / MANIFEST).is_file() and model_digest(path) == expected:
            return path
    raise CheckpointError(
        checkpoint,
        f"omits the frozen parameters, which are in checkpoint {source}, but that does not exist"
        " or has changed since then",
        f"restore the original {source}",
    )


def check_directories(config: RunConfig) -> None:
    """Raise ConfigError if the run cannot use `logging.directory`, `checkpoint.directory` or
    `checkpoint.resume`.

    Directories must be writable, and not belong to another run. Raises OSError if the file system
    does not respond.
    """
    check_writable("logging.directory", config.logging.directory)
    check_writable("checkpoint.directory", config.checkpoint.directory)
    _refuse_checkpoints_of_another_run(config)
    resume = config.checkpoint.resume
    with convert_path_errors("checkpoint.resume", resume):
        if resume not in ("auto", "none") and not Path(resume).is_dir():
            raise ConfigError(
                "checkpoint.resume",
                f"is {resume}, which is not a directory",
                "set it to auto, none or a checkpoint's path",
            )


def _refuse_checkpoints_of_another_run(config: RunConfig) -> None:
    """Raise ConfigError if `checkpoint.directory` belongs to another run that still exists.

    A directory belongs to the run that contains it, and to the run that saved its newest
    checkpoint. A directory inside of `logging.directory`, such as the default, is always accepted.
    Two runs in one directory would remove each other's checkpoints.
    """
    run = config.logging.directory
    directory = config.checkpoint.directory
    if not run or not directory or Path(run).absolute() in Path(directory).absolute().parents:
        return

    owners = [Path(directory).parent]
    # The newest checkpoint says which run saved it, unless its state.json cannot be read.
    for _, newest in files.list_checkpoints(directory)[:1]:
        with suppress(ValueError, FileNotFoundError):
            saved = files.read_state(newest)["config"].get("logging", {})
            owners.append(Path(saved.get("directory") or run))
    for owner in owners:
        # Each run has a directory `attempts`.
        if (owner / "attempts").is_dir() and owner.resolve() != Path(run).resolve():
            raise ConfigError(
                ("checkpoint.directory", "logging.directory"),
                f"is {directory}, which belongs to the run {owner}, but logging.directory is {run}",
                "remove checkpoint.directory to save in the run's own directory; to start from a"
                " checkpoint of the other run, set checkpoint.resume to it",
            )
