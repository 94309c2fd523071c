"""Load SentencePiece models and Hugging Face tokenizers behind one interface, without the package
`transformers`.

A tokenizer keeps the contents of its files in memory. A run thus saves and exports the tokenizer
that it trained with, even if the files have changed.
"""

import functools
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NotRequired, Protocol

import numpy as np
from typing_extensions import TypedDict

from megatron_tape.config.schema import RunConfig
from megatron_tape.data.special_tokens import (
    CONFIG,
    MAP,
    SpecialTokens,
    refuse_specials_in_text,
    specials_in_text,
)
from megatron_tape.data.trial_texts import FIXED_TEXTS, find_difference, trial_texts
from megatron_tape.errors import ConfigError, FileError, UserError
from megatron_tape.io.files import write_whole
from megatron_tape.io.records import read_small

TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_MODEL = "tokenizer.model"
SIBLINGS = (CONFIG, MAP, "added_tokens.json", "chat_template.jinja", "generation_config.json")
CHAT_TEMPLATES = "additional_chat_templates"
"""The directory of additional named chat templates in transformers."""
TOKENIZER_FILES = (TOKENIZER_JSON, TOKENIZER_MODEL, *SIBLINGS)

_END_OF_DOCUMENT = (
    "<|endoftext|>",
    "</s>",
    "<|end_of_text|>",
    "<|end▁of▁sentence|>",
    "<eos>",
    "[EOS]",
)
_BEGINNING = ("<s>", "<|begin_of_text|>", "<|begin▁of▁sentence|>", "<bos>", "[BOS]")
_GIVE = "give a .model, a tokenizer.json or their directory"
_SAVE = "save the tokenizer again"
_ENCODE = "cannot encode a text"
_DECODE = "cannot decode ids"
_FILE_BYTES = 1 << 29
_MOST_IDS = 1 << 24
_TEXTS_AT_ONCE = 1 << 14
_SPACES = str.maketrans({"▁": " ", "Ġ": " ", "Ċ": "\n"})
"""Characters for a space and a line break in the tokens of SentencePiece and of tokenizers of
bytes.
"""
_ADDS_BOS = ("Llama", "CodeLlama", "Gemma")
"""Tokenizer classes of transformers that prepend bos to a text by default (`add_bos_token`)."""


class TokenizerRecord(TypedDict):
    """Identifies a tokenizer in checkpoints and datasets. The fields are those of `Tokenizer`."""

    digest: str
    same_as: NotRequired[str]
    """The digest of the SentencePiece model next to a `tokenizer.json`, if both give the same ids.
    """
    sample: NotRequired[str]
    vocab_size: int
    eod: int | None


class Tokenizer(Protocol):
    """The interface of all tokenizers. Encoding a text never yields special tokens; callers add
    them by id.
    """

    vocab_size: int
    """One more than the largest id."""
    eod: int | None
    """The id of the end-of-document token."""
    bos: int | None
    """The id of the beginning-of-sequence token."""
    prefix: list[int]
    """The ids that transformers prepends to a text by default: `bos`, or nothing. `encode` does not
    add them.
    """
    files: dict[str, bytes]
    """The contents of the tokenizer's files, by their names in a Hugging Face directory."""
    names: SpecialTokens
    """The special tokens named in the tokenizer's settings files."""

    @property
    def digest(self) -> str:
        """The sha256, in hexadecimal, of everything that determines the token ids of a text."""

    @property
    def same_as(self) -> str | None:
        """The digest of the SentencePiece model next to a `tokenizer.json`, if both give the same
        ids.
        """

    @property
    def sample(self) -> str:
        """The sha256 of the vocabulary and of the ids of sample texts.

        It tells apart all tokenizers that were trained or configured differently, and is the same
        for two files of one tokenizer. A file that was edited so that only rare text changes may
        have the sample of the original.
        """

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Return the token ids of every text, each as an int32 array."""

    def decode(self, ids: Sequence[int]) -> str: ...


@contextmanager
def library_errors(path: str | Path, problem: str, fix: str = _SAVE) -> Iterator[None]:
    """Within the context, convert any error of a tokenizer library into a FileError with `problem`
    and the reason.

    This includes panics of Rust code, which are not an Exception and cannot be pickled. UserError
    and MemoryError are not converted.
    """
    try:
        yield
    except (UserError, MemoryError):
        raise
    except BaseException as error:
        if (
            not isinstance(error, Exception) and type(error).__name__ != "PanicException"
        ):  # a signal, for example
            raise
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise FileError(str(path), f"{problem} ({reason})", fix) from error


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a SentencePiece `.model`, a `tokenizer.json`, or a Hugging Face directory with one of
    them.

    In a directory, `tokenizer.json` is preferred. `tokenizer_config.json` or
    `special_tokens_map.json` next to it name the tokens for `eod` and `bos`. By default, they are
    those of the SentencePiece model or, in a `tokenizer.json`, the tokens with common names such as
    `</s>` and `<s>`.

    Raises FileError if there is no tokenizer at `path`, if a named token does not exist, if
    encoding is random, or if text encodes to a special token and this cannot be prevented.
    """
    path = Path(path)
    if not path.exists():
        raise FileError(str(path), "does not exist", _GIVE)
    main = path
    if path.is_dir():
        main = next((path / name for name in TOKENIZER_FILES[:2] if (path / name).is_file()), path)
        if main == path:
            problem = f"contains neither {TOKENIZER_JSON} nor {TOKENIZER_MODEL}"
            raise FileError(str(path), problem, "download one of them into it")
    files = _read_files(main)
    os.environ["RUST_BACKTRACE"] = "0"  # keeps the message of a panic to one sentence
    with library_errors(main, "cannot be loaded"):
        if main.suffix == ".json":
            return _HuggingFace(files, main)
        return _SentencePiece(files, main)


def load_run_tokenizer(config: RunConfig) -> Tokenizer | None:
    """Load `data.tokenizer`; None if it is not set. Raises ConfigError if it is unreadable or has
    too many ids.
    """
    if config.data.tokenizer is None:
        return None
    try:
        tokenizer = load_tokenizer(config.data.tokenizer)
    except (ValueError, OSError) as error:
        raise ConfigError("data.tokenizer", f"cannot be used: {error}") from error
    if config.model.unpadded_vocab_size is None:
        key = "vocab_size"
    else:
        key = "unpadded_vocab_size"
    size = getattr(config.model, key)
    count = tokenizer.vocab_size
    raise_it = f"raise it to at least {count}"
    original = "set data.tokenizer to the model's original tokenizer"
    if count > size:
        raise ConfigError(
            (f"model.{key}", "data.tokenizer"),
            f"is {size}, but data.tokenizer {config.data.tokenizer} has {count} ids",
            raise_it if key == "vocab_size" else original,
        )
    return tokenizer


def find_files(directory: str | Path, names: Iterable[str] = TOKENIZER_FILES) -> list[str]:
    """Return the tokenizer files in a directory, as relative paths: those of `names`, and
    additional chat templates.

    Raises FileError for a link to a file outside the directory, which may be secret, unless it is
    in the Hub's cache.
    """
    directory = Path(directory)
    found = [name for name in names if (directory / name).is_file()]
    found += sorted(
        f"{CHAT_TEMPLATES}/{path.name}" for path in directory.glob(f"{CHAT_TEMPLATES}/*.jinja")
    )
    for name in found:
        target = (directory / name).resolve()
        cached = target.parent.name == "blobs" and target.parents[1].name.startswith("models--")
        if not (cached or target.is_relative_to(directory.resolve())):
            raise FileError(
                str(directory / name), "is a link to a file elsewhere", "replace it with a copy"
            )
    return found


def write_files(files: Mapping[str, bytes], directory: Path) -> list[str]:
    """Write a tokenizer's files into a directory, flush them to disk, and return their names."""
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        write_whole(directory / name, [content])
    return list(files)


def tokenizer_record(tokenizer: Tokenizer) -> TokenizerRecord:
    """Return the record of a tokenizer that a checkpoint or a dataset stores, to compare tokenizers
    later.
    """
    record: TokenizerRecord = {
        "digest": tokenizer.digest,
        "sample": tokenizer.sample,
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
    }
    if tokenizer.same_as is None:
        return record
    return record | {"same_as": tokenizer.same_as}


def difference(
    one: TokenizerRecord, other: TokenizerRecord, name: str, with_eod: bool = True
) -> str | None:
    """Return how the tokenizer `one` differs from `other`, or None if they are equal.

    The result is a predicate, such as "encodes text in another way than NAME", where `name`
    describes `other`. The end-of-document tokens are compared only if `with_eod` is true.

    transformers writes other files than those that it has read, so different digests do not mean
    different ids. The samples decide then, except for records of versions that did not store them.
    """
    digests = ({record["digest"], record.get("same_as")} - {None} for record in (one, other))
    if set.isdisjoint(*digests):
        sizes = one["vocab_size"], other["vocab_size"]
        if sizes[0] != sizes[1]:
            return f"encodes text in another way than {name} ({sizes[0]:,} ids, not {sizes[1]:,})"
        if "sample" not in one or "sample" not in other:
            return f"may encode text in another way than {name}"
        if one["sample"] != other["sample"]:
            return f"encodes text in another way than {name}"
    if with_eod and one["eod"] != other["eod"]:
        return f"ends documents with the id {one['eod']}, and {name} with {other['eod']}"
    return None


def _sample(tokenizer: Tokenizer, vocabulary: list[str | None]) -> str:
    """Return the sha256 of `vocabulary`, the token of each id, and of the ids of FIXED_TEXTS and of
    every token.
    """
    tokens = [token or "" for token in vocabulary]
    texts = [*FIXED_TEXTS, *(token.translate(_SPACES) for token in tokens)]
    digest = hashlib.sha256(_dump(tokens))
    for start in range(0, len(texts), _TEXTS_AT_ONCE):
        for ids in tokenizer.encode_batch(texts[start : start + _TEXTS_AT_ONCE]):
            digest.update(len(ids).to_bytes(8, "little"))
            digest.update(ids.astype("<i4").tobytes())
    return digest.hexdigest()


def _read_files(main: Path) -> dict[str, bytes]:
    """Return the contents of a tokenizer's main file and the files next to it, by their standard
    names.
    """
    is_json = main.suffix == ".json"
    names = SIBLINGS + ((TOKENIZER_MODEL,) if main.name == TOKENIZER_JSON else ())
    paths = {TOKENIZER_JSON if is_json else TOKENIZER_MODEL: main}
    paths |= {name: main.parent / name for name in find_files(main.parent, names)}
    files = {}
    for name, path in paths.items():
        try:
            files[name] = read_small(path, _FILE_BYTES)
        except ValueError as error:
            raise FileError(
                str(path), f"cannot be used: {error}", f"replace it, or {_GIVE}"
            ) from None
    return files


class _SentencePiece:
    same_as = None

    def __init__(self, files: dict[str, bytes], path: Path):
        import sentencepiece

        if not files[TOKENIZER_MODEL]:  # the library would load an empty file
            raise FileError(str(path), "is not a SentencePiece model (it is empty)", _GIVE)
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=files[TOKENIZER_MODEL])
        except RuntimeError as error:  # its message quotes the library's source code
            raise FileError(str(path), "is not a SentencePiece model", _GIVE) from error
        self._path, self.files, self.names = path, files, SpecialTokens(files, path)
        kwargs = self.names.config.get("sp_model_kwargs")
        if isinstance(kwargs, dict) and kwargs.get("enable_sampling"):
            _refuse_random(path.with_name(CONFIG), "sp_model_kwargs.enable_sampling")
        self.vocab_size = self._model.vocab_size()
        self.names.check_added(self.token_to_id)
        # SentencePiece returns -1 for a missing special piece.
        eos, bos = (
            None if index < 0 else index for index in (self._model.eos_id(), self._model.bos_id())
        )
        self.eod = self.names.id_of("eos_token", self.token_to_id, eos)
        self.bos = self.names.id_of("bos_token", self.token_to_id, bos)
        kind = (
            str(self.names.config.get("tokenizer_class", ""))
            .removesuffix("Fast")
            .removesuffix("Tokenizer")
        )
        adds_bos = self.names.config.get("add_bos_token", kind in _ADDS_BOS)
        self.prefix = [self.bos] if adds_bos and self.bos is not None else []
        ids = {index for index in range(self.vocab_size) if self._model.is_control(index)}
        ids |= {*map(self.token_to_id, self.names.special())} - {self._model.unk_id()}
        ids = (ids | {self.eod, self.bos}) - {None}
        special = {self._model.id_to_piece(index): index for index in ids}
        refuse_specials_in_text(
            path,
            special,
            specials_in_text(self.encode_batch, special),
            "(it is a user-defined symbol)",
        )

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token, or None if the model has no such piece."""
        index = self._model.piece_to_id(token)
        if self._model.id_to_piece(index) == token:
            return index
        return None

    @functools.cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.files[TOKENIZER_MODEL]).hexdigest()

    @functools.cached_property
    def sample(self) -> str:
        return _sample(self, [self._model.id_to_piece(index) for index in range(self.vocab_size)])

    @property
    def scores(self) -> list[float] | None:
        """The scores of a unigram model's pieces; None for other models, whose scores are ranks."""
        scores = [self._model.get_score(index) for index in range(self.vocab_size)]
        if any(score % 1 for score in scores):
            return scores
        return None

    def encode(self, text: str) -> list[int]:
        with library_errors(self._path, _ENCODE):
            return self._model.encode(text)

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        with library_errors(self._path, _ENCODE):
            return self._model.encode(texts, out_type="numpy", num_threads=1)

    def decode(self, ids: Sequence[int]) -> str:
        with library_errors(self._path, _DECODE):
            return self._model.decode([int(index) for index in ids])


class _HuggingFace:
    def __init__(self, files: dict[str, bytes], path: Path):
        self._path = path
        self.files = dict(files)
        with library_errors(path, "is not a Hugging Face tokenizer.json"):
            settings = json.loads(files[TOKENIZER_JSON])
            self._prepare(files[TOKENIZER_JSON])
            self.vocab_size = (
                max(self._model.get_vocab(with_added_tokens=True).values(), default=-1) + 1
            )
        if self.vocab_size > _MOST_IDS:  # the library would list all ids below the largest
            raise FileError(
                str(path), f"has the id {self.vocab_size - 1:,}", f"use ids below {_MOST_IDS:,}"
            )
        if settings["model"].get("dropout"):
            _refuse_random(path, "model.dropout")
        self.names = SpecialTokens(files, path)
        self.eod = self.names.id_of("eos_token", self._model.token_to_id, _END_OF_DOCUMENT)
        self.bos = self.names.id_of("bos_token", self._model.token_to_id, _BEGINNING)
        self._keep_specials_from_text(settings)
        first = self._model.encode("a", add_special_tokens=True).ids[:1]
        self.prefix = first if first == [self.bos] else []

    def _prepare(self, content: bytes) -> None:
        import tokenizers

        self.files[TOKENIZER_JSON] = content
        self._model = None  # free the old model first, since models can be large
        self._model = tokenizers.Tokenizer.from_buffer(content)
        self._model.no_truncation()
        self._model.no_padding()
        # Otherwise a document that mentions <|endoftext|> would end there.
        self._model.encode_special_tokens = True

    def _keep_specials_from_text(self, settings: dict[str, Any]) -> None:
        """Change the `tokenizer.json` so that text never encodes to special tokens; raise FileError
        if this fails.

        `encode_special_tokens` is not enough if the model's vocabulary contains a special token,
        such as `<|endoftext|>`. In this case, an additional last step of the pre-tokenizer splits
        its name after the first character. Other text is split as before.
        """
        eod_and_bos = {i for i in (self.eod, self.bos) if i is not None}
        added = settings.get("added_tokens") or ()
        model = settings["model"]
        unknown = model.get("unk_id")
        if model.get("unk_token") is not None:
            unknown = self._model.token_to_id(model["unk_token"])
        named = {token: self._model.token_to_id(token) for token in self.names.special()}
        named |= {self._model.id_to_token(i): i for i in eod_and_bos}
        if ordinary := [
            token for token in added if token["content"] in named and not token.get("special")
        ]:
            for token in ordinary:
                token["special"] = True
            self._prepare(_dump(settings))
        # The library may assign an added token another id than the file.
        contents = [token["content"] for token in added if token.get("special")]
        named |= {content: self._model.token_to_id(content) for content in contents}
        special = {
            token: i
            for token, i in named.items()
            if i is not None and (i != unknown or i in eod_and_bos)
        }
        if not eod_and_bos.isdisjoint(
            self.encode("a\U0010fffd \U0010fffd")
        ):  # a character that no vocabulary holds
            problem = (
                "uses its bos or end-of-document token as the unknown token, so rare characters"
                " encode to it"
            )
            raise FileError(
                str(self._path), problem, "use a tokenizer with a separate unknown token"
            )
        found = specials_in_text(self.encode_batch, special)
        if "unk_id" in model:
            # A unigram model may prefer the token in some contexts only.
            found = list(
                special.keys() & self._model.get_vocab(with_added_tokens=False).keys() | set(found)
            )
        if found:
            cut = "|".join(
                f"{re.escape(token[0])}(?={re.escape(token[1:])})" for token in sorted(found)
            )
            step = {
                "type": "Split",
                "pattern": {"Regex": cut},
                "behavior": "Isolated",
                "invert": False,
            }
            before = settings.get("pre_tokenizer")
            if before != step and step not in (before or {}).get("pretokenizers", ()):
                steps = [before, step] if before else [step]
                settings["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
                self._prepare(_dump(settings))
            found = specials_in_text(self.encode_batch, special)
            refuse_specials_in_text(
                self._path, special, found, "(the model's vocabulary contains it)"
            )

    @property
    def digest(self) -> str:
        return _digest(self.files[TOKENIZER_JSON])

    @functools.cached_property
    def sample(self) -> str:
        return _sample(self, [self._model.id_to_token(index) for index in range(self.vocab_size)])

    @functools.cached_property
    def same_as(self) -> str | None:
        if TOKENIZER_MODEL not in self.files:
            return None
        try:
            other = _SentencePiece(self.files, self._path)
            same = other.vocab_size == self.vocab_size and other.eod == self.eod
            agrees = (
                same
                and find_difference(other.encode, self.encode, trial_texts(), other.scores) is None
            )
        except FileError:
            return None
        if agrees:
            return other.digest
        return None

    def encode(self, text: str) -> list[int]:
        with library_errors(self._path, _ENCODE):
            # Unlike `encode`, this keeps no offsets and takes a quarter less memory.
            return self._model.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        with library_errors(self._path, _ENCODE):
            encodings = self._model.encode_batch_fast(texts, add_special_tokens=False)
            return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        with library_errors(self._path, _DECODE):
            return self._model.decode([int(i) for i in ids], skip_special_tokens=False)


@functools.lru_cache(maxsize=8)
def _digest(content: bytes) -> str:
    """Return the sha256 of the parts of a `tokenizer.json` that determine token ids. A large file
    takes a second.
    """
    import tokenizers

    # Normalize with the library, since files may or may not contain defaults.
    settings = json.loads(tokenizers.Tokenizer.from_buffer(content).to_str())
    model = settings["model"]
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        model[name] = model.get(name) or None
    if model["type"] == "Unigram":
        # Reading and writing a file changes the last digit of some scores.
        model["vocab"] = [[piece, float(f"{score:.10g}")] for piece, score in model["vocab"]]
    added = settings["added_tokens"]
    ordinary = [token for token in added if not token["special"]]
    special = [[token["id"], token["content"]] for token in added if token["special"]]
    parts = [model, settings["normalizer"], settings["pre_tokenizer"], ordinary, special]
    return hashlib.sha256(_dump(_without_null(parts), sort_keys=True)).hexdigest()


def _refuse_random(path: Path, setting: str) -> None:
    raise FileError(
        str(path), f"encodes text at random ({setting})", f"set {setting} to null, or remove it"
    )


def _dump(value: Any, **options: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, **options).encode("utf-8", "surrogatepass")


def _without_null(value: Any) -> Any:
    """Remove nulls, such as settings that later versions of the library add."""
    if isinstance(value, dict):
        return {key: _without_null(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_null(item) for item in value]
    return value
