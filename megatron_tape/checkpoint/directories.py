"""The file side of checkpoints: a checkpoint is a directory that is either whole or not one at all.

`step-00000100` holds files and a `manifest.json` that names each with its size and sha256. Everything is written
into a staging directory, brought to disk, and only then renamed; nothing is deleted under a checkpoint's name.
So a process may be killed at any moment. While a checkpoint of the same step is being replaced, the old one is called
`step-00000100.replaced`, which readers accept as well: at no moment are both gone.

Names that start with a dot and end in `.partial` are leftovers that `prune` removes. Files that a manifest does
not name are ignored. The functions are for one process at a time; several may write files into one staging directory.
torch is imported only where tensors are read or written.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{8,})(\.replaced)?")


def staging_directory(home: str | Path, step: int) -> Path:
    """Create, empty, the directory that the files of checkpoint `step` are written into.

    `home` must exist, on the file system that the checkpoint will be on; without it nothing can be staged.
    """
    staging = Path(home) / _name(step)
    if staging.exists():
        shutil.rmtree(staging)
    staging.mkdir()
    return staging


def write_tensors(path: str | Path, tensors: Mapping[str, "Tensor"], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors, from whatever device, as safetensors, and bring them to disk."""
    import safetensors.torch

    on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    safetensors.torch.save_file(on_host, path, metadata=dict(metadata or {}))
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def read_tensors(path: str | Path) -> dict[str, "Tensor"]:
    """Read every tensor of a file onto the CPU."""
    import safetensors.torch

    return safetensors.torch.load_file(path)


def read_metadata(path: str | Path) -> dict[str, str]:
    """Read the metadata of a tensor file."""
    import safetensors

    with safetensors.safe_open(path, framework="pt") as file:
        return file.metadata() or {}


def write_json(path: str | Path, value: Any) -> None:
    """Write `value` as JSON and bring it to disk."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(json.dumps(value, indent=1, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def digest(path: str | Path) -> tuple[int, str]:
    """Size in bytes and sha256 in hexadecimal of a file."""
    hasher, size = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            hasher.update(block)
            size += len(block)
    return size, hasher.hexdigest()


def publish(staging: Path, root: str | Path, step: int, files: Mapping[str, Mapping[str, Any]]) -> Path:
    """Turn a staging directory into checkpoint `step` of `root`, replacing one of the same step; returns its path.

    `files` maps names to `{"bytes": ..., "sha256": ...}` (see `digest`). When this returns, the checkpoint
    survives a power cut.
    """
    entries = {name: {"bytes": entry["bytes"], "sha256": entry["sha256"]} for name, entry in sorted(files.items())}
    write_json(staging / MANIFEST, {"format_version": FORMAT_VERSION, "step": step, "files": entries})
    _fsync_directory(staging)
    root = Path(root)
    final, replaced = root / _name(step), root / f"{_name(step)}.replaced"
    if final.exists():
        if replaced.exists() and problems(final, deep=False):
            _discard(final)
        else:
            _discard(replaced)
            os.rename(final, replaced)
    os.rename(staging, final)
    _fsync_directory(root)
    _discard(replaced)
    return final


def list_checkpoints(root: str | Path) -> list[tuple[int, Path]]:
    """Steps and paths of the checkpoints in `root`, whole or not, newest first; a replaced one follows its heir."""
    root = Path(root)
    names = [_NAME.fullmatch(path.name) for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    found = sorted((-int(name[1]), name[2] or "", name[0]) for name in names if name)
    return [(-negative_step, root / name) for negative_step, _, name in found]


def read_manifest(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint's manifest: `format_version`, `step` and `files`.

    Raises:
        ValueError: if it is malformed, of another format version, or of another step than the directory's name says.
    """
    try:
        manifest = json.loads((Path(path) / MANIFEST).read_text(encoding="utf-8"))
        version, step, files = manifest["format_version"], manifest["step"], manifest["files"]
        entries = [(entry["bytes"], entry["sha256"]) for entry in files.values()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{MANIFEST} is malformed ({type(error).__name__}: {error})") from error
    if version != FORMAT_VERSION:
        raise ValueError(f"{MANIFEST} has format version {version}, and {FORMAT_VERSION} is the one read here")
    name = _NAME.fullmatch(Path(path).name)
    if name and step != int(name[1]):
        raise ValueError(f"{MANIFEST} says step {step}")
    if not entries:
        raise ValueError(f"{MANIFEST} names no file")
    return manifest


def problems(path: str | Path, deep: bool = True) -> list[str]:
    """Say, file by file, why a checkpoint is not whole; empty if it is. Only `deep` reads the files' contents."""
    path = Path(path)
    if not (path / MANIFEST).is_file():
        return [f"{MANIFEST} is missing"]
    try:
        files = read_manifest(path)["files"]
    except (ValueError, OSError) as error:
        return [str(error)]
    found = (_file_problem(path / name, name, entry, deep) for name, entry in files.items())
    return [problem for problem in found if problem]


def newest_whole(root: str | Path, warn: Callable[[str], None]) -> Path | None:
    """Path of the newest checkpoint that is whole, every byte read; `warn` is told of each broken one passed over."""
    for _, path in list_checkpoints(root):
        found = problems(path)
        if not found:
            return path
        warn(f"checkpoint {path} is passed over: {'; '.join(found)}")
    return None


def what_to_resume(resume: str, root: str | Path) -> str:
    """Return what `checkpoint.resume` means for a run whose own checkpoints are in `root`.

    A checkpoint from elsewhere is where a run begins: once the run has checkpoints of its own, these continue it.
    """
    elsewhere = resume not in ("auto", "none") and Path(root).resolve() not in Path(resume).resolve().parents
    return "auto" if elsewhere and list_checkpoints(root) else resume


def prune(root: str | Path, keep: int) -> None:
    """Remove what is older than the newest `keep` checkpoints of complete size, and leftovers of killed processes.

    Broken checkpoints do not count, and stay while they are newer than the oldest one kept. A replaced checkpoint that
    stands in for a missing or broken heir gets its name back.

    Raises:
        ValueError: if `keep` is below 1.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}; at least 1 checkpoint has to stay")
    root = Path(root)
    kept: list[int] = []
    for step, path in list_checkpoints(root):
        if len(kept) == keep or step in kept:
            _discard(path)
        elif not problems(path, deep=False):
            kept.append(step)
            if path != root / _name(step):
                _discard(root / _name(step))
                os.rename(path, root / _name(step))
    for path in root.glob(".step-*.partial"):
        shutil.rmtree(path)


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _file_problem(path: Path, name: str, entry: Mapping[str, Any], deep: bool) -> str | None:
    if not path.is_file():
        return f"{name} is missing"
    if path.stat().st_size != entry["bytes"]:
        return f"{name} has {path.stat().st_size} bytes instead of {entry['bytes']}"
    if not deep:
        return None
    try:
        sha256 = digest(path)[1]
    except OSError as error:
        return f"{name} cannot be read ({error})"
    return None if sha256 == entry["sha256"] else f"{name} has sha256 {sha256} instead of {entry['sha256']}"


def _discard(path: Path) -> None:
    """Delete a checkpoint, if it is there, under a name that nobody takes for one."""
    if not path.exists():
        return
    doomed = path.with_name(f".{path.name}.discarded.partial")
    if doomed.exists():
        shutil.rmtree(doomed)
    os.rename(path, doomed)
    _fsync_directory(path.parent)
    shutil.rmtree(doomed)


def _fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
