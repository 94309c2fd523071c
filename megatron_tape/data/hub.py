"""Datasets of the Hugging Face Hub as lists of files, which are downloaded first or streamed.

The `datasets` library finds the files of a dataset, its configuration and its split. The files are
then read like any other parquet and JSON lines. A file of the Hub is named
`hf://datasets/NAME@COMMIT/PATH`, so its name also says which revision of the dataset it is from. It
is read from the Hub's local cache if it is there, and over the network if not.
"""

import argparse
import contextlib
import functools
import glob
import io
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from megatron_tape import command_line
from megatron_tape.errors import ConfigError, FileError, one_line
from megatron_tape.home import expand_home

PREFIX = "hub:"
"""Begins the name of a dataset among paths of files."""
_REMOTE = re.compile("hf://datasets/([^@]+)@([^/]+)/(.+)", re.DOTALL)
"""The name of a file of the Hub: dataset, commit and path."""
_FORMATS = (".parquet", ".jsonl", ".json")
_BLOCK = 16 << 20
"""Bytes per request when a file is streamed."""


class NetworkError(ConnectionError):
    """A failure to read `subject`, a file or a dataset of the Hub, over the network."""

    def __init__(self, subject: str, reason: str):
        super().__init__(f"{subject} cannot be read from the Hub: {reason}")
        self.subject = subject


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose the files of a dataset: see `find_files`."""
    add = parser.add_argument
    add(
        "--config-name",
        type=str,
        metavar="NAME",
        help="configuration of a Hub dataset, such as sample-10BT",
    )
    add("--split", type=str, help="split of a Hub dataset (default: train)")
    add("--revision", type=str, help="branch, tag or commit of a Hub dataset (default: main)")
    add(
        "--data-files",
        nargs="+",
        metavar="GLOB",
        help="use these files of a Hub dataset or local directory",
    )
    add(
        "--streaming",
        action="store_true",
        help="read a Hub dataset over the network (default: download its files to the Hub's local"
        " cache first)",
    )


def refuse_options(arguments: argparse.Namespace) -> None:
    """Raise ConfigError if an option of `add_options` is given although no input is on the Hub."""
    for option in ("--config-name", "--split", "--revision", "--data-files", "--streaming"):
        # argparse names the attribute without the hyphens.
        if getattr(arguments, option[2:].replace("-", "_")):
            raise ConfigError(
                option, f"is only for datasets of the Hub ({PREFIX}NAME)", "remove it"
            )


def text_format(path: str) -> str:
    """Return the extension of a file, ignoring that of its compression: ".txt" for "a.txt.gz"."""
    return Path(path.removesuffix(".gz").removesuffix(".zst")).suffix


def is_remote(path: str) -> bool:
    """Return whether `path` names a file of the Hub."""
    return _REMOTE.fullmatch(path) is not None


def revisions(paths: Sequence[str]) -> dict[str, str]:
    """Return the commits of the Hub's datasets that the files belong to, by name of the dataset."""
    matches = filter(None, map(_REMOTE.fullmatch, paths))
    return {match[1]: match[2] for match in matches}


def find_files(name: str, arguments: argparse.Namespace) -> list[str]:
    """Return the files of a dataset's split, in order: paths, or names with the commit on the Hub.

    `name` is a dataset of the Hub, a local directory in the Hub's layout, or a format (json,
    parquet, text) with --data-files. Raises FileError, with the reason of the `datasets` library,
    if the dataset cannot be opened, or if it has files in another format; ConfigError if it has no
    such split.
    """
    name = expand_home(name)
    # The library would search the Hub for a mistyped path.
    if not os.path.isdir(name) and (name.startswith((".", "/")) or name.count("/") > 1):
        raise FileError(
            name,
            "is no directory",
            "check the path; a dataset of the Hub is named NAME or OWNER/NAME",
        )

    command_line.log(f"finding the files of {name}")
    config = _open(name, arguments).config
    # Without a network, the library opens the arrow files in its cache that it once made from the
    # dataset. It then knows no `data_files`.
    if config.data_files is None:
        raise FileError(
            name,
            "is known only from the cache of the datasets library, which does not say where its"
            " files are",
            "start where the Hub can be reached, or give the files themselves",
        )
    splits = {str(split): [*map(str, files)] for split, files in config.data_files.items()}
    split = arguments.split or "train"
    if split not in splits:
        raise ConfigError(
            "--split",
            f"is {split!r}, but {name} ({config.name}) has only {sorted(splits)}",
            "choose one of them",
        )
    for file in splits[split]:
        extension = text_format(file)
        # The library reads each line of a text file as a document, but here the whole file is one.
        # So text files are accepted only if the user has asked for files with --data-files.
        if extension not in _FORMATS and (extension != ".txt" or not arguments.data_files):
            raise FileError(
                file,
                "is neither parquet nor JSON lines",
                "convert it, or try the Hub's own parquet copy, such as --revision"
                " refs/convert/parquet --data-files 'default/train/*.parquet'",
            )
    return splits[split]


def _open(name: str, arguments: argparse.Namespace) -> Any:
    """Return the `datasets` builder of a dataset. Raises FileError if it cannot be opened."""
    import datasets
    import tqdm

    # Do not start tqdm's monitor. It is a thread, and the processes that tokenize are forked later.
    tqdm.tqdm.monitor_interval = 0
    try:
        return datasets.load_dataset_builder(
            name,
            arguments.config_name,
            data_files=arguments.data_files,
            revision=arguments.revision,
        )
    except MemoryError:
        raise
    # Errors of many kinds: of the library, its HTTP client, and a dataset's invalid metadata.
    except Exception as error:
        reason = one_line(error)
        fix = (
            "check the name, --config-name, --revision and --data-files; a private or gated dataset"
            " also needs HF_TOKEN"
        )
        if isinstance(error, ConnectionError):
            reason = f"there is no such directory, and {reason}"
            fix = "check the name, then the network"
        raise FileError(name, f"cannot be opened: {reason}", fix) from error


def download(paths: Sequence[str]) -> None:
    """Download the files of the Hub among `paths` to its local cache, unless they are there.

    Raises NetworkError if that fails.
    """
    # A match for each file of the Hub: its groups are the dataset, the commit and the path.
    matches = list(filter(None, map(_REMOTE.fullmatch, paths)))
    # Machines that only read local files may lack the package.
    if not matches:
        return
    import huggingface_hub

    for name, commit in revisions(paths).items():
        files = [match[3] for match in matches if match[1] == name]
        command_line.log(
            f"downloading {len(files):,} files of {name} (--streaming does not store them)"
        )
        with _network_errors(name):
            huggingface_hub.snapshot_download(
                name,
                repo_type="dataset",
                revision=commit,
                # The library treats file names as patterns.
                allow_patterns=[glob.escape(file) for file in files],
            )


def local_path(path: str) -> str | None:
    """Return `path` itself, or the copy of a file of the Hub in the local cache, or None."""
    match = _REMOTE.fullmatch(path)
    if match is None:
        return path
    import huggingface_hub

    name, commit, file = match.groups()
    copy = huggingface_hub.try_to_load_from_cache(name, file, revision=commit, repo_type="dataset")
    # If the file is not in the cache, `copy` is None, or an object for a file known to be missing.
    if isinstance(copy, str):
        return copy
    return None


def open_file(path: str) -> BinaryIO:
    """Open a file of the Hub or a local file for reading.

    Reading raises NetworkError if the network fails.
    """
    local = local_path(path)
    if local is None:
        return _RemoteFile(path)  # type: ignore[return-value]
    return open(local, "rb")


def file_size(path: str) -> int:
    """Return the size of a file of the Hub or a local file in bytes."""
    local = local_path(path)
    if local is None:
        return _remote_size(path)
    return os.path.getsize(local)


@functools.lru_cache(maxsize=1 << 16)
def _remote_size(path: str) -> int:
    """Return the size in bytes of a file of the Hub that is not in the local cache."""
    # The file system keeps the listing of a directory, so there is one request per directory.
    with _network_errors(path):
        return _file_system().info(path)["size"]


def _file_system() -> Any:
    """Return the fsspec file system of the Hub."""
    import huggingface_hub

    return huggingface_hub.HfFileSystem()


@contextlib.contextmanager
def _network_errors(subject: str) -> Iterator[None]:
    """Convert errors of the Hub's library in the context into NetworkError about `subject`."""
    try:
        yield
    except MemoryError:
        raise
    # The library raises errors of its own, of its HTTP client, and of Python.
    except Exception as error:
        raise NetworkError(subject, one_line(error)) from error


class _RemoteFile(io.RawIOBase):
    """A file of the Hub that is read over the network in blocks, with retries."""

    def __init__(self, path: str):
        self._path = path
        with _network_errors(path):
            self._file = _file_system().open(path, block_size=_BLOCK)

    def readinto(self, buffer: Any) -> int:
        """Read bytes into `buffer` and return their number; 0 at the end of the file."""
        with _network_errors(self._path):
            data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()
