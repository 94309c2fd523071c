"""Read examples, pairs of an input and a target text, from JSON lines, and encode them as ids.

Training and evaluation truncate them in the same way to fit a model's context. Does not import
torch.
"""

import functools
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_tape.config.data import INPUT
from megatron_tape.config.schema import RunConfig
from megatron_tape.data.documents import parse_json
from megatron_tape.data.hub import text_format
from megatron_tape.data.raw_chunks import (
    DOCUMENT_BYTES,
    UnreadableFile,
    read_chunks,
    split_lines,
    too_large_reason,
)
from megatron_tape.data.tokenizer import Tokenizer
from megatron_tape.errors import ConfigError, FileError, UserError

_CHUNK = 1 << 22
"""Bytes of a file that are read at a time."""
_CHARACTERS_PER_TOKEN = 8
"""More characters than most tokens have."""


@dataclass(frozen=True)
class Example:
    """An input text and a target text, from one line of a file."""

    place: str
    """File and line, such as `train.jsonl:12`, for messages."""
    key: str | None
    """The line's `id`, or None. Lines with the same id are one example with several targets."""
    input: str
    target: str


def read_examples(path: str, split: str) -> Iterator[Example]:
    """Yield the examples of a JSON-lines file, or of the split `split` of a SCROLLS zip.

    Each line has `input`, either `output` or `target`, and optionally `id`. Blank lines are
    skipped. Raises FileError with the file and the line if one is invalid.
    """
    try:
        lines = _zipped_lines(path, split) if zipfile.is_zipfile(path) else _lines(path)
        for place, line in lines:
            if len(line) > DOCUMENT_BYTES:
                raise FileError(
                    place, f"has {too_large_reason(DOCUMENT_BYTES)}", "shorten or remove it"
                )
            if line.strip():
                yield parse_example(place, line)
    except (UserError, MemoryError):
        raise
    # zipfile and its decompressors raise a dozen kinds of errors for damaged archives.
    except Exception as error:
        raise FileError(
            path, f"cannot be read ({error})", "download it again, or choose another file"
        ) from None


def _lines(path: str) -> Iterator[tuple[str, bytes]]:
    """Yield the place, such as `train.jsonl:12`, and the content of each line of a file."""
    if text_format(path) not in (".jsonl", ".json"):
        raise UnreadableFile(
            path,
            "has an unknown format",
            "choose a .jsonl or .json file, which may be compressed, or a zip of SCROLLS",
        )
    # `read_chunks` uses `text_key` only for parquet files.
    for chunk in read_chunks([path], text_key="", chunk_bytes=_CHUNK):
        if isinstance(chunk, UnreadableFile):
            raise chunk
        for number, line in enumerate(chunk.documents, start=chunk.first_number):
            yield chunk.place(number), line


def _zipped_lines(path: str, split: str) -> Iterator[tuple[str, bytes]]:
    """Yield the place and the content of each line of the file SPLIT.jsonl in a zip."""
    with zipfile.ZipFile(path) as archive:
        # macOS adds a folder with metadata files of the same names.
        names = [
            name
            for name in archive.namelist()
            if Path(name).name == f"{split}.jsonl" and "__MACOSX" not in name
        ]
        if len(names) != 1:
            raise UnreadableFile(
                path,
                f"is a zip with {len(names)} files called {split}.jsonl instead of one",
                "choose another split",
            )
        with archive.open(names[0]) as file:
            blocks = iter(functools.partial(file.read, _CHUNK), b"")
            for number, line in enumerate(split_lines(blocks, DOCUMENT_BYTES), start=1):
                yield f"{path}/{names[0]}:{number}", line


def parse_example(place: str, line: bytes) -> Example:
    """Parse a JSON line as an example.

    Raises FileError with `place`, its file and line, if it is invalid.
    """
    fix = "repair or remove it"
    try:
        record = parse_json(line)
    except ValueError as error:
        raise FileError(place, f"cannot be used: {error}", fix) from None
    if not isinstance(record, dict):
        raise FileError(place, "is not a JSON object", fix)

    target_key = "target" if "target" in record else "output"
    for key in ("input", target_key):
        text: Any = record.get(key)
        if not isinstance(text, str):
            raise FileError(
                place,
                f"has no text under the key {key}",
                "choose a file with input, and output or target, in every line (SCROLLS' test split"
                " has no targets)",
            )
        try:
            text.encode()
        except UnicodeEncodeError:
            raise FileError(place, f"has a lone surrogate in its {key}", fix) from None
    identity = record.get("id")
    if identity is not None:
        identity = str(identity)
    return Example(place, identity, record["input"], record[target_key])


@dataclass(frozen=True)
class EncodedExample:
    """An example as token ids."""

    prompt: list[int]
    target: list[int]
    input_truncated: bool
    """Whether the end of the input was cut off."""
    target_truncated: bool


class ExampleEncoder:
    """Encode examples as a prompt and a target.

    A target has at most `target_tokens` tokens, and a prompt at most `length` - `target_tokens`.

    The prompt is the template, with the input in place of `{input}`. An input that is too long is
    cut off at the end, as in SCROLLS' own baselines, because its question comes first.
    """

    def __init__(
        self,
        encode: Callable[[str], Sequence[int]],
        bos: Sequence[int],
        template: str,
        length: int,
        target_tokens: int,
    ):
        """Encode the template.

        `encode` returns the ids of a text, and must add no special tokens. `bos` are the ids that
        precede every prompt. `length` is the context in tokens. Raises ConfigError if the template
        and a target leave no room for an input.
        """
        before, _, self._after_text = template.partition(INPUT)
        self._encode = encode
        self._target_tokens = target_tokens
        # The ids of the template before and after the input.
        self._before = [*bos, *encode(before)]
        self._after = list(encode(self._after_text))
        template_tokens = len(self._before) + len(self._after)
        self._max_input_tokens = length - target_tokens - template_tokens
        if self._max_input_tokens < 1:
            raise ConfigError(
                ("target_tokens", "template"),
                f"is {target_tokens}; together with {template_tokens} tokens of the template, this"
                f" leaves no room for an input in the context of {length} tokens",
                "lower target_tokens, shorten the template, or use a longer context",
            )

    def __call__(self, input: str, target: str) -> EncodedExample:
        """Return the token ids of an example's prompt and target."""
        input_ids, input_truncated = first_tokens(self._encode, input, self._max_input_tokens)
        # Encode the target together with the template's end, because tokens depend on the text
        # before them. Then drop as many ids as the end alone has.
        separator = " " if self._after_text else ""
        end_with_target = self._encode(f"{self._after_text}{separator}{target.strip()}")
        target_ids = list(end_with_target[len(self._after) :])
        kept = target_ids[: self._target_tokens]
        prompt = [*self._before, *input_ids, *self._after]
        target_truncated = len(kept) < len(target_ids)
        return EncodedExample(prompt, kept, input_truncated, target_truncated)


def example_encoder(config: RunConfig, tokenizer: Tokenizer) -> ExampleEncoder:
    """Return the encoder for `data.examples`.

    The caller must append the end-of-document token to targets that are not truncated. Raises
    ConfigError if the tokenizer lacks a required token, or the context has no room for an input.
    """
    settings = config.data.examples
    path = config.data.tokenizer
    if tokenizer.eod is None:
        raise ConfigError(
            ("data.tokenizer", "data.examples"),
            f"is {path}, which has no end-of-document token to append to the targets of"
            " data.examples",
            "choose a tokenizer that has one",
        )
    if settings.bos and tokenizer.bos is None:
        raise ConfigError(
            ("data.examples.bos", "data.tokenizer"),
            f"is true, but data.tokenizer {path} has no beginning-of-sequence token",
            "set data.examples.bos to false, or choose another tokenizer",
        )
    bos = [tokenizer.bos] if settings.bos else []
    return ExampleEncoder(
        tokenizer.encode, bos, settings.template, config.model.seq_length, settings.target_tokens
    )


def first_tokens(
    encode: Callable[[str], Sequence[int]], text: str, count: int
) -> tuple[list[int], bool]:
    """Return the first `count` token ids of a text, and whether it has more.

    Does not encode all of a long text.
    """
    characters = count * _CHARACTERS_PER_TOKEN
    while True:
        ids = encode(text[:characters])
        # The last tokens before the cut may differ from those of the whole text, so there must be a
        # few more than are returned. The constant also serves as this number.
        is_whole = characters >= len(text)
        if len(ids) > count + _CHARACTERS_PER_TOKEN or is_whole:
            return list(ids[:count]), len(ids) > count or not is_whole
        characters *= 2
