"""The section `evaluation`: the tasks that a run does while it trains. pretrain.evaluate has the same settings."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from megatron_tape.config.values import Count, PathText

Seed = Annotated[int, Field(ge=0, lt=2**32)]
BelowMillion = Annotated[int, Field(ge=1, lt=10**6)]
"""Digits and samples of sums, so that every sum has a number of its own."""


@dataclass(frozen=True, kw_only=True)
class DocumentSettings:
    """What the tasks have in common that measure the losses of documents' tokens."""

    data: dict[str, PathText] | PathText
    """What is read, as a path or a mapping name: path. A file of JSON lines, text or parquet (like the inputs of
    tools/preprocess_data.py, also .gz and .zst); an indexed dataset, by its prefix; or a .bin of uint16 token ids,
    which is one document. Ids must be those of the model's tokenizer."""
    text_key: str = "text"
    """Where JSON lines and parquet have their text."""
    split: str | None = None
    """Shares of an indexed dataset's documents for training, validation and test, such as 969,30,1, as a run's
    data.split: only those for validation are used. null means all documents."""
    lengths: list[int] | None = None
    """Context lengths: how many tokens the model reads, among them one that marks the beginning if the model's
    tokenizer adds one. null means the length that the model was trained on, a half and a quarter of it."""
    documents: Count | None = None
    """At most so many documents of each name are used, the first ones that are long enough; null means 50."""
    stride: Count = 256
    """Tokens scored per window, the last ones of each; fewer where that would leave one less than three quarters of
    its context."""
    windows: Count | None = None
    """At most so many times stride tokens are scored of each document; null means 8."""


@dataclass(frozen=True, kw_only=True)
class PerplexitySettings(DocumentSettings):
    """Losses of documents' tokens by context length."""

    protocol: Literal["documents", "longlora"] = "documents"
    """documents: the same tokens are scored at every length, each once, within their document. longlora measures what
    the tables of LongLoRA's and TAPE's papers show; a note in the results says what is wrong with that. With it,
    stride is the distance of windows, windows counts them, and null means all of them, and all documents."""


@dataclass(frozen=True, kw_only=True)
class ContextGainSettings(DocumentSettings):
    """What tokens gain from a longer context."""

    short: int | None = None
    """The short context that the others are compared with, in tokens; null means an eighth of the longest."""
    alpha: float = 2.0
    """A key token's loss is lower by more than this, in nats, in the longest context than in the short one."""
    beta: float = -2.0
    """A key token's log-probability in the longest context is above this."""


@dataclass(frozen=True, kw_only=True)
class AdditionSettings:
    """Exact match of sums for every pair of operand lengths."""

    digits: BelowMillion = 40
    """Digits of the longest operands in training."""
    longest: BelowMillion | None = None
    """Digits of the longest operands that are tested; null means twice `digits`."""
    step: Count = 1
    """Every which operand length is tested: 10 tests 10, 20, 30 and so on."""
    hints: int = 0
    """Number of index hints, as in training; 0 means none."""
    samples: BelowMillion = 100
    """Sums for each pair of lengths."""
    seed: Seed = 0
    """Seed of the sums. They are drawn apart from those of training; both have the same ones only where operands are so
    short that few sums exist."""
    batch_size: Count = 100
    """Sums that the model adds at once."""


@dataclass(frozen=True, kw_only=True)
class VariantSettings:
    """What the tasks have in common that have variants."""

    samples: Count = 1000
    """Sequences per variant."""
    seed: Seed = 0
    """Seed of the sequences. They are never those of training."""
    batch_size: Count = 50
    """Sequences that the model reads at once."""


@dataclass(frozen=True, kw_only=True)
class SelectiveCopySettings(VariantSettings):
    """Copying symbols from among blanks."""

    copied: int = 128
    """Symbols to copy, as in training."""
    symbols: int = 16
    """Different symbols, as in training."""
    blanks: dict[str, int] = field(default_factory=lambda: {"IID": 128, "dense": 64, "sparse": 256})
    """Blanks among the symbols, by the name of the variant; the first variant is that of the training."""


@dataclass(frozen=True, kw_only=True)
class GridNavigationSettings(VariantSettings):
    """Predicting what a cell holds that was visited before."""

    dimensions: int = 2
    """1 for a ring of cells, 2 for a torus, as in training."""
    objects: int = 16
    """Different objects, as in training."""
    longest_run: int | None = None
    """Steps for which a direction is kept at most, as in training; null means 10 in one dimension and 3 in two."""
    variants: dict[str, list[float]] = field(
        default_factory=lambda: {"IID": [128, 64, 0.5], "dense": [64, 32, 0.2], "sparse": [256, 128, 0.8]}
    )
    """Steps, width and share of blank cells, by the name of the variant; the first variant is that of the training."""


@dataclass(frozen=True, kw_only=True)
class RecallSettings(VariantSettings):
    """Recalling the values of keys."""

    keys: int = 128
    """Different keys, and different values, as in training."""
    tokens_per_pair: int = 16
    """How many tokens a sequence has for each of its pairs, as in training."""
    lengths: list[int] = field(default_factory=lambda: [64, 128, 256, 512, 1024])
    """Tokens of the sequences, each a variant."""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Tasks of pretrain.evaluate that a run does while it trains, such as
    {every: 500, perplexity: {data: held_out.jsonl, lengths: [512, 1024]}}."""

    every: Count = 1000
    """Steps between two evaluations. The tasks are also done after the last step."""
    perplexity: PerplexitySettings | None = None
    """Perplexity by context length."""
    context_gain: ContextGainSettings | None = None
    """What tokens gain from longer contexts."""
    addition: AdditionSettings | None = None
    """Exact match of sums by the lengths of their operands."""
    selective_copy: SelectiveCopySettings | None = None
    """Accuracy of copying tokens among noise."""
    grid_navigation: GridNavigationSettings | None = None
    """Accuracy of recalling what is where on a grid."""
    recall: RecallSettings | None = None
    """Accuracy of recalling the values of keys."""

    def given(self) -> dict[str, Any]:
        """Return the settings of the tasks that are done, by the tasks' names."""
        return {name: value for name, value in vars(self).items() if name != "every" and value is not None}
