"""The figures of papers beside ours, where the settings agree, as `published.yaml` says. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_tape.evaluation.report.differences import flat
from megatron_tape.evaluation.report.models import Model
from megatron_tape.evaluation.report.scores import Place, ordered, place_columns, place_of
from megatron_tape.evaluation.report.tables import Column, Table, decimals_for, metric_title, number
from megatron_tape.evaluation.results import Score

SHAPE = {
    "layers": ("num_layers", "num_hidden_layers"),
    "width": ("hidden_size",),
    "heads": ("num_attention_heads",),
    "mlp": ("ffn_hidden_size", "intermediate_size"),
}
"""What the entries' `shape` names, and its names in this project's settings and in `config.json`."""


def entries() -> list[dict[str, Any]]:
    """Return the papers' figures."""
    import yaml

    return yaml.safe_load((Path(__file__).parent / "published.yaml").read_text(encoding="utf-8"))


def published_tables(models: Sequence[Model]) -> list[Table]:
    """Return a table for each of the papers' tests whose settings agree with those of one of our evaluations."""
    tables = (_table(entry, models) for entry in entries())
    return [table for table in tables if table is not None]


def agrees(entry: Mapping[str, Any], model: Model) -> bool:
    """Return whether a model was trained and evaluated as an entry says, as far as its results tell."""
    task = model.tasks.get(entry["task"])
    if task is None or model.evaluated is None:
        return False
    config, settings, run = model.evaluated.config, flat(task.settings), flat(model.settings)
    return (
        all(_same(settings.get(key), value) for key, value in entry.get("settings", {}).items())
        and all(any(config.get(n) == size for n in SHAPE[part]) for part, size in entry.get("shape", {}).items())
        and entry.get("trained_length") in (None, model.evaluated.trained_length)
        and (not run or all(_same(run.get(key), value) for key, value in entry.get("run", {}).items()))
    )


def _same(ours: Any, published: Any) -> bool:
    return ours in published if isinstance(published, list) else ours == published


def _found(entry: Mapping[str, Any], model: Model) -> dict[Place, Score]:
    """Return the model's scores that an entry has figures for, by their places in its table."""
    task, data = model.tasks[entry["task"]], entry.get("data", "")
    published = {place for method in _figures(entry).values() for place in method}
    all_of_it = bool(task.data) and all(data in _name(path) for path in task.data)
    found = {}
    for score in task.scores:
        group, length = place_of(score)
        place = ("", length) if "lengths" in entry else (group, None)
        if score.metric == entry["metric"] and place in published and (not data or all_of_it or data in _name(group)):
            found[place] = score
    return found


def _name(text: str) -> str:
    return "".join(letter for letter in text.lower() if letter.isalnum())


def _figures(entry: Mapping[str, Any]) -> dict[str, dict[Place, float]]:
    if "lengths" in entry:
        return {method: {("", length): v for length, v in by.items()} for method, by in entry["lengths"].items()}
    return {method: {(group, None): v for group, v in by.items()} for method, by in entry["groups"].items()}


def _table(entry: Mapping[str, Any], models: Sequence[Model]) -> Table | None:
    ours = {index: _found(entry, model) for index, model in enumerate(models) if agrees(entry, model)}
    ours = {index: found for index, found in ours.items() if found}
    if not ours:
        return None
    published = _figures(entry)
    places = ordered(
        {place: None for method in published.values() for place in method if any(place in f for f in ours.values())}
    )
    values = [score.value for found in ours.values() for score in found.values()]
    decimals = decimals_for(values + [by[place] for by in published.values() for place in places if place in by])
    columns, rows = place_columns(places)
    names = len(columns)
    columns += [Column(models[index].label, "number", index) for index in ours]
    columns += [Column(f"{method} (paper)", "number", published=True) for method in published]
    for row, place in zip(rows, places):
        row += [number(found[place].value if place in found else None, decimals) for found in ours.values()]
        row += [number(by.get(place), decimals) for by in published.values()]
    unknown = [models[index].label for index in ours if entry.get("run") and not models[index].settings]
    caption = f"{entry['title']}: {metric_title(entry['metric'], entry['task'])}, beside {entry['source']}"
    if unknown:
        caption += f"; how {' and '.join(unknown)} {'was' if len(unknown) == 1 else 'were'} trained is not known here"
    return Table(caption, columns, rows, names)
