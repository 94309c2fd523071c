"""Write, read and check Megatron-core's indexed datasets with NumPy alone.

`P.bin` holds the token ids of all documents back to back. `P.idx` holds, little-endian:

    9 bytes   b"MMIDIDX\\0\\0"
    uint64    version = 1
    uint8     dtype code
    uint64    number of sequences n
    uint64    number of document indices m
    int32[n]  sequence lengths in tokens
    int64[n]  sequence pointers: byte offsets into P.bin
    int64[m]  document indices: document d is the sequences from [d] up to [d + 1]

Multimodal datasets, whose indices have further entries, are not supported.

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
from collections.abc import Iterator, Mapping, Sequence
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
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Megatron-core's dtypes of integers by code."""
_CODES = {np.dtype(name): code for code, name in _DTYPES.items()}
BLOCK = 1 << 18
"""Number of index entries that are processed at a time."""
_COPIED_TOKENS = 1 << 23
"""Number of tokens that `add_dataset` copies at a time."""
_SAVE_SECONDS = 60.0
"""Seconds between two writes of P.progress."""


class Progress(TypedDict):
    """The contents of P.progress: what the documents in the unfinished files are made from."""

    source: dict[str, Any] | None
    """The tokenizer and the options, as given to IndexedDatasetWriter."""
    inputs: list[Any]
    """The versions of the complete input files, such as size and time."""
    documents: NonNegativeInt
    tokens: NonNegativeInt


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard limit: each mapped file takes a descriptor."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Some systems refuse the hard limit, and few datasets do not need it.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def token_dtype(vocab_size: int) -> np.dtype:
    """Return Megatron-core's dtype of token ids: uint16 below 65,500 ids, otherwise int32."""
    if vocab_size < 65500:
        return np.dtype("<u2")
    return np.dtype("<i4")


def dataset_paths(prefix: str | Path) -> tuple[Path, Path]:
    """Return the paths of a dataset's token file, P.bin, and index file, P.idx."""
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx")


def first_invalid_id(ids: np.ndarray, vocab_size: int | None) -> int | None:
    """Return the index of the first id that is negative or not below `vocab_size`, or None.

    If `vocab_size` is None, only negative ids are invalid. Other tools use negative ids for padding
    and as separators.
    """
    invalid = ids < 0
    if vocab_size is not None:
        invalid |= ids >= vocab_size
    if invalid.any():
        return int(invalid.argmax())
    return None


def check_output_prefix(prefix: str) -> None:
    """Raise ConfigError if the option --output-prefix is a directory, as in `data/`.

    The index would be `data/.idx`.
    """
    # These are the names for `data/`, `data/.` and `data/..`.
    if Path(f"{prefix}.idx").name in (".idx", "..idx", "...idx"):
        raise ConfigError(
            "--output-prefix",
            f"is {prefix!r}, a directory",
            f"add a name for the dataset, such as {os.path.join(prefix, 'NAME')}",
        )


def check_files_exist(prefix: str, tokenizer: str = "TOKENIZER") -> None:
    """Raise FileError if P.idx or P.bin does not exist, with advice for common mistakes.

    `tokenizer` is part of the command in the advice for text that is not a dataset yet.
    """
    bin_path, idx_path = dataset_paths(prefix)
    if not idx_path.exists():
        _refuse_mistaken(prefix, tokenizer)
    for path in (idx_path, bin_path):
        if not path.is_file():
            fix = "correct the prefix, or finish preprocessing the corpus"
            raise FileError(str(path), "does not exist", with_current_directory(prefix, fix))


def with_current_directory(path: str, fix: str) -> str:
    """Return the advice `fix` for a missing path, with the current directory if it is relative."""
    # Recipes use this dataset, which only `make demo` creates.
    if path.startswith("runs/demo/data/stdlib"):
        fix = "make the demo's data with `make demo`, and start this command in the same directory"
    if os.path.isabs(path):
        return fix
    return f"{fix} (the path is relative to the current directory, {os.getcwd()})"


def _refuse_mistaken(prefix: str, tokenizer: str) -> None:
    """Raise FileError if `prefix` is a file of a dataset, a directory, text, or a Hub dataset.

    The advice for text or a Hub dataset is the command that makes a dataset of it.
    """
    path = Path(prefix)
    stem = prefix.removesuffix(".bin").removesuffix(".idx")
    if Path(f"{stem}.idx").exists():
        fix = f"give {stem}, without the suffix"
        raise FileError(prefix, f"is a file of the dataset {stem}", fix)

    text_input = prefix
    if path.is_dir():
        text_input = str(path / "*")
        datasets = sorted(path.glob("*.idx"))
        if datasets:
            fix = f"give a dataset in it, such as {datasets[0].with_suffix('')}, or {text_input}"
            raise FileError(prefix, "is a directory", fix)
    # OWNER/NAME on the Hub, unless there is a local directory OWNER.
    elif re.fullmatch(r"(hub:)?[\w.-]+/[\w.-]+", prefix) and not path.parent.exists():
        text_input = f"hub:{prefix.removeprefix('hub:')}"
    elif not path.is_file() and not is_text_file(prefix):
        return
    options = ["--input", text_input, "--tokenizer", tokenizer, "--output-prefix", "NAME"]
    command = f"python tools/preprocess_data.py {shlex.join(options)}"
    raise FileError(
        prefix,
        "is not a dataset, which is a pair of files, NAME.bin and NAME.idx",
        with_current_directory(prefix, f"correct it, or run `{command}` and give NAME"),
    )


def origin_path(prefix: str | Path) -> Path:
    """Return the path of P.origin, the record of how a dataset was made."""
    return Path(f"{prefix}.origin")


class IndexedDatasetWriter:
    """Write a dataset that appears under its name only after `finish` has synced it to disk.

    Lengths are written directly to the unfinished index file, so memory does not grow with the
    number of documents. Use it as a context manager: leaving it without `finish` removes the
    unfinished files, unless there was a `mark_completed`.

    Raises FileError if the dataset exists and `overwrite` is false, or if another process is
    writing it; OSError if its directory cannot be written. With `overwrite`, an old dataset stays
    until `finish`.

    `documents` and `tokens` are the numbers of documents and tokens that have been appended.

    After a `mark_completed`, an interrupted or killed writer leaves the unfinished files and
    P.progress. The next writer continues them if it is created with the same `source` and `inputs`.
    `source` describes the tokenizer and the options as JSON. `inputs` are the versions of all input
    files, such as their sizes; only those of the complete files must be the same. `completed_files`
    is the number of input files that are complete.
    """

    def __init__(
        self,
        prefix: str | Path,
        dtype: np.dtype,
        *,
        overwrite: bool = False,
        source: dict[str, Any] | None = None,
        inputs: Sequence[Any] = (),
    ):
        self.dtype = np.dtype(dtype)
        self.documents = 0
        self.tokens = 0
        self.completed_files = 0
        self._source = source
        self._inputs = list(inputs)
        self._progress_path = Path(f"{prefix}.progress")
        # When P.progress was last written or, before that, when the writer was created.
        self._saved_at = time.monotonic()
        # The datasets that `add_dataset` has appended.
        self._datasets: list[IndexedDatasetReader] = []
        self._origin_path = origin_path(prefix)

        bin_path, idx_path = dataset_paths(prefix)
        if not overwrite:
            refuse_existing(idx_path, bin_path)
        # If the second file cannot be opened, the first one is discarded. Otherwise, `__exit__`
        # discards both.
        with contextlib.ExitStack() as stack:
            self._bin = PartialFile(bin_path, continues=True)
            stack.callback(self._bin.discard)
            self._idx = PartialFile(idx_path, continues=True)
            stack.callback(self._idx.discard)
            self._partial_files = stack.pop_all()

        # Both files are locked now, so no other writer changes P.progress.
        progress = self._read_progress()
        if progress is not None:
            self.completed_files = len(progress["inputs"])
            self.documents = progress["documents"]
            self.tokens = progress["tokens"]
        else:
            self._progress_path.unlink(missing_ok=True)
        # The state at the last `mark_completed`, of this writer or of the one that it continues.
        self._progress = progress
        self._sequences = self.documents  # `add` makes each document one sequence
        # Drop what was written after the last save.
        self._bin.file.truncate(self.tokens * self.dtype.itemsize)
        self._bin.file.seek(0, os.SEEK_END)
        # Keep the space of the header, which is written last, and an int32 length per document.
        self._idx.file.truncate(_HEADER.size + 4 * self.documents)
        self._idx.file.seek(0, os.SEEK_END)

    def __enter__(self) -> "IndexedDatasetWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        """Keep the unfinished files if there was a `mark_completed`, and otherwise remove them.

        After `finish`, there are none.
        """
        # `finish` closes the file.
        if self._progress is not None and not self._bin.file.closed:
            # If the disk is full, only the documents up to the previous save are kept.
            with contextlib.suppress(OSError):
                self._save()
        if self._progress_path.exists():
            self._idx.leave()
            self._bin.leave()
        # Discards the files unless they were published or left.
        self._partial_files.close()

    def mark_completed(self, files: int) -> None:
        """Keep the documents so far for the next writer if this one is interrupted.

        They are the documents of the first `files` input files. This is saved once a minute. After
        SIGKILL, the next writer continues from what was saved last.
        """
        self.completed_files = files
        self._progress = {
            "source": self._source,
            "inputs": self._inputs[:files],
            "documents": self.documents,
            "tokens": self.tokens,
        }
        if time.monotonic() - self._saved_at > _SAVE_SECONDS:
            self._save()

    def _save(self) -> None:
        """Write P.progress about the last `mark_completed`."""
        # First the files: P.progress must not describe documents that a power failure loses.
        self._bin.sync()
        self._idx.sync()
        write_record(self._progress_path, self._progress)
        self._saved_at = time.monotonic()

    def _read_progress(self) -> Progress | None:
        """Return what the unfinished files contain, or None if they cannot be continued."""
        try:
            progress = read_record(self._progress_path, Progress)
        except (OSError, FileError):  # missing, or damaged
            return None
        files = len(progress["inputs"])
        if progress["source"] != self._source or progress["inputs"] != self._inputs[:files]:
            return None

        # If the user has removed the unfinished files, those that were opened now are empty.
        bin_size = os.path.getsize(self._bin.partial_path)
        idx_size = os.path.getsize(self._idx.partial_path)
        if bin_size < progress["tokens"] * self.dtype.itemsize:
            return None
        if idx_size < _HEADER.size + 4 * progress["documents"]:
            return None
        return progress

    def add(self, tokens: bytes, lengths: np.ndarray) -> None:
        """Append documents.

        `tokens` are their ids back to back as bytes of `dtype`, `lengths` (int32) their lengths in
        tokens.
        """
        # A file can write the memory of an array only if it is contiguous.
        lengths = np.ascontiguousarray(lengths, dtype="<i4")
        total = int(lengths.sum(dtype=np.int64))
        assert len(tokens) == total * self.dtype.itemsize, "the lengths do not add up to the tokens"
        self._bin.file.write(tokens)
        self._idx.file.write(lengths.data)
        self._sequences += len(lengths)
        self.documents += len(lengths)
        self.tokens += total

    def add_dataset(self, dataset: "IndexedDatasetReader") -> None:
        """Append all documents of a dataset. A writer takes whole datasets or documents, not both.

        The datasets must have the same dtype.
        """
        for start in range(0, len(dataset.tokens), _COPIED_TOKENS):
            self._bin.file.write(dataset.tokens[start : start + _COPIED_TOKENS].data)
        for start in range(0, len(dataset.lengths), BLOCK):
            self._idx.file.write(dataset.lengths[start : start + BLOCK].data)
        self._datasets.append(dataset)
        self._sequences += len(dataset.lengths)
        self.documents += len(dataset)
        self.tokens += len(dataset.tokens)

    def finish(self, origin: Mapping[str, Any] | None = None) -> None:
        """Complete the index, sync all files to disk and rename them to their final names.

        `origin` is written to P.origin as JSON, together with fingerprints of the other two files.
        The index is renamed last: if it exists, the dataset is complete.
        """
        # The lengths are in the index already. Pointers, document indices and the header follow.
        self._write_pointers()
        for block in self._document_indices():
            self._idx.file.write(block.astype("<i8").data)
        header = (_MAGIC, 1, _CODES[self.dtype], self._sequences, self.documents + 1)
        # The constructor has left space for the header.
        self._idx.file.seek(0)
        self._idx.file.write(_HEADER.pack(*header))

        files = [self._bin, self._idx]
        for file in files:
            file.sync()
        if origin is not None:
            fingerprints = {file.path.suffix: fingerprint(file.partial_path) for file in files}
            record = PartialFile(self._origin_path)
            self._partial_files.callback(record.discard)
            record.file.write(json.dumps({**origin, "files": fingerprints}, indent=1).encode())
            record.sync()
            files.insert(0, record)
        # Remove the index while the files change, so that a partial dataset never looks complete.
        with hold_signals():
            self._idx.path.unlink(missing_ok=True)
            self._origin_path.unlink(missing_ok=True)
            for file in files:
                file.publish()
            self._progress_path.unlink(missing_ok=True)
        sync_directory(self._bin.path.parent)

    def _document_indices(self) -> Iterator[np.ndarray]:
        """Yield blocks of the document indices: 0..n, or those of the appended datasets."""
        if not self._datasets:
            for start in range(0, self.documents + 1, BLOCK):
                yield np.arange(start, min(start + BLOCK, self.documents + 1))
            return
        yield np.zeros(1)  # the first document begins with sequence 0
        sequences_before = 0
        for dataset in self._datasets:
            # From 1: the first index of a dataset is the last one of the dataset before it.
            for start in range(1, len(dataset.document_indices), BLOCK):
                yield dataset.document_indices[start : start + BLOCK] + sequences_before
            sequences_before += len(dataset.lengths)

    def _write_pointers(self) -> None:
        """Compute the pointers from the lengths in the index, and append them to it.

        This takes little memory, since both are read and written in blocks.
        """
        offset = 0
        # Each length takes 4 bytes, each pointer 8. The pointers follow all lengths.
        for start in range(0, self._sequences, BLOCK):
            count = min(BLOCK, self._sequences - start)
            self._idx.file.seek(_HEADER.size + 4 * start)
            lengths = np.frombuffer(self._idx.file.read(4 * count), dtype="<i4")
            # A sequence begins where the previous one ends.
            ends = np.cumsum(lengths, dtype="<i8") * self.dtype.itemsize + offset
            self._idx.file.seek(_HEADER.size + 4 * self._sequences + 8 * start)
            self._idx.file.write(np.append(offset, ends[:-1]).astype("<i8").data)
            offset = int(ends[-1])
        self._idx.file.seek(0, os.SEEK_END)


class IndexedDatasetReader:
    """A memory-mapped dataset. `len()` returns its number of documents.

    `lengths`, `pointers` and `document_indices` are the arrays of the index (see the module's
    docstring). Raises FileError if a file is missing or the index has another size or format;
    `damage` finds other damage.
    """

    def __init__(self, prefix: str | Path):
        check_files_exist(str(prefix))
        self.bin_path, self.idx_path = dataset_paths(prefix)
        self.bin_size = self.bin_path.stat().st_size
        idx_size = self.idx_path.stat().st_size
        with open(self.idx_path, "rb") as file:
            # A short header is padded, so that it is refused below like a damaged one.
            header = file.read(_HEADER.size).ljust(_HEADER.size)
        magic, version, dtype_code, sequences, entries = _HEADER.unpack(header)
        fix = "preprocess the dataset again"
        if (magic, version) != (_MAGIC, 1) or dtype_code not in _DTYPES:
            problem = f"has a damaged header, or one of another format (dtype code {dtype_code})"
            raise FileError(str(self.idx_path), problem, fix)
        # A sequence has a length of 4 bytes and a pointer of 8; `entries` are document indices.
        size = _HEADER.size + 12 * sequences + 8 * entries
        if idx_size != size:
            problem = f"has {idx_size} bytes instead of {size}: it is truncated or damaged"
            raise FileError(str(self.idx_path), problem, fix)

        self.dtype = np.dtype(_DTYPES[dtype_code])
        index = np.memmap(self.idx_path, mode="r")
        # The byte offsets at which the header and each of the three arrays end.
        ends = np.cumsum([_HEADER.size, 4 * sequences, 8 * sequences, 8 * entries])
        self.lengths = index[ends[0] : ends[1]].view("<i4")
        self.pointers = index[ends[1] : ends[2]].view("<i8")
        self.document_indices = index[ends[2] : ends[3]].view("<i8")

    def __len__(self) -> int:
        # A damaged index may lack even the first entry.
        return max(len(self.document_indices) - 1, 0)

    @cached_property
    def tokens(self) -> np.ndarray:
        """All token ids, memory-mapped."""
        count = self.bin_size // self.dtype.itemsize
        if count:
            return np.memmap(self.bin_path, self.dtype, "r", shape=(count,))
        return np.empty(0, self.dtype)  # an empty file cannot be mapped

    def document(self, index: int) -> np.ndarray:
        """Return the token ids of a document."""
        # The document's first sequence, and the first of the next document.
        first, stop = self.document_indices[index : index + 2]
        if first == stop:  # a document without sequences, which has no pointer
            return self.tokens[:0]
        start = int(self.pointers[first]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.lengths[first:stop].sum(dtype=np.int64))]

    def document_lengths(self) -> np.ndarray:
        """Return the number of tokens of every document (int64)."""
        ends = np.cumsum(self.lengths, dtype=np.int64)
        # The number of tokens before each document, and of all tokens, in order.
        document_starts = np.append(0, ends)[self.document_indices]
        return np.diff(document_starts)

    def wrong_size(self) -> str | None:
        """Return a sentence if the token file has another size than the index implies, or None.

        Reads only the last entries of the index.
        """
        expected = 0
        if len(self.lengths):
            expected = int(self.pointers[-1]) + int(self.lengths[-1]) * self.dtype.itemsize
        if expected == self.bin_size:
            return None
        return f"{self.bin_path} has {self.bin_size} bytes, but its index describes {expected}"

    def damage(self) -> str | None:
        """Return a sentence about the first damage of the index, or None. Reads no token.

        Like Megatron-core's writer, it expects every sequence to begin where the previous one ends.
        """
        offset = 0
        for start in range(0, len(self.lengths), BLOCK):
            lengths = self.lengths[start : start + BLOCK]
            if lengths.min() < 0:
                return f"sequence {start + int(np.argmax(lengths < 0))} has a negative length"

            ends = np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize + offset
            expected = np.append(offset, ends[:-1])
            misplaced = np.flatnonzero(self.pointers[start : start + BLOCK] != expected)
            if len(misplaced):
                number = start + int(misplaced[0])
                return (
                    f"the pointer of sequence {number} is {self.pointers[number]}, but the previous"
                    " sequence does not end there"
                )
            offset = int(ends[-1])

        indices = self.document_indices
        bounds = (0, len(self.lengths))
        if not len(indices) or (indices[0], indices[-1]) != bounds or (np.diff(indices) < 0).any():
            return f"the document indices do not increase from 0 to {len(self.lengths)} sequences"
        return self.wrong_size()

    def invalid_id(self, vocab_size: int | None = None) -> str | None:
        """Return a sentence about the first token id that `first_invalid_id` finds, or None.

        Reads all tokens.
        """
        # Larger blocks than those of the index, since a token takes fewer bytes.
        for start in range(0, len(self.tokens), 16 * BLOCK):
            block = self.tokens[start : start + 16 * BLOCK]
            invalid = first_invalid_id(block, vocab_size)
            if invalid is None:
                continue
            sentence = f"token {start + invalid} of the dataset has the id {block[invalid]}"
            if block[invalid] < 0:
                return f"{sentence}, but ids cannot be negative"
            return f"{sentence}, but the tokenizer has {vocab_size} ids"
        return None
