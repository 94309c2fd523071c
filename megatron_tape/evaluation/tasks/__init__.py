"""The evaluation tasks of `pretrain.evaluate` and of the section `evaluation`, by name."""

from megatron_tape.evaluation.task import Task
from megatron_tape.evaluation.tasks.context_gain import ContextGain
from megatron_tape.evaluation.tasks.lm_eval_tasks import LmEval
from megatron_tape.evaluation.tasks.passkey import Passkey
from megatron_tape.evaluation.tasks.perplexity import Perplexity
from megatron_tape.evaluation.tasks.position_states import PositionPictures
from megatron_tape.evaluation.tasks.ruler import Ruler
from megatron_tape.evaluation.tasks.scrolls import Scrolls
from megatron_tape.evaluation.tasks.synthetic_tasks import Addition, GridNavigation, Recall, SelectiveCopy

_CLASSES = (Perplexity, ContextGain, Passkey, Ruler, LmEval, Scrolls)
_CLASSES += (Addition, SelectiveCopy, GridNavigation, Recall, PositionPictures)
TASKS: dict[str, type[Task]] = {task.name: task for task in _CLASSES}
"""All tasks by name, in the order of the page. Tasks with `generates` = False can also run during training."""


def title_of(name: str) -> str:
    """Return the heading of the task `name`, which may be a task that this version does not have."""
    known = TASKS.get(name)
    return (known and known.title) or name.replace("_", " ").capitalize()
