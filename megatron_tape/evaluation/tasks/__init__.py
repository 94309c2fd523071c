"""The tasks that `pretrain.evaluate` and training runs know: each is a class that is entered here."""

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
"""The one list of evaluations, by name, in the order in which the page shows them. Those that do not generate are the
settings of the section `evaluation`, too."""


def title_of(name: str) -> str:
    """Return how a task is written in headings, whether or not it is known here."""
    known = TASKS.get(name)
    return (known and known.title) or name.replace("_", " ").capitalize()
