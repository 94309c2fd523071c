"""Limits on what a tokenizer's file asks of the library that reads it.

The libraries have none. They end the process, without an exception, once memory is short.
"""

import base64
import itertools
import json
import os.path
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from megatron_tape.config.values import shown

_HOLES, _FREE_HOLES = 16, 1_000_000
_TOKEN_CHARACTERS, _TEXT_CHARACTERS = 10_000, 1000
"""The longest token, and the longest text that a step puts in."""
_WORD_CHARACTERS = 1000
"""Of a word that WordPiece splits; its time grows with their third power."""
_TRIE_BYTES = 4_000_000
"""Of a vocabulary, without what pieces have in common at their beginning; the library takes 350 times as much."""
_STEPS, _GROWTH = 10_000, 128
_GROWS = {
    "": 1, "ByteLevel": 5, "Metaspace": 2, "BertNormalizer": 3, "handle_chinese_chars": 3, "WordPiece": 2,
    "BPEDecoder": 3, "suffix": 3, "CTC": 3,
}  # fmt: skip
"""How many times longer a step makes a text at most, by its type, or by a key where the library guesses the type."""
_PUTS_IN = ("content", "prepend", "replacement", "prefix", "suffix")
_LONGEST_RULE = 18
"""Characters that Unicode's NFKC makes of one."""
_UNIT = r"(?:\[[^][\\]+\]|\\[sSdDwWnrt]|[^][\\(){}|?*+^$])(?:\{[1-9]\d*(?:,\d*)?\}|\+)?"
_CONSUMES = re.compile(f"(?:{_UNIT})+")
"""Regular expressions that match no empty text; not all of them."""


class LimitError(ValueError):
    """A tokenizer exceeds a limit. The message goes on after the file's name."""


def parse_tokenizer(content: bytes) -> dict[str, Any]:
    """Return the settings of a `tokenizer.json`; raises LimitError, or ValueError for one that has no model."""
    settings = json.loads(content, object_pairs_hook=_unique)
    if not isinstance(settings, dict) or not isinstance(model := settings.get("model"), dict):
        raise ValueError("it has no model")
    vocabulary, added = model.get("vocab") or {}, settings.get("added_tokens") or ()
    is_unigram = isinstance(vocabulary, list)
    pieces = [piece for piece, *_ in vocabulary] if is_unigram else list(vocabulary)
    names = [token.get("content", "") for token in added if isinstance(token, dict)]
    ids = [*range(len(pieces))] if is_unigram else [*vocabulary.values()]
    check_ids([*ids, *(token.get("id") for token in added if isinstance(token, dict))])
    _check_tokens([*pieces, *names])
    for tokens in (pieces if is_unigram else [], names):
        _check_trie([token.encode("utf-8", "surrogatepass") for token in tokens])
    if (longest := model.get("max_input_chars_per_word") or 0) > _WORD_CHARACTERS:
        raise LimitError(f"splits words of up to {longest:,} characters, more than {_WORD_CHARACTERS:,}")
    _check_texts(model.get(key) for key in ("continuing_subword_prefix", "end_of_word_suffix"))
    _check_growth([*_steps(settings.get("normalizer")), *_steps(settings.get("pre_tokenizer"))])
    _check_growth([*_steps(settings.get("decoder"))])
    _check_templates([*_steps(settings.get("post_processor"))])
    return settings


def check_sentencepiece(content: bytes) -> None:
    """Raise LimitError for a SentencePiece model with a very long piece, or with rules that make text much longer."""
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto.FromString(content)
    _check_tokens(piece.piece for piece in model.pieces)
    for rules in (model.normalizer_spec.precompiled_charsmap, model.denormalizer_spec.precompiled_charsmap):
        if rules:
            _read_rules(rules)


def check_ids(ids: Sequence[Any]) -> None:
    """Raise LimitError for an id far above the number of tokens, as the library lists all ids that are missing."""
    largest = max((index for index in ids if type(index) is int), default=0)
    if largest > _HOLES * len(ids) + _FREE_HOLES:
        raise LimitError(f"has the id {largest:,}, but only {len(ids):,} tokens")


def _check_tokens(tokens: Iterable[str]) -> None:
    """Raise LimitError for a token that is too long."""
    if (longest := max(map(len, tokens), default=0)) > _TOKEN_CHARACTERS:
        raise LimitError(f"has a token of {longest:,} characters, more than {_TOKEN_CHARACTERS:,}")


def _read_rules(rules: bytes) -> list[str]:
    """Return the texts that compiled rules of normalization put in; LimitError for a long one, or damaged rules."""
    size = int.from_bytes(rules[:4], "little")
    if len(rules) < 4 + size:
        raise LimitError("has damaged rules of normalization")
    texts = rules[4 + size :].decode("utf-8", "replace").split("\0")
    if (longest := max(map(len, texts))) > _GROWTH:
        raise LimitError(f"has rules that make {longest:,} characters of one, more than {_GROWTH}")
    return texts


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON. Of a key that is given twice, the library may use another value than Python does."""
    result = dict(pairs)
    if len(result) < len(pairs):
        key = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise LimitError(f"gives the key {shown(key)} twice in the same object")
    return result


def _steps(step: Any) -> Iterator[dict[str, Any]]:
    """Yield a step and, if it is a sequence, those in it."""
    if step is None:
        return
    if not isinstance(step, dict):
        raise LimitError(f"has {shown(step)} where a step, an object, belongs")
    yield step
    for key in ("normalizers", "pretokenizers", "decoders", "processors"):
        for inner in step.get(key) or ():
            yield from _steps(inner)


def _check_count(steps: Sequence[dict[str, Any]]) -> None:
    if len(steps) > _STEPS:
        raise LimitError(f"has {len(steps):,} steps, more than {_STEPS:,}")


def _check_texts(texts: Iterable[Any]) -> None:
    if (longest := max((len(text) for text in texts if isinstance(text, str)), default=0)) > _TEXT_CHARACTERS:
        raise LimitError(f"puts {longest:,} characters into a text at once, more than {_TEXT_CHARACTERS:,}")


def _check_trie(tokens: list[bytes]) -> None:
    if (size := sum(map(len, tokens))) > _TRIE_BYTES:
        size -= sum(len(os.path.commonprefix(pair)) for pair in itertools.pairwise(sorted(tokens)))
    if size > _TRIE_BYTES:
        raise LimitError(f"has tokens of {size:,} bytes, more than {_TRIE_BYTES:,}, without common beginnings")


def _check_growth(steps: Sequence[dict[str, Any]]) -> None:
    """Raise LimitError if steps, one after the other, could make a text more than `_GROWTH` times longer."""
    _check_count(steps)
    _check_texts(step.get(key) for step in steps for key in _PUTS_IN)
    weights, rules = _Weights(), 0
    for step in reversed(steps):
        grows = max(factor for name, factor in _GROWS.items() if name in (step.get("type"), *step, ""))
        if grows > 1:
            weights.change(lambda weight: weight * grows)  # noqa: B023
        if "prepend" in step:
            weights.add(weights.of(step["prepend"]))
        if step.get("precompiled_charsmap"):
            longest = max(map(weights.of, _read_rules(base64.b64decode(step["precompiled_charsmap"]))))
            rules += 1
            weights.raise_to(longest / (_LONGEST_RULE if rules == 1 else 1))
        if "content" in step and isinstance(pattern := step.get("pattern"), dict):
            content = weights.of(step["content"])
            if text := pattern.get("String"):
                weights.raise_first(_plain(text), content)
            elif _CONSUMES.fullmatch(pattern.get("Regex", "")):
                weights.raise_to(content)
            else:  # it may put the content between any two characters
                weights.add(content)


class _Weights:
    """How many characters, at most, steps make of each character. Steps are visited from the last to the first.

    A character's weight is that of its compatible characters in lower case, which is what some steps make of it.
    """

    def __init__(self):
        self._least: float = 1
        self._more: dict[str, float] = {}

    def of(self, text: str) -> float:
        return sum(self._more.get(character, self._least) for character in _plain(text))

    def add(self, weight: float) -> None:
        if weight:
            self.change(lambda other: other + weight)

    def raise_to(self, weight: float) -> None:
        if weight > self._least:
            self.change(lambda other: max(other, weight))

    def raise_first(self, text: str, weight: float) -> None:
        """Let a text weigh this much at least, by its first character."""
        if (missing := weight - self.of(text)) > 0:
            self._more[text[0]] = self._check(self._more.get(text[0], self._least) + missing)

    def change(self, function: Callable[[float], float]) -> None:
        self._least = self._check(function(self._least))
        self._more = {character: self._check(function(weight)) for character, weight in self._more.items()}

    def _check(self, weight: float) -> float:
        if weight > _GROWTH:
            raise LimitError(f"has steps that make text {weight:,.0f} times longer, more than {_GROWTH} times")
        return weight


def _plain(text: str) -> str:
    return unicodedata.normalize("NFKD", text.casefold())


def _check_templates(steps: Sequence[dict[str, Any]]) -> None:
    """Raise LimitError if templates, one after the other, make a text very much longer."""
    _check_count(steps)
    grown = 1
    for step in steps:
        ids = (len(token["ids"]) for token in (step.get("special_tokens") or {}).values())
        grown *= max(1, *(len(step.get(key) or ()) for key in ("single", "pair"))) * max([1, *ids])
    if grown > _GROWTH:
        raise LimitError(f"has templates that put up to {grown:,} tokens into a text, more than {_GROWTH}")
