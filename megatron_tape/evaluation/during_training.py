"""Create and check the tasks of the section `evaluation`, which run during training. Imports no
torch.
"""

from megatron_tape.config.schema import RunConfig
from megatron_tape.data.tokenizer import load_run_tokenizer
from megatron_tape.errors import ConfigError
from megatron_tape.evaluation.model_source import info_of_run
from megatron_tape.evaluation.task import Task
from megatron_tape.evaluation.tasks import TASKS


def build_tasks(config: RunConfig) -> dict[str, Task]:
    """Return the tasks of `evaluation` by name."""
    tasks = config.evaluation.enabled_tasks().items()
    return {name: TASKS[name](settings, section=f"evaluation.{name}") for name, settings in tasks}


def check_tasks(config: RunConfig) -> None:
    """Read the data of the tasks of `evaluation`; raise ConfigError if tasks, data and model do not
    fit together.
    """
    tasks = build_tasks(config)
    if not tasks:
        return
    info = info_of_run(config, load_run_tokenizer(config))
    for name, task in tasks.items():
        if task.needs_tokenizer and not info.has_tokenizer:
            raise ConfigError(
                ("data.tokenizer", f"evaluation.{name}"),
                f"is null, but {name} needs a tokenizer",
                f"set it, or remove evaluation.{name}",
            )
        task.check(info)
