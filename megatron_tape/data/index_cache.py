"""Index arrays that are computed once from the datasets and mapped by every rank.

An entry of the cache is a few arrays, `KEY-KIND-...-PART.npy`, and `KEY-KIND-...-description.txt`. Megatron's datasets
use these names, but write directly to the cache, where a job that is killed leaves truncated arrays. Here an entry is
built in a temporary directory, and moved to the cache when it is complete, with `KEY-KIND-...-fingerprints.json`, by
which a start tells whether it is still what was built. Arrays are loaded without pickles: whoever can write to the
cache cannot run code.
"""

import contextlib
import errno
import grp
import hashlib
import json
import logging
import math
import os
import pwd
import shutil
import stat
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from threading import Lock, Thread
from typing import IO, Any

import numpy as np
import torch.distributed as dist

from megatron_tape.data.remembered import BLOCKS
from megatron_tape.errors import ConfigError, FileError, UserError
from megatron_tape.io.files import fingerprint, sync_directory
from megatron_tape.io.records import read_record, write_record

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 10.0
_DESCRIPTION = "description.txt"
_PARTS = {
    "BlendedDataset": ("dataset_index", "dataset_sample_index"),
    "Mixed": ("counts", "dataset", "sample"),
    "DocumentWindows": ("documents", "ends_of_whole", "left"),
}
_PARTS_OF_OTHERS = ("document_index", "sample_index", "shuffle_index")
"""Those of Megatron's GPTDataset, whatever its subclass is called."""
_STAGING = ".building-"
_ABANDONED_SECONDS = 86_400.0
_BUSY_SECONDS = 1.0
"""Of computing between two heartbeats, which show that rank 0 is at work."""
_RECORD_BYTES = 1 << 16
_LOADING = Lock()
"""Python 3.11 may raise SystemError when threads, here Megatron's, parse the headers of arrays at the same time."""
_REBUILD = "remove that directory, and the index is built again"
_LASTING = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)
"""Errors of a cache that cannot hold the index."""


class DamagedIndex(FileError):
    """A cache with an array that is missing, or does not suit the data. The next start may build it again."""

    @classmethod
    def of(cls, cache: str | Path, problem: str) -> "DamagedIndex":
        return cls(str(cache), f"holds an index that cannot be used: {problem}", _REBUILD)


def cached(directory: str, kind: str, key: Any, make: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return the arrays of an entry, mapped into memory; `make` returns them if the directory lacks them.

    `key` is what they depend on, as JSON can write it.
    """
    description = json.dumps(key)
    base = Path(directory, f"{hashlib.sha256(description.encode()).hexdigest()[:32]}-{kind}")
    if not Path(f"{base}-{_DESCRIPTION}").is_file():
        for part, array in make().items():
            save_array(f"{base}-{part}.npy", array)
        with open_new(f"{base}-{_DESCRIPTION}", "w") as file:
            file.write(description)
    return {part: load_array(f"{base}-{part}.npy") for part in _PARTS[kind]}


def load_array(path: str | Path, allow_pickle: bool = False, mmap_mode: str = "r") -> np.ndarray:
    """Map an array of the cache into memory. The other arguments are those of `numpy.load`; pickles are never loaded.

    Raises DamagedIndex if the file is missing or holds anything but whole numbers in one dimension (in two, as pairs,
    for a `sample_index`); OSError if the file system does not answer.
    """
    problem = None
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            problem = "it is not a regular file"
        else:
            with _LOADING, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                array = np.load(path, mmap_mode="r", allow_pickle=False)
            pairs = str(path).endswith("-sample_index.npy")
            if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu":
                problem = "it does not hold whole numbers"
            elif not array.ndim or array.shape[1:] != ((2,) if pairs else ()):
                problem = f"its shape is {list(array.shape)}"
    except FileNotFoundError as error:
        problem = error.strerror
    except (OSError, MemoryError):
        raise
    except Exception as error:  # a damaged header raises many kinds
        problem = " ".join(str(error).split())[:200] or type(error).__name__
    if problem is not None:
        place = os.path.realpath(path)  # rank 0 builds in a directory of links to the cache
        raise DamagedIndex.of(os.path.dirname(place), f"{os.path.basename(place)} cannot be used ({problem})")
    return array


def save_array(path: str | Path, array: np.ndarray, allow_pickle: bool = False) -> None:
    """Write an array as `numpy.save` does, but not through a link; pickles are never written."""
    _remove_link(path)
    np.save(path, array, allow_pickle=False)


def open_new(path: str | Path, mode: str) -> IO[str]:
    """Open a text file as `open` does, but not through a link."""
    _remove_link(path)
    return open(path, mode, encoding="utf-8")


def _remove_link(path: str | Path) -> None:
    """Remove what links to the cache where it turns out that a file has to be written."""
    if os.path.islink(path):
        os.unlink(path)


def build_on_rank_0(cache: str, build: Callable[[str], None], moved: Callable[[], None]) -> None:
    """Have rank 0 call `build(directory)`, and move what it writes there to the cache; all ranks call this together.

    The directory shows `build` what the cache holds. As long as files grow there or rank 0 computes, every rank calls
    `moved`: an index that takes hours is no hang. Raises ConfigError, on all ranks, if the cache cannot hold it.
    """
    future, staging = Future(), []
    if is_rank_0 := dist.get_rank() == 0:
        arguments = future, staging, Path(cache), build
        Thread(target=_finish, args=arguments, name="index", daemon=True).start()
    state, logged, error = (False, 0, math.inf, None), time.monotonic(), None
    try:
        while not state[0]:
            sent: list[tuple | None] = [None]
            if is_rank_0:
                wait([future], HEARTBEAT_SECONDS)
                error = future.exception() if future.done() else None
                size = _bytes_in(staging)
                sent = [(future.done(), size, time.process_time(), error and _refusal(error, cache))]
                if time.monotonic() - logged > 2 * HEARTBEAT_SECONDS:
                    logged = time.monotonic()
                    logger.info("indexing the data: %s MB are written", f"{size / 1e6:,.0f}")
            dist.broadcast_object_list(sent, src=0)
            before, state = state, sent[0]
            if state[1] != before[1] or state[2] - before[2] > _BUSY_SECONDS:
                moved()
            if state[3] is not None:
                raise state[3] from error
    except BaseException:  # also Ctrl-C: Megatron's threads may still be at work
        for directory in staging:
            shutil.rmtree(directory, ignore_errors=True)
        raise


def _finish(future: Future, staging: list[Path], cache: Path, build: Callable[[str], None]) -> None:
    try:
        _build_aside(staging, cache, build)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(None)


def _build_aside(staging: list[Path], cache: Path, build: Callable[[str], None]) -> None:
    """Build in a directory of its own, which is added to `staging`, and move what is new to the cache."""
    cache.mkdir(parents=True, exist_ok=True)
    if (others := _who_else_writes(cache)) is not None:
        sentence = "warning: %s, so others can change which samples this run learns from; choose a data.cache_directory"
        logger.warning(f"{sentence} that only you can write", others)
    writable, (whole, cut) = os.access(cache, os.W_OK), _entries(cache)
    if writable:
        for path in cut:
            logger.warning("warning: %s is damaged; its entry is built again when it is needed", path)
        for left in cache.glob(f"{_STAGING}*"):
            with contextlib.suppress(OSError):
                if time.time() - left.stat().st_mtime > _ABANDONED_SECONDS:
                    shutil.rmtree(left)
    prefix, parent = f"{_STAGING}{os.uname().nodename}-", cache if writable else None
    directory = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    staging.append(directory)
    try:
        for path in whole:
            (directory / path.name).symlink_to(path.resolve())
        try:
            build(str(directory))
        except (DamagedIndex, AssertionError, ArithmeticError, LookupError, ValueError) as error:
            if not whole or (isinstance(error, UserError) and not isinstance(error, DamagedIndex)):
                raise
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            logger.warning("warning: the index in %s does not suit the data (%s); it is built again", cache, reason)
            for path in directory.iterdir():
                path.unlink()
            build(str(directory))
        made = [path for path in directory.iterdir() if not path.is_symlink()]
        for description in (path for path in made if path.name.endswith(_DESCRIPTION)):
            write_record(_fingerprints_beside(description), _fingerprints(description))
        made = [path for path in directory.iterdir() if not path.is_symlink()]
        if made and not writable:
            lacks = f"{cut[0]} is damaged" if cut else "it lacks a part of the index"
            raise PermissionError(errno.EACCES, f"{lacks}, and it is not writable", str(cache))
        for path in sorted(made, key=lambda path: path.name.endswith(_DESCRIPTION)):
            sync_directory(path)
            os.replace(path, cache / path.name)
        if made:
            sync_directory(cache)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _entries(cache: Path) -> tuple[list[Path], list[Path]]:
    """Return the files of the entries that are whole, and the first bad file of each of the others."""
    whole, cut = [], []
    for description in cache.glob(f"*-{_DESCRIPTION}"):
        files = [*_arrays(description), description]
        if (bad := next(_bad(files), None)) is None:
            whole += files
        else:
            cut.append(bad)
    return whole, cut


def _arrays(description: Path) -> list[Path]:
    base, kind = description.name.removesuffix(_DESCRIPTION), description.name.split("-")[1]
    return [description.with_name(f"{base}{part}.npy") for part in _PARTS.get(kind, _PARTS_OF_OTHERS)]


def _fingerprints_beside(description: Path) -> Path:
    return description.with_name(f"{description.name.removesuffix(_DESCRIPTION)}fingerprints.json")


def _fingerprints(description: Path) -> dict[str, str]:
    return {path.name: fingerprint(path, BLOCKS) for path in [*_arrays(description), description]}


def _bad(files: list[Path]) -> Iterator[Path]:
    """Yield those files of an entry, the last of which is its description, that are not what was built."""
    try:
        expected = read_record(_fingerprints_beside(files[-1]), dict[str, str], _RECORD_BYTES)
    except (OSError, ValueError):
        expected = {}
    for path in files:
        try:
            is_regular = stat.S_ISREG(path.lstat().st_mode)
            if is_regular and expected.get(path.name) == fingerprint(path, BLOCKS):
                if path.suffix == ".npy":
                    load_array(path)
                continue
        except (OSError, DamagedIndex):
            pass
        yield path


def _who_else_writes(cache: Path) -> str | None:
    """Return a clause that says which other users own or may write the cache or a file in it, None if none do."""
    trusted = (os.geteuid(), 0)
    for path in (cache, *cache.glob("*-*")):
        try:
            found = path.stat()
        except OSError:  # removed since
            continue
        if found.st_uid not in trusted:
            return f"{path} belongs to another user (uid {found.st_uid})"
        if found.st_mode & stat.S_IWOTH:
            return f"{path} can be written by every user"
        if found.st_mode & stat.S_IWGRP and not _is_private_group(found.st_gid):
            return f"{path} can be written by the group {_name(found.st_gid)}"
    return None


def _is_private_group(gid: int) -> bool:
    """Return whether only this user is in a group: it has the user's name, as most systems set up new users."""
    with contextlib.suppress(KeyError):
        return gid == 0 or grp.getgrgid(gid).gr_name == pwd.getpwuid(os.geteuid()).pw_name
    return gid == os.getegid()


def _name(gid: int) -> str:
    with contextlib.suppress(KeyError):
        return grp.getgrgid(gid).gr_name
    return str(gid)


def _bytes_in(directories: list[Path]) -> int:
    found = 0
    with contextlib.suppress(OSError):  # a file that has just been moved
        for path in (path for directory in directories for path in directory.iterdir()):
            found += 0 if path.is_symlink() else path.stat().st_size
    return found


def _refusal(error: BaseException, cache: str) -> Exception:
    """Return what to raise on all ranks; another start may help after errors of a file system that may pass."""
    cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
    if isinstance(cause, OSError) and cause.errno in _LASTING:
        problem = f"is {cache}, where the index of the data cannot be kept ({cause.strerror})"
        return ConfigError("data.cache_directory", problem, "make room there, or choose another")
    kind = f"{type(cause).__name__}: {cause}"
    return error if isinstance(error, UserError) else RuntimeError(f"rank 0 could not index the data ({kind})")
