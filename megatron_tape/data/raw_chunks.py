"""Cut files of JSON lines, parquet and text into chunks of raw documents, in bounded memory.

This is the cheap half of reading; `documents.parse_chunk`, which may run in another process, is the expensive one.
"""

import codecs
import functools
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from megatron_tape.errors import FileError

_COMPRESSED_BLOCK = 1 << 16


class UnreadableFile(FileError):
    """A file that cannot be read to its end; what was read before remains valid."""


@dataclass(frozen=True)
class FilePart:
    """A file to read; with `stop`, only its lines that start in the bytes [start, stop).

    Only files of which `is_cuttable` holds have such parts.
    """

    path: str
    start: int = 0
    stop: int | None = None

    @property
    def size(self) -> int:
        """Bytes on disk, as exactly as is known without reading."""
        return os.path.getsize(self.path) if self.stop is None else self.stop - self.start


@dataclass(frozen=True)
class Chunk:
    """Some consecutive documents of a file, unparsed: whole lines, or a list of raw texts.

    `first` is the number, from 1, of the first line or row; lines are counted from byte `offset` of the file. `unit`
    is what the file counts: "line", "row", or "" for a file that is one document. `position` is how many bytes of the
    inputs, as they lie on disk, have been read.
    """

    path: str
    unit: str
    first: int
    payload: bytes | list[bytes | None]
    position: int = 0
    offset: int = 0

    def place(self, number: int) -> "Place":
        """Return where a document of this file is."""
        return Place(self.path, self.unit, number, self.offset)


@dataclass(frozen=True)
class Place:
    """Where a document is: line or row `number` of a file, as in `Chunk`.

    Its name is found only when it is shown, since lines have to be counted from the beginning of the file.
    """

    path: str
    unit: str
    number: int
    offset: int

    def __str__(self) -> str:
        if self.unit == "line":
            return f"{self.path}:{lines_before(self.path, self.offset) + self.number}"
        return f"{self.path} row {self.number}" if self.unit == "row" else self.path


def is_text_file(path: str) -> bool:
    """Return whether the ending of a file's name is that of a known format."""
    return text_format(path) in (".jsonl", ".json", ".txt") or path.endswith(".parquet")


def text_format(path: str) -> str:
    """Return the ending of a file's name, without that of a compression."""
    for compression in (".gz", ".zst"):
        path = path.removesuffix(compression)
    return Path(path).suffix


def is_cuttable(path: str) -> bool:
    """Return whether a file may be read in parts, a FilePart each: uncompressed JSON lines."""
    return path.endswith((".jsonl", ".json"))


def read_chunks(parts: list[FilePart], text_key: str, chunk_bytes: int) -> Iterator[Chunk | UnreadableFile]:
    """Yield the documents of `parts` in order, in chunks of about `chunk_bytes`.

    A file that ends too early or cannot be decompressed yields its whole lines, then an UnreadableFile.
    """
    position = 0
    for part in parts:
        try:
            yield from _read_file(part, text_key, chunk_bytes, position)
        except UnreadableFile as error:
            yield error
        except OSError as error:
            yield UnreadableFile(part.path, f"cannot be read to its end ({error})")
        position += part.size


class _Counted:
    """Reads at most `limit` bytes of a file and counts them, since a pipe cannot report its position."""

    def __init__(self, file: IO[bytes], limit: int | None = None):
        self._file = file
        self._limit = limit
        self.count = 0

    def read(self, size: int) -> bytes:
        data = self._file.read(size if self._limit is None else min(size, self._limit - self.count))
        self.count += len(data)
        return data


def _start_of_line(file: IO[bytes], position: int) -> int:
    """Return where the first line at or after `position` begins, or the end of the file if there is none."""
    if position:
        file.seek(position - 1)
        file.readline()
    return file.tell()


@functools.lru_cache
def lines_before(path: str, offset: int) -> int:
    """Count the lines in the first `offset` bytes of a file, for messages only."""
    if not offset:  # a pipe cannot be opened again
        return 0
    lines = 0
    with open(path, "rb") as file:
        while file.tell() < offset and file.readline():
            lines += 1
    return lines


def _read_file(part: FilePart, text_key: str, chunk_bytes: int, position: int) -> Iterator[Chunk]:
    path = part.path
    kind = text_format(path)
    if kind == ".parquet":
        yield from _read_parquet(path, text_key, chunk_bytes, position)
        return
    with open(path, "rb") as opened:
        begin, limit = 0, None
        if part.stop is not None:
            begin = _start_of_line(opened, part.start)
            limit = _start_of_line(opened, part.stop) - begin
            opened.seek(begin)
        file = _Counted(opened, limit)
        blocks = _decompress(file, path, chunk_bytes)
        if kind == ".txt":
            yield Chunk(path, "", 1, [b"".join(blocks).removeprefix(codecs.BOM_UTF8)], position + file.count)
            return
        number = 1
        for payload in _whole_lines(blocks, chunk_bytes):
            if begin == 0 and number == 1:
                payload = payload.removeprefix(codecs.BOM_UTF8)
            yield Chunk(path, "line", number, payload, position + file.count, begin)
            number += payload.count(b"\n")


def _decompress(file: _Counted, path: str, block_bytes: int) -> Iterator[bytes]:
    """Yield the content of a file in blocks; raises UnreadableFile after the last good one."""
    if not path.endswith((".gz", ".zst")):
        while block := file.read(block_bytes):
            yield block
        return
    new, broken = _decompressor(path)
    stream, unfinished = new(), True  # an empty file is one that was cut off
    while data := file.read(_COMPRESSED_BLOCK):
        while data:
            # Files may consist of several compressed streams, as `cat a.gz b.gz` makes them.
            if stream.eof:
                data = data.lstrip(b"\0") if path.endswith(".gz") else data
                if not data:
                    break
                stream = new()
            try:
                block = stream.decompress(data)
            except broken as error:
                # zlib says what failed after a number and what it was doing.
                raise UnreadableFile(path, f"has damaged compressed data ({str(error).rpartition(': ')[2]})") from error
            if block:
                yield block
            unfinished = not stream.eof
            data = stream.unused_data if stream.eof else b""
    if unfinished:
        raise UnreadableFile(path, "ends early: its compressed data is cut off")


def _decompressor(path: str) -> tuple:
    """Return a function that starts decompressing a stream, and the exception of damaged data."""
    if path.endswith(".gz"):
        return lambda: zlib.decompressobj(wbits=31), zlib.error
    import zstandard

    # zstd --long=31 writes windows of up to 2 GiB.
    return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj, zstandard.ZstdError


def _whole_lines(blocks: Iterator[bytes], chunk_bytes: int) -> Iterator[bytes]:
    """Cut a byte stream into chunks that end with a line; a cut-off stream loses its unfinished line."""
    parts, size = [], 0
    try:
        for block in blocks:
            end = block.rfind(b"\n") + 1 if size + len(block) >= chunk_bytes else 0
            if end:
                yield b"".join((*parts, block[:end]))
                block, parts, size = block[end:], [], 0
            if block:
                parts.append(block)
                size += len(block)
    except UnreadableFile:
        rest = b"".join(parts)
        if end := rest.rfind(b"\n") + 1:
            yield rest[:end]
        raise
    if parts:
        yield b"".join(parts)


def _read_parquet(path: str, text_key: str, chunk_bytes: int, position: int) -> Iterator[Chunk]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if text_key not in names:
                raise UnreadableFile(path, f"has no column {text_key!r}, only {names}", "choose another text key")
            column = file.schema_arrow.field(text_key).type
            values = column.value_type if pyarrow.types.is_dictionary(column) else column
            if values not in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()):
                problem = f"holds {column} in its column {text_key!r}, not strings"
                raise UnreadableFile(path, problem, "choose another text key")
            row, rows = 1, max(file.metadata.num_rows, 1)
            texts, size = [], 0
            for batch in file.iter_batches(batch_size=64, columns=[text_key], use_threads=False):
                # As bytes, so that invalid UTF-8 in one row is an error of that row only.
                for text in batch.column(0).cast(pyarrow.large_binary()).to_pylist():
                    texts.append(text)
                    size += len(text or b"")
                if size >= chunk_bytes:
                    reached = position + os.path.getsize(path) * (row + len(texts)) // rows
                    yield Chunk(path, "row", row, texts, reached)
                    row, texts, size = row + len(texts), [], 0
            if texts:
                yield Chunk(path, "row", row, texts, position + os.path.getsize(path))
    except (pyarrow.ArrowException, OSError) as error:
        raise UnreadableFile(path, f"has damaged parquet data ({' '.join(str(error).split())})") from error
