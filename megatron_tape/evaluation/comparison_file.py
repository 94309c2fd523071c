"""The file `comparison.json`: results of several variants of a recipe, each trained with several
seeds.

The file is small enough to be committed to a repository. It contains the settings of its runs, so
that finished runs are not repeated. This module imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megatron_tape.checkpoint.saved_settings import (
    WITHOUT_EFFECT,
    changed_values,
    model_differences,
)
from megatron_tape.config.schema import RunConfig, config_dict
from megatron_tape.config.train import ON_VALIDATION_DATA
from megatron_tape.errors import FileError
from megatron_tape.evaluation.results import Number, Score, Whole, read_dataclass
from megatron_tape.evaluation.statistics import PairedTest, holm, paired_t
from megatron_tape.evaluation.task import Task
from megatron_tape.io.records import write_record

NAME = "comparison.json"
TRAINING = "training"
"""Value of `Score.task` for scores of the training itself, such as its speed."""
Settings = dict[str, dict[str, Any]]
"""Settings by section or task, and by key."""
_SHOWN = 300
"""Maximum number of characters of the description of one difference in a message."""


@dataclass(frozen=True)
class FinishedRun:
    """Results of a variant that was trained with one seed, and where they were measured."""

    variant: str
    seed: Whole
    scores: list[Score]
    seconds: Number
    """Time of training and evaluation in seconds, without the time before an interruption."""
    created: Number
    hardware: str
    versions: dict[str, str]
    data: dict[str, str] = field(default_factory=dict)
    """Fingerprints of the files read in training and evaluation, by path; empty for runs of earlier
    versions.
    """

    @property
    def name(self) -> tuple[str, int]:
        return self.variant, self.seed


@dataclass(frozen=True)
class Comparison:
    """The contents of `comparison.json`."""

    settings: Settings
    """Settings of the recipe. A variant changes only those in its name, such as
    `tape+increments=signed`.
    """
    evaluation: Settings
    """Settings of each evaluation task, by task name."""
    baseline: str
    """The variant to which the others are compared."""
    runs: list[FinishedRun] = field(default_factory=list)
    format: Literal[1] = 1

    @property
    def variants(self) -> list[str]:
        return list(dict.fromkeys(run.variant for run in self.runs))


@dataclass(frozen=True)
class VariantResult:
    """Results of a variant in one metric."""

    variant: str
    values: dict[int, float]
    """Values by seed."""
    difference: PairedTest | None
    """Test of the differences from the baseline with the same seeds; None for the baseline, or
    without common seeds.
    """

    @property
    def mean(self) -> float:
        return float(np.mean(list(self.values.values())))

    @property
    def spread(self) -> float | None:
        """Sample standard deviation over the seeds; None for one seed."""
        if len(self.values) > 1:
            return float(np.std(list(self.values.values()), ddof=1))
        return None


def empty(base: RunConfig, tasks: Iterable[Task], baseline: str) -> Comparison:
    """Return a comparison without runs. `base` is the recipe, and `baseline` the name of a
    variant.
    """
    evaluation = {task.name: dataclasses.asdict(task.settings) for task in tasks}
    # Converted to JSON and back, so that types are the same as after reading the file.
    settings, evaluation = json.loads(json.dumps([config_dict(base), evaluation]))
    # Paths on this machine are not part of the results.
    del settings["logging"], settings["checkpoint"]["directory"]
    return Comparison(settings, evaluation, baseline)


def read_comparison(path: str | Path) -> Comparison:
    """Read a comparison. Raises OSError, or FileError if the file is invalid."""
    return read_dataclass(path, Comparison)


def write_comparison(path: Path, comparison: Comparison) -> None:
    """Write the file, replacing an earlier one atomically. Fields of scores that have their default
    are omitted.
    """
    content = dataclasses.asdict(comparison)
    defaults = {f.name: f.default for f in dataclasses.fields(Score)}
    for run in content["runs"]:
        run["scores"] = [
            {key: v for key, v in score.items() if v != defaults[key]} for score in run["scores"]
        ]
    write_record(path, content)


def add_runs(comparison: Comparison, path: Path, base: RunConfig) -> None:
    """Add the runs of the file `path` that are not in `comparison` yet.

    Raises FileError if they were made with settings other than those of the recipe `base`.
    """
    other = read_comparison(path)
    if other.runs and (different := differences(other, comparison, base)):
        problem = f"contains runs with other settings ({first_of(different)})"
        raise FileError(
            str(path), problem, "change these settings back, or choose another --output"
        )
    known = {run.name for run in comparison.runs}
    comparison.runs.extend(run for run in other.runs if run.name not in known)


def first_of(differences: Sequence[str]) -> str:
    """Join the first three of `differences` as text, and count the others."""
    if len(differences) > 3:
        others = f"; and {len(differences) - 3} more"
    else:
        others = ""
    return (
        "; ".join(one if len(one) <= _SHOWN else f"{one[:_SHOWN]}..." for one in differences[:3])
        + others
    )


def differences(recorded: Comparison, now: Comparison, base: RunConfig) -> list[str]:
    """Describe the settings that differ, as `key: was X, is now Y`, except those without effect on
    results.
    """
    found = changed_settings(recorded.settings, base, of_variants=True)
    for task, settings in now.evaluation.items():
        before = recorded.evaluation.get(task)
        if before is None:
            found.append(f"{task} was not evaluated")
        else:
            found += _changes(task, before, settings)
    return found


def changed_settings(saved: Settings, config: RunConfig, of_variants: bool = False) -> list[str]:
    """Describe how `config` differs from `saved`, ignoring the positional encoding if
    `of_variants`.
    """
    free = {"attention_backend", *(["position_encoding"] if of_variants else [])}
    now = json.loads(json.dumps(config_dict(config)))
    found = model_differences(saved.get("model", {}), now.pop("model"), free, ("was", "is now"))
    found += _changes("", saved, now)
    # Of train.evaluations, only the loss on the validation split is part of the results.
    evaluations = config.train.evaluations
    was = saved.get("train", {}).get("evaluations", evaluations)
    if isinstance(was, (list, tuple)) and all(isinstance(name, str) for name in was):
        was = was
    else:
        was = ()
    if ON_VALIDATION_DATA & set(was) != ON_VALIDATION_DATA & set(evaluations):
        found.append(f"train.evaluations: was {json.dumps(was)}, is now {json.dumps(evaluations)}")
    return found


def _changes(name: str, before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [
        f"{key}: was {json.dumps(was)}, is now {json.dumps(value)}"
        for key, was, value in changed_values(before, now, name)
        if not key.startswith(WITHOUT_EFFECT)
    ]


def results_by_metric(comparison: Comparison) -> dict[Score, list[VariantResult]]:
    """Return the results of all variants for each metric (see `Score.subject`)."""
    found: dict[Score, dict[str, dict[int, float]]] = {}
    for run in comparison.runs:
        for score in run.scores:
            found.setdefault(score.subject, {}).setdefault(run.variant, {})[run.seed] = score.value
    return {
        metric: _variant_results(by_variant, comparison.baseline)
        for metric, by_variant in found.items()
    }


def _variant_results(by_variant: dict[str, dict[int, float]], baseline: str) -> list[VariantResult]:
    reference = by_variant.get(baseline, {})
    tests = {}
    for variant, values in by_variant.items():
        if variant != baseline and (common := sorted(values.keys() & reference.keys())):
            tests[variant] = paired_t([values[seed] - reference[seed] for seed in common])
    tests = dict(zip(tests, holm(list(tests.values()))))
    return [
        VariantResult(name, dict(sorted(values.items())), tests.get(name))
        for name, values in by_variant.items()
    ]


def training_scores(
    config: RunConfig,
    speed: float | None,
    validation_loss: float | None,
    parameters: int,
    flops_per_token: int,
) -> list[Score]:
    """Return scores of the training itself: validation loss, time per step, parameters and
    floating-point operations.

    `speed` is the median of tokens per second, and `validation_loss` that after the last step; None
    if not measured.
    """
    tokens = config.train.global_batch_size * config.model.seq_length
    teraflops = (
        flops_per_token
        * config.train.samples_after(config.train.steps)
        * config.model.seq_length
        / 1e12
    )
    found = [
        Score("parameters", float(parameters), "neither", task=TRAINING),
        Score("arithmetic", teraflops, "neither", unit="TFLOP", task=TRAINING),
    ]
    if speed:
        seconds = tokens / speed
        found.insert(0, Score("seconds per step", seconds, "lower", unit="s", task=TRAINING))
    if validation_loss is not None:
        found.insert(
            0,
            Score(
                "validation loss", validation_loss, "lower", unit="nats per token", task=TRAINING
            ),
        )
    return found
