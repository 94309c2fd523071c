"""The recipe of a ladder: its settings, their checks, and the points that follow from them.
Does not import torch.
"""

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from megatron_tape.config.recipes import find_recipe
from megatron_tape.config.schema import RunConfig
from megatron_tape.config.sections import build
from megatron_tape.data.inputs import missing_validation
from megatron_tape.errors import ConfigError
from megatron_tape.io.records import read_yaml
from megatron_tape.model.names import KINDS
from megatron_tape.planning.parameters import parameter_count
from megatron_tape.position.encoding import Bounds, Positive
from megatron_tape.text import counted
from pretrain.comparison.planned_runs import Variant, as_argument, base_config, parse_variants

RATE = "optimizer.lr"
"""The setting that is tuned."""
DETERMINED = (
    "train.steps",
    "train.batch_ramp",
    "train.eval_interval",
    "schedule.warmup_steps",
    RATE,
)
"""Settings of language models that follow from the recipe of the ladder."""
STEP = 2.0
"""Ratio of neighboring learning rates."""
FEWEST_STEPS = 10
"""Minimum number of steps of a language model. With fewer, the schedule of the learning rate has
hardly any step at its peak."""
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
    steps: int
    """Steps of a run."""
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


def read_recipe(recipe: str) -> LadderConfig:
    """Read a ladder's recipe, given as a path or a name. Raises UserError if it is invalid."""
    path = find_recipe(recipe)
    values = read_yaml(path, dict[str, Any])
    config = build(LadderConfig, values, fix=f"add {{key}} to {path}")
    _check_names(config)
    _check_seeds(config)
    _check_rates(config)
    _check_sizes(config)
    _check_amounts(config)
    return config


def variants_of(config: LadderConfig) -> dict[str, Variant]:
    """Return the variants by name, in the order of the recipe."""
    variants: dict[str, Variant] = {}
    for name, text in config.variants.items():
        try:
            parsed = parse_variants(text)
        except ConfigError as error:
            raise ConfigError(f"variants.{name}", error.problem, error.fix) from None
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
    """Return the points in ascending order: by size, then by amount of text; tasks come last.

    `overrides` are arguments `--section.key value` for all language models. Raises UserError for
    invalid settings.
    """
    _check_settings(config, overrides)
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
                    f"{amount:g} {'token' if amount == 1 else 'tokens'} per parameter",
                    [*recipe, *overrides],
                    amount=amount,
                    warmup_fraction=config.warmup_fraction,
                    is_tuned=size in tuned_sizes and amount in tuned_amounts,
                    is_checked=size in config.tuning.checked_sizes and amount == tuned_amounts[0],
                )
            )
    for name, task in config.tasks.items():
        # In ascending order, whatever that of the task is.
        sizes = [size for size in config.sizes if size in (task.sizes or config.sizes)]
        for size in sizes:
            recipe = _arguments(task.recipe, config.sizes[size], task.settings)
            # The smallest size of a task is always tuned, since no other rates suit it.
            is_tuned = size in tuned_sizes or size == sizes[0]
            points.append(point_of(size, name, recipe, is_tuned=is_tuned))
    return points


def directory_name(name: str) -> str:
    """Return a directory for the name of a size, an amount of text, a task or a variant. It is the
    name itself for names that recipes may use.
    """
    return re.sub(r"^\.|[^\w.+=-]", "-", name)


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
        steps = round(amount * parameters / _tokens(config, 1))
        if steps < FEWEST_STEPS:
            raise ConfigError(
                "tokens_per_parameter",
                f"has {amount:g}, with which {size} ({parameters:,} parameters) is trained for"
                f" {counted(steps, 'step')} of {_tokens(config, 1):,} tokens",
                f"raise it, or lower train.global_batch_size: at least {FEWEST_STEPS} steps are"
                " needed",
            )
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
        steps=config.train.steps,
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


def _check_seeds(config: LadderConfig) -> None:
    """Raise ConfigError if a seed is repeated, or is both one of tuning and a reported one."""
    for key, seeds in (("seeds", config.seeds), ("tuning.seeds", config.tuning.seeds)):
        if len(set(seeds)) < len(seeds):
            raise ConfigError(key, f"is {seeds}", "give each seed once")
    shared = set(config.tuning.seeds) & set(config.seeds)
    if shared:
        raise ConfigError(
            ("tuning.seeds", "seeds"),
            f"share {', '.join(map(str, sorted(shared)))}, so the reported runs would be those that"
            " rates were chosen from",
            "use other seeds for tuning",
        )


def _check_rates(config: LadderConfig) -> None:
    """Raise ConfigError if a learning rate is not twice the one before."""
    rates = config.tuning.learning_rates
    for lower, higher in itertools.pairwise(rates):
        if not math.isclose(higher, STEP * lower, rel_tol=0.01):
            raise ConfigError(
                "tuning.learning_rates",
                f"has {lower:g} before {higher:g}",
                "give ascending rates, each twice the one before",
            )


def _check_sizes(config: LadderConfig) -> None:
    """Raise ConfigError if tuning or a task names an unknown size, if a size is both tuned and
    checked, or if the smallest one is not tuned.
    """
    tuning = config.tuning
    named = {"tuning.sizes": tuning.sizes, "tuning.checked_sizes": tuning.checked_sizes}
    named |= {f"tasks.{name}.sizes": task.sizes for name, task in config.tasks.items()}
    for key, sizes in named.items():
        for size in sizes or ():
            if size not in config.sizes:
                raise ConfigError(
                    key,
                    f"names {size}, which is not a size",
                    f"choose from {', '.join(config.sizes)}",
                )

    for size in tuning.checked_sizes:
        if size in (tuning.sizes or config.sizes):
            raise ConfigError(
                "tuning.checked_sizes",
                f"names {size}, a size with rates of its own",
                "name it either there or in tuning.sizes, whose default is all sizes",
            )
    smallest = next(iter(config.sizes))
    if tuning.sizes is not None and smallest not in tuning.sizes:
        raise ConfigError(
            "tuning.sizes",
            f"lacks {smallest}, the smallest size, which has no smaller one to take its rates from",
            f"add {smallest}",
        )


def _check_amounts(config: LadderConfig) -> None:
    """Raise ConfigError if amounts of text do not ascend, or the smallest one is not tuned."""
    amounts = config.tokens_per_parameter
    if amounts != sorted(set(amounts)):
        raise ConfigError("tokens_per_parameter", f"is {amounts}", "give ascending numbers")
    tuned = config.tuning.tokens_per_parameter
    if tuned is not None and not (set(tuned) <= set(amounts) and amounts[0] in tuned):
        raise ConfigError(
            "tuning.tokens_per_parameter",
            f"is {tuned}",
            f"choose from {amounts}, and include {amounts[0]:g}, the smallest",
        )


def check_points(config: LadderConfig, points: Sequence[Point]) -> None:
    """Raise ConfigError if sizes do not ascend, or a point at which rates are tried has no
    validation loss.
    """
    language = [point for point in points if point.tokens_per_parameter is not None]
    parameters = list(dict.fromkeys(point.parameters for point in language))
    if len(parameters) != len(config.sizes) or parameters != sorted(parameters):
        raise ConfigError(
            "sizes",
            f"have {', '.join(f'{count:,}' for count in parameters)} parameters",
            "order them from the smallest to the largest",
        )
    for point in points:
        if not point.is_tuned and not point.is_checked:
            continue
        reason = missing_validation(base_config(point.recipe, point.directory))
        if reason is not None:
            raise ConfigError(
                reason.subjects,
                f"{reason.problem}, but rates are tuned by the validation loss ({point.name})",
                reason.fix,
            )
