"""Evaluation tasks that a run does while it trains: the section `evaluation` of its settings, checked without torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_tape.config.parse import read_section
from megatron_tape.config.schema import RunConfig
from megatron_tape.config.values import shown
from megatron_tape.data.tokenizer import load_run_tokenizer, record_of
from megatron_tape.errors import refuse
from megatron_tape.evaluation.model_source import info_of_run
from megatron_tape.evaluation.task import Task
from megatron_tape.evaluation.tasks import TASKS

EVERY = "every"


def build_tasks(config: RunConfig) -> dict[str, Task]:
    """Return the tasks of `evaluation` by name; raises ConfigError for wrong settings."""
    return {name: _build_task(name, given) for name, given in config.evaluation.given().items()}


def _build_task(name: str, given: dict[str, Any]) -> Task:
    key, every = f"evaluation.{name}", given.get(EVERY)
    fix = "set it to the number of steps between evaluations, such as 500"
    refuse(type(every) is not int or every < 1, f"{key}.{EVERY}", f"is {shown(every)}", fix)
    settings = {setting: value for setting, value in given.items() if setting != EVERY}
    return TASKS[name](read_section(key, TASKS[name].Settings, settings), section=key)


def check_tasks(config: RunConfig) -> None:
    """Raise ConfigError if tasks of `evaluation`, their data and the model cannot work together; reads the data."""
    if not (tasks := build_tasks(config)):
        return
    tokenizer = load_run_tokenizer(config)
    info = replace(info_of_run(config), tokenizer=None if tokenizer is None else record_of(tokenizer))
    for name, task in tasks.items():
        needed = task.needs_tokenizer and not info.has_tokenizer
        refuse(needed, ("data.tokenizer", f"evaluation.{name}"), f"is null, and {name} needs a tokenizer", "set it")
        task.check(info)
