"""Check that the files that a run learns from exist, are complete and suit the run. Does not import torch."""

import errno
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from megatron_tape import command_line
from megatron_tape.config.examples import examples_of
from megatron_tape.config.schema import RunConfig, blend, split_shares
from megatron_tape.config.stages import stages_of
from megatron_tape.config.values import shown
from megatron_tape.data.descriptors import check_descriptors
from megatron_tape.data.examples import cutter_of, read_examples
from megatron_tape.data.indexed_dataset import IndexedDatasetReader
from megatron_tape.data.long_documents import find_pools
from megatron_tape.data.remembered import check_once
from megatron_tape.data.tokenizer import Tokenizer, load_run_tokenizer
from megatron_tape.errors import ConfigError, FileError, refuse

_LARGE_INDEX = 1 << 30
"""Bytes of an index that takes seconds to check."""
_BLOCK = 1 << 20
"""How many documents are counted at once."""


def check_data_files(config: RunConfig) -> None:
    """Raise ConfigError for the first file that a run needs and that does not exist, or a cache that cannot be written.

    Raises OSError where the file system does not answer.
    """
    for stage in stages_of(config):
        with stage.naming_the_setting():
            _check_prefixes(stage.config)
    # A cache that exists may hold all that is needed, and need not be writable.
    cache = config.data.resolved_cache_directory
    check_writable("data.cache_directory", cache, existing_is_enough=True)
    examples = None if config.data.examples is None else examples_of(config.data.examples)
    for name, path in (("path", examples.path), ("validation", examples.validation)) if examples else ():
        if path is None:
            continue
        key = f"data.examples.{name}"
        with naming_the_setting(key, path):
            missing = not Path(path).is_file()
        refuse(missing, key, f"is {path}, but there is no such file", "correct it")
        fix = "give uncompressed JSON lines, .jsonl or .json (unzip those of SCROLLS first)"
        refuse(not path.endswith((".jsonl", ".json")), key, f"is {path}", fix)
    tokenizer = config.data.tokenizer
    with naming_the_setting("data.tokenizer", tokenizer):
        missing = tokenizer is not None and not Path(tokenizer).exists()
    refuse(missing, "data.tokenizer", f"is {tokenizer}, which does not exist", "train or fetch it, or correct the path")


def _check_prefixes(config: RunConfig) -> None:
    for prefix in blend(config.data.prefix)[0]:
        for suffix in (".idx", ".bin"):
            with naming_the_setting("data.prefix", prefix):
                missing = not Path(prefix + suffix).is_file()
            fix = "preprocess the corpus or correct it"
            refuse(missing, "data.prefix", f"names {prefix}, but {prefix}{suffix} does not exist", fix)


def check_writable(key: str, directory: str | None, existing_is_enough: bool = False) -> None:
    """Raise ConfigError if the directory that the setting `key` names cannot be made or written."""
    with naming_the_setting(key, directory):
        parts = [Path(directory), *Path(directory).parents] if directory else []
        existing = next((path for path in parts if path.exists()), None)
        if existing is None or (existing_is_enough and existing == Path(directory) and existing.is_dir()):
            return
        usable = existing.is_dir() and os.access(existing, os.W_OK)
    refuse(not usable, key, f"is {directory}, but {existing} is not a writable directory", "choose another")


@contextmanager
def naming_the_setting(key: str, path: str | None) -> Iterator[None]:
    """Turn what is wrong with a path, and not with the file system, into ConfigError."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ELOOP):
            raise
        problem = f"is {shown(path)}, which cannot be read ({error.strerror})"
        raise ConfigError(key, problem, "correct it") from None


def check_datasets(config: RunConfig) -> None:
    """Raise ConfigError if a dataset is damaged, or data lacks the document ends, lengths or size that the run needs.

    Indices and examples that passed are not read again before they change (see `check_once`).
    """
    check_descriptors(config)
    tokenizer = load_run_tokenizer(config)
    for stage in stages_of(config):
        with stage.naming_the_setting():
            _check_training_datasets(stage.config, tokenizer)
    if config.data.source == "prefix" and config.train.validates:
        large_enough(config, "validation")
    if config.data.examples is not None:
        _check_examples(config, tokenizer)


def _check_training_datasets(config: RunConfig, tokenizer: Tokenizer | None) -> None:
    cache = config.data.resolved_cache_directory
    for prefix in blend(config.data.prefix)[0]:
        try:
            dataset = IndexedDatasetReader(prefix)
            files = [dataset.idx_path, dataset.bin_path]
            problem = check_once("index 1", files, cache, functools.partial(_first_problem, dataset))
        except (ValueError, OSError) as error:
            problem = str(error)
        refuse(problem is not None, "data.prefix", f"names {prefix}, which is not whole: {problem}")
        refuse(len(dataset) == 0, "data.prefix", f"names {prefix}, which holds no document")
        refuse(
            config.data.reset_attention_mask and dataset.document(0)[-1:].tolist() != [tokenizer.eod],
            ("data.reset_attention_mask", "data.prefix"),
            f"is true, but the documents of {prefix} do not end in data.tokenizer's end-of-document token",
            "preprocess them again with --append-eod",
        )
    if config.data.long_documents is not None:
        find_pools(config)
    elif config.data.source == "prefix":
        large_enough(config, "training")


def large_enough(config: RunConfig, split: str) -> tuple[list[int], list[str]]:
    """Return the numbers of the datasets that give a split a whole sequence, and what is wrong with each of the others.

    `split` is training or validation. Of a large dataset only the first documents are looked at. Raises ConfigError if
    no dataset is left, FileError if one cannot be read.
    """
    prefixes, seq_length = blend(config.data.prefix)[0], config.model.seq_length
    train, validation, _ = split_shares(config.data.split)
    bounds = {"training": (0.0, train), "validation": (train, train + validation)}[split]
    kept, problems = [], []
    for number, prefix in enumerate(prefixes):
        lengths = IndexedDatasetReader(prefix).lengths
        first, last = (round(bound * len(lengths)) for bound in bounds)
        tokens = 0
        for start in range(first, last, _BLOCK):
            tokens += int(lengths[start : min(start + _BLOCK, last)].sum(dtype=np.int64))
            if tokens > seq_length:
                kept.append(number)
                break
        else:
            problems.append(
                f"is {config.data.split}, whose {split} share gives {tokens:,} tokens of {prefix}, less than one "
                f"sequence of model.seq_length {seq_length}"
            )
    alone = "" if len(prefixes) == 1 else f", and no other of the {len(prefixes)} datasets gives more"
    keys = ("data.split", "data.prefix", "model.seq_length")
    refuse(not kept, keys, f"{problems and problems[-1]}{alone}", "raise the share, or use more data")
    return kept, problems


def _first_problem(dataset: IndexedDatasetReader) -> str | None:
    if dataset.idx_path.stat().st_size > _LARGE_INDEX:
        command_line.say(f"checking {dataset.idx_path}, once: {len(dataset):,} documents")
    return next(dataset.problems(), None)


def _check_examples(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Read all examples; raise ConfigError for the first bad line, or if no samples can be made of them."""
    cutter_of(config, tokenizer)
    settings, cache = examples_of(config.data.examples), config.data.resolved_cache_directory
    for name, path in (("path", settings.path), ("validation", settings.validation)):
        if path is not None:
            problem = check_once("examples 1", [path], cache, functools.partial(_no_example, path))
            refuse(problem is not None, f"data.examples.{name}", f"is {path}, which {problem}", "give another file")


def _no_example(path: str) -> str | None:
    try:
        return None if sum(1 for _ in read_examples(path, "")) else "holds no example"
    except FileError as error:
        return f"cannot be used: {error}"
