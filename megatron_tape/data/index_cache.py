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
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_tape.errors import ConfigError, FileError, UserError, one_line
from megatron_tape.io.files import file_system_time, sync_directory

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 10.0
_STAGING = ".building-"
_ABANDONED_SECONDS = 86_400.0
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
) -> dict[str, np.ndarray]:
    """Return the arrays `names` of an index, mapped into memory.

    If `directory` lacks them, `make` computes them. `key` must contain everything that the arrays
    depend on. Each array is in a file DIGEST-KIND-NAME.npy, where DIGEST is that of `key`, and KIND
    is `kind`, such as Mixed.
    """
    paths = {name: Path(directory, f"{digest_of(key)}-{kind}-{name}.npy") for name in names}
    if not any(path.exists() for path in paths.values()):
        for name, array in make().items():
            np.save(paths[name], array, allow_pickle=False)
    return {name: load_array(path) for name, path in paths.items()}


def load_array(path: str | Path, **_options: Any) -> np.ndarray:
    """Map an array of integers from the cache into memory, read-only.

    Megatron calls this with the options of `numpy.load`, which are ignored.

    Raises FileError if the file is missing or does not contain integers, OSError if the file system
    fails.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ValueError("it is not a regular file")
        with _LOADING, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu":
            raise ValueError("it does not contain integers")
        return array
    except MemoryError:
        raise
    except Exception as error:  # damaged headers raise errors of many types
        if isinstance(error, OSError) and error.errno != errno.ENOENT:
            raise
        raise FileError(
            path,
            f"cannot be used ({one_line(error)})",
            f"remove {os.path.dirname(path)} and start the run again, which builds the index anew",
        ) from None


def build_on_rank_0(
    directory: str, build: Callable[[str], object], on_progress: Callable[[], None]
) -> None:
    """Build the index on rank 0 unless its directory in the cache exists.

    All ranks call it together. Rank 0 calls `build(temporary)` and renames the temporary directory
    to `directory`. While the files grow or rank 0 uses CPU time, every rank calls `on_progress`, so
    that an index that takes hours does not count as a hang.

    Raises the same error on all ranks: ConfigError if the cache cannot store the index; a UserError
    of `build`; or MemoryError or RuntimeError if the index cannot be built for another reason.
    """
    future: Future = Future()
    staging = []
    is_rank_0 = dist.get_rank() == 0
    if is_rank_0:
        Thread(
            target=_finish,
            args=(future, staging, Path(directory), build),
            name="index",
            daemon=True,
        ).start()

    # The state of rank 0: whether it has finished, bytes written, CPU time in seconds, and the
    # error to raise.
    state: tuple = (False, 0, math.inf, None)
    logged = time.monotonic()
    error = None
    try:
        while not state[0]:
            sent: list[tuple | None] = [None]
            if is_rank_0:
                wait([future], HEARTBEAT_SECONDS)
                refusal = None
                if future.done():
                    error = future.exception()
                    refusal = error and _refusal(error, os.path.dirname(directory))
                size = _bytes_in(staging)
                sent = [(future.done(), size, time.process_time(), refusal)]
                if time.monotonic() - logged > 2 * HEARTBEAT_SECONDS:
                    logged = time.monotonic()
                    logger.info("indexing the data: %s MB written", f"{size / 1e6:,.0f}")

            dist.broadcast_object_list(sent, src=0)
            before = state
            state = sent[0]
            if state[1] != before[1] or state[2] - before[2] > _BUSY_SECONDS:
                on_progress()
            if state[3] is not None:
                raise state[3] from error
    except BaseException:  # including Ctrl-C, while Megatron's threads may still be writing
        for temporary in staging:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _finish(
    future: Future, staging: list[Path], directory: Path, build: Callable[[str], None]
) -> None:
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
        with contextlib.suppress(OSError):
            if now - other.stat().st_mtime > _ABANDONED_SECONDS:
                shutil.rmtree(other)
    temporary = Path(tempfile.mkdtemp(prefix=f"{_STAGING}{os.uname().nodename}-", dir=cache))
    staging.append(temporary)
    try:
        new = temporary / "new"
        new.mkdir()
        build(str(new))
        for path in (*new.iterdir(), new):
            sync_directory(path)
        try:
            os.rename(new, directory)
        except OSError as error:
            # Another job may have built the same index.
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        sync_directory(cache)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _bytes_in(directories: list[Path]) -> int:
    size = 0
    with contextlib.suppress(OSError):  # files may be renamed meanwhile
        for path in (path for directory in directories for path in directory.rglob("*.npy")):
            size += path.stat().st_size
    return size


def _refusal(error: BaseException, cache: str) -> Exception:
    """Return the error to raise on all ranks: a ConfigError if a retry cannot help."""
    cause = error
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
    if isinstance(cause, MemoryError):
        return MemoryError(problem)
    return RuntimeError(problem)
