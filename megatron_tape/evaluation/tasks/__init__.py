"""The evaluation tasks of `pretrain.evaluate` and of the section `evaluation`, by name."""

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

from megatron_tape.evaluation.results import Score, TaskResult
from megatron_tape.evaluation.task import Task
from megatron_tape.evaluation.tasks.context_gain import ContextGain
from megatron_tape.evaluation.tasks.lm_eval_tasks import LmEval
from megatron_tape.evaluation.tasks.passkey import Passkey
from megatron_tape.evaluation.tasks.perplexity import Perplexity
from megatron_tape.evaluation.tasks.position_states import PositionPictures
from megatron_tape.evaluation.tasks.ruler import Ruler
from megatron_tape.evaluation.tasks.scrolls import Scrolls
from megatron_tape.evaluation.tasks.synthetic_tasks import (
    Addition,
    GridNavigation,
    Recall,
    SelectiveCopy,
)
from megatron_tape.io.records import validator

TASKS: dict[str, type[Task]] = {
    task.name: task
    for task in (
        Perplexity,
        ContextGain,
        Passkey,
        Ruler,
        LmEval,
        Scrolls,
        Addition,
        SelectiveCopy,
        GridNavigation,
        Recall,
        PositionPictures,
    )
}
"""All tasks by name, in the order of the page. Tasks with `generates` = False can also run during
training.
"""


def title_of(name: str) -> str:
    """Return the heading of the task `name`, which may be a task that this version does not
    have.
    """
    if name in TASKS and TASKS[name].title:
        return TASKS[name].title
    return name.replace("_", " ").capitalize()


def group_names(name: str, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the names for readers of the groups of scores of the task `name`, by group, given its
    settings from a file; empty if the task or its settings are unknown or invalid.
    """
    # Without settings, the task's defaults would apply, and name groups that the file may not have.
    if name not in TASKS or not settings:
        return {}
    task = TASKS[name]
    # Settings of other versions, which this version does not know, are left out.
    known = {field.name for field in fields(task.Settings)} & settings.keys()
    try:
        valid = validator(task.Settings).validate_python({key: settings[key] for key in known})
        names = task(valid).group_names()
    except ValueError:  # such as settings that this version refuses
        return {}
    # If two groups had the same name, readers would mix up their scores, so no name is used.
    if len(set(names.values())) == len(names):
        return names
    return {}


def named_scores(
    name: str, settings: Mapping[str, Any], scores: Iterable[Score]
) -> list[tuple[Score, Score]]:
    """Return scores of the task `name` in the order of their groups, each with a copy whose group
    has its name for readers.
    """
    names = group_names(name, settings)
    # Groups without a name come last, in their own order.
    order = {group: index for index, group in enumerate(names)}
    ordered = sorted(scores, key=lambda score: order.get(score.group, len(order)))
    return [(score, replace(score, group=names.get(score.group, score.group))) for score in ordered]


def with_group_names(name: str, result: TaskResult) -> TaskResult:
    """Return results of the task `name` to show: groups have their names for readers, and are in
    their order.
    """
    named = named_scores(name, result.settings, result.scores)
    return replace(result, scores=[shown for _, shown in named])
