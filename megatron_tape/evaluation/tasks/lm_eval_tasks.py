"""The task `lm_eval`: runs tasks of lm-evaluation-harness that the settings name."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from megatron_tape.config.values import Count, NotNegativeInt, PathText
from megatron_tape.errors import ConfigError
from megatron_tape.evaluation.results import Score, TaskResult
from megatron_tape.evaluation.score_pictures import by_group
from megatron_tape.evaluation.statistics import NORMAL_QUANTILE, Interval, wilson
from megatron_tape.evaluation.task import HuggingFaceModel, ModelInfo, Picture, Summary, Task, Unit

_FILES = (".yaml", ".yml", ".py", ".json", ".jsonl", ".csv", ".txt")
_TASK_FILES = (".yaml", ".yml")


@dataclass(kw_only=True)
class LmEvalSettings:
    """Scores of tasks of lm-evaluation-harness, such as HellaSwag."""

    tasks: list[PathText]
    """Names of tasks, groups or tags as listed by `lm_eval ls tasks`, or paths of YAML files. YAML
    files may run code and require --trust-remote-code."""
    include_path: PathText | None = None
    """A directory of YAML files of your own tasks. They may run code and require
    --trust-remote-code.
    """
    limit: Count | None = None
    """Maximum number of documents of each task; the first ones are used. Default: all documents."""
    num_fewshot: NotNegativeInt | None = None
    """Number of examples in each prompt. Default: that of the task."""
    max_length: Annotated[int, Field(ge=2)] | None = None
    """Maximum number of tokens of prompt and answer; longer prompts are truncated on the left.
    Default: that of the model's configuration."""
    batch_size: Count = 1
    """Number of prompts per batch."""


class LmEval(Task):
    """The scores of tasks of lm-evaluation-harness, with intervals.

    A unit is a name in `tasks`. Its value contains `max_length`, and the `outcomes` of all tasks
    and groups with that name (see `harness.run`), without `responses` and without infinite numbers
    or NaN.
    """

    name = "lm_eval"
    title = "lm-evaluation-harness"
    Settings = LmEvalSettings
    generates = True

    def check(self, info: ModelInfo) -> None:
        settings = self.settings
        self.require("lm_eval")
        key = self.key("tasks")
        include = settings.include_path
        if not settings.tasks:
            raise ConfigError(key, "is []", "give at least one task; lm_eval ls tasks lists all")
        missing = include is not None and not Path(include).is_dir()
        if missing:
            raise ConfigError(
                self.key("include_path"),
                f"is {include}, which is not a directory",
                "correct the path",
            )
        for name in settings.tasks:
            file = name.endswith(_TASK_FILES)
            if file and not Path(name).is_file():
                raise ConfigError(key, f"has {name}, which is not a file", "correct the path")
        from megatron_tape.evaluation.tasks.harness import find_tasks

        find_tasks(settings.tasks, self._include)

    def refuse_code(self) -> None:
        # The harness imports functions named in task files, and its templates can run any Python
        # code.
        if self.settings.include_path is not None:
            include = [("include_path", self.settings.include_path)]
        else:
            include = []
        for setting, path in include + [
            ("tasks", name) for name in self.settings.tasks if name.endswith(_TASK_FILES)
        ]:
            if True:
                raise ConfigError(
                    self.key(setting),
                    f"names {path}, and YAML files of tasks may run any code",
                    "read it, and pass --trust-remote-code to pretrain.evaluate",
                )

    def inputs(self) -> list[Path]:
        files = [Path(name) for name in self.settings.tasks if name.endswith(_TASK_FILES)]
        for folder in self._include:
            files += sorted(
                path for path in Path(folder).rglob("*") if path.is_file() and path.suffix in _FILES
            )
        return files

    def units(self, model: HuggingFaceModel) -> list[Unit]:
        return [Unit(name) for name in dict.fromkeys(self.settings.tasks)]

    def evaluate(self, unit: Unit, model: HuggingFaceModel) -> dict[str, Any]:
        from megatron_tape.evaluation.tasks.harness import find_tasks, load_tasks, run

        settings = self.settings
        # Data is loaded here instead of in `units`, since each rank runs only some of the tasks.
        tasks = load_tasks(
            find_tasks(settings.tasks, self._include), unit.key, settings.num_fewshot
        )
        harness = model.harness(settings.batch_size, settings.max_length)
        outcomes = run(harness, tasks, unit.key, settings.limit)
        return {
            "max_length": getattr(harness, "max_length", None),
            "outcomes": [_without_responses(outcome) for outcome in outcomes],
        }

    def summarize(self, values: dict[str, dict[str, Any]], info: ModelInfo) -> Summary:
        outcomes = _outcomes(values)
        scores = []
        notes = []
        tasks = {}
        for name, outcome in outcomes.items():
            count = len(outcome["documents"])
            for key, metric in outcome["metrics"].items():
                interval = _interval(metric, outcome["values"].get(key))
                better = "higher" if metric["higher_is_better"] else "lower"
                scores.append(
                    Score(
                        metric_name(key),
                        metric["value"],
                        better,
                        *interval,
                        None,
                        name,
                        count or None,
                    )
                )
            tasks[name] = {key: outcome[key] for key in ("version", "fewshot", "truncated")} | {
                "documents": count
            }
            if outcome["truncated"]:
                notes.append(
                    f"{name}: {outcome['truncated']:,} of {count:,} documents are longer than the"
                    f" limit of {outcome['max_length']:,} tokens and were truncated on the left."
                )
            if outcome["not_finite"]:
                notes.append(
                    f"{name}: {', '.join(outcome['not_finite'])} is not a finite number and was"
                    " omitted."
                )
        if self.settings.limit is not None:
            notes.append(
                f"Only the first {self.settings.limit:,} documents of each task were used."
            )
        return Summary(scores, {"tasks": tasks}, notes)

    @classmethod
    def draw(cls, results: dict[str, TaskResult]) -> list[Picture]:
        def is_fraction(score: Score) -> bool:
            return 0 <= score.value <= 1 and score.better != "lower"

        return by_group(results, is_fraction, "lm_eval", "score")

    @property
    def _include(self) -> tuple[str, ...]:
        if self.settings.include_path:
            return (self.settings.include_path,)
        return ()


def _without_responses(outcome: dict[str, Any]) -> dict[str, Any]:
    """Drop `responses` and infinite or NaN metrics from an outcome; list the names of these metrics
    in `not_finite`.
    """
    kept = {key: value for key, value in outcome.items() if key != "responses"}
    finite = {
        key: metric for key, metric in outcome["metrics"].items() if math.isfinite(metric["value"])
    }
    values = {
        key: list(map(float, column))
        for key in finite
        if (column := outcome["values"].get(key))
        and all(isinstance(value, (int, float)) and math.isfinite(value) for value in column)
    }
    not_finite = sorted(metric_name(key) for key in outcome["metrics"].keys() - finite.keys())
    return {**kept, "metrics": finite, "values": values, "not_finite": not_finite}


def _outcomes(values: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the outcomes by name of task or group. A task in several groups has the same outcome
    in each.
    """
    return {
        outcome["name"]: {**outcome, "max_length": value["max_length"]}
        for value in values.values()
        for outcome in value["outcomes"]
    }


def _interval(metric: dict[str, Any], values: list[float] | None) -> Interval:
    """Return Wilson's interval if the metric is a fraction of documents, else one from the
    harness's standard error.
    """
    is_fraction = (
        values
        and set(values) <= {0.0, 1.0}
        and math.isclose(sum(values) / len(values), metric["value"])
    )
    if is_fraction:
        return wilson(sum(values), len(values))
    if metric["error"] is None:
        return None, None
    spread = NORMAL_QUANTILE * metric["error"]
    return metric["value"] - spread, metric["value"] + spread


def metric_name(key: str) -> str:
    """Return `acc` for the harness's `acc,none`, and `exact_match (strict-match)` for
    `exact_match,strict-match`.
    """
    metric, _, filter_name = key.partition(",")
    if filter_name == "none":
        return metric
    return f"{metric} ({filter_name})"
