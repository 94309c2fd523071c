"""Base classes of tasks that measure losses of documents.

`DocumentTask` reads the documents. `WindowTask` chooses the scored tokens and the windows around
them: the scored tokens of a document depend only on the longest context length, so they are the
same at all lengths. At each length, a token is scored in exactly one window, in which at least
three quarters of the context precede it. Such a window is a part of a document that the model
reads at once; it has nothing to do with the sliding window of attention.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_tape.evaluation.results import Score
from megatron_tape.evaluation.task import EvaluatedModel, ModelInfo, Task, Unit
from megatron_tape.evaluation.tasks.text_sources import (
    Document,
    TextSource,
    check_sources,
    find_sources,
    long_documents,
)
from megatron_tape.text import counted

NATS = "nats per token"


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
    """Base class of tasks with `TextSettings` and the setting `data`."""

    needs_tokenizer = False

    @property
    def text_sources(self) -> list[TextSource]:
        """The files and datasets that the setting `data` names."""
        return find_sources(self.settings, self.section)

    @property
    def most_documents(self) -> int | None:
        """Maximum number of documents of a source; None for all."""
        return self.settings.documents

    def minimum_tokens(self, info: ModelInfo) -> int:
        """Return the minimum number of tokens of a document."""
        raise NotImplementedError

    def check(self, info: ModelInfo) -> None:
        """Raise UserError if a source is invalid, or has no document that is long enough."""
        check_sources(self.text_sources, info, self.minimum_tokens(info), self.most_documents)

    def inputs(self) -> list[Path]:
        """Return the files of all sources."""
        return [file for text_source in self.text_sources for file in text_source.files]


class WindowTask(DocumentTask):
    """Base class of tasks whose unit is a document at a context length."""

    work: dict[str, Work]
    """The windows of each unit, by its key; set by `units`."""
    skipped: dict[str, int]
    """Number of documents that were too short, by name of the source."""

    @property
    def most_documents(self) -> int | None:
        """Maximum number of documents of a source, 50 by default."""
        # A document takes several forward passes at each length.
        return self.settings.documents or 50

    def minimum_tokens(self, info: ModelInfo) -> int:
        """Return the number of tokens that the longest context length needs."""
        # One more than the longest context, for the token that the context predicts.
        return max(self.context_lengths(info)) + 1

    def units(self, model: EvaluatedModel) -> list[Unit]:
        """Read the documents, and return a unit for each document and length."""
        self.work = {}
        self.skipped = {}
        for text_source in self.text_sources:
            documents, short = long_documents(
                text_source, model, self.minimum_tokens(model.info), self.most_documents
            )
            self.skipped[text_source.name] = short
            self.work |= self.plan(text_source, documents, model)
        # The time per token grows with the context, because of attention. At 65,536 tokens,
        # attention is assumed to take as long as all else.
        return [
            Unit(key, sum(map(len, work.windows)) * (1 + work.length / 65_536))
            for key, work in self.work.items()
        ]

    def plan(
        self, text_source: TextSource, documents: list[Document], model: EvaluatedModel
    ) -> dict[str, Work]:
        """Return the work for a source by unit key, `SOURCE/DOCUMENT/LENGTH`: each document at each
        length.
        """
        work = {}
        for document in documents:
            for length in self.context_lengths(model.info):
                windows = self.windows(document, length, model)
                work[f"{document.key}/{length}"] = Work(document, length, windows)
        return work

    def windows(self, document: Document, length: int, model: EvaluatedModel) -> list[Window]:
        """Return the windows of a document at a context length. They score the same tokens at every
        length.
        """
        stride = self.settings.stride
        longest = max(self.context_lengths(model.info))
        # At the longest length, the first window ends with token `longest` (from 0), so that its
        # context is full. Its first scored token, `first`, is the first one at every length.
        first = longest + 1 - scored_per_window(longest, stride)
        stop = min(first + (self.settings.windows or 8) * stride, len(document.tokens))
        # The model reads `length` tokens, including the beginning-of-text token; the last token is
        # only a label.
        size = length + 1 - len(model.bos)

        windows = []
        step = scored_per_window(length, stride)
        for start in range(first, stop, step):
            # The last window may score fewer tokens.
            end = min(start + step, stop)
            windows.append(Window(end - size, end, scored=end - start))
        return windows

    def scored(self) -> dict[str, dict]:
        """Return for each source the `count` of scored tokens, and a `digest` of their ids and
        positions.

        Models with equal digests were measured on the same tokens.
        """
        # The units of a document score the same tokens at every length. With protocol longlora, the
        # units of a source have consecutive windows of one long document.
        by_document = {}
        for work in self.work.values():
            by_document.setdefault(work.document.key, []).append(work)

        counts = {}
        digests = {}
        for key, works in by_document.items():
            # Scored tokens are contiguous in a document.
            start = min(work.scored[0] for work in works)
            stop = max(work.scored[1] for work in works)
            name = key.split("/")[0]
            counts[name] = counts.get(name, 0) + stop - start
            digest = digests.setdefault(name, hashlib.sha256())
            digest.update(f"{key} {start} {stop} ".encode())
            # Datasets store ids in different types, which must not change the digest.
            digest.update(np.ascontiguousarray(works[0].document.tokens[start:stop], "<i8"))
        return {
            name: {"count": count, "digest": digests[name].hexdigest()[:16]}
            for name, count in counts.items()
        }

    def notes_on_documents(self) -> list[str]:
        """Return a sentence for each source with documents that were too short."""
        return [
            f"{name}: skipped as too short: {counted(short, 'document')}."
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
    # `losses` returns those from token `first` on. Token 0 has no loss, as nothing precedes it.
    first = 1 if whole else len(tokens) - window.scored
    losses = model.losses(tokens, first)
    if not np.isfinite(losses).all():
        raise ValueError(
            f"{model.info.label} has an infinite or NaN loss in {document.key}, tokens"
            f" {window.start:,} to {window.stop:,}; try another dtype or a shorter length, or check"
            " the model"
        )
    return losses


def perplexity_score(loss: Score, metric: str) -> Score:
    """Return the perplexity for the score of a loss in nats, limited to finite values."""
    # A diverged model must not make the results invalid JSON.
    perplexities: dict[str, Any] = {
        name: math.exp(min(getattr(loss, name), 700.0))  # exp(710) overflows
        for name in ("value", "low", "high")
        if getattr(loss, name) is not None
    }
    return replace(loss, metric=metric, unit="", **perplexities)
