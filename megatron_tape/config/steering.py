"""Read `train.spikes`, when a step counts as a spike, and `train.average`, of which steps weights are averaged."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from megatron_tape.config.parse import read_section
from megatron_tape.config.values import Count, Decay, Positive
from megatron_tape.errors import refuse


@dataclass(frozen=True, kw_only=True)
class SpikeSettings:
    """The keys of `train.spikes`."""

    action: Literal["warn", "skip", "rewind"] = "warn"
    """Say so; or leave the update out; or start again from the newest checkpoint, without the data since then."""
    window: Annotated[int, Field(ge=3, le=10_000)] = 100
    """How many updates a step is compared with; the first ones are compared with nothing."""
    threshold: Positive = 6.0
    """How many standard deviations above the median, estimated from the median deviation, a spike is."""
    limit: Count = 10
    """After so many skipped steps or rewinds, the next spike ends the run."""


def spikes_of(setting: dict[str, Any]) -> SpikeSettings:
    """Return what `train.spikes` describes; raises `ConfigError` for what it cannot have."""
    return read_section("train.spikes", SpikeSettings, setting)


@dataclass(frozen=True, kw_only=True)
class AverageSettings:
    """The keys of `train.average`."""

    kind: Literal["ema", "last"]
    """An exponential moving average over all updates, or the mean of the last weights of the run."""
    decay: Decay = 0.999
    """Decay of the moving average per update; skipped steps do not update it. Early updates use (1 + updates) /
    (10 + updates) if that is smaller, so that the initial weights are soon forgotten."""
    count: Count = 10
    """How many weights the mean is of, the last of which are those after the last step."""
    every: Count = 100
    """Steps between them, skipped ones included."""

    def share(self, step: int, steps: int, updates: int, skipped: bool = False) -> float:
        """Return the share of the weights after `step`, of `steps`, in the new average; the rest is the old one's.

        There were so many `updates`, none of them in `step` if that was `skipped`.
        """
        if self.kind == "ema":
            return 0.0 if skipped else 1 - min(self.decay, (1 + updates) / (10 + updates))
        # Skipped steps count, since the mean is of weights at fixed steps.
        number, rest = divmod(step - (steps - (self.count - 1) * self.every), self.every)
        # Before the first of them, the average is the weights themselves.
        return 1.0 if number < 0 else 0.0 if rest else 1 / (number + 1)


def average_of(setting: dict[str, Any], steps: int) -> AverageSettings:
    """Return what `train.average` describes for a run of `steps`; raises `ConfigError` for what it cannot have."""
    key, settings = "train.average", read_section("train.average", AverageSettings, setting)
    for name, kind in (("decay", "ema"), ("count", "last"), ("every", "last")):
        refuse(name in setting and kind != settings.kind, f"{key}.{name}", f"belongs to kind {kind}", "remove it")
    first = steps - (settings.count - 1) * settings.every
    problem = f"{settings.count} times every {settings.every} is more than train.steps {steps}"
    refuse(settings.kind == "last" and first < 1, (f"{key}.count", "train.steps"), problem, "lower either")
    return settings
