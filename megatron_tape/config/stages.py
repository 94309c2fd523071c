"""The stages of a run's training data: `data.prefix`, then `data.stages`. Does not import torch."""

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
    """One stage of the training data."""

    config: RunConfig
    """The settings of a run that trains only on this stage's data."""
    number: int
    """0 for `data.prefix`, and for sources without stages."""
    start: int
    """Index of the stage's first training sample, which is also the first of a step."""

    @contextlib.contextmanager
    def rename_error_subjects(self) -> Iterator[None]:
        """Report errors about `data.prefix` under the setting that defines this stage."""
        try:
            yield
        except ConfigError as error:
            keys = [KEY if key == "data.prefix" and self.number else key for key in error.subjects]
            raise ConfigError(tuple(keys), error.problem, error.fix, error.place) from None


def stages_of(config: RunConfig) -> list[Stage]:
    """Return the stages of a run's training data. Raises `ConfigError` if `data.stages` is invalid.

    Each stage has a seed of its own, so that stages that share a dataset shuffle it differently.
    """
    given = config.data.stages or []
    total = sum(item.share for item in given)
    problem = f"has shares that add up to {total:g}, which leaves nothing for data.prefix"
    refuse(total >= 1, KEY, problem, "lower the shares")
    train = config.train
    samples = train.samples_after(train.steps)
    stages = [Stage(_trained_on(config, config.data.prefix, 0), 0, 0)]
    left = total
    for number, item in enumerate(given, start=1):
        step = bisect.bisect_right(range(train.steps + 1), round(samples * (1 - left)), key=train.samples_after) - 1
        stages.append(Stage(_trained_on(config, item.prefix, number), number, train.samples_after(step)))
        left -= item.share
    for stage, end in zip(stages if given else (), [*(stage.start for stage in stages[1:]), samples]):
        problem = f"gives stage {stage.number} less than one of the {train.steps} steps"
        refuse(stage.start >= end, (KEY, "train.steps"), problem, "raise its share or train.steps")
    return stages


def prefixes_of(stages: list[Stage]) -> list[str]:
    """Return the datasets of all stages without duplicates."""
    return list(dict.fromkeys(prefix for stage in stages for prefix in blend(stage.config.data.prefix)[0]))


def stage_at(stages: list[Stage], sample: int) -> int:
    """Return the number of the stage that contains a training sample."""
    return sum(stage.start <= sample for stage in stages) - 1


def _trained_on(config: RunConfig, prefix: dict | list | str | None, number: int) -> RunConfig:
    cache = config.data.resolved_cache_directory
    data = dataclasses.replace(config.data, prefix=prefix, stages=None, cache_directory=cache)
    return dataclasses.replace(
        config, data=data, train=dataclasses.replace(config.train, seed=config.train.seed + number)
    )
