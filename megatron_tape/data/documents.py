"""Find the input files of a corpus and parse the text of each document.

A document that cannot be used, a bad document, is reported with its place and the reason. The place
is its file and its line or row, such as `corpus.jsonl:12`.
"""

import argparse
import contextlib
import glob
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_tape import command_line
from megatron_tape.data import hub
from megatron_tape.data.raw_chunks import (
    DOCUMENT_BYTES,
    Chunk,
    UnreadableFile,
    is_text_file,
    read_chunks,
    too_large_reason,
)
from megatron_tape.errors import FileError

FORMATS = """input formats, by the ending of the file's name:
  .jsonl .json   JSON lines: one object per line, its text under --text-key; blank lines are
                 skipped
  .parquet       one document per row, its text in the column --text-key
  .txt           plain UTF-8 text: the whole file is one document
.jsonl, .json and .txt may be compressed, with .gz or .zst appended. A file that is given twice,
even through a link, is read once.
  hub:NAME       a dataset of the Hugging Face Hub, or a local directory in its layout: the .parquet
                 or .jsonl files of its --split"""

_EXAMPLES = 3
"""Maximum number of places that are shown for each reason."""
_KEYS_SHOWN = 10
_CHAT_KEYS = ("messages", "conversations", "conversation")
"""Common keys of datasets of chats, which have no plain text."""
LONE_SURROGATE = "a lone surrogate, which UTF-8 cannot encode"


@dataclass
class Problems:
    """Number of bad documents by reason, and the places of the first few."""

    counts: Counter = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    """The first places by reason, at most three each."""

    def add(self, reason: str, *places: str, count: int = 1) -> None:
        """Add `count` documents that are bad for `reason`, with the places of the first ones."""
        self.counts[reason] += count
        examples = self.examples.setdefault(reason, [])
        examples.extend(places[: _EXAMPLES - len(examples)])

    def merge(self, other: "Problems") -> None:
        """Add the bad documents of a later chunk."""
        for reason, places in other.examples.items():
            self.add(reason, *places, count=other.counts[reason])

    def first(self) -> tuple[str, str] | None:
        """Return the place and the reason of the first bad document, or None."""
        # Dictionaries keep the order in which reasons were added.
        for reason, places in self.examples.items():
            return places[0], reason
        return None

    def report(self) -> Iterator[str]:
        """Yield one sentence per reason: the number of documents and the places of the first."""
        for reason, count in self.counts.most_common():
            places = ", ".join(self.examples[reason])
            if count > len(self.examples[reason]):
                places += ", ..."
            yield f"skipped {count:,}: {reason} ({places})"


def find_inputs(patterns: list[str], hub_options: argparse.Namespace) -> list[str]:
    """Return the files that match paths and glob patterns, in the order of `patterns`.

    The files of a pattern are sorted by name. A pattern `hub:NAME` stands for the files of a
    dataset of the Hub, chosen by the options of `hub.add_options`. Duplicates are skipped. Raises
    FileError if a pattern matches no file or a file has an unknown format.
    """
    if not any(pattern.startswith(hub.PREFIX) for pattern in patterns):
        hub.refuse_options(hub_options)
    # Keyed by the real path, so that a file is read once even if links lead to it.
    files = {}
    for pattern in patterns:
        if pattern.startswith(hub.PREFIX):
            matches = hub.find_files(pattern.removeprefix(hub.PREFIX), hub_options)
        else:
            matches = _matching_files(pattern)
        for path in matches:
            identity = path if hub.is_remote(path) else os.path.realpath(path)
            files.setdefault(identity, path)
    for path in files.values():
        if not is_text_file(path):
            raise FileError(
                path,
                "has an unknown format",
                "convert it to .jsonl, .parquet or .txt; if it has one of these formats, rename it",
            )
    return list(files.values())


def _matching_files(pattern: str) -> list[str]:
    """Return the files that match a path or glob pattern, sorted by name.

    Raises FileError if there are none.
    """
    matches = [pattern]
    # An existing file is taken as it is, even if its name contains wildcards.
    if not os.path.exists(pattern):
        matches = sorted(glob.glob(pattern, recursive=True))
    matches = [match for match in matches if not os.path.isdir(match)]
    if not matches:
        fix = "check the path"
        if os.path.isdir(pattern):
            fix = f"try '{pattern}/*.jsonl', or {hub.PREFIX}{pattern} if it is a dataset of the Hub"
        raise FileError(pattern, "matches no file (--input)", fix)
    return matches


def add_text_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose the input and its documents."""
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="GLOB",
        help="files, quoted patterns (** matches any depth), or hub:NAME",
    )
    add(
        "--text-key",
        type=str,
        default="text",
        help="key or column of a document's text (default: %(default)s)",
    )
    add(
        "--max-documents",
        type=command_line.whole_number,
        metavar="N",
        help="use only the first N documents (default: all)",
    )
    document_bytes_option(parser)
    hub.add_options(parser)


def document_bytes_option(parser: argparse.ArgumentParser) -> None:
    """Add --max-document-bytes, which limits the memory to tokenize a document."""
    parser.add_argument(
        "--max-document-bytes",
        type=command_line.whole_number,
        default=DOCUMENT_BYTES,
        metavar="N",
        help="maximum size of a document (a decompressed JSON line, row or .txt file) in bytes; a"
        " larger one is an error or is skipped, like one that cannot be read. Tokenizing a document"
        " takes up to 150 times its size in memory (default: %(default)s)",
    )


def parse_chunk(
    chunk: Chunk, text_key: str, keep_empty: bool = False
) -> tuple[list[str], list[int], Problems]:
    """Return the texts of a chunk, their line or row numbers, and the bad documents.

    An empty text is bad unless `keep_empty` is true. Blank lines are skipped.
    """
    problems = Problems()
    texts = []
    numbers = []
    for number, raw in _documents(chunk):
        try:
            text = _parse_text(raw, text_key, chunk)
            if not text and not keep_empty:
                raise ValueError("empty text")
        except ValueError as error:
            problems.add(str(error), chunk.place(number))
        else:
            texts.append(text)
            numbers.append(number)
    return texts, numbers, problems


def check_text_keys(paths: list[str], text_key: str, option: str = "--text-key") -> None:
    """Raise FileError if a file has no text under `text_key`.

    Checks the first line of a JSON file, and the columns of a parquet file. The message lists the
    existing keys, and names `option`, which sets the key. Of files that would be streamed, only the
    first is checked, since opening thousands of them over the network takes minutes. Files that can
    be read only once, such as pipes, are not checked.
    """
    has_streamed = False
    for path in paths:
        local = hub.local_path(path)
        if local is None:
            is_checked = not has_streamed
            has_streamed = True
        else:
            is_checked = os.path.isfile(local)
        if is_checked:
            _check_text_key(path, text_key, option)


def _check_text_key(path: str, text_key: str, option: str) -> None:
    """Raise FileError if a file has no text under `text_key`, the value of `option`.

    A file that cannot be read or parsed is left to the caller, who reports its bad documents.
    """
    chunk = next(iter(read_chunks([path], text_key, chunk_bytes=1 << 16)), None)
    if isinstance(chunk, UnreadableFile) and chunk.columns:
        raise FileError(chunk.subject, chunk.problem, _how_to_choose_text(chunk.columns, option))
    # Plain text has no keys.
    if not isinstance(chunk, Chunk) or chunk.unit != "line":
        return
    # If all lines are blank, b"" takes the place of the first one. It is no JSON object.
    number, line = next(_documents(chunk), (0, b""))
    record = None
    with contextlib.suppress(ValueError):
        record = parse_json(line)
    if not isinstance(record, dict):
        return
    fix = _how_to_choose_text(list(record), option)
    if text_key not in record:
        raise FileError(
            chunk.place(number), f"has no key {text_key!r}, only {list(record)[:_KEYS_SHOWN]}", fix
        )
    if isinstance(record[text_key], list):
        raise FileError(chunk.place(number), f"has a list under {text_key!r} instead of text", fix)


def _how_to_choose_text(keys: Sequence[str], option: str) -> str:
    """Return the advice for a record or a table with these keys, which has no text."""
    fix = f"choose another text key with {option}"
    for key in _CHAT_KEYS:
        if key in keys:
            return (
                f"turn the chats in {key!r} into text first, with a chat template (see Chats in"
                f" docs/data.md), or {fix}"
            )
    return fix


def read_texts(
    paths: list[str],
    text_key: str,
    keep_empty: bool = False,
    document_bytes: int = DOCUMENT_BYTES,
    option: str = "--text-key",
) -> Iterator[tuple[str, int]]:
    """Yield the text of each document and the number of input bytes read so far.

    Raises FileError at the first bad document; the message names `option`, which sets `text_key`.
    A document of more than `document_bytes` is bad. So is an empty text, unless `keep_empty` is
    true.
    """
    check_text_keys(paths, text_key, option)
    for chunk in read_chunks(paths, text_key, chunk_bytes=1 << 18, document_bytes=document_bytes):
        if isinstance(chunk, UnreadableFile):
            raise chunk
        texts, _, problems = parse_chunk(chunk, text_key, keep_empty)
        bad = problems.first()
        if bad is not None:
            place, reason = bad
            raise FileError(
                place,
                f"cannot be used: {reason}",
                f"repair, split or remove it, or choose another text key with {option}",
            )
        for text in texts:
            yield text, chunk.bytes_read


def _documents(chunk: Chunk) -> Iterator[tuple[int, bytes | None]]:
    """Yield the number and the raw content of each line that is not blank, or of each row.

    The content of a row is None if it is null.
    """
    for number, raw in enumerate(chunk.documents, start=chunk.first_number):
        if chunk.unit != "line" or raw.strip():
            yield number, raw


def parse_json(line: bytes) -> Any:
    """Parse a JSON line. Raises ValueError with the reason, by which bad documents are counted."""
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:  # a ValueError, too
        reason = "invalid UTF-8"
    except ValueError:
        reason = "invalid JSON"
    except RecursionError:
        reason = "JSON nested too deeply"
    raise ValueError(reason)


def _parse_text(raw: bytes | None, text_key: str, chunk: Chunk) -> str:
    """Return the text of a JSON line, or of the raw text of a parquet row or a text file.

    Raises ValueError with the reason why the document is bad.
    """
    if raw is None:
        raise ValueError("no text (null)")
    if len(raw) > chunk.document_bytes:
        raise ValueError(too_large_reason(chunk.document_bytes))
    if chunk.unit != "line":
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError("invalid UTF-8") from None

    record = parse_json(raw)
    if not isinstance(record, dict):
        raise ValueError("not a JSON object; each line must be one")
    if text_key not in record:
        raise ValueError(f"no key {text_key!r}")
    text = record[text_key]
    if not isinstance(text, str):
        raise ValueError(f"the value of {text_key!r} is not a string")
    # JSON can escape half of a surrogate pair, such as "\ud800".
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(LONE_SURROGATE) from None
    return text
