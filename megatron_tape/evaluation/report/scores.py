"""The table of a task's scores by model, and what keeps them from being compared. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from megatron_tape.evaluation.report import tables
from megatron_tape.evaluation.report.tables import Cell, Table, number
from megatron_tape.evaluation.results import Results, Score, TaskResult

_NOT_COMPARED = ("data", "batch_size", "trained_length")
"""Settings of tasks that change no score; of data, the contents of the files are compared."""


def score_table(tasks: Mapping[str, TaskResult], comparable: Callable[[Score], bool]) -> list[Table]:
    """Return the table of a task: a row for each metric, group and length, and a column for each model.

    The best value of a row is marked if all its scores are `comparable` and none lacks the interval that says how far
    it can be trusted.
    """
    found: dict[Score, dict[str, Score]] = {}
    values: dict[str, list[float]] = {}
    for label, task in tasks.items():
        for score in task.scores:
            found.setdefault(score.subject, {})[label] = score
            values.setdefault(score.metric, []).extend({score.value, score.low, score.high} - {None})
    decimals = {metric: tables.decimals_for(numbers) for metric, numbers in values.items()}
    rows = []
    for what, scores in found.items():
        best = _best(list(scores.values()), comparable)
        rows.append(tables.subject(what) + [_cell(scores.get(label), decimals[what.metric], best) for label in tasks])
    caption = "Below each value: its 95 % interval, and what it is measured on"
    return tables.table(caption, [*tables.SUBJECT, *tasks], rows)


def _best(row: Sequence[Score], comparable: Callable[[Score], bool]) -> float | None:
    """Return the value to be marked as the best of a row, None if there is none."""
    values = [score.value for score in row]
    known = all(comparable(score) and (score.count is None or score.low is not None) for score in row)
    if not known or row[0].better == "neither" or len(set(values)) < 2:
        return None
    return max(values) if row[0].better == "higher" else min(values)


def _cell(score: Score | None, decimals: int | None, best: float | None) -> Cell:
    if score is None:
        return number(None)
    between = tables.interval(score.low, score.high, decimals)
    detail = " \N{MIDDLE DOT} ".join(filter(None, (between, score.shown_count)))
    return number(score.value, decimals, detail, score.value == best)


def comparability(results: Sequence[Results], name: str) -> tuple[list[str], Callable[[Score], bool]]:
    """Return warnings of what cannot be compared between models in a task, and whether a score can be."""
    tasks = [one.tasks[name] for one in results]
    settings = dict.fromkeys(key for task in tasks for key in task.settings if key not in _NOT_COMPARED)
    changed = [key for key in settings if _differ(task.settings[key] for task in tasks if key in task.settings)]
    changed += [
        what for what, of in (("data", _data_of), ("dtype", lambda task: task.dtype)) if _differ(map(of, tasks))
    ]
    per_token = [one for one in results if any(map(_is_per_token, one.tasks[name].scores))]
    # What tells which tokens were scored: their digests or, of tasks that have none, the size of the vocabulary.
    tokens = [one.tasks[name].details.get("scored") or one.model.config.get("vocab_size") for one in per_token]
    found = (
        (bool(changed), lambda score: True, f"These differ, and scores may not be comparable: {', '.join(changed)}."),
        (
            _differ(one for one in tokens if one is not None),
            _is_per_token,
            "The models did not score the same tokens: losses, gains and perplexities, which are per token, cannot be "
            "compared between them. Bits per byte, which perplexity measures on texts, can.",
        ),
        (
            _differ(task.details.get("key_tokens") for task in tasks),
            lambda score: score.metric.startswith("key_"),
            "Each model was measured on key tokens of its own, and figures of these cannot be compared.",
        ),
    )
    warnings = [warning for differs, _, warning in found if differs]
    return warnings, lambda score: not any(differs and concerns(score) for differs, concerns, _ in found)


def _differ(values) -> bool:
    return len({json.dumps(value, sort_keys=True) for value in values}) > 1


def _is_per_token(score: Score) -> bool:
    """Return whether the value of a score depends on the tokenizer."""
    return score.unit == "nats per token" or score.metric in ("perplexity", "key_perplexity")


def _data_of(task: TaskResult) -> list[str]:
    """Return the digests of a task's data; where the files lay does not matter."""
    return sorted(task.data.values())
