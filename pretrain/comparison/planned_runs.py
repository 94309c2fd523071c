"""Plan the runs of a comparison, and check all of them before the first begins. Imports no torch."""

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
from megatron_tape.errors import ConfigError, FileError, refuse
from megatron_tape.evaluation import comparison_file
from megatron_tape.evaluation.comparison_file import NAME, Comparison, FinishedRun
from megatron_tape.evaluation.model_source import made_by
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
OPTION = "--encodings"
_LEARNING = {"optimizer": OptimizerConfig, "schedule": ScheduleConfig}
"""Sections other than `model` whose settings may differ between variants; their keys include the section."""
_LONGEST_DIRECTORY = 120


@dataclass(frozen=True)
class Variant:
    """An encoding with changed settings: pairs of a key of `model`, of the encoding or `section.key`, and its text."""

    encoding: str
    settings: tuple[tuple[str, str], ...] = ()

    @property
    def label(self) -> str:
        return "+".join([self.encoding, *(f"{key}={value}" for key, value in self.settings)])

    @property
    def directory(self) -> str:
        """The label as a directory name; a changed or shortened one ends in a digest of the label."""
        safe = re.sub(r"[^\w.+=-]", "_", self.label, flags=re.ASCII)
        if safe == self.label and len(safe) <= _LONGEST_DIRECTORY:
            return safe
        return f"{safe[:_LONGEST_DIRECTORY]}-{hashlib.sha256(self.label.encode()).hexdigest()[:8]}"

    @property
    def arguments(self) -> list[str]:
        given = (("position_encoding", self.encoding), *self.settings)
        return [text for key, value in given for text in (f"--{_dotted(key, self.encoding)}", value)]


@dataclass(frozen=True)
class PlannedRun:
    """One variant with one seed; `arguments` are for pretrain.train, `evaluation` for pretrain.evaluate."""

    variant: Variant
    seed: int
    directory: Path
    config: RunConfig
    arguments: list[str]
    evaluation: list[str] | None
    """None if only the validation loss is compared."""

    @property
    def name(self) -> str:
        return f"{self.variant.label}, seed {self.seed}"

    @property
    def stages(self) -> list[tuple[str, str, list[str]]]:
        """Name, module and arguments of each stage, in order."""
        stages = [("training", "pretrain.train", self.arguments)]
        return stages + ([("evaluation", "pretrain.evaluate", self.evaluation)] if self.evaluation else [])

    @property
    def log(self) -> Path:
        return self.directory / "log.txt"

    @property
    def result(self) -> Path:
        """The results file, which exists once the run is finished."""
        return self.directory / NAME


@dataclass(frozen=True)
class Plan:
    """All runs of a comparison, and the results so far."""

    output: Path
    runs: list[PlannedRun]
    base: RunConfig
    tasks: list[Task]
    known: Comparison

    @property
    def left(self) -> list[PlannedRun]:
        """Runs that are not finished."""
        finished = {run.name for run in self.known.runs}
        return [run for run in self.runs if (run.variant.label, run.seed) not in finished]

    def record(self, run: PlannedRun, seconds: float, device: str | None) -> None:
        """Record the results of a trained and evaluated run; `device` is the name of the GPU, if any.

        Raises FileError if the evaluation left no results of a task.
        """
        trained, model = read_run(run.directory), run.config.model
        validated = trained.curve(VALIDATION_LOSS).last
        loss = validated[1] if validated and validated[0] == run.config.train.steps else None
        speed = trained.curve(TOKENS_PER_SECOND).median
        scores = comparison_file.training_scores(
            run.config, speed, loss, parameter_count(model), flops_per_token(model)
        )
        if run.evaluation is not None:
            newest = max((run.directory / "evaluation").glob("step-*"), default=run.directory)
            tasks = read_results(newest).tasks
            missing = [task.name for task in self.tasks if task.name not in tasks]
            if missing:
                raise FileError(str(newest / RESULTS), f"lacks {missing[0]}, which was evaluated", "evaluate again")
            scores = [score for task in self.tasks for score in tasks[task.name].scores] + scores
        files = [file for prefix in blend(run.config.data.prefix)[0] for file in dataset_paths(prefix)]
        files += [file for task in self.tasks for file in task.inputs()]
        made = FinishedRun(
            run.variant.label,
            run.seed,
            scores,
            seconds,
            time.time(),
            device or hardware(None),
            versions_with_commit(),
            {str(file): fingerprint(file) for file in files},
        )
        comparison_file.write_comparison(run.result, replace(self.known, runs=[made]))
        self.known.runs.append(made)

    def collect(self) -> None:
        """Add runs in the output directory that other processes have finished."""
        for run in self.runs:
            if run.result.is_file():
                comparison_file.add_runs(self.known, run.result, self.base)


def make_plan(options: argparse.Namespace, overrides: list[str]) -> Plan:
    """Return the plan of a command with `overrides` of the recipe, after checking every configuration.

    Raises UserError for invalid settings, and for settings that differ from those of existing results.
    """
    variants = parse_variants(options.encodings)
    seeds = parse_seeds(options.seeds)
    output = Path(options.output or f"runs/compare/{Path(options.recipe).stem}")
    base = _read(options.recipe, overrides, ["--train.seed", "0", "--logging.directory", str(output)])
    own = base.checkpoint.directory != base.default_checkpoint_directory
    shared = f"is {base.checkpoint.directory}, which all runs would share"
    refuse(own, "checkpoint.directory", shared, "remove it")
    evaluation = _evaluation(options, base)
    check(base, Level.START, processes=1, extends=False)
    runs = []
    for variant in variants:
        try:
            runs += _runs_of(variant, seeds, options, overrides, base, evaluation)
        except ConfigError as error:
            raise error.at(": ".join(filter(None, (variant.label, error.place)))) from None
    # Seed by seed, so that all variants can be compared early.
    runs.sort(key=lambda run: run.seed)
    tasks = [] if evaluation is None else evaluate.read_command([*evaluation, "--model", str(output)])[1]
    plan = Plan(output, runs, base, tasks, comparison_file.empty(base, tasks, variants[0].label))
    if (output / NAME).is_file():
        comparison_file.add_runs(plan.known, output / NAME, base)
    plan.collect()
    return plan


def parse_variants(text: str) -> list[Variant]:
    """Return the variants in `--encodings`, split at commas outside {} and [].

    Raises ConfigError for an unknown or repeated variant.
    """
    found = [_parse(item.strip()) for item in re.split(r",(?![^{[]*[]}])", text)]
    for variant in found:
        refuse(found.count(variant) > 1, OPTION, f"names {variant.label} twice", "remove one")
    return found


def _parse(text: str) -> Variant:
    refuse(not text, OPTION, "has nothing between two commas", "give encodings such as rope,tape")
    encoding, *given = re.split("\\+(?![0-9])", text)  # not the + of 1e+3
    unknown = encoding not in ENCODINGS
    refuse(unknown, OPTION, f"names {encoding}, which is not an encoding", f"choose from {', '.join(ENCODINGS)}")
    settings: dict[str, str] = {}
    for item in given:
        key, _, value = item.partition("=")
        refuse(not value, OPTION, f"names {text}, where {item!r} sets nothing", "write it as setting=value")
        refuse(key in settings, OPTION, f"names {text}, which sets {key} twice", "remove one")
        _check_key(key, encoding, text)
        settings[key] = value
    return Variant(encoding, tuple(settings.items()))


def _check_key(key: str, encoding: str, text: str) -> None:
    sections = {"model": ModelConfig, **_LEARNING}
    known = {setting.key for name, section in sections.items() for setting in settings_of(section, name)}
    known -= {"model.position_encoding"}
    owners = [name for name in ENCODINGS if key in _own(name)]
    if not owners and _dotted(key, encoding) not in known:
        raise ConfigError(OPTION, f"names {text}, but variants cannot differ in {key}", "correct it")
    problem = f"names {text}, but {key} has no effect on {encoding}"
    refuse(bool(owners) and encoding not in owners, OPTION, problem, "remove it")


def _own(encoding: str) -> set[str]:
    return {item.name for item in dataclasses.fields(ENCODINGS[encoding].Settings)}


def _dotted(key: str, encoding: str) -> str:
    """Return the full key of a variant's setting: of its section, its encoding or its model."""
    if key.partition(".")[0] in _LEARNING:
        return key
    return f"model.position.{key}" if key in _own(encoding) else f"model.{key}"


def parse_seeds(text: str) -> range:
    """Return the seeds of `--seeds`: 1 to N, or A to B for A-B. Raises ConfigError."""
    first, _, last = text.partition("-") if "-" in text else ("1", "-", text)
    numbers = re.fullmatch("[0-9]{1,9}", first) and re.fullmatch("[0-9]{1,9}", last)
    wrong = not (numbers and 1 <= int(first) <= int(last))
    refuse(wrong, "--seeds", f"is {text}", "give a number such as 5, for the seeds 1 to 5, or a range such as 4-9")
    found = range(int(first), int(last) + 1)
    refuse(len(found) > MOST_SEEDS, "--seeds", f"is {text}", f"give at most {MOST_SEEDS}")
    return found


def _runs_of(
    variant: Variant,
    seeds: range,
    options: argparse.Namespace,
    overrides: list[str],
    base: RunConfig,
    evaluation: list[str] | None,
) -> list[PlannedRun]:
    """Check a variant and return its runs."""
    runs = []
    without = [text for task in base.evaluation.enabled_tasks() for text in (f"--evaluation.{task}", "null")]
    for seed in seeds:
        directory = Path(base.logging.directory) / variant.directory / f"seed-{seed}"
        own = [*without, *variant.arguments, "--train.seed", str(seed), "--logging.directory", str(directory)]
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
    """Return the tasks as arguments of pretrain.evaluate, or None without tasks."""
    if options.evaluation is not None:
        return ["--config", options.evaluation, *["--trust-remote-code"] * options.trust_remote_code]
    given = base.evaluation.enabled_tasks()
    if not given and (trained := getattr(base.data.generator, "task", None)) is not None:
        problem = f"is not set, but {options.recipe} trains on {trained}, which only a task evaluates"
        fix = f"add evaluation: {{{trained}: {{...}}}} to it, or give --evaluation FILE"
        raise ConfigError("evaluation", problem, fix)
    if not given and not base.train.validates:
        problem = (
            "is null, or train.evaluations lacks validation_loss, and no task is evaluated: there is nothing to compare"
        )
        raise ConfigError("train.eval_interval", problem, "set both, or give --evaluation FILE")
    return [*given, *(text for task, settings in given.items() for text in _as_options(task, settings))] or None


def _as_options(task: str, settings: object) -> list[str]:
    return [
        text
        for key, value in as_dict(settings).items()
        for text in (f"--{task}.{key}", value if isinstance(value, str) else json.dumps(value))
    ]


def _check_model(config: RunConfig, evaluation: list[str] | None) -> None:
    """Raise ConfigError if a variant cannot be trained by one process, or evaluated afterwards."""
    check(config, Level.SETTINGS, processes=1, extends=False)
    if evaluation is not None:
        encoding = config.model.position_encoding
        only_here = encoding_of(config.model).exports_to is None
        problem = f"is {encoding}, which cannot be exported and therefore not be evaluated"
        refuse(only_here, "model.position_encoding", problem, "leave it out")
        evaluate.check_evaluation(evaluation, made_by(config))


def _check_start(directory: Path, config: RunConfig) -> None:
    """Raise UserError if the directory holds a run with other settings."""
    if not (directory / SETTINGS).is_file():
        return
    saved = read_yaml(directory / SETTINGS, comparison_file.Settings)
    if changed := comparison_file.changed_settings(saved, config):
        problem = f"holds a run with other settings ({comparison_file.first_of(changed)})"
        raise FileError(str(directory), problem, "restore these, or choose another --output")
    check_start(config)
