"""The interface of evaluation tasks.

A task is one file in `evaluation/tasks` with a subclass of `Task`, listed in the `__init__` there. It imports torch,
transformers and lm_eval only inside functions, so that invalid settings are rejected before those are loaded.

1. `check` rejects settings, data and models that cannot work.
2. `units` splits the work into units: the same ones in the same order on every rank.
3. The runner distributes the units over the ranks, and saves the value of each, so that an interrupted evaluation can
   continue.
4. `summarize` turns the values of all units into scores.
5. `draw` draws the results of one or more models.

The return value of `evaluate` is written as JSON and read back before `summarize`, so it consists of plain numbers,
strings, lists and dictionaries.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from megatron_tape.errors import ConfigError
from megatron_tape.evaluation.results import Score, TaskResult

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure
    from torch import Tensor

    from megatron_tape.data.tokenizer import TokenizerRecord


@dataclass(frozen=True)
class Unit:
    """A unit of work, done by one rank."""

    key: str
    """Name of the unit within its task, such as `1024/17`. It depends only on the task's settings and data."""
    cost: float = 1.0
    """Relative amount of work, used to balance ranks and to estimate the remaining time."""


@dataclass(frozen=True)
class Summary:
    """Results of a task from the values of all units."""

    scores: list[Score]
    details: dict[str, Any] = field(default_factory=dict)
    """Other data for pictures, such as losses by position; plain JSON."""
    notes: list[str] = field(default_factory=list)
    """Sentences shown with the scores, such as how many samples were truncated."""


@dataclass(frozen=True)
class Picture:
    """A figure with a description as alternative text."""

    name: str
    """File name without suffix, such as `perplexity` or `passkey-1024`."""
    alternative_text: str
    figure: Figure


@dataclass(frozen=True)
class ModelInfo:
    """Facts about a model from its `config.json`."""

    label: str
    """Name in results and pictures."""
    vocab_size: int
    trained_length: int | None
    """Trained context length in tokens; None if the configuration does not name it."""
    config: dict[str, Any]
    """The whole `config.json`."""
    has_tokenizer: bool
    tokenizer: TokenizerRecord | None = None
    """The record that is compared with that of datasets; None if unknown."""


class LanguageModel(Protocol):
    """A model under evaluation; see `transformers_model` and `training_model` for the implementations."""

    info: ModelInfo
    tokenizer: Any
    """The tokenizer of transformers; None if the model has none."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without beginning-of-text and end-of-text tokens."""

    def decode(self, tokens: list[int]) -> str:
        """Return the text of token ids, including special tokens and all spaces."""

    @property
    def bos(self) -> list[int]:
        """The beginning-of-text token that the tokenizer adds: a list of one id, or an empty list."""

    def losses(self, tokens: np.ndarray, first: int) -> np.ndarray:
        """Return the loss in nats (N - `first`,), float64, of every token of `tokens` (N,) from `first` >= 1 on.

        Each is predicted from all tokens before it. Logits are computed in parts to save memory.
        """

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits (B, S, V) of tokens (B, S), in float32 on the CPU; for small vocabularies."""


class HuggingFaceModel(LanguageModel, Protocol):
    """A model of transformers, for tasks that generate text or inspect the model."""

    model: Any
    """The `PreTrainedModel`, in evaluation mode."""
    device: Any

    def answer(self, prompt: Sequence[int], count: int) -> tuple[str, bool]:
        """Generate at most `count` tokens greedily; return the text, and whether it ended with an end token."""

    def harness(self, batch_size: int = 1, max_length: int | None = None) -> Any:
        """Return this model as an `HFLM` of lm-evaluation-harness with a context of `max_length` tokens."""


class Task:
    """Base class of tasks. A subclass defines `name`, `Settings`, and the methods without a default."""

    name: ClassVar[str]
    title: ClassVar[str] = ""
    """Heading, if it differs from `name`."""
    Settings: ClassVar[type]
    """A documented dataclass of settings, as in `config.schema`."""
    needs_tokenizer: ClassVar[bool] = True
    generates: ClassVar[bool] = False
    """Whether it needs a `HuggingFaceModel`; such a task cannot run during training."""

    def __init__(self, settings: Any, section: str = ""):
        """Store the settings, and the section they are from if it is not the task's name."""
        self.settings, self.section = settings, section or self.name

    def key(self, setting: str) -> str:
        return f"{self.section}.{setting}"

    def check(self, info: ModelInfo) -> None:
        """Raise ConfigError if settings, data and model cannot work together.

        Errors in data name file and line. Called on rank 0 before torch is loaded.
        """

    def refuse_code(self) -> None:
        """Raise ConfigError if a setting names files that may run code.

        Called before anything is read, unless --trust-remote-code is given.
        """

    def inputs(self) -> Sequence[Path]:
        """Return the files that are read. Their digests are recorded; if they change, results are not reused."""
        return ()

    def units(self, model: LanguageModel) -> list[Unit]:
        """Return the units of work: the same list on every rank."""
        raise NotImplementedError

    def evaluate(self, unit: Unit, model: LanguageModel) -> dict[str, Any]:
        """Evaluate one unit; return its value as plain JSON, including the score of every example."""
        raise NotImplementedError

    def summarize(self, values: dict[str, dict[str, Any]], info: ModelInfo) -> Summary:
        """Return the results from the values by unit key. Called on rank 0."""
        raise NotImplementedError

    def require(self, *packages: str) -> None:
        """Raise ConfigError if a package, given by its import name, is not installed."""
        missing = [package for package in packages if importlib.util.find_spec(package) is None]
        if missing:
            raise ConfigError(self.name, f"needs {' and '.join(missing)}", f"pip install {' '.join(missing)}")

    @classmethod
    def draw(cls, results: dict[str, TaskResult]) -> list[Picture]:
        """Return pictures of this task's results, given by model label."""
        return []
