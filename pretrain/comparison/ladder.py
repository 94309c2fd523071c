"""Plan a ladder: variants compared at several model sizes and amounts of training, each with a
learning rate that is tuned for it. Does not import torch.

A point of the ladder is a model size, trained on an amount of text or on a synthetic task. At each
point, the reported runs are a comparison like those of one recipe. At the tuned points, each
variant also has a comparison of learning rates, with other seeds.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

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
from megatron_tape.planning.hardware import peak_flops
from megatron_tape.text import counted, duration
from pretrain.comparison.ladder_recipe import (
    RATE,
    STEP,
    LadderConfig,
    Point,
    check_points,
    directory_name,
    points_of,
    read_recipe,
    variants_of,
)
from pretrain.comparison.planned_runs import (
    ComparisonPlan,
    PlannedRun,
    Variant,
    base_config,
    plan_comparison,
    recipe_tasks,
    run_directory,
)

MOST_RATES = 12
"""Maximum number of learning rates up to which a grid is extended."""
CORE_FLOPS = 3e10
"""FLOP/s of a CPU core, for estimates before any run is finished. A server's core reaches 20 to 60
GFLOP/s with small models."""
GPU_FRACTION = 0.2
"""Fraction of a GPU's peak for these estimates."""
START_SECONDS = 15.0
"""Time that a run takes besides its training, mostly to import libraries and to evaluate."""


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
    def is_at_end(self) -> bool:
        """Whether the best rate is the first or the last of the grid, or all rates are equally
        good.
        """
        return self.best in (self.rates[0], self.rates[-1])

    @property
    def missing_rate(self) -> float | None:
        """The rate to add because the best one is the first or the last of the grid.

        None if the best rate is not at the end, or more rates would not help: if there are many
        already, or all of them have the same loss.
        """
        losses = self.losses
        if not self.is_at_end or len(losses) >= MOST_RATES:
            return None
        # Lower rates may help if all of these diverged.
        is_flat = len(set(losses.values())) == 1 and math.isfinite(losses[self.best])
        if is_flat:
            return None
        if self.best == self.rates[0]:
            return self.rates[0] / STEP
        return self.rates[-1] * STEP

    def extend(self) -> None:
        """Add the missing rate to the grid."""
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
        self._checks: dict[tuple[str, str], Tuning] = {}
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
        for point in self.points:
            variants = []
            for name, variant in self.variants.items():
                rate = self.rate(point, name) or self.config.tuning.learning_rates[0]
                variants.append(with_rate(variant, rate))
                if point.is_checked:
                    self._plan_check(point, name, rate)
            plan = self.reported.get(point.name)
            # Planning takes longer than looking for results.
            if plan is not None and plan.variants == variants:
                plan.collect()
                continue
            evaluation = recipe_tasks(base_config(point.recipe, point.directory))
            self.reported[point.name] = plan_comparison(
                point.directory,
                variants,
                self.config.seeds,
                point.recipe,
                evaluation,
                where=point.name,
            )

    def _plan_check(self, point: Point, name: str, rate: float) -> None:
        """Plan the runs that try half and twice the rate of a variant at a point."""
        rates = [rate / STEP, rate, rate * STEP]
        check = self._checks.get((point.name, name))
        if check is not None and check.rates == rates:
            check.plan.collect()
            return
        variant = self.variants[name]
        seeds = self.config.tuning.seeds
        self._checks[point.name, name] = Tuning(point, name, variant, rates, seeds)

    @property
    def checks(self) -> list[Tuning]:
        """The checks of rates at other points than those where they were tuned."""
        return list(self._checks.values())

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
        return all(tuning.best is not None and not tuning.is_at_end for tuning in self.tunings)

    def require_complete_grids(self, tunings: Sequence[Tuning] | None = None) -> None:
        """Raise ConfigError if the best learning rate of a tuning is at the end of its grid.

        `tunings` are those to look at; None stands for all.
        """
        at_end = [tuning for tuning in tunings or self.tunings if tuning.is_at_end]
        if not at_end:
            return
        named = [f"{tuning.best:g} of {tuning.name} ({tuning.point.name})" for tuning in at_end]
        problem = f"ends at the best rate: {'; '.join(named)}"
        rates = {tuning.missing_rate for tuning in at_end}
        if None in rates:
            raise ConfigError(
                "tuning.learning_rates",
                problem,
                "look at the losses of these rates: if they are equal, the models learn nothing"
                " and need more tokens_per_parameter or other settings",
            )
        raise ConfigError(
            "tuning.learning_rates",
            problem,
            f"add {', '.join(map(rate_text, sorted(rates)))} to the recipe, or give --extend-grid",
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
        """The runs of checks, then the reported runs, ordered by seed."""
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
        """Return the numbers of tunings and runs, the directory, and the steps of each point."""
        count = len(self.runs)
        lines = [
            f"{counted(len(self.tunings), 'tuning')} of learning rates"
            f" ({counted(len(self.tuning_runs), 'run')}),"
            f" {counted(len(self.final_runs), 'other run')},"
            f" {count - len(self.unfinished)} of {count} finished, output in {self.output}"
        ]
        for point in self.points:
            lines.append(
                f"  {point.name}: {counted(point.parameters, 'parameter')},"
                f" {counted(point.steps, 'step')}, {counted(point.tokens, 'token')}"
            )
        return "\n".join(lines)

    def estimate(self, devices: int, gpu_model: str | None) -> str:
        """Return what the runs that are not finished take, on `devices` devices of the model
        `gpu_model`, or on as many CPU cores if it is None.
        """
        unfinished = self.unfinished
        flops = sum(run.flops for run in unfinished)
        text = f"not finished: {flops:.2g} FLOPs of training"
        kind = "CPU core" if gpu_model is None else "GPU"
        speed = self._measured_speed()
        basis = "the speed of the finished runs:"
        if speed is None:
            speed = CORE_FLOPS
            if gpu_model is not None:
                peak = peak_flops(gpu_model)
                if peak is None:
                    return text
                speed = GPU_FRACTION * peak
            basis = "assuming"
        seconds = (len(unfinished) * START_SECONDS + flops / speed) / devices
        return (
            f"{text}, about {duration(seconds)} on {counted(devices, kind)} ({basis}"
            f" {speed / 1e9:.2g} GFLOP/s)"
        )

    def _measured_speed(self) -> float | None:
        """Return the FLOP/s of the training of finished runs; None without any."""
        flops = 0
        seconds = 0.0
        for plan in self.comparisons:
            finished = {run.name: run.seconds for run in plan.results.runs}
            for run in plan.runs:
                name = (run.variant.label, run.seed)
                # Short runs consist of little but their start.
                if finished.get(name, 0) > 2 * START_SECONDS:
                    flops += run.flops
                    seconds += finished[name] - START_SECONDS
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
    try:
        config = read_recipe(recipe)
        variants = variants_of(config)
        selected = _selected(variants, names)
        points = points_of(config, next(iter(variants.values())), output, overrides)
        check_points(config, points)
    except ConfigError as error:
        raise error.at(recipe) from None
    if (output / NAME).is_file():
        _restore(read_ladder(output / NAME), output)
    return LadderPlan(config, variants, points, output, selected)


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
