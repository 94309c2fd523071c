"""The tasks that `pretrain.evaluate` knows. Imports none of them until it is used."""

from __future__ import annotations

import importlib

from megatron_tape.evaluation.base import Task

TASKS: dict[str, str] = {
    "perplexity": "megatron_tape.evaluation.perplexity:Perplexity",
    "context_gain": "megatron_tape.evaluation.context_gain:ContextGain",
    "passkey": "megatron_tape.evaluation.passkey:Passkey",
    "ruler": "megatron_tape.evaluation.ruler:Ruler",
    "lm_eval": "megatron_tape.evaluation.lm_eval_tasks:LmEval",
    "scrolls": "megatron_tape.evaluation.scrolls:Scrolls",
    "addition": "megatron_tape.evaluation.addition:Addition",
    "selective_copy": "megatron_tape.evaluation.selective_copy:SelectiveCopy",
    "grid_navigation": "megatron_tape.evaluation.grid_navigation:GridNavigation",
    "positions": "megatron_tape.evaluation.positions:PositionPictures",
}
"""The class of each as `module:class`."""


def task_class(name: str) -> type[Task]:
    """Return the class of a task by its name, a key of `TASKS`."""
    module, _, kind = TASKS[name].partition(":")
    return getattr(importlib.import_module(module), kind)
