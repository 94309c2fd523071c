"""The documents that losses are measured on, from texts, indexed datasets and raw token files, and their scored tokens.

Which tokens of a document are scored depends on the longest context alone, so that they are the same with every shorter
one. Every scored token is the label of one window, and has at least three quarters of the context before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megatron_tape.config.schema import split_shares
from megatron_tape.config.values import shown
from megatron_tape.data.documents import is_text_file, read_texts
from megatron_tape.data.indexed_dataset import IndexedDatasetReader, dataset_paths
from megatron_tape.errors import ConfigError, refuse
from megatron_tape.evaluation.base import LanguageModel, ModelInfo

RAW_TYPE = np.dtype("<u2")
DOCUMENTS, WINDOWS, STRIDE = 50, 8, 256
_CHECKED = 1 << 22


@dataclass(kw_only=True)
class DocumentSettings:
    """What the tasks have in common that measure the losses of documents' tokens."""

    data: dict[str, str] | str
    """What is read, as a path or a mapping name: path. A file of JSON lines, text or parquet (like the inputs of
    tools/preprocess_data.py, also .gz and .zst); an indexed dataset, by its prefix; or a .bin of uint16 token ids,
    which is one document. Ids must be those of the model's tokenizer."""
    text_key: str = "text"
    """Where JSON lines and parquet have their text."""
    split: str | None = None
    """Shares of an indexed dataset's documents for training, validation and test, such as 969,30,1, as a run's
    data.split: only those for validation are used. null means all documents."""
    lengths: list[int] | None = None
    """Context lengths: how many tokens the model reads, among them one that marks the beginning if the model's
    tokenizer adds one. null means the length that the model was trained on, a half and a quarter of it."""
    minimum_length: int | None = None
    """Documents that do not have more tokens than this are left out, and the scored tokens begin where so many tokens
    of context end; null means the longest of lengths. Evaluations of different lengths score the same tokens if this
    is the same."""
    documents: int | None = None
    """At most so many documents of each name are used, the first ones that are long enough; null means 50."""


@dataclass(frozen=True)
class Source:
    """One entry of `data`."""

    name: str
    path: str
    kind: Literal["text", "indexed", "raw"]
    split: str | None = None

    @property
    def files(self) -> list[Path]:
        """The files that are read."""
        return list(dataset_paths(self.path)) if self.kind == "indexed" else [Path(self.path)]


@dataclass(frozen=True)
class Document:
    """The tokens (N,) of a document, without one that marks its beginning."""

    key: str
    """The name of its source and its number there, from 0."""
    tokens: np.ndarray
    is_text: bool
    """Whether it was read as text, so that its bytes are known."""


@dataclass(frozen=True)
class Window:
    """The tokens from `start` to `stop` of a document, of which the last `scored` are scored."""

    start: int
    stop: int
    scored: int

    def __len__(self) -> int:
        """Return the number of tokens."""
        return self.stop - self.start


def find_sources(settings: DocumentSettings, section: str) -> list[Source]:
    """Return the entries of a task's `data`; raises ConfigError for one that does not exist or is of unknown kind."""
    key, data = f"{section}.data", settings.data
    named = {Path(data).name.split(".")[0]: data} if isinstance(data, str) else data
    refuse(not named, f"{key} is empty; give a path, or a mapping name: path")
    sources = [_find_source(name, path, key) for name, path in named.items()]
    if settings.split is None:
        return sources
    try:
        share = split_shares(settings.split)[1]
    except ConfigError as error:
        raise ConfigError(str(error).replace("data.split", f"{section}.split")) from None
    refuse(share == 0, f"{section}.split is {settings.split!r}, which leaves nothing for validation; raise its share")
    others = [source.path for source in sources if source.kind != "indexed"]
    refuse(bool(others), f"{section}.split is given, but {others and others[0]} is no indexed dataset; leave it out")
    return [replace(source, split=settings.split) for source in sources]


def _find_source(name: str, path: str, key: str) -> Source:
    refuse(
        not name or "/" in name, f"{key} has the name {shown(name)}; give {{NAME: path}} with a name without slashes"
    )
    prefix = path.removesuffix(".bin").removesuffix(".idx")
    try:
        is_file, is_dataset, is_part = (Path(p).is_file() for p in (path, f"{path}.idx", f"{prefix}.idx"))
    except OSError as error:
        raise ConfigError(f"{key} is {shown(path)}, which cannot be read ({error.strerror}); correct it") from None
    if is_dataset:
        return Source(name, path, "indexed")
    refuse(not is_file, f"{key} is {shown(path)}, but there is no such file or indexed dataset; correct it")
    refuse(is_part, f"{key} is {path}, a part of the indexed dataset {prefix}; give {prefix}, without the ending")
    refuse(
        not path.endswith(".bin") and not is_text_file(path),
        f"{key} is {path}, whose format is unknown; give .jsonl, .json, .txt (also .gz, .zst), .parquet, a .bin of "
        "uint16 ids, or the prefix of an indexed dataset",
    )
    return Source(name, path, "raw" if path.endswith(".bin") else "text")


def check_sources(
    sources: Sequence[Source], info: ModelInfo, text_key: str, minimum: int, most: int | None, key: str
) -> None:
    """Raise ConfigError, by file and line, for bad data among that which `long_documents` would return."""
    for source in sources:
        if source.kind == "text":
            refuse(
                not info.has_tokenizer,
                f"{key} is the text {source.path}, but {info.label} has no tokenizer; give token ids, as an indexed "
                "dataset or a .bin",
            )
            for _ in _texts(source, text_key):
                pass
        else:
            _long_documents(source, _token_documents(source), minimum, most, info.vocab_size)


def long_documents(
    source: Source, model: LanguageModel, text_key: str, minimum: int, most: int | None
) -> tuple[list[Document], int]:
    """Return the first `most` documents of at least `minimum` tokens, and how many shorter ones were seen before.

    Raises ConfigError if there are none, or for bad data.
    """
    if source.kind == "text":
        documents = (np.asarray(model.encode(text), np.int64) for text in _texts(source, text_key))
    else:
        documents = _token_documents(source)
    return _long_documents(source, documents, minimum, most, model.info.vocab_size)


def _long_documents(
    source: Source, documents: Iterable[np.ndarray], minimum: int, most: int | None, vocab_size: int
) -> tuple[list[Document], int]:
    found: list[Document] = []
    longest, short = 0, 0
    for number, tokens in enumerate(documents):
        if len(tokens) < minimum:
            longest, short = max(longest, len(tokens)), short + 1
            continue
        _check_ids(f"document {number} of {source.path}", tokens, vocab_size)
        found.append(Document(f"{source.name}/{number}", tokens, source.kind == "text"))
        if len(found) == most:
            break
    refuse(
        not found,
        f"none of the {short:,} documents of {source.path} has the {minimum:,} tokens that lengths and minimum_length "
        f"need, and the longest has {longest:,}; shorten them, or give longer documents",
    )
    return found, short


def _texts(source: Source, text_key: str) -> Iterator[str]:
    try:
        yield from (text for text, _ in read_texts([source.path], text_key))
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _token_documents(source: Source) -> Iterator[np.ndarray]:
    try:
        if source.kind == "indexed":
            dataset = IndexedDatasetReader(source.path)
            problem = next(dataset.problems(), None)
            refuse(problem is not None, f"the indexed dataset {source.path} is not whole: {problem}; write it again")
            count = len(dataset)
            train, validation, _ = split_shares(source.split) if source.split else (0.0, 1.0, 0.0)
            first, stop = round(train * count), round((train + validation) * count)
            yield from (dataset.document(index) for index in range(first, stop))
            return
        size = Path(source.path).stat().st_size
        whole = size > 0 and size % RAW_TYPE.itemsize == 0
        refuse(not whole, f"{source.path} has {size:,} bytes, which are no uint16 ids; give another file")
        yield np.memmap(source.path, RAW_TYPE, "r")
    except (ValueError, OSError) as error:
        raise error if isinstance(error, ConfigError) else ConfigError(str(error)) from None


def _check_ids(place: str, tokens: np.ndarray, vocab_size: int) -> None:
    for start in range(0, len(tokens), _CHECKED):
        block = tokens[start : start + _CHECKED]
        bad = np.flatnonzero((block < 0) | (block >= vocab_size))
        if len(bad):
            raise ConfigError(
                f"token {start + bad[0]} of {place} is {block[bad[0]]}, outside the model's vocabulary of "
                f"{vocab_size:,}; give data made with the model's tokenizer"
            )


def chosen_lengths(lengths: list[int] | None, info: ModelInfo, key: str) -> list[int]:
    """Return the context lengths of the setting `key` in rising order; raises ConfigError if they cannot be used."""
    if lengths is None:
        refuse(
            info.trained_length is None or info.trained_length < 8,
            f"{key} is null, but the configuration of {info.label} does not say what length it was trained on; set it, "
            "such as to [1024, 2048]",
        )
        return [info.trained_length // 4, info.trained_length // 2, info.trained_length]
    good = bool(lengths) and min(lengths) >= 2 and len(set(lengths)) == len(lengths)
    refuse(not good, f"{key} is {shown(lengths)}; give different numbers of tokens, each at least 2")
    return sorted(lengths)


def check_positive(section: str, settings: DocumentSettings, *names: str) -> None:
    """Raise ConfigError if one of these settings is below 1."""
    for name in names:
        value = getattr(settings, name)
        refuse(value is not None and value < 1, f"{section}.{name} is {value}; set it to at least 1")


def scored_per_window(length: int, stride: int) -> int:
    """Return how many tokens a window of context `length` scores: so few that each has most of the context."""
    return min(stride, max(1, length // 4))


def first_scored(longest: int, stride: int) -> int:
    """Return the first token of a document that is scored, where `longest` is the longest context."""
    return longest + 1 - scored_per_window(longest, stride)


def cut_windows(start: int, stop: int, length: int, stride: int, marks: int) -> list[Window]:
    """Return the windows that together score the tokens from `start` to `stop` of a document once each.

    The model reads `length` tokens of a window and of the `marks` tokens that go before it; the last scored token is
    only a label.
    """
    step = scored_per_window(length, stride)
    ends = [(first, min(first + step, stop)) for first in range(start, stop, step)]
    return [Window(end - (length + 1 - marks), end, end - first) for first, end in ends]


def window_losses(
    model: LanguageModel, document: Document, window: Window, marks: list[int], whole: bool = False
) -> np.ndarray:
    """Return the losses in nats of a window's scored tokens, or of all that have a token before them if `whole`.

    `marks` go before the window. Raises ValueError if a loss is infinite or NaN.
    """
    tokens = np.concatenate([np.asarray(marks, np.int64), document.tokens[window.start : window.stop]])
    losses = model.losses(tokens, 1 if whole else len(tokens) - window.scored)
    if not np.isfinite(losses).all():
        raise ValueError(
            f"{model.info.label} gives a loss that is infinite or NaN in {document.key}, tokens {window.start:,} to "
            f"{window.stop:,}; try another number type or a shorter length, or look at the model"
        )
    return losses


def text_bytes(model: LanguageModel, tokens: np.ndarray, start: int, stop: int) -> int:
    """Return how many bytes of UTF-8 the tokens from `start` to `stop` of a document stand for."""
    # The text of a prefix, since a tokenizer may treat the beginning of a text in its own way.
    before, whole = (len(model.decode(tokens[:end].tolist()).encode("utf-8", "replace")) for end in (start, stop))
    return whole - before


def by_source_and_length(values: dict[str, Any]) -> dict[tuple[str, int], list[Any]]:
    """Return the values of units, whose keys are `SOURCE/NUMBER/LENGTH`, by source and length, in order."""
    found: dict[tuple[str, int], list[Any]] = {}
    for key, value in values.items():
        name, _, length = key.split("/")
        found.setdefault((name, int(length)), []).append(value)
    return found
