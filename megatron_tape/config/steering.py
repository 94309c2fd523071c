"""Read `train.spikes`: when a step counts as a spike, and what then happens."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from megatron_tape.config.parse import read_section
from megatron_tape.config.values import Count, Positive


@dataclass(frozen=True, kw_only=True)
class SpikeSettings:
    """The keys of `train.spikes`."""

    action: Literal["warn", "skip", "rewind"] = "warn"
    """Say so; or leave the update out; or go back to the newest checkpoint and pass over the data since then."""
    window: Annotated[int, Field(ge=3, le=10_000)] = 100
    """How many updates a step is compared with; the first ones are compared with nothing."""
    threshold: Positive = 6.0
    """How many standard deviations above the median, estimated from the median deviation, a spike is."""
    limit: Count = 10
    """After so many skipped steps or rewinds, the next spike ends the run."""


def spikes_of(setting: dict[str, Any]) -> SpikeSettings:
    """Return what `train.spikes` describes; raises `ConfigError` for what it cannot have."""
    return read_section("train.spikes", SpikeSettings, setting)
