"""The interface of evaluation tasks.

A task is one file in `evaluation/tasks` with a subclass of `Task`, listed in
`evaluation/tasks/__init__.py`. It imports torch, transformers and lm_eval only inside functions, so
that invalid settings are rejected before these slow imports.

1. `check` rejects settings, data and models that do not fit together.
2. `units` splits the work into units, in the same order on every rank.
3. The runner distributes the units over the ranks, calls `evaluate` for each unit, and saves the
   return values, so that an interrupted evaluation can continue.
4. `summarize` computes scores from the values of all units.
5. `draw` draws pictures of the results of one or more models.

The return value of `evaluate` is written as JSON and read back before `summarize`, so it may
contain only numbers, strings, lists and dictionaries.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from megatron_tape.config.values import format_value
from megatron_tape.errors import ConfigError
from megatron_tape.evaluation.results import Score, TaskResult

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure
    from torch import Tensor

    from megatron_tape.data.tokenizer import TokenizerRecord


Value = dict[str, Any]
"""What `Task.evaluate` returns for a unit: plain JSON, including the score of each example."""
Values = dict[str, Value]
"""The values of all units of a task, by unit key."""
TaskResults = dict[str, TaskResult]
"""The results of one task for one or more models, by model label."""
LEARNED_POSITIONS = ("gpt2", "gpt_neo", "gpt_bigcode", "opt", "biogpt", "openai-gpt")
"""Values of `model_type` in config.json for models that cannot read more tokens than their trained
length.
"""


@dataclass(frozen=True)
class Unit:
    """A unit of work, which one rank evaluates."""

    key: str
    """Name of the unit within its task, such as `1024/17`. It depends only on the task's settings
    and data.
    """
    cost: float = 1.0
    """Relative amount of work, used to balance ranks and to estimate the remaining time."""


@dataclass(frozen=True)
class Summary:
    """The results of a task, computed from the values of all units."""

    scores: list[Score]
    details: dict[str, Any] = field(default_factory=dict)
    """Data for pictures, such as losses by position; plain JSON."""
    notes: list[str] = field(default_factory=list)
    """Sentences shown with the scores, such as one about the number of truncated samples."""


@dataclass(frozen=True)
class Picture:
    """A figure, and its description for readers who cannot see it."""

    name: str
    """File name without suffix, such as `perplexity` or `passkey-1024`."""
    alternative_text: str
    figure: Figure


@dataclass(frozen=True)
class ModelInfo:
    """Facts about a model that are known before its weights are loaded."""

    label: str
    """Name in results and pictures."""
    vocab_size: int
    trained_length: int | None
    """Context length of the training in tokens, multiplied by a scaling that the user has chosen;
    None if `config` does not contain it.
    """
    config: dict[str, Any]
    """The contents of `config.json`; for a checkpoint or a model in training, equivalent settings.
    """
    has_tokenizer: bool
    tokenizer: TokenizerRecord | None = None
    """The record of the tokenizer, which is compared with the records in datasets; None if unknown.
    """


class EvaluatedModel(Protocol):
    """A model that tasks evaluate. The modules `transformers_model` and `training_model` implement
    it.
    """

    info: ModelInfo
    tokenizer: Any
    """A tokenizer of transformers or, in training, a `data.tokenizer.Tokenizer`; None if the model
    has none.
    """

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without beginning-of-text and end-of-text tokens."""

    def decode(self, tokens: list[int]) -> str:
        """Return the text of token ids, including special tokens and all spaces."""

    @property
    def bos(self) -> list[int]:
        """The beginning-of-text token that the tokenizer puts before texts: a list of one id, or an
        empty list.
        """

    def losses(self, tokens: np.ndarray, first: int) -> np.ndarray:
        """Return the losses (N - first,), float64, in nats of `tokens[first:]`, for `tokens` (N,)
        and `first` >= 1.

        Each token is predicted from all tokens before it. Implementations limit the memory for
        logits.
        """

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits (B, S, V) of tokens (B, S), in float32 on the CPU. Meant for small
        vocabularies V.
        """


class HuggingFaceModel(EvaluatedModel, Protocol):
    """An `EvaluatedModel` of transformers, for tasks that generate text or inspect the model."""

    model: Any
    """The `PreTrainedModel`, in evaluation mode."""
    device: Any

    def answer(self, prompt: Sequence[int], count: int) -> tuple[str, bool]:
        """Generate at most `count` tokens greedily after `prompt`; return the text, and whether an
        end token came.
        """

    def harness(self, batch_size: int = 1, max_length: int | None = None) -> Any:
        """Return this model as an `HFLM` of lm-evaluation-harness; `max_length` is its context
        length in tokens.
        """


class Task:
    """Base class of tasks. A subclass defines `name`, `Settings`, `units`, `evaluate` and
    `summarize`.
    """

    name: ClassVar[str]
    title: ClassVar[str] = ""
    """Heading of the results. Default: `name` with a capital letter, and spaces instead of
    underscores.
    """
    Settings: ClassVar[type]
    """The dataclass of the task's settings. As in `config.schema`, each field has a docstring."""
    needs_tokenizer: ClassVar[bool] = True
    generates: ClassVar[bool] = False
    """Whether the task needs a `HuggingFaceModel`. Such a task cannot run during training."""
    shortest = 2
    """Half and a quarter of the trained length are default lengths if they have so many tokens."""

    def __init__(self, settings: Any, section: str = ""):
        """Create a task; `section` is the section of its settings in error messages, by default the
        task's name.
        """
        self.settings = settings
        self.section = section or self.name

    def key(self, setting: str) -> str:
        """Return the full key of one of the task's settings, for error messages."""
        return f"{self.section}.{setting}"

    def context_lengths(self, info: ModelInfo) -> list[int]:
        """Return the setting `lengths` in ascending order.

        By default, these are the trained length, half of it and a quarter of it; the latter two
        only if they have at least `shortest` tokens. Raises ConfigError if the lengths are invalid.
        """
        lengths = self.settings.lengths
        trained = info.trained_length
        if lengths is None:
            # A quarter of 8 is the shortest valid length.
            if trained is None or trained < 8:
                raise ConfigError(
                    self.key("lengths"),
                    f"is null, but the configuration of {info.label} contains no training length of"
                    " 8 or more tokens",
                    "set it, such as to [1024, 2048]",
                )
            half = trained // 2
            return [length for length in (half // 2, half) if length >= self.shortest] + [trained]

        if not lengths or min(lengths) < 2 or len(set(lengths)) < len(lengths):
            raise ConfigError(
                self.key("lengths"),
                f"is {format_value(lengths)}",
                "give one or more numbers of tokens, each at least 2 and only once",
            )
        # Models of other types read any number of tokens.
        has_limit = trained is not None and info.config.get("model_type") in LEARNED_POSITIONS
        if has_limit and max(lengths) > trained:
            raise ConfigError(
                self.key("lengths"),
                f"has {max(lengths)}, but {info.label} has position embeddings for {trained} tokens"
                " only",
                f"remove lengths above {trained}",
            )
        return sorted(lengths)

    def check(self, info: ModelInfo) -> None:
        """Raise ConfigError if the settings, the data and the model do not fit together.

        Errors in data name the file and the line. Called on rank 0, before torch is imported.
        """

    def refuse_code(self) -> None:
        """Raise ConfigError if a setting names files whose code the task would run.

        Called before any file is read, and only without --trust-remote-code.
        """

    def inputs(self) -> Sequence[Path]:
        """Return the files that the task reads. If one of them changes, earlier results are not
        reused.
        """
        return ()

    def units(self, model: EvaluatedModel) -> list[Unit]:
        """Return the units of work, as the same list on every rank."""
        raise NotImplementedError

    def evaluate(self, unit: Unit, model: EvaluatedModel) -> Value:
        """Evaluate one unit; return its value as plain JSON, including the score of each
        example.
        """
        raise NotImplementedError

    def summarize(self, values: Values, info: ModelInfo) -> Summary:
        """Compute the results from the values of all units, given by unit key. Called on rank 0."""
        raise NotImplementedError

    def group_names(self) -> dict[str, str]:
        """Return names of the groups of scores for readers, by `Score.group`, in the order in which
        to show them.

        Pages, pictures and tables show these names; files keep the groups. A group that is left out
        keeps its name.
        """
        return {}

    def require(self, *packages: str) -> None:
        """Raise ConfigError if one of `packages`, given by import name, is not installed."""
        # Importing them would take seconds.
        missing = [package for package in packages if importlib.util.find_spec(package) is None]
        if missing:
            raise ConfigError(
                self.name,
                f"needs packages that are not installed: {', '.join(missing)}",
                f"run pip install {' '.join(missing)}",
            )

    @classmethod
    def draw(cls, results: TaskResults) -> list[Picture]:
        """Return pictures of the results of one or more models, given by model label."""
        return []
