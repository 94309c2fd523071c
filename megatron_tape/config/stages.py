"""Stages of training, each with its own datasets: `data.prefix`, then `data.stages`. Does not
import torch.
"""

import bisect
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_tape.config.schema import RunConfig
from megatron_tape.errors import ConfigError

KEY = "data.stages"
"""Subject of errors about the later stages."""


@dataclass(frozen=True)
class Stage:
    """One stage of training."""

    config: RunConfig
    """The settings of the run, with the datasets of this stage in `data.prefix`, and without
    `data.stages`.
    """
    number: int
    """0 for the stage on `data.prefix` (or another data source), n for the n-th entry of
    `data.stages`.
    """
    start: int
    """Index of the first training sample of the stage. A stage starts at the beginning of a step.
    """

    @contextlib.contextmanager
    def rename_error_subjects(self) -> Iterator[None]:
        """Within the context, rename the subject `data.prefix` of a ConfigError to `data.stages` if
        this is a later stage.

        The datasets of a later stage are in `data.prefix` of its `config`, but the user has given
        them in `data.stages`.
        """
        try:
            yield
        except ConfigError as error:
            if self.number == 0:  # the first stage has the datasets of `data.prefix`
                raise
            keys = tuple(KEY if key == "data.prefix" else key for key in error.subjects)
            raise ConfigError(keys, error.problem, error.fix, error.place) from None


def stages_of(config: RunConfig) -> list[Stage]:
    """Return the stages of a run, in order: the stage on `data.prefix`, then those of
    `data.stages`, if any.

    Each stage has its own seed, so that two stages with the same dataset shuffle it differently.
    Raises ConfigError if the shares in `data.stages` leave a stage without a step.
    """
    later_stages = config.data.stages or []
    train = config.train
    total_samples = train.samples_after(train.steps)
    # The share of the run's samples in the later stages that are not in `stages` yet.
    remaining = sum(settings.share for settings in later_stages)
    # The first stage has no setting for its share. It gets what the later ones leave.
    if remaining >= 1:
        raise ConfigError(
            KEY,
            f"has shares that add up to {remaining:g}, so there are no steps for data.prefix",
            "lower the shares to less than 1 in total",
        )

    stages = [_stage(config, config.data.prefix, number=0, start=0)]
    for number, settings in enumerate(later_stages, start=1):
        # The sample at which the stage should begin may be within a step. The stage starts at the
        # beginning of that step, the last step with at most `sample` samples before it.
        sample = round(total_samples * (1 - remaining))
        step = bisect.bisect_right(range(train.steps + 1), sample, key=train.samples_after) - 1
        start = train.samples_after(step)
        stages.append(_stage(config, settings.prefix, number, start))
        remaining -= settings.share

    # Rounding down to the beginning of a step may leave a stage without samples.
    ends = [stage.start for stage in stages[1:]] + [total_samples]
    for stage, end in zip(stages, ends):
        if stage.start >= end:
            raise ConfigError(
                (KEY, "train.steps"),
                f"gives stage {stage.number} less than one of the {train.steps} steps",
                "raise its share or train.steps",
            )
    return stages


def prefixes_of(stages: list[Stage]) -> list[str]:
    """Return the prefixes of the datasets of all stages, without duplicates."""
    prefixes = [prefix for stage in stages for prefix in stage.config.data.prefixes]
    return list(dict.fromkeys(prefixes))


def stage_at(stages: Sequence[Stage], sample: int) -> int:
    """Return the `Stage.number` of the stage that contains the training sample with index
    `sample`.
    """
    # The stages are in order and numbered from 0. The last one that begins at or before the sample
    # contains it.
    return sum(stage.start <= sample for stage in stages) - 1


def _stage(config: RunConfig, prefix: dict | list | str | None, number: int, start: int) -> Stage:
    """Return stage `number`, with the datasets `prefix`. `config` has the settings of the run, and
    `start` is the index of the stage's first sample.
    """
    # All stages share one cache. Its default depends on `data.prefix`, which is replaced here.
    cache = config.data.resolved_cache_directory
    data = replace(config.data, prefix=prefix, stages=None, cache_directory=cache)
    # With the same seed, two stages would shuffle the same dataset in the same way.
    train = replace(config.train, seed=config.train.seed + number)
    return Stage(replace(config, data=data, train=train), number, start)
