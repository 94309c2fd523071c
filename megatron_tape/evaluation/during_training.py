"""Evaluation tasks during training: the section `evaluation`, checked without torch."""

from __future__ import annotations

from dataclasses import replace

from megatron_tape.config.schema import RunConfig
from megatron_tape.data.tokenizer import load_run_tokenizer, tokenizer_record
from megatron_tape.errors import refuse
from megatron_tape.evaluation.model_source import info_of_run
from megatron_tape.evaluation.task import Task
from megatron_tape.evaluation.tasks import TASKS


def build_tasks(config: RunConfig) -> dict[str, Task]:
    """Return the tasks of `evaluation` by name."""
    tasks = config.evaluation.enabled_tasks().items()
    return {name: TASKS[name](settings, section=f"evaluation.{name}") for name, settings in tasks}


def check_tasks(config: RunConfig) -> None:
    """Raise ConfigError if the tasks of `evaluation`, their data and the model do not fit together; reads the data."""
    if not (tasks := build_tasks(config)):
        return
    tokenizer = load_run_tokenizer(config)
    info = replace(info_of_run(config), tokenizer=None if tokenizer is None else tokenizer_record(tokenizer))
    for name, task in tasks.items():
        needed = task.needs_tokenizer and not info.has_tokenizer
        refuse(needed, ("data.tokenizer", f"evaluation.{name}"), f"is null, and {name} needs a tokenizer", "set it")
        task.check(info)
