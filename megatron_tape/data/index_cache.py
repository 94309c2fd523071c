"""Cache the index of a run's data: the arrays that define the order of its samples.

Rank 0 builds the arrays once, and all ranks map them into memory. They are in one subdirectory of
`data.cache_directory`, named by a digest of everything that the index depends on. Megatron's
datasets would write them directly to this subdirectory, and a killed job would leave truncated
arrays. Here, they write to a temporary directory, which is renamed when it is complete. Pickles are
never loaded, so write access to the cache does not allow code execution.
"""

import contextlib
import dataclasses
import errno
import hashlib
import json
import logging
import math
import os
import shutil
import stat
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from threading import Lock, Thread
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist

from megatron_tape.errors import ConfigError, FileError, UserError, one_line
from megatron_tape.io.files import file_system_time, sync_directory

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 10.0
"""Seconds between two messages of rank 0 to the other ranks while it builds an index."""
_STAGING = ".building-"
"""Beginning of the names of the temporary directories in the cache."""
_ABANDONED_SECONDS = 86_400.0
"""Age at which a temporary directory is removed: the job that made it is assumed to be dead."""
_BUSY_SECONDS = 1.0
"""Minimum CPU time of rank 0 between two heartbeats that counts as progress."""
_LOADING = Lock()
"""Lock for parsing the header of an array. Megatron loads arrays in several threads, and Python
3.11 may raise SystemError if they parse headers at the same time."""
_PERMANENT = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)
"""`errno` of errors that a retry does not fix: no space, no permissions or no directory."""


def digest_of(*parts: Any) -> str:
    """Return a digest (32 hexadecimal digits) of what an index depends on: dataclasses and JSON."""
    return hashlib.sha256(json.dumps(parts, default=dataclasses.asdict).encode()).hexdigest()[:32]


def cached(
    directory: str,
    kind: str,
    names: Sequence[str],
    key: Any,
    make: Callable[[], dict[str, np.ndarray]],
    build: bool,
) -> dict[str, np.ndarray]:
    """Return the arrays `names` of an index, mapped into memory.

    Each array is in a file DIGEST-KIND-NAME.npy in `directory`. DIGEST is that of `key`, which must
    contain everything that the arrays depend on. KIND is `kind`, such as Mixed.

    With `build`, `directory` is a temporary directory of rank 0, and `make` computes the arrays by
    name. Without it, this function writes nothing: all ranks share `directory`. Raises FileError
    with the directory to remove if an array is missing or damaged.
    """
    paths = {name: Path(directory, f"{digest_of(key)}-{kind}-{name}.npy") for name in names}
    # Two stages of a run may have the same arrays. They are mapped already, so keep their files.
    if build and not paths[names[0]].exists():
        for name, array in make().items():
            np.save(paths[name], array, allow_pickle=False)
    return {name: load_array(path) for name, path in paths.items()}


def load_array(path: str | Path, **_options: Any) -> np.ndarray:
    """Map an array of integers from the cache into memory, read-only.

    Megatron calls this with the options of `numpy.load`, which are ignored.

    Raises FileError if the file is missing or does not contain integers; its fix is to remove the
    directory. Raises OSError if the file system fails.
    """
    try:
        # A pipe in place of the file would block `numpy.load` forever.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ValueError("it is not a regular file")
        with _LOADING, warnings.catch_warnings():
            # Some damaged headers cause a warning before the error.
            warnings.simplefilter("ignore")
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu":
            raise ValueError("it does not contain integers")
        return array
    except MemoryError:
        raise
    except Exception as error:  # damaged headers raise errors of many types
        # The array may be intact if the file system fails, so its directory must not be removed.
        if isinstance(error, OSError) and error.errno != errno.ENOENT:
            raise
        raise FileError(
            path,
            f"cannot be used ({one_line(error)})",
            f"remove {os.path.dirname(path)} and start the run again, which builds the index anew",
        ) from None


class _BuildState(NamedTuple):
    """What rank 0 tells all ranks about the build. The default is the state before the first
    message.
    """

    finished: bool = False
    bytes_written: int = 0
    """Size of the index files so far."""
    cpu_seconds: float = math.inf
    """CPU time of rank 0's process. Infinite at first, so that the CPU time in the first message
    does not count as progress.
    """
    error: Exception | None = None
    """The error to raise on all ranks."""


def build_on_rank_0(
    directory: str, build: Callable[[str], object], on_progress: Callable[[], None]
) -> None:
    """Build the index on rank 0 unless its directory in the cache exists.

    All ranks call it together. Rank 0 calls `build(temporary)` in a thread, and renames the
    temporary directory to `directory`. While the files grow or rank 0 uses CPU time, every rank
    calls `on_progress`, so that an index that takes hours does not count as a hang.

    Raises the same error on all ranks: ConfigError if the cache cannot store the index; a UserError
    of `build`; or MemoryError or RuntimeError if the index cannot be built for another reason.
    """
    # The thread sets the result of `future`, and adds the temporary directory to `staging`.
    future: Future = Future()
    staging = []
    is_rank_0 = dist.get_rank() == 0
    if is_rank_0:
        Thread(
            target=_run_build,
            args=(future, staging, Path(directory), build),
            name="index",
            daemon=True,
        ).start()

    state = _BuildState()
    logged_at = time.monotonic()
    try:
        while not state.finished:
            message = [state]
            if is_rank_0:
                wait([future], HEARTBEAT_SECONDS)
                message = [_state_of(future, staging, os.path.dirname(directory))]
                if time.monotonic() - logged_at > 2 * HEARTBEAT_SECONDS:
                    logged_at = time.monotonic()
                    megabytes = f"{message[0].bytes_written / 1e6:,.0f}"
                    logger.info("indexing the data: %s MB written", megabytes)

            # Rank 0's message replaces the item in the list of each rank.
            dist.broadcast_object_list(message, src=0)
            last = state
            state = message[0]
            has_grown = state.bytes_written != last.bytes_written
            if has_grown or state.cpu_seconds - last.cpu_seconds > _BUSY_SECONDS:
                on_progress()
            if state.error is not None:
                raise state.error
    except BaseException:  # including Ctrl-C, while Megatron's threads may still be writing
        for temporary in staging:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _run_build(
    future: Future, staging: list[Path], directory: Path, build: Callable[[str], None]
) -> None:
    """Call `_build_in_staging` in the thread of rank 0, and tell `future` how it ended."""
    try:
        _build_in_staging(staging, directory, build)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(None)


def _build_in_staging(staging: list[Path], directory: Path, build: Callable[[str], None]) -> None:
    """Build the index in a temporary directory and rename it to `directory`, unless this exists.

    The temporary directory's path is appended to `staging`.
    """
    if directory.exists():
        return
    cache = directory.parent
    cache.mkdir(parents=True, exist_ok=True)
    now = file_system_time(cache)
    for other in cache.glob(f"{_STAGING}*"):
        # Another job may remove the same directory, or another user may own it.
        with contextlib.suppress(OSError):
            if now - other.stat().st_mtime > _ABANDONED_SECONDS:
                shutil.rmtree(other)

    temporary = Path(tempfile.mkdtemp(prefix=f"{_STAGING}{os.uname().nodename}-", dir=cache))
    staging.append(temporary)
    try:
        # Only its owner can read a directory that `mkdtemp` creates, but others may share the
        # cache. So build in a directory with the usual permissions.
        new = temporary / "new"
        new.mkdir()
        build(str(new))
        for path in (*new.iterdir(), new):
            sync_directory(path)  # also syncs a file
        try:
            os.rename(new, directory)
        except OSError as error:
            # Another job may have built the same index.
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        sync_directory(cache)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _state_of(future: Future, staging: list[Path], cache: str) -> _BuildState:
    """Return the state of the build that `future` stands for, which writes into `staging`."""
    finished = future.done()
    error = None
    if finished and future.exception() is not None:
        error = _error_for_all(future.exception(), cache)
        # Rank 0 shows the cause in its traceback; the other ranks receive the error without it.
        error.__cause__ = future.exception()
    size = 0
    with contextlib.suppress(OSError):  # files may be renamed meanwhile
        for temporary in staging:
            for path in temporary.rglob("*.npy"):
                size += path.stat().st_size
    return _BuildState(finished, size, time.process_time(), error)


def _error_for_all(error: BaseException, cache: str) -> Exception:
    """Return the error to raise on all ranks: a ConfigError if a retry cannot help, the UserError
    or MemoryError itself, or a RuntimeError.
    """
    cause = error
    # Megatron wraps any error while it builds an index in a plain Exception.
    if isinstance(error.__cause__, OSError):
        cause = error.__cause__
    if isinstance(cause, OSError) and cause.errno in _PERMANENT:
        return ConfigError(
            "data.cache_directory",
            f"is {cache}, where the index of the data cannot be stored ({cause.strerror})",
            "free space there, make it writable, or choose another one",
        )
    if isinstance(error, UserError):
        return error
    problem = f"rank 0 could not index the data ({type(cause).__name__}: {cause})"
    # For a MemoryError, programs print advice about memory.
    if isinstance(cause, MemoryError):
        return MemoryError(problem)
    return RuntimeError(problem)
