"""Plan a ladder: variants compared at several model sizes and amounts of training, each with a
learning rate that is tuned for it. Does not import torch.

A point of the ladder is a model size, trained on an amount of text or on a synthetic task. At each
point, the reported runs are a comparison like those of one recipe. At the tuned points, each
variant also has a comparison of learning rates, with other seeds.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from megatron_tape.config.recipes import find_recipe
from megatron_tape.config.schema import RunConfig
from megatron_tape.config.sections import build
from megatron_tape.data.inputs import missing_validation
from megatron_tape.errors import ConfigError
from megatron_tape.evaluation import comparison_file
from megatron_tape.evaluation.comparison_file import Comparison
from megatron_tape.evaluation.ladder_file import (
    NAME,
    Ladder,
    LadderPoint,
    LearningRate,
    read_ladder,
    tuned_loss,
)
from megatron_tape.io.records import read_yaml
from megatron_tape.model.names import KINDS
from megatron_tape.planning.hardware import peak_flops
from megatron_tape.planning.parameters import parameter_count
from megatron_tape.position.encoding import Bounds, Positive
from megatron_tape.text import counted
from pretrain.comparison.planned_runs import (
    ComparisonPlan,
    PlannedRun,
    Variant,
    as_argument,
    base_config,
    parse_variants,
    plan_comparison,
    recipe_tasks,
    run_directory,
)

RATE = "optimizer.lr"
"""The setting that is tuned."""
DETERMINED = ("train.steps", "schedule.warmup_steps", "train.eval_interval", RATE)
"""Settings of language models that follow from the recipe of the ladder."""
STEP = 2.0
"""Ratio of neighboring learning rates."""
MOST_RATES = 16
"""Maximum number of rates of a grid, extended rates included."""
CORE_FLOPS = 3e10
"""FLOP/s of a CPU core, for estimates before any run is finished. A server's core reaches 20 to 60
GFLOP/s with small models."""
GPU_FRACTION = 0.2
"""Fraction of a GPU's peak for these estimates."""
Seeds = Annotated[list[Annotated[int, Bounds(ge=1)]], Bounds(min_length=1)]
Settings = dict[str, Any]
"""Settings of runs by their full keys, such as `model.hidden_size`."""


@dataclass(frozen=True, kw_only=True)
class TuningConfig:
    """How learning rates are tuned."""

    learning_rates: Annotated[list[Positive], Bounds(min_length=3)]
    """Ascending learning rates to try, each twice the one before."""
    seeds: Seeds
    """Seeds of the runs that rates are chosen from. They must not be among the reported seeds."""
    sizes: list[str] | None = None
    """Sizes at which rates are tuned. Default: all."""
    tokens_per_parameter: list[Positive] | None = None
    """Amounts of text at which rates are tuned. Default: the smallest."""
    checked_sizes: list[str] = field(default_factory=list)
    """Sizes without tuning at which half and twice the rate are tried as well, at the smallest
    amount of text."""


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """A synthetic task."""

    recipe: str
    """Path or name of its recipe, which sets the number of steps."""
    sizes: list[str] | None = None
    """Sizes of models that are trained on it. Default: all."""
    settings: Settings = field(default_factory=dict)
    """Settings that differ from the recipe's."""


@dataclass(frozen=True, kw_only=True)
class LadderConfig:
    """The contents of a ladder's recipe."""

    recipe: str
    """Path or name of the recipe of the language models."""
    settings: Settings = field(default_factory=dict)
    """Settings that differ from the recipe's."""
    variants: Annotated[dict[str, str], Bounds(min_length=2)]
    """By name, the variants as in --encodings. The first one is the baseline."""
    sizes: Annotated[dict[str, Settings], Bounds(min_length=1)]
    """By name, the settings of each model size, in ascending order."""
    tokens_per_parameter: Annotated[list[Positive], Bounds(min_length=1)]
    """Ascending amounts of text in tokens per parameter. The parameters are those of the baseline
    without the embedding and the output layer."""
    warmup_fraction: Annotated[float, Bounds(ge=0, lt=1)] = 0.1
    """Fraction of the steps of a language model over which the learning rate rises."""
    tuning: TuningConfig
    """How learning rates are tuned."""
    seeds: Seeds
    """Seeds of the reported runs."""
    tasks: dict[str, TaskConfig] = field(default_factory=dict)
    """By name, synthetic tasks on which models of these sizes are trained, too."""


@dataclass(frozen=True)
class Point:
    """A model size, trained on an amount of text or on a synthetic task."""

    size: str
    training: str
    """The name of the amount of text, or of the task."""
    tokens_per_parameter: float | None
    """None for a task."""
    parameters: int
    """Parameters of the baseline without the embedding and the output layer."""
    tokens: int
    """Tokens that a run is trained on."""
    recipe: list[str]
    """Arguments of pretrain.train that all runs share."""
    directory: Path
    is_tuned: bool
    is_checked: bool = False

    @property
    def name(self) -> str:
        return f"{self.size}, {self.training}"


class Tuning:
    """The search for a variant's learning rate at a point: a comparison of rates."""

    def __init__(
        self,
        point: Point,
        name: str,
        variant: Variant,
        rates: Sequence[float],
        seeds: Sequence[int],
    ):
        """Plan the runs of a tuning.

        Args:
            point: the point of the ladder.
            name: the variant's name in the recipe.
            variant: the variant, without a learning rate.
            rates: the learning rates to try, ascending.
            seeds: the seeds of each rate.
        """
        self.point = point
        self.name = name
        self.variant = variant
        self.rates = list(rates)
        self.seeds = list(seeds)
        self.plan = self._plan()

    def _plan(self) -> ComparisonPlan:
        """Return the plan of the comparison of rates."""
        return plan_comparison(
            tuning_directory(self.point.directory, self.name),
            [with_rate(self.variant, rate) for rate in self.rates],
            self.seeds,
            self.point.recipe,
            evaluation=None,
            where=f"{self.point.name}, tuning",
            may_diverge=True,
        )

    @property
    def losses(self) -> dict[float, float]:
        """The mean validation loss over the seeds by rate, for rates whose runs are finished.
        Infinite for a rate with a run that diverged.
        """
        by_label = {label: float(rate) for label, rate in self.rate_names.items()}
        values: dict[float, list[float]] = {}
        for run in self.plan.results.runs:
            if run.variant in by_label and run.seed in self.seeds:
                values.setdefault(by_label[run.variant], []).append(tuned_loss(run))
        return {
            rate: float(np.mean(losses))
            for rate, losses in sorted(values.items())
            if len(losses) == len(self.seeds)
        }

    @property
    def best(self) -> float | None:
        """The rate with the lowest loss; None if a run is not finished."""
        losses = self.losses
        if len(losses) < len(self.rates):
            return None
        return min(losses, key=losses.__getitem__)

    @property
    def missing_rate(self) -> float | None:
        """The rate to add because the best one is the first or the last of the grid, or None."""
        best = self.best
        if best is None:
            return None
        if best == min(self.losses):
            return best / STEP
        if best == max(self.losses):
            return best * STEP
        return None

    def extend(self) -> None:
        """Add the missing rate to the grid. Raises ConfigError if the grid is too long."""
        if len(self.rates) >= MOST_RATES:
            raise ConfigError(
                "tuning.learning_rates",
                f"were extended to {len(self.rates)} rates, of which {self.best:g} is the best of"
                f" {self.name} ({self.point.name}), still at the end",
                "look at these runs: the loss should rise again at high and at low rates",
            )
        self.rates = sorted([*self.rates, self.missing_rate])
        self.plan = self._plan()

    def extend_to_finished(self) -> None:
        """Add the missing rate as long as its runs are finished, from an earlier command."""
        while (rate := self.missing_rate) is not None:
            variant = with_rate(self.variant, rate)
            finished = {run.name for run in self.plan.results.runs}
            for seed in self.seeds:
                result = result_file(self.plan.output, variant, seed)
                if (variant.label, seed) not in finished and not result.is_file():
                    return
            self.extend()

    @property
    def rate_names(self) -> dict[str, str]:
        """The rates as text, by the label of the variant with this rate."""
        return {with_rate(self.variant, rate).label: rate_text(rate) for rate in self.rates}


class LadderPlan:
    """All runs of a ladder.

    First, the runs of `tunings` are executed, whose grids may grow. The learning rates of
    `final_runs` depend on their results, so `plan_final_runs` plans these again.

    All variants of the recipe are planned, since `results` has the finished runs of all of them.
    What is executed is limited to the `selected` variants: `tunings`, `tuning_runs`, `final_runs`,
    `runs` and `unfinished`.
    """

    def __init__(
        self,
        config: LadderConfig,
        variants: Mapping[str, Variant],
        points: Sequence[Point],
        output: Path,
        selected: Sequence[str],
    ):
        """Plan the runs of a ladder.

        Args:
            config: the recipe.
            variants: the variants of the recipe, by name; the first one is the baseline.
            points: the points in ascending order.
            output: the directory of the ladder.
            selected: the names of the variants to execute.
        """
        self.config = config
        self.variants = dict(variants)
        self.points = list(points)
        self.output = output
        self.selected = set(selected)
        rates = config.tuning.learning_rates
        seeds = config.tuning.seeds
        self._tunings = [
            Tuning(point, name, variant, rates, seeds)
            for point in points
            if point.is_tuned
            for name, variant in variants.items()
        ]
        for tuning in self._tunings:
            tuning.extend_to_finished()
        self.checks: list[Tuning] = []
        self.reported: dict[str, ComparisonPlan] = {}
        self.plan_final_runs()

    @property
    def tunings(self) -> list[Tuning]:
        """The tunings of the selected variants."""
        return [tuning for tuning in self._tunings if tuning.name in self.selected]

    def plan_final_runs(self) -> None:
        """Plan the reported runs, and the runs of checks.

        Variants whose rate is not known yet have the first one of the grid: their settings are
        checked before the first run, and their FLOPs do not depend on the rate.
        """
        self.checks = []
        for point in self.points:
            variants = []
            for name, variant in self.variants.items():
                rate = self.rate(point, name) or self.config.tuning.learning_rates[0]
                variants.append(with_rate(variant, rate))
                if point.is_checked:
                    rates = [rate / STEP, rate, rate * STEP]
                    seeds = self.config.tuning.seeds
                    self.checks.append(Tuning(point, name, variant, rates, seeds))
            evaluation = recipe_tasks(base_config(point.recipe, point.directory))
            self.reported[point.name] = plan_comparison(
                point.directory,
                variants,
                self.config.seeds,
                point.recipe,
                evaluation,
                where=point.name,
            )

    def source(self, point: Point) -> Point:
        """Return the tuned point from which `point` takes its learning rates.

        It has the largest size up to that of `point` and, in this size, the largest amount of text
        up to that of `point`. For a task, it is a point of the same task.
        """
        # Points are in ascending order, so the last one is the largest.
        sources = [
            other
            for other in self.points[: self.points.index(point) + 1]
            if other.is_tuned and _is_source(other, point)
        ]
        return sources[-1]

    def rate(self, point: Point, name: str) -> float | None:
        """Return the learning rate of a variant at a point; None if it is not known yet."""
        source = self.source(point)
        for tuning in self._tunings:
            if tuning.point == source and tuning.name == name:
                return tuning.best
        raise KeyError(name)

    @property
    def is_tuned(self) -> bool:
        """Whether all learning rates are known, and none is at the end of its grid."""
        return all(
            tuning.best is not None and tuning.missing_rate is None for tuning in self.tunings
        )

    def require_complete_grids(self, tunings: Sequence[Tuning] | None = None) -> None:
        """Raise ConfigError if the best learning rate of a tuning is at the end of its grid.

        `tunings` are those to look at; None stands for all.
        """
        at_end = [
            tuning
            for tuning in (self.tunings if tunings is None else tunings)
            if tuning.missing_rate is not None
        ]
        if not at_end:
            return
        named = [f"{tuning.best:g} of {tuning.name} ({tuning.point.name})" for tuning in at_end]
        rates = sorted({tuning.missing_rate for tuning in at_end})
        raise ConfigError(
            "tuning.learning_rates",
            f"ends at the best rate: {'; '.join(named)}",
            f"add {', '.join(map(rate_text, rates))} to the recipe, or give --extend-grid",
        )

    @property
    def comparisons(self) -> list[ComparisonPlan]:
        """The plans of all comparisons."""
        tunings = [tuning.plan for tuning in [*self._tunings, *self.checks]]
        return [*tunings, *self.reported.values()]

    @property
    def tuning_runs(self) -> list[PlannedRun]:
        """The runs of all tunings."""
        return [run for tuning in self.tunings for run in tuning.plan.runs]

    @property
    def final_runs(self) -> list[PlannedRun]:
        """The runs of checks, and the reported runs, of which those with the first seed come
        first.
        """
        checks = [check for check in self.checks if check.name in self.selected]
        reported = []
        for plan in self.reported.values():
            # With each seed, the variants are in the order of the recipe.
            names = list(self.variants) * len(self.config.seeds)
            reported += [run for name, run in zip(names, plan.runs) if name in self.selected]
        reported.sort(key=lambda run: self.config.seeds.index(run.seed))
        return [run for check in checks for run in check.plan.runs] + reported

    @property
    def runs(self) -> list[PlannedRun]:
        """All runs, in the order of their execution."""
        return self.tuning_runs + self.final_runs

    @property
    def unfinished(self) -> list[PlannedRun]:
        """The runs that are not finished, in the order of their execution."""
        directories = {run.directory for plan in self.comparisons for run in plan.unfinished}
        return [run for run in self.runs if run.directory in directories]

    def record_run(self, run: PlannedRun, seconds: float, gpu_model: str | None) -> None:
        """Record the results of a finished run; see `ComparisonPlan.record`."""
        owner = next(plan for plan in self.comparisons if run in plan.runs)
        owner.record(run, seconds, gpu_model)

    def collect(self) -> None:
        """Add the results of runs that other processes have finished, and plan the final runs
        with the rates that these determine.
        """
        for tuning in self._tunings:
            tuning.plan.collect()
            tuning.extend_to_finished()
        self.plan_final_runs()

    def write_comparisons(self) -> bool:
        """Write the `comparison.json` of each comparison that has finished runs, and return whether
        there are any.
        """
        plans = [plan for plan in self.comparisons if plan.results.runs]
        for plan in plans:
            plan.output.mkdir(parents=True, exist_ok=True)
            comparison_file.write_comparison(plan.output / comparison_file.NAME, plan.results)
        return bool(plans)

    def results(self) -> Ladder:
        """Return the results of the finished runs, also of variants that are not selected. Left out
        are runs of earlier recipes, such as those with a seed that has been removed.
        """
        points = []
        for point in self.points:
            source = self.source(point)
            taken_from = None if source == point else source.name
            rates = {}
            names = {}
            for name, variant in self.variants.items():
                rate = self.rate(point, name)
                if rate is not None:
                    rates[name] = LearningRate(rate, taken_from)
                    names[with_rate(variant, rate).label] = name
            tuning = {
                tuning.name: _planned(tuning.plan, tuning.rate_names)
                for tuning in [*self._tunings, *self.checks]
                if tuning.point == point and tuning.plan.results.runs
            }
            points.append(
                LadderPoint(
                    size=point.size,
                    training=point.training,
                    tokens_per_parameter=point.tokens_per_parameter,
                    parameters=point.parameters,
                    tokens=point.tokens,
                    learning_rates=rates,
                    comparison=_planned(self.reported[point.name], names),
                    tuning=tuning,
                )
            )
        return Ladder({name: variant.label for name, variant in self.variants.items()}, points)

    def describe(self) -> str:
        """Return the numbers of tunings and runs, and the directory."""
        finished = len(self.runs) - len(self.unfinished)
        return (
            f"{counted(len(self.tunings), 'tuning')} of learning rates"
            f" ({counted(len(self.tuning_runs), 'run')}),"
            f" {counted(len(self.final_runs), 'other run')}, {finished} finished, output in"
            f" {self.output}"
        )

    def estimate(self, devices: int, gpu_model: str | None) -> str:
        """Return what the runs that are not finished take, on `devices` devices of the model
        `gpu_model`, or on as many CPU cores if it is None.
        """
        flops = sum(run.flops for run in self.unfinished)
        text = f"not finished: {flops:.2g} FLOPs of training"
        kind = "CPU core" if gpu_model is None else "GPU"
        speed = self._measured_speed()
        basis = f"the finished runs took {kind} time at"
        if speed is None:
            speed = CORE_FLOPS
            if gpu_model is not None:
                peak = peak_flops(gpu_model)
                if peak is None:
                    return text
                speed = GPU_FRACTION * peak
            basis = "assuming"
        hours = flops / speed / devices / 3600
        return (
            f"{text}, about {hours:.2g} hours on {counted(devices, kind)} ({basis}"
            f" {speed / 1e9:,.0f} GFLOP/s)"
        )

    def _measured_speed(self) -> float | None:
        """Return the FLOP/s of the finished runs, with their evaluation; None without any."""
        flops = 0
        seconds = 0.0
        for plan in self.comparisons:
            finished = {run.name: run.seconds for run in plan.results.runs}
            for run in plan.runs:
                name = (run.variant.label, run.seed)
                if name in finished:
                    flops += run.flops
                    seconds += finished[name]
        if seconds == 0:
            return None
        return flops / seconds


def plan_ladder(
    recipe: str,
    output: Path,
    names: Sequence[str] | None = None,
    overrides: Sequence[str] = (),
) -> LadderPlan:
    """Return the plan of a ladder, with the results of its runs that are finished.

    Args:
        recipe: path or name of the ladder's recipe.
        output: the directory of the ladder.
        names: the variants to execute, by their names in the recipe. None executes all.
        overrides: arguments `--section.key value`, which change settings of the language models.

    Raises:
        UserError: the recipe or the settings of a run are invalid, or settings differ from those of
            existing results.
    """
    config = read_config(recipe)
    try:
        _check_names(config)
        _check_settings(config, overrides)
        variants = variants_of(config)
        selected = _selected(variants, names)
        points = points_of(config, next(iter(variants.values())), output, overrides)
        _check_tuning(config, points)
    except ConfigError as error:
        raise error.at(recipe) from None
    if (output / NAME).is_file():
        _restore(read_ladder(output / NAME), output)
    return LadderPlan(config, variants, points, output, selected)


def read_config(recipe: str) -> LadderConfig:
    """Read a ladder's recipe, given as a path or a name. Raises UserError if it is invalid."""
    path = find_recipe(recipe)
    values = read_yaml(path, dict[str, Any])
    return build(LadderConfig, values, fix=f"add {{key}} to {path}")


def with_rate(variant: Variant, rate: float) -> Variant:
    """Return the variant with a learning rate."""
    return replace(variant, settings=(*variant.settings, (RATE, rate_text(rate))))


def rate_text(rate: float) -> str:
    """Return a learning rate as it is written in labels, such as `0.002`."""
    return f"{rate:.6g}"


def tuning_directory(point: Path, name: str) -> Path:
    """Return the directory of the comparison of a variant's learning rates."""
    return point / "tuning" / directory_name(name)


def result_file(output: Path, variant: Variant, seed: int) -> Path:
    """Return the file with the results of a run of the comparison in the directory `output`."""
    return run_directory(output, variant, seed) / comparison_file.NAME


def directory_name(name: str) -> str:
    """Return a directory for the name of a size, an amount of text, a task or a variant. It is the
    name itself for names that recipes may use.
    """
    return re.sub(r"^\.|[^\w.+=-]", "-", name)


def _selected(variants: Mapping[str, Variant], names: Sequence[str] | None) -> Sequence[str]:
    """Return the names of the variants to execute. Raises ConfigError for an unknown name."""
    if names is None:
        return list(variants)
    for name in names:
        if name not in variants:
            raise ConfigError(
                "--encodings",
                f"names {name!r}, which is not a variant of the ladder",
                f"choose from {', '.join(variants)}, or add it to the recipe",
            )
    return names


def variants_of(config: LadderConfig) -> dict[str, Variant]:
    """Return the variants by name, in the order of the recipe."""
    variants: dict[str, Variant] = {}
    for name, text in config.variants.items():
        parsed = parse_variants(text)
        if len(parsed) != 1:
            raise ConfigError(f"variants.{name}", f"is {text}", "give one variant")
        if any(key == RATE for key, _ in parsed[0].settings):
            raise ConfigError(
                f"variants.{name}",
                f"sets {RATE}, which the ladder tunes",
                "remove this setting from the variant",
            )
        # Their runs would have the same directories.
        if parsed[0] in variants.values():
            raise ConfigError(f"variants.{name}", f"repeats {text}", "remove one of them")
        variants[name] = parsed[0]
    return variants


def points_of(
    config: LadderConfig, baseline: Variant, output: Path, overrides: Sequence[str]
) -> list[Point]:
    """Return the points in ascending order: by size, then by amount of text; tasks come last."""
    tuned_sizes = config.tuning.sizes or list(config.sizes)
    amounts = config.tokens_per_parameter
    tuned_amounts = config.tuning.tokens_per_parameter or amounts[:1]
    point_of = partial(_point, baseline=baseline, output=output)
    points = []
    for size, size_settings in config.sizes.items():
        recipe = _arguments(config.recipe, config.settings, size_settings)
        for amount in amounts:
            points.append(
                point_of(
                    size,
                    f"{amount:g} tokens per parameter",
                    [*recipe, *overrides],
                    amount=amount,
                    warmup_fraction=config.warmup_fraction,
                    is_tuned=size in tuned_sizes and amount in tuned_amounts,
                    is_checked=size in config.tuning.checked_sizes and amount == tuned_amounts[0],
                )
            )
    for name, task in config.tasks.items():
        for size in task.sizes or ():
            if size not in config.sizes:
                raise ConfigError(
                    f"tasks.{name}.sizes",
                    f"names {size}, which is not a size",
                    f"choose from {', '.join(config.sizes)}",
                )
        # In ascending order, whatever that of the task is.
        sizes = [size for size in config.sizes if size in (task.sizes or config.sizes)]
        for size in sizes:
            recipe = _arguments(task.recipe, config.sizes[size], task.settings)
            # The smallest size of a task is always tuned, since no other rates suit it.
            is_tuned = size in tuned_sizes or size == sizes[0]
            points.append(point_of(size, name, recipe, is_tuned=is_tuned))
    return points


def _arguments(recipe: str, *settings: Settings) -> list[str]:
    """Return a recipe and settings that differ from it as arguments of pretrain.train."""
    arguments = ["--config", recipe]
    for key, value in {key: value for part in settings for key, value in part.items()}.items():
        arguments += [f"--{key}", as_argument(value)]
    return arguments


def _point(
    size: str,
    training: str,
    recipe: list[str],
    *,
    baseline: Variant,
    output: Path,
    is_tuned: bool,
    is_checked: bool = False,
    amount: float | None = None,
    warmup_fraction: float = 0.0,
) -> Point:
    """Return a point. `amount`, in tokens per parameter, determines the number of steps."""
    directory = output / directory_name(size) / directory_name(training)
    config = base_config([*recipe, *baseline.arguments], directory)
    parameters = parameter_count(config.model, kinds=set(KINDS) - {"embeddings", "output"})
    if amount is not None:
        steps = max(1, round(amount * parameters / _tokens(config, 1)))
        recipe = [
            *recipe,
            *("--train.steps", str(steps)),
            *("--schedule.warmup_steps", str(round(warmup_fraction * steps))),
            # The validation loss is measured once, after the last step.
            *("--train.eval_interval", str(steps)),
        ]
        config = base_config([*recipe, *baseline.arguments], directory)
    return Point(
        size=size,
        training=training,
        tokens_per_parameter=amount,
        parameters=parameters,
        tokens=_tokens(config, config.train.steps),
        recipe=recipe,
        directory=directory,
        is_tuned=is_tuned,
        is_checked=is_checked,
    )


def _tokens(config: RunConfig, steps: int) -> int:
    """Return the number of tokens of the first `steps` steps."""
    return config.train.samples_after(steps) * config.model.seq_length


def _check_names(config: LadderConfig) -> None:
    """Raise ConfigError for a name that is no name of a directory, or that --encodings would
    split.
    """
    for key, names in (
        ("sizes", config.sizes),
        ("variants", config.variants),
        ("tasks", config.tasks),
    ):
        for name in names:
            if not re.fullmatch(r"\w[\w.+=-]*", name):
                raise ConfigError(
                    f"{key}.{name}",
                    "has characters that no name may have",
                    "use letters, digits and any of . _ + = - after the first one",
                )


def _check_settings(config: LadderConfig, overrides: Sequence[str]) -> None:
    """Raise ConfigError for settings that would have no effect, since the ladder determines
    them.
    """
    given = [text[2:].partition("=")[0] for text in overrides if text.startswith("--")]
    for settings in (config.settings, *config.sizes.values()):
        given += settings
    for task in config.tasks.values():
        given += [key for key in task.settings if key == RATE]
    for key in given:
        if key in DETERMINED:
            raise ConfigError(
                key,
                "follows from tokens_per_parameter, warmup_fraction or tuning of the ladder",
                "remove it, and change these",
            )


def _check_tuning(config: LadderConfig, points: Sequence[Point]) -> None:
    """Raise ConfigError if sizes, amounts of text, rates or seeds do not fit together."""
    tuning = config.tuning
    for key, seeds in (("seeds", config.seeds), ("tuning.seeds", tuning.seeds)):
        if len(set(seeds)) < len(seeds):
            raise ConfigError(key, f"is {seeds}", "give each seed once")
    for point in points:
        if point.is_tuned and point.is_checked:
            raise ConfigError(
                "tuning.checked_sizes",
                f"names {point.size}, a size with rates of its own",
                "name it either there or in tuning.sizes, whose default is all sizes",
            )
        reason = None
        if point.is_tuned or point.is_checked:
            reason = missing_validation(base_config(point.recipe, point.directory))
        if reason is not None:
            raise ConfigError(
                reason.subjects,
                f"{reason.problem}, but rates are tuned by the validation loss ({point.name})",
                reason.fix,
            )
    for key, named in (("sizes", tuning.sizes or []), ("checked_sizes", tuning.checked_sizes)):
        for size in named:
            if size not in config.sizes:
                raise ConfigError(
                    f"tuning.{key}",
                    f"names {size}, which is not a size",
                    f"choose from {', '.join(config.sizes)}",
                )
    smallest = next(iter(config.sizes))
    if tuning.sizes is not None and smallest not in tuning.sizes:
        raise ConfigError(
            "tuning.sizes",
            f"lacks {smallest}, the smallest size, which has no smaller one to take its rates from",
            f"add {smallest}",
        )
    amounts = config.tokens_per_parameter
    if amounts != sorted(set(amounts)):
        raise ConfigError("tokens_per_parameter", f"is {amounts}", "give ascending numbers")
    tuned_amounts = tuning.tokens_per_parameter
    if tuned_amounts is not None:
        if not set(tuned_amounts) <= set(amounts) or amounts[0] not in tuned_amounts:
            raise ConfigError(
                "tuning.tokens_per_parameter",
                f"is {tuned_amounts}",
                f"choose from {amounts}, and include {amounts[0]:g}, the smallest",
            )
    shared = set(tuning.seeds) & set(config.seeds)
    if shared:
        raise ConfigError(
            ("tuning.seeds", "seeds"),
            f"share {', '.join(map(str, sorted(shared)))}, so the reported runs would be those that"
            " rates were chosen from",
            "use other seeds for tuning",
        )
    rates = tuning.learning_rates
    for lower, higher in zip(rates, rates[1:]):
        if not math.isclose(higher, STEP * lower, rel_tol=0.01):
            raise ConfigError(
                "tuning.learning_rates",
                f"has {lower:g} before {higher:g}",
                "give ascending rates, each twice the one before",
            )
    language = [point for point in points if point.tokens_per_parameter is not None]
    parameters = list(dict.fromkeys(point.parameters for point in language))
    if len(parameters) != len(config.sizes) or parameters != sorted(parameters):
        raise ConfigError(
            "sizes",
            f"have {', '.join(f'{count:,}' for count in parameters)} parameters",
            "order them from the smallest to the largest",
        )


def _is_source(source: Point, point: Point) -> bool:
    """Return whether the rates of `source`, which is not larger, suit `point`: both are trained on
    text, `source` on at most as much of it, or both on the same task.
    """
    if source.tokens_per_parameter is None or point.tokens_per_parameter is None:
        return source.training == point.training
    return source.tokens_per_parameter <= point.tokens_per_parameter


def _with_names(comparison: Comparison, names: Mapping[str, str]) -> Comparison:
    """Return a comparison with other names of its variants, without variants that have none."""
    runs = [
        replace(run, variant=names[run.variant]) for run in comparison.runs if run.variant in names
    ]
    return replace(comparison, baseline=names.get(comparison.baseline, ""), runs=runs)


def _planned(plan: ComparisonPlan, names: Mapping[str, str]) -> Comparison:
    """Return the results of a comparison with other names of its variants, without variants that
    have none and without seeds that are not planned.
    """
    seeds = {run.seed for run in plan.runs}
    runs = [run for run in plan.results.runs if run.seed in seeds]
    return _with_names(replace(plan.results, runs=runs), names)


def _restore(ladder: Ladder, output: Path) -> None:
    """Write the runs of `ladder` into the directories of their points, unless these have results
    already, so that a ladder from another machine continues.
    """
    for point in ladder.points:
        directory = output / directory_name(point.size) / directory_name(point.training)
        labels = {}
        for name, rate in point.learning_rates.items():
            labels[name] = f"{ladder.variants[name]}+{RATE}={rate_text(rate.rate)}"
        _restore_comparison(directory, _with_names(point.comparison, labels))
        for name, comparison in point.tuning.items():
            rates = {run.variant for run in comparison.runs}
            labels = {rate: f"{ladder.variants[name]}+{RATE}={rate}" for rate in rates}
            tuned = tuning_directory(directory, name)
            _restore_comparison(tuned, _with_names(comparison, labels))


def _restore_comparison(directory: Path, comparison: Comparison) -> None:
    """Write the runs of a comparison that its directory lacks into their own directories. As
    results of runs, they are used only if their settings are those of the recipe.
    """
    file = directory / comparison_file.NAME
    known = set()
    if file.is_file():
        known = {run.name for run in comparison_file.read_comparison(file).runs}
    for run in comparison.runs:
        # The name of the directory depends only on the label.
        result = result_file(directory, Variant(run.variant), run.seed)
        if run.name not in known and not result.is_file():
            result.parent.mkdir(parents=True, exist_ok=True)
            comparison_file.write_comparison(result, replace(comparison, runs=[run]))
