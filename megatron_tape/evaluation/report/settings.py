"""The settings in which models, and their evaluations, differ. Imports no torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_tape.checkpoint.saved_settings import WITHOUT_EFFECT
from megatron_tape.config.schema import RunConfig, default_of, key_of, keys_of
from megatron_tape.evaluation.report.inputs import Model, clean
from megatron_tape.evaluation.report.scores import task_names, title
from megatron_tape.evaluation.report.tables import Cell, Column, Table, enumerated, setting
from megatron_tape.evaluation.results import TaskResult

_UNIMPORTANT = ("transformers_version", "_name_or_path", "auto_map.", "architectures", "dtype", "torch_dtype")
"""How entries of `config.json` begin that say nothing about the model itself."""
_HARMLESS = ("batch_size",)
"""Settings of tasks that change no score."""
_DIGITS = 12


def setting_tables(models: Sequence[Model]) -> list[Table]:
    """Return tables of the settings that differ: of runs, of models without a run, and of evaluations."""
    runs = {index: with_defaults(model.settings) for index, model in enumerate(models) if model.settings}
    configurations = {index: model.facts.config for index, model in enumerate(models) if model.facts}
    found = [_table("Training runs", models, {index: _effective(flat(s)) for index, s in runs.items()})]
    if any(index not in runs for index in configurations):
        described = {
            index: {key: value for key, value in flat(config).items() if not key.startswith(_UNIMPORTANT)}
            for index, config in configurations.items()
        }
        found.append(_table("Models, by their config.json", models, described))
    evaluations = {index: _evaluation(model, models) for index, model in enumerate(models) if model.tasks}
    found.append(_table("Evaluations", models, evaluations))
    return [table for table in found if table is not None]


def with_defaults(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the settings of a run, with the values that newer settings had before they existed."""
    complete = {section: dict(values) for section, values in settings.items()}
    for section in dataclasses.fields(RunConfig):
        values = complete.setdefault(section.name, {})
        for item in keys_of(section.type):
            if (default := default_of(item)) is not dataclasses.MISSING:
                values.setdefault(key_of(item.name), default)
    return complete


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


def _effective(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if not key.startswith(WITHOUT_EFFECT)}


def _evaluation(model: Model, models: Sequence[Model]) -> dict[str, Any]:
    """Return what may make scores differ although the models do not."""
    found: dict[str, Any] = {}
    for name in task_names(models):
        task = model.tasks.get(name)
        if task is None:
            continue
        found |= {f"{name}.{key}": value for key, value in settings_of(task).items()}
        found[f"{name}: data"] = enumerated(data_of(task)) or None
        found |= {f"{name}: {key}": getattr(task, key) for key in ("dtype", "hardware")}
        found |= {f"{name}: {key}": value for key, value in flat(task.versions).items()}
    return found


def settings_of(task: TaskResult) -> dict[str, Any]:
    """Return the settings of a task but the paths of its data, whose digests tell whether they are the same."""
    return {key: value for key, value in flat(task.settings).items() if key.partition(".")[0] != "data"}


def data_of(task: TaskResult) -> list[str]:
    """Return the beginnings of the digests of a task's data; where the files lay does not matter."""
    return sorted(str(digest)[:_DIGITS] for digest in task.data.values())


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


def evaluation_differences(models: Sequence[Model], task: str) -> str | None:
    """Return a sentence that warns of scores that cannot be compared; None if a task was the same for all models."""
    evaluated = [model.tasks[task] for model in models if task in model.tasks]
    different = [key for key in _different([settings_of(found) for found in evaluated]) if key not in _HARMLESS]
    key_tokens = [result.details.get("key_tokens") for result in evaluated]
    if key_tokens and key_tokens[0] is not None and all(found == key_tokens[0] for found in key_tokens):
        different = [key for key in different if key != "key_tokens_from"]  # the model that chose names no other
    found = []
    if len({tuple(data_of(result)) for result in evaluated}) > 1:
        found.append("different data")
    if len({result.dtype for result in evaluated}) > 1:
        found.append("different precision")
    if different:
        found.append(f"different settings ({', '.join(different)})")
    if not found:
        return None
    return f"The models were evaluated with {enumerated(found)}: the scores of {title(task)} may not be comparable."
