"""What a run trains on, `data.prefix` and then `data.stages`, and from when on. Imports no torch."""

import bisect
import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_tape.config.data import blend
from megatron_tape.config.schema import RunConfig
from megatron_tape.errors import ConfigError, refuse

KEY = "data.stages"


@dataclass(frozen=True)
class Stage:
    """A part of the training data, in the order in which the run reads it."""

    config: RunConfig
    """The settings of a run whose only training data this is."""
    number: int
    """0 for `data.prefix`, and for sources without stages."""
    start: int
    """The training sample, or sequence, with which it and a step begin."""

    @contextlib.contextmanager
    def naming_the_setting(self) -> Iterator[None]:
        """Turn errors about `data.prefix` into errors about the setting that this stage is from."""
        try:
            yield
        except ConfigError as error:
            keys = [KEY if key == "data.prefix" and self.number else key for key in error.subjects]
            raise ConfigError(tuple(keys), error.problem, error.fix, error.place) from None


def stages_of(config: RunConfig) -> list[Stage]:
    """Return the stages of a run's training data; raises `ConfigError` for what `data.stages` cannot have.

    Each later one has a seed of its own, so that a dataset that several stages share comes in another order.
    """
    given = config.data.stages or []
    total = sum(item.share for item in given)
    problem = f"has shares that add up to {total:g}, and data.prefix gets what is left of 1"
    refuse(total >= 1, KEY, problem, "lower them")
    train = config.train
    samples = train.samples_after(train.steps)
    stages = [Stage(_trained_on(config, config.data.prefix, 0), 0, 0)]
    left = total
    for number, item in enumerate(given, start=1):
        step = bisect.bisect_right(range(train.steps + 1), round(samples * (1 - left)), key=train.samples_after) - 1
        stages.append(Stage(_trained_on(config, item.prefix, number), number, train.samples_after(step)))
        left -= item.share
    for stage, end in zip(stages if given else (), [*(stage.start for stage in stages[1:]), samples]):
        problem = f"gives stage {stage.number} less than one of {train.steps} steps"
        refuse(stage.start >= end, (KEY, "train.steps"), problem, "raise its share or train.steps")
    return stages


def prefixes_of(stages: list[Stage]) -> list[str]:
    """Return the datasets of stages, each once."""
    return list(dict.fromkeys(prefix for stage in stages for prefix in blend(stage.config.data.prefix)[0]))


def stage_at(stages: list[Stage], sample: int) -> int:
    """Return the number of the stage that a training sample belongs to."""
    return sum(stage.start <= sample for stage in stages) - 1


def _trained_on(config: RunConfig, prefix: dict | list | str | None, number: int) -> RunConfig:
    cache = config.data.resolved_cache_directory
    data = dataclasses.replace(config.data, prefix=prefix, stages=None, cache_directory=cache)
    return dataclasses.replace(
        config, data=data, train=dataclasses.replace(config.train, seed=config.train.seed + number)
    )
