"""What differs between models besides their scores: settings, and what keeps scores from being compared. No torch."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_tape.checkpoint.saved_settings import WITHOUT_EFFECT
from megatron_tape.evaluation.report.models import Model, clean
from megatron_tape.evaluation.report.tables import Cell, Column, Table, enumerated, setting, task_names, task_title
from megatron_tape.evaluation.results import NAME as RESULTS
from megatron_tape.evaluation.results import Score, TaskResult

_UNIMPORTANT = ("transformers_version", "_name_or_path", "auto_map.", "architectures", "dtype", "torch_dtype")
"""How entries of `config.json` begin that say nothing about the model itself."""
_OTHER_RESULTS = ("key_tokens_from", "before")
"""Settings of tasks that name results of another model. Which tokens are key tokens is compared directly."""
_WITHOUT_EFFECT_ON_SCORES = ("batch_size", "trained_length", *_OTHER_RESULTS)
"""Settings of tasks that change no score which is compared between models."""
_DIGITS = 12
_PERPLEXITIES = ("perplexity", "key_perplexity")
_OF_DOCUMENTS = ("perplexity", "context_gain")


def setting_tables(models: Sequence[Model]) -> list[Table]:
    """Return tables of the settings that differ: of runs, of models without a run, and of evaluations."""
    runs = {
        index: {key: value for key, value in flat(model.settings).items() if not key.startswith(WITHOUT_EFFECT)}
        for index, model in enumerate(models)
        if model.settings
    }
    found = [_table("Training runs", models, _with_nulls(runs))]
    described = {
        index: {key: value for key, value in flat(model.evaluated.config).items() if not key.startswith(_UNIMPORTANT)}
        for index, model in enumerate(models)
        if model.evaluated
    }
    if not described.keys() <= runs.keys():
        found.append(_table("Models, by their config.json", models, described))
    evaluations = {index: _evaluation(model, models) for index, model in enumerate(models) if model.tasks}
    found.append(_table("Evaluations", models, evaluations))
    return [table for table in found if table is not None]


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by dotted keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{clean(str(key))}"
        if isinstance(value, Mapping) and value:
            found.update(flat(value, f"{name}."))
        else:
            found[name] = value
    return found


def _with_nulls(runs: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Add null for what is within a setting that others give a mapping: train.average.kind where train.average is null.

    Otherwise it would be unknown, and a setting that a single run has would not count as different.
    """
    keys = dict.fromkeys(key for found in runs.values() for key in found)
    inside = {key: list(itertools.accumulate(key.split("."), "{}.{}".format))[:-1] for key in keys}
    return {
        index: {key: found.get(key) for key in keys if key in found or any(outer in found for outer in inside[key])}
        for index, found in runs.items()
    }


def _evaluation(model: Model, models: Sequence[Model]) -> dict[str, Any]:
    """Return what may make scores differ although the models do not."""
    found: dict[str, Any] = {}
    for name in task_names(models):
        task = model.tasks.get(name)
        if task is None:
            continue
        found |= {f"{name}.{key}": value for key, value in _settings_of(task).items()}
        found[f"{name}: data"] = enumerated(_data_of(task)) or None
        found |= {f"{name}: dtype": task.dtype, f"{name}: hardware": task.hardware}
        found |= {f"{name}: {key}": value for key, value in flat(task.versions).items()}
    return found


def _settings_of(task: TaskResult) -> dict[str, Any]:
    """Return the settings of a task but the paths of its data, whose digests tell whether they are the same."""
    return {key: value for key, value in flat(task.settings).items() if key.partition(".")[0] != "data"}


def _data_of(task: TaskResult) -> list[str]:
    """Return the beginnings of the digests of a task's data; where the files lay does not matter."""
    given = [Path(path) for key in _OTHER_RESULTS if isinstance(path := task.settings.get(key), str)]
    others = {str(path) for one in given for path in (one, one / RESULTS)}
    return sorted(str(digest)[:_DIGITS] for path, digest in task.data.items() if path not in others)


def _table(caption: str, models: Sequence[Model], values: Mapping[int, Mapping[str, Any]]) -> Table | None:
    """Return the keys whose values differ among the models that have them, None if there are none."""
    rows = [
        [Cell(key, key, kind="code"), *(setting(found.get(key), key in found) for found in values.values())]
        for key in _different(list(values.values()))
    ]
    columns = [Column("setting", "code"), *(Column(models[index].label, "code", index) for index in values)]
    return Table(caption, columns, rows) if rows else None


def _different(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys that have different values; what another version or kind of model does not have is unknown."""
    values: dict[str, set[str]] = {}
    for found in settings:
        for key, value in found.items():
            values.setdefault(key, set()).add(json.dumps(value, sort_keys=True, default=str))
    return [key for key, different in values.items() if len(different) > 1]


def comparability(models: Sequence[Model], task: str) -> tuple[list[str], Callable[[Score], bool]]:
    """Return warnings of what cannot be compared between models in a task, and whether a score can be."""
    evaluated = [model for model in models if task in model.tasks]
    found = (
        (_evaluation_differences(evaluated, task), lambda score: True),
        (token_differences(evaluated, task), lambda score: _is_per_token(task, score)),
        (_key_token_differences(evaluated, task), lambda score: score.metric.startswith("key_")),
    )
    warnings = [warning for warning, _ in found if warning is not None]
    return warnings, lambda score: not any(warning is not None and concerns(score) for warning, concerns in found)


def _evaluation_differences(models: Sequence[Model], task: str) -> str | None:
    evaluated = [model.tasks[task] for model in models]
    different = _different([_settings_of(result) for result in evaluated])
    different = [key for key in different if key not in _WITHOUT_EFFECT_ON_SCORES]
    found = []
    if len({tuple(_data_of(result)) for result in evaluated}) > 1:
        found.append("different data")
    if len({result.dtype for result in evaluated}) > 1:
        found.append("different precision")
    if different:
        found.append(f"different settings ({', '.join(different)})")
    if not found:
        return None
    return (
        f"The models were evaluated with {enumerated(found)}: the scores of {task_title(task)} may not be comparable."
    )


def _is_per_token(task: str, score: Score) -> bool:
    """Return whether a score is about single tokens, so that its value depends on the tokenizer."""
    return score.unit == "nats per token" or (task in _OF_DOCUMENTS and score.metric in _PERPLEXITIES)


def _key_token_differences(models: Sequence[Model], task: str) -> str | None:
    chosen = [model.tasks[task].details.get("key_tokens") for model in models]
    if all(found == chosen[0] for found in chosen):
        return None
    return (
        "The models were measured on different key tokens: figures of key tokens cannot be compared between them. Let "
        f"one model choose for all ({task}.key_tokens_from)."
    )


def token_differences(models: Sequence[Model], task: str) -> str | None:
    """Return a warning if the models scored different tokens, and the task has figures per token."""
    measured = [
        model for model in models
        if task in model.tasks and any(_is_per_token(task, score) for score in model.tasks[task].scores)
    ]  # fmt: skip
    if all(_same_tokens(measured[0], model, task) for model in measured[1:]):
        return None
    sizes = {model.label: _vocabulary(model) for model in measured}
    cause = "their tokenizers, longest contexts or data differ"
    if len(set(sizes.values()) - {None}) > 1:
        known = [f"{size:,} tokens of {label}" for label, size in sizes.items() if size is not None]
        cause = f"their tokenizers differ (vocabularies: {enumerated(known)})"
    instead = "Scores in other units can."
    if task in _OF_DOCUMENTS:
        instead = (
            "Bits per byte, which the task perplexity measures on texts, can, though not to the last digit: what is "
            "scored begins and ends where tokens do."
        )
    return (
        f"The models did not score the same tokens, as {cause}: losses and gains in nats per token, and perplexities, "
        f"cannot be compared between them. {instead}"
    )


def _same_tokens(one: Model, other: Model, task: str) -> bool:
    """Return whether two models scored the same tokens; of tasks that do not record it, whether vocabularies differ."""
    a, b = _digests(one.tasks[task]), _digests(other.tasks[task])
    if shared := a.keys() & b.keys():
        return all(a[source] == b[source] for source in shared)
    sizes = _vocabulary(one), _vocabulary(other)
    return None in sizes or sizes[0] == sizes[1]


def _digests(task: TaskResult) -> dict[str, Any]:
    scored = task.details.get("scored")
    found = scored.items() if isinstance(scored, dict) else ()
    return {source: value["digest"] for source, value in found if isinstance(value, dict) and "digest" in value}


def _vocabulary(model: Model) -> int | None:
    size = model.evaluated.config.get("vocab_size") if model.evaluated else None
    return size if type(size) is int else None
