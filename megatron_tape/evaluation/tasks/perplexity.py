"""Perplexity by context length, on the same tokens at every length, or with the protocol of
published tables.
"""

import math

import numpy as np

from megatron_tape.config.evaluation import PerplexitySettings
from megatron_tape.errors import FileError
from megatron_tape.evaluation.results import Score
from megatron_tape.evaluation.score_pictures import pictures_by_length, pictures_by_position
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
    Window,
    WindowTask,
    Work,
    perplexity_score,
    window_losses,
)
from megatron_tape.evaluation.tasks.text_sources import Document, TextSource
from megatron_tape.text import counted

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


class Perplexity(WindowTask):
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
        """Whether the protocol is longlora, that of published tables."""
        return self.settings.protocol == "longlora"

    @property
    def most_documents(self) -> int | None:
        """Maximum number of documents of a source; all by default with protocol longlora."""
        if self._longlora:
            return self.settings.documents
        return super().most_documents

    def minimum_tokens(self, info: ModelInfo) -> int:
        """Return the minimum number of tokens of a document, 2 with protocol longlora."""
        if self._longlora:
            return 2
        return super().minimum_tokens(info)

    def plan(
        self, text_source: TextSource, documents: list[Document], model: EvaluatedModel
    ) -> dict[str, Work]:
        """Return the work for a source by unit key: documents or, with longlora, groups of windows,
        at each length.
        """
        if not self._longlora:
            return super().plan(text_source, documents, model)

        # The protocol reads the whole source as one text, so its windows belong to one document.
        tokens = np.concatenate([document.tokens for document in documents])
        stream = Document(text_source.name, tokens, documents[0].is_text)
        work = {}
        for length in self.context_lengths(model.info):
            # The published program leaves out the last window.
            starts = range(0, len(tokens) - length, self.settings.stride)[:-1]
            starts = starts[: self.settings.windows]
            if not starts:
                raise FileError(
                    text_source.path,
                    f"has {len(tokens):,} tokens, too few for windows of {length:,} with protocol"
                    " longlora",
                    f"give more data, or set shorter {self.key('lengths')}",
                )
            # All tokens but the first are scored.
            windows = [Window(start, start + length, length - 1) for start in starts]
            # A single unit with all windows would take long to repeat after an interruption.
            for first in range(0, len(windows), WINDOWS_PER_UNIT):
                part = windows[first : first + WINDOWS_PER_UNIT]
                work[f"{text_source.name}/{first}/{length}"] = Work(stream, length, part)
        return work

    def evaluate(self, unit: Unit, model: EvaluatedModel) -> Value:
        """Return the sums of losses of a document, or the mean losses of windows with longlora."""
        work = self.work[unit.key]
        document = work.document
        if self._longlora:
            by_window = [
                window_losses(model, document, window, prefix=[]) for window in work.windows
            ]
            return {"means": [float(losses.mean()) for losses in by_window]}

        tokens = sum(window.scored for window in work.windows)
        value: Value = {"nats": 0.0, "tokens": tokens}
        for number, window in enumerate(work.windows):
            # The curve by position needs the losses of all positions.
            whole = number == 0 and work.length == max(self.context_lengths(model.info))
            losses = window_losses(model, document, window, model.bos, whole)
            value["nats"] += float(losses[-window.scored :].sum())
            if whole:
                value["positions"] = [float(part.sum()) for part in _by_position(losses)]
        if document.is_text:
            start, stop = work.scored
            # Both texts are decoded from the beginning of the document, since tokenizers may decode
            # the first token of a text differently.
            value["bytes"] = _text_bytes(model, document.tokens[:stop])
            value["bytes"] -= _text_bytes(model, document.tokens[:start])
        return value

    def summarize(self, values: Values, info: ModelInfo) -> Summary:
        """Return losses, perplexities and bits per byte by source and length."""
        # The values of a source's documents (or groups of windows), by source and length.
        groups = {}
        for key, value in values.items():
            name, _, length_of_unit = key.split("/")
            groups.setdefault((name, int(length_of_unit)), []).append(value)

        scored = self.scored()
        if self._longlora:
            scores = []
            for (name, length), group_values in groups.items():
                scores += _scores_of_means(group_values, length, f"{name} (longlora)")
            notes = [*self.notes_on_documents(), LONGLORA_NOTE]
            return Summary(scores, {"scored": scored}, notes)

        scores = []
        notes = []
        positions = {}
        for (name, length), group_values in groups.items():
            scores += _scores_of_documents(group_values, length, name)
            # Positions are measured only at the longest length; tokens and bytes are the same at
            # all lengths.
            if length != max(self.context_lengths(info)):
                continue
            positions[name] = _mean_by_position(
                [value["positions"] for value in group_values], length
            )
            tokens = sum(value["tokens"] for value in group_values)
            note = f"{name}: the same tokens are scored at every length: {tokens:,}"
            if "bytes" in group_values[0]:
                scored[name]["bytes"] = sum(value["bytes"] for value in group_values)
                note += f" ({scored[name]['bytes']:,} bytes)"
            notes.append(f"{note}, in {counted(len(group_values), 'document')}.")
        details = {"scored": scored, "loss_by_position": positions}
        return Summary(scores, details, notes + self.notes_on_documents())

    @classmethod
    def draw(cls, results: TaskResults) -> list[Picture]:
        """Return pictures of the perplexity by context length, and of the loss by position."""
        return [
            *pictures_by_length(
                results,
                "perplexity",
                file_name="perplexity",
                y_label="perplexity",
                log_ratio=10,
            ),
            *pictures_by_position(results, file_name="perplexity-by-position"),
        ]


def _text_bytes(model: EvaluatedModel, tokens: np.ndarray) -> int:
    """Return the number of bytes of the text of `tokens` (N,)."""
    return len(model.decode(tokens.tolist()).encode("utf-8", "replace"))


def _by_position(losses: np.ndarray) -> list[np.ndarray]:
    """Split the losses (N,) of a window into at most `POSITION_BINS` ranges of positions."""
    return np.array_split(losses, min(POSITION_BINS, len(losses)))


def _mean_by_position(sums: list[list[float]], length: int) -> dict[str, list[float]]:
    """Return the mean loss of each range of positions, and the mean number of tokens before its
    positions. `sums` has the sums of losses by document and range.
    """
    # The first token is not scored, so the losses are of tokens 1 to `length`.
    positions = _by_position(np.arange(1, length + 1))
    # Each document adds one sum to a range, over all positions of the range.
    counts = np.array([len(part) for part in positions]) * len(sums)
    return {
        "tokens_before": [float(part.mean()) for part in positions],
        "loss": (np.sum(sums, axis=0) / counts).tolist(),
    }


def _scores_of_documents(values: list[Value], length: int, group: str) -> list[Score]:
    """Return the scores of a source at a length, given the values of its documents."""
    nats = [value["nats"] for value in values]
    tokens = [value["tokens"] for value in values]
    place = {"length": length, "group": group, "count": len(values), "counted": "document"}
    loss = ratio_score(
        "loss",
        nats,
        tokens,
        "lower",
        unit=NATS,
        **place,
    )
    scores = [loss, perplexity_score(loss, "perplexity")]
    if "bytes" in values[0]:
        bits = [value / math.log(2) for value in nats]
        sizes = [value["bytes"] for value in values]
        scores.append(
            ratio_score("bits_per_byte", bits, sizes, "lower", unit="bits per byte", **place)
        )
    return scores


def _scores_of_means(values: list[Value], length: int, group: str) -> list[Score]:
    """Return the scores of a source at a length with protocol longlora, without intervals."""
    # Windows overlap, so an interval over windows would be too narrow.
    means = [mean for value in values for mean in value["means"]]
    loss = Score(
        "loss",
        sum(means) / len(means),
        "lower",
        length=length,
        group=group,
        count=len(means),
        unit=NATS,
        counted="window",
    )
    return [loss, perplexity_score(loss, "perplexity")]
