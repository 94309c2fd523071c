"""The one list of what is checked of a run whose settings have been read: processes, then files. Imports no torch.

`checks.arguments` checks the settings alone when it reads them.
"""

from enum import IntEnum

from megatron_tape import command_line
from megatron_tape.checkpoint.directories import STATE, read_state
from megatron_tape.checkpoint.kept_tokenizer import check_tokenizer_exists, with_kept_tokenizer
from megatron_tape.checkpoint.locate import check_directories
from megatron_tape.checkpoint.saved_settings import check_start
from megatron_tape.checks.layout import check_processes
from megatron_tape.config.schema import RunConfig
from megatron_tape.data.inputs import check_data_files, check_datasets, check_same_data
from megatron_tape.data.tokenizer import load_run_tokenizer
from megatron_tape.evaluation.during_training import check_tasks
from megatron_tape.extension.base_model import (
    Base,
    begins_with_base,
    check_base,
    check_command,
    find_base,
    with_base_tokenizer,
)
from megatron_tape.huggingface.tokenizer_files import export_problem


class Level(IntEnum):
    """How much is checked. Each level includes those before it."""

    SETTINGS = 0
    """That the settings fit the number of processes and the command."""
    FILES = 1
    """That files exist and directories can be written: before a job is submitted, and on every node that trains."""
    START = 2
    """What the files hold: before a job's first process starts, and before a run does."""


def check(
    config: RunConfig, level: Level, processes: int | None = None, extends: bool | None = None, base: Base | None = None
) -> None:
    """Raise ConfigError for the first thing that keeps a run from working; OSError if a file system does not answer.

    Args:
        config: the run's settings.
        level: how much to check.
        processes: how many will train; None if nobody knows yet.
        extends: whether the command is the one that extends a model; None if either will do.
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
        config = with_kept_tokenizer(config, start)
        if begins_with_base(config):
            base = find_base(config.extension.from_, config.logging.directory)
            check_base(config, base)
            config, saved = with_base_tokenizer(config, base)
        check_datasets(config, saved)
        check_tasks(config)
        if state is None:
            _warn_of_export(config)


def _warn_of_export(config: RunConfig) -> None:
    """Say before training if the tokenizer cannot be exported afterwards."""
    tokenizer = load_run_tokenizer(config)
    if tokenizer is not None and (problem := export_problem(tokenizer, config.model.seq_length)):
        command_line.say(
            f"warning: data.tokenizer {config.data.tokenizer} {problem}; the model can be trained and evaluated, but "
            "exports to Hugging Face will have no tokenizer"
        )
