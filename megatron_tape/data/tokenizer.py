"""One small interface to SentencePiece models and Hugging Face tokenizers, without the `transformers` package."""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megatron_tape.config.schema import RunConfig
from megatron_tape.errors import ConfigError, FileError, refuse
from megatron_tape.io.records import read_record

_END_OF_DOCUMENT = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<|end▁of▁sentence|>", "<eos>", "[EOS]")
_BEGINNING = ("<s>", "<|begin_of_text|>", "<|begin▁of▁sentence|>", "<bos>", "[BOS]")
_GIVE = "give a .model, a tokenizer.json or their directory"


class Tokenizer(Protocol):
    """What the tools and the evaluation need from a tokenizer.

    Encoding adds no special tokens, and no text encodes to one; special tokens are added by id.
    """

    vocab_size: int
    """One more than the largest id."""
    eod: int | None
    """The id that ends a document."""
    bos: int | None
    """The id that begins a text."""
    prefix: list[int]
    """What it puts before a text where it adds special tokens, which `encode` does not: `bos`, or nothing."""

    def vocabulary_digest(self) -> str:
        """Return a sha256, in hexadecimal, of the pieces and their ids."""

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Return the ids of every text as an int32 array."""

    def decode(self, ids: Sequence[int]) -> str: ...


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a SentencePiece `.model`, a `tokenizer.json`, or a Hugging Face directory that holds one of the two.

    In a directory `tokenizer.json` is preferred; the names of its special tokens come from `tokenizer_config.json` or
    `special_tokens_map.json` beside it, otherwise common names are tried. Raises FileError when there is nothing
    at `path`, or no tokenizer.
    """
    path = Path(path)
    if not path.exists():
        raise FileError(str(path), "does not exist", _GIVE)
    if path.is_dir():
        found = [path / name for name in ("tokenizer.json", "tokenizer.model") if (path / name).is_file()]
        if not found:
            raise FileError(
                str(path), "holds neither tokenizer.json nor tokenizer.model", "download one of them into it"
            )
        path = found[0]
    return _HuggingFace(path) if path.suffix == ".json" else _SentencePiece(path)


def load_run_tokenizer(config: RunConfig) -> Tokenizer | None:
    """Load `data.tokenizer`, if one is set; ConfigError if it cannot be read or has more ids than the model."""
    if config.data.tokenizer is None:
        return None
    try:
        tokenizer = load_tokenizer(config.data.tokenizer)
    except (ValueError, OSError) as error:
        raise ConfigError("data.tokenizer", f"cannot be used: {error}") from error
    key = "vocab_size" if config.model.unpadded_vocab_size is None else "unpadded_vocab_size"
    rows = getattr(config.model, key)
    refuse(
        tokenizer.vocab_size > rows,
        (f"model.{key}", "data.tokenizer"),
        f"is {rows}, smaller than the {tokenizer.vocab_size} pieces of data.tokenizer {config.data.tokenizer}",
        "raise it to at least that" if key == "vocab_size" else "give the tokenizer that the model came with",
    )
    return tokenizer


class _SentencePiece:
    def __init__(self, path: Path):
        import sentencepiece

        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise FileError(str(path), "is not a SentencePiece model", _GIVE) from error
        self.vocab_size = self._model.vocab_size()
        self.eod = _id_or_none(self._model.eos_id())
        self.bos = _id_or_none(self._model.bos_id())
        self.prefix: list[int] = []

    def vocabulary_digest(self) -> str:
        return _digest((self._model.id_to_piece(index), index) for index in range(self.vocab_size))

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text)

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        return self._model.encode(texts, out_type="numpy", num_threads=1)

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(i) for i in ids])


class _HuggingFace:
    def __init__(self, path: Path):
        import tokenizers

        try:
            self._model = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            problem = f"is not a Hugging Face tokenizer.json ({error})"
            raise FileError(str(path), problem, "save the tokenizer again") from error
        self._model.no_truncation()
        self._model.no_padding()
        # Without this a document that merely mentions <|endoftext|> would end there.
        self._model.encode_special_tokens = True
        self.vocab_size = max(self._model.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.eod = self._special(path.parent, "eos_token", _END_OF_DOCUMENT)
        self.bos = self._special(path.parent, "bos_token", _BEGINNING)
        first = self._model.encode("a", add_special_tokens=True).ids[:1]
        self.prefix = first if first == [self.bos] else []

    def _special(self, directory: Path, key: str, usual: tuple[str, ...]) -> int | None:
        named = [_named_token(directory / name, key) for name in ("tokenizer_config.json", "special_tokens_map.json")]
        ids = (self._model.token_to_id(token) for token in (*named, *usual) if token is not None)
        return next((i for i in ids if i is not None), None)

    def vocabulary_digest(self) -> str:
        return _digest(self._model.get_vocab(with_added_tokens=True).items())

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        encodings = self._model.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(i) for i in ids], skip_special_tokens=False)


def _digest(pieces: Iterable[tuple[str, int]]) -> str:
    lines = (f"{index} {piece!r}\n" for piece, index in sorted(pieces, key=lambda item: item[::-1]))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _id_or_none(index: int) -> int | None:
    """Return None for -1, by which SentencePiece denotes a special piece that the model lacks."""
    return None if index < 0 else index


def _named_token(path: Path, key: str) -> str | None:
    if not path.is_file():
        return None
    try:
        token = read_record(path, dict[str, Any]).get(key)
    except ValueError as error:
        raise FileError(str(path), f"cannot be used ({error})", "save the tokenizer again or remove the file") from None
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None
