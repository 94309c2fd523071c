"""Every check of a run before it starts: the number of processes, then files. Does not import torch.

`checks.arguments` checks the settings themselves when it reads them.
"""

from enum import IntEnum

from megatron_tape import command_line
from megatron_tape.checkpoint.directories import STATE, read_state
from megatron_tape.checkpoint.locate import check_directories
from megatron_tape.checkpoint.saved_settings import check_start
from megatron_tape.checkpoint.saved_tokenizer import check_tokenizer_exists, with_saved_tokenizer
from megatron_tape.checks.layout import check_processes
from megatron_tape.config.schema import RunConfig
from megatron_tape.data.inputs import check_data_files, check_datasets, check_same_data
from megatron_tape.data.tokenizer import load_run_tokenizer
from megatron_tape.evaluation.during_training import check_tasks
from megatron_tape.extension.base_model import (
    Base,
    check_base,
    check_command,
    find_base,
    starts_from_base,
    with_base_tokenizer,
)
from megatron_tape.huggingface.tokenizer_files import export_problem


class Level(IntEnum):
    """How thorough a check is. Each level includes the previous ones."""

    SETTINGS = 0
    """The settings are compatible with the number of processes and with the command."""
    FILES = 1
    """Files exist and directories are writable. Used before a job is submitted, and on every node that trains."""
    START = 2
    """The contents of files are valid. Used before a job's first process and before a run."""


def check(
    config: RunConfig, level: Level, processes: int | None = None, extends: bool | None = None, base: Base | None = None
) -> None:
    """Raise ConfigError for the first problem that would stop a run, or OSError if a file system fails.

    Args:
        config: the run's settings.
        level: how thoroughly to check.
        processes: the number of training processes; None if it is not known yet.
        extends: whether the command is pretrain.extend_context; None to accept both commands.
        base: the model to extend, if it does not exist yet.
    """
    if processes is not None:
        check_processes(config, processes)
    if extends is not None:
        check_command(config, extends)
    if level >= Level.FILES:
        check_directories(config)
        check_data_files(config)
        check_tokenizer_exists(config)
    if base is not None:
        check_base(config, base)
    if level >= Level.START:
        start = check_start(config)
        state = None if start is None or not (start / STATE).is_file() else read_state(start)
        if state is not None and state["step"] >= config.train.steps:
            return
        progress = {} if state is None else state["progress"]
        saved = progress.get("tokenizer")
        check_same_data(config, progress.get("data", {}), start)
        config = with_saved_tokenizer(config, start)
        if starts_from_base(config):
            base = find_base(config.extension.from_, config.logging.directory)
            check_base(config, base)
            config, saved = with_base_tokenizer(config, base)
        check_datasets(config, saved)
        check_tasks(config)
        if state is None:
            _warn_of_export(config)


def _warn_of_export(config: RunConfig) -> None:
    """Warn before training if the tokenizer cannot be exported."""
    tokenizer = load_run_tokenizer(config)
    if tokenizer is not None and (problem := export_problem(tokenizer, config.model.seq_length)):
        command_line.log(
            f"warning: data.tokenizer {config.data.tokenizer} {problem}; training and evaluation work, but exports to "
            "Hugging Face will not include a tokenizer"
        )
