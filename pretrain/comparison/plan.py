"""What a comparison does: its runs, all checked before the first of them begins. Imports no torch."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_tape.checkpoint.run_directories import check_directories
from megatron_tape.checkpoint.saved_settings import check_start
from megatron_tape.checks.arguments import read_run_config
from megatron_tape.checks.settings import validate
from megatron_tape.config.schema import RunConfig
from megatron_tape.data.inputs import check_data_files, check_datasets
from megatron_tape.errors import ConfigError, refuse
from megatron_tape.evaluation import comparison as results
from megatron_tape.evaluation.base import Task
from megatron_tape.evaluation.comparison import NAME, Comparison
from megatron_tape.evaluation.model_source import made_by
from megatron_tape.evaluation.report.inputs import METRICS, SETTINGS, read_run
from megatron_tape.evaluation.report.inputs import Run as Metrics
from megatron_tape.evaluation.results import read_results
from megatron_tape.evaluation.runner import hardware
from megatron_tape.extension.base import check_command
from megatron_tape.io.records import read_yaml
from megatron_tape.io.versions import versions_with_commit
from megatron_tape.planning.parameters import parameter_count
from megatron_tape.position import encoding_of
from pretrain import evaluate, train
from pretrain.comparison.variants import Variant, parse_variants

MOST_SEEDS = 1000


@dataclass(frozen=True)
class Run:
    """One variant with one seed: `arguments` are those of pretrain.train, `evaluation` those of pretrain.evaluate."""

    variant: Variant
    seed: int
    directory: Path
    config: RunConfig
    arguments: list[str]
    evaluation: list[str] | None
    """None if nothing is evaluated but the loss on the validation split."""

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"{self.variant.label}, seed {self.seed}"

    @property
    def stages(self) -> list[tuple[str, str, list[str]]]:
        """Name, module and arguments of what is done, in order."""
        stages = [("training", "pretrain.train", self.arguments)]
        return stages + ([("evaluation", "pretrain.evaluate", self.evaluation)] if self.evaluation else [])

    @property
    def log(self) -> Path:
        """Where the output of its programs goes."""
        return self.directory / "log.txt"

    @property
    def result(self) -> Path:
        """The file that says that it is finished."""
        return self.directory / NAME

    def metrics(self) -> Metrics:
        """Return its metrics as far as they are written."""
        return read_run(self.directory)

    def share_done(self) -> float:
        """Return how much of its training is done, between 0 and 1."""
        try:
            with open(self.directory / METRICS, "rb") as file:
                file.seek(-min(8192, file.seek(0, 2)), 2)
                step = json.loads(file.read().splitlines()[-1])["step"]
            return min(1.0, step / self.config.train.steps)
        except (OSError, ValueError, IndexError, KeyError, TypeError):
            return 0.0


@dataclass(frozen=True)
class Plan:
    """All runs of a comparison, and what is known of them by now."""

    output: Path
    runs: list[Run]
    base: RunConfig
    tasks: list[Task]
    known: Comparison

    @property
    def left(self) -> list[Run]:
        """The runs that are not finished."""
        finished = {(run["variant"], run["seed"]) for run in self.known["runs"]}
        return [run for run in self.runs if (run.variant.label, run.seed) not in finished]

    def record(self, run: Run, seconds: float, device: str | None) -> None:
        """Add what a run came to, once it has been trained and evaluated; `device` is the GPU's name, if there is one.

        Raises ConfigError if its programs have left no results.
        """
        values = results.run_values(run.config, run.metrics().rows, parameter_count(run.config.model))
        if run.evaluation is not None:
            newest = max((run.directory / "evaluation").glob("step-*"), default=run.directory)
            try:
                tasks = read_results(newest).tasks
            except (OSError, ValueError) as error:
                raise ConfigError(f"{run.name} has left no results: {error}") from None
            values = results.score_values(tasks, [task.name for task in self.tasks]) + values
        made = results.made_run(
            run.variant.label, run.seed, values, seconds, device or hardware(None), versions_with_commit()
        )
        results.write_comparison(run.result, {**self.known, "runs": [made]})
        self.known["runs"].append(made)

    def collect(self) -> None:
        """Add the runs that have finished in the output directory, such as those of other jobs."""
        for run in self.runs:
            if run.result.is_file():
                results.add_runs(self.known, run.result, self.base)


def make_plan(options: argparse.Namespace, overrides: list[str]) -> Plan:
    """Return the plan of a command, with `overrides` of the recipe, after checking every configuration in full.

    Raises ConfigError, in one sentence, for what cannot work or does not fit results that exist.
    """
    variants = parse_variants(options.encodings)
    refuse(not 1 <= options.seeds <= MOST_SEEDS, f"--seeds is {options.seeds}; give a number from 1 to {MOST_SEEDS}")
    output = Path(options.output or f"runs/compare/{Path(options.recipe).stem}")
    baseline = options.baseline or variants[0].label
    refuse(
        baseline not in [variant.label for variant in variants],
        f"--baseline is {baseline}, which --encodings does not name; choose from "
        f"{', '.join(variant.label for variant in variants)}",
    )
    base = _read(options.recipe, overrides, ["--train.seed", "0", "--logging.directory", str(output)])
    refuse(
        base.checkpoint.directory != base.default_checkpoint_directory,
        f"checkpoint.directory is {base.checkpoint.directory}, in which all runs would meet; remove it",
    )
    evaluation = _evaluation(options, base)
    check_directories(base)
    check_data_files(base)
    check_datasets(base)
    without = [text for task in base.evaluation.given() for text in (f"--evaluation.{task}", "null")]
    runs, models = [], {}
    for variant in variants:
        for seed in range(1, options.seeds + 1):
            directory = output / variant.directory / f"seed-{seed}"
            own = [*without, *variant.arguments, "--train.seed", str(seed), "--logging.directory", str(directory)]
            try:
                config = _read(options.recipe, overrides, own)
                same = models.setdefault(variant.label, config.model)
                if config.model is same:
                    _check_model(config, evaluation)
                    twin = next((name for name, model in models.items() if model == same and model is not same), None)
                    refuse(twin is not None, f"it is the same model as {twin}; remove one")
                _check_start(directory, config)
            except ConfigError as error:
                raise ConfigError(f"{variant.label}: {error}") from None
            arguments = ["--config", options.recipe, *overrides, *own]
            evaluated = ["--model", str(directory), "--label", f"{variant.label}, seed {seed}"]
            evaluated = None if evaluation is None else [*evaluation, *evaluated]
            runs.append(Run(variant, seed, directory, config, arguments, evaluated))
    # All variants with the first seed come first: what is done early compares them all.
    runs.sort(key=lambda run: run.seed)
    tasks = [] if evaluation is None else evaluate.read_command([*evaluation, "--model", str(output)])[1]
    plan = Plan(output, runs, base, tasks, results.empty(base, tasks, baseline))
    given = options.results
    refuse(
        given is not None and not Path(given).is_file(),
        f"--results {given} is not a file; give a {NAME} that pretrain.compare wrote, or leave it out",
    )
    for file in filter(None, (given, output / NAME if (output / NAME).is_file() else None)):
        results.add_runs(plan.known, Path(file), base)
    plan.collect()
    return plan


def _read(recipe: str, overrides: list[str], own: list[str]) -> RunConfig:
    return read_run_config(["--config", recipe, *overrides, *own], train.refuse_extension)


def _evaluation(options: argparse.Namespace, base: RunConfig) -> list[str] | None:
    """Return the tasks as arguments of pretrain.evaluate, None if there are none."""
    if options.evaluation is not None:
        return ["--config", options.evaluation]
    given = base.evaluation.given()
    trained = (base.data.generator or {}).get("task")
    refuse(
        trained is not None and not given,
        f"{options.recipe} trains on {trained} and does not say how that is evaluated; add evaluation: "
        f"{{{trained}: {{every: {base.train.steps}, ...}}}} to it, or give --evaluation FILE",
    )
    refuse(
        not given and base.train.eval_interval is None,
        "train.eval_interval is null, and no task is evaluated, so that there is nothing to compare; set it, or give "
        "--evaluation FILE",
    )
    return [*given, *(text for task, settings in given.items() for text in _as_options(task, settings))] or None


def _as_options(task: str, settings: dict[str, Any]) -> list[str]:
    return [
        text
        for key, value in settings.items()
        if key != "every"
        for text in (f"--{task}.{key}", value if isinstance(value, str) else json.dumps(value))
    ]


def _check_model(config: RunConfig, evaluation: list[str] | None) -> None:
    """Raise ConfigError if a variant cannot be trained on one process, or cannot be evaluated after that."""
    validate(config, world_size=1)
    check_command(config, extends=False)
    if evaluation is not None:
        refuse(
            encoding_of(config.model).exports_to is None,
            f"model.position_encoding {config.model.position_encoding} cannot be exported, and so not be evaluated; "
            "leave it out",
        )
        evaluate.check_evaluation(evaluation, made_by(config))


def _check_start(directory: Path, config: RunConfig) -> None:
    """Raise ConfigError if a run that has begun there had other settings."""
    if not (directory / SETTINGS).is_file():
        return
    try:
        saved = read_yaml(directory / SETTINGS, results.Settings)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    changed = results.changed_settings(saved, config)
    refuse(
        bool(changed),
        f"{directory} holds a run with other settings ({'; '.join(changed[:3])}); restore these, or choose another "
        "--output",
    )
    check_start(config)
