"""A cap on what a tokenizer's file asks of the libraries, which have none and end the process once memory is short."""

import base64
import json
import unicodedata
from collections.abc import Iterable
from math import prod
from typing import Any

_LARGEST_ID, _TOKEN_CHARACTERS, _VOCABULARY_CHARACTERS, _GROWTH = 1 << 24, 10_000, 1 << 24, 128
_GROWS = {"ByteLevel": 5, "Metaspace": 2, "BertNormalizer": 3, "WordPiece": 2, "BPEDecoder": 3, "CTC": 3}
"""How many times longer a step of this type makes a text at most, without the texts that it puts in."""
_PUTS_IN = ("content", "prepend", "replacement", "prefix", "continuing_subword_prefix", "end_of_word_suffix")


class LimitError(ValueError):
    """A tokenizer exceeds a limit. The message goes on after the file's name."""


def parse_tokenizer(content: bytes) -> dict[str, Any]:
    """Return the settings of a `tokenizer.json`; raises LimitError, or KeyError, TypeError for one that is none."""
    settings = json.loads(content, object_pairs_hook=_unique)
    model, added = settings["model"], settings.get("added_tokens") or ()
    vocabulary = model.get("vocab") or {}
    in_order = isinstance(vocabulary, list)
    pieces = [piece for piece, *_ in vocabulary] if in_order else [*vocabulary]
    ids = [*(() if in_order else vocabulary.values()), *(token["id"] for token in added)]
    check_tokens([*pieces, *(token["content"] for token in added)], ids)
    for names in (("normalizer", "pre_tokenizer"), ("decoder",), ("post_processor",)):
        steps = [settings[name] for name in names if settings.get(name)]
        growth = prod(map(_growth, steps)) * (_growth({"type": ""} | model) if "normalizer" in names else 1)
        if growth > _GROWTH:
            raise LimitError(
                f"has a {names[0]} that could make text {growth:,} times longer, more than {_GROWTH} times"
            )
    return settings


def check_tokens(tokens: Iterable[str], ids: Iterable[int]) -> None:
    """Raise LimitError for long tokens, and for an id that no vocabulary has: libraries list all ids below it."""
    lengths = [len(token) for token in tokens]
    if (longest := max(lengths, default=0)) > _TOKEN_CHARACTERS or sum(lengths) > _VOCABULARY_CHARACTERS:
        raise LimitError(f"has tokens of up to {longest:,} and in all {sum(lengths):,} characters, too many")
    if (largest := max(ids, default=0)) > _LARGEST_ID:
        raise LimitError(f"has the id {largest:,}, above {_LARGEST_ID:,}")


def check_rules(rules: bytes) -> int:
    """Return the length of the longest text that compiled rules of normalization put in; raises LimitError."""
    longest = max(map(len, rules[4 + int.from_bytes(rules[:4], "little") :].decode("utf-8", "replace").split("\0")))
    if longest > _GROWTH:
        raise LimitError(f"has rules that make {longest:,} characters of one, more than {_GROWTH}")
    return longest


def _growth(step: dict[str, Any]) -> int:
    """Return how many times longer a step, with those in it, makes a text at most."""
    growth = _GROWS.get(step["type"], 1) * max(1, *(len(step.get(key) or ()) for key in ("single", "pair")))
    for text in (step[key] for key in _PUTS_IN if isinstance(step.get(key), str)):
        anywhere = "pattern" in step and not step["pattern"].get("String")  # perhaps between any two characters
        growth *= max(1, len(unicodedata.normalize("NFKD", text)) + anywhere)
    if rules := step.get("precompiled_charsmap"):
        growth *= max(1, check_rules(base64.b64decode(rules)))
    inner = (step.get(key) or () for key in ("normalizers", "pretokenizers", "decoders", "processors"))
    return growth * prod(_growth(one) for steps in inner for one in steps)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON. Of a key that is given twice, the library may use another value than Python does."""
    if len(result := dict(pairs)) < len(pairs):
        raise LimitError("gives a key twice in the same object")
    return result
