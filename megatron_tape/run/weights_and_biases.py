"""Shows a run's metrics in Weights & Biases, too: one run there for all attempts here."""

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
"""Where a run's directory keeps which run of Weights & Biases it is."""
INSTALL = "pip install wandb==0.31.0"


class WandbRecord(TypedDict):
    """The contents of `wandb.json`."""

    id: str
    url: str | None
    """Its page; None offline."""


def installed() -> bool:
    """Return whether wandb can be imported; the folder of that name that it makes does not count."""
    spec = importlib.util.find_spec("wandb")
    return spec is not None and spec.origin is not None


def read_wandb(directory: Path) -> WandbRecord | None:
    """Return what is known of a run's page, None if it has none. Raises ValueError for a damaged record."""
    try:
        return read_record(directory / RECORD, WandbRecord)
    except FileNotFoundError:
        return None


class WandbRun:
    """A run in Weights & Biases. What fails there is a warning, and training goes on without it."""

    def __init__(self, settings: WandbSettings, directory: str | Path, config: Mapping[str, Any]):
        """Begin the run, or continue the one that an earlier attempt began; `config` is shown beside it."""
        self._run: Any = None
        self._try(self._begin, settings, Path(directory), config)

    def _begin(self, settings: WandbSettings, directory: Path, config: Mapping[str, Any]) -> None:
        import wandb

        known = read_wandb(directory)
        self._run = wandb.init(
            project=settings.project,
            entity=settings.entity,
            name=settings.name or directory.resolve().name,
            id=secrets.token_hex(4) if known is None else known["id"],
            resume="allow",
            mode=settings.mode,
            dir=str(directory),
            config=dict(config),
            settings=wandb.Settings(console="off"),
        )
        # By our steps, and not by its own count, so that steps that are repeated after a resume are accepted.
        self._run.define_metric("*", step_metric="step")
        write_record(directory / RECORD, {"id": self._run.id, "url": self._run.url or None})

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        if self._run is not None:
            self._try(self._run.log, {"step": step, **scalars})

    def close(self) -> None:
        if self._run is not None:
            self._try(self._run.finish)

    def _try(self, call: Callable[..., Any], *arguments: Any) -> None:
        try:
            call(*arguments)
        except Exception as error:  # whatever fails in a service that training does not need
            self._run = None
            logger.warning("warning: Weights & Biases shows no more of this run (%s)", str(error) or repr(error))
