"""Read the `config.json` of models that others wrote; torch is not imported."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_tape.errors import ConfigError
from megatron_tape.io.records import read_record

SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "max_position_embeddings",
    "vocab_size",
)
"""Sizes that every `config.json` must give."""


@contextmanager
def one_sentence(path: Path) -> Iterator[None]:
    """Turn errors caused by the settings in `path` into a ValueError of one sentence that names the file."""
    try:
        yield
    except KeyError as error:
        raise ValueError(f"{path} has no {error.args[0]}; give the config.json that belongs to the weights") from None
    except ConfigError as error:
        raise ValueError(f"{path} describes a model that cannot be built: {error}") from None
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{path} holds a setting of the wrong type: {error}") from None
    except ArithmeticError as error:
        raise ValueError(f"{path} holds a number that no model can have: {error}") from None


def check_sizes(settings: dict, path: Path) -> None:
    """Raise ValueError if one of `SIZES` is not a whole number above 0."""
    for key in SIZES:
        if type(settings.get(key)) is not int or settings[key] < 1:
            raise ValueError(f"{key} is {settings.get(key)!r} in {path}, but must be a whole number above 0")


def read_settings(path: Path) -> dict:
    """Return the JSON object of a `config.json`; raises FileNotFoundError or ValueError in one sentence."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file; the model's config.json is needed")
    try:
        return read_record(path, dict[str, Any])
    except ValueError as error:
        raise ValueError(f"{error}; give the model's config.json") from None


def padded_vocabulary(rows: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that holds `rows`; raises ValueError if `multiple` is below 1."""
    if multiple < 1:
        raise ValueError(f"--vocab-multiple is {multiple}; give 1 or more")
    return -(-rows // multiple) * multiple
