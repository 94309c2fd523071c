"""Read `train.profile` and `logging.wandb`: what is profiled, and where Weights & Biases shows a run."""

from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_tape.config.parse import read_section
from megatron_tape.config.values import Count, NotNegativeInt, shown
from megatron_tape.errors import refuse


@dataclass(frozen=True, kw_only=True)
class ProfileSettings:
    """The keys of `train.profile`."""

    steps: list[Count] | None = None
    """The first and the last step of the trace; null profiles only after a signal."""
    ranks: list[NotNegativeInt] = field(default_factory=lambda: [0])
    """Ranks that write a trace each."""
    memory: bool = False
    """Also show allocations in the trace, and on a GPU write a memory snapshot."""


def profile_of(setting: dict[str, Any] | None) -> ProfileSettings:
    """Return what `train.profile` describes; raises `ConfigError` for what it cannot have."""
    settings = read_section("train.profile", ProfileSettings, setting or {})
    steps = settings.steps
    fix = "give the first and the last step, such as [10, 12]"
    wrong = steps is not None and (len(steps) != 2 or steps[0] > steps[1])
    refuse(wrong, "train.profile.steps", f"is {shown(steps)}", fix)
    refuse(not settings.ranks, "train.profile.ranks", "is empty", "name the ranks that write a trace, such as [0]")
    return settings


@dataclass(frozen=True, kw_only=True)
class WandbSettings:
    """The keys of `logging.wandb`."""

    project: str
    """The project that the run belongs to."""
    entity: str | None = None
    """The user or team that has the project; null means the default of whoever is logged in."""
    name: str | None = None
    """The run's name; null means the name of logging.directory."""
    mode: Literal["online", "offline"] = "online"
    """With offline, files that `wandb sync` sends later."""


def wandb_of(setting: dict[str, Any]) -> WandbSettings:
    """Return what `logging.wandb` describes; raises `ConfigError` for what it cannot have."""
    return read_section("logging.wandb", WandbSettings, setting)
