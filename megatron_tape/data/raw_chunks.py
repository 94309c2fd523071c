"""Split files of JSON lines, parquet and text into chunks of raw documents, in bounded memory.

Splitting is cheap. Parsing (`documents.parse_chunk`) is expensive, and may run in other processes.
"""

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from megatron_tape.data import hub
from megatron_tape.data.hub import text_format
from megatron_tape.errors import FileError

DOCUMENT_BYTES = 12_000_000
"""Default maximum size of a document in bytes. Tokenizing takes up to 150 times as much memory."""
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_BLOCK = 1 << 16
"""Bytes that are decompressed together. Up to that many are lost before damaged data."""
_ROWS = 64
"""Rows of a parquet file that are decoded together."""


class UnreadableFile(FileError):
    """A file that cannot be read to its end. Documents before the failure are valid."""


class NoTextColumn(UnreadableFile):
    """A parquet file that has no column of strings with the name `text_key`, only `columns`."""

    columns: Sequence[str] = ()


@dataclass(frozen=True)
class TooLarge:
    """Takes the place of a document of more than `limit` bytes."""

    limit: int

    def __str__(self) -> str:
        return f"more than {self.limit:,} bytes in one document"


@dataclass(frozen=True)
class Chunk:
    """Consecutive unparsed documents of a file.

    `payload` is whole JSON lines as bytes, or a list of UTF-8 texts, in which None is a null (see
    also TooLarge). `first` is the number, from 1, of the first line or row. `unit` is "line",
    "row", or "" for a file that is a single document. `position` is the number of input bytes read
    so far, before decompression.
    """

    path: str
    unit: str
    first: int
    payload: bytes | list[bytes | None | TooLarge]
    position: int = 0

    @property
    def is_too_large(self) -> bool:
        """Whether the chunk is a single document that is too large."""
        return len(self.payload) == 1 and isinstance(self.payload[0], TooLarge)

    def place(self, number: int) -> str:
        """Return where line or row `number` is, for messages, such as `corpus.jsonl:12`."""
        if self.unit == "line":
            return f"{self.path}:{number}"
        if self.unit == "row":
            return f"{self.path} row {number}"
        return self.path


def is_text_file(path: str) -> bool:
    """Return whether the file has the extension of a known format."""
    return text_format(path) in (".jsonl", ".json", ".txt", ".parquet")


def read_chunks(
    paths: list[str], text_key: str, chunk_bytes: int, document_bytes: int = DOCUMENT_BYTES
) -> Iterator[Chunk | UnreadableFile]:
    """Yield the documents of files in order, in chunks of about `chunk_bytes`.

    TooLarge replaces a document whose decompressed line, row or file has more than
    `document_bytes`. A file that ends early or cannot be decompressed yields its whole lines, then
    an UnreadableFile.

    Raises hub.NetworkError if a file of the Hub is streamed and the network fails: the file itself
    may be good.
    """
    position = 0
    chunk_bytes = min(chunk_bytes, max(document_bytes, 1 << 16))
    for path in paths:
        try:
            yield from _read_file(path, text_key, chunk_bytes, document_bytes, position)
        except UnreadableFile as error:
            yield error
        except hub.NetworkError:
            raise
        except OSError as error:
            yield UnreadableFile(path, f"cannot be read to its end ({error})")
        position += hub.file_size(path)


class _Counted:
    """Count the bytes read from a file, since a pipe cannot report its position."""

    closed = False

    def __init__(self, file: IO[bytes]):
        self._file = file
        self.count = 0

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self.count += len(data)
        return data


def _read_file(
    path: str, text_key: str, chunk_bytes: int, document_bytes: int, position: int
) -> Iterator[Chunk]:
    extension = text_format(path)
    if extension == ".parquet":
        yield from _read_parquet(path, text_key, chunk_bytes, document_bytes, position)
        return
    with hub.open_file(path) as opened:
        file = _Counted(opened)
        blocks = _decompress(file, path, chunk_bytes)
        if extension == ".txt":
            text = _whole_text(blocks, document_bytes)
            yield Chunk(path, "", 1, [text], position + file.count)
            return
        number = 1
        for lines in _whole_lines(blocks, chunk_bytes, document_bytes):
            if isinstance(lines, TooLarge):
                yield Chunk(path, "line", number, [lines], position + file.count)
                number += 1
                continue
            if number == 1:
                lines = lines.removeprefix(codecs.BOM_UTF8)
            yield Chunk(path, "line", number, lines, position + file.count)
            number += lines.count(b"\n")


def _decompress(file: _Counted, path: str, block_bytes: int) -> Iterator[bytes]:
    """Yield the decompressed content of a file in blocks.

    Raises UnreadableFile after the last good block.
    """
    compression = _COMPRESSIONS.get(Path(path).suffix)
    stream: Any = file
    if compression is not None:
        import pyarrow

        block_bytes = _BLOCK
        stream = pyarrow.CompressedInputStream(file, compression)
    try:
        while block := stream.read(block_bytes):
            yield block
    except hub.NetworkError:
        raise
    except OSError as error:
        if compression is None:
            raise
        raise UnreadableFile(path, f"has damaged or truncated data ({error})") from error


def _whole_text(blocks: Iterator[bytes], document_bytes: int) -> bytes | TooLarge:
    """Return the content of a file that is one document. Stop reading once it is too large."""
    parts = []
    size = 0
    for block in blocks:
        parts.append(block)
        size += len(block)
        if size > document_bytes + len(codecs.BOM_UTF8):
            return TooLarge(document_bytes)
    text = b"".join(parts).removeprefix(codecs.BOM_UTF8)
    if len(text) <= document_bytes:
        return text
    return TooLarge(document_bytes)


def _whole_lines(
    blocks: Iterator[bytes], chunk_bytes: int, document_bytes: int
) -> Iterator[bytes | TooLarge]:
    """Split a byte stream into chunks of whole lines. TooLarge replaces a line that is too long.

    If the stream is cut off, its unfinished line is dropped.
    """
    buffer = b""  # lines that do not fill a chunk yet, and an unfinished line
    is_too_large = False  # whether the unfinished line is too long
    try:
        for block in blocks:
            if is_too_large:
                _, found, block = block.partition(b"\n")
                is_too_large = not found
            buffer += block
            end = buffer.rfind(b"\n") + 1
            exceeds = len(buffer) - end > document_bytes
            if end and (exceeds or len(buffer) >= chunk_bytes):
                yield from _bounded(buffer[:end], document_bytes)
                buffer = buffer[end:]
            if exceeds:
                yield TooLarge(document_bytes)
                buffer = b""
                is_too_large = True
    except UnreadableFile:
        yield from _bounded(buffer[: buffer.rfind(b"\n") + 1], document_bytes)
        raise
    yield from _bounded(buffer, document_bytes)


def _bounded(lines: bytes, document_bytes: int) -> Iterator[bytes | TooLarge]:
    """Yield `lines`, except that TooLarge replaces each line of more than `document_bytes`."""
    start = position = 0
    while len(lines) - position > document_bytes:
        end = lines.find(b"\n", position)
        if end < 0:
            end = len(lines)
        if end - position > document_bytes:
            if start < position:
                yield lines[start:position]
            yield TooLarge(document_bytes)
            start = end + 1
        position = end + 1
    if start < len(lines):
        yield lines[start:]


def _read_parquet(
    path: str, text_key: str, chunk_bytes: int, document_bytes: int, position: int
) -> Iterator[Chunk]:
    import pyarrow
    import pyarrow.parquet

    try:
        source = hub.local_path(path) or hub.open_file(path)
        size_in_bytes = hub.file_size(path)
        with pyarrow.parquet.ParquetFile(source, buffer_size=1 << 20) as file:
            _check_column(path, file.schema_arrow, text_key)
            row = 1
            rows = max(file.metadata.num_rows, 1)
            texts: list[bytes | None | TooLarge] = []
            size = 0
            for batch in file.iter_batches(_ROWS, columns=[text_key], use_threads=False):
                # Read bytes, so that invalid UTF-8 in a row makes only that row bad.
                for text in batch.column(text_key).cast(pyarrow.large_binary()).to_pylist():
                    length = len(text or b"")
                    texts.append(text if length <= document_bytes else TooLarge(document_bytes))
                    size += length
                if size >= chunk_bytes or len(texts) >= chunk_bytes:
                    reached = position + size_in_bytes * (row + len(texts)) // rows
                    yield Chunk(path, "row", row, texts, reached)
                    row += len(texts)
                    texts = []
                    size = 0
            if texts:
                yield Chunk(path, "row", row, texts, position + size_in_bytes)
    except (UnreadableFile, hub.NetworkError):
        raise
    # pyarrow raises plain ValueError and TypeError for names and types that it cannot represent.
    except (pyarrow.ArrowException, OSError, ValueError, TypeError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UnreadableFile(path, f"cannot be read as parquet ({reason})") from error


def _check_column(path: str, schema: Any, text_key: str) -> None:
    """Raise NoTextColumn unless a parquet file has one column of strings with this name."""
    import pyarrow.types

    problem = f"has no column {text_key!r}, only {schema.names[:10]}"
    if text_key in schema.names:
        column = schema.field(text_key).type
        values = column.value_type if pyarrow.types.is_dictionary(column) else column
        if str(values) in ("string", "large_string", "string_view"):
            return
        problem = f"has a column {text_key!r} of type {column} instead of string"
    error = NoTextColumn(path, problem)
    error.columns = schema.names
    raise error
