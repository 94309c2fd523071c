"""Read documents for tasks that measure losses: from texts, indexed datasets and raw files of token
ids.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megatron_tape import command_line
from megatron_tape.config.data import split_shares
from megatron_tape.config.evaluation import TextSettings
from megatron_tape.config.values import format_value
from megatron_tape.data.documents import read_texts
from megatron_tape.data.indexed_dataset import IndexedDatasetReader, dataset_paths, first_invalid_id
from megatron_tape.data.origins import checked_origins, unknown_tokenizers
from megatron_tape.data.raw_chunks import is_text_file
from megatron_tape.errors import ConfigError, FileError
from megatron_tape.evaluation.task import EvaluatedModel, ModelInfo

TEXT_BYTES = 1_000_000_000
"""Maximum size in bytes of a document (a JSON line, a row or a text file), which is the size of
enwik9.
"""


@dataclass(frozen=True)
class TextSource:
    """A file or dataset that the setting `data` names."""

    name: str
    path: str
    kind: Literal["text", "indexed", "raw"]
    settings: TextSettings
    section: str
    """The section of the settings."""

    @property
    def files(self) -> list[Path]:
        """The files of the source: one, or those of an indexed dataset."""
        if self.kind == "indexed":
            return list(dataset_paths(self.path))
        return [Path(self.path)]


@dataclass(frozen=True)
class Document:
    """The tokens (N,) of a document, without a beginning-of-text token."""

    key: str
    """`SOURCE/NUMBER`: the name of the source, and the index of the document in it."""
    tokens: np.ndarray
    is_text: bool
    """Whether it was read as text, so that its size in bytes is known."""


def find_sources(settings: Any, section: str) -> list[TextSource]:
    """Return the sources that `data` names in `settings`, a `TextSettings` with `data`.

    Raises ConfigError for a missing file, an unknown format or an invalid split.
    """
    data = settings.data
    if isinstance(data, str):
        # The name of the only source is that of its file without suffixes, such as `books` for
        # books.jsonl.gz.
        data = {Path(data).name.split(".")[0]: data}
    if not data:
        raise ConfigError(f"{section}.data", "is empty", "give a path, or {NAME: path}")

    text_sources = [_find_source(name, path, settings, section) for name, path in data.items()]
    if settings.split is not None:
        _check_split(settings.split, text_sources, f"{section}.split")
    return text_sources


def _find_source(name: str, path: str, settings: TextSettings, section: str) -> TextSource:
    """Return the source at a path; its kind follows from the files there. Raises ConfigError."""
    key = f"{section}.data"
    # A name must not contain a slash, which separates the parts of a unit's key.
    if not name or "/" in name:
        raise ConfigError(
            key,
            f"has the name {format_value(name)}",
            "give {NAME: path} with a name that has no slash",
        )

    # A file of an indexed dataset stands for the dataset.
    prefix = path.removesuffix(".bin").removesuffix(".idx")
    if Path(f"{prefix}.idx").is_file():
        return TextSource(name, prefix, "indexed", settings, section)
    if not Path(path).is_file():
        raise ConfigError(
            key,
            f"is {format_value(path)}, but there is no such file or indexed dataset",
            "correct the path",
        )
    if path.endswith(".bin"):
        return TextSource(name, path, "raw", settings, section)
    if is_text_file(path):
        return TextSource(name, path, "text", settings, section)
    raise ConfigError(
        key,
        f"is {path}, whose format is unknown",
        "give .jsonl, .json, .txt (also .gz, .zst), .parquet, a .bin of token ids, or the prefix of"
        " an indexed dataset",
    )


def _check_split(split: str, text_sources: list[TextSource], key: str) -> None:
    """Raise ConfigError for a split without validation documents, or of files without an index."""
    try:
        validation = split_shares(split)[1]
    except ConfigError as error:
        raise ConfigError(key, error.problem, error.fix) from None
    if validation == 0:
        raise ConfigError(
            key, f"is {split!r}, which has no validation documents", "raise its second number"
        )
    for text_source in text_sources:
        if text_source.kind != "indexed":
            raise ConfigError(
                key,
                f"is {split!r}, but {text_source.path} is not an indexed dataset",
                "remove split",
            )


def check_sources(
    text_sources: Sequence[TextSource], info: ModelInfo, minimum: int, most: int | None
) -> None:
    """Raise UserError, with file and line, if documents that `long_documents` would read are
    invalid.

    Texts are not tokenized: a text file is refused if its longest document has too few bytes for
    `minimum` tokens.
    """
    tokenized = [text_source.path for text_source in text_sources if text_source.kind != "text"]
    # Datasets record the tokenizer that encoded them, which must be the model's. `origins` are
    # these records by path, None for a dataset without one.
    if info.tokenizer is not None:
        origins = checked_origins(tokenized, info.tokenizer, f"that of {info.label}")
        if warning := unknown_tokenizers(origins, f"that of {info.label}"):
            command_line.log(warning)
    elif tokenized:
        command_line.log(
            f"warning: {info.label} has no tokenizer to compare with that of {tokenized[0]}"
        )

    for text_source in text_sources:
        if text_source.kind != "text":
            documents = _token_documents(text_source, info)
            # The documents are not used here; this call raises the errors of `long_documents`.
            _select(text_source, documents, minimum, most, info)
        elif not info.has_tokenizer:
            raise ConfigError(
                f"{text_source.section}.data",
                f"is the text file {text_source.path}, but {info.label} has no tokenizer",
                "give token ids, as an indexed dataset or a .bin",
            )
        else:
            # A token has at least one byte.
            sizes = (len(text.encode()) for text in _texts(text_source))
            longest = max(sizes, default=0)
            # Plus one, since a tokenizer may add a token before the text.
            if longest + 1 < minimum:
                raise _too_short(text_source, minimum, f"{longest:,} bytes")


def long_documents(
    text_source: TextSource, model: EvaluatedModel, minimum: int, most: int | None
) -> tuple[list[Document], int]:
    """Return the first `most` documents of at least `minimum` tokens, and the number of skipped,
    shorter documents.

    `most` is None for all of them. Raises UserError if no document is long enough, or if the data
    is invalid.
    """
    documents: Iterator[np.ndarray]
    if text_source.kind == "text":
        documents = (np.asarray(model.encode(text), np.int64) for text in _texts(text_source))
    else:
        documents = _token_documents(text_source, model.info)
    return _select(text_source, documents, minimum, most, model.info)


def _select(
    text_source: TextSource,
    documents: Iterable[np.ndarray],
    minimum: int,
    most: int | None,
    info: ModelInfo,
) -> tuple[list[Document], int]:
    """Return the first `most` documents of at least `minimum` tokens, and the number of skipped,
    shorter documents, given the token ids (N,) of each document of a source.

    Raises the errors of `long_documents`.
    """
    is_text = text_source.kind == "text"
    long = []
    # The numbers of tokens of skipped documents, after a 0 for `max`, as none may be skipped.
    short_sizes = [0]
    for number, tokens in enumerate(documents):
        if len(tokens) < minimum:
            short_sizes.append(len(tokens))
            continue
        invalid_index = first_invalid_id(tokens, info.vocab_size)
        if invalid_index is not None:
            raise FileError(
                text_source.path,
                f"cannot be used: token {invalid_index} of document {number} is"
                f" {tokens[invalid_index]}, outside the model's vocabulary of {info.vocab_size:,}",
                "give data that the model's tokenizer encoded",
            )
        long.append(Document(f"{text_source.name}/{number}", tokens, is_text))
        if len(long) == most:
            break
    if not long:
        raise _too_short(text_source, minimum, f"{max(short_sizes):,} tokens")
    return long, len(short_sizes) - 1


def _too_short(text_source: TextSource, minimum: int, longest: str) -> FileError:
    """Return the error that no document is long enough; `longest` is the size of the longest."""
    return FileError(
        text_source.path,
        f"has no document of the {minimum:,} tokens that lengths need: the longest has {longest}",
        "shorten them, or give longer documents",
    )


def _texts(text_source: TextSource) -> Iterator[str]:
    """Yield the documents of a source of texts. Raises FileError for an invalid line."""
    texts = read_texts(
        [text_source.path],
        text_source.settings.text_key,
        keep_empty=True,  # they are skipped later, as too short
        document_bytes=TEXT_BYTES,
        option=f"--{text_source.section}.text_key",
    )
    for text, _ in texts:
        yield text


def _token_documents(text_source: TextSource, info: ModelInfo) -> Iterator[np.ndarray]:
    """Yield documents of token ids. Raises FileError for a damaged file."""
    if text_source.kind == "raw":
        yield _raw_tokens(text_source, info)
        return
    path = text_source.path
    try:
        dataset = IndexedDatasetReader(path)
        problem = dataset.damage()
    except (ValueError, OSError) as error:
        raise FileError(path, f"cannot be read: {error}") from None
    if problem is not None:
        raise FileError(path, f"is damaged: {problem}", "write it again")

    # `train` and `validation` are shares of the documents. Without a split, all documents are read.
    # With one, those after the training documents are read: the validation documents.
    train = 0.0
    validation = 1.0
    if text_source.settings.split is not None:
        train, validation, _ = split_shares(text_source.settings.split)
    start = round(train * len(dataset))
    stop = round((train + validation) * len(dataset))
    for index in range(start, stop):
        yield dataset.document(index)


def _raw_tokens(text_source: TextSource, info: ModelInfo) -> np.ndarray:
    """Return the token ids (N,) of a file without an index. Raises UserError if `token_dtype` has
    fewer values than the model has token ids, or cannot be that of the file.
    """
    path = text_source.path
    key = f"{text_source.section}.token_dtype"
    # Such files are little-endian.
    dtype = np.dtype(text_source.settings.token_dtype).newbyteorder("<")
    possible_ids = np.iinfo(dtype).max + 1
    if possible_ids < info.vocab_size:
        raise ConfigError(
            key,
            f"is {dtype.name}, which has {possible_ids:,} values, but {info.label} has"
            f" {info.vocab_size:,} token ids",
            f"set it to uint32 if {path} was written so; otherwise give its texts or an indexed"
            " dataset",
        )

    size = Path(path).stat().st_size
    if size == 0 or size % dtype.itemsize:
        raise FileError(
            path,
            f"has {size:,} bytes, but {dtype.name} ids take a multiple of {dtype.itemsize} above 0",
            f"copy it again, or correct {key}",
        )

    # The file is mapped, not read, as it may be larger than the memory.
    tokens = np.memmap(path, dtype, "r")
    # If ids below 65,536 were written as uint32, their upper halves, which uint16 reads as every
    # second value, are 0.
    if dtype.itemsize == 2 and len(tokens) % 2 == 0 and not tokens[1::2].any():
        raise FileError(
            path,
            "cannot be read as uint16: every second value is 0, as in a file of uint32 ids",
            f"set {key} to uint32",
        )
    return tokens
