"""Read documents for tasks that measure losses: from texts, indexed datasets and raw files of token
ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from megatron_tape import command_line
from megatron_tape.config.data import split_shares
from megatron_tape.config.evaluation import TokenDtype
from megatron_tape.config.values import format_value
from megatron_tape.data.documents import read_texts
from megatron_tape.data.indexed_dataset import IndexedDatasetReader, dataset_paths, first_invalid_id
from megatron_tape.data.origins import check_tokenizer, unknown_tokenizers
from megatron_tape.data.raw_chunks import is_text_file
from megatron_tape.errors import ConfigError, FileError
from megatron_tape.evaluation.task import EvaluatedModel, ModelInfo

TEXT_BYTES = 1_000_000_000
"""Maximum size in bytes of a document (a JSON line, a row or a text file), which is the size of
enwik9.
"""
LEARNED_POSITIONS = ("gpt2", "gpt_neo", "gpt_bigcode", "opt", "biogpt", "openai-gpt")
"""Values of `model_type` in config.json for models that cannot read more tokens than their trained
length.
"""

_NEED = "lengths need"
_LONGER = "shorten them, or give longer documents"


@dataclass(frozen=True)
class TextSource:
    """A file or dataset that the setting `data` names."""

    name: str
    path: str
    kind: Literal["text", "indexed", "raw"]
    section: str
    """The section of the task's settings."""
    token_dtype: TokenDtype
    """Type of the token ids if `kind` is `raw`."""
    split: str | None = None
    """Fractions for training, validation and test; only validation documents are used. None means
    all documents.
    """

    @property
    def files(self) -> list[Path]:
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


def find_sources(
    data: dict[str, str] | str, split: str | None, token_dtype: TokenDtype, section: str
) -> list[TextSource]:
    """Return the sources that a task's `data` names. Raises ConfigError for a missing file or an
    unknown format.
    """
    key = f"{section}.data"
    if isinstance(data, str):
        named = {Path(data).name.split(".")[0]: data}
    else:
        named = data
    if not named:
        raise ConfigError(key, "is empty", "give a path, or {NAME: path}")
    sources = [_find_source(name, path, token_dtype, section) for name, path in named.items()]
    if split is None:
        return sources
    key = f"{section}.split"
    try:
        validation = split_shares(split)[1]
    except ConfigError as error:
        raise ConfigError(key, error.problem, error.fix) from None
    if validation == 0:
        raise ConfigError(
            key, f"is {split!r}, which has no validation documents", "raise its second number"
        )
    others = [source.path for source in sources if source.kind != "indexed"]
    if bool(others):
        raise ConfigError(
            key,
            f"is {split!r}, but {others and others[0]} is not an indexed dataset",
            "remove split",
        )
    return [replace(source, split=split) for source in sources]


def _find_source(name: str, path: str, token_dtype: TokenDtype, section: str) -> TextSource:
    key = f"{section}.data"
    if not name or "/" in name:
        raise ConfigError(
            key,
            f"has the name {format_value(name)}",
            "give {NAME: path} with a name that has no slash",
        )
    if Path(f"{path}.idx").is_file():
        return TextSource(name, path, "indexed", section, token_dtype)
    missing = not Path(path).is_file()
    if missing:
        raise ConfigError(
            key,
            f"is {format_value(path)}, but there is no such file or indexed dataset",
            "correct the path",
        )
    prefix = path.removesuffix(".bin").removesuffix(".idx")
    if Path(f"{prefix}.idx").is_file():
        raise ConfigError(
            key,
            f"is {path}, a file of the indexed dataset {prefix}",
            f"give {prefix}, without the suffix",
        )
    formats = (
        ".jsonl, .json, .txt (also .gz, .zst), .parquet, a .bin of token ids, or the prefix of an"
        " indexed dataset"
    )
    is_raw = path.endswith(".bin")
    if not is_raw and not is_text_file(path):
        raise ConfigError(key, f"is {path}, whose format is unknown", f"give {formats}")
    return TextSource(name, path, "raw" if is_raw else "text", section, token_dtype)


def check_sources(
    sources: Sequence[TextSource], info: ModelInfo, text_key: str, minimum: int, most: int | None
) -> None:
    """Raise UserError, with file and line, if documents that `long_documents` would read are
    invalid.

    Texts are not tokenized: a text file is refused if its longest document has too few bytes for
    `minimum` tokens.
    """
    tokenized = [source.path for source in sources if source.kind != "text"]
    if info.tokenizer is not None:
        origins = check_tokenizer(tokenized, info.tokenizer, f"that of {info.label}")
        if warning := unknown_tokenizers(origins, f"that of {info.label}"):
            command_line.log(warning)
    elif tokenized:
        command_line.log(
            f"warning: {info.label} has no tokenizer that can be compared with that of"
            f" {tokenized[0]}"
        )
    for source in sources:
        if source.kind == "text":
            key = f"{source.section}.data"
            problem = f"is the text file {source.path}, but {info.label} has no tokenizer"
            if not info.has_tokenizer:
                raise ConfigError(key, problem, "give token ids, as an indexed dataset or a .bin")
            longest = max((len(text.encode()) for text in _texts(source, text_key)), default=0)
            if not longest:
                raise ConfigError(
                    key, f"is {source.path}, which contains no text", "give another file"
                )
            # A tokenizer may add a token before the text.
            if longest + 1 < minimum:
                problem = (
                    f"has no document of the {minimum:,} tokens that {_NEED}: the longest has"
                    f" {longest:,} bytes"
                )
                raise FileError(source.path, problem, _LONGER)
        else:
            if source.kind == "raw":
                _check_token_dtype(source, info)
            _long_documents(source, _token_documents(source), minimum, most, info.vocab_size)


def long_documents(
    source: TextSource, model: EvaluatedModel, text_key: str, minimum: int, most: int | None
) -> tuple[list[Document], int]:
    """Return the first `most` documents of at least `minimum` tokens, and the number of skipped,
    shorter documents.

    `most` = None returns all. Raises UserError if no document is long enough, or if the data is
    invalid.
    """
    if source.kind == "text":
        documents = (np.asarray(model.encode(text), np.int64) for text in _texts(source, text_key))
    else:
        documents = _token_documents(source)
    return _long_documents(source, documents, minimum, most, model.info.vocab_size)


def _long_documents(
    source: TextSource,
    documents: Iterable[np.ndarray],
    minimum: int,
    most: int | None,
    vocab_size: int,
) -> tuple[list[Document], int]:
    found: list[Document] = []
    longest = 0
    short = 0
    for number, tokens in enumerate(documents):
        if len(tokens) < minimum:
            longest = max(longest, len(tokens))
            short = short + 1
            continue
        _check_ids(source.path, number, tokens, vocab_size)
        found.append(Document(f"{source.name}/{number}", tokens, source.kind == "text"))
        if len(found) == most:
            break
    if not found:
        problem = (
            f"has no document of the {minimum:,} tokens that {_NEED}: the longest of {short:,} has"
            f" {longest:,}"
        )
        raise FileError(source.path, problem, _LONGER)
    return found, short


def _texts(source: TextSource, text_key: str) -> Iterator[str]:
    option = f"--{source.section}.text_key"
    for text, _ in read_texts(
        [source.path], text_key, keep_empty=True, document_bytes=TEXT_BYTES, option=option
    ):
        yield text


def _token_documents(source: TextSource) -> Iterator[np.ndarray]:
    """Yield documents of token ids. Raises FileError for a damaged file."""
    if source.kind == "raw":
        yield _raw_tokens(source)
        return
    try:
        dataset = IndexedDatasetReader(source.path)
        problem = next(dataset.problems(), None)
    except (ValueError, OSError) as error:
        raise FileError(source.path, f"cannot be read: {error}") from None
    if problem is not None:
        raise FileError(source.path, f"is damaged: {problem}", "write it again")
    train, validation, _ = split_shares(source.split) if source.split else (0.0, 1.0, 0.0)
    for index in range(round(train * len(dataset)), round((train + validation) * len(dataset))):
        yield dataset.document(index)


def _check_token_dtype(source: TextSource, info: ModelInfo) -> None:
    """Raise ConfigError if a type has fewer values than the model has token ids."""
    key = f"{source.section}.token_dtype"
    ids = np.iinfo(source.token_dtype).max + 1
    if ids < info.vocab_size:
        raise ConfigError(
            key,
            f"is {source.token_dtype}, which has {ids:,} values, but {info.label} has"
            f" {info.vocab_size:,} token ids",
            f"set it to uint32 if {source.path} was written so; otherwise give its texts or an"
            " indexed dataset",
        )


def _raw_tokens(source: TextSource) -> np.ndarray:
    """Return the token ids (N,) of a file without an index. Raises FileError if it cannot be of
    `token_dtype`.
    """
    key = f"{source.section}.token_dtype"
    dtype = np.dtype(source.token_dtype).newbyteorder("<")
    size = Path(source.path).stat().st_size
    if size == 0 or size % dtype.itemsize:
        problem = (
            f"has {size:,} bytes, but {source.token_dtype} ids take a multiple of {dtype.itemsize}"
            " above 0"
        )
        raise FileError(source.path, problem, f"copy it again, or correct {key}")
    tokens = np.memmap(source.path, dtype, "r")
    # Ids below 65,536 that were written as uint32 have an upper half of 0.
    if source.token_dtype == "uint16" and len(tokens) % 2 == 0 and not tokens[1::2].any():
        problem = "cannot be read as uint16: every second value is 0, as in a file of uint32 ids"
        raise FileError(source.path, problem, f"set {key} to uint32")
    return tokens


def _check_ids(path: str, document: int, tokens: np.ndarray, vocab_size: int) -> None:
    invalid = first_invalid_id(tokens, vocab_size)
    if invalid is not None:
        outside = f"is {tokens[invalid]}, outside the model's vocabulary of {vocab_size:,}"
        problem = f"cannot be used: token {invalid} of document {document} {outside}"
        raise FileError(path, problem, "give data that the model's tokenizer encoded")


def chosen_lengths(lengths: list[int] | None, info: ModelInfo, key: str) -> list[int]:
    """Return the context lengths of the setting `key` in ascending order. Raises ConfigError if
    they are invalid.
    """
    trained = info.trained_length
    if lengths is None:
        unknown = (
            f"is null, but the configuration of {info.label} does not contain the training length"
        )
        if trained is None:
            raise ConfigError(key, unknown, "set it, such as to [1024, 2048]")
        if trained < 8:
            raise ConfigError(
                key,
                f"is null, but {info.label} was trained on {trained} tokens, fewer than 8",
                "set it",
            )
        return [trained // 4, trained // 2, trained]
    good = bool(lengths) and min(lengths) >= 2 and len(set(lengths)) == len(lengths)
    if not good:
        raise ConfigError(
            key,
            f"is {format_value(lengths)}",
            "give one or more numbers of tokens, each at least 2 and only once",
        )
    if info.config.get("model_type") in LEARNED_POSITIONS:
        limit = trained
    else:
        limit = None
    if limit is not None and max(lengths) > limit:
        raise ConfigError(
            key,
            f"has {max(lengths)}, but {info.label} has position embeddings for {limit} tokens only",
            f"remove lengths above {limit}",
        )
    return sorted(lengths)
