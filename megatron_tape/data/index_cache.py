"""What is computed once from the datasets and mapped by every rank: built beside the cache, and moved there when whole.

An entry of the cache is a few arrays, `KEY-KIND-...-PART.npy`, and `KEY-KIND-...-description.txt`. Megatron's datasets
name theirs so, but write straight to their places, where a job that is killed leaves arrays that are cut.
"""

import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_tape.errors import ConfigError
from megatron_tape.io.files import sync_directory

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


def cached(directory: str, kind: str, key: Any, make: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return the arrays of an entry, mapped into memory; `make` returns them if the directory lacks them.

    `key` is what they depend on, as JSON can write it.
    """
    description = json.dumps(key)
    base = Path(directory, f"{hashlib.sha256(description.encode()).hexdigest()[:32]}-{kind}")
    if not Path(f"{base}-{_DESCRIPTION}").is_file():
        for part, array in make().items():
            np.save(f"{base}-{part}.npy", array)
        Path(f"{base}-{_DESCRIPTION}").write_text(description)
    return {part: np.load(f"{base}-{part}.npy", mmap_mode="r") for part in _PARTS[kind]}


def build_on_rank_0(cache: str, build: Callable[[str], None], moved: Callable[[], None]) -> None:
    """Have rank 0 call `build(directory)`, and move what it writes there to the cache; all ranks call this together.

    The directory shows `build` what the cache holds. While it fills, every rank calls `moved`: an index that takes
    hours is no hang. Raises ConfigError, on all ranks, if the cache cannot be read or written.
    """
    future: Future = Future()
    if is_rank_0 := dist.get_rank() == 0:
        # A daemon, so that Ctrl-C does not wait for it.
        Thread(target=_finish, args=(future, Path(cache), build), name="index", daemon=True).start()
    done, written, logged = False, 0, time.monotonic()
    while not done:
        state: list[tuple | None] = [None]
        if is_rank_0:
            wait([future], HEARTBEAT_SECONDS)
            error = future.exception() if future.done() else None
            state[0] = (future.done(), _bytes_written(Path(cache)), error and _refusal(error, cache))
            if time.monotonic() - logged > 2 * HEARTBEAT_SECONDS:
                logged = time.monotonic()
                logger.info("the index has %s MB so far", f"{state[0][1] / 1e6:,.0f}")
        dist.broadcast_object_list(state, src=0)
        before = written
        done, written, refusal = state[0]
        if written != before:
            moved()
        if refusal is not None:
            raise refusal


def _finish(future: Future, cache: Path, build: Callable[[str], None]) -> None:
    try:
        _build_aside(cache, build)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(None)


def _build_aside(cache: Path, build: Callable[[str], None]) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    whole, cut = _entries(cache)
    if not os.access(cache, os.W_OK):  # all that is needed may be there
        if cut:
            raise PermissionError(errno.EACCES, f"{cut[0]} is cut short and cannot be replaced", str(cache))
        build(str(cache))
        return
    for path in cut:
        logger.warning("warning: %s is cut short; what it belongs to is built again when it is needed", path)
    for left in cache.glob(f"{_STAGING}*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _ABANDONED_SECONDS:
                shutil.rmtree(left)
    staging = Path(tempfile.mkdtemp(prefix=f"{_STAGING}{os.uname().nodename}-", dir=cache))
    try:
        for path in whole:
            (staging / path.name).symlink_to(path.resolve())
        build(str(staging))
        made = [path for path in staging.iterdir() if not path.is_symlink()]
        for path in sorted(made, key=lambda path: path.name.endswith(_DESCRIPTION)):
            sync_directory(path)
            os.replace(path, cache / path.name)
        sync_directory(cache)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _entries(cache: Path) -> tuple[list[Path], list[Path]]:
    """Return the files of the entries that are whole, and the first bad file of each of the others."""
    whole, cut = [], []
    for description in cache.glob(f"*-{_DESCRIPTION}"):
        base, kind = description.name.removesuffix(_DESCRIPTION), description.name.split("-")[1]
        files = [cache / f"{base}{part}.npy" for part in _PARTS.get(kind, _PARTS_OF_OTHERS)]
        bad = [path for path in files if not _is_whole(path)]
        whole += [] if bad else [*files, description]
        cut += bad[:1]
    return whole, cut


def _is_whole(path: Path) -> bool:
    try:
        np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError):
        return False
    return True


def _bytes_written(cache: Path) -> int:
    found = 0
    with contextlib.suppress(OSError):  # a file that has just been moved
        for path in cache.glob(f"{_STAGING}*/*"):
            found += 0 if path.is_symlink() else path.stat().st_size
    return found


def _refusal(error: BaseException, cache: str) -> Exception:
    cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
    if isinstance(cause, OSError):
        problem = f"is {cache}, where the index of the data cannot be kept ({cause.strerror or cause})"
        return ConfigError("data.cache_directory", problem, "make room there, or choose another")
    return error if isinstance(error, ConfigError) else RuntimeError(f"rank 0 could not index the data: {error}")
