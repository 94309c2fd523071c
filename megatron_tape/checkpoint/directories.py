"""Checkpoint directories on disk: a checkpoint is either complete or does not exist under its name.

`step-00000100` holds files and a `manifest.json` that lists each of them with its size and sha256. Everything is
written into a staging directory, flushed to disk, and only then renamed. Nothing is deleted under a checkpoint's name,
so a process may be killed at any moment. While a checkpoint of the same step is being replaced, the old one is called
`step-00000100.replaced`. Readers accept this name too, so one of the two always exists. `step-00000100.abandoned` was
damaged, and the run continued from an earlier checkpoint (see `prune`).

A checkpoint may be a symbolic link to another directory. It is read like any other, and only the link is removed.
Names that start with a dot and end in `.partial` are leftovers, which `prune` removes. Files that are not in the
manifest are ignored. Only one process at a time may call these functions, but several may write files into one staging
directory. Imports no torch.
"""

import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from megatron_tape.data.tokenizer import TokenizerRecord
from megatron_tape.errors import CheckpointError
from megatron_tape.io.files import FileDigest, digest, remove, sync_directory
from megatron_tape.io.records import check_shape, read_record, write_record

FORMAT_VERSION = 3
MANIFEST = "manifest.json"
STATE = "state.json"
ABANDONED = ".abandoned"
START_AGAIN = "start again, or move this checkpoint away to continue from the one before"
_NAME = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,17})(\.replaced)?")


Steps = Annotated[int, Field(ge=0, le=10**8)]
"""A number of steps, with an upper bound, because nothing of unbounded size may be allocated for a file's numbers."""


class Manifest(TypedDict):
    """The contents of `manifest.json`."""

    format_version: int
    step: Steps
    files: dict[str, FileDigest]


class ShardSpec(TypedDict):
    """How a parameter is sharded over the tensor-parallel ranks: along `dim`, in `stride` interleaved pieces."""

    dim: Annotated[int, Field(ge=0, le=1)]
    stride: Annotated[int, Field(ge=1, le=16)]


class Progress(TypedDict, total=False):
    """Further state of a run.

    `bad_steps`: the number of steps just skipped in a row.
    `tokenizer`: the record of the run's tokenizer, whose files are in the directory `tokenizer`.
    `data`: fingerprints of the data files, by their names in the settings.
    `origin`: where an imported checkpoint came from.
    `identity`: a digest of the files that it was imported from.
    `card`: the contents of their model card, by the keys of the Hub's metadata.
    """

    bad_steps: Steps
    tokenizer: TokenizerRecord
    data: dict[str, str]
    origin: str
    identity: str
    card: dict[str, Any]


class Source(TypedDict):
    """The checkpoint with the frozen weights that another checkpoint omits."""

    path: str
    manifest_sha256: str


class State(TypedDict):
    """The contents of `state.json`. `config` holds the run's settings by section; imports have nothing frozen."""

    step: Steps
    optimizer_steps: Steps
    consumed_samples: Annotated[int, Field(ge=0, le=10**14)]
    progress: Progress
    tensor_model_parallel_size: Annotated[int, Field(ge=1, le=2**16)]
    data_parallel_size: Annotated[int, Field(ge=1, le=10**6)]
    sharded: dict[str, ShardSpec]
    frozen: NotRequired[list[str]]
    frozen_from: NotRequired[Source | None]
    config: dict[str, dict[str, Any]]


class OtherFormat(CheckpointError):
    """A checkpoint that another version of this project wrote. It may be complete, but cannot be read here."""


def staging_directory(home: str | Path, step: int) -> Path:
    """Create an empty directory for the files of checkpoint `step`.

    `home` must exist, and be on the file system that the checkpoint will be on.
    """
    staging = Path(home) / _name(step)
    remove(staging)
    staging.mkdir()
    return staging


def publish(staging: Path, root: str | Path, step: int, files: Mapping[str, FileDigest]) -> Path:
    """Turn a staging directory into checkpoint `step` of `root`, replacing one of the same step; return its path.

    `files` maps names to digests. When this returns, the checkpoint survives a power cut. Raises CheckpointError if
    this process does not see all files at their sizes.
    """
    entries = {name: {"bytes": entry["bytes"], "sha256": entry["sha256"]} for name, entry in sorted(files.items())}
    write_record(staging / MANIFEST, {"format_version": FORMAT_VERSION, "step": step, "files": entries})
    sync_directory(staging)
    for name, entry in files.items():
        if problem := _file_problem(staging / name, name, entry, deep=False):
            raise CheckpointError(
                str(staging), f"is not complete: {problem}", "let all nodes write to the same file system"
            )
    root = Path(root)
    final, replaced = root / _name(step), root / f"{_name(step)}.replaced"
    if os.path.lexists(final):
        if replaced.exists() and problems(final, deep=False):
            _discard(final)
        else:
            _discard(replaced)
            os.rename(final, replaced)
    os.rename(staging, final)
    sync_directory(root)
    _discard(replaced)
    return final


def list_checkpoints(root: str | Path) -> list[tuple[int, Path]]:
    """Return steps and paths of all checkpoints in `root`, newest first; a replaced one follows its successor."""
    root = Path(root)
    names = [_NAME.fullmatch(path.name) for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    found = sorted((-int(name[1]), name[2] or "", name[0]) for name in names if name)
    return [(-negative_step, root / name) for negative_step, _, name in found]


def read_manifest(path: str | Path) -> Manifest:
    """Read a checkpoint's manifest.

    Raises:
        OtherFormat: if another version wrote it.
        ValueError: if it is malformed (CheckpointError and what `read_record` raises), or its step is not the one in
            the directory's name.
    """
    path = Path(path)
    version = read_record(path / MANIFEST, dict[str, Any]).get("format_version")
    if isinstance(version, int) and version != FORMAT_VERSION:
        age = "a newer" if version > FORMAT_VERSION else "an earlier"
        raise OtherFormat(
            str(path),
            f"was written by {age} version of this project (checkpoint format {version}; this one reads "
            f"{FORMAT_VERSION})",
            "use that version, or move the checkpoint away",
        )
    manifest = read_record(path / MANIFEST, Manifest)
    name = _NAME.fullmatch(path.name)
    if name and manifest["step"] != int(name[1]):
        raise CheckpointError(MANIFEST, f"says step {manifest['step']}")
    if not manifest["files"]:
        raise CheckpointError(MANIFEST, "lists no files")
    for name in manifest["files"]:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise CheckpointError(MANIFEST, f"lists {name}, which is outside this directory")
    return manifest


def read_state(path: str | Path) -> State:
    """Read a checkpoint's `state.json`. Raises ValueError, in one sentence, if it is malformed."""
    state = read_record(Path(path) / STATE, State)
    if state["optimizer_steps"] > state["step"]:
        problem = f"cannot be used: optimizer_steps is {state['optimizer_steps']}, and step {state['step']}"
        raise CheckpointError(str(Path(path) / STATE), problem)
    for section, key in (("data", "tokenizer"), ("logging", "directory"), ("checkpoint", "directory")):
        settings = state["config"].get(section, {})
        check_shape(settings, dict[str, Any], f"config.{section}")
        check_shape(settings.get(key), str | None, f"config.{section}.{key}")
    check_shape(state["config"].get("model"), dict[str, Any], "config.model")
    return state


def problems(path: str | Path, deep: bool = True) -> list[str]:
    """Return the problems of a checkpoint, file by file; none if it is complete. Only `deep` reads the files' bytes."""
    try:
        return _problems(Path(path), deep)
    except (OtherFormat, OSError) as error:
        return [str(error)]


def newest_complete(
    root: str | Path,
    warn: Callable[[str], None] = lambda message: None,
    deep: bool = True,
    excluding: Collection[Path] = (),
    strict: bool = False,
) -> Path | None:
    """Return the path of the newest complete checkpoint, or None. Call `warn` for each broken one that is skipped.

    `deep` reads every byte; otherwise the file sizes are compared. Checkpoints in `excluding` are skipped silently.
    Raises OtherFormat instead of skipping a checkpoint of another version, which a run that continues from an older
    checkpoint would replace. If `strict`, also raises CheckpointError if a disk error prevents the check.
    """
    for _, path in list_checkpoints(root):
        if path in excluding:
            continue
        try:
            found = _problems(path, deep)
        except OSError as error:
            if strict:
                raise CheckpointError(str(path), f"cannot be read ({error})", START_AGAIN) from None
            found = [str(error)]
        if not found:
            return path
        warn(f"checkpoint {path} is skipped: {'; '.join(found)}")
    return None


def checkpointed_step(root: str | Path) -> int:
    """Return the step of the newest checkpoint whose file sizes are right, or 0 if there is none."""
    path = newest_complete(root, deep=False)
    return 0 if path is None else read_manifest(path)["step"]


def prune(root: str | Path, keep: int, keep_every: int | None = None, published: int | None = None) -> None:
    """Remove leftovers of killed processes and all but the newest `keep` checkpoints whose file sizes are right.

    Checkpoints of every `keep_every`-th step are never removed. Broken checkpoints do not count towards `keep`, and
    stay while they are newer than the oldest one kept. A replaced checkpoint gets its name back if its successor is
    missing or broken.

    `published` is the step of the checkpoint that the run has just saved. Later checkpoints may exist but be damaged,
    so the run skipped them. They are renamed to `step-00000100.abandoned`, which no reader accepts, and removed when
    the run reaches that step again.
    """
    root = Path(root)
    if published is not None:
        _set_aside_later(root, published)
    kept: list[int] = []
    found = list_checkpoints(root)
    maybe_broken = {step for step, path in found if path != root / _name(step)}
    for step, path in found:
        enough, for_good = len(kept) >= keep, keep_every is not None and step % keep_every == 0
        if step in kept or (enough and not for_good):
            _discard(path)
        elif (not enough or step in maybe_broken) and not problems(path, deep=False):
            kept.append(step)
            if path != root / _name(step):
                _discard(root / _name(step))
                os.rename(path, root / _name(step))
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
    """Return the problems of a checkpoint; a missing file is one. Raises OtherFormat, and OSError if the disk fails."""
    if not (path / MANIFEST).is_file():
        return [f"{MANIFEST} is missing"]
    try:
        manifest = read_manifest(path)
        listed = (_file_problem(path / name, name, entry, deep) for name, entry in manifest["files"].items())
        found = [problem for problem in listed if problem]
        if not found and STATE in manifest["files"] and (step := read_state(path)["step"]) != manifest["step"]:
            found.append(f"{STATE} says step {step}, and {MANIFEST} says {manifest['step']}")
    except OtherFormat:
        raise
    except (ValueError, FileNotFoundError) as error:
        return [str(error)]
    return found


def _file_problem(path: Path, name: str, entry: FileDigest, deep: bool) -> str | None:
    if not path.is_file():
        return f"{name} is missing"
    if path.stat().st_size != entry["bytes"]:
        return f"{name} has {path.stat().st_size} bytes instead of {entry['bytes']}"
    if not deep:
        return None
    try:
        sha256 = digest(path)["sha256"]
    except OSError as error:
        return f"{name} cannot be read ({error})"
    return None if sha256 == entry["sha256"] else f"{name} has sha256 {sha256} instead of {entry['sha256']}"


def _discard(path: Path) -> None:
    """Delete a checkpoint, if it exists, after giving it a name that no reader accepts."""
    if not os.path.lexists(path):
        return
    discarded = path.with_name(f".{path.name}.discarded.partial")
    remove(discarded)
    os.rename(path, discarded)
    sync_directory(path.parent)
    remove(discarded)
