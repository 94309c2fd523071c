"""One small interface to SentencePiece models and Hugging Face tokenizers; imports neither until it is used."""

import json
from abc import ABC, abstractmethod
from pathlib import Path

END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")


class Tokenizer(ABC):
    """Text to token ids and back. No id is added to mark a beginning or an end."""

    vocab_size: int
    """Every id is below this."""
    eod: int | None
    """Id that ends a document, if the tokenizer has one."""
    bos: int | None
    """Id that begins a text, if the tokenizer has one."""

    @abstractmethod
    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text, computed in the calling thread."""

    @abstractmethod
    def decode(self, ids: list[int]) -> str:
        """Return the text of ids."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of one text."""
        return self.encode_batch([text])[0]


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece `.model`."""

    def __init__(self, path: Path):
        import sentencepiece

        self._model = sentencepiece.SentencePieceProcessor()
        try:
            loaded = self._model.Load(str(path))
        except (RuntimeError, OSError) as error:
            raise ValueError(f"{path} is no SentencePiece model: {error}") from error
        if not loaded or self._model.vocab_size() == 0:
            raise ValueError(f"{path} is no SentencePiece model")
        self.vocab_size = self._model.vocab_size()
        self.eod = self._model.eos_id() if self._model.eos_id() >= 0 else None
        self.bos = self._model.bos_id() if self._model.bos_id() >= 0 else None

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text."""
        return [self._model.EncodeAsIds(text) for text in texts]

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids."""
        return self._model.DecodeIds([int(i) for i in ids])


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json`; the files beside it, if any, name its special tokens."""

    def __init__(self, path: Path):
        import tokenizers

        try:
            self._model = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path} is no tokenizer.json: {error}") from error
        self._model.no_padding()
        self._model.no_truncation()
        ids = self._model.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values(), default=-1) + 1
        named = _special_tokens(path.parent)
        self.eod = next((ids[t] for t in (named.get("eos_token"), *END_OF_DOCUMENT) if t in ids), None)
        self.bos = ids.get(named.get("bos_token") or "<s>")

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text."""
        return [self._model.encode(text, add_special_tokens=False).ids for text in texts]

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids, special tokens included."""
        return self._model.decode([int(i) for i in ids], skip_special_tokens=False)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a SentencePiece `.model`, a `tokenizer.json`, or a directory that holds one of them.

    Raises ValueError naming the path and the fix when it is none of these.
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(f"tokenizer {path} does not exist; train one with tools/train_tokenizer.py or correct the path")
    if path.is_dir():
        found = [path / name for name in ("tokenizer.json", "tokenizer.model") if (path / name).is_file()]
        if not found:
            raise ValueError(
                f"{path} holds neither tokenizer.json nor tokenizer.model; save the tokenizer there in its fast form "
                "(tokenizer.save_pretrained of a fast Hugging Face tokenizer writes tokenizer.json)"
            )
        path = found[0]
    return HuggingFaceTokenizer(path) if path.suffix == ".json" else SentencePieceTokenizer(path)


def _special_tokens(folder: Path) -> dict[str, str]:
    """Read the names of special tokens that Hugging Face keeps beside tokenizer.json."""
    named = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            continue
        try:
            content = json.loads((folder / name).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{folder / name} is no JSON: {error}") from error
        for key in ("eos_token", "bos_token"):
            token = content.get(key)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                named[key] = token
    return named
