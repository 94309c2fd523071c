"""Write files that appear under their final name only when they are complete.

While the output `data.bin` is being written, it is called `data.bin.partial`. The writer locks that
file, so that two processes never write the same output. The next run replaces a partial file that a
killed process left behind. Small files that programs exchange are not locked: of several writers,
the last one wins (`write_whole`).
"""

import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import signal
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
"""Suffix of an output while it is being written."""
REPLACED = ".replaced"
"""Suffix of an old directory while the new one takes its name."""


class PartialFile:
    """A file that is written next to its final path and moved there by `publish`.

    The attribute `file` is open for reading and writing bytes.
    """

    def __init__(self, path: str | Path, *, continues: bool = False):
        """Create or open the partial file of the output `path`, and lock it.

        With `continues`, a partial file that a previous writer left behind keeps its contents.
        Otherwise it is emptied. Raises FileError if `path` is a directory or another process is
        writing it, and OSError if the file cannot be created.
        """
        self.path = Path(path)
        self.partial_path = self.path.with_name(self.path.name + SUFFIX)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.is_dir():
            raise FileError(str(self.path), "is a directory", "name a file to write")

        descriptor = _open_locked(self.partial_path, self.path, os.O_RDWR | os.O_CREAT)
        # The file is emptied only now: without the lock, another writer could be using it.
        if not continues:
            os.ftruncate(descriptor, 0)
        self.file = os.fdopen(descriptor, "r+b")

    def sync(self) -> None:
        """Sync the contents written so far to disk."""
        self.file.flush()
        os.fsync(self.file.fileno())

    def publish(self) -> None:
        """Move the file to its final path, replacing an old file. Call `sync` before and
        `sync_directory` after.
        """
        os.replace(self.partial_path, self.path)
        # Closing releases the lock, so the file must have its final name before.
        self.file.close()

    def leave(self) -> None:
        """Close the unfinished file and keep it for the next writer; does nothing after `publish`.

        Call `sync` before, which raises OSError if the disk is full. This method ignores such an
        error, so buffered data that the disk has no space for would be lost silently.
        """
        with suppress(OSError):
            self.file.close()

    def discard(self) -> None:
        """Remove the unfinished file; does nothing after `publish` or `leave`."""
        if not self.file.closed:
            # Remove the file while it is locked. Once the lock is released, the next writer could
            # be using it.
            self.partial_path.unlink(missing_ok=True)
            # Closing writes what is still buffered, which fails if the disk is full.
            with suppress(OSError):
                self.file.close()


@contextmanager
def atomic_output(
    path: str | Path, mode: str = "wb", *, overwrite: bool = False
) -> Iterator[IO[Any]]:
    """Yield a file to write (`mode` "wb", or "w" for UTF-8 text) that appears as `path` only if the
    block succeeds.

    The file is synced to disk before it is renamed. With `overwrite`, an old file stays until the
    new one is complete. Raises FileError before anything is written if another process is writing
    `path`, or if `path` exists and `overwrite` is false.
    """
    if not overwrite:
        refuse_existing(path)

    partial = PartialFile(path)
    try:
        with _output_named_in_errors(path):
            if mode == "wb":
                yield partial.file
            else:
                # Open a copy of the descriptor: closing the text file must not release the lock.
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
    check_replaceable: Callable[[Path], None] | None = None,
    fix: str = "choose another output, or move it away",
) -> Iterator[Path]:
    """Yield an empty directory to write into, which is renamed to `path` only if the block
    succeeds.

    While the block runs, the directory is called `path` + `.partial`. A directory of this name that
    a killed process left behind is emptied first. The block must sync the files that it writes.

    Args:
        path: the directory to write.
        check_replaceable: a function that raises FileError if the directory that it is called with
            must be kept. If given, an existing `path` is replaced if this function allows it. By
            default, an existing `path` is never replaced.
        fix: what the user can do if `path` exists and `check_replaceable` is None.

    Raises:
        FileError: if `path` exists and may not be replaced, or another process is writing it. This
            is checked before anything is written, and `path` again before the renaming.

    A directory cannot be renamed onto another one that is not empty, so the old directory is first
    renamed to `path` + `.replaced`. A process that is killed between the two renames leaves it
    there.
    """
    path = Path(os.path.abspath(path))
    _check_may_write(path, check_replaceable, fix)

    partial = path.with_name(path.name + SUFFIX)
    partial.mkdir(parents=True, exist_ok=True)
    descriptor = _open_locked(partial, path, os.O_DIRECTORY)
    try:
        for leftover in partial.iterdir():
            remove(leftover)

        with _output_named_in_errors(path):
            yield partial
        sync_directory(partial)

        # `path` may have appeared or changed in the meantime.
        _check_may_write(path, check_replaceable, fix)
        old = Path(f"{path}{REPLACED}")
        # An interrupt between the two renames would leave no directory called `path`.
        with hold_signals():
            is_replaced = path.exists()
            if is_replaced:
                os.rename(path, old)
            try:
                os.rename(partial, path)
            except OSError:
                if is_replaced:
                    os.rename(old, path)
                raise
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        os.close(descriptor)

    sync_directory(path.parent)
    # If `path` did not exist, this removes an old directory that a killed process has left.
    if check_replaceable is not None:
        shutil.rmtree(old, ignore_errors=True)


def _check_may_write(
    path: Path, check_replaceable: Callable[[Path], None] | None, fix: str
) -> None:
    """Raise FileError if `path` exists and may not be replaced; see `atomic_directory`."""
    if check_replaceable is None:
        refuse_existing(path, fix=fix)
    elif path.is_dir() and not path.is_symlink():
        # `atomic_directory` renames the old directory to `path` + `.replaced`. If that exists, an
        # earlier process was killed before it could remove it. It may be the only complete copy of
        # its contents, so it is not overwritten.
        refuse_existing(f"{path}{REPLACED}", fix="an interrupted run has left it; remove it")
        check_replaceable(path)
    else:
        refuse_existing(path, fix="choose another output: only a directory can be replaced")


def _open_locked(partial: Path, path: Path, flags: int) -> int:
    """Open and lock the file or directory `partial`, and return its descriptor.

    `flags` are those of `os.open`. The lock ends when the descriptor is closed or the process ends.
    Raises FileError if another process has locked `partial`, and is thus writing `path`.
    """
    while True:
        # No links are followed: one could name another file, which would then be emptied.
        descriptor = os.open(partial, flags | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            fix = "wait for it or choose another output"
            raise FileError(str(path), "is being written by another process", fix) from None
        except OSError:
            # Some network file systems have no locks. There, the user must not start two writers of
            # one output.
            pass

        # The previous holder of the lock may have renamed or removed the file between the opening
        # and the locking. In this case, open the file that now has this name.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(partial)):
                return descriptor
        os.close(descriptor)


@contextmanager
def _output_named_in_errors(path: str | Path) -> Iterator[None]:
    """Within the context, add the output's path to an OSError without a file name, such as that for
    a full disk.
    """
    try:
        yield
    except OSError as error:
        # An OSError without `strerror` has a library's own text, to which no name is added.
        if error.strerror and error.filename is None:
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
    """Within the context, which must be short, delay SIGINT, SIGTERM and SIGHUP until its end.
    Outside of the main thread, do nothing.
    """
    # Python runs signal handlers in the main thread, and only that thread can replace them.
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    received: list[int] = []
    previous_handlers = {
        number: signal.signal(number, lambda held, frame: received.append(held))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            # `handler` is None if C code set it, and Python cannot set such a handler again.
            signal.signal(number, handler or signal.SIG_DFL)
        for received_number in received:
            signal.raise_signal(received_number)


_CANNOT_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF}
"""Errors of file systems, such as CIFS and some of FUSE, that cannot sync directories. git and
PostgreSQL ignore them, too."""


def sync_directory(path: str | Path) -> None:
    """Sync the entries of a directory, or the contents of a file, to disk.

    A file that was created or renamed survives a power failure only after its directory is synced.
    A directory is skipped if its file system cannot sync directories.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC or not os.path.isdir(path):
            raise
    finally:
        os.close(descriptor)


def file_system_time(directory: str | Path) -> float:
    """Return the current Unix time by the clock that dates new files in a directory.

    On a network file system, this is the server's clock. The age of a file then depends neither on
    the clock of the node that wrote it nor on that of this node. Returns this node's time if no
    file can be created.
    """
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()


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
    """Replace `path` atomically by a file that contains `chunks`. Of several writers, the last one
    wins.

    The file is first written in the directory `staging` (default: next to `path`), which must be on
    the same file system, and then renamed. With `durable`, it is synced to disk. If OSError is
    raised before the renaming, the old file is unchanged.
    """
    path = Path(path)
    # The temporary name must not contain the final one: TensorBoard reads any file with "tfevents"
    # in its name.
    partial = (staging or path.parent) / f".{secrets.token_hex(8)}{SUFFIX}"
    try:
        with _output_named_in_errors(path), open(partial, "xb") as file:
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
        while block := file.read(1 << 22):  # 4 MiB
            hasher.update(block)
            size += len(block)
            progress(size)
    return {"bytes": size, "sha256": hasher.hexdigest()}


INTERVALS = 15
"""Number of intervals between the blocks of a large file that `fingerprint` reads."""
BLOCK_BYTES = 64 << 10
"""Size of a block that `fingerprint` reads, 64 KiB."""


def fingerprint(path: str | Path) -> str:
    """Return the size and a short sha256 of a file, as in "12 bytes, sha256 0123456789ab".

    Datasets may have terabytes, so a file of more than 15 * 256 KiB is not read as a whole. Of such
    a file, 16 evenly spaced blocks of 64 KiB are read, from its beginning to its end.
    """
    size = os.path.getsize(path)
    hasher = hashlib.sha256()
    with open(path, "rb") as file:
        if size <= INTERVALS << 18:  # 256 KiB per interval
            hasher.update(file.read())
        else:
            # The blocks are at the ends of the intervals: the first block begins with the file, and
            # the last one ends with it.
            for block in range(INTERVALS + 1):
                file.seek((size - BLOCK_BYTES) * block // INTERVALS)
                hasher.update(file.read(BLOCK_BYTES))
    return f"{size} bytes, sha256 {hasher.hexdigest()[:12]}"
