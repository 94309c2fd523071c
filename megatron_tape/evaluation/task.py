"""What an evaluation task is: settings, independent units of work, and what their findings add up to.

A task is one file in `evaluation/tasks` with a subclass of `Task`, entered in its `__init__`. It imports neither torch
nor transformers nor lm_eval at its top, so that wrong settings are rejected before those are loaded.

The way of the data: `check` refuses what cannot work; `units` cuts the work into pieces, the same ones in the same
order on every rank; the runner shares the units among the ranks and keeps the value of each as soon as it is known, so
that an interrupted evaluation continues there; `summarize` turns the values of all units into scores; `draw` makes
pictures of the results of one model, or of several side by side. What `evaluate` returns is written as JSON and read
back before `summarize` sees it, so it consists of plain numbers, texts, lists and dictionaries.
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
    """A piece of work that one rank does."""

    key: str
    """Names the unit within its task, such as `1024/17`; the same whenever the task has the same settings and data."""
    cost: float = 1.0
    """How much work it is compared with the task's other units; serves to share them and to tell the time left."""


@dataclass(frozen=True)
class Summary:
    """What the values of all units of a task add up to."""

    scores: list[Score]
    details: dict[str, Any] = field(default_factory=dict)
    """Whatever else the pictures need, such as losses by position; plain JSON."""
    notes: list[str] = field(default_factory=list)
    """Sentences that a reader must see beside the scores, such as how many samples were truncated."""


@dataclass(frozen=True)
class Picture:
    """A figure with what describes it to those who cannot see it."""

    name: str
    """Its file's name without suffix, such as `perplexity` or `passkey-1024`."""
    alternative_text: str
    figure: Figure


@dataclass(frozen=True)
class ModelInfo:
    """What is known of a model from its `config.json`."""

    label: str
    """How results and pictures call it."""
    vocab_size: int
    trained_length: int | None
    """Tokens of context that it was trained on, as its configuration says; None if that does not say."""
    config: dict[str, Any]
    """The whole `config.json`."""
    has_tokenizer: bool
    tokenizer: TokenizerRecord | None = None
    """What datasets are compared with; None if it is unknown."""


class LanguageModel(Protocol):
    """A model under evaluation; `transformers_model` has one of transformers, `training_model` one that trains."""

    info: ModelInfo
    tokenizer: Any
    """The tokenizer of transformers; None if the model has none."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without tokens that mark its beginning or end."""

    def decode(self, tokens: list[int]) -> str:
        """Return the text of ids, with special tokens and all spaces."""

    @property
    def bos(self) -> list[int]:
        """What the model's tokenizer puts before a text: a list of one id, or an empty one."""

    def losses(self, tokens: np.ndarray, first: int) -> np.ndarray:
        """Return the loss in nats (N - `first`,), float64, of every token of `tokens` (N,) from `first` >= 1 on.

        Each is predicted from all tokens before it. The logits of a long sequence are never held at once.
        """

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits (B, S, V) of tokens (B, S), in float32 on the CPU; for small vocabularies."""


class HuggingFaceModel(LanguageModel, Protocol):
    """A model that transformers runs: what tasks need that generate text or look inside."""

    model: Any
    """The `PreTrainedModel`, in evaluation mode."""
    device: Any

    def answer(self, prompt: Sequence[int], count: int) -> tuple[str, bool]:
        """Return what it generates greedily in at most `count` tokens, and whether it ended by itself."""

    def harness(self, batch_size: int = 1, max_length: int | None = None) -> Any:
        """Return it as a model of lm-evaluation-harness (`HFLM`), which takes up to `max_length` tokens."""


class Task:
    """A subclass has a `name`, `Settings`, and all methods below but those that have a default here."""

    name: ClassVar[str]
    title: ClassVar[str] = ""
    """How it is written in headings, if its owners write it in another way than `name`."""
    Settings: ClassVar[type]
    """A documented dataclass, whose every field has a default or must be given; as in `config.schema`."""
    needs_tokenizer: ClassVar[bool] = True
    generates: ClassVar[bool] = False
    """Whether it needs a `HuggingFaceModel`; such a task cannot run during training."""

    def __init__(self, settings: Any, section: str = ""):
        """Take the settings and the section that they were given in, if that is not the task's name."""
        self.settings, self.section = settings, section or self.name

    def key(self, setting: str) -> str:
        return f"{self.section}.{setting}"

    def check(self, info: ModelInfo) -> None:
        """Raise ConfigError if settings, data and model cannot work together.

        Bad data is named by file and line. Called on rank 0 before torch is loaded.
        """

    def refuse_code(self) -> None:
        """Raise ConfigError if a setting names files that may run code; not called with --trust-remote-code.

        Nothing has been read at that time.
        """

    def inputs(self) -> Sequence[Path]:
        """Return the files that are read; their digests are recorded, and results of other contents are not reused."""
        return ()

    def units(self, model: LanguageModel) -> list[Unit]:
        """Return the pieces of work. Called on every rank; all get the same list."""
        raise NotImplementedError

    def evaluate(self, unit: Unit, model: LanguageModel) -> dict[str, Any]:
        """Do one piece of work; return what is kept of it, among it the score of every example, as plain JSON."""
        raise NotImplementedError

    def summarize(self, values: dict[str, dict[str, Any]], info: ModelInfo) -> Summary:
        """Return what the values by the units' keys add up to. Called on rank 0."""
        raise NotImplementedError

    def require(self, *packages: str) -> None:
        """Raise ConfigError if one of the packages, by the names that Python imports, is not installed."""
        missing = [package for package in packages if importlib.util.find_spec(package) is None]
        if missing:
            raise ConfigError(self.name, f"needs {' and '.join(missing)}", f"pip install {' '.join(missing)}")

    @classmethod
    def draw(cls, results: dict[str, TaskResult]) -> list[Picture]:
        """Return pictures of this task's results by the models' labels, in order."""
        return []
