"""Gain from longer contexts: the loss with a short context minus the loss with a longer one, on the
same tokens.

Few tokens depend on a long context, so perplexity hardly shows how well a model uses it. The losses
of key tokens do (LongPPL, Fang et al., ICLR 2025). A token is a key token if its loss falls by more
than `alpha` from the short to the longest context, and its log-probability with the longest context
is above `beta`.
"""

from typing import Any

import numpy as np

from megatron_tape.config.evaluation import ContextGainSettings
from megatron_tape.errors import ConfigError
from megatron_tape.evaluation.results import Score
from megatron_tape.evaluation.score_pictures import pictures_by_length
from megatron_tape.evaluation.statistics import ratio_score
from megatron_tape.evaluation.task import (
    EvaluatedModel,
    ModelInfo,
    Picture,
    Summary,
    TaskResults,
    Unit,
    Value,
    Values,
)
from megatron_tape.evaluation.tasks.document_task import (
    NATS,
    WindowTask,
    perplexity_score,
    window_losses,
)
from megatron_tape.text import counted

BIAS = (
    "Key tokens are those that the measured model predicts well with the longest context, which"
    " favors this model."
)
DECIMALS = 5
"""Number of decimals of the losses of single tokens in `results.json`."""


class ContextGain(WindowTask):
    """The gain from longer contexts, on all scored tokens and on key tokens.

    The value of a unit contains the `losses` of a document's scored tokens at one context length.
    """

    name = "context_gain"
    Settings = ContextGainSettings

    def context_lengths(self, info: ModelInfo) -> list[int]:
        """Return the short length, and then the longer ones in ascending order."""
        longer = super().context_lengths(info)
        return [self.settings.short or max(longer) // 8, *longer]

    def check(self, info: ModelInfo) -> None:
        """Raise UserError if the short length is not below all others, or for invalid data."""
        short, *longer = self.context_lengths(info)
        if not 2 <= short < min(longer):
            raise ConfigError(
                (self.key("short"), self.key("lengths")),
                f"is {short}",
                f"set it to at least 2 and below the shortest of lengths, {min(longer)}",
            )
        super().check(info)

    def evaluate(self, unit: Unit, model: EvaluatedModel) -> Value:
        """Return the losses of the scored tokens of a document at one context length."""
        work = self.work[unit.key]
        losses = np.concatenate(
            [window_losses(model, work.document, window, model.bos) for window in work.windows]
        )
        return {"losses": np.round(losses, DECIMALS).tolist()}

    def summarize(self, values: Values, info: ModelInfo) -> Summary:
        """Return gains and losses by length and source, and each document's key tokens."""
        short, *longer = self.context_lengths(info)
        # Arrays of the losses of scored tokens by unit key, `SOURCE/NUMBER/LENGTH`.
        losses = {key: np.array(value["losses"]) for key, value in values.items()}
        # The indices of each document's key tokens among its scored tokens.
        key_tokens = {}
        by_source = {}  # the keys of documents, `SOURCE/NUMBER`, by source
        for document in dict.fromkeys(key.rpartition("/")[0] for key in values):
            by_source.setdefault(document.split("/")[0], []).append(document)
            # The scored tokens are the same at every length, so their losses can be subtracted.
            longest = losses[f"{document}/{longer[-1]}"]
            gain = losses[f"{document}/{short}"] - longest
            # -loss is the log-probability.
            key_tokens[document] = np.flatnonzero(
                (gain > self.settings.alpha) & (-longest > self.settings.beta)
            )

        scores = []
        notes = []
        for source_name, documents in by_source.items():
            before = [losses[f"{document}/{short}"] for document in documents]
            key_indices = [key_tokens[document] for document in documents]
            for length in longer:
                after = [losses[f"{document}/{length}"] for document in documents]
                scores += _scores(before, after, key_indices, length, source_name)
            notes.append(
                f"{source_name}: gains are relative to a context of {short:,} tokens;"
                f" {_token_count(key_indices):,} of {_token_count(before):,} tokens of"
                f" {counted(len(documents), 'document')} are key tokens."
            )

        details = {
            "scored": self.scored(),
            "short": short,
            # Compared on a page: scores on different key tokens are not comparable.
            "key_tokens": {document: indices.tolist() for document, indices in key_tokens.items()},
        }
        return Summary(scores, details, [*notes, BIAS, *self.notes_on_documents()])

    @classmethod
    def draw(cls, results: TaskResults) -> list[Picture]:
        """Return pictures of the gains by context length, on all tokens and on key tokens."""
        return [
            *pictures_by_length(
                results, "gain", file_name="context-gain", y_label="gain (nats per token)"
            ),
            *pictures_by_length(
                results,
                "key_gain",
                file_name="context-gain-of-key-tokens",
                y_label="gain of key tokens (nats per token)",
            ),
        ]


def _scores(
    before: list[np.ndarray],
    after: list[np.ndarray],
    key_tokens: list[np.ndarray],
    length: int,
    group: str,
) -> list[Score]:
    """Return the scores of one source at a context length.

    Arguments have an array for each document: the losses `before` with the short context and
    `after` with this context, and the indices of key tokens.
    """
    common = {"length": length, "group": group, "counted": "token"}
    # Positive if the longer context lowers the loss.
    gains = [short - longer for short, longer in zip(before, after)]
    scores = [_mean("gain", gains, "higher", **common)]
    if _token_count(key_tokens):
        key_gains = [gain[indices] for gain, indices in zip(gains, key_tokens)]
        scores.append(_mean("key_gain", key_gains, "higher", **common))
        key_losses = [losses[indices] for losses, indices in zip(after, key_tokens)]
        # LongPPL is the perplexity of key tokens.
        loss = _mean("key_loss", key_losses, "lower", **common)
        scores.append(perplexity_score(loss, "key_perplexity"))
    return scores


def _mean(metric: str, by_document: list[np.ndarray], better: str, **fields: Any) -> Score:
    """Return the mean over the tokens of all documents as a score, given the values of each
    document's tokens. `fields` are other fields of `Score`.
    """
    sums = [float(values.sum()) for values in by_document]
    sizes = [len(values) for values in by_document]
    return ratio_score(
        metric,
        sums,
        sizes,
        better,
        count=sum(sizes),
        unit=NATS,
        **fields,
    )


def _token_count(by_document: list[np.ndarray]) -> int:
    """Return the number of tokens of all documents, given one array for each."""
    return sum(map(len, by_document))
