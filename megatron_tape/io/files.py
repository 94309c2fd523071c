"""Write files that appear under their final name only when they are complete.

While the output `data.bin` is being written, it is called `data.bin.partial`. The writer locks that
file, so that two processes never write the same output. The next run replaces a partial file that a
killed process left behind. Small files that programs exchange are not locked: of several writers,
the last one wins (`write_whole`).
"""

import errno
import fcntl
import functools
import hashlib
import os
import secrets
import shutil
import signal
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from typing_extensions import TypedDict

from megatron_tape.errors import FileError

SUFFIX = ".partial"
REPLACED = ".replaced"


class PartialFile:
    """A file that is written next to its final path and moved there by `publish`.

    `file` is open for reading and writing bytes. Raises FileError if another process is writing the
    same output, or if the partial path exists but is not a regular file; OSError if the file cannot
    be created.

    With `continues`, a partial file of this user that a previous writer left behind keeps its
    contents.
    """

    def __init__(self, path: str | Path, *, continues: bool = False):
        self.path = Path(path)
        self.partial_path = self.path.with_name(self.path.name + SUFFIX)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.is_dir():
            raise FileError(str(self.path), "is a directory", "name a file to write")
        self.file = self._open(continues)

    def _open(self, continues: bool) -> IO[bytes]:
        while True:
            created, descriptor = _create_or_open(self.partial_path, os.O_RDWR)
            file = os.fdopen(descriptor, "r+b")
            try:
                if _lock(descriptor, self.partial_path, self.path):
                    if created or (continues and _is_exclusive(descriptor)):
                        return file
                    # Do not reuse the file: its creator would still own it, or it may have other
                    # hard links.
                    self.partial_path.unlink()
            except BaseException:
                file.close()
                raise
            file.close()

    def sync(self) -> None:
        """Sync the contents written so far to disk."""
        self.file.flush()
        os.fsync(self.file.fileno())

    def publish(self) -> None:
        """Move the file to its final path, replacing an old file. Call `sync` before and
        `sync_directory` after.
        """
        os.replace(self.partial_path, self.path)
        self.file.close()

    def leave(self) -> None:
        """Close the unfinished file and keep it for the next writer; does nothing after `publish`.

        Call `sync` before: what a full disk has no space for is lost.
        """
        with suppress(OSError):
            self.file.close()

    def discard(self) -> None:
        """Remove the unfinished file; does nothing after `publish` or `leave`."""
        if not self.file.closed:
            self.partial_path.unlink(missing_ok=True)
            # Closing writes what is still buffered, which fails if the disk is full.
            with suppress(OSError):
                self.file.close()


def _is_exclusive(descriptor: int) -> bool:
    """Return whether an open file belongs to this user and has no other name."""
    status = os.fstat(descriptor)
    return status.st_uid == os.geteuid() and status.st_nlink == 1


@contextmanager
def atomic_output(
    path: str | Path, mode: str = "wb", *, overwrite: bool = False
) -> Iterator[IO[Any]]:
    """Yield a file to write (`mode` "wb", or "w" for UTF-8 text) that appears as `path` only if the
    block succeeds.

    The file is then synced to disk. Raises FileError before anything is written if `path` exists
    and `overwrite` is false. With `overwrite`, the old file stays until the new one is complete.
    """
    if not overwrite:
        refuse_existing(path)
    partial = PartialFile(path)
    try:
        with _add_path_to_errors(path):
            if mode == "wb":
                yield partial.file
            else:
                with open(os.dup(partial.file.fileno()), "w", encoding="utf-8", newline="") as text:
                    yield text
            partial.sync()
        partial.publish()
        sync_directory(partial.path.parent)
    finally:
        partial.discard()


@contextmanager
def atomic_directory(
    path: str | Path,
    replaces: Callable[[Path], None] | None = None,
    fix: str = "choose another output, or move it away",
) -> Iterator[Path]:
    """Yield an empty directory to write into, which is renamed to `path` only if the block
    succeeds.

    Until then, it is called `path` + `.partial`. A directory of this name that a killed process
    left behind is removed first. The block must sync the files that it writes. Raises FileError
    before anything is written if `path` exists, if another process is writing it, or if the partial
    path exists but is not a directory.

    Args:
        path: the directory to write.
        replaces: if given, an existing `path` is replaced by the complete new directory. This
            function is called with `path` first, and raises FileError if it may not be replaced. A
            process that is killed between the two renames leaves the old directory as `path` +
            `.replaced`.
        fix: what to do if `path` exists and may not be replaced.
    """
    path = Path(os.path.abspath(path))
    _check_replaced(path, replaces, fix)
    partial = path.with_name(path.name + SUFFIX)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = _own_directory(partial, path)
    try:
        with _add_path_to_errors(path, partial):
            yield partial
        _sync(descriptor)
        if _check_replaced(path, replaces, fix):
            _replace_directory(path, partial)
        else:
            os.rename(partial, path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    else:
        sync_directory(path.parent)
    finally:
        os.close(descriptor)


def _check_replaced(path: Path, replaces: Callable[[Path], None] | None, fix: str) -> bool:
    """Return whether `path` exists and may be replaced. Raises FileError if it exists and may not
    be replaced.
    """
    if replaces is None or not os.path.lexists(path):
        refuse_existing(path, fix=fix)
        return False
    if path.is_symlink() or not path.is_dir():
        raise FileError(
            str(path), "is not a directory, so it cannot be replaced", "choose another output"
        )
    old = path.with_name(path.name + REPLACED)
    refuse_existing(old, fix=f"an interrupted run has left it while it replaced {path}; remove it")
    replaces(path)
    return True


def _replace_directory(path: Path, new: Path) -> None:
    """Replace the directory `path` by the directory `new`, and remove the old one."""
    old = path.with_name(path.name + REPLACED)
    with hold_signals():
        os.rename(path, old)
        try:
            os.rename(new, path)
        except BaseException:
            os.rename(old, path)
            raise
    sync_directory(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _own_directory(partial: Path, path: Path) -> int:
    """Create the empty directory `partial`, removing one that a killed process left; return its
    locked descriptor.
    """
    while True:
        created = False
        with suppress(FileExistsError):
            partial.mkdir()
            created = True
        descriptor = _open_no_link(partial, os.O_RDONLY, stat.S_IFDIR)
        try:
            if _lock(descriptor, partial, path):
                if created:
                    return descriptor
                shutil.rmtree(partial)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def open_to_append(path: str | Path, buffering: int = -1) -> IO[bytes]:
    """Open a file to append bytes to it, and create it if it does not exist.

    `buffering` is passed to `open`. Raises FileError if the path is a link or not a regular file.
    """
    return os.fdopen(_create_or_open(path, os.O_WRONLY | os.O_APPEND)[1], "ab", buffering)


def _create_or_open(path: str | Path, flags: int) -> tuple[bool, int]:
    """Return whether a regular file was created, and its descriptor. Raises FileError if the path
    is anything else.
    """
    while True:
        with suppress(FileExistsError):
            return True, os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
        with suppress(FileNotFoundError):  # removed since
            return False, _open_no_link(path, flags, stat.S_IFREG)


def _open_no_link(path: str | Path, flags: int, kind: int) -> int:
    """Open a file or directory of type `kind`. Raises FileError for other types and for links."""
    descriptor = None
    try:
        # Without O_NONBLOCK, opening a FIFO would wait for a reader.
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise
    if descriptor is not None and stat.S_IFMT(os.fstat(descriptor).st_mode) == kind:
        return descriptor
    if descriptor is not None:
        os.close(descriptor)
    if os.path.islink(path):
        problem = "is a link"
    else:
        problem = f"is not a {_KINDS[kind]}"
    raise FileError(str(path), f"{problem}, so nothing was written", "remove it")


_KINDS = {stat.S_IFREG: "regular file", stat.S_IFDIR: "directory"}


def _lock(descriptor: int, partial: Path, path: Path) -> bool:
    """Lock an open file or directory; return whether it is still at `partial`. Raises FileError if
    it is locked.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # Some network file systems have no locks. There, the user must not start two writers of one
        # output.
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            fix = "wait for it or choose another output"
            raise FileError(str(path), "is being written by another process", fix) from None
    # The previous holder of the lock may have renamed or removed the file.
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), os.stat(partial))
    return False


@contextmanager
def _add_path_to_errors(path: str | Path, unfinished: Path | None = None) -> Iterator[None]:
    """Add the output's path to an OSError without a file name, such as that for a full disk.

    The path also replaces that of a file in the directory `unfinished`, which is removed and which
    the user has not named.
    """
    try:
        yield
    except OSError as error:
        name = error.filename
        is_unfinished = (
            unfinished is not None and name is not None and Path(name).is_relative_to(unfinished)
        )
        if error.strerror and (name is None or is_unfinished):
            error.filename = str(path)
        raise


def refuse_existing(
    *paths: str | Path, fix: str = "pass --overwrite to replace it or choose another output"
) -> None:
    """Raise FileError with the advice `fix` if one of the paths exists."""
    for path in paths:
        if os.path.lexists(path):
            raise FileError(str(path), "exists", fix)


@contextmanager
def hold_signals() -> Iterator[None]:
    """Delay SIGINT, SIGTERM and SIGHUP until the end of the block, which must be short."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {
        number: signal.signal(number, lambda n, frame: received.append(n)) for number in numbers
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for number in received:
            signal.raise_signal(number)


def sync_directory(path: str | Path) -> None:
    """Sync the entries of a directory, or the contents of a file, to disk.

    A directory is skipped if its file system cannot sync directories.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        if error.errno in _CANNOT_SYNC and os.path.isdir(path):
            return
        raise
    try:
        _sync(descriptor)
    finally:
        os.close(descriptor)


_CANNOT_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF}
"""Errors of file systems, such as CIFS and some of FUSE, that cannot sync directories. git and
PostgreSQL ignore them, too."""


def _sync(descriptor: int) -> None:
    """Sync an open file or directory; see `sync_directory`."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC or not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise


def file_system_time(directory: str | Path) -> float:
    """Return the Unix time of the clock that dates new files in a directory.

    On a network file system, this is the server's clock, so that the age of a file does not depend
    on the clock of the node that wrote it or of the one that asks. Returns this node's time if no
    file can be created.
    """
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()


def written_at(path: str | Path) -> float:
    """Return the Unix time at which a file was written, by the clock of `file_system_time`. Raises
    OSError.

    The file is opened, since a network file system may return old attributes otherwise.
    """
    with open(path, "rb") as file:
        return os.fstat(file.fileno()).st_mtime


def remove(path: str | Path) -> None:
    """Remove a file, a link (not its target) or a directory with its contents, if it exists."""
    path = Path(path)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_whole(
    path: str | Path, chunks: Iterable[bytes], *, staging: Path | None = None, durable: bool = True
) -> None:
    """Replace `path` atomically by a file of `chunks`. Of several writers, the last one wins.

    The file is first written in `staging` (default: next to `path`), which must be on the same file
    system. With `durable`, it is synced to disk. If OSError is raised, the old file is unchanged.
    """
    path = Path(path)
    # The temporary name must not contain the final one: TensorBoard reads any file with "tfevents"
    # in its name.
    partial = (staging or path.parent) / f".{secrets.token_hex(8)}{SUFFIX}"
    try:
        with _add_path_to_errors(path), open(partial, "xb") as file:
            file.writelines(chunks)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(path.parent)


class FileDigest(TypedDict):
    """The size and sha256 of a file."""

    bytes: int
    sha256: str


def digest(
    path: str | Path, progress: Callable[[int], None] = lambda bytes_read: None
) -> FileDigest:
    """Return the size and sha256 (hexadecimal) of a file. `progress` is called with the number of
    bytes read so far.
    """
    hasher = hashlib.sha256()
    size = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            hasher.update(block)
            size += len(block)
            progress(size)
    return {"bytes": size, "sha256": hasher.hexdigest()}


BLOCKS = 15
BLOCK_BYTES = 64 << 10


def fingerprint(path: str | Path, blocks: int = BLOCKS) -> str:
    """Return the size and a short sha256 of a file, as in "12 bytes, sha256 0123456789ab".

    Of a file of more than `blocks` * 256 KiB, only `blocks` + 1 evenly spaced blocks of 64 KiB are
    read. The result is cached in this process as long as the file's times, size and inode stay the
    same.
    """
    status = os.stat(path)
    identity = status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns
    return _fingerprint(str(path), blocks, status.st_size, identity)


@functools.lru_cache(maxsize=1 << 16)
def _fingerprint(path: str, blocks: int, size: int, identity: tuple[int, ...]) -> str:
    hasher = hashlib.sha256()
    with open(path, "rb") as file:
        if size <= blocks << 18:
            hasher.update(file.read())
        else:
            for block in range(blocks + 1):
                file.seek((size - BLOCK_BYTES) * block // blocks)
                hasher.update(file.read(BLOCK_BYTES))
    return f"{size} bytes, sha256 {hasher.hexdigest()[:12]}"
