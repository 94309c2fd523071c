"""The section `data`: what a run trains on."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from megatron_tape.config.values import Count, NotNegativeInt, PathText, Prefixes, shown
from megatron_tape.errors import ConfigError, refuse
from megatron_tape.synthetic import Addition, GridNavigation, Recall, SelectiveCopy

SAMPLE_SOURCES = ("generator", "examples")
"""Keys of `data` whose samples `data.samples` makes, with a mask of the tokens that enter the loss."""
DATA_SOURCES = ("prefix", *SAMPLE_SOURCES)
INPUT = "{input}"
"""Where a template has the input."""
TEMPLATE = INPUT + "\n\nAnswer:"


@dataclass(frozen=True, kw_only=True)
class StageSettings:
    """What to train on after data.prefix."""

    prefix: Prefixes
    """The datasets, as in data.prefix."""
    share: Annotated[float, Field(gt=0, lt=1)]
    """Its share of the run's training tokens."""


@dataclass(frozen=True, kw_only=True)
class ExampleSettings:
    """Train on examples of inputs and targets in place of a dataset. Every epoch has another order."""

    path: PathText
    """JSON lines, each with `input`, and `output` or `target`; uncompressed. Targets end in the end-of-document
    token."""
    validation: PathText | None = None
    """The same for validation; needed where the validation loss is computed."""
    template: str = TEMPLATE
    """What the model reads before the target. {input} stands for the input, whose end is left out if it is too
    long."""
    target_tokens: Count = 200
    """Tokens of the sequence that are kept for the target; longer targets are cut."""
    bos: bool = False
    """Begin every sequence with the tokenizer's token for that, as Llama does."""


@dataclass(frozen=True, kw_only=True)
class LongDocumentSettings:
    """Draw a share of the training tokens from long documents. Sequences begin where long documents do as far as
    possible. Needs reset_attention_mask; validation data stays the same. Several datasets keep their proportions among
    the long documents and among the others; one without enough of either is left out there."""

    minimum: Count
    """Tokens from which on a document is long."""
    share: Annotated[float, Field(gt=0, le=1)]
    """The share of the training tokens that comes from long documents; the others give the rest."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What to train on: Megatron's indexed datasets (prefix), or samples that are generated or read."""

    prefix: Prefixes | None = None
    """Dataset path without .idx/.bin; or several: a list, or a mapping prefix: weight. A pattern
    such as data/web-* stands for the datasets that match it when the run begins; they share its weight by tokens. A
    dataset that gives a split less than one sequence is left out of that split, with a warning."""
    stages: list[StageSettings] | None = None
    """What to train on after that, such as [{prefix: {data/books: 1, data/math: 2}, share: 0.1}] for the last 10 % of
    the run's tokens; several follow each other. Validation data stays that of prefix."""
    generator: Annotated[Addition | SelectiveCopy | GridNavigation | Recall, Field(discriminator="task")] | None = None
    """Train on sequences of a synthetic task in place of a dataset. Samples never repeat, and each depends only on
    train.seed and its number. Validation data is drawn in the same way."""
    examples: ExampleSettings | None = None
    """Train on examples of inputs and targets in place of a dataset."""
    loss_on: Literal["answers", "all"] = "answers"
    """Which tokens of a generator's or of examples' sequences enter the loss, which is their mean over the global
    batch: those that are answers (the targets of examples), or all. Of indexed datasets, all do."""
    split: str = "969,30,1"
    """Shares of the documents for training, validation and test."""
    tokenizer: PathText | None = None
    """The tokenizer with which the data was made; needed to sample text and to find document ends."""
    reset_attention_mask: bool = False
    """Keep packed documents from attending to each other."""
    long_documents: LongDocumentSettings | None = None
    """Draw a share of the training tokens from long documents; null draws all documents alike."""
    allow_changed: bool = False
    """Continue a run although the files of its data have other contents than when its checkpoint was saved."""
    num_workers: NotNegativeInt = 0
    """Processes that load training data; 0 loads it in the training process, as validation data always is."""
    cache_directory: PathText | None = None
    """Where Megatron's index maps, and which checks the data has passed, are kept between runs; null means index_cache
    beside the first dataset."""

    @property
    def source(self) -> str:
        """The key that says what to train on; raises ConfigError unless exactly one does."""
        given = [key for key in DATA_SOURCES if getattr(self, key) is not None]
        if len(given) != 1:
            keys = tuple(f"data.{key}" for key in given)
            refuse(bool(given), keys, f"and {', '.join(keys[1:])} are set together", "keep one of them")
            instead = " or ".join(f"data.{key}" for key in SAMPLE_SOURCES)
            raise ConfigError("data.prefix", "must be set", f"set it, or {instead} in its place")
        return given[0]

    @property
    def resolved_cache_directory(self) -> str | None:
        """Directory of the index maps; None without indexed datasets."""
        if self.cache_directory is not None or self.prefix is None:
            return self.cache_directory
        return str(Path(blend(self.prefix)[0][0]).parent / "index_cache")


def blend(prefix: dict[str, float] | list[str] | str | None) -> tuple[list[str], list[float] | None]:
    """Return the prefixes in `data.prefix` and their weights (None: by size); none for null."""
    if prefix is None:
        return [], None
    prefixes = [prefix] if isinstance(prefix, str) else list(prefix)
    weights = list(prefix.values()) if isinstance(prefix, dict) else None
    return prefixes, weights


def split_shares(split: str) -> tuple[float, float, float]:
    """Read `"969,30,1"` as the shares of training, validation and test, summing to 1."""
    try:
        numbers = [float(part) for part in str(split).split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != 3 or not all(math.isfinite(n) and n >= 0 for n in numbers) or numbers[0] == 0:
        raise ConfigError(
            "data.split",
            f"is {split!r}",
            "give three shares like 969,30,1 for training, validation and test, none negative and the first above 0",
        )
    train, validation, test = (number / sum(numbers) for number in numbers)
    return train, validation, test


def check_template(template: str, name: str) -> None:
    """Raise ConfigError, which names the setting, if a template does not have exactly one place for the input."""
    fix = f"write {INPUT} in it exactly once, such as {TEMPLATE!r}"
    refuse(template.count(INPUT) != 1, name, f"is {shown(template)}", fix)
