"""Gain from longer contexts: the loss with a short context minus the loss with a longer one, on the
same tokens.

Few tokens depend on a long context, so perplexity hardly shows how well a model uses it. The losses
of key tokens do (LongPPL, Fang et al., ICLR 2025). A token is a key token if its loss falls by more
than `alpha` from the short to the longest context, and its log-probability with the longest context
is above `beta`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from megatron_tape.config.evaluation import ContextGainSettings
from megatron_tape.errors import ConfigError
from megatron_tape.evaluation.results import Score, TaskResult
from megatron_tape.evaluation.score_pictures import by_length
from megatron_tape.evaluation.statistics import bootstrap_ratio
from megatron_tape.evaluation.task import EvaluatedModel, ModelInfo, Picture, Summary, Unit
from megatron_tape.evaluation.tasks.document_task import DocumentTask, window_losses

NATS = "nats per token"
BIAS = (
    "Key tokens are those that the measured model predicts well with the longest context, which"
    " favors this model."
)
DECIMALS = 5
"""Number of decimals of the losses of single tokens in `results.json`."""


class ContextGain(DocumentTask):
    """The gain from longer contexts, on all scored tokens and on key tokens.

    The value of a unit contains the `losses` of a document's scored tokens at one context length.
    """

    name = "context_gain"
    Settings = ContextGainSettings

    def short(self, info: ModelInfo) -> int:
        return self.settings.short or max(super().lengths(info)) // 8

    def lengths(self, info: ModelInfo) -> list[int]:
        return [self.short(info), *super().lengths(info)]

    def check(self, info: ModelInfo) -> None:
        short, *lengths = self.lengths(info)
        if not 2 <= short < min(lengths):
            raise ConfigError(
                (self.key("short"), self.key("lengths")),
                f"is {short}",
                f"set it to at least 2 and below the shortest of lengths, {min(lengths)}",
            )
        super().check(info)

    def evaluate(self, unit: Unit, model: EvaluatedModel) -> dict[str, Any]:
        work = self.work[unit.key]
        losses = np.concatenate(
            [window_losses(model, work.document, window, model.bos) for window in work.windows]
        )
        return {"losses": np.round(losses, DECIMALS).tolist()}

    def summarize(self, values: dict[str, dict[str, Any]], info: ModelInfo) -> Summary:
        short, *lengths = self.lengths(info)
        documents = list(dict.fromkeys(key.rpartition("/")[0] for key in values))
        losses = {key: np.array(value["losses"]) for key, value in values.items()}
        keys = {
            name: self._choose(losses[f"{name}/{short}"], losses[f"{name}/{lengths[-1]}"])
            for name in documents
        }
        scores = []
        notes = []
        for source in dict.fromkeys(name.split("/")[0] for name in documents):
            of_source = [name for name in documents if name.split("/")[0] == source]
            before = [losses[f"{name}/{short}"] for name in of_source]
            key = [keys[name] for name in of_source]
            for length in lengths:
                after = [losses[f"{name}/{length}"] for name in of_source]
                scores += _scores(before, after, key, length, source)
            scored = sum(map(len, before))
            chosen = sum(map(len, key))
            notes.append(
                f"{source}: gains are relative to a context of {short:,} tokens; {chosen:,} of"
                f" {scored:,} tokens of {len(of_source):,}"
                f" document{'s' if len(of_source) > 1 else ''} are key tokens."
            )
        notes.append(BIAS)
        details = {
            "scored": self.scored(),
            "short": short,
            "key_tokens": {name: found.tolist() for name, found in keys.items()},
        }
        return Summary(scores, details, notes + self.notes_on_documents())

    def _choose(self, short: np.ndarray, long: np.ndarray) -> np.ndarray:
        return np.flatnonzero((short - long > self.settings.alpha) & (-long > self.settings.beta))

    @classmethod
    def draw(cls, results: dict[str, TaskResult]) -> list[Picture]:
        return [
            *by_length(results, "gain", "context-gain", "gain (nats per token)"),
            *by_length(
                results,
                "key_gain",
                "context-gain-of-key-tokens",
                "gain of key tokens (nats per token)",
            ),
        ]


def _scores(
    before: list[np.ndarray],
    after: list[np.ndarray],
    keys: list[np.ndarray],
    length: int,
    group: str,
) -> list[Score]:
    """Return the scores of one source at a context length.

    Arguments have an array for each document: the losses `before` with the short context and
    `after` with this context, and the indices `keys` of key tokens.
    """

    def mean(parts: list[np.ndarray]) -> tuple[float, float | None, float | None]:
        sums = [float(part.sum()) for part in parts]
        counts = [len(part) for part in parts]
        return sum(sums) / sum(counts), *bootstrap_ratio(sums, counts)

    def score(
        metric: str, better: str, mean: tuple[float | None, ...], count: int, unit: str = ""
    ) -> Score:
        value, low, high = mean
        return Score(metric, value, better, low, high, length, group, count, unit, counted="token")

    gains = [b - a for b, a in zip(before, after)]
    scores = [score("gain", "higher", mean(gains), sum(map(len, gains)), NATS)]
    if count := sum(map(len, keys)):
        scores.append(
            score(
                "key_gain",
                "higher",
                mean([gain[key] for gain, key in zip(gains, keys)]),
                count,
                NATS,
            )
        )
        losses = mean([loss[key] for loss, key in zip(after, keys)])
        perplexity = tuple(None if loss is None else math.exp(loss) for loss in losses)
        scores.append(score("key_perplexity", "lower", perplexity, count))
    return scores
