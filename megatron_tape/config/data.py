"""The section `data`: settings of the training and validation data.

A prefix is the path of a dataset without `.idx` and `.bin`, as in Megatron.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from megatron_tape.config.values import Count, NotNegativeInt, PathText, Prefixes, format_value
from megatron_tape.errors import ConfigError
from megatron_tape.synthetic import Addition, GridNavigation, Recall, SelectiveCopy

SAMPLE_SOURCES = ("generator", "examples")
"""Data sources that `megatron_tape.data.samples` reads. Their samples have a loss mask."""
DATA_SOURCES = ("prefix", *SAMPLE_SOURCES)
"""The settings in `data` that select a data source. A run sets exactly one of them."""
INPUT = "{input}"
"""Placeholder of the input in a template."""
TEMPLATE = INPUT + "\n\nAnswer:"
"""Default of `data.examples.template` and of the template of the task `scrolls`."""


@dataclass(frozen=True, kw_only=True)
class StageSettings:
    """A later stage of training, which reads other datasets than data.prefix."""

    prefix: Prefixes
    """Datasets of this stage, in the format of data.prefix."""
    share: Annotated[float, Field(gt=0, lt=1)]
    """Fraction of the run's training tokens in this stage."""


@dataclass(frozen=True, kw_only=True)
class ExampleSettings:
    """Train on pairs of an input and a target. The pairs are shuffled again in every epoch."""

    path: PathText
    """Training examples: an uncompressed file of JSON lines with the keys `input` and either
    `output` or `target`. The end-of-document token is appended to each target that is not
    truncated."""
    validation: PathText | None = None
    """Validation examples, in the same format. Required to compute the validation loss."""
    template: str = TEMPLATE
    """Prompt before the target. {input} is replaced by the input. The end of an input that is too
    long is cut off.
    """
    target_tokens: Count = 200
    """Maximum number of tokens of a target. Longer targets are truncated."""
    bos: bool = False
    """Start every sequence with the tokenizer's beginning-of-sequence token, as Llama does."""


@dataclass(frozen=True, kw_only=True)
class LongDocumentSettings:
    """Draw a fixed fraction of the training tokens from long documents. Where possible, a sequence
    starts at the beginning of a long document. Requires reset_attention_mask. Validation data is
    not affected. The weights of data.prefix apply among the long documents and, separately, among
    all other documents. A dataset with less than one sequence of a group is excluded from this
    group."""

    minimum: Count
    """Number of tokens from which a document is long."""
    share: Annotated[float, Field(gt=0, le=1)]
    """Fraction of the training tokens that is drawn from long documents."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Training and validation data: Megatron's indexed datasets (prefix), a synthetic task
    (generator) or pairs of inputs and targets (examples). Set exactly one of the three."""

    prefix: Prefixes | None = None
    """Indexed datasets: a path without .idx and .bin, a list of paths, or a mapping path: weight. A
    pattern such as data/web-* selects the datasets that match when the run starts. They share its
    weight in proportion to their tokens. A dataset with less than one sequence in a split is
    excluded from that split, with a warning."""
    stages: list[StageSettings] | None = None
    """Later stages of training, none by default. [{prefix: {data/books: 1, data/math: 2}, share:
    0.1}] trains on books and math for the last 10 % of the run's tokens. Validation data always
    comes from data.prefix."""
    generator: (
        Annotated[Addition | SelectiveCopy | GridNavigation | Recall, Field(discriminator="task")]
        | None
    ) = None
    """Train on sequences of a synthetic task instead of a dataset. Each sample depends only on
    train.seed and its index, and no index is used twice. Validation samples are drawn in the same
    way."""
    examples: ExampleSettings | None = None
    """Train on pairs of an input and a target instead of a dataset."""
    loss_on: Literal["answers", "all"] = "answers"
    """Tokens in the loss of generator and examples: only answers (the targets of examples), or all
    tokens. The loss is the mean over these tokens of the global batch. With indexed datasets, the
    loss always includes all tokens."""
    split: str = "969,30,1"
    """Division of the documents of prefix into training, validation and test documents: three
    relative sizes.
    """
    tokenizer: PathText | None = None
    """Tokenizer that the data was made with. Required for sampled text, reset_attention_mask and
    examples.
    """
    reset_attention_mask: bool = False
    """Do not attend from one document to another where a sequence contains several. Requires
    tokenizer.
    """
    long_documents: LongDocumentSettings | None = None
    """Draw a fraction of the training tokens from long documents. Disabled by default."""
    allow_changed: bool = False
    """Continue a run whose data files have changed since its checkpoint was saved. By default, this
    is an error.
    """
    num_workers: NotNegativeInt = 0
    """Number of worker processes that load training data, per training process. 0 loads it in the
    training process. Validation data is always loaded in the training process."""
    cache_directory: PathText | None = None
    """Directory in which Megatron's index maps and the results of data checks are cached between
    runs. Default: index_cache in the directory of the first dataset."""

    @property
    def source(self) -> str:
        """The data source of the run: one of `DATA_SOURCES`. Raises ConfigError unless exactly one
        is set.
        """
        configured = [key for key in DATA_SOURCES if getattr(self, key) is not None]
        if not configured:
            raise ConfigError(
                "data.prefix", "must be set", "set it, or data.generator or data.examples instead"
            )
        if len(configured) > 1:
            # The error's text begins with the first key: "data.prefix and data.generator are ...".
            keys = tuple(f"data.{key}" for key in configured)
            raise ConfigError(
                keys, f"and {', '.join(keys[1:])} are mutually exclusive", "keep one of them"
            )
        return configured[0]

    @property
    def prefixes(self) -> list[str]:
        """The paths in `prefix`, without their weights."""
        prefixes, _ = blend(self.prefix)
        return prefixes

    @property
    def resolved_cache_directory(self) -> str | None:
        """`cache_directory` with its default resolved. None if neither it nor `prefix` is set."""
        if self.cache_directory is not None or self.prefix is None:
            return self.cache_directory
        return str(Path(self.prefixes[0]).parent / "index_cache")


def blend(
    prefix: dict[str, float] | list[str] | str | None,
) -> tuple[list[str], list[float] | None]:
    """Return the paths in a value of `data.prefix`, and their weights.

    The paths are empty if the value is None. The weights are None if the value has none; datasets
    are then weighted by their numbers of tokens.
    """
    if prefix is None:
        return [], None
    if isinstance(prefix, str):
        return [prefix], None
    if isinstance(prefix, dict):
        return list(prefix), list(prefix.values())
    return prefix, None


def split_shares(split: str) -> tuple[float, float, float]:
    """Parse a value of `data.split`, such as `"969,30,1"`, into the fractions of training,
    validation and test documents, which sum to 1. Raises ConfigError if it is invalid.
    """
    try:
        numbers = [float(part) for part in split.split(",")]
    except ValueError:
        numbers = []  # refused below
    valid = all(0 <= number < math.inf for number in numbers)
    if len(numbers) != 3 or not valid or numbers[0] == 0:
        raise ConfigError(
            "data.split",
            f"is {split!r}",
            "give three nonnegative numbers such as 969,30,1 for training, validation and test, the"
            " first above 0",
        )
    train, validation, test = (number / sum(numbers) for number in numbers)
    return train, validation, test


def check_template(template: str, name: str) -> None:
    """Raise ConfigError for the setting `name` unless its value `template` contains `{input}`
    exactly once.
    """
    if template.count(INPUT) != 1:
        raise ConfigError(
            name,
            f"is {format_value(template)}",
            f"include {INPUT} exactly once, such as {TEMPLATE!r}",
        )
