"""Check the directories that a run writes and the checkpoint that it continues, before it begins. Imports no torch."""

import os
from contextlib import suppress
from pathlib import Path

from megatron_tape.checkpoint.directories import list_checkpoints, read_state
from megatron_tape.config.schema import RunConfig
from megatron_tape.data.inputs import check_writable, naming_the_setting
from megatron_tape.errors import refuse


def check_directories(config: RunConfig) -> None:
    """Raise ConfigError if a directory cannot be written, belongs to another run, or is no checkpoint to continue.

    Raises OSError where the file system does not answer.
    """
    check_writable("logging.directory", config.logging.directory)
    check_writable("checkpoint.directory", config.checkpoint.directory)
    _refuse_checkpoints_of_another_run(config)
    resume = config.checkpoint.resume
    with naming_the_setting("checkpoint.resume", resume):
        missing = resume not in ("auto", "none") and not Path(resume).is_dir()
    fix = "set it to auto, none or a checkpoint's path"
    refuse(missing, "checkpoint.resume", f"is {resume}, which is not a directory", fix)


def _refuse_checkpoints_of_another_run(config: RunConfig) -> None:
    """Refuse a `checkpoint.directory` that another run, which still exists, uses; the default place is never refused.

    It belongs to the run that it is inside, or else to the one that saved its newest checkpoint.
    """
    run, directory = config.logging.directory, config.checkpoint.directory
    if not run or not directory or Path(os.path.abspath(run)) in Path(os.path.abspath(directory)).parents:
        return
    owners = [Path(directory).parent]
    for _, newest in list_checkpoints(directory)[:1]:
        with suppress(ValueError, FileNotFoundError):
            owners.append(Path(read_state(newest)["config"].get("logging", {}).get("directory") or run))
    for owner in owners:
        refuse(
            (owner / "attempts").is_dir() and owner.resolve() != Path(run).resolve(),
            ("checkpoint.directory", "logging.directory"),
            f"is {directory}, which belongs to the run {owner}, but logging.directory is {run}",
            "leave it out or set it to null for checkpoints in the run's own directory, and to begin with those of the "
            "other run, give one as checkpoint.resume",
        )
