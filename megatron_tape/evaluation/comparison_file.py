"""The file `comparison.json`: results of several variants of a recipe, each trained with several
seeds.

The file is small enough to be committed to a repository. It contains the settings of its runs, so
that finished runs are not repeated. This module imports no torch.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megatron_tape.checkpoint.saved_settings import (
    WITHOUT_EFFECT,
    changed_values,
    model_differences,
)
from megatron_tape.config.schema import RunConfig, config_dict
from megatron_tape.errors import FileError
from megatron_tape.evaluation.results import Number, Score, Whole, read_dataclass
from megatron_tape.evaluation.statistics import Estimate, holm, paired_t
from megatron_tape.evaluation.task import Task
from megatron_tape.io.records import write_record
from megatron_tape.planning.flops import flops_per_token
from megatron_tape.planning.parameters import parameter_count
from megatron_tape.run.curves import Run
from megatron_tape.run.metrics import TOKENS_PER_SECOND, VALIDATION_LOSS

NAME = "comparison.json"
TRAINING = "training"
"""Value of `Score.task` for scores of the training itself, such as its speed."""
LOSS = "validation loss"
"""Value of `Score.metric` for the validation loss of the training."""
Settings = dict[str, dict[str, Any]]
"""Settings by section or task, and by key."""


@dataclass(frozen=True)
class FinishedRun:
    """Results of a variant that was trained with one seed, and where they were measured."""

    variant: str
    seed: Whole
    scores: list[Score]
    seconds: Number
    """Time of training and evaluation in seconds, without the time before an interruption."""
    created: Number
    """Time when the run was finished, in seconds since 1970."""
    hardware: str
    versions: dict[str, str]
    data: dict[str, str] = field(default_factory=dict)
    """Fingerprints of the files read in training and evaluation, by path; empty for runs of earlier
    versions.
    """

    @property
    def name(self) -> tuple[str, int]:
        """Variant and seed, which identify a run in a comparison."""
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
        """The variants that have a run, in the order of their first runs."""
        return list(dict.fromkeys(run.variant for run in self.runs))


@dataclass(frozen=True)
class VariantResult:
    """Results of a variant in one metric."""

    variant: str
    values: dict[int, float]
    """Values by seed."""
    difference: Estimate | None
    """Test of the differences from the baseline with the same seeds; None for the baseline, or
    without common seeds.
    """

    @property
    def mean(self) -> float:
        """Mean over the seeds."""
        return float(np.mean(list(self.values.values())))

    @property
    def spread(self) -> float | None:
        """Sample standard deviation over the seeds; None for one seed."""
        if len(self.values) > 1:
            return float(np.std(list(self.values.values()), ddof=1))
        return None


def empty_comparison(base: RunConfig, tasks: Iterable[Task], baseline: str) -> Comparison:
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
    """Write the file, replacing an earlier one atomically."""
    write_record(path, as_content(comparison))


def as_content(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison as a nested dictionary, without the fields of scores that have their
    default.
    """
    content = dataclasses.asdict(comparison)
    # Most scores have few fields, and the file is to stay small enough to be committed.
    defaults = {field.name: field.default for field in dataclasses.fields(Score)}
    for run in content["runs"]:
        run["scores"] = [
            {key: value for key, value in score.items() if value != defaults[key]}
            for score in run["scores"]
        ]
    return content


def add_runs(comparison: Comparison, path: Path, base: RunConfig) -> None:
    """Add the runs of the file `path` that are not in `comparison` yet.

    Raises FileError if they were made with settings other than those of the recipe `base`.
    """
    recorded = read_comparison(path)
    differences = changed_settings(recorded.settings, base, of_variants=True)
    for task, settings in comparison.evaluation.items():
        before = recorded.evaluation.get(task, {})
        if task not in recorded.evaluation:
            differences.append(f"{task} was not evaluated")
        # Only earlier versions of passkey, which had other prompts, had the setting `form`.
        if "form" in before:
            differences.append(f"{task} was evaluated with other prompts")
        differences += _changes(before, settings, task)
    # Without runs, the file has nothing to add, so differences do not matter.
    if recorded.runs:
        refuse_changed(path, differences)

    known = {run.name for run in comparison.runs}
    comparison.runs.extend(run for run in recorded.runs if run.name not in known)


def refuse_changed(path: Path, differences: Sequence[str]) -> None:
    """Raise FileError if there are differences between the settings of runs in `path` and now."""
    if differences:
        raise FileError(
            path,
            f"contains runs with other settings ({'; '.join(differences[:3])})",
            "change these settings back, or choose another --output",
        )


def changed_settings(saved: Settings, config: RunConfig, of_variants: bool = False) -> list[str]:
    """Return how `config` differs from `saved`: sentences such as `key: was X, is now Y`. Settings
    without effect on results may differ.

    With `of_variants`, the positional encoding may differ too.
    """
    ignored = ["attention_backend"]  # settings of the section `model` that may differ
    if of_variants:
        ignored.append("position_encoding")
    # Converted to JSON and back, so that types are the same as in the file.
    now = json.loads(json.dumps(config_dict(config)))
    model = now.pop("model")
    differences = model_differences(saved.get("model", {}), model, ignored, ("was", "is now"))
    # The section `model` is skipped, since `now` no longer has it.
    return differences + _changes(saved, now)


def _changes(before: dict, now: dict, section: str = "") -> list[str]:
    """Return how settings differ, in sentences such as `key: was X, is now Y`. `section` precedes
    the keys. Settings without effect on results are left out.
    """
    return [
        f"{key}: was {json.dumps(was)}, is now {json.dumps(value)}"
        for key, was, value in changed_values(before, now, section)
        if not key.startswith(WITHOUT_EFFECT)
    ]


def results_by_metric(comparison: Comparison) -> dict[Score, list[VariantResult]]:
    """Return the results of all variants by metric: a score without its value."""
    # Values by metric, by variant and by seed.
    values = {}
    for run in comparison.runs:
        for score in run.scores:
            by_variant = values.setdefault(score.subject, {})
            by_variant.setdefault(run.variant, {})[run.seed] = score.value
    return {
        metric: _variant_results(by_variant, comparison.baseline)
        for metric, by_variant in values.items()
    }


def _variant_results(by_variant: dict[str, dict[int, float]], baseline: str) -> list[VariantResult]:
    """Return the result of each variant, given its values of one metric by seed."""
    reference = by_variant.get(baseline, {})  # values of the baseline by seed
    tests = {}
    for variant, values in by_variant.items():
        differences = paired_differences(values, reference)
        if differences and variant != baseline:
            tests[variant] = paired_t(differences)

    # With every variant, it is more likely that a difference seems significant by chance.
    corrected = dict(zip(tests, holm(list(tests.values()))))
    return [
        VariantResult(variant, dict(sorted(values.items())), corrected.get(variant))
        for variant, values in by_variant.items()
    ]


def paired_differences(values: Mapping[int, float], reference: Mapping[int, float]) -> list[float]:
    """Return the differences between values and those of `reference` with the same seeds; both are
    given by seed.
    """
    return [values[seed] - reference[seed] for seed in sorted(values) if seed in reference]


def training_scores(config: RunConfig, run: Run) -> list[Score]:
    """Return scores of the training itself: the validation loss after the last step, time per step,
    parameters and floating-point operations.
    """
    train = config.train
    tokens = train.samples_after(train.steps) * config.model.seq_length
    teraflops = flops_per_token(config.model) * tokens / 1e12
    parameters = float(parameter_count(config.model))
    training_score = partial(Score, task=TRAINING)
    scores = [
        training_score("parameters", parameters, "neither"),
        training_score("arithmetic", teraflops, "neither", unit="TFLOP"),
    ]

    # The first metric that ranks variants is in the headline. So the time goes to the front of the
    # list, and then the loss before it.
    tokens_per_second = run.curve(TOKENS_PER_SECOND).median
    if tokens_per_second:
        seconds = train.global_batch_size * config.model.seq_length / tokens_per_second
        scores.insert(0, training_score("seconds per step", seconds, "lower", unit="s"))
    # A loss of an earlier step is left out, since the model was trained less then.
    step, loss = run.curve(VALIDATION_LOSS).last or (0, None)
    if loss is not None and step == train.steps:
        scores.insert(0, training_score(LOSS, loss, "lower", unit="nats per token"))
    return scores
