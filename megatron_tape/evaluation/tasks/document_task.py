"""Base class of tasks that measure losses of documents: it chooses the scored tokens and the
windows around them.

The scored tokens of a document depend only on the longest context length, so they are the same at
all lengths. At each length, a token is scored in exactly one window, in which at least three
quarters of the context precede it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from megatron_tape.config.evaluation import DocumentSettings
from megatron_tape.evaluation.task import EvaluatedModel, ModelInfo, Task, Unit
from megatron_tape.evaluation.tasks.text_sources import (
    Document,
    TextSource,
    check_sources,
    chosen_lengths,
    find_sources,
    long_documents,
)


@dataclass(frozen=True)
class Window:
    """Tokens `start` to `stop` (exclusive) of a document; the last `scored` of them are scored."""

    start: int
    stop: int
    scored: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Work:
    """The work of a unit: windows of one document at one context length."""

    document: Document
    length: int
    windows: Sequence[Window]

    @property
    def scored(self) -> tuple[int, int]:
        """Start and stop (exclusive) of the scored tokens in the document."""
        return self.windows[0].stop - self.windows[0].scored, self.windows[-1].stop


class DocumentTask(Task):
    """Base class. A unit is a document at a context length; `units` sets `work` to the windows of
    each unit, by key.
    """

    Settings: ClassVar[type] = DocumentSettings
    needs_tokenizer = False
    work: dict[str, Work]
    skipped: dict[str, int]
    """Number of documents that were too short, by name of the source."""

    @property
    def sources(self) -> list[TextSource]:
        settings = self.settings
        return find_sources(settings.data, settings.split, settings.token_dtype, self.section)

    @property
    def most_documents(self) -> int | None:
        return self.settings.documents or 50

    def lengths(self, info: ModelInfo) -> list[int]:
        return chosen_lengths(self.settings.lengths, info, self.key("lengths"))

    def needed(self, info: ModelInfo) -> int:
        return max(self.lengths(info)) + 1

    def check(self, info: ModelInfo) -> None:
        check_sources(
            self.sources, info, self.settings.text_key, self.needed(info), self.most_documents
        )

    def inputs(self) -> list[Path]:
        return [file for source in self.sources for file in source.files]

    def units(self, model: EvaluatedModel) -> list[Unit]:
        self.work = {}
        self.skipped = {}
        for source in self.sources:
            text_key = self.settings.text_key
            needed = self.needed(model.info)
            documents, self.skipped[source.name] = long_documents(
                source, model, text_key, needed, self.most_documents
            )
            self.work |= self.plan(source, documents, model)
        return [
            Unit(key, sum(map(len, work.windows)) * (1 + work.length / 65_536))
            for key, work in self.work.items()
        ]

    def plan(
        self, source: TextSource, documents: list[Document], model: EvaluatedModel
    ) -> dict[str, Work]:
        """Return the work for a source by unit key, `SOURCE/DOCUMENT/LENGTH`: each document at each
        length.
        """
        lengths = self.lengths(model.info)
        return {
            f"{document.key}/{length}": Work(
                document, length, self.windows(document, length, model)
            )
            for document in documents
            for length in lengths
        }

    def windows(self, document: Document, length: int, model: EvaluatedModel) -> list[Window]:
        """Return the windows of a document at a context length. They score the same tokens at every
        length.
        """
        settings = self.settings
        longest = max(self.lengths(model.info))
        first = longest + 1 - scored_per_window(longest, settings.stride)
        stop = min(first + (settings.windows or 8) * settings.stride, len(document.tokens))
        step = scored_per_window(length, settings.stride)
        ends = [(start, min(start + step, stop)) for start in range(first, stop, step)]
        # The model reads `length` tokens, including the beginning-of-text token; the last token is
        # only a label.
        size = length + 1 - len(model.bos)
        return [Window(end - size, end, end - start) for start, end in ends]

    def scored(self) -> dict[str, dict[str, Any]]:
        """Return for each source the `count` of scored tokens, and a `digest` of their ids and
        positions.

        Models with equal digests were measured on the same tokens.
        """
        spans: dict[str, tuple[np.ndarray, int, int]] = {}
        for work in self.work.values():
            start, stop = work.scored
            _, first, last = spans.get(work.document.key, (None, start, stop))
            spans[work.document.key] = work.document.tokens, min(start, first), max(stop, last)
        scored: dict[str, dict[str, Any]] = {}
        digests: dict[str, Any] = {}
        for key, (tokens, first, stop) in spans.items():
            name = key.split("/")[0]
            digest = digests.setdefault(name, hashlib.sha256())
            digest.update(f"{key} {first} {stop} ".encode())
            digest.update(np.ascontiguousarray(tokens[first:stop], "<i8"))
            count = scored.get(name, {"count": 0})["count"] + stop - first
            scored[name] = {"count": count, "digest": digest.hexdigest()[:16]}
        return scored

    def notes_on_documents(self) -> list[str]:
        return [
            f"{name}: {short:,} document{'s were' if short > 1 else ' was'} too short and skipped."
            for name, short in self.skipped.items()
            if short
        ]


def scored_per_window(length: int, stride: int) -> int:
    """Return the number of scored tokens per window: `stride`, but at most a quarter of the context
    `length`.
    """
    return min(stride, max(1, length // 4))


def window_losses(
    model: EvaluatedModel,
    document: Document,
    window: Window,
    prefix: list[int],
    whole: bool = False,
) -> np.ndarray:
    """Return the losses in nats of a window's scored tokens or, if `whole`, of all tokens but the
    first.

    `prefix`, such as a beginning-of-text token, precedes the window. Raises ValueError if a loss is
    infinite or NaN.
    """
    tokens = np.concatenate(
        [np.asarray(prefix, np.int64), document.tokens[window.start : window.stop]]
    )
    losses = model.losses(tokens, 1 if whole else len(tokens) - window.scored)
    if not np.isfinite(losses).all():
        raise ValueError(
            f"{model.info.label} has an infinite or NaN loss in {document.key}, tokens"
            f" {window.start:,} to {window.stop:,}; try another dtype or a shorter length, or check"
            " the model"
        )
    return losses
