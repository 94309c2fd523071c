"""The section `data`: training and validation data."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from megatron_tape.config.values import Count, NotNegativeInt, PathText, Prefixes, format_value
from megatron_tape.errors import ConfigError, refuse
from megatron_tape.synthetic import Addition, GridNavigation, Recall, SelectiveCopy

SAMPLE_SOURCES = ("generator", "examples")
"""Keys of `data` with samples from `data.samples`, which have a loss mask."""
DATA_SOURCES = ("prefix", *SAMPLE_SOURCES)
INPUT = "{input}"
"""Placeholder of the input in a template."""
TEMPLATE = INPUT + "\n\nAnswer:"


@dataclass(frozen=True, kw_only=True)
class StageSettings:
    """A stage of the training data, after data.prefix."""

    prefix: Prefixes
    """Datasets, as in data.prefix."""
    share: Annotated[float, Field(gt=0, lt=1)]
    """Fraction of the run's training tokens."""


@dataclass(frozen=True, kw_only=True)
class ExampleSettings:
    """Train on examples with inputs and targets instead of a dataset. They are shuffled anew in every epoch."""

    path: PathText
    """Uncompressed JSON lines with the keys `input` and either `output` or `target`. The end-of-document token is
    appended to targets."""
    validation: PathText | None = None
    """The same for validation. Required to compute the validation loss."""
    template: str = TEMPLATE
    """Prompt before the target. {input} is replaced by the input, which is truncated at its end if it is too long."""
    target_tokens: Count = 200
    """Maximum number of tokens of a target; longer targets are truncated."""
    bos: bool = False
    """Start every sequence with the tokenizer's beginning-of-sequence token, as Llama does."""


@dataclass(frozen=True, kw_only=True)
class LongDocumentSettings:
    """Draw a fraction of the training tokens from long documents. Sequences start at the beginning of a long document
    where possible. Requires reset_attention_mask. Validation data is not affected. Datasets keep their weights, both
    among long and among other documents; a dataset without enough documents of one group is excluded from that
    group."""

    minimum: Count
    """Minimum number of tokens of a long document."""
    share: Annotated[float, Field(gt=0, le=1)]
    """Fraction of the training tokens that comes from long documents."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Training and validation data: Megatron's indexed datasets (prefix), a synthetic task (generator) or examples."""

    prefix: Prefixes | None = None
    """Dataset path without .idx/.bin, a list of them, or a mapping prefix: weight. A pattern such as data/web-* selects
    the datasets that match when the run starts, and divides its weight among them by their tokens. A dataset is
    excluded, with a warning, from splits in which it has less than one sequence."""
    stages: list[StageSettings] | None = None
    """Further stages of training data, such as [{prefix: {data/books: 1, data/math: 2}, share: 0.1}] for the last 10 %
    of the run's tokens. Validation data always comes from prefix."""
    generator: Annotated[Addition | SelectiveCopy | GridNavigation | Recall, Field(discriminator="task")] | None = None
    """Train on sequences of a synthetic task instead of a dataset. Samples do not repeat; each depends only on
    train.seed and its index. Validation samples are drawn in the same way."""
    examples: ExampleSettings | None = None
    """Train on examples with inputs and targets instead of a dataset."""
    loss_on: Literal["answers", "all"] = "answers"
    """Tokens in the loss of generator or examples: the answers (targets) or all. The loss is their mean over the global
    batch. Indexed datasets always use all tokens."""
    split: str = "969,30,1"
    """Fractions of the documents for training, validation and test."""
    tokenizer: PathText | None = None
    """Tokenizer of the data. Required to sample text and to find the ends of documents."""
    reset_attention_mask: bool = False
    """Do not attend across the boundaries of packed documents."""
    long_documents: LongDocumentSettings | None = None
    """Draw a fraction of the training tokens from long documents. Disabled by default."""
    allow_changed: bool = False
    """Continue a run even if its data files have changed since its checkpoint was saved."""
    num_workers: NotNegativeInt = 0
    """Number of processes that load training data; 0 loads it in the training process. Validation data is always loaded
    in the training process."""
    cache_directory: PathText | None = None
    """Directory in which Megatron's index maps and the results of data checks are cached between runs. Default:
    index_cache in the directory of the first dataset."""

    @property
    def source(self) -> str:
        """The key of the configured data source. Raises ConfigError unless exactly one is set."""
        given = [key for key in DATA_SOURCES if getattr(self, key) is not None]
        if len(given) != 1:
            keys = tuple(f"data.{key}" for key in given)
            refuse(bool(given), keys, f"and {', '.join(keys[1:])} are mutually exclusive", "keep one of them")
            instead = " or ".join(f"data.{key}" for key in SAMPLE_SOURCES)
            raise ConfigError("data.prefix", "must be set", f"set it, or {instead} instead")
        return given[0]

    @property
    def resolved_cache_directory(self) -> str | None:
        """Directory of the index maps; None without indexed datasets."""
        if self.cache_directory is not None or self.prefix is None:
            return self.cache_directory
        return str(Path(blend(self.prefix)[0][0]).parent / "index_cache")


def blend(prefix: dict[str, float] | list[str] | str | None) -> tuple[list[str], list[float] | None]:
    """Return the prefixes in `data.prefix` and their weights; None weighs datasets by size."""
    if prefix is None:
        return [], None
    prefixes = [prefix] if isinstance(prefix, str) else list(prefix)
    weights = list(prefix.values()) if isinstance(prefix, dict) else None
    return prefixes, weights


def split_shares(split: str) -> tuple[float, float, float]:
    """Parse `"969,30,1"` into the fractions of training, validation and test, which sum to 1."""
    try:
        numbers = [float(part) for part in str(split).split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != 3 or not all(math.isfinite(n) and n >= 0 for n in numbers) or numbers[0] == 0:
        raise ConfigError(
            "data.split",
            f"is {split!r}",
            "give three nonnegative numbers such as 969,30,1 for training, validation and test, the first above 0",
        )
    train, validation, test = (number / sum(numbers) for number in numbers)
    return train, validation, test


def check_template(template: str, name: str) -> None:
    """Raise ConfigError for the setting `name` unless its template contains the input exactly once."""
    fix = f"include {INPUT} exactly once, such as {TEMPLATE!r}"
    refuse(template.count(INPUT) != 1, name, f"is {format_value(template)}", fix)
