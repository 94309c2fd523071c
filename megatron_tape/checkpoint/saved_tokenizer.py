"""Write the run's tokenizer into each checkpoint, and find it there when the run continues. Imports
no torch.

A checkpoint has a copy since the files at `data.tokenizer` may change later.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from megatron_tape.checkpoint.directories import read_manifest
from megatron_tape.checkpoint.locate import checkpoint_to_continue
from megatron_tape.config.schema import RunConfig, replace_settings
from megatron_tape.data.inputs import convert_path_errors
from megatron_tape.data.tokenizer import (
    Tokenizer,
    difference,
    load_tokenizer,
    tokenizer_record,
    write_files,
)
from megatron_tape.errors import CheckpointError, ConfigError

TOKENIZER = "tokenizer"
"""The directory in a checkpoint with the tokenizer's files."""
_KEY = "data.tokenizer"


def load_saved_tokenizer(checkpoint: Path) -> Tokenizer | None:
    """Return the tokenizer in a checkpoint, or None if the checkpoint has no tokenizer.

    Raises CheckpointError if the tokenizer uses a file that the manifest does not list.
    """
    directory = checkpoint / TOKENIZER
    if not directory.is_dir():
        return None
    tokenizer = load_tokenizer(directory)
    # The manifest has the checksums. A file that it does not list may be damaged or foreign.
    listed = read_manifest(checkpoint)["files"]
    if unlisted := [name for name in tokenizer.files if f"{TOKENIZER}/{name}" not in listed]:
        raise CheckpointError(
            directory / unlisted[0], "is not listed in the checkpoint's manifest", "remove it"
        )
    return tokenizer


def write_tokenizer_files(files: Mapping[str, bytes], checkpoint: Path) -> list[str]:
    """Write a tokenizer's files into the directory of a checkpoint, and flush them to disk.

    `files` maps names to contents. Return the paths of the files relative to `checkpoint`.
    """
    return [f"{TOKENIZER}/{name}" for name in write_files(files, checkpoint / TOKENIZER)]


def with_saved_tokenizer(config: RunConfig, start: Path | None) -> RunConfig:
    """Return the settings with `data.tokenizer` set to the tokenizer in checkpoint `start`, if it
    has one.

    `start` is the checkpoint that the run continues or starts from, or None. Raises ConfigError if
    the tokenizer at `data.tokenizer` still exists and differs from the one in the checkpoint.
    """
    # Data of a generator needs no tokenizer.
    if start is None or config.data.generator is not None or not (start / TOKENIZER).is_dir():
        return config
    saved = start / TOKENIZER
    configured = config.data.tokenizer
    tokenizer = load_saved_tokenizer(start)
    if configured is not None and Path(configured).exists() and not saved.samefile(configured):
        name = f"that of checkpoint {start}"
        check_same_tokenizer(configured, tokenizer, name, f"set data.tokenizer: {saved}")
    return replace_settings(config, {"data.tokenizer": str(saved)})


def check_same_tokenizer(path: str, expected: Tokenizer, name: str, fix: str) -> None:
    """Raise ConfigError if the tokenizer at `path` cannot be loaded or differs from `expected`.

    `path` is the value of `data.tokenizer`. In the message, `name` describes the expected
    tokenizer, and `fix` says what to do.
    """
    try:
        tokenizer = load_tokenizer(path)
    except (ValueError, OSError) as error:
        raise ConfigError(_KEY, f"cannot be used: {error}") from error
    problem = difference(tokenizer_record(tokenizer), tokenizer_record(expected), name)
    if problem is not None:
        raise ConfigError(
            (_KEY, "checkpoint.resume", "extension.from"),
            f"{path} {problem}",
            f"{fix}, and preprocess the data with it",
        )


def check_tokenizer_exists(config: RunConfig) -> None:
    """Raise ConfigError if neither `data.tokenizer` nor a tokenizer in the checkpoint to continue
    exists.
    """
    path = config.data.tokenizer
    with convert_path_errors(_KEY, path):
        exists = path is None or Path(path).exists()
    if not exists and saved_tokenizer_directory(config) is None:
        fix = "train or download a tokenizer, or correct the path"
        raise ConfigError(_KEY, f"is {path}, which does not exist", fix)


def saved_tokenizer_directory(config: RunConfig) -> Path | None:
    """Return the tokenizer's directory in the checkpoint that a run continues, or None."""
    # A checkpoint that cannot be used is reported when the run opens it.
    with suppress(ValueError, OSError):
        start = checkpoint_to_continue(config)
        if start is not None and (start / TOKENIZER).is_dir():
            return start / TOKENIZER
    return None
