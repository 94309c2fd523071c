"""Check that a run's data files exist, are complete, and fit its settings. Does not import
torch.
"""

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from megatron_tape import command_line
from megatron_tape.config.data import blend, split_shares
from megatron_tape.config.datasets import is_pattern
from megatron_tape.config.schema import RunConfig
from megatron_tape.config.stages import prefixes_of, stages_of
from megatron_tape.config.values import format_value
from megatron_tape.data.examples import example_encoder, read_examples
from megatron_tape.data.indexed_dataset import (
    PAIR,
    IndexedDatasetReader,
    first_invalid_id,
    how_to_make_from_hub,
    mistaken_for_dataset,
    raise_file_limit,
)
from megatron_tape.data.long_documents import find_pools
from megatron_tape.data.origins import (
    Origin,
    check_tokenizer,
    fingerprints_of,
    read_origin,
    unknown_tokenizers,
)
from megatron_tape.data.tokenizer import (
    Tokenizer,
    TokenizerRecord,
    difference,
    load_run_tokenizer,
    tokenizer_record,
)
from megatron_tape.errors import ConfigError, FileError
from megatron_tape.io.files import fingerprint
from megatron_tape.text import counted

_SAMPLED = 256
"""Number of documents of a dataset whose last tokens are checked."""
_LAST_TOKENS = 4096
"""Number of tokens at the end of such a document whose ids are checked."""


def check_data_files(config: RunConfig) -> None:
    """Raise ConfigError if a data file of the run does not exist, or its `data.cache_directory` is
    not writable.

    Raises OSError if the file system fails.
    """
    for stage in stages_of(config):
        with stage.rename_error_subjects():
            _check_prefixes(stage.config)
    # An existing cache may be complete, and need not be writable.
    cache = config.data.resolved_cache_directory
    check_writable("data.cache_directory", cache, existing_is_enough=True)
    examples = config.data.examples
    for name, path in (
        (("path", examples.path), ("validation", examples.validation)) if examples else ()
    ):
        if path is None:
            continue
        key = f"data.examples.{name}"
        with convert_path_errors(key, path):
            missing = not Path(path).is_file()
        if missing:
            raise ConfigError(
                key,
                f"is {path}, but there is no such file",
                _how_to_provide(path, "correct the path"),
            )
        if not path.endswith((".jsonl", ".json")):
            raise ConfigError(
                key,
                f"is {path}, which does not end in .jsonl or .json",
                "choose uncompressed JSON lines (unzip those of SCROLLS first)",
            )


def _check_prefixes(config: RunConfig) -> None:
    tokenizer = config.data.tokenizer or "TOKENIZER"
    for prefix in blend(config.data.prefix)[0]:
        with convert_path_errors("data.prefix", prefix):
            mistake = mistaken_for_dataset(prefix, tokenizer)
        if mistake is not None:
            problem, fix = mistake
            raise ConfigError("data.prefix", f"contains {prefix}, which {problem}; {PAIR}", fix)
        hub = how_to_make_from_hub(prefix, tokenizer)
        fix = "correct it, or finish preprocessing the corpus"
        if hub is not None:
            fix = f"correct it, or, if it is a dataset of the Hugging Face Hub, {hub}"
        for suffix in (".idx", ".bin"):
            with convert_path_errors("data.prefix", prefix):
                missing = not Path(prefix + suffix).is_file()
            if is_pattern(prefix):
                problem = "no dataset matches it"
            else:
                problem = f"{prefix}{suffix} does not exist"
            if missing:
                raise ConfigError(
                    "data.prefix", f"contains {prefix}, but {problem}", _how_to_provide(prefix, fix)
                )


def _how_to_provide(path: str, fix: str) -> str:
    """Return `fix`, or how to make the demo's data; if `path` is relative, also name the current
    directory.
    """
    if path.startswith("runs/demo/data/stdlib"):
        fix = (
            "run `make demo` in a clone of the repository to make the demo's data, and start this"
            " command there"
        )
    if os.path.isabs(path):
        return fix
    return f"{fix} (the path is relative to the current directory, {os.getcwd()})"


def check_writable(key: str, directory: str | None, existing_is_enough: bool = False) -> None:
    """Raise ConfigError for the setting `key` if its directory cannot be created or is not
    writable.

    With `existing_is_enough`, an existing directory need not be writable.
    """
    with convert_path_errors(key, directory):
        parts = [Path(directory), *Path(directory).parents] if directory else []
        existing = next((path for path in parts if path.exists()), None)
        if existing is None or (
            existing_is_enough and existing == Path(directory) and existing.is_dir()
        ):
            return
        usable = existing.is_dir() and os.access(existing, os.W_OK)
    if not usable:
        raise ConfigError(
            key, f"is {directory}, but {existing} is not a writable directory", "choose another one"
        )


@contextmanager
def convert_path_errors(key: str, path: str | None) -> Iterator[None]:
    """Convert errors that are caused by the path, rather than by the file system, into ConfigError
    for `key`.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (
            errno.ENAMETOOLONG,
            errno.EACCES,
            errno.EPERM,
            errno.ENOTDIR,
            errno.ELOOP,
        ):
            raise
        problem = f"is {format_value(path)}, which cannot be read ({error.strerror})"
        raise ConfigError(key, problem, "correct the path") from None


def check_datasets(config: RunConfig, saved: TokenizerRecord | None = None) -> None:
    """Raise ConfigError if a dataset or an examples file cannot be used by the run.

    A dataset must be undamaged, large enough for each split, and made with the run's tokenizer:
    `data.tokenizer`, or that of a checkpoint (`saved`). With `data.reset_attention_mask`, documents
    must end in the end-of-document token. Of the token ids, only those of some documents are
    checked here, and all others when they are read.
    """
    raise_file_limit()
    tokenizer = load_run_tokenizer(config)
    for stage in stages_of(config):
        with stage.rename_error_subjects():
            _check_training_datasets(stage.config, tokenizer)
    if config.data.source == "prefix" and config.train.validates and config.train.eval_interval:
        large_enough(config, "validation")
    _check_tokenizers(config, tokenizer, saved)
    if config.data.examples is not None:
        _check_examples(config, tokenizer)


def _check_training_datasets(config: RunConfig, tokenizer: Tokenizer | None) -> None:
    for prefix in blend(config.data.prefix)[0]:
        try:
            dataset = IndexedDatasetReader(prefix)
            problem = dataset.wrong_size()
            fix = "preprocess the dataset again"
        except (ValueError, OSError) as error:
            problem = str(error)
            fix = ""  # a FileError ends in its own fix
        if problem is not None:
            raise ConfigError(
                "data.prefix",
                f"contains {prefix}, which is missing, incomplete or damaged: {problem}",
                fix,
            )
        if len(dataset) == 0:
            raise ConfigError(
                "data.prefix",
                f"contains {prefix}, which has no documents",
                "remove it, or give another",
            )
        if config.data.reset_attention_mask:
            if tokenizer.eod is None:
                raise ConfigError(
                    ("data.tokenizer", "data.reset_attention_mask"),
                    f"is {config.data.tokenizer}, which has no end-of-document token to separate"
                    " documents",
                    "choose another tokenizer, or set data.reset_attention_mask to false",
                )
        for number, tokens in _sampled_documents(dataset):
            check_token_ids(tokens[-_LAST_TOKENS:], config.model.vocab_size, prefix, number)
            if config.data.reset_attention_mask and len(tokens) > 0 and tokens[-1] != tokenizer.eod:
                raise ConfigError(
                    ("data.reset_attention_mask", "data.prefix"),
                    f"is true, but document {number} of {prefix} does not end in the"
                    f" end-of-document token {tokenizer and tokenizer.eod} of data.tokenizer",
                    "preprocess the dataset again with this tokenizer, and not with"
                    " --no-append-eod",
                )
    if config.data.long_documents is not None:
        find_pools(config)
    elif config.data.source == "prefix":
        large_enough(config, "training")


def _check_tokenizers(
    config: RunConfig, tokenizer: Tokenizer | None, saved: TokenizerRecord | None
) -> None:
    """Raise ConfigError if a dataset was made with a tokenizer other than the run's."""
    record = saved if tokenizer is None else tokenizer_record(tokenizer)
    if tokenizer is None:
        name = "the model's"
    else:
        name = f"data.tokenizer {config.data.tokenizer}"
    if saved:
        different = difference(record, saved, "that of the model's training data")
    else:
        different = None
    fix = "set it to the tokenizer of the training data, or remove it"
    if different is not None:
        raise ConfigError(
            ("data.tokenizer", "checkpoint.resume"), f"{config.data.tokenizer} {different}", fix
        )
    origins: dict[str, Origin | None] = {}
    for stage in stages_of(config):
        with stage.rename_error_subjects():
            try:
                # If the run's tokenizer is unknown, compare the datasets with those of previous
                # stages.
                origins |= check_tokenizer(
                    [*origins, *blend(stage.config.data.prefix)[0]], record, name
                )
            except FileError as error:
                problem = f"contains {error.subject}, which {error.problem}"
                raise ConfigError(("data.prefix", "data.tokenizer"), problem, error.fix) from None
    if record is not None or any(origins.values()):
        if warning := unknown_tokenizers(
            origins, name if record is not None else "the same as for the others"
        ):
            command_line.log(warning)


def _sampled_documents(dataset: IndexedDatasetReader) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the indices and token ids of the first, the last and random documents."""
    sampled = np.random.default_rng(0).integers(0, len(dataset), _SAMPLED).tolist()
    for number in sorted({0, len(dataset) - 1, *sampled}):
        yield number, dataset.document(number)


def check_token_ids(ids: np.ndarray, vocab_size: int, prefix: str, document: int) -> None:
    """Raise ConfigError if `ids`, token ids of a document of the dataset `prefix`, are not all in
    the vocabulary.
    """
    invalid = first_invalid_id(ids, vocab_size)
    if invalid is None:
        return
    problem = f"contains {prefix}, in which document {document} has the token id {ids[invalid]}"
    if ids[invalid] < 0:
        fix = (
            "write the dataset again without padding, and separate documents by an end-of-document"
            " token"
        )
        raise ConfigError("data.prefix", f"{problem}, but ids cannot be negative", fix)
    raise ConfigError(
        ("data.prefix", "model.vocab_size"),
        f"{problem}, but model.vocab_size is {vocab_size}",
        "raise model.vocab_size, or use data made with the model's tokenizer",
    )


def recorded_tokenizer(config: RunConfig) -> TokenizerRecord | None:
    """Return the tokenizer recorded in the origin of a run's first dataset that has one, or
    None.
    """
    origins = filter(None, map(read_origin, prefixes_of(stages_of(config))))
    return next((origin["tokenizer"] for origin in origins), None)


def fingerprints(config: RunConfig) -> dict[str, str]:
    """Return the fingerprints of a run's data files, by the path or prefix in the settings."""
    if config.data.examples is not None:
        examples = config.data.examples
        return {
            path: fingerprint(path)
            for path in (examples.path, examples.validation)
            if path is not None
        }
    return {
        prefix: "; ".join(fingerprints_of(prefix).values())
        for prefix in prefixes_of(stages_of(config))
    }


def check_same_data(config: RunConfig, saved: Mapping[str, str], checkpoint: Path) -> None:
    """Raise ConfigError if data files have changed since `checkpoint` was saved; with
    `data.allow_changed`, only warn.

    `saved` is the result of `fingerprints` at that time.
    """
    if not saved:
        return
    before = {os.path.abspath(name): value for name, value in saved.items()}
    now = fingerprints(config)
    changed = [
        name for name, value in now.items() if before.get(os.path.abspath(name), value) != value
    ]
    if not changed:
        return
    problem = f"has changed since {checkpoint} was saved: {', '.join(changed)}"
    if config.data.allow_changed:
        command_line.log(f"warning: the data {problem}")
        return
    in_source = config.data.source != "prefix" or set(changed) & set(blend(config.data.prefix)[0])
    key = f"data.{config.data.source}" if in_source else "data.stages"
    fix = (
        "restore the files, start a new run, or continue with the new files with"
        " --data.allow_changed true"
    )
    raise ConfigError((key, "data.allow_changed"), problem, fix)


def large_enough(config: RunConfig, split: str) -> tuple[list[int], list[str]]:
    """Return the indices of the datasets with at least one sequence in a split, and the problems of
    the others.

    `split` is training or validation. A message shows a problem after "data.split", as in
    "data.split is 9,1,0, so ...". Raises ConfigError if all datasets are too small, FileError if
    one cannot be read.
    """
    prefixes = blend(config.data.prefix)[0]
    seq_length = config.model.seq_length
    train, validation, _ = split_shares(config.data.split)
    bounds = {"training": (0.0, train), "validation": (train, train + validation)}[split]
    kept = []
    problems = []
    for number, prefix in enumerate(prefixes):
        lengths = IndexedDatasetReader(prefix).lengths
        first, last = (round(bound * len(lengths)) for bound in bounds)
        tokens = int(lengths[first:last].sum(dtype=np.int64))
        if tokens > seq_length:
            kept.append(number)
        else:
            problems.append(
                f"is {config.data.split}, so the {split} split has {tokens:,} tokens of {prefix},"
                f" in {last - first:,} of its {counted(len(lengths), 'document')}, too few for one"
                f" sequence of model.seq_length {seq_length}"
            )
    if len(prefixes) == 1:
        others = ""
    else:
        others = ", and no other dataset has enough"
    if not kept:
        raise ConfigError(
            ("data.split", "data.prefix", "model.seq_length"),
            f"{problems and problems[-1]}{others}",
            f"raise the number of the {split} split in data.split, or use more data",
        )
    return kept, problems


def missing_validation(config: RunConfig) -> ConfigError | None:
    """Return the reason why a run computes no validation loss, or None if it does. Reads the index
    of its datasets.
    """
    train = config.train
    data = config.data
    if train.eval_interval == 0:
        return ConfigError(
            "train.eval_interval", "is 0", "remove it, or set it to a number of steps"
        )
    if not train.validates:
        return ConfigError("train.evaluations", "lacks validation_loss", "add it")
    if data.examples is not None and data.examples.validation is None:
        return ConfigError("data.examples.validation", "is not set", "set it to a file of examples")
    if data.prefix is None:
        return None
    if split_shares(data.split)[1] == 0:
        return ConfigError(
            "data.split",
            f"is {data.split}, without validation documents",
            "raise its second number",
        )
    try:
        large_enough(config, "validation")
    except ConfigError as error:
        return error
    return None


def _check_examples(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Raise ConfigError if a file of examples is empty or has an invalid line, or if the context is
    too short.
    """
    example_encoder(config, tokenizer)
    settings = config.data.examples
    for name, path in (("path", settings.path), ("validation", settings.validation)):
        if path is None:
            continue
        try:
            count = sum(1 for _ in read_examples(path, ""))
            fix = "choose another file"
            problem = None if count else "contains no examples"
        except FileError as error:
            problem = f"cannot be used: {error}"
            fix = ""
        if problem is not None:
            raise ConfigError(f"data.examples.{name}", f"is {path}, which {problem}", fix)
