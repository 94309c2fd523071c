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
from megatron_tape.errors import FileError, one_line

DOCUMENT_BYTES = 12_000_000
"""Default maximum size of a document in bytes. Tokenizing takes up to 150 times as much memory."""
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_BLOCK = 1 << 16
"""Bytes that are read together. Up to that many are lost before damaged compressed data."""
_ROWS = 64
"""Rows of a parquet file that are decoded together."""


class UnreadableFile(FileError):
    """A file that cannot be read to its end. Documents before the failure are valid."""

    columns: Sequence[str] = ()
    """The columns of a parquet file, if none of them holds text under the text key."""


@dataclass(frozen=True)
class Chunk:
    """Consecutive unparsed documents of a file.

    `documents` are JSON lines, or UTF-8 texts, in which None is a null. Of a document that is too
    large, they contain only the first `document_bytes` + 1 bytes: the length of these shows that
    the document is too large. `first_number` is the number, from 1, of the first line or row.
    `unit` is "line", "row", or "" for a file that is a single document. `bytes_read` is the number
    of input bytes read so far, of all files and before decompression.
    """

    path: str
    unit: str
    first_number: int
    documents: list[bytes | None]
    document_bytes: int
    bytes_read: int

    def place(self, number: int) -> str:
        """Return where line or row `number` is, for messages, such as `corpus.jsonl:12`."""
        if self.unit == "line":
            return f"{self.path}:{number}"
        if self.unit == "row":
            return f"{self.path} row {number}"
        return self.path


def too_large_reason(document_bytes: int) -> str:
    """Return the reason why a document of more than `document_bytes` is bad."""
    return f"more than {document_bytes:,} bytes in one document"


def is_text_file(path: str) -> bool:
    """Return whether the file has the extension of a known format."""
    return text_format(path) in (".jsonl", ".json", ".txt", ".parquet")


def read_chunks(
    paths: list[str], text_key: str, chunk_bytes: int, document_bytes: int = DOCUMENT_BYTES
) -> Iterator[Chunk | UnreadableFile]:
    """Yield the documents of files in order, in chunks of about `chunk_bytes`.

    A document is too large if its decompressed line, row or file has more than `document_bytes`; it
    is the last one of its chunk. A file that ends early or cannot be decompressed yields its whole
    lines, then an UnreadableFile.

    Raises hub.NetworkError if a file of the Hub is streamed and the network fails: the file itself
    may be good.
    """
    previous_bytes = 0  # total size of the files before this one
    for path in paths:
        unit = {".parquet": "row", ".txt": ""}.get(text_format(path), "line")
        failure = None
        number = 1  # number of the chunk's first document in the file
        documents = []
        size = 0  # bytes of the chunk so far, and 1 for each document
        try:
            for document, bytes_of_file in _read_file(path, unit, text_key, document_bytes):
                bytes_read = previous_bytes + bytes_of_file
                documents.append(document)
                length = len(document or b"")
                # Every document adds at least 1, so that a chunk of empty documents ends, too.
                size += length + 1
                if size >= chunk_bytes or length > document_bytes:
                    yield Chunk(path, unit, number, documents, document_bytes, bytes_read)
                    number += len(documents)
                    documents = []
                    size = 0
        except UnreadableFile as error:
            failure = error
        except hub.NetworkError:  # an OSError, too
            raise
        except OSError as error:
            failure = UnreadableFile(path, f"cannot be read to its end ({error})")
        if documents:
            yield Chunk(path, unit, number, documents, document_bytes, bytes_read)
        if failure is not None:
            yield failure
        previous_bytes += hub.file_size(path)


class _Counted:
    """Count the bytes read from a file, since a pipe cannot report its position."""

    closed = False  # pyarrow asks for it

    def __init__(self, file: IO[bytes]):
        self._file = file
        self.count = 0

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self.count += len(data)
        return data

    def close(self) -> None:
        """Do nothing. pyarrow calls this, and whoever opened the file closes it."""


def _read_file(
    path: str, unit: str, text_key: str, document_bytes: int
) -> Iterator[tuple[bytes | None, int]]:
    """Yield each document of a file, and the number of bytes read so far.

    `unit` is that of `Chunk`. Raises UnreadableFile or OSError after the last good document.
    """
    if unit == "row":
        yield from _read_parquet(path, text_key)
        return
    with hub.open_file(path) as opened:
        file = _Counted(opened)
        blocks = _decompress(file, path)
        if unit == "line":
            for line in split_lines(_without_mark(blocks), document_bytes):
                yield line, file.count
            return

        # The whole file is one document. One byte more than the maximum shows that it is too large,
        # so the rest of a larger file is not read.
        text = b""
        for block in _without_mark(blocks):
            text += block
            if len(text) > document_bytes:
                break
        yield text[: document_bytes + 1], file.count


def _decompress(file: _Counted, path: str) -> Iterator[bytes]:
    """Yield the decompressed content of a file in blocks.

    Raises UnreadableFile after the last good block.
    """
    compression = _COMPRESSIONS.get(Path(path).suffix)
    stream: Any = file
    if compression is not None:
        import pyarrow

        stream = pyarrow.CompressedInputStream(file, compression)
    try:
        while block := stream.read(_BLOCK):
            yield block
    except hub.NetworkError:
        raise
    except OSError as error:
        if compression is None:
            raise
        raise UnreadableFile(path, f"has damaged or truncated data ({error})") from error
    # pyarrow reads an empty file, such as a failed download, as an empty text.
    if compression is not None and file.count == 0:
        raise UnreadableFile(path, "is empty, which no compressed file is")


def _without_mark(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Remove the byte order mark at the beginning of a text, which begins with the first block."""
    yield next(blocks, b"").removeprefix(codecs.BOM_UTF8)
    yield from blocks


def split_lines(blocks: Iterator[bytes], document_bytes: int) -> Iterator[bytes]:
    """Yield the lines of a byte stream, at most `document_bytes` + 1 bytes of each.

    That is one byte more than a good line may have, which shows the caller that a line is too
    large. If reading a block fails, the unfinished line before it is dropped.
    """
    unfinished = bytearray()  # the beginning, in earlier blocks, of the line that has not ended yet
    is_skipped = False  # whether that line is too large, so that its beginning was yielded already
    for block in blocks:
        # Split the block alone, not `unfinished` together with it: that would search the beginning
        # of a long line again for each of its blocks.
        *lines, rest = block.split(b"\n")
        # `lines` are the lines that end in this block. The first of them began in an earlier block
        # if there is an unfinished line.
        if is_skipped and lines:
            del lines[0]
            is_skipped = False
        elif lines:
            lines[0] = bytes(unfinished + lines[0])
            unfinished.clear()
        for line in lines:
            yield line[: document_bytes + 1]

        # `rest` is the beginning of the next line or, without a line break in the block, a further
        # part of the same one. The parts of a line that is known to be too large are not collected.
        if not is_skipped:
            unfinished += rest
        if len(unfinished) > document_bytes:
            yield bytes(unfinished[: document_bytes + 1])
            is_skipped = True
            unfinished.clear()
    if unfinished:
        yield bytes(unfinished)


def _read_parquet(path: str, text_key: str) -> Iterator[tuple[bytes | None, int]]:
    """Yield the text of each row of a parquet file, and the estimated number of bytes read so far.

    Raises UnreadableFile after the last good row.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        # pyarrow reads a path faster than a Python file.
        source = hub.local_path(path) or hub.open_file(path)
        size = hub.file_size(path)
        with pyarrow.parquet.ParquetFile(source, buffer_size=1 << 20) as file:
            _check_column(path, file.schema_arrow, text_key)
            row = 0
            for batch in file.iter_batches(_ROWS, columns=[text_key], use_threads=False):
                # Cast to bytes: decoding the column would fail for all rows if one is not UTF-8.
                for text in batch.column(text_key).cast(pyarrow.large_binary()).to_pylist():
                    row += 1
                    yield text, size * row // file.metadata.num_rows
    except (UnreadableFile, hub.NetworkError):
        raise
    # pyarrow raises plain ValueError and TypeError for names and types that it cannot represent.
    except (pyarrow.ArrowException, OSError, ValueError, TypeError, KeyError) as error:
        raise UnreadableFile(path, f"cannot be read as parquet ({one_line(error)})") from error


def _check_column(path: str, schema: Any, text_key: str) -> None:
    """Raise UnreadableFile unless a parquet file has a column of strings with this name."""
    import pyarrow.types

    problem = f"has no column {text_key!r}, only {schema.names[:10]}"
    if text_key in schema.names:
        column = schema.field(text_key).type
        # A column of repeated texts may be stored as indices into a dictionary of strings.
        text_type = column.value_type if pyarrow.types.is_dictionary(column) else column
        if str(text_type) in ("string", "large_string", "string_view"):
            return
        problem = f"has a column {text_key!r} of type {column} instead of string"
    error = UnreadableFile(path, problem)
    error.columns = schema.names
    raise error
