"""Perplexity by context length, on the same tokens at every length, or with the protocol of
published tables.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from megatron_tape.config.evaluation import PerplexitySettings
from megatron_tape.errors import FileError
from megatron_tape.evaluation.results import Score, TaskResult
from megatron_tape.evaluation.score_pictures import by_length, by_position
from megatron_tape.evaluation.statistics import Interval, bootstrap_ratio
from megatron_tape.evaluation.task import EvaluatedModel, ModelInfo, Picture, Summary, Unit
from megatron_tape.evaluation.tasks.document_task import DocumentTask, Window, Work, window_losses
from megatron_tape.evaluation.tasks.text_sources import Document, TextSource

NATS = "nats per token"
POSITION_BINS = 64
"""Number of ranges of positions over which losses are averaged."""
WINDOWS_PER_UNIT = 32
"""Maximum number of windows of a unit with protocol longlora."""
LONGLORA_NOTE = (
    "Protocol longlora: windows extend across documents and begin in the middle of a text, without"
    " a beginning-of-text token. All positions are scored, so the average context is half of the"
    " length, and overlapping windows score a token several times. Windows of different lengths"
    " score different tokens, and the end of the data is not scored. Compare these values only with"
    " tables that use the same protocol."
)


class Perplexity(DocumentTask):
    """Loss, perplexity and bits per byte by context length, with intervals over documents, and the
    loss by position.

    The value of a unit contains the sum of losses in `nats` of a document at a length, the number
    of scored `tokens`, and for texts the number of their `bytes`. At the longest length, it also
    contains `positions`: the sums of the losses of the first window over `POSITION_BINS` ranges of
    positions. With protocol longlora, it contains only `means`, the mean loss of each window.
    """

    name = "perplexity"
    Settings = PerplexitySettings

    @property
    def _longlora(self) -> bool:
        return self.settings.protocol == "longlora"

    @property
    def most_documents(self) -> int | None:
        if self._longlora:
            return self.settings.documents
        return super().most_documents

    def needed(self, info: ModelInfo) -> int:
        if self._longlora:
            return 2
        return super().needed(info)

    def plan(
        self, source: TextSource, documents: list[Document], model: EvaluatedModel
    ) -> dict[str, Work]:
        """Return the work for a source by unit key: documents or, with longlora, groups of windows,
        at each length.
        """
        if not self._longlora:
            return super().plan(source, documents, model)
        tokens = np.concatenate([document.tokens for document in documents])
        stream = Document(source.name, tokens, documents[0].is_text)
        work = {}
        for length in self.lengths(model.info):
            starts = range(0, len(stream.tokens) - length, self.settings.stride)[:-1][
                : self.settings.windows
            ]
            if not starts:
                problem = (
                    f"has {len(stream.tokens):,} tokens, too few for windows of {length:,} with"
                    " protocol longlora"
                )
                raise FileError(
                    source.path, problem, f"give more data, or set shorter {self.key('lengths')}"
                )
            for first in range(0, len(starts), WINDOWS_PER_UNIT):
                chosen = starts[first : first + WINDOWS_PER_UNIT]
                windows = [Window(start, start + length, length - 1) for start in chosen]
                work[f"{source.name}/{first}/{length}"] = Work(stream, length, windows)
        return work

    def evaluate(self, unit: Unit, model: EvaluatedModel) -> dict[str, Any]:
        work = self.work[unit.key]
        if self._longlora:
            found = (window_losses(model, work.document, window, []) for window in work.windows)
            return {"means": [float(losses.mean()) for losses in found]}
        value: dict[str, Any] = {
            "nats": 0.0,
            "tokens": sum(window.scored for window in work.windows),
        }
        for number, window in enumerate(work.windows):
            whole = number == 0 and work.length == max(self.lengths(model.info))
            losses = window_losses(model, work.document, window, model.bos, whole=whole)
            value["nats"] += float(losses[-window.scored :].sum())
            if whole:
                value["positions"] = [float(part.sum()) for part in _by_position(losses)]
        if work.document.is_text:
            value["bytes"] = _text_bytes(model, work.document.tokens, *work.scored)
        return value

    def summarize(self, values: dict[str, dict[str, Any]], info: ModelInfo) -> Summary:
        scores = []
        positions = {}
        notes = []
        scored = self.scored()
        by_source_and_length: dict[tuple[str, int], list[dict[str, Any]]] = {}
        for key, value in values.items():
            name, _, length = key.split("/")
            by_source_and_length.setdefault((name, int(length)), []).append(value)
        for (name, length), found in by_source_and_length.items():
            if self._longlora:
                scores += _scores_of_means(found, length, f"{name} (longlora)")
                continue
            scores += _scores_of_documents(found, length, name)
            if length == max(self.lengths(info)):
                notes.append(_note_on_scored(name, found))
                if all("bytes" in value for value in found) and name in scored:
                    scored[name]["bytes"] = sum(value["bytes"] for value in found)
            if "positions" in found[0]:
                positions[name] = _mean_by_position([value["positions"] for value in found], length)
        notes += self.notes_on_documents()
        notes += [LONGLORA_NOTE] if self._longlora else []
        return Summary(
            scores,
            {"scored": scored} | ({"loss_by_position": positions} if positions else {}),
            notes,
        )

    @classmethod
    def draw(cls, results: dict[str, TaskResult]) -> list[Picture]:
        return [
            *by_length(results, "perplexity", "perplexity", "perplexity", steep=10),
            *by_position(results, "perplexity-by-position"),
        ]


def _note_on_scored(name: str, values: list[dict[str, Any]]) -> str:
    tokens = sum(value["tokens"] for value in values)
    documents = len(values)
    if all("bytes" in value for value in values):
        size = f" ({sum(value['bytes'] for value in values):,} bytes)"
    else:
        size = ""
    return (
        f"{name}: {tokens:,} tokens{size} of {documents:,} document{'s' if documents > 1 else ''}"
        " are scored, the same at every length"
        + ("" if documents > 1 else "; one document gives no interval")
        + "."
    )


def _text_bytes(model: EvaluatedModel, tokens: np.ndarray, start: int, stop: int) -> int:
    """Return the number of UTF-8 bytes of tokens `start` to `stop` of a document."""
    # Decodes the document from its beginning, since tokenizers may decode the first token of a text
    # differently.
    before, total = (
        len(model.decode(tokens[:end].tolist()).encode("utf-8", "replace")) for end in (start, stop)
    )
    return total - before


def _by_position(losses: np.ndarray) -> list[np.ndarray]:
    return np.array_split(losses, min(POSITION_BINS, len(losses)))


def _mean_by_position(sums: list[list[float]], length: int) -> dict[str, list[float]]:
    """Return the mean loss of each range of positions, and the mean number of tokens before its
    positions.
    """
    parts = _by_position(np.arange(1, length + 1))
    counts = np.array([len(part) for part in parts]) * len(sums)
    return {
        "tokens_before": [float(part.mean()) for part in parts],
        "loss": (np.sum(sums, axis=0) / counts).tolist(),
    }


def _scores_of_documents(values: list[dict[str, Any]], length: int, group: str) -> list[Score]:
    nats, tokens = ([value[key] for value in values] for key in ("nats", "tokens"))
    place = {"length": length, "group": group, "count": len(values), "counted": "document"}
    scores = _losses(sum(nats) / sum(tokens), bootstrap_ratio(nats, tokens), place)
    if all("bytes" in value for value in values):
        bits = [value / math.log(2) for value in nats]
        sizes = [value["bytes"] for value in values]
        ratio = sum(bits) / max(1, sum(sizes))
        interval = bootstrap_ratio(bits, sizes)
        scores.append(
            Score("bits_per_byte", ratio, "lower", *interval, unit="bits per byte", **place)
        )
    return scores


def _scores_of_means(values: list[dict[str, Any]], length: int, group: str) -> list[Score]:
    sums = [sum(value["means"]) for value in values]
    counts = [len(value["means"]) for value in values]
    place = {"length": length, "group": group, "count": sum(counts), "counted": "window"}
    return _losses(sum(sums) / sum(counts), (None, None), place)


def _losses(loss: float, interval: Interval, place: dict[str, Any]) -> list[Score]:
    return [
        Score("loss", loss, "lower", *interval, unit=NATS, **place),
        Score("perplexity", _exp(loss), "lower", *map(_exp, interval), **place),
    ]


def _exp(value: float | None) -> float | None:
    if value is None:
        return None
    return math.exp(min(value, 700.0))
