"""Write, read and check Megatron-core's indexed datasets with NumPy alone.

`P.bin` holds the token ids of all documents back to back. `P.idx` holds, little-endian:

    9 bytes  b"MMIDIDX\\0\\0"     uint64 version = 1     uint8 dtype code
    uint64   number of sequences n                     uint64 number of document indices m
    int32[n] sequence lengths in tokens
    int64[n] sequence pointers: byte offsets into P.bin
    int64[m] document indices: document d is the sequences from index [d] up to index [d + 1]
    int8[n]  sequence modes, in multimodal datasets only

Like Megatron-LM's own preprocessing, the writer makes every document one sequence, so document
indices are 0..n. A dataset that is appended as a whole keeps its document indices. `P.origin`, if
it exists, records how the dataset was made (see `data.origins`). Megatron-core does not read it.
"""

import contextlib
import json
import os
import re
import resource
import shlex
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import NonNegativeInt
from typing_extensions import TypedDict

from megatron_tape.data.raw_chunks import is_text_file
from megatron_tape.errors import ConfigError, FileError
from megatron_tape.io.files import (
    PartialFile,
    fingerprint,
    hold_signals,
    refuse_existing,
    sync_directory,
)
from megatron_tape.io.records import read_record, write_record

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
"""Megatron-core's dtypes by code. Those of floating-point numbers cannot hold token ids."""
_CODES = {np.dtype(name): code for code, name in _DTYPES.items()}
BLOCK = 1 << 18
"""Number of index entries that are processed at a time."""
_COPIED_BYTES = 1 << 24
_SAVE_SECONDS = 60.0
"""Seconds between two writes of P.progress."""


class Mark(TypedDict):
    """The state of preprocessing after a number of whole input files."""

    inputs: list[Any]
    """The versions of these files, such as size and time."""
    text_bytes: NonNegativeInt
    problems: dict[str, int]
    """Number of bad documents by reason."""
    places: dict[str, list[str]]
    """The places of the first bad documents by reason."""


class Progress(TypedDict):
    """The contents of P.progress: what the documents at the beginning of the unfinished files are
    made from.
    """

    source: dict[str, Any]
    dtype: str
    documents: NonNegativeInt
    tokens: NonNegativeInt
    mark: Mark


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard limit, since each mapped file of a dataset
    takes a descriptor.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def token_dtype(vocab_size: int) -> np.dtype:
    """Return Megatron-core's dtype of stored token ids: uint16 for a vocabulary below 65,500,
    otherwise int32.
    """
    if vocab_size < 65500:
        return np.dtype("<u2")
    return np.dtype("<i4")


def dataset_paths(prefix: str | Path) -> tuple[Path, Path]:
    """Return the paths of a dataset's token file, P.bin, and index file, P.idx."""
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx")


def first_invalid_id(ids: np.ndarray, vocab_size: int | None) -> int | None:
    """Return the index of the first id that is negative or not below `vocab_size`, or None if all
    ids are valid.

    If `vocab_size` is None, only negative ids are invalid. Other tools use them for padding and as
    separators.
    """
    invalid = ids < 0
    if vocab_size is not None:
        invalid |= ids >= vocab_size
    if invalid.any():
        return int(invalid.argmax())
    return None


def check_output_prefix(option: str, prefix: str) -> None:
    """Raise ConfigError for `option` if `prefix` ends in a directory, as in `data/`: the index
    would be `data/.idx`.
    """
    if Path(f"{prefix}.idx").name in (".idx", "..idx", "...idx"):
        fix = os.path.join(prefix, "NAME")
        raise ConfigError(
            option, f"is {prefix!r}, a directory", f"add a name for the dataset, such as {fix}"
        )


PAIR = "a dataset is a pair of files, NAME.bin and NAME.idx, and is given as NAME"


def mistaken_for_dataset(prefix: str, tokenizer: str = "TOKENIZER") -> tuple[str, str] | None:
    """Return what `prefix` is if it is something else than a dataset, and how to make or find one;
    otherwise None.

    The first is the continuation of a sentence about `prefix`. `tokenizer` is part of the command
    in the second.
    """
    path = Path(prefix)
    if Path(f"{prefix}.idx").exists():
        return None
    stem = prefix.removesuffix(".bin").removesuffix(".idx")
    if stem != prefix and Path(f"{stem}.idx").exists():
        return f"is a file of the dataset {stem}", f"give {stem}, without the suffix"
    if path.is_dir():
        datasets = sorted(str(index.with_suffix("")) for index in path.glob("*.idx"))
        if datasets:
            return (
                "is a directory",
                f"give a dataset in it, such as {datasets[0]}, or all of them as {path / '*'}",
            )
        texts = sorted({file.suffix for file in path.iterdir() if is_text_file(str(file))})
        pattern = path / f"*{texts[0] if texts else '.jsonl'}"
        return "is a directory without a dataset", _how_to_make(
            str(pattern), str(path / "NAME"), tokenizer
        )
    if is_text_file(prefix):
        if any(character in path.name for character in "*?["):
            name = "NAME"
        else:
            name = path.name.split(".")[0]
        return "names text, not a dataset", _how_to_make(
            prefix, str(path.with_name(name or "NAME")), tokenizer
        )
    if path.is_file():
        fix = (
            "convert it to .jsonl, .txt or .parquet, and make a dataset with"
            " tools/preprocess_data.py"
        )
        return "is a file of another format", fix
    return None


def how_to_make_from_hub(prefix: str, tokenizer: str) -> str | None:
    """Return how to make a dataset if `prefix` can be the name of a dataset of the Hugging Face
    Hub, otherwise None.
    """
    name = prefix.removeprefix("hub:")
    if Path(prefix).parent.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return None
    return _how_to_make(f"hub:{name}", f"data/{name.rpartition('/')[2]}", tokenizer)


def _how_to_make(source: str, prefix: str, tokenizer: str) -> str:
    """Return how to make the dataset `prefix` from `source`, an input of
    tools/preprocess_data.py.
    """
    options = ["--input", source, "--tokenizer", tokenizer, "--output-prefix", prefix]
    return f"run `python tools/preprocess_data.py {shlex.join(options)}` and give {prefix}"


def origin_path(prefix: str | Path) -> Path:
    """Return the path of P.origin, the record of how a dataset was made."""
    return Path(f"{prefix}.origin")


def progress_path(prefix: str | Path) -> Path:
    """Return the path of P.progress, the record of an interrupted run."""
    return Path(f"{prefix}.progress")


def read_progress(prefix: str | Path) -> Progress | None:
    """Return the record of an interrupted run, or None if there is none that can be used."""
    try:
        return read_record(progress_path(prefix), Progress)
    except (OSError, FileError):
        return None


class IndexedDatasetWriter:
    """Write a dataset that appears under its name only after `finish` has synced it to disk.

    Lengths are written directly to the unfinished index file, so memory does not grow with the
    number of documents. Use it as a context manager: leaving it without `finish` removes the
    unfinished files.

    Raises FileError if the dataset exists and `overwrite` is false, or if another process is
    writing it; OSError if its directory cannot be written. With `overwrite`, an old dataset stays
    until `finish`.

    `documents` and `tokens` are the numbers of documents and tokens that have been appended.

    With `source`, which describes as JSON what the documents are made from, an interrupted writer
    can be continued. It keeps the documents up to the last `mark` in the unfinished files, and
    P.progress says how many these are. The next writer with the same `source` begins with them if
    `inputs`, the versions of all input files, begins with those of the mark; `restored` is then the
    state given to `mark`, otherwise None.
    """

    def __init__(
        self,
        prefix: str | Path,
        dtype: np.dtype,
        *,
        overwrite: bool = False,
        source: Mapping[str, Any] | None = None,
        inputs: Sequence[Any] = (),
    ):
        self.dtype = np.dtype(dtype)
        self.documents = 0
        self.tokens = 0
        self.restored: Mark | None = None
        self._prefix = prefix
        self._source = source
        self._progress: Progress | None = None
        self._is_saved = False  # whether P.progress describes the unfinished files
        self._saved = time.monotonic()
        self._sequences = 0
        self._datasets: list[IndexedDatasetReader] = []
        self._origin_path = origin_path(prefix)
        self._origin = None
        bin_path, idx_path = dataset_paths(prefix)
        if not overwrite:
            refuse_existing(idx_path, bin_path)
        continues = source is not None
        self._bin = PartialFile(bin_path, continues=continues)
        try:
            self._idx = PartialFile(idx_path, continues=continues)
        except BaseException:
            self._bin.discard()
            raise
        if continues:
            self._restore(inputs)
        if self.restored is None:
            self._remove_progress()
        self._truncate()

    def __enter__(self) -> "IndexedDatasetWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        if not self._leave_marked():
            if not self._bin.file.closed:
                self._remove_progress()
            self._idx.discard()
            self._bin.discard()
        if self._origin is not None:
            self._origin.discard()

    def _leave_marked(self) -> bool:
        """Save the documents up to the last `mark` for the next writer, and return whether there
        are any.
        """
        if self._progress is None or self._bin.file.closed:
            return False
        try:
            self._save_progress()
            self._truncate()
        except OSError:
            # If the disk is full, keep the documents up to the last mark that is saved.
            if not self._is_saved:
                return False
        # The next writer opens the token file first.
        self._idx.leave()
        self._bin.leave()
        return True

    def mark(self, state: Mark) -> None:
        """Keep the documents so far, and `state`, if the writer is interrupted from now on.

        A killed process cannot save anything, so the state is also saved now if the last time is a
        minute ago.
        """
        assert self._source is not None and not self._datasets
        self._progress = {
            "source": dict(self._source),
            "dtype": self.dtype.str,
            "documents": self.documents,
            "tokens": self.tokens,
            "mark": state,
        }
        if time.monotonic() - self._saved > _SAVE_SECONDS:
            self._save_progress()

    def _save_progress(self) -> None:
        self._bin.sync()
        self._idx.sync()
        write_record(progress_path(self._prefix), self._progress)
        self._is_saved = True
        self._saved = time.monotonic()

    def _remove_progress(self) -> None:
        """Remove P.progress before the unfinished files get other documents than those that it
        describes.
        """
        path = progress_path(self._prefix)
        if os.path.lexists(path):
            path.unlink(missing_ok=True)
            sync_directory(path.parent)

    def _restore(self, inputs: Sequence[Any]) -> None:
        """Read P.progress, if it fits the unfinished files, `source` and `inputs`."""
        progress = read_progress(self._prefix)
        if progress is None:
            return
        sizes = (progress["tokens"] * self.dtype.itemsize, _HEADER.size + 4 * progress["documents"])
        written = tuple(os.fstat(file.file.fileno()).st_size for file in (self._bin, self._idx))
        is_whole = all(size <= found for size, found in zip(sizes, written))
        recorded = [progress["source"], progress["dtype"], progress["mark"]["inputs"]]
        # JSON has no tuples, so compare what would be written.
        expected = json.loads(
            json.dumps([self._source, self.dtype.str, inputs[: len(recorded[2])]])
        )
        if is_whole and recorded == expected:
            self._progress = progress
            self._is_saved = True
            self.restored = progress["mark"]

    def _truncate(self) -> None:
        """Cut the unfinished files to the documents of the last `mark`, and go to their ends."""
        progress = self._progress
        self.documents = self._sequences = progress["documents"] if progress else 0
        self.tokens = progress["tokens"] if progress else 0
        # The header is zeros until everything else is written.
        self._idx.file.truncate(_HEADER.size + 4 * self.documents)
        self._idx.file.seek(0)
        self._idx.file.write(bytes(_HEADER.size))
        self._idx.file.seek(0, os.SEEK_END)
        self._bin.file.truncate(self.tokens * self.dtype.itemsize)
        self._bin.file.seek(0, os.SEEK_END)

    def add(self, tokens: bytes, lengths: np.ndarray) -> None:
        """Append documents: their ids back to back as bytes of `dtype`, and their lengths (int32)
        in tokens.
        """
        lengths = np.ascontiguousarray(lengths, dtype="<i4")
        total = int(lengths.sum(dtype=np.int64))
        assert not self._datasets, "a writer takes whole datasets or documents, not both"
        assert len(tokens) == total * self.dtype.itemsize, "the lengths do not add up to the tokens"
        self._bin.file.write(tokens)
        self._idx.file.write(lengths.data)
        self._sequences += len(lengths)
        self.documents += len(lengths)
        self.tokens += total

    def add_dataset(
        self, dataset: "IndexedDatasetReader", on_progress: Callable[[], None] = lambda: None
    ) -> None:
        """Append all documents of a dataset of the same `dtype`. Call `on_progress` after each
        block of 16 MiB.

        A writer takes whole datasets or documents, not both. Raises FileError if the dataset's
        token file is too short.
        """
        assert dataset.dtype == self.dtype, "the datasets must have the same dtype"
        assert self._datasets or not self.documents, (
            "a writer takes whole datasets or documents, not both"
        )
        remaining = dataset.bin_size
        with open(dataset.bin_path, "rb") as file:
            while remaining:
                block = file.read(min(_COPIED_BYTES, remaining))
                if not block:
                    raise FileError(
                        str(dataset.bin_path),
                        "became shorter while it was read",
                        "preprocess it again",
                    )
                self._bin.file.write(block)
                remaining -= len(block)
                self.tokens += len(block) // self.dtype.itemsize
                on_progress()
        for start in range(0, len(dataset.lengths), BLOCK):
            self._idx.file.write(dataset.lengths[start : start + BLOCK].data)
        self._datasets.append(dataset)
        self._sequences += len(dataset.lengths)
        self.documents += len(dataset)

    def finish(self, origin: Mapping[str, Any] | None = None) -> None:
        """Complete the index, sync all files to disk and rename them to their final names.

        `origin` is written to P.origin as JSON, together with fingerprints of the other two files.
        The index is renamed last: if it exists, the dataset is complete.
        """
        self._write_pointers()
        for block in self._document_indices():
            self._idx.file.write(block.astype("<i8").data)
        self._idx.file.seek(0)
        self._idx.file.write(
            _HEADER.pack(_MAGIC, 1, _CODES[self.dtype], self._sequences, self.documents + 1)
        )
        files = [self._bin, self._idx]
        if origin is not None:
            for file in files:
                file.sync()
            prints = {file.path.suffix: fingerprint(file.partial_path) for file in files}
            self._origin = file = PartialFile(self._origin_path)
            file.file.write(json.dumps({**origin, "files": prints}, indent=1).encode())
            files.insert(0, file)
        for file in files:
            file.sync()
        # Remove the index while the files change, so that a partial dataset never looks complete.
        with hold_signals():
            self._idx.path.unlink(missing_ok=True)
            self._origin_path.unlink(missing_ok=True)
            for file in files:
                file.publish()
            progress_path(self._prefix).unlink(missing_ok=True)
        sync_directory(self._bin.path.parent)

    def _document_indices(self) -> Iterator[np.ndarray]:
        """Yield blocks of the document indices: 0..n, or those of the appended datasets plus their
        offsets.
        """
        if not self._datasets:
            for start in range(0, self.documents + 1, BLOCK):
                yield np.arange(start, min(start + BLOCK, self.documents + 1))
            return
        yield np.zeros(1)
        sequences = 0
        for dataset in self._datasets:
            for start in range(1, len(dataset.document_indices), BLOCK):
                yield dataset.document_indices[start : start + BLOCK] + sequences
            sequences += len(dataset.lengths)

    def _write_pointers(self) -> None:
        offset = 0
        for start in range(0, self._sequences, BLOCK):
            count = min(BLOCK, self._sequences - start)
            self._idx.file.seek(_HEADER.size + 4 * start)
            sizes = (
                np.frombuffer(self._idx.file.read(4 * count), dtype="<i4").astype("<i8")
                * self.dtype.itemsize
            )
            pointers = np.cumsum(sizes) - sizes + offset
            offset += int(sizes.sum())
            self._idx.file.seek(_HEADER.size + 4 * self._sequences + 8 * start)
            self._idx.file.write(pointers.astype("<i8").data)
        self._idx.file.seek(0, os.SEEK_END)


class IndexedDatasetReader:
    """A memory-mapped dataset. `len()` returns its number of documents.

    `lengths`, `pointers` and `document_indices` are the arrays of the index (see the module's
    docstring). `multimodal` is true if the index also has sequence modes. Raises FileError if a
    file is missing or the index cannot be read; `problems` finds all other damage.
    """

    def __init__(self, prefix: str | Path):
        self.bin_path, self.idx_path = dataset_paths(prefix)
        if mistake := mistaken_for_dataset(str(prefix)):
            problem, fix = mistake
            raise FileError(str(prefix), f"{problem}; {PAIR}", fix)
        for path in (self.idx_path, self.bin_path):
            if not path.is_file():
                raise FileError(
                    str(path), "does not exist", "give the prefix of a .bin and .idx pair"
                )
        self.bin_size, idx_size = self.bin_path.stat().st_size, self.idx_path.stat().st_size
        with open(self.idx_path, "rb") as file:
            header = file.read(_HEADER.size)
        if header[: len(_MAGIC)] != _MAGIC or len(header) < _HEADER.size:
            raise self._damaged("is not a dataset index (its header is damaged)")
        _, version, code, sequences, entries = _HEADER.unpack(header)
        if version != 1:
            raise self._damaged(f"has version {version}, but only version 1 is supported")
        if code not in _DTYPES:
            raise self._damaged(f"has the unknown dtype code {code}")
        self.dtype = np.dtype(_DTYPES[code])
        if self.dtype.kind == "f":
            raise self._damaged(f"has the dtype {self.dtype.name}, but token ids are integers")
        size = _HEADER.size + 12 * sequences + 8 * entries
        if idx_size not in (size, size + sequences):
            raise self._damaged(
                f"has {idx_size} bytes, but {sequences} sequences and {entries} document indices"
                f" take {size}: it is truncated or damaged"
            )
        self.multimodal = idx_size != size
        index = np.memmap(self.idx_path, mode="r")
        ends = np.cumsum([_HEADER.size, 4 * sequences, 8 * sequences, 8 * entries])
        self.lengths = index[ends[0] : ends[1]].view("<i4")
        self.pointers = index[ends[1] : ends[2]].view("<i8")
        self.document_indices = index[ends[2] : ends[3]].view("<i8")

    def _damaged(self, problem: str) -> FileError:
        return FileError(str(self.idx_path), problem, "preprocess the dataset again")

    def __len__(self) -> int:
        return max(len(self.document_indices) - 1, 0)

    @cached_property
    def tokens(self) -> np.ndarray:
        """All token ids, memory-mapped."""
        count = self.bin_size // self.dtype.itemsize
        if count:
            return np.memmap(self.bin_path, self.dtype, "r", shape=(count,))
        return np.empty(0, self.dtype)

    def document(self, index: int) -> np.ndarray:
        """Return the token ids of a document."""
        first = self.document_indices[index]
        stop = self.document_indices[index + 1]
        if stop > first:
            start = int(self.pointers[first]) // self.dtype.itemsize
        else:
            start = 0
        return self.tokens[start : start + int(self.lengths[first:stop].sum(dtype=np.int64))]

    def document_of(self, token: int) -> int:
        """Return the index of the document that contains token number `token` of the dataset."""
        sequence = np.searchsorted(self.pointers, token * self.dtype.itemsize, side="right") - 1
        return int(np.searchsorted(self.document_indices, sequence, side="right") - 1)

    def document_lengths(self) -> np.ndarray:
        """Return the number of tokens of every document (int64)."""
        lengths = np.empty(len(self), np.int64)
        for start in range(0, len(lengths), BLOCK):
            indices = self.document_indices[start : start + BLOCK + 1]
            ends = np.cumsum(self.lengths[indices[0] : indices[-1]], dtype=np.int64)
            lengths[start : start + BLOCK] = np.diff(
                np.concatenate([[0], ends])[indices - indices[0]]
            )
        return lengths

    def wrong_size(self) -> str | None:
        """Return a sentence if the size of the token file differs from the one that the index
        implies, otherwise None.

        Reads only the last entries of the index.
        """
        expected = 0
        if len(self.lengths):
            expected = int(self.pointers[-1]) + int(self.lengths[-1]) * self.dtype.itemsize
        if expected == self.bin_size:
            return None
        return (
            f"{self.bin_path} has {self.bin_size} bytes, but its index describes {expected} bytes"
        )

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each kind of damage. Reads only the index; `invalid_id` checks the
        token ids.

        Memory does not grow with the number of documents.
        """
        offset = 0
        misplaced = None
        for start in range(0, len(self.lengths), BLOCK):
            lengths = self.lengths[start : start + BLOCK]
            pointers = self.pointers[start : start + BLOCK]
            if lengths.min() < 0:
                yield f"sequence {start + int(np.argmax(lengths < 0))} has a negative length"
                return
            sizes = lengths.astype(np.int64) * self.dtype.itemsize
            if misplaced is None and offset <= self.bin_size:
                wrong = np.flatnonzero(pointers != np.cumsum(sizes) - sizes + offset)
                misplaced = start + int(wrong[0]) if len(wrong) else None
            offset += int(sizes.sum())
        if offset != self.bin_size:
            yield (
                f"{self.bin_path} has {self.bin_size} bytes, but its index describes {offset} bytes"
            )
        if misplaced is not None:
            pointer = self.pointers[misplaced]
            yield (
                f"the pointer of sequence {misplaced} is {pointer}, but the previous sequence does"
                " not end there"
            )
        if not self._document_indices_increase():
            yield (
                "the document indices do not increase from 0 to the number of sequences,"
                f" {len(self.lengths)}"
            )

    def _document_indices_increase(self) -> bool:
        indices = self.document_indices
        if not len(indices) or indices[0] != 0 or indices[-1] != len(self.lengths):
            return False
        blocks = (indices[start : start + BLOCK + 1] for start in range(0, len(indices), BLOCK))
        return all((block[1:] >= block[:-1]).all() for block in blocks)

    def invalid_id(self, vocab_size: int | None = None) -> str | None:
        """Return a sentence about the first token id that `first_invalid_id` finds, or None. Reads
        all tokens.
        """
        for start in range(0, len(self.tokens), 16 * BLOCK):
            block = self.tokens[start : start + 16 * BLOCK]
            found = first_invalid_id(block, vocab_size)
            if found is None:
                continue
            token = start + found
            sentence = (
                f"token {token}, in document {self.document_of(token)}, has the id {block[found]}"
            )
            if block[found] < 0:
                return f"{sentence}, but ids cannot be negative"
            return f"{sentence}, but the tokenizer has {vocab_size} ids"
        return None
