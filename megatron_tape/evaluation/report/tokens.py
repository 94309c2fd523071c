"""Whether models were measured on the same tokens, without which figures per token cannot be compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_tape.evaluation.report.inputs import Model, clean
from megatron_tape.evaluation.report.tables import enumerated
from megatron_tape.evaluation.results import Score, TaskResult

_PERPLEXITIES = ("perplexity", "key_perplexity")
_OF_DOCUMENTS = ("perplexity", "context_gain")


def per_token(task: str, score: Score) -> bool:
    """Return whether a score is about single tokens, so that its value depends on the tokenizer."""
    return score.unit == "nats per token" or (task in _OF_DOCUMENTS and score.metric in _PERPLEXITIES)


def token_differences(models: Sequence[Model], task: str) -> str | None:
    """Return a sentence that warns of scores per token of models that scored different tokens; None if none did."""
    measured = [
        model
        for model in models
        if task in model.tasks and any(per_token(task, score) for score in model.tasks[task].scores)
    ]
    if all(_same_tokens(measured[0], model, task) for model in measured[1:]):
        return None
    sizes = {model.label: _vocabulary(model) for model in measured}
    if len(set(sizes.values()) - {None}) > 1:
        known = [f"{size:,} tokens of {label}" for label, size in sizes.items() if size is not None]
        cause = f"their tokenizers differ (vocabularies: {enumerated(known)})"
    else:
        cause = "their tokenizers, longest contexts or data differ"
    return (
        f"The models did not score the same tokens, as {cause}: losses and gains in nats per token, and perplexities, "
        f"cannot be compared between them. {_comparable_instead(measured, task)}"
    )


def _same_tokens(one: Model, other: Model, task: str) -> bool:
    """Return whether two models scored the same tokens; results that do not tell are judged by their vocabularies."""
    digests = [_scored(model.tasks[task], "digest") for model in (one, other)]
    if shared := digests[0].keys() & digests[1].keys():
        return all(digests[0][source] == digests[1][source] for source in shared)
    sizes = _vocabulary(one), _vocabulary(other)
    return None in sizes or sizes[0] == sizes[1]


def _scored(task: TaskResult, key: str) -> dict[str, Any]:
    """Return what a task recorded of the tokens that it scored, by source."""
    scored = task.details.get("scored")
    found = scored.items() if isinstance(scored, dict) else ()
    return {source: value[key] for source, value in found if isinstance(value, dict) and key in value}


def _vocabulary(model: Model) -> int | None:
    size = model.facts.config.get("vocab_size") if model.facts else None
    return size if type(size) is int else None


def _comparable_instead(models: Sequence[Model], task: str) -> str:
    if task not in _OF_DOCUMENTS:
        return "Scores in other units can."
    if task != "perplexity":
        return "Bits per byte, which the task perplexity measures on texts, can."
    if not all(any(score.metric == "bits_per_byte" for score in model.tasks[task].scores) for model in models):
        return "Bits per byte could, but not all of them have them; they are measured where perplexity.data is text."
    sizes = [_scored(model.tasks[task], "bytes") for model in models]
    texts = []
    for source in dict.fromkeys(source for size in sizes for source in size):
        counts = [size.get(source) for size in sizes]
        if len(set(counts)) > 1:
            of = [f"{count:,} bytes of {m.label}" for m, count in zip(models, counts) if type(count) is int]
            texts.append(f"{clean(source)}: {enumerated(of)}")
    if texts:
        return (
            "Bits per byte can, though not to the last digit: scored texts begin and end where tokens do, and are of "
            f"different sizes ({'; '.join(texts)})."
        )
    return "Bits per byte can, as far as the scored texts, which begin and end where tokens do, are the same."
