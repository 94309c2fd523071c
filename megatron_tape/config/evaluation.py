"""The section `evaluation`: tasks that run during training. pretrain.evaluate has the same settings."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from megatron_tape.config.values import Count, PathText

Seed = Annotated[int, Field(ge=0, lt=2**32)]
BelowMillion = Annotated[int, Field(ge=1, lt=10**6)]
"""Digits and samples of sums; below a million, so that every sum has an index of its own."""


@dataclass(frozen=True, kw_only=True)
class DocumentSettings:
    """Settings of tasks that measure the losses of documents' tokens."""

    data: dict[str, PathText] | PathText
    """Documents, as a path or a mapping name: path. A path is a file of JSON lines, text or parquet (as for
    tools/preprocess_data.py, also .gz and .zst), the prefix of an indexed dataset, or a .bin file of uint16 token ids,
    which counts as one document. Token ids must be those of the model's tokenizer."""
    text_key: str = "text"
    """Key of the text in JSON lines, or its column in parquet."""
    split: str | None = None
    """Fractions of an indexed dataset's documents for training, validation and test, such as 969,30,1 (see data.split).
    Only validation documents are used. Default: all documents."""
    lengths: list[int] | None = None
    """Context lengths in tokens, including a beginning-of-sequence token if the model's tokenizer adds one. Default:
    the training length, half of it and a quarter of it."""
    documents: Count | None = None
    """Maximum number of documents per name; the first ones that are long enough are used. Default: 50."""
    stride: Count = 256
    """Number of tokens scored at the end of each window; fewer where a token would have less than three quarters of the
    context."""
    windows: Count | None = None
    """Maximum number of scored tokens per document, as a multiple of stride. Default: 8."""


@dataclass(frozen=True, kw_only=True)
class PerplexitySettings(DocumentSettings):
    """Losses of documents' tokens by context length."""

    protocol: Literal["documents", "longlora"] = "documents"
    """documents scores the same tokens at every length, each token once and within its document. longlora reproduces
    the tables of the LongLoRA and TAPE papers; a note in the results explains its flaws. With longlora, stride is the
    distance between windows, windows is their number, and documents and windows default to all."""


@dataclass(frozen=True, kw_only=True)
class ContextGainSettings(DocumentSettings):
    """The reduction of tokens' losses by longer contexts."""

    short: int | None = None
    """Tokens of the short context, with which longer contexts are compared. Default: an eighth of the longest
    context."""
    alpha: float = 2.0
    """Key tokens: minimum reduction of the loss from the short to the longest context, in nats."""
    beta: float = -2.0
    """Key tokens: minimum log-probability in the longest context."""


@dataclass(frozen=True, kw_only=True)
class AdditionSettings:
    """Exact match of sums for every pair of operand lengths."""

    digits: BelowMillion = 40
    """Maximum number of digits of operands in training."""
    longest: BelowMillion | None = None
    """Maximum number of digits of tested operands. Default: twice digits."""
    step: Count = 1
    """Step between tested operand lengths: 10 tests 10, 20, 30 and so on."""
    hints: int = 0
    """Number of index hints, as in training; 0 disables them."""
    samples: BelowMillion = 100
    """Sums per pair of lengths."""
    seed: Seed = 0
    """Seed of the sums. They are drawn independently of those of training; both share sums only where operands are so
    short that few different sums exist."""
    batch_size: Count = 100
    """Sums per batch."""


@dataclass(frozen=True, kw_only=True)
class VariantSettings:
    """Settings of tasks with variants."""

    samples: Count = 1000
    """Sequences per variant."""
    seed: Seed = 0
    """Seed of the sequences, which differ from those of training."""
    batch_size: Count = 50
    """Sequences per batch."""


@dataclass(frozen=True, kw_only=True)
class SelectiveCopySettings(VariantSettings):
    """Accuracy of copying symbols that are separated by blanks."""

    copied: int = 128
    """Number of symbols to copy, as in training."""
    symbols: int = 16
    """Number of different symbols, as in training."""
    blanks: dict[str, int] = field(default_factory=lambda: {"IID": 128, "dense": 64, "sparse": 256})
    """Number of blanks by variant; models train on the first variant."""


@dataclass(frozen=True, kw_only=True)
class GridNavigationSettings(VariantSettings):
    """Accuracy of predicting the objects in cells that were visited before."""

    dimensions: int = 2
    """1 for a ring of cells, 2 for a torus, as in training."""
    objects: int = 16
    """Number of different objects, as in training."""
    longest_run: int | None = None
    """Maximum number of steps in one direction, as in training. Default: 10 in one dimension, 3 in two."""
    variants: dict[str, list[float]] = field(
        default_factory=lambda: {"IID": [128, 64, 0.5], "dense": [64, 32, 0.2], "sparse": [256, 128, 0.8]}
    )
    """Steps, width and fraction of blank cells by variant; the first variant is that of training."""


@dataclass(frozen=True, kw_only=True)
class RecallSettings(VariantSettings):
    """Accuracy of recalling the values of keys."""

    keys: int = 128
    """Number of different keys, and of different values, as in training."""
    tokens_per_pair: int = 16
    """Tokens of a sequence per key-value pair, as in training."""
    lengths: list[int] = field(default_factory=lambda: [64, 128, 256, 512, 1024])
    """Sequence lengths in tokens; each is a variant."""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Tasks of pretrain.evaluate to run during training, such as
    {every: 500, perplexity: {data: held_out.jsonl, lengths: [512, 1024]}}."""

    every: Count = 1000
    """Steps between evaluations. The tasks also run after the last step."""
    perplexity: PerplexitySettings | None = None
    """Perplexity by context length."""
    context_gain: ContextGainSettings | None = None
    """Reduction of tokens' losses by longer contexts."""
    addition: AdditionSettings | None = None
    """Exact match of sums by operand length."""
    selective_copy: SelectiveCopySettings | None = None
    """Accuracy of copying symbols that are separated by blanks."""
    grid_navigation: GridNavigationSettings | None = None
    """Accuracy of predicting the objects in visited grid cells."""
    recall: RecallSettings | None = None
    """Accuracy of recalling the values of keys."""

    def given(self) -> dict[str, Any]:
        """Return the settings of the enabled tasks by task name."""
        return {name: value for name, value in vars(self).items() if name != "every" and value is not None}
