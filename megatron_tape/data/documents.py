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
    NoTextColumn,
    TooLarge,
    UnreadableFile,
    is_text_file,
    read_chunks,
    text_format,
)
from megatron_tape.errors import FileError

FORMATS = """input formats, by the ending of the file's name:
  .jsonl .json   JSON lines: one object per line, its text under --text-key; blank lines are skipped
  .parquet       one document per row, its text in the column --text-key
  .txt           plain UTF-8 text: the whole file is one document
.jsonl, .json and .txt may be compressed, with .gz or .zst appended. A file that is given twice, even through a link,
is read once.
  hub:NAME       a dataset of the Hugging Face Hub, or a local directory in its layout: the .parquet or .jsonl files of
                 its --split"""

_EXAMPLES = 3
_KEYS_SHOWN = 10
_CHAT_KEYS = ("messages", "conversations", "conversation")
_EMPTY = "empty text"
LONE_SURROGATE = "a lone surrogate, which UTF-8 cannot encode"


@dataclass
class Problems:
    """Number of bad documents by reason, and the places of the first few."""

    counts: Counter = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    """The first places by reason, at most three each."""

    def add(self, reason: str, *places: str, count: int = 1) -> None:
        self.counts[reason] += count
        examples = self.examples.setdefault(reason, [])
        examples.extend(places[: _EXAMPLES - len(examples)])

    def merge(self, other: "Problems") -> None:
        """Add the bad documents of a later chunk."""
        for reason, places in other.examples.items():
            self.add(reason, *places, count=other.counts[reason])

    def first(self) -> tuple[str, str] | None:
        """Return the place and the reason of the first bad document, or None."""
        return next(((places[0], reason) for reason, places in self.examples.items()), None)

    def report(self) -> Iterator[str]:
        """Yield one sentence per reason: how many documents were skipped for it, and where the
        first of them are.
        """
        for reason, count in self.counts.most_common():
            more = ", ..." if count > len(self.examples[reason]) else ""
            yield f"skipped {count:,}: {reason} ({', '.join(self.examples[reason])}{more})"


def find_inputs(patterns: list[str], hub_options: argparse.Namespace) -> list[str]:
    """Return the files that match paths and glob patterns: in the order of `patterns`, and sorted
    by name within each.

    A pattern `hub:NAME` stands for the files of a dataset of the Hub, chosen by the options of
    `hub.add_options`. Duplicates are skipped. Raises FileError if a pattern matches no file or a
    file has an unknown format.
    """
    if not any(pattern.startswith(hub.PREFIX) for pattern in patterns):
        hub.refuse_options(hub_options)
    files: dict[str, str] = {}
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
            fix = (
                "convert it to JSON lines (.jsonl), parquet or text (.txt); if it is one of these,"
                " rename it"
            )
            raise FileError(path, "has an unknown format", fix)
    return list(files.values())


def _matching_files(pattern: str) -> list[str]:
    """Return the files that match a path or glob pattern, sorted by name. Raises FileError if there
    are none.
    """
    if os.path.exists(pattern):
        matches = [pattern]
    else:
        matches = sorted(glob.glob(pattern, recursive=True))
    matches = [match for match in matches if not os.path.isdir(match)]
    if matches:
        return matches
    advice = "check the path"
    if os.path.isdir(pattern):
        example = next(
            (name for name in sorted(os.listdir(pattern)) if is_text_file(name)), "a.jsonl"
        )
        ending = example[example.rindex(text_format(example)) :]
        advice = (
            f"try '{os.path.join(pattern, '*')}{ending}', or {hub.PREFIX}{pattern} if it is a"
            " dataset of the Hub"
        )
    raise FileError(pattern, "matches no file (--input)", advice)


def document_bytes_option(parser: argparse.ArgumentParser) -> None:
    """Add the option --max-document-bytes, which limits the size of a document and thus the memory
    to tokenize it.
    """
    parser.add_argument(
        "--max-document-bytes",
        type=command_line.whole_number,
        default=DOCUMENT_BYTES,
        metavar="N",
        help=(
            "maximum size of a document (a decompressed JSON line, row or .txt file) in bytes; a"
            " larger one is an error or is skipped, like one that cannot be read. Tokenizing a"
            " document takes up to 150 times its size in memory (default: %(default)s)"
        ),
    )


def parse_chunk(
    chunk: Chunk, text_key: str, keep_empty: bool = False
) -> tuple[list[str], list[int], Problems]:
    """Return the texts of a chunk, their line or row numbers, and the problems of its bad
    documents.

    An empty text is bad unless `keep_empty` is true. Blank lines are skipped.
    """
    problems = Problems()
    texts = []
    numbers = []
    is_json = isinstance(chunk.payload, bytes)
    documents: Any = _split_lines(chunk.payload) if is_json else chunk.payload
    for number, raw in enumerate(documents, start=chunk.first):
        if is_json and not raw.strip():
            continue
        text, reason = _parse_line(raw, text_key) if is_json else _parse_text(raw)
        if reason is None or (keep_empty and reason == _EMPTY):
            texts.append(text)
            numbers.append(number)
        else:
            problems.add(reason, chunk.place(number))
    return texts, numbers, problems


def check_text_keys(paths: list[str], text_key: str, option: str = "--text-key") -> None:
    """Raise FileError if a file has no text under `text_key`. Of files that would be streamed,
    check only the first.

    Opening each of thousands of files over the network takes minutes.
    """
    streamed = [path for path in paths if hub.local_path(path) is None]
    for path in paths:
        if path not in streamed[1:]:
            check_text_key(path, text_key, option)


def check_text_key(path: str, text_key: str, option: str = "--text-key") -> None:
    """Raise FileError if the first line of a JSON file lacks the key `text_key`, or a parquet file
    such a column.

    Also raise it if a JSON file holds an array instead of lines.

    The message lists the existing keys, and names `option`, which sets the key. Files that can be
    read only once, such as pipes, are not checked.
    """
    if not hub.is_remote(path) and not os.path.isfile(path):
        return
    first = next(iter(read_chunks([path], text_key, 1 << 16)), None)
    if isinstance(first, NoTextColumn):
        raise FileError(first.subject, first.problem, _how_to_choose_text(first.columns, option))
    if not isinstance(first, Chunk) or not isinstance(first.payload, bytes):
        return
    lines = enumerate(_split_lines(first.payload), start=first.first)
    number, line = next(((number, line) for number, line in lines if line.strip()), (0, b""))
    record = None
    with contextlib.suppress(ValueError):
        record = parse_json(line)
    if isinstance(record, list) or line.strip() == b"[":
        fix = f"write one object a line, as `jq -c '.[]' {path}` does"
        raise FileError(first.place(number), "begins a JSON array instead of JSON lines", fix)
    if not isinstance(record, dict):
        return
    problem = None
    if text_key not in record:
        problem = f"has no key {text_key!r}, only {list(record)[:_KEYS_SHOWN]}"
    elif text_key in _CHAT_KEYS and isinstance(record[text_key], list):
        problem = f"has a list under {text_key!r} instead of text"
    if problem is not None:
        raise FileError(first.place(number), problem, _how_to_choose_text(list(record), option))


def _how_to_choose_text(keys: Sequence[str], option: str) -> str:
    """Return the advice for a record with these keys, or a table with these columns, which has no
    text.
    """
    fix = f"choose another text key with {option}"
    chat = next((key for key in _CHAT_KEYS if key in keys), None)
    if chat is None:
        return fix
    return (
        f"turn the chats in {chat!r} into text first, with a chat template (see Chats in"
        f" docs/data.md), or {fix}"
    )


def read_texts(
    paths: list[str],
    text_key: str,
    keep_empty: bool = False,
    document_bytes: int = DOCUMENT_BYTES,
    option: str = "--text-key",
) -> Iterator[tuple[str, int]]:
    """Yield the text of each document and the number of input bytes read so far.

    Raises FileError at the first bad document; the message names `option`, which sets `text_key`.

    A text is bad if it has more than `document_bytes`, or if it is empty and `keep_empty` is false.
    """
    check_text_keys(paths, text_key, option)
    for chunk in read_chunks(paths, text_key, 1 << 18, document_bytes):
        if isinstance(chunk, UnreadableFile):
            raise chunk
        texts, _, problems = parse_chunk(chunk, text_key, keep_empty)
        if bad := problems.first():
            fix = f"repair, split or remove it, or choose another text key with {option}"
            raise FileError(bad[0], f"cannot be used: {bad[1]}", fix)
        for text in texts:
            yield text, chunk.position


def _split_lines(payload: bytes) -> list[bytes]:
    lines = payload.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return lines


def parse_json(line: bytes) -> Any:
    """Parse a JSON line. Raises ValueError with the reason."""
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        reason = "invalid UTF-8"
    except ValueError:
        reason = "invalid JSON"
    except RecursionError:
        reason = "JSON nested too deeply"
    raise ValueError(reason)


def _parse_line(line: bytes, text_key: str) -> tuple[str, str | None]:
    """Return the text of a JSON line and None, or an empty text and the reason why the line is
    bad.
    """
    try:
        record = parse_json(line)
    except ValueError as error:
        return "", str(error)
    if not isinstance(record, dict):
        return "", "not a JSON object"
    if text_key not in record:
        return "", f"no key {text_key!r}"
    text = record[text_key]
    if not isinstance(text, str):
        return "", f"the value of {text_key!r} is not a string"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return "", LONE_SURROGATE
    if text:
        return (text, None)
    return ("", _EMPTY)


def _parse_text(raw: bytes | None | TooLarge) -> tuple[str, str | None]:
    """Like `_parse_line`, for the raw text of a parquet row or a text file."""
    if raw is None:
        return "", "no text (null)"
    if isinstance(raw, TooLarge):
        return "", str(raw)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return "", "invalid UTF-8"
    if text:
        return (text, None)
    return ("", _EMPTY)
