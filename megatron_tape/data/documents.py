"""Read texts from JSON lines, parquet and text files in bounded memory, with place and reason for every bad one.

Reading happens in two steps, so that the expensive one can run in another process: `read_chunks` cuts files into
chunks of raw bytes, and `parse_chunk` turns a chunk into texts.
"""

import functools
import glob
import json
import os
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from megatron_tape import command_line

FORMATS = """input formats, by the ending of the file's name:
  .jsonl .json   JSON lines: one object per line, its text under --text-key
  .parquet       one document per row, its text in the column --text-key
  .txt           plain UTF-8 text: the whole file is one document
.jsonl, .json and .txt may be compressed: .gz or .zst follows. A file that is given twice, even through a link, is read
once."""

_COMPRESSED_BLOCK = 1 << 16
_SCANNED_BLOCK = 1 << 20
_EXAMPLES = 3
_EMPTY = "empty text"


class UnreadableFile(ValueError):
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

    def place(self, number: int) -> str:
        """Name a document of this file for a message."""
        if self.unit == "line":
            return f"{self.path}:{_lines_before(self.path, self.offset) + number}"
        return f"{self.path} row {number}" if self.unit == "row" else self.path


@dataclass
class Problems:
    """How many documents were bad, by reason, and the first few examples of each."""

    counts: Counter = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, place: str) -> None:
        """Count a bad document."""
        self.counts[reason] += 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < _EXAMPLES:
            examples.append(place)

    def merge(self, other: "Problems") -> None:
        """Count the bad documents of a later chunk."""
        self.counts.update(other.counts)
        for reason, places in other.examples.items():
            examples = self.examples.setdefault(reason, [])
            examples.extend(places[: _EXAMPLES - len(examples)])

    def first(self) -> tuple[str, str] | None:
        """Return place and reason of the first bad document, or None."""
        return next(((places[0], reason) for reason, places in self.examples.items()), None)

    def report(self) -> Iterator[str]:
        """Yield a sentence for every reason."""
        for reason, count in self.counts.most_common():
            more = ", ..." if count > len(self.examples[reason]) else ""
            yield f"skipped {count:,}: {reason} ({', '.join(self.examples[reason])}{more})"


def find_inputs(patterns: list[str]) -> list[str]:
    """Return the files that paths and glob patterns name: in the order of the patterns, sorted within each.

    A file that is named again is left out, with a warning if it has another name there. Raises ValueError when a
    pattern matches no file or a file's format is unknown.
    """
    files: dict[tuple[int, int], str] = {}
    for pattern in patterns:
        matches = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        matches = [match for match in matches if not os.path.isdir(match)]
        if not matches:
            advice = f"try '{pattern.rstrip('/')}/*.jsonl'" if os.path.isdir(pattern) else "check the path"
            raise ValueError(f"no file matches --input {pattern!r}; {advice}")
        for path in matches:
            status = os.stat(path)
            first = files.setdefault((status.st_dev, status.st_ino), path)
            if path != first:
                command_line.say(f"warning: {path} is the same file as {first}, so it is read once")
    for path in files.values():
        if not is_text_file(path):
            raise ValueError(
                f"the format of {path} is unknown; name it .jsonl, .json, .txt (also .gz, .zst) or .parquet"
            )
    return list(files.values())


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
        except (UnreadableFile, OSError) as error:
            yield UnreadableFile(f"{part.path} cannot be read to its end: {error}")
        position += part.size


def parse_chunk(chunk: Chunk, text_key: str, keep_empty: bool = False) -> tuple[list[str], list[int], Problems]:
    """Return the texts of a chunk, the line or row number of each, and what is wrong with the others.

    An empty text is a problem, too, unless `keep_empty`.
    """
    problems, texts, numbers = Problems(), [], []
    lines = chunk.unit == "line"
    for number, raw in enumerate(_split_lines(chunk.payload) if lines else chunk.payload, start=chunk.first):
        text, reason = _parse_line(raw, text_key) if lines else _parse_text(raw)
        if reason is None or (keep_empty and reason == _EMPTY):
            texts.append(text)
            numbers.append(number)
        else:
            problems.add(reason, chunk.place(number))
    return texts, numbers, problems


def read_texts(paths: list[str], text_key: str, keep_empty: bool = False) -> Iterator[tuple[str, int]]:
    """Yield every text with how many bytes of the inputs have been read; raises ValueError at the first bad one.

    An empty text is a bad one, unless `keep_empty`.
    """
    for chunk in read_chunks([FilePart(path) for path in paths], text_key, chunk_bytes=1 << 18):
        if isinstance(chunk, UnreadableFile):
            raise chunk
        texts, _, problems = parse_chunk(chunk, text_key, keep_empty)
        if bad := problems.first():
            others = f", but {_other_keys(chunk, text_key)}" if bad[1] == _no_key(text_key) else ""
            raise ValueError(f"{bad[0]}: {bad[1]}{others}; repair or remove it")
        for text in texts:
            yield text, chunk.position


def is_text_file(path: str) -> bool:
    """Return whether the ending of a file's name is that of a known format."""
    return _format(path) in (".jsonl", ".json", ".txt") or path.endswith(".parquet")


def _format(path: str) -> str:
    for compression in (".gz", ".zst"):
        path = path.removesuffix(compression)
    return Path(path).suffix


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
    start = max(position - 1, 0)
    file.seek(start)
    while position and (block := file.read(_SCANNED_BLOCK)):
        if (newline := block.find(b"\n")) >= 0:
            return start + newline + 1
        start += len(block)
    return start


@functools.lru_cache
def _lines_before(path: str, offset: int) -> int:
    """Count the lines in the first `offset` bytes of a file, for messages only."""
    lines = 0
    with open(path, "rb") as file:
        while block := file.read(min(_SCANNED_BLOCK, offset - file.tell())):
            lines += block.count(b"\n")
    return lines


def _read_file(part: FilePart, text_key: str, chunk_bytes: int, position: int) -> Iterator[Chunk]:
    path = part.path
    kind = _format(path)
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
            yield Chunk(path, "", 1, [b"".join(blocks)], position + file.count)
            return
        number = 1
        for payload in _whole_lines(blocks, chunk_bytes):
            if begin == 0 and number == 1:
                payload = payload.removeprefix(b"\xef\xbb\xbf")
            yield Chunk(path, "line", number, payload, position + file.count, begin)
            number += payload.count(b"\n")


def _decompress(file: _Counted, path: str, block_bytes: int) -> Iterator[bytes]:
    """Yield the content of a file in blocks; raises UnreadableFile after the last good one."""
    if not path.endswith((".gz", ".zst")):
        while block := file.read(block_bytes):
            yield block
        return
    new, broken = _decompressor(path)
    stream, unfinished = new(), False
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
                raise UnreadableFile(f"the compressed data is damaged ({error})") from error
            if block:
                yield block
            unfinished = not stream.eof
            data = stream.unused_data if stream.eof else b""
    if unfinished:
        raise UnreadableFile("the compressed data is cut off")


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
                raise UnreadableFile(
                    f"it does not have a column {text_key!r}, only {names}; choose one with --text-key"
                )
            column = file.schema_arrow.field(text_key).type
            if not (pyarrow.types.is_string(column) or pyarrow.types.is_large_string(column)):
                raise UnreadableFile(
                    f"its column {text_key!r} holds {column}, not strings; choose another with --text-key"
                )
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
        raise UnreadableFile(f"the parquet data is damaged ({' '.join(str(error).split())})") from error


def _split_lines(payload: bytes) -> list[bytes]:
    lines = payload.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return lines


def _parse_line(line: bytes, text_key: str) -> tuple[str, str | None]:
    """Return the text of a JSON line, or the reason why it has none."""
    if not line.strip():
        return "", "empty line"
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return "", "invalid UTF-8"
    except ValueError:
        return "", "invalid JSON"
    except RecursionError:
        return "", "JSON nested too deeply"
    if not isinstance(record, dict):
        return "", "not a JSON object"
    if text_key not in record:
        return "", _no_key(text_key)
    text = record[text_key]
    if not isinstance(text, str):
        return "", f"the value of {text_key!r} is not a string"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return "", "a lone surrogate, which UTF-8 cannot hold"
    return (text, None) if text else ("", _EMPTY)


def _no_key(text_key: str) -> str:
    return f"no key {text_key!r}"


def _other_keys(chunk: Chunk, text_key: str) -> str:
    """Return the first keys of the first line of a chunk that lacks `text_key`, for a message."""
    for line in _split_lines(chunk.payload):
        keys = json.loads(line)
        if text_key not in keys:
            return ", ".join(map(repr, list(keys)[:10])) or "none at all"
    return "others"


def _parse_text(raw: bytes | None) -> tuple[str, str | None]:
    if raw is None:
        return "", "no text (null)"
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return "", "invalid UTF-8"
    return (text, None) if text else ("", _EMPTY)
