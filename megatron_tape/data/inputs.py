"""Check that the files that a run reads exist, are complete and suit the run. Does not import torch."""

import errno
import functools
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_tape import command_line
from megatron_tape.checkpoint.directories import list_checkpoints, read_state
from megatron_tape.config.examples import examples_of
from megatron_tape.config.schema import RunConfig, blend
from megatron_tape.config.values import shown
from megatron_tape.data.examples import cutter_of, read_examples
from megatron_tape.data.indexed_dataset import IndexedDatasetReader
from megatron_tape.data.long_documents import find_pools
from megatron_tape.data.remembered import check_once
from megatron_tape.data.tokenizer import Tokenizer, load_tokenizer
from megatron_tape.errors import ConfigError, refuse

logger = logging.getLogger(__name__)

_LARGE_INDEX = 1 << 30
"""Bytes of an index that takes seconds to check."""


def load_run_tokenizer(config: RunConfig) -> Tokenizer | None:
    """Load `data.tokenizer`, if one is set; `ConfigError` if it cannot be read or has more ids than the model."""
    if config.data.tokenizer is None:
        return None
    try:
        tokenizer = load_tokenizer(config.data.tokenizer)
    except (ValueError, OSError) as error:
        raise ConfigError(f"data.tokenizer cannot be used: {error}") from error
    key = "vocab_size" if config.model.unpadded_vocab_size is None else "unpadded_vocab_size"
    rows = getattr(config.model, key)
    refuse(
        tokenizer.vocab_size > rows,
        f"model.{key} {rows} is smaller than the {tokenizer.vocab_size} pieces of data.tokenizer "
        f"{config.data.tokenizer}; "
        + ("raise it to at least that" if key == "vocab_size" else "give the tokenizer that the model came with"),
    )
    return tokenizer


def check_same_vocabulary(checkpoint: Path, state: dict, tokenizer: Tokenizer, config: RunConfig) -> None:
    """Raise `ConfigError` if a run would continue with a vocabulary other than that of its checkpoint.

    Older checkpoints and imports do not record their vocabulary. For these, a tokenizer that was saved with the
    checkpoint or that its settings name is compared, if it still exists, and a difference is only a warning.
    """
    used, digest = config.data.tokenizer, tokenizer.vocabulary_digest()
    named = state["config"].get("data", {}).get("tokenizer")
    saved = state["progress"].get("vocabulary")
    refuse(
        saved is not None and saved != digest,
        f"data.tokenizer {used} has another vocabulary than the one with which checkpoint {checkpoint} was trained "
        f"({named}); use that one, or start a new run with checkpoint.resume: none",
    )
    source = checkpoint / "tokenizer" if (checkpoint / "tokenizer").is_dir() else named
    if saved is None and source is not None:
        try:
            same = load_tokenizer(source).vocabulary_digest() == digest
        except (ValueError, OSError):
            return
        if not same:
            message = "data.tokenizer %s has another vocabulary than %s, the tokenizer of the model in %s"
            logger.warning(message, used, source, checkpoint)


def check_datasets(config: RunConfig) -> None:
    """Raise `ConfigError` if a dataset is damaged, or lacks the document ends or lengths that the run needs.

    Indices and examples that passed are not read again before they change (see `check_once`).
    """
    tokenizer = load_run_tokenizer(config)
    cache = config.data.resolved_cache_directory
    for prefix in blend(config.data.prefix)[0]:
        try:
            dataset = IndexedDatasetReader(prefix)
            files = [dataset.idx_path, dataset.bin_path]
            problem = check_once("index 1", files, cache, functools.partial(_first_problem, dataset))
        except (ValueError, OSError) as error:
            problem = str(error)
        refuse(problem is not None, f"data.prefix names {prefix}, which is not whole: {problem}")
        refuse(len(dataset) == 0, f"data.prefix names {prefix}, which holds no document")
        refuse(
            config.data.reset_attention_mask and dataset.document(0)[-1:].tolist() != [tokenizer.eod],
            f"data.reset_attention_mask is true, but the documents of {prefix} do not end in data.tokenizer's "
            "end-of-document token; preprocess them again with --append-eod",
        )
    if config.data.long_documents is not None:
        find_pools(config)
    if config.data.examples is not None:
        _check_examples(config, tokenizer)


def _first_problem(dataset: IndexedDatasetReader) -> str | None:
    if dataset.idx_path.stat().st_size > _LARGE_INDEX:
        command_line.say(f"checking {dataset.idx_path}, once: {len(dataset):,} documents")
    return next(dataset.problems(), None)


def _check_examples(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Read all examples; raise `ConfigError` for the first bad line, or if no samples can be made of them."""
    cutter_of(config, tokenizer)
    settings, cache = examples_of(config.data.examples), config.data.resolved_cache_directory
    for path in filter(None, (settings.path, settings.validation)):
        problem = check_once("examples 1", [path], cache, functools.partial(_no_example, path))
        refuse(problem is not None, f"{path} {problem}; give another file as data.examples")


def _no_example(path: str) -> str | None:
    return None if sum(1 for _ in read_examples(path, "")) else "holds no example"


def check_inputs(config: RunConfig) -> None:
    """Raise `ConfigError` for the first input file that does not exist, or output directory that cannot be written.

    Raises OSError where the file system does not answer.
    """
    for name, directory in (
        ("logging.directory", config.logging.directory),
        ("checkpoint.directory", config.checkpoint.directory),
    ):
        with _names_the_setting(name, directory):
            existing = _nearest(directory)
            refuse(
                existing is not None and not (existing.is_dir() and os.access(existing, os.W_OK)),
                f"{name} is {directory}, but {existing} is not a writable directory; choose another",
            )
    _refuse_checkpoints_of_another_run(config)
    for prefix in blend(config.data.prefix)[0]:
        for suffix in (".idx", ".bin"):
            with _names_the_setting("data.prefix", prefix):
                refuse(
                    not Path(prefix + suffix).is_file(),
                    f"data.prefix names {prefix}, but {prefix}{suffix} does not exist; preprocess the corpus or "
                    "correct it",
                )
    cache = config.data.resolved_cache_directory
    with _names_the_setting("data.cache_directory", cache):
        existing = _nearest(cache)
        # One that exists may hold all that is needed, and need not be writable.
        usable = existing is None or (existing.is_dir() and (existing == Path(cache) or os.access(existing, os.W_OK)))
        refuse(
            not usable, f"data.cache_directory is {cache}, but {existing} is not a writable directory; choose another"
        )
    examples = None if config.data.examples is None else examples_of(config.data.examples)
    for name, path in (("path", examples.path), ("validation", examples.validation)) if examples else ():
        with _names_the_setting(f"data.examples.{name}", path):
            refuse(
                path is not None and not Path(path).is_file(),
                f"data.examples.{name} is {path}, but there is no such file; correct it",
            )
            refuse(
                path is not None and not path.endswith((".jsonl", ".json")),
                f"data.examples.{name} is {path}; give uncompressed JSON lines, .jsonl or .json (unzip those of "
                "SCROLLS first)",
            )
    tokenizer, resume = config.data.tokenizer, config.checkpoint.resume
    with _names_the_setting("data.tokenizer", tokenizer):
        refuse(
            tokenizer is not None and not Path(tokenizer).exists(),
            f"data.tokenizer {tokenizer} does not exist; train or fetch it, or correct the path",
        )
    with _names_the_setting("checkpoint.resume", resume):
        refuse(
            resume not in ("auto", "none") and not Path(resume).is_dir(),
            f"checkpoint.resume {resume} is not a directory; set it to auto, none or a checkpoint's path",
        )


def _nearest(directory: str | None) -> Path | None:
    """Return a directory, or the first of its parents that exists; None if none does or no directory is given."""
    parts = [Path(directory), *Path(directory).parents] if directory else []
    return next((path for path in parts if path.exists()), None)


def _refuse_checkpoints_of_another_run(config: RunConfig) -> None:
    """Refuse a `checkpoint.directory` that another run, which still exists, uses; the default place is never refused.

    It belongs to the run that it is inside, or else to the one that saved its newest checkpoint.
    """
    run, directory = config.logging.directory, config.checkpoint.directory
    if not run or not directory or Path(os.path.abspath(run)) in Path(os.path.abspath(directory)).parents:
        return
    owners = [Path(directory).parent]
    for _, newest in list_checkpoints(directory)[:1]:
        with suppress(ValueError, FileNotFoundError):
            owners.append(Path(read_state(newest)["config"].get("logging", {}).get("directory") or run))
    for owner in owners:
        refuse(
            (owner / "attempts").is_dir() and owner.resolve() != Path(run).resolve(),
            f"checkpoint.directory is {directory}, which belongs to the run {owner}, but logging.directory is {run}; "
            "leave it out or set it to null for checkpoints in the run's own directory, and to begin with those of the "
            "other run, give one as checkpoint.resume",
        )


@contextmanager
def _names_the_setting(key: str, path: str | None) -> Iterator[None]:
    """Turn what is wrong with a path, and not with the file system, into `ConfigError`."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ELOOP):
            raise
        raise ConfigError(f"{key} is {shown(path)}, which cannot be read ({error.strerror}); correct it") from None
