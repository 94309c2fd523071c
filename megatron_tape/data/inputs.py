"""Whether the files that a run reads are there, whole and fit for it. Imports no torch."""

import logging
import os
from pathlib import Path

from megatron_tape.config.schema import RunConfig, blend
from megatron_tape.data.indexed_dataset import IndexedDatasetReader
from megatron_tape.data.tokenizer import Tokenizer, load_tokenizer
from megatron_tape.errors import ConfigError, refuse

logger = logging.getLogger(__name__)


def load_run_tokenizer(config: RunConfig) -> Tokenizer | None:
    """Load `data.tokenizer`, if one is set; `ConfigError` when it cannot be read or has more pieces than the model."""
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


def warn_of_other_tokenizer(checkpoint: Path, path: str) -> None:
    """Warn where an import brought a tokenizer, and the run's gives other ids."""
    text = "def f(x):\n    return 2 * x  # Grüße, 你好 1234"
    if (checkpoint / "tokenizer").is_dir():
        brought, used = (load_tokenizer(source).encode(text) for source in (checkpoint / "tokenizer", path))
        if brought != used:
            logger.warning(
                "data.tokenizer %s gives other ids than %s, which the model came with", path, checkpoint / "tokenizer"
            )


def check_datasets(config: RunConfig) -> None:
    """Raise `ConfigError` where a dataset is not whole, or has no document ends that the run needs."""
    tokenizer = load_run_tokenizer(config)
    for prefix in blend(config.data.prefix)[0]:
        try:
            dataset = IndexedDatasetReader(prefix)
            problem = next(dataset.problems(), None)
        except (ValueError, OSError) as error:
            problem = str(error)
        refuse(problem is not None, f"data.prefix names {prefix}, which is not whole: {problem}")
        refuse(len(dataset) == 0, f"data.prefix names {prefix}, which holds no document")
        refuse(
            config.data.reset_attention_mask and dataset.document(0)[-1:].tolist() != [tokenizer.eod],
            f"data.reset_attention_mask is true, but the documents of {prefix} do not end in data.tokenizer's "
            "end-of-document token; preprocess them again with --append-eod",
        )


def check_inputs(config: RunConfig) -> None:
    """Raise `ConfigError` naming the first input file that does not exist, or an output directory that cannot be."""
    for name, directory in (
        ("logging.directory", config.logging.directory),
        ("checkpoint.directory", config.checkpoint.directory),
    ):
        parts = [Path(directory), *Path(directory).parents] if directory else []
        existing = next((path for path in parts if path.exists()), None)
        refuse(
            existing is not None and not (existing.is_dir() and os.access(existing, os.W_OK)),
            f"{name} is {directory}, but {existing} is not a directory that can be written; choose another",
        )
    for prefix in blend(config.data.prefix)[0]:
        for suffix in (".idx", ".bin"):
            refuse(
                not Path(prefix + suffix).is_file(),
                f"data.prefix names {prefix}, but {prefix}{suffix} does not exist; preprocess the corpus or correct it",
            )
    tokenizer, resume = config.data.tokenizer, config.checkpoint.resume
    refuse(
        tokenizer is not None and not Path(tokenizer).exists(),
        f"data.tokenizer {tokenizer} does not exist; train or fetch it, or correct the path",
    )
    refuse(
        resume not in ("auto", "none") and not Path(resume).is_dir(),
        f"checkpoint.resume {resume} is not a directory; set it to auto, none or a checkpoint's path",
    )
