"""The tokenizer of a run, whose files each checkpoint keeps: paths may lead to another one by now. Imports no torch."""

import dataclasses
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from megatron_tape.checkpoint.directories import newest_whole
from megatron_tape.checkpoint.locate import what_to_resume
from megatron_tape.config.schema import RunConfig
from megatron_tape.data.inputs import naming_the_setting
from megatron_tape.data.tokenizer import Tokenizer, difference, load_tokenizer, record_of, write_files
from megatron_tape.errors import ConfigError, refuse

TOKENIZER = "tokenizer"
"""The directory in a checkpoint that holds the tokenizer with which the model was trained."""
_KEY = "data.tokenizer"


def saved_tokenizer(checkpoint: Path) -> Tokenizer | None:
    """Load the tokenizer that a checkpoint keeps, or return None if it keeps none. Raises FileError."""
    directory = checkpoint / TOKENIZER
    return load_tokenizer(directory) if directory.is_dir() else None


def write_tokenizer_files(files: Mapping[str, bytes], checkpoint: Path) -> list[str]:
    """Write a tokenizer's files into a checkpoint, flush them to disk, and return their names in the checkpoint."""
    return [f"{TOKENIZER}/{name}" for name in write_files(files, checkpoint / TOKENIZER)]


def with_kept_tokenizer(config: RunConfig, start: Path | None) -> RunConfig:
    """Return the settings with the tokenizer that checkpoint `start` keeps, if it keeps one, as `data.tokenizer`.

    `start` is what the run continues or begins with. If there is still a tokenizer at `data.tokenizer`, it must be the
    same. Raises ConfigError.
    """
    if start is None or config.data.generator is not None or not (start / TOKENIZER).is_dir():
        return config
    kept, given = start / TOKENIZER, config.data.tokenizer
    if given is not None and Path(given).exists() and Path(given).resolve() != kept.resolve():
        check_same_tokenizer(given, load_tokenizer(kept), f"checkpoint {start}")
    return dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer=str(kept)))


def check_same_tokenizer(given: str, own: Tokenizer, model: str) -> None:
    """Raise ConfigError if the tokenizer at `given`, which is `data.tokenizer`, is not `own`, that of `model`."""
    try:
        different = difference(record_of(load_tokenizer(given)), record_of(own))
    except (ValueError, OSError) as error:
        raise ConfigError(_KEY, f"cannot be used: {error}") from error
    refuse(
        different is not None,
        (_KEY, "checkpoint.resume", "extension.from"),
        f"is {given}, which {different} than the tokenizer that {model} was trained with",
        "leave it out to use that one, which the checkpoint keeps, and preprocess the data with it",
    )


def check_tokenizer_exists(config: RunConfig) -> None:
    """Raise ConfigError if nothing is at `data.tokenizer`, and the checkpoint that the run continues keeps none."""
    given = config.data.tokenizer
    with naming_the_setting(_KEY, given):
        missing = given is not None and not Path(given).exists()
    fix = "train or fetch it, or correct the path"
    refuse(missing and kept_directory(config) is None, _KEY, f"is {given}, which does not exist", fix)


def kept_directory(config: RunConfig) -> Path | None:
    """Return where the checkpoint that a run continues, judged by the sizes of its files, keeps the tokenizer."""
    root = config.checkpoint.directory or ""
    with suppress(ValueError, OSError):
        resume = what_to_resume(config.checkpoint.resume, root)
        start = newest_whole(root, deep=False) if resume == "auto" else Path(resume)
        if resume != "none" and start is not None and (start / TOKENIZER).is_dir():
            return start / TOKENIZER
    return None
