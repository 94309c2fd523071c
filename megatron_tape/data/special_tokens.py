"""Find the special tokens named in a tokenizer's settings files, and check that text does not
encode to one.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_tape.config.values import format_value
from megatron_tape.errors import FileError
from megatron_tape.io.records import parse_record

_CONTEXTS = (
    ("", ""),
    ("a", "b"),
    ("a ", " b"),
    (" ", ""),
    ("", " "),
    ("(", ")"),
    ('"', '",'),
    ("1", "2"),
    ("\n", "\n"),
)
"""Texts before and after a special token, for the check that text does not encode to a special
token.
"""
_TOKENS_AT_ONCE = 64
CONFIG = "tokenizer_config.json"
MAP = "special_tokens_map.json"


class SpecialTokens:
    """The special tokens named in the settings files next to the tokenizer file `path`.

    `files` are the files' contents by name. `token_to_id`, an argument of several methods, returns
    the tokenizer's id of a token, or None. Raises FileError if a settings file is malformed.
    """

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
                raise FileError(
                    str(path.with_name(name)), f"cannot be used: {error}", fix
                ) from None
        self._path = path

    @property
    def config(self) -> dict[str, Any]:
        """The content of `tokenizer_config.json`."""
        return self._settings.get(CONFIG, {})

    def added(self) -> dict[str, tuple[int, bool]]:
        """Return the id of each added token, and whether it is special. Raises FileError for an
        invalid token.
        """
        tokens = [
            (token, index, False)
            for token, index in self._settings.get("added_tokens.json", {}).items()
        ]
        decoder = self.config.get("added_tokens_decoder")
        for key, token in decoder.items() if isinstance(decoder, dict) else ():
            index = int(key) if re.fullmatch("[0-9]{1,9}", key) else key
            content, special = (
                token.get(name) if isinstance(token, dict) else None
                for name in ("content", "special")
            )
            tokens.append((content, index, bool(special)))
        for token, index, _ in tokens:
            if not isinstance(token, str) or type(index) is not int or not 0 <= index < 2**31:
                shown = format_value(token), format_value(index)
                problem = "or added_tokens.json has the added token {} with id {}".format(*shown)
                fix = (
                    "save the tokenizer again: tokens must be strings, and ids whole numbers from 0"
                    " below 2**31"
                )
                raise FileError(str(self._path.with_name(CONFIG)), problem, fix)
        return {token: (index, special) for token, index, special in tokens}

    def check_added(self, token_to_id: Callable[[str], int | None]) -> None:
        """Raise FileError if an added token has another id in the tokenizer, or does not exist
        there.
        """
        for token, (index, _) in self.added().items():
            if (model_id := token_to_id(token)) != index:
                if model_id is None:
                    has = "does not have it"
                else:
                    has = f"has it with id {model_id}"
                problem = (
                    f"has the added token {format_value(token)} with id {index}, but"
                    f" {self._path.name} {has}"
                )
                fix = "save the tokenizer with transformers, which writes a tokenizer.json"
                raise FileError(str(self._path.with_name(CONFIG)), problem, fix)

    def special(self) -> set[str]:
        """Return the special tokens that the files name, including those that the tokenizer
        lacks.
        """
        tokens = [token for token, (_, special) in self.added().items() if special]
        for _, value in self._naming():
            if isinstance(value, dict) and "content" not in value:
                several = value.values()
            else:
                several = value
            tokens += (
                [_content(token) for token in several]
                if isinstance(value, list | dict)
                else [value]
            )
        return {token for token in tokens if isinstance(token, str) and token}

    def existing(
        self, token_to_id: Callable[[str], int | None]
    ) -> tuple[dict[str, Any], list[str]]:
        """Return the settings that name special tokens, and a list of the named tokens that the
        tokenizer lacks.

        The settings omit these tokens. `tokenizer_config.json` has priority over
        `special_tokens_map.json`.
        """
        missing: list[str] = []

        def exists(token: Any) -> bool:
            known = isinstance(token, str) and token_to_id(token) is not None
            if not known:
                missing.append(f"{token!r:.100}")
            return known

        settings: dict[str, Any] = {}
        for key, value in dict(reversed(self._naming())).items():
            if isinstance(value, list):
                settings[key] = [token for token in map(_content, value) if exists(token)]
            elif isinstance(value, dict) and "content" not in value:
                settings[key] = {
                    name: _content(token)
                    for name, token in value.items()
                    if exists(_content(token))
                }
            elif value is not None and exists(_content(value)):
                settings[key] = _content(value)
        return settings, list(dict.fromkeys(missing))

    def _naming(self) -> list[tuple[str, Any]]:
        """Return the settings that name special tokens as pairs (key, value), those of
        tokenizer_config.json first.
        """
        pairs = (pair for name in (CONFIG, MAP) for pair in self._settings.get(name, {}).items())
        return [(key, value) for key, value in pairs if names_tokens(key, value)]

    def id_of(
        self,
        key: str,
        token_to_id: Callable[[str], int | None],
        default: Sequence[str] | int | None,
    ) -> int | None:
        """Return the id of the token that the setting `key`, such as eos_token, names; None if the
        setting is null.

        If no file has this setting, `default` is used: an id, None, or a list of tokens, at most
        one of which may exist in the tokenizer. Raises FileError if the named token does not exist,
        if the files name different tokens, or if several tokens of `default` exist.
        """
        naming = [
            (name, self._settings[name][key])
            for name in (CONFIG, MAP)
            if key in self._settings.get(name, {})
        ]
        if len({str(_content(value)) for _, value in naming}) > 1:
            one, other = (_content(value) for _, value in naming)
            problem = f"names {format_value(one)} as {key}, but {MAP} names {format_value(other)}"
            raise FileError(
                str(self._path.with_name(CONFIG)), problem, "name the same token in both"
            )
        for file, value in naming:
            if value is None:
                return None
            token = _content(value)
            index = token_to_id(token) if isinstance(token, str) else None
            if index is None:
                problem = (
                    f"names {format_value(token)} as {key}, but {self._path.name} has no such token"
                )
                fix = "name an existing token, or add this one to the tokenizer and save it again"
                raise FileError(str(self._path.with_name(file)), problem, fix)
            return index
        if default is None or isinstance(default, int):
            return default
        candidates = [token for token in default if token_to_id(token) is not None]
        if len(candidates) > 1:
            problem = f"has several tokens that could be its {key}: {', '.join(candidates)}"
            fix = f'name one in {CONFIG} next to it: {{"{key}": "{candidates[0]}"}}'
            raise FileError(str(self._path), problem, fix)
        if candidates:
            return token_to_id(candidates[0])
        return None


def names_tokens(key: str, value: Any) -> bool:
    """Return whether a setting names special tokens, unlike `add_bos_token: true` and
    `split_special_tokens: false`.
    """
    return key.endswith(("_token", "_special_tokens")) and not isinstance(value, int | float)


def specials_in_text(
    encode_batch: Callable[[list[str]], Sequence[np.ndarray]], special: Mapping[str, int]
) -> list[str]:
    """Return the tokens of `special` (ids by token) that, when they occur in a text, are encoded as
    special tokens.
    """
    tokens = list(special)
    ids = set(special.values())
    found = []
    for start in range(0, len(tokens), _TOKENS_AT_ONCE):
        some = tokens[start : start + _TOKENS_AT_ONCE]
        encoded = encode_batch(
            [f"{before}{token}{after}" for token in some for before, after in _CONTEXTS]
        )
        of_token = (
            encoded[at : at + len(_CONTEXTS)] for at in range(0, len(encoded), len(_CONTEXTS))
        )
        found += [
            token
            for token, texts in zip(some, of_token)
            if not all(ids.isdisjoint(text.tolist()) for text in texts)
        ]
    return found


def refuse_specials_in_text(
    path: Path, special: Mapping[str, int], tokens: list[str], why: str
) -> None:
    """Raise FileError if `tokens`, the result of `specials_in_text`, is not empty. `why` is the
    reason, in brackets.
    """
    if tokens:
        token = tokens[0]
        problem = f"encodes text that mentions {token} to the special token {special[token]} {why}"
        raise FileError(
            str(path), problem, "use a tokenizer that never encodes text to special tokens"
        )


def _content(token: Any) -> Any:
    """Return the text of a token, which may be an object with further settings."""
    if isinstance(token, dict):
        return token.get("content")
    return token
