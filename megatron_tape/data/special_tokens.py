"""Find the special tokens that a tokenizer's settings files name, and check that text does not encode to one."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_tape.config.values import format_value
from megatron_tape.errors import FileError
from megatron_tape.io.records import parse_record

_CONTEXTS = ("", ""), ("a", "b"), ("a ", " b"), (" ", ""), ("", " "), ("(", ")"), ('"', '",'), ("1", "2"), ("\n", "\n")
_TOKENS_AT_ONCE = 64
CONFIG, MAP = "tokenizer_config.json", "special_tokens_map.json"


class SpecialTokens:
    """The settings in the files next to the tokenizer at `path`. Raises FileError if one is malformed."""

    def __init__(self, files: Mapping[str, bytes], path: Path):
        self._settings = {}
        for name in (CONFIG, MAP, "added_tokens.json"):
            if name not in files:
                continue
            try:
                self._settings[name] = parse_record(files[name], dict[str, Any])
                json.dumps(self._settings[name], ensure_ascii=False).encode()
            except ValueError as error:
                fix = "save the tokenizer again or remove the file"
                raise FileError(str(path.with_name(name)), f"cannot be used: {error}", fix) from None
        self._path = path

    @property
    def config(self) -> dict[str, Any]:
        """The content of `tokenizer_config.json`."""
        return self._settings.get(CONFIG, {})

    def added(self) -> dict[str, tuple[int, bool]]:
        """Return the added tokens: the id of each, and whether it is special."""
        found = [(token, index, False) for token, index in self._settings.get("added_tokens.json", {}).items()]
        decoder = self.config.get("added_tokens_decoder")
        for key, token in decoder.items() if isinstance(decoder, dict) else ():
            index = int(key) if re.fullmatch("[0-9]{1,9}", key) else key
            content, special = (token.get(name) if isinstance(token, dict) else None for name in ("content", "special"))
            found.append((content, index, bool(special)))
        for token, index, _ in found:
            if not isinstance(token, str) or type(index) is not int or not 0 <= index < 2**31:
                problem = (
                    f"or added_tokens.json gives the added token {format_value(token)} the id {format_value(index)}"
                )
                raise FileError(str(self._path.with_name(CONFIG)), problem, "save the tokenizer again")
        return {token: (index, special) for token, index, special in found}

    def check_added(self, ids: Callable[[str], int | None]) -> None:
        """Raise FileError if an added token has another id in the tokenizer. `ids` returns the id there, or None."""
        for token, (index, _) in self.added().items():
            if (own := ids(token)) != index:
                has = "does not have it" if own is None else f"gives it {own}"
                problem = f"gives the added token {format_value(token)} the id {index}, but {self._path.name} {has}"
                fix = "save the tokenizer with transformers, which writes a tokenizer.json"
                raise FileError(str(self._path.with_name(CONFIG)), problem, fix)

    def special(self) -> set[str]:
        """Return the special tokens that the files name, even those that do not exist."""
        found = [token for token, (_, special) in self.added().items() if special]
        for _, value in self._named():
            several = value.values() if isinstance(value, dict) and "content" not in value else value
            found += [_content(token) for token in several] if isinstance(value, list | dict) else [value]
        return {token for token in found if isinstance(token, str) and token}

    def existing(self, ids: Callable[[str], int | None]) -> tuple[dict[str, Any], list[str]]:
        """Return the settings that name special tokens, reduced to existing tokens, and a list of the missing ones.

        `ids` returns the id of a token, or None. `tokenizer_config.json` has priority over the map.
        """
        missing: list[str] = []

        def exists(token: Any) -> bool:
            known = isinstance(token, str) and ids(token) is not None
            if not known:
                missing.append(f"{token!r:.100}")
            return known

        found: dict[str, Any] = {}
        for key, value in dict(reversed(self._named())).items():
            if isinstance(value, list):
                found[key] = [token for token in map(_content, value) if exists(token)]
            elif isinstance(value, dict) and "content" not in value:
                found[key] = {name: _content(token) for name, token in value.items() if exists(_content(token))}
            elif value is not None and exists(_content(value)):
                found[key] = _content(value)
        return found, list(dict.fromkeys(missing))

    def _named(self) -> list[tuple[str, Any]]:
        """Return the keys and values of `tokenizer_config.json`, then of the map, that name special tokens."""
        pairs = (pair for name in (CONFIG, MAP) for pair in self._settings.get(name, {}).items())
        return [(key, value) for key, value in pairs if names_tokens(key)]

    def id_of(self, key: str, ids: Callable[[str], int | None], unnamed: Sequence[str] | int | None) -> int | None:
        """Return the id of the token `key`, such as eos_token; `ids` returns that of a token, or None.

        `unnamed` is used if no file names the token: an id, or usual names; only one of these may exist. Raises
        FileError if the token does not exist, if the files name different ones, or if several usual names exist.
        """
        naming = [(name, self._settings[name][key]) for name in (CONFIG, MAP) if key in self._settings.get(name, {})]
        if len({str(_content(value)) for _, value in naming}) > 1:
            one, other = (_content(value) for _, value in naming)
            problem = f"names {format_value(one)} as {key}, and {MAP} {format_value(other)}"
            raise FileError(str(self._path.with_name(CONFIG)), problem, "name the same token in both")
        for file, value in naming:
            if value is None:
                return None
            token = _content(value)
            index = ids(token) if isinstance(token, str) else None
            if index is None:
                problem = f"names {format_value(token)} as {key}, which {self._path.name} does not have"
                fix = "name one that exists, or save the tokenizer again with that token"
                raise FileError(str(self._path.with_name(file)), problem, fix)
            return index
        if unnamed is None or isinstance(unnamed, int):
            return unnamed
        found = [token for token in unnamed if ids(token) is not None]
        if len(found) > 1:
            problem = f"has several tokens that could be its {key}: {', '.join(found)}"
            fix = f'name one in {CONFIG} next to it: {{"{key}": "{found[0]}"}}'
            raise FileError(str(self._path), problem, fix)
        return ids(found[0]) if found else None


def names_tokens(key: str) -> bool:
    """Return whether a setting names special tokens, unlike `add_bos_token`, which is a switch."""
    return key.endswith(("_token", "_special_tokens")) and not key.startswith("add_")


def specials_in_text(
    encode_batch: Callable[[list[str]], Sequence[np.ndarray]], special: Mapping[str, int]
) -> list[str]:
    """Return the special tokens that text containing their name encodes to."""
    tokens, ids, found = list(special), set(special.values()), []
    for start in range(0, len(tokens), _TOKENS_AT_ONCE):
        some = tokens[start : start + _TOKENS_AT_ONCE]
        encoded = encode_batch([f"{before}{token}{after}" for token in some for before, after in _CONTEXTS])
        of_token = (encoded[at : at + len(_CONTEXTS)] for at in range(0, len(encoded), len(_CONTEXTS)))
        found += [
            token for token, texts in zip(some, of_token) if not all(ids.isdisjoint(text.tolist()) for text in texts)
        ]
    return found


def refuse_specials_in_text(path: Path, special: Mapping[str, int], tokens: list[str], why: str) -> None:
    """Raise FileError if text encodes to special tokens. `tokens` lists them, and `why` is the reason."""
    if tokens:
        token = tokens[0]
        problem = f"encodes text that mentions {token} to the special token {special[token]} {why}"
        raise FileError(str(path), problem, "use a tokenizer that keeps special tokens apart from text")


def _content(token: Any) -> Any:
    """Return the text of a token, which may be an object with further settings."""
    return token.get("content") if isinstance(token, dict) else token
