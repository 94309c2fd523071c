"""Plan the runs of a comparison, and validate all of them before the first one starts. Does not
import torch.
"""

import argparse
import dataclasses
import hashlib
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_tape import command_line
from megatron_tape.checkpoint.saved_settings import checked_start_checkpoint
from megatron_tape.checks import Level, check
from megatron_tape.checks.arguments import parse_run_config
from megatron_tape.config.schema import RunConfig
from megatron_tape.config.sections import as_dict
from megatron_tape.data.indexed_dataset import dataset_paths
from megatron_tape.data.inputs import missing_validation
from megatron_tape.errors import ConfigError
from megatron_tape.evaluation import comparison_file
from megatron_tape.evaluation.comparison_file import NAME, Comparison, FinishedRun
from megatron_tape.evaluation.model_source import model_of_run
from megatron_tape.evaluation.results import read_results
from megatron_tape.evaluation.runner import hardware
from megatron_tape.evaluation.task import Task
from megatron_tape.io.files import fingerprint
from megatron_tape.io.records import read_yaml
from megatron_tape.io.versions import versions_with_commit
from megatron_tape.planning.flops import flops_per_token
from megatron_tape.position import ENCODINGS, encoding_of
from megatron_tape.run.curves import SETTINGS, read_run
from pretrain import evaluate

OPTION = "--encodings"
MOST_SEEDS = 1000
"""Maximum number of seeds per variant."""
_LEARNING = ("optimizer", "schedule")
"""Sections other than `model` whose settings may differ between variants; their keys include the
section.
"""
_LONGEST_DIRECTORY = 120
"""Maximum characters of a variant's directory name, not counting the digest."""


@dataclass(frozen=True)
class Variant:
    """An encoding and the settings that differ from the recipe's, as pairs of key and value.

    A key is a setting of `model` or of the encoding without its section, or a full `optimizer.key`
    or `schedule.key`.
    """

    encoding: str
    settings: tuple[tuple[str, str], ...] = ()

    @property
    def label(self) -> str:
        """The variant as in `--encodings`, such as `tape+token_mixing=per_head`."""
        return "+".join([self.encoding, *(f"{key}={value}" for key, value in self.settings)])

    @property
    def directory(self) -> str:
        """The label as a name of a directory. If characters were replaced or cut, it ends in a
        digest of the label.
        """
        # File systems limit names to 255 bytes.
        safe = re.sub(r"[^\w.+=-]", "_", self.label, flags=re.ASCII)[:_LONGEST_DIRECTORY]
        if safe == self.label:
            return safe
        return f"{safe}-{hashlib.sha256(self.label.encode()).hexdigest()[:8]}"

    @property
    def arguments(self) -> list[str]:
        """The variant's settings as arguments `--section.key value` of pretrain.train."""
        field_names = {
            field.name for field in dataclasses.fields(ENCODINGS[self.encoding].Settings)
        }
        arguments = ["--model.position_encoding", self.encoding]
        for key, value in self.settings:
            # A variant names its settings without the section, except those of the learning.
            if key.partition(".")[0] in _LEARNING:
                section = ""
            elif key in field_names:
                section = "model.position."
            else:
                section = "model."
            arguments += [f"--{section}{key}", value]
        return arguments


@dataclass(frozen=True)
class PlannedRun:
    """The run of one variant with one seed.

    `arguments` are those of pretrain.train, and `config` is the configuration that they give.
    `evaluation_arguments` are those of pretrain.evaluate.
    """

    variant: Variant
    seed: int
    directory: Path
    config: RunConfig
    arguments: list[str]
    evaluation_arguments: list[str] | None
    """None if no tasks are evaluated."""
    where: str = ""
    """Text before the name, such as the point of a ladder."""
    may_diverge: bool = False
    """Whether the run counts as finished, without a validation loss, if its training diverges."""

    @property
    def name(self) -> str:
        """Name of the run in messages."""
        parts = [self.where, self.variant.label, f"seed {self.seed}"]
        return ", ".join(part for part in parts if part)

    @property
    def phases(self) -> list[tuple[str, str, list[str]]]:
        """The programs that the run consists of, in order: name of the phase, module, and
        arguments.
        """
        phases = [("training", "pretrain.train", self.arguments)]
        if self.evaluation_arguments is not None:
            phases.append(("evaluation", "pretrain.evaluate", self.evaluation_arguments))
        return phases

    @property
    def flops(self) -> int:
        """FLOPs of the training."""
        train = self.config.train
        tokens = train.samples_after(train.steps) * self.config.model.seq_length
        return flops_per_token(self.config.model) * tokens

    @property
    def log(self) -> Path:
        return self.directory / "log.txt"

    @property
    def result(self) -> Path:
        """The file with the run's results, which exists when the run is finished."""
        return self.directory / NAME


@dataclass(frozen=True)
class ComparisonPlan:
    """All runs of a comparison, and `results`, those of the runs that are finished.

    `base` is the configuration of the recipe; `tasks` are the tasks that each run is evaluated on.
    """

    output: Path
    runs: list[PlannedRun]
    base: RunConfig
    tasks: list[Task]
    results: Comparison

    @property
    def variants(self) -> list[Variant]:
        """The variants, in order."""
        return list(dict.fromkeys(run.variant for run in self.runs))

    @property
    def unfinished(self) -> list[PlannedRun]:
        """The runs that are not finished."""
        finished = {run.name for run in self.results.runs}
        return [run for run in self.runs if (run.variant.label, run.seed) not in finished]

    def record(self, run: PlannedRun, seconds: float, gpu_model: str | None) -> None:
        """Write the results of a run whose phases took `seconds` to `run.result`, and add them to
        `results`.

        `gpu_model` is the model name of the GPU; None stands for the CPU.
        """
        scores = []
        if run.evaluation_arguments is not None:
            # The names of evaluations have leading zeros, so the last name is the last step.
            evaluations = (run.directory / "evaluation").glob("step-*")
            newest = max(evaluations, default=run.directory)
            results_by_task = read_results(newest).tasks
            for task in self.tasks:
                scores += results_by_task[task.name].scores

        scores += comparison_file.training_scores(run.config, read_run(run.directory))

        files = [file for task in self.tasks for file in task.inputs()]
        for prefix in run.config.data.prefixes:
            files += dataset_paths(prefix)
        finished = FinishedRun(
            run.variant.label,
            run.seed,
            scores,
            seconds,
            created=time.time(),
            hardware=gpu_model or hardware(device=None),
            versions=versions_with_commit(),
            data={str(file): fingerprint(file) for file in files},
        )
        # The file of a run is a comparison that contains only this run.
        comparison_file.write_comparison(run.result, replace(self.results, runs=[finished]))
        self.results.runs.append(finished)

    def collect(self) -> None:
        """Add the results of runs that other processes, such as tasks of a job array, have
        finished.

        A run whose results cannot be read counts as not finished. Raises FileError if results were
        made with other settings.
        """
        for run in self.runs:
            if not run.result.is_file():
                continue
            # Read here only to see whether it is readable: the errors of `add_runs` are not caught.
            try:
                comparison_file.read_comparison(run.result)
            except (ValueError, OSError) as error:
                command_line.log(f"warning: {run.name} counts as not finished: {error}")
            else:
                comparison_file.add_runs(self.results, run.result, self.base)


def make_plan(options: argparse.Namespace, overrides: list[str]) -> ComparisonPlan:
    """Return the plan for the options of the command line.

    `overrides` are arguments `--section.key value`, which change settings of the recipe.
    Raises UserError like `plan_comparison`.
    """
    variants = parse_variants(options.encodings)
    seeds = parse_seeds(options.seeds or "3")
    output = Path(options.output or f"runs/compare/{Path(options.recipe).stem}")
    recipe = ["--config", options.recipe, *overrides]
    base = base_config(recipe, output)
    if options.evaluation is None:
        evaluation = recipe_tasks(base)
    else:
        evaluation = ["--config", options.evaluation]
        if options.trust_remote_code:
            evaluation.append("--trust-remote-code")
    if evaluation is None:
        _require_scores(base)
    return plan_comparison(output, variants, seeds, recipe, evaluation)


def base_config(recipe: list[str], output: Path) -> RunConfig:
    """Return the settings that the runs of a comparison have in common.

    Each run changes the settings of its variant, the seed and the directories. `recipe` are the
    arguments of pretrain.train that all runs share. Raises UserError if they are invalid.
    """
    base = parse_run_config([*recipe, "--train.seed", "0", "--logging.directory", str(output)])
    if base.checkpoint.directory != base.default_checkpoint_directory:
        raise ConfigError(
            "checkpoint.directory",
            f"is {base.checkpoint.directory}, but runs of a comparison cannot share a directory",
            "remove this setting",
        )
    return base


def plan_comparison(
    output: Path,
    variants: Sequence[Variant],
    seeds: Sequence[int],
    recipe: list[str],
    evaluation: list[str] | None,
    where: str = "",
    may_diverge: bool = False,
) -> ComparisonPlan:
    """Return the plan of a comparison, with the results of its runs that are finished.

    Args:
        output: the directory of the comparison.
        variants: the variants; the first one is the baseline.
        seeds: the seeds of each variant.
        recipe: the arguments of pretrain.train that all runs share.
        evaluation: the arguments of pretrain.evaluate; None evaluates no tasks.
        where: text before the names of the runs.
        may_diverge: whether runs count as finished if their training diverges.

    Raises:
        UserError: the settings of a run are invalid, or differ from those of existing results.
    """
    base = base_config(recipe, output)
    check(base, Level.START, processes=1, extends=False)
    tasks = []
    if evaluation is not None:
        # The parser requires --model, but only the tasks are used here.
        _, tasks = evaluate.read_command([*evaluation, "--model", str(output)])

    runs = []
    for variant in variants:
        try:
            variant_runs = [
                replace(
                    _plan_run(variant, seed, recipe, base, evaluation),
                    where=where,
                    may_diverge=may_diverge,
                )
                for seed in seeds
            ]
            _check_model(variant_runs[0], tasks)  # seeds do not change what is valid
        except ConfigError as error:
            raise error.at(variant.label) from None
        runs += variant_runs
    # All variants with the first seed come first, so that they can be compared early.
    runs.sort(key=lambda run: run.seed)

    # Results are read from the file with all of them first, and then from the directories of the
    # runs, which may be missing: runs may have been executed on another machine.
    results = comparison_file.empty_comparison(base, tasks, variants[0].label)
    if (output / NAME).is_file():
        comparison_file.add_runs(results, output / NAME, base)
    plan = ComparisonPlan(output, runs, base, tasks, results)
    plan.collect()
    return plan


def parse_variants(text: str) -> list[Variant]:
    """Parse the value of `--encodings`, which separates variants by commas outside {} and [].

    Raises ConfigError for an unknown encoding, a setting without a value and a repeated variant.
    """
    # A comma is inside brackets, as in tape+x=[1,2], if a closing bracket follows it without an
    # opening one between them.
    variants = [_parse_variant(item.strip()) for item in re.split(r",(?![^{[]*[]}])", text)]
    for variant in variants:
        if variants.count(variant) > 1:
            raise ConfigError(OPTION, f"names {variant.label} twice", "remove one")
    return variants


def _parse_variant(text: str) -> Variant:
    """Parse a variant such as `tape+token_mixing=per_head`. Raises ConfigError if it is invalid."""
    encoding, *items = re.split("\\+(?![0-9])", text)  # the + of 1e+3 does not separate settings
    if encoding not in ENCODINGS:
        raise ConfigError(
            OPTION,
            f"names {encoding!r}, which is not an encoding",
            f"choose from {', '.join(ENCODINGS)}",
        )
    settings = {}
    for item in items:
        key, _, value = item.partition("=")
        if not value or key in (*settings, "position_encoding"):
            raise ConfigError(
                OPTION,
                f"names {text}, where {item!r} has no value or sets {key} again",
                "write each setting once, as setting=value",
            )
        settings[key] = value
    return Variant(encoding, tuple(settings.items()))


def parse_seeds(text: str) -> range:
    """Parse the value of `--seeds`: N for the seeds 1 to N, or A-B for A to B.

    Raises ConfigError if it is neither.
    """
    match = re.fullmatch("(?:([0-9]{1,9})-)?([0-9]{1,9})", text)
    if match:
        seeds = range(int(match[1] or 1), int(match[2]) + 1)
        # More seeds are a mistake, such as giving a seed instead of the number of seeds.
        if seeds.start >= 1 and 1 <= len(seeds) <= MOST_SEEDS:
            return seeds
    raise ConfigError(
        "--seeds",
        f"is {text}",
        "give a number such as 5, for the seeds 1 to 5, or a range such as 4-9, of at most"
        f" {MOST_SEEDS} seeds",
    )


def run_directory(output: Path, variant: Variant, seed: int) -> Path:
    """Return the directory of a run of the comparison in the directory `output`."""
    return output / variant.directory / f"seed-{seed}"


def _plan_run(
    variant: Variant, seed: int, recipe: list[str], base: RunConfig, evaluation: list[str] | None
) -> PlannedRun:
    """Return the run of a variant with one seed.

    `recipe` are the arguments of pretrain.train that all runs share, `base` the configuration that
    they give, and `evaluation` the arguments of pretrain.evaluate, or None without tasks.

    Raises UserError for invalid settings, and if the run has started with other settings.
    """
    directory = run_directory(Path(base.logging.directory), variant, seed)
    arguments = [*recipe, *variant.arguments]
    # pretrain.evaluate evaluates the tasks, so training must not.
    for task in base.evaluation.enabled_tasks():
        arguments += [f"--evaluation.{task}", "null"]
    arguments += ["--train.seed", str(seed), "--logging.directory", str(directory)]
    config = parse_run_config(arguments)
    # A run that has started continues only with the same settings.
    if (directory / SETTINGS).is_file():
        saved = read_yaml(directory / SETTINGS, comparison_file.Settings)
        differences = comparison_file.changed_settings(saved, config)
        comparison_file.refuse_changed(directory, differences)
        checked_start_checkpoint(config)  # raises ConfigError if the run cannot continue

    if evaluation is not None:
        label = f"{variant.label}, seed {seed}"
        evaluation = [*evaluation, "--model", str(directory), "--label", label]
    return PlannedRun(variant, seed, directory, config, arguments, evaluation)


def recipe_tasks(base: RunConfig) -> list[str] | None:
    """Return the tasks of the recipe `base` and their settings as arguments of pretrain.evaluate,
    or None if there are no tasks.

    Raises ConfigError if the recipe trains on a task without evaluating it.
    """
    tasks = base.evaluation.enabled_tasks()
    if not tasks and base.data.generator is not None:
        task = base.data.generator.task
        raise ConfigError(
            "evaluation",
            f"is not set, but the recipe trains on {task}, and only a task can evaluate that",
            f"add evaluation: {{{task}: {{...}}}} to the recipe, or give --evaluation FILE.yaml",
        )
    arguments = list(tasks)
    for name, settings in tasks.items():
        for key, value in as_dict(settings).items():
            arguments += [f"--{name}.{key}", as_argument(value)]
    return arguments or None


def as_argument(value: Any) -> str:
    """Return a setting's value as it is written on the command line."""
    # The parser reads values as YAML, which includes JSON. Quotes would stay in a text.
    return value if isinstance(value, str) else json.dumps(value)


def _require_scores(base: RunConfig) -> None:
    """Raise ConfigError if runs of the recipe `base` have no validation loss. Without tasks,
    nothing else can be compared.
    """
    if reason := missing_validation(base):
        raise ConfigError(
            reason.subjects,
            f"{reason.problem}, and there are no tasks: nothing can be compared",
            f"{reason.fix}, or give --evaluation FILE.yaml",
        )


def _check_model(run: PlannedRun, tasks: Sequence[Task]) -> None:
    """Raise ConfigError if one process cannot train the model of a run, or pretrain.evaluate cannot
    evaluate it on the tasks.
    """
    config = run.config
    check(config, Level.SETTINGS, processes=1, extends=False)
    if not tasks:
        return
    if encoding_of(config.model).exports_to is None:
        raise ConfigError(
            "model.position_encoding",
            f"is {config.model.position_encoding}, which cannot be exported and therefore cannot be"
            " evaluated",
            "remove it from --encodings",
        )
    model_source = model_of_run(config)
    for task in tasks:
        evaluate.check_task(task, model_source)
