"""Check that a run's data files exist, are complete, and fit its settings, without torch."""

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from megatron_tape import command_line
from megatron_tape.config.data import split_shares
from megatron_tape.config.datasets import is_pattern
from megatron_tape.config.schema import RunConfig
from megatron_tape.config.stages import prefixes_of, stages_of
from megatron_tape.config.values import format_value
from megatron_tape.data.examples import example_encoder, read_examples
from megatron_tape.data.indexed_dataset import (
    IndexedDatasetReader,
    check_files_exist,
    first_invalid_id,
    raise_file_limit,
    with_current_directory,
)
from megatron_tape.data.long_documents import find_pools, split_lengths
from megatron_tape.data.origins import (
    checked_origins,
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

_SAMPLED = 256
"""Number of documents of a dataset whose last tokens are checked."""
_LAST_TOKENS = 4096
"""Number of tokens at the end of such a document whose ids are checked."""
_PATH_ERRORS = (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ELOOP)
"""`errno` of errors that the path causes, and not the file system."""


def check_data_files(config: RunConfig) -> None:
    """Raise ConfigError if a data file does not exist or the index cannot be cached.

    Raises OSError if the file system fails.
    """
    for stage in stages_of(config):
        # The datasets of a later stage are in `data.prefix` of its config, but the user has given
        # them in `data.stages`, so errors must name that setting.
        with stage.rename_error_subjects():
            _check_prefixes(stage.config)
    # An existing cache may already contain the index. Then the run writes nothing to it.
    cache = config.data.resolved_cache_directory
    check_writable("data.cache_directory", cache, existing_is_enough=True)

    for key, path in _example_files(config).items():
        with convert_path_errors(key, path):
            exists = Path(path).is_file()
        if not exists:
            fix = with_current_directory(path, "correct the path")
            raise ConfigError(key, f"is {path}, but there is no such file", fix)
        if not path.endswith((".jsonl", ".json")):
            raise ConfigError(
                key,
                f"is {path}, which does not end in .jsonl or .json",
                "choose uncompressed JSON lines (unzip those of SCROLLS first)",
            )


def _example_files(config: RunConfig) -> dict[str, str]:
    """Return the paths of the files in `data.examples`, by the key of their setting."""
    examples = config.data.examples
    if examples is None:
        return {}
    files = {"data.examples.path": examples.path}
    if examples.validation is not None:
        files["data.examples.validation"] = examples.validation
    return files


def _check_prefixes(config: RunConfig) -> None:
    """Raise ConfigError if the files of a dataset in `data.prefix` do not exist."""
    for prefix in config.data.prefixes:
        try:
            with convert_path_errors("data.prefix", prefix):
                check_files_exist(prefix, config.data.tokenizer or "TOKENIZER")
        except FileError as error:
            problem = f"{error.subject} {error.problem}"
            # Patterns have been replaced by the prefixes of the datasets that they match. One that
            # is still here matches none.
            if is_pattern(prefix):
                problem = "no dataset matches it"
            raise ConfigError(
                "data.prefix", f"contains {prefix}, but {problem}", error.fix
            ) from None


def check_writable(key: str, directory: str | None, existing_is_enough: bool = False) -> None:
    """Raise ConfigError for the setting `key` if its directory cannot be created or written.

    With `existing_is_enough`, an existing directory need not be writable.
    """
    if not directory:
        return
    path = Path(directory)
    with convert_path_errors(key, directory):
        if existing_is_enough and path.is_dir():
            return
        # The directory is created later, in the deepest of its parents that exists.
        existing = next(parent for parent in (path, *path.parents) if parent.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK):
            raise ConfigError(
                key,
                f"is {directory}, but {existing} is not a writable directory",
                "choose another one",
            )


@contextmanager
def convert_path_errors(key: str, path: str | None) -> Iterator[None]:
    """Convert an OSError that `path`, the value of `key`, causes into a ConfigError about `key`."""
    try:
        yield
    except OSError as error:
        if error.errno not in _PATH_ERRORS:
            raise
        raise ConfigError(
            key,
            f"is {format_value(path)}, which cannot be read ({error.strerror})",
            "correct the path",
        ) from None


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
        # Errors about the datasets of a later stage name `data.stages` instead of `data.prefix`.
        with stage.rename_error_subjects():
            for prefix in stage.config.data.prefixes:
                _check_dataset(prefix, stage.config, tokenizer)
            # Both functions are called only for their errors, if there is too little data.
            if config.data.long_documents is not None:
                find_pools(stage.config)
            elif config.data.source == "prefix":
                find_large_enough(stage.config, "training")
    # All stages share the validation data of the first one.
    if config.data.source == "prefix" and config.train.validates and config.train.eval_interval:
        find_large_enough(config, "validation")

    _check_tokenizers(config, tokenizer, saved)
    if config.data.examples is not None:
        _check_examples(config, tokenizer)


def _check_dataset(prefix: str, config: RunConfig, tokenizer: Tokenizer | None) -> None:
    """Raise ConfigError if a dataset is damaged or empty, or if its documents do not fit the
    settings.

    `tokenizer` is `data.tokenizer`. Only the ends of some documents are read.
    """
    fix = "preprocess the dataset again"
    try:
        dataset = IndexedDatasetReader(prefix)
        damage = dataset.wrong_size()
    except (ValueError, OSError) as error:
        damage = str(error)
        fix = ""  # a FileError's text already ends in its own fix
    if damage is not None:
        raise ConfigError(
            "data.prefix",
            f"contains {prefix}, which is missing, incomplete or damaged: {damage}",
            fix,
        )
    if len(dataset) == 0:
        raise ConfigError(
            "data.prefix",
            f"contains {prefix}, which has no documents",
            "remove it, or give another",
        )

    # Whether documents are separated in attention, which requires `data.tokenizer`.
    separates = config.data.reset_attention_mask
    if separates and tokenizer.eod is None:
        raise ConfigError(
            ("data.tokenizer", "data.reset_attention_mask"),
            f"is {config.data.tokenizer}, which has no end-of-document token to separate documents",
            "choose another tokenizer, or set data.reset_attention_mask to false",
        )

    # The first and the last document, and others at random. The seed is fixed, so that every start
    # of the run checks the same documents.
    random = np.random.default_rng(0)
    sampled = random.integers(0, len(dataset), _SAMPLED).tolist()
    for number in sorted({0, len(dataset) - 1, *sampled}):
        tokens = dataset.document(number)
        check_token_ids(tokens[-_LAST_TOKENS:], config.model.vocab_size, prefix, number)
        if separates and len(tokens) > 0 and tokens[-1] != tokenizer.eod:
            raise ConfigError(
                ("data.reset_attention_mask", "data.prefix"),
                f"is true, but document {number} of {prefix} does not end in the end-of-document"
                f" token {tokenizer.eod} of data.tokenizer",
                "preprocess the dataset again with this tokenizer, and not with --no-append-eod",
            )


def _check_tokenizers(
    config: RunConfig, tokenizer: Tokenizer | None, saved: TokenizerRecord | None
) -> None:
    """Raise ConfigError if a dataset was made with a tokenizer other than the run's.

    The run's tokenizer is `data.tokenizer` or, without it, that of the checkpoint (`saved`). The
    two must not differ. Without both, all datasets must have the same tokenizer.
    """
    expected = saved
    name = "the model's"  # describes `expected` in messages
    if tokenizer is not None:
        expected = tokenizer_record(tokenizer)
        name = f"data.tokenizer {config.data.tokenizer}"

    if saved:
        different = difference(expected, saved, "that of the model's training data")
        if different is not None:
            raise ConfigError(
                ("data.tokenizer", "checkpoint.resume"),
                f"{config.data.tokenizer} {different}",
                "set it to the tokenizer of the training data, or remove it",
            )

    # The origin of each dataset of the stages so far, by prefix; None if the dataset records none.
    origins = {}
    for stage in stages_of(config):
        # Without an expected tokenizer, `checked_origins` only compares the given datasets with
        # each other. So give it those of the earlier stages again, to compare the stages, too.
        prefixes = [*origins, *stage.config.data.prefixes]
        with stage.rename_error_subjects():
            try:
                origins = checked_origins(prefixes, expected, name)
            except FileError as error:
                raise ConfigError(
                    ("data.prefix", "data.tokenizer"),
                    f"contains {error.subject}, which {error.problem}",
                    error.fix,
                ) from None

    if expected is None:
        name = "the same as for the others"  # ends the warning "make sure that it was ..."
    # No warning if neither the run's tokenizer nor that of any dataset is known.
    warning = unknown_tokenizers(origins, name)
    if warning is not None and (expected is not None or any(origins.values())):
        command_line.log(warning)


def check_token_ids(ids: np.ndarray, vocab_size: int, prefix: str, document: int) -> None:
    """Raise ConfigError if token ids of a document are negative or not below `vocab_size`."""
    invalid = first_invalid_id(ids, vocab_size)
    if invalid is None:
        return
    problem = f"contains {prefix}, in which document {document} has the token id {ids[invalid]}"
    if ids[invalid] < 0:
        raise ConfigError(
            "data.prefix",
            f"{problem}, but ids cannot be negative",
            "write the dataset again without padding, and separate documents by an end-of-document"
            " token",
        )
    raise ConfigError(
        ("data.prefix", "model.vocab_size"),
        f"{problem}, but model.vocab_size is {vocab_size}",
        "raise model.vocab_size, or use data made with the model's tokenizer",
    )


def recorded_tokenizer(config: RunConfig) -> TokenizerRecord | None:
    """Return the tokenizer recorded in the first of a run's datasets that has a record, or None."""
    origins = filter(None, map(read_origin, prefixes_of(stages_of(config))))
    return next((origin["tokenizer"] for origin in origins), None)


def fingerprints(config: RunConfig) -> dict[str, str]:
    """Return the fingerprints of a run's data files, by the path or prefix in the settings."""
    if config.data.examples is not None:
        return {path: fingerprint(path) for path in _example_files(config).values()}
    prefixes = prefixes_of(stages_of(config))
    return {prefix: "; ".join(fingerprints_of(prefix).values()) for prefix in prefixes}


def check_same_data(config: RunConfig, saved: Mapping[str, str], checkpoint: Path) -> None:
    """Raise ConfigError if data files have changed since `checkpoint` was saved.

    With `data.allow_changed`, only warn. `saved` is the result of `fingerprints` at that time.
    """
    if not saved:
        return
    # The same file may be given as a relative and as an absolute path. A file that is not in
    # `saved`, such as that of a new stage, has not changed.
    before = {os.path.abspath(name): value for name, value in saved.items()}
    now = fingerprints(config)
    changed = [name for name in now if before.get(os.path.abspath(name), now[name]) != now[name]]
    if not changed:
        return
    problem = f"has changed since {checkpoint} was saved: {', '.join(changed)}"
    if config.data.allow_changed:
        command_line.log(f"warning: the data {problem}")
        return

    key = f"data.{config.data.source}"
    # None of the changed datasets is in `data.prefix`, so they belong to later stages.
    if key == "data.prefix" and not set(changed) & set(config.data.prefixes):
        key = "data.stages"
    raise ConfigError(
        (key, "data.allow_changed"),
        problem,
        "restore the files, start a new run, or continue with the new files with"
        " --data.allow_changed true",
    )


def find_large_enough(config: RunConfig, split: str) -> tuple[dict[int, int], list[str]]:
    """Find the datasets of `data.prefix` that contain at least one sequence of a split.

    `split` is training or validation. Returns a dictionary, and a list of the problems of the other
    datasets. The dictionary maps the index of a dataset in `data.prefix` to its number of tokens in
    the split. A problem continues "data.split", as in "data.split is 9,1,0, so ...".

    Raises ConfigError if all datasets are too small, FileError if one cannot be read.
    """
    prefixes = config.data.prefixes
    seq_length = config.model.seq_length
    tokens_by_index = {}
    problems = []
    for index, prefix in enumerate(prefixes):
        lengths = split_lengths(prefix, config.data.split, split)
        tokens = int(lengths.sum(dtype=np.int64))
        # One token more than a sequence: the label of its last token.
        if tokens > seq_length:
            tokens_by_index[index] = tokens
        else:
            problems.append(
                f"is {config.data.split}, so the {split} split has {tokens:,} tokens of {prefix},"
                f" in {len(lengths):,} of its documents, too few for one sequence of"
                f" model.seq_length {seq_length}"
            )
    if not tokens_by_index:
        others = ", and no other dataset has enough"
        if len(prefixes) == 1:
            others = ""
        raise ConfigError(
            ("data.split", "data.prefix", "model.seq_length"),
            f"{problems[-1]}{others}",
            f"raise the number of the {split} split in data.split, or use more data",
        )
    return tokens_by_index, problems


def missing_validation(config: RunConfig) -> ConfigError | None:
    """Return why a run computes no validation loss, or None if it computes one.

    The reason is an error that names the setting to change. It is returned instead of raised, since
    only some callers require a validation loss. Reads the index of the datasets.
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
    # Examples and generated samples have no splits.
    if data.prefix is None:
        return None
    _, validation_share, _ = split_shares(data.split)
    if validation_share == 0:
        return ConfigError(
            "data.split",
            f"is {data.split}, without validation documents",
            "raise its second number",
        )
    try:
        find_large_enough(config, "validation")
    except ConfigError as error:
        return error
    return None


def _check_examples(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Raise ConfigError if a file of examples is empty or invalid, or the context too short."""
    example_encoder(config, tokenizer)  # raises if the context is too short
    for key, path in _example_files(config).items():
        try:
            # `split` chooses a file in a zip, and these files are not zips.
            count = sum(1 for _ in read_examples(path, split=""))
        except FileError as error:
            raise ConfigError(key, f"is {path}, which cannot be used: {error}") from None
        if count == 0:
            raise ConfigError(key, f"is {path}, which contains no examples", "choose another file")
