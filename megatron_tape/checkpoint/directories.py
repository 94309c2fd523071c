"""Write, find and remove checkpoint directories. Imports no torch.

The directory `step-00000100` contains the files of a checkpoint, and a `manifest.json` with their
sizes and sha256. A process may be killed at any moment without leaving a half-written checkpoint:

- A new checkpoint is written into a staging directory, flushed to disk, and then renamed.
- An old checkpoint is renamed to a name that no reader accepts, and then deleted.
- Names that start with a dot and end in `.partial` are leftovers of killed processes.

A run that saves a step for which a checkpoint exists replaces that checkpoint. The replaced one is
damaged, because the run would otherwise have continued from it. `step-00000100.abandoned` is a
damaged checkpoint that the run has skipped, to continue from an earlier one (see `prune`).

If a checkpoint is a symbolic link, only the link is removed. Files that are not in the manifest are
ignored. Only one process at a time may call these functions, but several may write files into one
staging directory.
"""

import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NotRequired

from typing_extensions import TypedDict

from megatron_tape.data.tokenizer import TokenizerRecord
from megatron_tape.errors import CheckpointError
from megatron_tape.io.files import FileDigest, digest, remove, sync_directory
from megatron_tape.io.records import check_shape, read_record, write_record
from megatron_tape.model.names import current_name

FORMAT_VERSION = 4
"""The format of new checkpoints."""
READABLE_VERSIONS = (3, 4)
"""The formats that can be read. In format 3, parameters had other names (see
`model.names.current_name`).
"""
MANIFEST = "manifest.json"
STATE = "state.json"
ABANDONED = ".abandoned"
"""Suffix of a damaged checkpoint that the run has skipped."""
START_AGAIN = "start the run again, or move this checkpoint away to continue from the previous one"
# At least 8 digits, and no zero before more than 8: `step-00000100`, `step-123456789`.
_NAME = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,17})")


class Manifest(TypedDict):
    """The contents of `manifest.json`: the step, and the size and sha256 of each file by its
    relative path.
    """

    format_version: int
    step: int
    files: dict[str, FileDigest]


class ShardSpec(TypedDict):
    """How a parameter is sharded over the tensor-parallel ranks: along axis `dim`, in `stride`
    pieces for each rank.
    """

    dim: int
    stride: int


class Progress(TypedDict, total=False):
    """Other state of a run (`Trainer.progress`), to which hooks may add keys. Imported checkpoints
    have the last three.

    `bad_steps`: the number of consecutive steps, up to this one, whose loss or gradient was not
    finite. `tokenizer`: the record of the run's tokenizer, whose files are in the directory
    `tokenizer`. `data`: fingerprints of the data files, by their names in the settings. `origin`:
    the model that was imported. `identity`: a digest of the imported files. `card`: the metadata of
    the imported model card, by the keys of the Hugging Face Hub.
    """

    bad_steps: int
    tokenizer: TokenizerRecord
    data: dict[str, str]
    origin: str
    identity: str
    card: dict[str, Any]


class FrozenWeightsSource(TypedDict):
    """A reference to a checkpoint with frozen weights, in the `state.json` of a checkpoint that
    omits them.
    """

    path: str
    manifest_sha256: str


class CheckpointState(TypedDict):
    """The contents of `state.json`.

    `optimizer_steps` does not count skipped updates. `data_parallel_size` counts the ranks with the
    same weights, context-parallel ranks included. `sharded` and `frozen` refer to parameters by
    name; imported checkpoints have no `frozen`. `config` contains the run's settings by section.
    """

    step: int
    optimizer_steps: int
    consumed_samples: int
    progress: Progress
    tensor_model_parallel_size: int
    data_parallel_size: int
    sharded: dict[str, ShardSpec]
    frozen: NotRequired[list[str]]
    frozen_from: NotRequired[FrozenWeightsSource | None]
    config: dict[str, dict[str, Any]]


class _Paths(TypedDict, total=False):
    """The paths in a section of the settings."""

    tokenizer: str | None
    directory: str | None


class _Config(TypedDict):
    """The settings in `state.json` that are read directly, without building a `RunConfig`."""

    model: dict[str, Any]
    data: NotRequired[_Paths]
    logging: NotRequired[_Paths]
    checkpoint: NotRequired[_Paths]


class OtherFormat(CheckpointError):
    """A checkpoint that another version of this project wrote. It may be complete, but this version
    cannot read it.
    """


def staging_directory(home: str | Path, step: int) -> Path:
    """Create an empty directory in `home` for the files of checkpoint `step`, and return it.

    `home` must exist, and be on the same file system as the checkpoints: `publish` renames the
    directory.
    """
    staging = Path(home) / _name(step)
    # An earlier save of this step may have failed.
    remove(staging)
    staging.mkdir()
    return staging


def publish(
    staging: Path,
    root: str | Path,
    step: int,
    files: Mapping[str, FileDigest],
) -> Path:
    """Turn a staging directory into checkpoint `step` in `root`, and return its path.

    `files` maps the names of the files to their digests. An existing checkpoint of the same step is
    replaced. When this returns, the checkpoint is on disk. Raises CheckpointError if this process
    does not see a file, or sees another size.
    """
    write_record(
        staging / MANIFEST,
        {
            "format_version": FORMAT_VERSION,
            "step": step,
            "files": dict(sorted(files.items())),
        },
    )
    sync_directory(staging)
    # If the directory is not shared, another node has written its files to its own disk.
    for name, expected in files.items():
        if problem := _file_problem(staging / name, name, expected, deep=False):
            raise CheckpointError(
                staging,
                f"is not complete: {problem}",
                "set checkpoint.directory to a directory that all nodes share",
            )

    root = Path(root)
    final = root / _name(step)
    discarded = _discard(final)
    os.rename(staging, final)
    # The new checkpoint must be on disk before the files of the old one disappear.
    sync_directory(root)
    remove(discarded)
    return final


def list_checkpoints(root: str | Path) -> list[tuple[int, Path]]:
    """Return steps and paths of all checkpoints in `root`, newest first, complete or not."""
    root = Path(root)
    if not root.is_dir():
        return []
    matches = [_NAME.fullmatch(path.name) for path in root.iterdir() if path.is_dir()]
    return sorted(((int(match[1]), root / match[0]) for match in matches if match), reverse=True)


def read_manifest(path: str | Path) -> Manifest:
    """Read a checkpoint's manifest.

    Raises OtherFormat if another version of this project wrote it. Raises FileError if it is
    malformed; its subclass CheckpointError if it lists no files, or another step than the
    directory's name.
    """
    path = Path(path)
    # The version is checked first, because other formats may have another shape.
    version = read_record(path / MANIFEST, dict[str, Any]).get("format_version")
    if isinstance(version, int) and version not in READABLE_VERSIONS:
        age = "a newer" if version > FORMAT_VERSION else "an earlier"
        raise OtherFormat(
            str(path),
            f"was written by {age} version of this project (checkpoint format {version}; this"
            f" version reads formats {' and '.join(map(str, READABLE_VERSIONS))})",
            "use that version, or move the checkpoint away",
        )

    manifest = read_record(path / MANIFEST, Manifest)
    if not manifest["files"]:
        raise CheckpointError(MANIFEST, "lists no files")
    match = _NAME.fullmatch(path.name)
    if match and manifest["step"] != int(match[1]):
        raise CheckpointError(
            MANIFEST, f"says step {manifest['step']}, but the directory is named {path.name}"
        )
    return manifest


def read_state(path: str | Path) -> CheckpointState:
    """Read a checkpoint's `state.json`. Raises ValueError if it is malformed.

    Parameters have their current names, also if the checkpoint has format 3. Only the settings that
    `_Config` lists are checked in `config`.
    """
    state = read_record(Path(path) / STATE, CheckpointState)
    state["sharded"] = {current_name(name): shards for name, shards in state["sharded"].items()}
    if "frozen" in state:
        state["frozen"] = [current_name(name) for name in state["frozen"]]
    if state["optimizer_steps"] > state["step"]:
        raise CheckpointError(
            str(Path(path) / STATE),
            f"is damaged: optimizer_steps {state['optimizer_steps']} exceeds step {state['step']}",
        )

    check_shape(state["config"], _Config, "config")
    return state


def problems(path: str | Path, deep: bool = True) -> list[str]:
    """Return a sentence for each missing or damaged file of a checkpoint; none if the checkpoint is
    complete.

    `deep` compares checksums, which reads every byte; otherwise only sizes are compared. An error
    of the disk, or the format of another version, also counts as a problem.
    """
    try:
        return _problems(Path(path), deep)
    except (OtherFormat, OSError) as error:
        return [str(error)]


def newest_complete(
    root: str | Path,
    warn: Callable[[str], None] = lambda message: None,
    deep: bool = True,
    excluding: Collection[Path] = (),
) -> Path | None:
    """Return the path of the newest complete checkpoint in `root`, or None.

    Calls `warn` with a message for each broken checkpoint that is skipped. Checkpoints in
    `excluding` are skipped without a message. `deep` compares checksums, which reads every byte;
    otherwise only sizes are compared.

    Raises:
        OSError: if a disk error prevents the check. No older checkpoint is chosen, because the
            error may pass.
        OtherFormat: if another version of this project wrote a checkpoint. A run that continued
            from an older one would replace it.
    """
    for _, path in list_checkpoints(root):
        if path in excluding:
            continue
        damage = _problems(path, deep)
        if not damage:
            return path
        warn(f"checkpoint {path} is skipped: {'; '.join(damage)}")
    return None


def checkpointed_step(root: str | Path) -> int:
    """Return the step of the newest complete checkpoint in `root`, or 0 if there is none.

    Compares only the sizes of files. Raises OSError if a disk error prevents that, and OtherFormat
    if another version of this project wrote a checkpoint.
    """
    path = newest_complete(root, deep=False)
    return 0 if path is None else read_manifest(path)["step"]


def prune(
    root: str | Path,
    keep: int,
    keep_every: int | None = None,
    published: int | None = None,
) -> None:
    """Remove old checkpoints and leftovers of killed processes.

    Args:
        root: the directory of the checkpoints.
        keep: how many of the newest complete checkpoints remain. A checkpoint is complete if its
            files have the expected sizes. Broken ones do not count, and are removed once `keep`
            newer ones are complete.
        keep_every: checkpoints whose step is a multiple of it are never removed.
        published: the step of the checkpoint that the run has just saved. Later checkpoints are
            damaged ones that the run skipped when it started. They are renamed to
            `step-00000100.abandoned`, which no reader accepts, and removed when the run reaches
            their step again.
    """
    root = Path(root)
    if published is not None:
        _set_aside_later(root, published)

    complete_count = 0
    for step, path in list_checkpoints(root):  # newest first
        is_permanent = keep_every is not None and step % keep_every == 0
        if complete_count < keep:
            complete_count += not problems(path, deep=False)
        elif not is_permanent:
            discarded = _discard(path)
            # The rename must be on disk before files disappear. A crash would otherwise leave a
            # checkpoint without some of its files.
            sync_directory(root)
            remove(discarded)
    for path in root.glob(".step-*.partial"):
        remove(path)


def _set_aside_later(root: Path, published: int) -> None:
    """Mark checkpoints after step `published` as abandoned, and remove abandoned ones up to it."""
    for path in root.glob(f"step-*{ABANDONED}"):
        match = _NAME.fullmatch(path.name.removesuffix(ABANDONED))
        if match and int(match[1]) <= published:
            remove(path)
    for step, path in list_checkpoints(root):
        if step > published:
            aside = path.with_name(path.name + ABANDONED)
            remove(aside)
            os.rename(path, aside)


def _name(step: int) -> str:
    """Return the name of the checkpoint's directory."""
    return f"step-{step:08d}"


def _problems(path: Path, deep: bool) -> list[str]:
    """Return a sentence for each missing or damaged file of a checkpoint.

    `deep` compares checksums, which reads every byte; otherwise only sizes are compared. Unlike
    `problems`, raises OtherFormat if another version of this project wrote the checkpoint, and
    OSError if the disk fails.
    """
    if not (path / MANIFEST).is_file():
        return [f"{MANIFEST} is missing"]
    try:
        manifest = read_manifest(path)
        damage = []
        for name, expected in manifest["files"].items():
            if problem := _file_problem(path / name, name, expected, deep):
                damage.append(problem)
        # Compare the steps only if no file is damaged, because state.json must be readable.
        if not damage and STATE in manifest["files"]:
            step = read_state(path)["step"]
            if step != manifest["step"]:
                damage.append(f"{STATE} says step {step}, but {MANIFEST} says {manifest['step']}")
        return damage
    except OtherFormat:  # it is a ValueError, so the next clause would catch it
        raise
    except (ValueError, FileNotFoundError) as error:
        return [str(error)]


def _file_problem(path: Path, name: str, expected: FileDigest, deep: bool) -> str | None:
    """Return a sentence if the file at `path` is missing or does not have the `expected` size, and
    None otherwise.

    With `deep`, also compare the sha256. `name` is the file's name in the sentence. Raises OSError
    if the disk fails.
    """
    if not path.is_file():
        return f"{name} is missing"
    if path.stat().st_size != expected["bytes"]:
        return f"{name} has {path.stat().st_size} bytes instead of {expected['bytes']}"
    if not deep:
        return None
    sha256 = digest(path)["sha256"]
    if sha256 == expected["sha256"]:
        return None
    return f"{name} has sha256 {sha256} instead of {expected['sha256']}"


def _discard(path: Path) -> Path:
    """Rename a checkpoint, if it exists, to a name that no reader accepts. Return the new path."""
    discarded = path.with_name(f".{path.name}.discarded.partial")
    remove(discarded)
    # `lexists`, because a checkpoint may be a symbolic link whose target has gone.
    if os.path.lexists(path):
        os.rename(path, discarded)
    return discarded
