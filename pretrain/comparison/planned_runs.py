"""Plan the runs of a comparison, and validate all of them before the first one starts. Does not
import torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import re
import time
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_tape.checkpoint.saved_settings import check_start
from megatron_tape.checks import Level, check
from megatron_tape.checks.arguments import parse_run_config
from megatron_tape.config.data import blend
from megatron_tape.config.schema import ModelConfig, OptimizerConfig, RunConfig, ScheduleConfig
from megatron_tape.config.sections import as_dict, settings_of
from megatron_tape.data.indexed_dataset import dataset_paths
from megatron_tape.data.inputs import missing_validation
from megatron_tape.errors import ConfigError, FileError
from megatron_tape.evaluation import comparison_file
from megatron_tape.evaluation.comparison_file import NAME, Comparison, FinishedRun
from megatron_tape.evaluation.model_source import model_of_run
from megatron_tape.evaluation.results import NAME as RESULTS
from megatron_tape.evaluation.results import read_results
from megatron_tape.evaluation.runner import hardware
from megatron_tape.evaluation.task import Task
from megatron_tape.io.files import fingerprint
from megatron_tape.io.records import read_yaml
from megatron_tape.io.versions import versions_with_commit
from megatron_tape.planning.flops import flops_per_token
from megatron_tape.planning.parameters import parameter_count
from megatron_tape.position import ENCODINGS, encoding_of
from megatron_tape.run.curves import SETTINGS, read_run
from megatron_tape.run.metrics import TOKENS_PER_SECOND, VALIDATION_LOSS
from pretrain import evaluate

MOST_SEEDS = 1000
"""Maximum number of seeds per variant."""
OPTION = "--encodings"
_LEARNING = {"optimizer": OptimizerConfig, "schedule": ScheduleConfig}
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
        safe = re.sub(r"[^\w.+=-]", "_", self.label, flags=re.ASCII)
        if safe == self.label and len(safe) <= _LONGEST_DIRECTORY:
            return safe
        return f"{safe[:_LONGEST_DIRECTORY]}-{hashlib.sha256(self.label.encode()).hexdigest()[:8]}"

    @property
    def arguments(self) -> list[str]:
        """The variant's settings as arguments `--section.key value` of pretrain.train."""
        pairs = (("position_encoding", self.encoding), *self.settings)
        return [
            text for key, value in pairs for text in (f"--{_dotted(key, self.encoding)}", value)
        ]


@dataclass(frozen=True)
class PlannedRun:
    """The run of one variant with one seed.

    `arguments` are those of pretrain.train, `evaluation` those of pretrain.evaluate; `config`
    results from `arguments`.
    """

    variant: Variant
    seed: int
    directory: Path
    config: RunConfig
    arguments: list[str]
    evaluation: list[str] | None
    """None if no tasks are evaluated."""

    @property
    def name(self) -> str:
        return f"{self.variant.label}, seed {self.seed}"

    @property
    def stages(self) -> list[tuple[str, str, list[str]]]:
        """The programs that the run consists of, in order: name of the stage, module, and
        arguments.
        """
        stages = [("training", "pretrain.train", self.arguments)]
        return stages + (
            [("evaluation", "pretrain.evaluate", self.evaluation)] if self.evaluation else []
        )

    @property
    def log(self) -> Path:
        return self.directory / "log.txt"

    @property
    def result(self) -> Path:
        """The file with the run's results, which exists when the run is finished."""
        return self.directory / NAME


@dataclass(frozen=True)
class ComparisonPlan:
    """All runs of a comparison, and `known`, the results of those that are finished.

    `base` is the configuration of the recipe; `tasks` are the tasks that each run is evaluated on.
    """

    output: Path
    runs: list[PlannedRun]
    base: RunConfig
    tasks: list[Task]
    known: Comparison

    @property
    def left(self) -> list[PlannedRun]:
        """The runs that are not finished."""
        finished = {run.name for run in self.known.runs}
        return [run for run in self.runs if (run.variant.label, run.seed) not in finished]

    def record(self, run: PlannedRun, seconds: float, device: str | None) -> None:
        """Write the results of a run whose stages took `seconds` to `run.result`, and add them to
        `known`.

        `device` is the model name of the GPU; None stands for the CPU. Raises FileError if a task
        has no results.
        """
        trained = read_run(run.directory)
        model = run.config.model
        validated = trained.curve(VALIDATION_LOSS).last
        if validated and validated[0] == run.config.train.steps:
            loss = validated[1]
        else:
            loss = None
        speed = trained.curve(TOKENS_PER_SECOND).median
        scores = comparison_file.training_scores(
            run.config, speed, loss, parameter_count(model), flops_per_token(model)
        )
        if run.evaluation is not None:
            newest = max((run.directory / "evaluation").glob("step-*"), default=run.directory)
            tasks = read_results(newest).tasks
            missing = [task.name for task in self.tasks if task.name not in tasks]
            if missing:
                raise FileError(
                    str(newest / RESULTS),
                    f"has no results of the task {missing[0]}",
                    "evaluate it again",
                )
            scores = [score for task in self.tasks for score in tasks[task.name].scores] + scores
        files = [
            file for prefix in blend(run.config.data.prefix)[0] for file in dataset_paths(prefix)
        ]
        files += [file for task in self.tasks for file in task.inputs()]
        finished = FinishedRun(
            run.variant.label,
            run.seed,
            scores,
            seconds,
            time.time(),
            device or hardware(None),
            versions_with_commit(),
            {str(file): fingerprint(file) for file in files},
        )
        comparison_file.write_comparison(run.result, replace(self.known, runs=[finished]))
        self.known.runs.append(finished)

    def collect(self) -> None:
        """Add the results of runs that other processes, such as tasks of a job array, have
        finished.
        """
        for run in self.runs:
            if run.result.is_file():
                comparison_file.add_runs(self.known, run.result, self.base)


def make_plan(options: argparse.Namespace, overrides: list[str]) -> ComparisonPlan:
    """Return the plan for the command line `options` and `overrides` (see `compare.read_command`).

    Raises UserError if the settings of a run are invalid, or differ from those of existing results.
    """
    variants = parse_variants(options.encodings)
    seeds = parse_seeds(options.seeds)
    output = Path(options.output or f"runs/compare/{Path(options.recipe).stem}")
    base = _read(
        options.recipe, overrides, ["--train.seed", "0", "--logging.directory", str(output)]
    )
    is_set = base.checkpoint.directory != base.default_checkpoint_directory
    problem = f"is {base.checkpoint.directory}, but runs of a comparison cannot share a directory"
    if is_set:
        raise ConfigError("checkpoint.directory", problem, "remove this setting")
    evaluation = _evaluation(options, base)
    check(base, Level.START, processes=1, extends=False)
    if evaluation is None and (missing := missing_validation(base)):
        problem = f"{missing.problem}, and there are no tasks: nothing can be compared"
        raise ConfigError(
            missing.subjects, problem, f"{missing.fix}, or give --evaluation FILE.yaml"
        )
    runs = []
    for variant in variants:
        try:
            runs += _runs_of(variant, seeds, options, overrides, base, evaluation)
        except ConfigError as error:
            raise error.at(": ".join(filter(None, (variant.label, error.place)))) from None
    # All variants with the first seed come first, so that they can be compared early.
    runs.sort(key=lambda run: run.seed)
    if evaluation is None:
        tasks = []
    else:
        tasks = evaluate.read_command([*evaluation, "--model", str(output)])[1]
    plan = ComparisonPlan(
        output, runs, base, tasks, comparison_file.empty(base, tasks, variants[0].label)
    )
    if (output / NAME).is_file():
        comparison_file.add_runs(plan.known, output / NAME, base)
    plan.collect()
    return plan


def parse_variants(text: str) -> list[Variant]:
    """Parse the value of `--encodings`, which separates variants by commas outside {} and [].

    Raises ConfigError for an unknown encoding or setting, and for a repeated variant.
    """
    variants = [_parse(item.strip()) for item in re.split(r",(?![^{[]*[]}])", text)]
    for variant in variants:
        if variants.count(variant) > 1:
            raise ConfigError(OPTION, f"names {variant.label} twice", "remove one")
    return variants


def _parse(text: str) -> Variant:
    if not text:
        raise ConfigError(
            OPTION, "has an empty entry", "separate encodings by one comma, as in rope,tape"
        )
    encoding, *items = re.split("\\+(?![0-9])", text)  # the + of 1e+3 does not separate settings
    unknown = encoding not in ENCODINGS
    if unknown:
        raise ConfigError(
            OPTION,
            f"names {encoding}, which is not an encoding",
            f"choose from {', '.join(ENCODINGS)}",
        )
    settings: dict[str, str] = {}
    for item in items:
        key, _, value = item.partition("=")
        if not value:
            raise ConfigError(
                OPTION, f"names {text}, where {item!r} has no value", "write it as setting=value"
            )
        if key in settings:
            raise ConfigError(OPTION, f"names {text}, which sets {key} twice", "remove one")
        _check_key(key, encoding, text)
        settings[key] = value
    return Variant(encoding, tuple(settings.items()))


def _check_key(key: str, encoding: str, text: str) -> None:
    sections = {"model": ModelConfig, **_LEARNING}
    known = {
        setting.key for name, section in sections.items() for setting in settings_of(section, name)
    }
    known -= {"model.position_encoding"}
    owners = [name for name in ENCODINGS if key in _own(name)]
    if not owners and _dotted(key, encoding) not in known:
        problem = f"names {text}, but {key} is not a setting that variants can change"
        raise ConfigError(
            OPTION, problem, "give a setting of the encoding, model, optimizer or schedule"
        )
    if bool(owners) and encoding not in owners:
        raise ConfigError(
            OPTION, f"names {text}, but {key} is not a setting of {encoding}", "remove it"
        )


def _own(encoding: str) -> set[str]:
    return {item.name for item in dataclasses.fields(ENCODINGS[encoding].Settings)}


def _dotted(key: str, encoding: str) -> str:
    """Return the full key `section.key` of a variant's setting."""
    if key.partition(".")[0] in _LEARNING:
        return key
    if key in _own(encoding):
        return f"model.position.{key}"
    return f"model.{key}"


def parse_seeds(text: str) -> range:
    """Parse the value of `--seeds`: N for the seeds 1 to N, or A-B for A to B. Raises ConfigError
    if it is neither.
    """
    first, _, last = text.partition("-") if "-" in text else ("1", "-", text)
    numbers = re.fullmatch("[0-9]{1,9}", first) and re.fullmatch("[0-9]{1,9}", last)
    invalid = not (numbers and 1 <= int(first) <= int(last))
    if invalid:
        raise ConfigError(
            "--seeds",
            f"is {text}",
            "give a number such as 5, for the seeds 1 to 5, or a range such as 4-9",
        )
    seeds = range(int(first), int(last) + 1)
    if len(seeds) > MOST_SEEDS:
        raise ConfigError("--seeds", f"is {text}", f"give at most {MOST_SEEDS} seeds")
    return seeds


def _runs_of(
    variant: Variant,
    seeds: range,
    options: argparse.Namespace,
    overrides: list[str],
    base: RunConfig,
    evaluation: list[str] | None,
) -> list[PlannedRun]:
    """Return the runs of a variant, one per seed, after validating their settings."""
    runs = []
    # pretrain.evaluate evaluates the tasks, so training must not.
    no_tasks = [
        text
        for task in base.evaluation.enabled_tasks()
        for text in (f"--evaluation.{task}", "null")
    ]
    for seed in seeds:
        directory = Path(base.logging.directory) / variant.directory / f"seed-{seed}"
        own = [
            *no_tasks,
            *variant.arguments,
            "--train.seed",
            str(seed),
            "--logging.directory",
            str(directory),
        ]
        config = _read(options.recipe, overrides, own)
        if seed == seeds[0]:
            _check_model(config, evaluation)
        _check_start(directory, config)
        arguments = ["--config", options.recipe, *overrides, *own]
        evaluated = ["--model", str(directory), "--label", f"{variant.label}, seed {seed}"]
        evaluated = None if evaluation is None else [*evaluation, *evaluated]
        runs.append(PlannedRun(variant, seed, directory, config, arguments, evaluated))
    return runs


def _read(recipe: str, overrides: list[str], own: list[str]) -> RunConfig:
    return parse_run_config(["--config", recipe, *overrides, *own])


def _evaluation(options: argparse.Namespace, base: RunConfig) -> list[str] | None:
    """Return the tasks and their settings as arguments of pretrain.evaluate, or None if there are
    no tasks.

    Raises ConfigError if the recipe trains on a task without evaluating it.
    """
    if options.evaluation is not None:
        return [
            "--config",
            options.evaluation,
            *["--trust-remote-code"] * options.trust_remote_code,
        ]
    given = base.evaluation.enabled_tasks()
    if not given and (trained := getattr(base.data.generator, "task", None)) is not None:
        problem = (
            f"is not set, but {options.recipe} trains on {trained}, and only a task can evaluate"
            " that"
        )
        fix = (
            f"add evaluation: {{{trained}: {{...}}}} to the recipe, or give --evaluation FILE.yaml"
        )
        raise ConfigError("evaluation", problem, fix)
    return [
        *given,
        *(text for task, settings in given.items() for text in _as_options(task, settings)),
    ] or None


def _as_options(task: str, settings: object) -> list[str]:
    return [
        text
        for key, value in as_dict(settings).items()
        for text in (f"--{task}.{key}", value if isinstance(value, str) else json.dumps(value))
    ]


def _check_model(config: RunConfig, evaluation: list[str] | None) -> None:
    """Raise ConfigError if one process cannot train a variant, or pretrain.evaluate cannot evaluate
    it.
    """
    check(config, Level.SETTINGS, processes=1, extends=False)
    if evaluation is not None:
        encoding = config.model.position_encoding
        not_exportable = encoding_of(config.model).exports_to is None
        if not_exportable:
            raise ConfigError(
                "model.position_encoding",
                f"is {encoding}, which cannot be exported and therefore cannot be evaluated",
                "remove it from --encodings",
            )
        evaluate.check_evaluation(evaluation, model_of_run(config))


def _check_start(directory: Path, config: RunConfig) -> None:
    """Raise UserError if the directory contains a run with other settings."""
    if not (directory / SETTINGS).is_file():
        return
    saved = read_yaml(directory / SETTINGS, comparison_file.Settings)
    if changed := comparison_file.changed_settings(saved, config):
        problem = f"contains a run with other settings ({comparison_file.first_of(changed)})"
        raise FileError(
            str(directory), problem, "change these settings back, or choose another --output"
        )
    check_start(config)
