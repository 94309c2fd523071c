"""Generators of synthetic data, one file each.

`data.generator` and the evaluation tasks select them by name.
"""

from megatron_tape.synthetic.addition import Addition
from megatron_tape.synthetic.generator import (
    EVALUATION,
    TRAINING,
    VALIDATION,
    Generator,
    sample_random,
)
from megatron_tape.synthetic.grid_navigation import GridNavigation
from megatron_tape.synthetic.recall import Recall
from megatron_tape.synthetic.selective_copy import SelectiveCopy

GENERATORS: dict[str, type[Generator]] = {
    task.task: task for task in (Addition, SelectiveCopy, GridNavigation, Recall)
}
"""Generators by task name. Add a new one here, and to the type of
`config.data.DataConfig.generator`.
"""

__all__ = [
    "EVALUATION",
    "GENERATORS",
    "TRAINING",
    "VALIDATION",
    "Addition",
    "Generator",
    "GridNavigation",
    "Recall",
    "SelectiveCopy",
    "sample_random",
]
