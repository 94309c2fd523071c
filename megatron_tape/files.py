"""Output files that exist under their final name only when they are complete.

While the output `data.bin` is being written it is called `data.bin.partial`. Whoever writes holds a lock on that file,
so two writers cannot meet, and a file that a killed process left behind is taken over by the next run. Small files
that programs leave for each other have no lock: of several writers the last one wins (`write_whole`).
"""

import errno
import fcntl
import os
import secrets
import shutil
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

SUFFIX = ".partial"


class PartialFile:
    """A file that is written beside its final place and moved there by `publish`.

    `file` is open for reading and writing bytes. Raises ValueError when another process is writing the same output,
    OSError when the place cannot be written.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.partial_path = self.path.with_name(self.path.name + SUFFIX)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.is_dir():
            raise ValueError(f"{self.path} is a directory; name a file to write")
        self.file = self._open()

    def _open(self) -> IO[bytes]:
        while True:
            file = os.fdopen(os.open(self.partial_path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                # Some network file systems know no locks: there, two writers of one output are the user's to avoid.
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    file.close()
                    message = f"another process is writing {self.path}; wait for it or choose another output"
                    raise ValueError(message) from None
            # The previous holder may have renamed or removed the file between our open and our lock.
            if self._is_ours(file):
                file.truncate(0)
                return file
            file.close()

    def _is_ours(self, file: IO[bytes]) -> bool:
        try:
            return os.path.samestat(os.fstat(file.fileno()), os.stat(self.partial_path))
        except FileNotFoundError:
            return False

    def sync(self) -> None:
        """Bring what was written to disk."""
        self.file.flush()
        os.fsync(self.file.fileno())

    def publish(self) -> None:
        """Give the file its final name, replacing what has it. Call `sync` before and `sync_directory` after."""
        os.replace(self.partial_path, self.path)
        self.file.close()

    def discard(self) -> None:
        """Remove the unfinished file; does nothing after `publish`."""
        if not self.file.closed:
            self.partial_path.unlink(missing_ok=True)
            self.file.close()


@contextmanager
def atomic_output(path: str | Path, mode: str = "wb", *, overwrite: bool = False) -> Iterator[IO[Any]]:
    """Yield a file to write (`mode` "wb", or "w" for UTF-8 text) that appears as `path` only if the block succeeds.

    When this returns, the file survives a power cut. Raises FileExistsError before anything is written when `path`
    exists and `overwrite` is false; with `overwrite` the old file stays until the new one is complete.
    """
    if mode not in ("w", "wb"):
        raise ValueError(f"mode {mode!r} is not supported; use 'w' or 'wb'")
    if not overwrite:
        refuse_existing(path)
    partial = PartialFile(path)
    try:
        with _named(path):
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
def atomic_directory(path: str | Path) -> Iterator[Path]:
    """Yield an empty directory to write into that appears as `path` only if the block succeeds.

    It is called `path` + `.partial` meanwhile, and one that a killed process left behind is taken over. Files written
    into it must have been brought to disk by then. Raises FileExistsError, before anything is written, when `path`
    exists, and ValueError when another process is writing it.
    """
    path = Path(os.path.abspath(path))
    fix = "choose another output, or move it away"
    refuse_existing(path, fix=fix)
    partial = path.with_name(path.name + SUFFIX)
    partial.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
    ours = False
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = os.path.samestat(os.fstat(descriptor), os.stat(partial))
        except FileNotFoundError:  # the previous holder renamed or removed it between our open and our lock
            pass
        except OSError as error:
            ours = error.errno not in (errno.EWOULDBLOCK, errno.EACCES)  # some network file systems know no locks
        if not ours:
            raise ValueError(f"another process is writing {path}; wait for it or choose another output")
        for leftover in partial.iterdir():
            remove(leftover)
        with _named(path):
            yield partial
        refuse_existing(path, fix=fix)
        os.fsync(descriptor)
        os.rename(partial, path)
        ours = False
        sync_directory(path.parent)
    finally:
        if ours:
            shutil.rmtree(partial, ignore_errors=True)
        os.close(descriptor)


@contextmanager
def _named(path: str | Path) -> Iterator[None]:
    """Let an OSError that names no file, such as that of a full disk, name the output."""
    try:
        yield
    except OSError as error:
        if error.strerror and error.filename is None:
            error.filename = str(path)
        raise


def refuse_existing(*paths: str | Path, fix: str = "pass --overwrite to replace it or choose another output") -> None:
    """Raise FileExistsError, with `fix` as advice, when one of the paths exists."""
    for path in paths:
        if os.path.lexists(path):
            raise FileExistsError(f"{path} exists; {fix}")


@contextmanager
def hold_signals() -> Iterator[None]:
    """Let SIGINT, SIGTERM and SIGHUP take effect only after the block, which must be short."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.signal(number, lambda n, frame: received.append(n)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for number in received:
            signal.raise_signal(number)


def sync_directory(path: str | Path) -> None:
    """Bring renames and removals in a directory, or a file's contents, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: str | Path) -> None:
    """Remove a file, a directory with all it holds, or a link, whose target stays; do nothing where there is none."""
    path = Path(path)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_whole(
    path: str | Path, chunks: Iterable[bytes], *, staging: Path | None = None, durable: bool = True
) -> None:
    """Put a file of `chunks` in the place of `path`, whole or not at all; of several writers the last one wins.

    It is made in `staging` (default: beside `path`), which must be on the same file system. A `durable` file survives
    a power cut. Raises OSError; the old file is then left as it is.
    """
    path = Path(path)
    # Its name says nothing of the final one: TensorBoard reads whatever has "tfevents" in its name.
    partial = (staging or path.parent) / f".{secrets.token_hex(8)}{SUFFIX}"
    try:
        with open(partial, "xb") as file:
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
