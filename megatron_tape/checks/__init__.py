"""Check a run before it starts: its number of processes, its files and their contents. Does not
import torch.

`checks.arguments` checks whether the settings are compatible with each other when it reads them.
"""

from enum import IntEnum
from typing import Any

from megatron_tape import command_line
from megatron_tape.checkpoint.directories import STATE, read_state
from megatron_tape.checkpoint.locate import check_directories
from megatron_tape.checkpoint.saved_settings import checked_start_checkpoint
from megatron_tape.checkpoint.saved_tokenizer import check_tokenizer_exists, with_saved_tokenizer
from megatron_tape.checks.layout import check_processes
from megatron_tape.config.schema import RunConfig
from megatron_tape.data.inputs import check_data_files, check_datasets, check_same_data
from megatron_tape.data.tokenizer import load_run_tokenizer
from megatron_tape.evaluation.during_training import check_tasks
from megatron_tape.extension.base_checks import check_base
from megatron_tape.extension.base_model import (
    Base,
    check_command,
    find_base,
    starts_from_base,
    with_base_tokenizer,
)
from megatron_tape.huggingface.tokenizer_files import export_problem


class Level(IntEnum):
    """How thorough a check is. Each level includes the previous ones."""

    SETTINGS = 0
    """Check that the settings are compatible with the number of processes and with the command."""
    FILES = 1
    """Also check that files exist and directories are writable. Used before a job is submitted, and
    on every node.
    """
    START = 2
    """Also check the contents of files. Used once at the start of a job, and by every run before it
    trains.
    """


def check(
    config: RunConfig,
    level: Level,
    processes: int | None = None,
    extends: bool | None = None,
    base: Base | None = None,
) -> None:
    """Raise ConfigError for the first problem that would stop a run, or OSError if a file system
    fails.

    Args:
        config: the run's settings.
        level: how thoroughly to check.
        processes: the number of training processes, or None if it is not known yet.
        extends: whether the command is pretrain.extend_context (true) or pretrain.train (false).
            None skips this check.
        base: the model to extend, which the settings must fit at every level. None reads the model
            of extension.from, at the level START only.
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
    if level < Level.START:
        return

    # The checkpoint to continue from, or None for a new run. One with weights only, such as a
    # converted model, has no `state.json`.
    checkpoint = checked_start_checkpoint(config)
    state = None
    # A `checkpoint.directories.Progress`: what the state records about the tokenizer and the data
    # files. Empty if there is no state.
    progress: Any = {}
    if checkpoint is not None and (checkpoint / STATE).is_file():
        state = read_state(checkpoint)
        progress = state["progress"]
        # A finished run needs no data.
        if state["step"] >= config.train.steps:
            return
    check_same_data(config, progress.get("data", {}), checkpoint)

    # A run keeps the tokenizer that it began with, which its checkpoints contain. The record of
    # this tokenizer is None if there is no checkpoint or no tokenizer.
    config = with_saved_tokenizer(config, checkpoint)
    tokenizer_record = progress.get("tokenizer")
    if starts_from_base(config):
        base = find_base(config.extension.from_)
        check_base(config, base)
        config, tokenizer_record = with_base_tokenizer(config, base)

    check_datasets(config, tokenizer_record)
    check_tasks(config)
    # A run that continues from a state has printed the warning at its first start.
    if state is None:
        _warn_of_export(config)


def _warn_of_export(config: RunConfig) -> None:
    """Print a warning if Hugging Face exports of the run cannot include its tokenizer."""
    tokenizer = load_run_tokenizer(config)
    if tokenizer is None:
        return
    problem = export_problem(tokenizer, config.model.seq_length)
    if problem is not None:
        command_line.log(
            f"warning: data.tokenizer {config.data.tokenizer} {problem}; training and evaluation"
            " work, but exports to Hugging Face will not include a tokenizer"
        )
