"""The settings of all evaluation tasks, and the section `evaluation` for tasks that run during
training.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from megatron_tape.config.data import TEMPLATE
from megatron_tape.config.values import Count, NotNegativeInt, PathText

Seed = Annotated[int, Field(ge=0, lt=2**32)]
BelowMillion = Annotated[int, Field(ge=1, lt=10**6)]
"""Type of settings of the addition task. Three values are packed into the index of a sum, each in
six digits.
"""
TokenDtype = Literal["uint16", "uint32"]


@dataclass(frozen=True, kw_only=True)
class TextSettings:
    """Settings of tasks that read documents."""

    token_dtype: TokenDtype = "uint16"
    """Type of the token ids in .bin files without an index: uint16, as nanoGPT and LongLoRA write
    them, or uint32 (also int32). uint16 is refused for models with more than 65,536 ids. Indexed
    datasets contain their own type."""
    text_key: str = "text"
    """Key of the text in JSON lines, and its column in parquet files."""
    split: str | None = None
    """Evaluate only the validation documents of indexed datasets, for a division such as 969,30,1
    (see data.split). Default: evaluate all documents."""


@dataclass(frozen=True, kw_only=True)
class DocumentSettings(TextSettings):
    """Settings of tasks that compute the loss of each token of a set of documents."""

    data: dict[str, PathText] | PathText
    """Documents to evaluate: one path, or a mapping name: path. A path is a file of JSON lines or
    text (also .gz and .zst), a parquet file, an indexed dataset (without .idx and .bin), or a .bin
    file of token ids without an index, which is one document. Token ids must be those of the
    model's tokenizer."""
    lengths: list[int] | None = None
    """Context lengths in tokens, including a beginning-of-sequence token if the model's tokenizer
    adds one. Default: the training length, half of it and a quarter of it."""
    documents: Count | None = None
    """Maximum number of documents per path. The first ones that are long enough are evaluated.
    Default: 50.
    """
    stride: Count = 256
    """Number of tokens that are scored at the end of each window. At short lengths, fewer tokens
    are scored per window, so that every scored token has at least three quarters of the context."""
    windows: Count | None = None
    """Maximum number of scored tokens per document, as a multiple of stride. Default: 8."""


@dataclass(frozen=True, kw_only=True)
class PerplexitySettings(DocumentSettings):
    """Perplexity of documents at several context lengths."""

    protocol: Literal["documents", "longlora"] = "documents"
    """How tokens are scored. documents scores the same tokens at every length, each token once and
    within its document. longlora reproduces the tables of the LongLoRA and TAPE papers; a note in
    the results explains its flaws. With longlora, stride is the distance between the starts of
    windows, windows is their maximum number per path, and all documents and windows are evaluated
    by default."""


@dataclass(frozen=True, kw_only=True)
class ContextGainSettings(DocumentSettings):
    """Reduction of the loss by longer contexts, on all tokens and on key tokens. As in LongPPL
    (Fang et al., 2025), key tokens are those that alpha and beta select."""

    short: int | None = None
    """Length in tokens of the short context, the baseline for longer contexts. Default: an eighth
    of the longest context."""
    alpha: float = 2.0
    """The loss of a key token falls by more than this, in nats, from the short to the longest
    context.
    """
    beta: float = -2.0
    """The log-probability of a key token with the longest context is above this, in nats."""


@dataclass(frozen=True, kw_only=True)
class PasskeySettings:
    """Accuracy of repeating a number that is hidden in irrelevant text, by context length and
    depth.
    """

    lengths: list[int] | None = None
    """Context lengths in tokens, including prompt and answer. Default: the training length, half of
    it and a quarter of it; the latter two only if they have at least 128 tokens."""
    depths: Count = 10
    """Number of depths of the key, evenly spaced from the beginning of the filler (0) to its end
    (1)."""
    samples: Count = 10
    """Number of prompts for each length and depth."""
    digits: Annotated[int, Field(ge=1, le=18)] = 5
    """Number of digits of the key."""
    seed: int = 0
    """Seed of the keys."""


@dataclass(frozen=True, kw_only=True)
class RulerSettings:
    """Scores of RULER's thirteen long-context tasks by context length, and effective context
    lengths.
    """

    tasks: list[str] | Literal["offline", "all"] = "offline"
    """A list of tasks, or a name: offline for the six that need no files or downloads
    (niah_single_1, niah_multikey_2, niah_multikey_3, vt, cwe and fwe), all for all thirteen."""
    lengths: list[int] | None = None
    """Context lengths in tokens, including the answer. Default: the training length, half of it and
    a quarter of it.
    """
    samples: Annotated[int, Field(ge=1, le=500)] = 50
    """Number of samples for each task and length, at most 500, which is the number in published
    tables.
    """
    haystack: PathText | None = None
    """Path of a long UTF-8 text in which needles are hidden. Default: RULER's essays, from the hub.
    """
    squad: PathText | None = None
    """Path of the file dev-v2.0.json of SQuAD. Default: it is downloaded."""
    hotpotqa: PathText | None = None
    """Path of the file hotpot_dev_distractor_v1.json of HotpotQA. Default: it is downloaded."""
    trained_length: Count | None = None
    """Length in tokens at which the model's score is the threshold of "own effective length".
    Default: the training length of the model, multiplied by --rope-scaling-factor. For an extended
    or scaled model, set it to the length before."""
    seed: int = 0
    """Seed of the samples."""
    batch_size: Count = 1
    """Number of prompts per batch."""


@dataclass(frozen=True, kw_only=True)
class LmEvalSettings:
    """Scores of tasks of lm-evaluation-harness, such as HellaSwag."""

    tasks: list[PathText]
    """Names of tasks, groups or tags as listed by `lm_eval ls tasks`, or paths of YAML files. YAML
    files may run code and require --trust-remote-code."""
    include_path: PathText | None = None
    """A directory of YAML files of your own tasks. They may run code and require
    --trust-remote-code.
    """
    limit: Count | None = None
    """Maximum number of documents of each task; the first ones are used. Default: all documents."""
    num_fewshot: NotNegativeInt | None = None
    """Number of examples in each prompt. Default: that of the task."""
    max_length: Annotated[int, Field(ge=2)] | None = None
    """Maximum number of tokens of prompt and answer; longer prompts are truncated on the left.
    Default: that of the model's configuration."""
    batch_size: Count = 1
    """Number of prompts per batch."""


@dataclass(frozen=True, kw_only=True)
class ScrollsSettings:
    """Scores of generated answers and summaries on the datasets of SCROLLS, and the loss on their
    targets.
    """

    data: dict[str, PathText]
    """Paths of the datasets by name, such as {qasper: data/scrolls/qasper.zip}. A path is a zip
    file from the hub, or a file of JSON lines with the same schema."""
    split: str = "validation"
    """Split to read from zip files. The test split cannot be used, since it has no targets."""
    metrics: dict[str, Literal["f1", "exact_match", "rouge"]] = field(default_factory=dict)
    """Metric of each dataset that is not one of the seven of SCROLLS, by name of the dataset."""
    examples: Count | None = None
    """Maximum number of examples of each dataset; the first ones are used. Default: all examples.
    """
    length: Annotated[int, Field(ge=8)] | None = None
    """Context length in tokens, including the answer. Default: the training length."""
    target_tokens: Count | None = None
    """Maximum number of tokens of answers. Default: 200, or 1000 for summaries, but at most a
    quarter of length.
    """
    template: str = TEMPLATE
    """Template of prompts; use that of the fine-tuning. Inputs that are too long are truncated at
    the end, as in SCROLLS' baselines. The text of the template after an input is never truncated.
    """
    bos: bool | None = None
    """Whether prompts begin with the tokenizer's beginning-of-text token; use data.examples.bos of
    the fine-tuning. Default: as the exported tokenizer does; exported SentencePiece tokenizers add
    none."""
    generate: bool = True
    """Whether to generate answers greedily and score them."""
    loss: bool = True
    """Whether to compute the loss on the first target of each example, in nats per token."""


@dataclass(frozen=True, kw_only=True)
class PositionSettings(TextSettings):
    """Distance of a TAPE model's position states from RoPE, and dependence of the loss on them."""

    data: PathText
    """Documents: a file of JSON lines, text or parquet, the prefix of an indexed dataset, or a .bin
    file of token ids, as in perplexity."""
    documents: Count = 8
    """Maximum number of documents; the first ones that are long enough are used."""
    length: int | None = None
    """Number of tokens of each document that are used. Default: the training length, or 1024 if the
    model's configuration does not contain it."""
    ablation: bool = True
    """Also compute the loss with RoPE's phases instead of the state of one layer, for each layer,
    and of all layers. This takes one forward pass per layer and document."""
    map_tokens: Count = 64
    """Number of tokens in attention maps: the first ones of the first document."""


@dataclass(frozen=True, kw_only=True)
class AdditionSettings:
    """Fraction of sums that are computed without an error, for every pair of operand lengths."""

    digits: BelowMillion = 40
    """Maximum number of digits of an operand in training."""
    longest: BelowMillion | None = None
    """Maximum number of digits of a tested operand. Default: twice digits."""
    step: Count = 1
    """Step between tested operand lengths. 10 tests operands of 10, 20, 30, ... digits."""
    hints: int = 0
    """Number of index hints, as in training. 0 disables them."""
    samples: BelowMillion = 100
    """Number of sums per pair of operand lengths."""
    seed: Seed = 0
    """Seed of the sums. They are drawn independently of the training data, which contains the same
    sums only where operands are so short that few different sums exist."""
    batch_size: Count = 100
    """Sums per batch."""


@dataclass(frozen=True, kw_only=True)
class VariantSettings:
    """Settings of tasks that evaluate several variants of a synthetic task, such as longer
    sequences.
    """

    samples: Count = 1000
    """Number of sequences per variant."""
    seed: Seed = 0
    """Seed of the sequences. They are drawn independently of the training data."""
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
    """Variants: a mapping from names to numbers of blanks in a sequence. The first must be as in
    training.
    """


@dataclass(frozen=True, kw_only=True)
class GridNavigationSettings(VariantSettings):
    """Accuracy of predicting the content of grid cells that were visited before."""

    dimensions: int = 2
    """Dimensions of the grid, as in training: 1 for a ring of cells, 2 for a torus."""
    objects: int = 16
    """Number of different objects, as in training."""
    longest_run: int | None = None
    """Maximum number of steps in one direction, as in training. Default: 10 in one dimension, 3 in
    two.
    """
    variants: dict[str, list[float]] = field(
        default_factory=lambda: {
            "IID": [128, 64, 0.5],
            "dense": [64, 32, 0.2],
            "sparse": [256, 128, 0.8],
        }
    )
    """Variants: a mapping from names to [steps, width, blank_probability], the number of steps of a
    walk, the number of cells along each dimension and the fraction of empty cells. The first must
    be as in training."""


@dataclass(frozen=True, kw_only=True)
class RecallSettings(VariantSettings):
    """Accuracy of recalling the values of keys from key-value pairs at the beginning of the
    sequence.
    """

    keys: int = 128
    """Number of different keys, which is also the number of different values, as in training."""
    tokens_per_pair: int = 16
    """Length of a sequence divided by its number of key-value pairs, as in training."""
    lengths: list[int] = field(default_factory=lambda: [64, 128, 256, 512, 1024])
    """Sequence lengths in tokens. Each length is a variant."""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Tasks of pretrain.evaluate to run during training, such as
    {every: 500, perplexity: {data: held_out.jsonl, lengths: [512, 1024]}}."""

    every: Count = 1000
    """Steps between evaluations. The tasks also run after the last step."""
    perplexity: PerplexitySettings | None = None
    """Perplexity of documents at several context lengths. Disabled by default, as are all other
    tasks.
    """
    context_gain: ContextGainSettings | None = None
    """Reduction of the loss by longer contexts."""
    addition: AdditionSettings | None = None
    """Fraction of sums that are computed without an error, by operand length."""
    selective_copy: SelectiveCopySettings | None = None
    """Accuracy of copying symbols that are separated by blanks."""
    grid_navigation: GridNavigationSettings | None = None
    """Accuracy of predicting the content of grid cells that were visited before."""
    recall: RecallSettings | None = None
    """Accuracy of recalling the values of keys."""

    def enabled_tasks(self) -> dict[str, Any]:
        """Return the settings of each enabled task, such as `PerplexitySettings`, by the name of
        the task.
        """
        return {
            name: value
            for name, value in vars(self).items()
            if name != "every" and value is not None
        }
