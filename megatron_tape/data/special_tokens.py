"""Special tokens of a tokenizer: their names in settings files, and that no text becomes one."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NotRequired

import numpy as np
from pydantic import Field, NonNegativeInt
from typing_extensions import TypedDict

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
    ("\U0010fffd", "\U0010fffd"),  # a character that no vocabulary contains
)
"""Texts before and after a special token, for the check that text does not encode to one."""
CONFIG = "tokenizer_config.json"
MAP = "special_tokens_map.json"
ADDED = "added_tokens.json"


class _AddedToken(TypedDict):
    """A token in `added_tokens_decoder`."""

    content: str
    special: NotRequired[bool]


class _Config(TypedDict):
    """The checked part of `tokenizer_config.json`: added tokens by id."""

    added_tokens_decoder: NotRequired[dict[Annotated[str, Field(pattern="^[0-9]+$")], _AddedToken]]


_SHAPES: dict[str, Any] = {CONFIG: _Config, MAP: dict[str, Any], ADDED: dict[str, NonNegativeInt]}
"""The types with which `parse_record` validates the settings files, by name."""


class SpecialTokens:
    """The special tokens named in the settings files next to the tokenizer file `path`.

    `files` are the files' contents by name. `token_to_id`, an argument of several methods, returns
    the tokenizer's id of a token, or None. Raises FileError if a settings file is malformed.
    """

    def __init__(self, files: Mapping[str, bytes], path: Path):
        self._path = path
        settings = {}
        for name, shape in _SHAPES.items():
            try:
                settings[name] = parse_record(files.get(name, b"{}"), shape)
            except ValueError as error:
                raise self._error(
                    name, f"cannot be used: {error}", "save the tokenizer again or remove the file"
                ) from None
        self.config: dict[str, Any] = settings[CONFIG]
        """The content of `tokenizer_config.json`."""
        # Added tokens are in `tokenizer_config.json`, in `added_tokens.json`, or in both.
        # `_decoder` has the tokens of the first file by id, and `_added` the ids of all by token.
        self._decoder = self.config.get("added_tokens_decoder", {})
        self._added = settings[ADDED]
        self._added |= {token["content"]: int(index) for index, token in self._decoder.items()}
        # As in transformers, `tokenizer_config.json` has priority.
        self._settings = settings[MAP] | self.config
        # The settings that name special tokens, such as `eos_token`.
        self._named = {
            key: value for key, value in self._settings.items() if names_tokens(key, value)
        }

    def _error(self, name: str, problem: str, fix: str) -> FileError:
        """Return an error about the settings file `name`."""
        return FileError(self._path.with_name(name), problem, fix)

    def check_added(self, token_to_id: Callable[[str], int | None]) -> None:
        """Raise FileError if an added token does not exist in the tokenizer, or has another id."""
        for token, index in self._added.items():
            model_id = token_to_id(token)
            if model_id != index:
                raise self._error(
                    CONFIG,
                    f"has the added token {format_value(token)} with id {index}, but its id in"
                    f" {self._path.name} is {model_id}",
                    "save the tokenizer with transformers, which writes a tokenizer.json",
                )

    def special(self) -> set[str]:
        """Return the special tokens that the files name, even if the tokenizer lacks them."""
        tokens = {token["content"] for token in self._decoder.values() if token.get("special")}
        for value in self._named.values():
            tokens |= {token for token in _token_texts(value).values() if isinstance(token, str)}
        return tokens - {""}

    def existing(self, token_to_id: Callable[[str], int | None]) -> tuple[dict, list[str]]:
        """Return the settings that name special tokens, reduced to the tokens that exist.

        The second value lists the tokens that do not exist, shortened for a message. A setting
        keeps its kind, such as a list, but the objects in it are replaced by their texts.
        """
        missing = []
        settings: dict[str, Any] = {}
        for key, value in self._named.items():
            tokens = {}
            for name, token in _token_texts(value).items():
                if isinstance(token, str) and token_to_id(token) is not None:
                    tokens[name] = token
                elif token is not None:
                    missing.append(f"{token!r:.100}")

            # A list, a dictionary by name, or a single token, whose name is "".
            if isinstance(value, list):
                settings[key] = [*tokens.values()]
            elif isinstance(value, dict) and "content" not in value:
                settings[key] = tokens
            elif tokens:
                settings[key] = tokens[""]
        return settings, list(dict.fromkeys(missing))

    def id_of(
        self, key: str, token_to_id: Callable[[str], int | None], default: Sequence[str]
    ) -> int | None:
        """Return the id of the token that the setting `key` names; None if the setting is null.

        If no file has this setting, `default` is used: tokens, at most one of which may exist in
        the tokenizer. Raises FileError if the named token does not exist, or if several tokens of
        `default` exist.
        """
        if key in self._settings:
            # The name of a single token is "".
            token = _token_texts(self._settings[key]).get("")
            if token is None:
                return None
            # The value may be of any type, since the file is not trusted.
            index = token_to_id(token) if isinstance(token, str) else None
            if index is None:
                file = CONFIG if key in self.config else MAP
                raise self._error(
                    file,
                    f"names {format_value(token)} as {key}, but {self._path.name} has no such"
                    " token",
                    "name an existing token, or add this one to the tokenizer and save it again",
                )
            return index
        candidates = [token for token in default if token_to_id(token) is not None]
        if len(candidates) > 1:
            raise FileError(
                self._path,
                f"has several tokens that could be its {key}: {', '.join(candidates)}",
                f'name one in {CONFIG} next to it: {{"{key}": "{candidates[0]}"}}',
            )
        return token_to_id(candidates[0]) if candidates else None


def names_tokens(key: str, value: Any) -> bool:
    """Return whether a setting names special tokens, such as `bos_token: "<s>"`.

    Some other settings have similar keys, such as `add_bos_token: true`.
    """
    return key.endswith(("_token", "_special_tokens")) and not isinstance(value, int | float)


def refuse_specials_in_text(
    path: Path,
    encode_batch: Callable[[list[str]], Sequence[np.ndarray]],
    special: Mapping[str, int],
) -> None:
    """Raise FileError if a text that contains the name of a special token encodes to one.

    `special` maps the names to ids. A document that mentions `</s>` would otherwise end there.

    A tokenizer does so if its vocabulary for text contains the token. The SentencePiece library
    keeps control tokens out of that vocabulary. A `tokenizer.json` that was made from such a model
    may contain them.
    """
    texts = [f"{before}{token}{after}" for token in special for before, after in _CONTEXTS]
    # A set, since some tokenizers have a thousand special tokens.
    special_ids = set(special.values())
    for text, ids in zip(texts, encode_batch(texts)):
        encoded = special_ids.intersection(ids.tolist())
        if encoded:
            raise FileError(
                path,
                f"encodes the text {ascii(text)} to the special token {min(encoded)}",
                "use the SentencePiece model (.model) that it was made from, or a tokenizer that"
                " never encodes text to special tokens",
            )


def _token_texts(value: Any) -> dict:
    """Return the texts of the special tokens in a setting's value, by name.

    The value is a token, a list of tokens, or a dictionary of tokens by name. A token is its text,
    or an object with its text under `content`. The names are "" for a single token, and the indices
    of a list. A text is not a string if the file is malformed.
    """
    tokens = {"": value}
    if isinstance(value, list):
        tokens = {str(index): token for index, token in enumerate(value)}
    elif isinstance(value, dict) and "content" not in value:
        tokens = value
    texts = {}
    for name, token in tokens.items():
        texts[name] = token
        if isinstance(token, dict):
            texts[name] = token.get("content")
    return texts
