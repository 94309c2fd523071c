"""Log a run's metrics to Weights & Biases (W&B). All attempts of a run log to the same W&B run."""

import importlib.util
import logging
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from megatron_tape.config.schema import WandbSettings
from megatron_tape.io.records import read_record, write_record

logger = logging.getLogger(__name__)

RECORD = "wandb.json"
"""File in `logging.directory` with the id of the W&B run."""
INSTALL = "pip install wandb==0.31.0"
"""Command that installs the package, for error messages."""


class WandbRecord(TypedDict):
    """The contents of `wandb.json`."""

    id: str
    """Id of the W&B run."""
    url: str | None
    """Web page of the W&B run; None in offline mode."""


def is_wandb_installed() -> bool:
    """Return whether the package wandb is installed. A directory `wandb` with logs of offline runs
    does not count.
    """
    # Python also finds a directory without __init__.py, as a package whose `origin` is None.
    spec = importlib.util.find_spec("wandb")
    return spec is not None and spec.origin is not None


def read_wandb(directory: Path) -> WandbRecord | None:
    """Return the contents of `wandb.json` in a run's `directory`, or None if there is no such file.
    Raises FileError if it is damaged.
    """
    try:
        return read_record(directory / RECORD, WandbRecord)
    except FileNotFoundError:
        return None


class WandbRun:
    """A W&B run. If a call fails, a warning is logged, and later calls do nothing."""

    def __init__(self, settings: WandbSettings, directory: str | Path, config: Mapping[str, Any]):
        """Start a W&B run, or continue the one that earlier attempts recorded in `directory`.

        `settings` is the section `logging.wandb`. `config` has all settings, which W&B shows with
        the run.
        """
        self._run: Any = None
        self._try(self._begin, settings, Path(directory), config)

    def _begin(self, settings: WandbSettings, directory: Path, config: Mapping[str, Any]) -> None:
        """Start or continue the W&B run. May raise any error."""
        # Optional, and slow to import.
        import wandb

        record = read_wandb(directory)
        run_id = record["id"] if record else secrets.token_hex(4)
        self._run = wandb.init(
            project=settings.project,
            entity=settings.entity,
            name=settings.name or directory.resolve().name,
            id=run_id,
            resume="allow",
            mode=settings.mode,
            dir=str(directory),
            config=dict(config),
            # wandb would replace stdout and stderr to upload what they show.
            settings=wandb.Settings(console="off"),
        )
        # Use the run's steps instead of wandb's counter, so that steps repeated after a resume are
        # accepted.
        self._run.define_metric("*", step_metric="step")
        write_record(directory / RECORD, {"id": self._run.id, "url": self._run.url or None})

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log the metrics of a step."""
        if self._run is not None:
            self._try(self._run.log, {"step": step, **scalars})

    def close(self) -> None:
        """Finish the W&B run."""
        if self._run is not None:
            self._try(self._run.finish)

    def _try(self, call: Callable[..., Any], *arguments: Any) -> None:
        """Call `call` with `arguments`. If it raises, log a warning and end logging to W&B."""
        try:
            call(*arguments)
        except Exception as error:  # training does not depend on this service
            self._run = None
            logger.warning(
                "warning: logging to Weights & Biases is disabled, since it has failed (%s)",
                str(error) or repr(error),
            )
