"""`comparison.json`: what runs of several variants of one recipe, each with several seeds, came to. Imports no torch.

The file is small, so that it can be kept in a repository, and whoever has it need not repeat its runs: it says with
which settings they were made.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from megatron_tape.checkpoint.saved_settings import changes, model_differences
from megatron_tape.config.schema import RunConfig, config_dict, model_dict
from megatron_tape.errors import ConfigError, refuse
from megatron_tape.evaluation.base import Task
from megatron_tape.evaluation.results import TaskResult
from megatron_tape.evaluation.statistics import PairedTest, paired_t
from megatron_tape.io.records import read_record, write_record

FORMAT = 1
NAME = "comparison.json"
TRAINING = "training"
"""Stands in place of a task for what is known of the training itself."""
Settings = dict[str, dict[str, Any]]


class Value(TypedDict):
    """One figure of a run; as `evaluation.base.Score`, of the task `task`."""

    task: str
    metric: str
    group: str
    length: int | None
    value: float
    better: str
    unit: str


class Run(TypedDict):
    """What a variant came to with one seed, and on what."""

    variant: str
    seed: int
    values: list[Value]
    seconds: float
    """Of training and evaluation, without those before an interruption."""
    created: float
    hardware: str
    versions: dict[str, str]


class Comparison(TypedDict):
    """The contents of `comparison.json`."""

    format: int
    settings: Settings
    """Those of the recipe, which all variants share but for what their names say."""
    evaluation: Settings
    """Those of each task."""
    baseline: str
    """The variant with which the others are compared."""
    runs: list[Run]


@dataclass(frozen=True)
class Metric:
    """What tables are made of: the figures of one kind."""

    task: str
    metric: str
    group: str
    length: int | None
    better: str
    unit: str


@dataclass(frozen=True)
class Row:
    """What a variant came to in one metric."""

    variant: str
    values: dict[int, float]
    """By seed."""
    difference: PairedTest | None
    """From the baseline, over the seeds of both; None for the baseline itself, and without common seeds."""

    @property
    def mean(self) -> float:
        """The mean over the seeds."""
        return statistics.fmean(self.values.values())

    @property
    def spread(self) -> float | None:
        """The standard deviation over the seeds; None for a single one."""
        return statistics.stdev(self.values.values()) if len(self.values) > 1 else None


def empty(base: RunConfig, tasks: Iterable[Task], baseline: str) -> Comparison:
    """Return a comparison without runs, of a recipe's own settings and the tasks that are evaluated."""
    evaluation = {task.name: dataclasses.asdict(task.settings) for task in tasks}
    # As they are read back.
    settings, evaluation = json.loads(json.dumps([config_dict(base), evaluation]))
    # Where runs lie on this machine concerns nobody else.
    del settings["logging"], settings["checkpoint"]["directory"]
    return {"format": FORMAT, "settings": settings, "evaluation": evaluation, "baseline": baseline, "runs": []}


def read_comparison(path: str | Path) -> Comparison:
    """Read such a file. Raises ConfigError, in one sentence that names the file, and OSError."""
    try:
        found = read_record(path, Comparison)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    refuse(
        found["format"] != FORMAT,
        f"{path} cannot be used: it has the format {found['format']}, and this version reads {FORMAT}; update this "
        "project",
    )
    return found


def write_comparison(path: Path, comparison: Comparison) -> None:
    """Replace the file, whole or not at all."""
    write_record(path, comparison)


def add_runs(comparison: Comparison, path: Path, base: RunConfig) -> None:
    """Add the runs of another file that are not in `comparison` yet.

    Raises ConfigError if they were made with other settings.
    """
    other = read_comparison(path)
    different = [] if not other["runs"] else differences(other, comparison, base)
    shown = "; ".join(different[:3]) + (f"; and {len(different) - 3} others" if len(different) > 3 else "")
    refuse(
        bool(different), f"{path} holds runs with other settings ({shown}); restore these, or choose another --output"
    )
    known = {(run["variant"], run["seed"]) for run in comparison["runs"]}
    comparison["runs"] += [run for run in other["runs"] if (run["variant"], run["seed"]) not in known]


def differences(recorded: Comparison, now: Comparison, base: RunConfig) -> list[str]:
    """Return a sentence for each setting that differs; what has no effect on results is left out."""
    found = changed_settings(recorded["settings"], base, ("position_encoding",))
    for task, settings in now["evaluation"].items():
        before = recorded["evaluation"].get(task)
        if before is None:
            found.append(f"{task} was not evaluated")
            continue
        for key, value in settings.items():
            if before.get(key, value) != value:
                found.append(f"{task}.{key}: was {json.dumps(before[key])}, is now {json.dumps(value)}")
    return found


def changed_settings(saved: Settings, config: RunConfig, apart: Sequence[str] = ()) -> list[str]:
    """Return a sentence for each setting that is not as it was saved; keys of `model` that `apart` names may differ."""
    now, free = model_dict(config.model, unread=False), ("attention_backend", *apart)
    return model_differences(saved.get("model", {}), now, free, ("was", "is now")) + [
        sentence
        for sentence in changes(saved, config)
        if not sentence.startswith("model.") and "the data comes in another order" not in sentence
    ]


def metrics(comparison: Comparison) -> list[Metric]:
    """Return the metrics of all runs, in the order in which they come."""
    found = (
        Metric(*(value[key] for key in ("task", "metric", "group", "length", "better", "unit")))
        for run in comparison["runs"]
        for value in run["values"]
    )
    return list(dict.fromkeys(found))


def variants(comparison: Comparison) -> list[str]:
    """Return the variants of all runs, in the order in which they come."""
    return list(dict.fromkeys(run["variant"] for run in comparison["runs"]))


def rows(comparison: Comparison, metric: Metric) -> list[Row]:
    """Return what each variant came to in a metric."""
    by_variant: dict[str, dict[int, float]] = {}
    for run in comparison["runs"]:
        for value in run["values"]:
            if all(value[key] == item for key, item in dataclasses.asdict(metric).items()):
                by_variant.setdefault(run["variant"], {})[run["seed"]] = value["value"]
    baseline = comparison["baseline"]
    reference = by_variant.get(baseline, {})
    found = []
    for variant, values in by_variant.items():
        common = sorted(values.keys() & reference.keys()) if variant != baseline else []
        test = paired_t([values[seed] - reference[seed] for seed in common]) if common else None
        found.append(Row(variant, dict(sorted(values.items())), test))
    return found


def run_values(config: RunConfig, metrics_rows: list[dict[str, Any]], parameters: int) -> list[Value]:
    """Return the figures of a training, given the rows of its metrics: losses, time and size."""
    tokens = config.train.global_batch_size * config.model.seq_length
    speeds = [row["tokens_per_second"] for row in metrics_rows if row.get("tokens_per_second")]
    last = [row.get("validation_loss") for row in metrics_rows if row["step"] == config.train.steps]
    seconds = tokens / statistics.median(speeds) if speeds else None
    figures = [
        ("validation loss", last[0] if last else None, "lower", "nats per token"),
        ("seconds per step", seconds, "lower", "s"),
        ("parameters", float(parameters), "neither", ""),
    ]
    return [
        {"task": TRAINING, "metric": name, "group": "", "length": None, "value": value, "better": better, "unit": unit}
        for name, value, better, unit in figures
        if value is not None
    ]


def score_values(tasks: dict[str, TaskResult], names: Sequence[str]) -> list[Value]:
    """Return the figures of the tasks `names` of a `results.json`."""
    return [
        {
            "task": name,
            "metric": score.metric,
            "group": score.group,
            "length": score.length,
            "value": score.value,
            "better": score.better,
            "unit": score.unit,
        }
        for name in names
        for score in tasks[name].scores
    ]


def made_run(
    variant: str, seed: int, values: list[Value], seconds: float, hardware: str, versions: dict[str, str]
) -> Run:
    """Return the record of a run that has just ended."""
    return {
        "variant": variant,
        "seed": seed,
        "values": values,
        "seconds": seconds,
        "created": time.time(),
        "hardware": hardware,
        "versions": versions,
    }
