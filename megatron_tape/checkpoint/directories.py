"""Write, find and remove checkpoint directories, which are complete whenever they exist. Imports no
torch.

The directory `step-00000100` contains files, and a `manifest.json` that lists their sizes and
sha256. A checkpoint is written into a staging directory, flushed to disk, and then renamed; a
checkpoint is renamed before it is deleted. A process may therefore be killed at any moment.

A checkpoint of the same step is renamed before the new one, and then removed. It is damaged: the
run would have continued from it otherwise. `step-00000100.abandoned` is a damaged checkpoint after
which the run continued from an earlier one (see `prune`). Names that start with a dot and end in
`.partial` are leftovers of killed processes.

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
START_AGAIN = "start the run again, or move this checkpoint away to continue from the previous one"
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
    tokenizer: str | None
    directory: str | None


class _Config(TypedDict):
    """The settings in `state.json` that are read without the parser of settings."""

    model: dict[str, Any]
    data: NotRequired[_Paths]
    logging: NotRequired[_Paths]
    checkpoint: NotRequired[_Paths]


class OtherFormat(CheckpointError):
    """A checkpoint that another version of this project wrote. It may be complete, but this version
    cannot read it.
    """


def staging_directory(home: str | Path, step: int) -> Path:
    """Create and return an empty directory in `home` for the files of checkpoint `step`.

    `home` must exist, and be on the same file system as the checkpoints.
    """
    staging = Path(home) / _name(step)
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

    `files` maps names to digests. An existing checkpoint of the same step is replaced. When this
    returns, the checkpoint is on disk. Raises CheckpointError if a file is missing or has another
    size, as seen by this process.
    """
    manifest = {
        "format_version": FORMAT_VERSION,
        "step": step,
        "files": dict(sorted(files.items())),
    }
    write_record(staging / MANIFEST, manifest)
    sync_directory(staging)
    for name, entry in files.items():
        if problem := _file_problem(staging / name, name, entry, deep=False):
            fix = "set checkpoint.directory to a directory that all nodes share"
            raise CheckpointError(staging, f"is not complete: {problem}", fix)

    root = Path(root)
    final = root / _name(step)
    discarded = _discard(final)
    os.rename(staging, final)
    sync_directory(root)
    remove(discarded)
    return final


def list_checkpoints(root: str | Path) -> list[tuple[int, Path]]:
    """Return steps and paths of all checkpoints in `root`, newest first, complete or not."""
    root = Path(root)
    if not root.is_dir():
        return []
    names = [_NAME.fullmatch(path.name) for path in root.iterdir() if path.is_dir()]
    return sorted(((int(name[1]), root / name[0]) for name in names if name), reverse=True)


def read_manifest(path: str | Path) -> Manifest:
    """Read a checkpoint's manifest.

    Raises OtherFormat if another version of this project wrote it, and ValueError (or its subclass
    CheckpointError) if it is malformed or its step differs from the directory's name.
    """
    path = Path(path)
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
    name = _NAME.fullmatch(path.name)
    if name and manifest["step"] != int(name[1]):
        problem = f"says step {manifest['step']}, but the directory is named {path.name}"
        raise CheckpointError(MANIFEST, problem)
    return manifest


def read_state(path: str | Path) -> CheckpointState:
    """Read a checkpoint's `state.json`. Raises ValueError if it is malformed.

    Parameters have their current names, also if the checkpoint has format 3.
    """
    state = read_record(Path(path) / STATE, CheckpointState)
    state["sharded"] = {current_name(name): shards for name, shards in state["sharded"].items()}
    if "frozen" in state:
        state["frozen"] = [current_name(name) for name in state["frozen"]]
    if state["optimizer_steps"] > state["step"]:
        problem = (
            f"is damaged: optimizer_steps {state['optimizer_steps']} exceeds step {state['step']}"
        )
        raise CheckpointError(str(Path(path) / STATE), problem)

    check_shape(state["config"], _Config, "config")
    return state


def problems(path: str | Path, deep: bool = True) -> list[str]:
    """Return a sentence for each missing or damaged file of a checkpoint; none if the checkpoint is
    complete.

    `deep` compares checksums, which reads every byte; otherwise only sizes are compared.
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

    Calls `warn` with a message for each broken checkpoint that is skipped, except those in
    `excluding`. See `problems` for `deep`. Raises OSError if a disk error, which may pass, prevents
    the check, and OtherFormat if another version wrote a checkpoint, which a run that continues an
    older one would replace.
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
    """Return the step of the newest checkpoint whose files have the expected sizes, or 0 if there
    is none. See `newest_complete` for errors.
    """
    path = newest_complete(root, deep=False)
    return 0 if path is None else read_manifest(path)["step"]


def prune(
    root: str | Path,
    keep: int,
    keep_every: int | None = None,
    published: int | None = None,
) -> None:
    """Remove old checkpoints, so that the newest `keep` complete ones remain, and leftovers of
    killed processes.

    A checkpoint is complete if its files have the expected sizes. Steps that are a multiple of
    `keep_every` are never removed. Broken checkpoints do not count towards `keep`, and are removed
    once `keep` newer ones are complete.

    `published` is the step of the checkpoint that the run has just saved. Later checkpoints are
    damaged ones that the run skipped when it started. They are renamed to
    `step-00000100.abandoned`, which no reader accepts, and removed when the run reaches their step
    again.
    """
    root = Path(root)
    if published is not None:
        _set_aside_later(root, published)

    complete = 0
    for step, path in list_checkpoints(root):
        permanent = keep_every is not None and step % keep_every == 0
        if complete < keep:
            complete += not problems(path, deep=False)
        elif not permanent:
            discarded = _discard(path)
            sync_directory(root)
            remove(discarded)
    for path in root.glob(".step-*.partial"):
        remove(path)


def _set_aside_later(root: Path, published: int) -> None:
    for path in root.glob(f"step-*{ABANDONED}"):
        name = _NAME.fullmatch(path.name.removesuffix(ABANDONED))
        if name and int(name[1]) <= published:
            remove(path)
    for step, path in list_checkpoints(root):
        if step > published:
            aside = path.with_name(path.name + ABANDONED)
            remove(aside)
            os.rename(path, aside)


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _problems(path: Path, deep: bool) -> list[str]:
    """Like `problems`, but raise OtherFormat if another version wrote it, and OSError if the disk
    fails.
    """
    if not (path / MANIFEST).is_file():
        return [f"{MANIFEST} is missing"]
    try:
        manifest = read_manifest(path)
        damage = []
        for name, entry in manifest["files"].items():
            if problem := _file_problem(path / name, name, entry, deep):
                damage.append(problem)
        if not damage and STATE in manifest["files"]:
            step = read_state(path)["step"]
            if step != manifest["step"]:
                damage.append(f"{STATE} says step {step}, but {MANIFEST} says {manifest['step']}")
        return damage
    except OtherFormat:
        raise
    except (ValueError, FileNotFoundError) as error:
        return [str(error)]


def _file_problem(path: Path, name: str, entry: FileDigest, deep: bool) -> str | None:
    """Return what is wrong with the file `name` at `path`, or None. Raises OSError."""
    if not path.is_file():
        return f"{name} is missing"
    if path.stat().st_size != entry["bytes"]:
        return f"{name} has {path.stat().st_size} bytes instead of {entry['bytes']}"
    if not deep:
        return None
    sha256 = digest(path)["sha256"]
    if sha256 == entry["sha256"]:
        return None
    return f"{name} has sha256 {sha256} instead of {entry['sha256']}"


def _discard(path: Path) -> Path:
    """Rename a checkpoint, if it exists, to a name that no reader accepts, and return that."""
    discarded = path.with_name(f".{path.name}.discarded.partial")
    remove(discarded)
    if os.path.lexists(path):
        os.rename(path, discarded)
    return discarded
