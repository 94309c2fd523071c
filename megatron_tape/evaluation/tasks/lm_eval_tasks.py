"""The task `lm_eval`: runs tasks of lm-evaluation-harness that the settings name."""

import math
from pathlib import Path
from typing import Literal

from megatron_tape.config.evaluation import LmEvalSettings
from megatron_tape.errors import ConfigError
from megatron_tape.evaluation.results import Score
from megatron_tape.evaluation.score_pictures import pictures_by_group
from megatron_tape.evaluation.statistics import NORMAL_QUANTILE, Interval, wilson
from megatron_tape.evaluation.task import (
    HuggingFaceModel,
    ModelInfo,
    Picture,
    Summary,
    Task,
    TaskResults,
    Unit,
    Value,
    Values,
)

_TASK_FILES = (".yaml", ".yml")
# The suffixes of task files, and those of files that task files may read.
_FILES = (*_TASK_FILES, ".py", ".json", ".jsonl", ".csv", ".txt")


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
        """Raise ConfigError if a task, a file or a directory in the settings does not exist."""
        self.require("lm_eval")
        tasks = self.settings.tasks
        if not tasks:
            raise ConfigError(
                self.key("tasks"), "is []", "give at least one task; lm_eval ls tasks lists all"
            )
        for folder in self._folders:
            if not Path(folder).is_dir():
                raise ConfigError(
                    self.key("include_path"),
                    f"is {folder}, which is not a directory",
                    "correct the path",
                )
        for name in self._task_files:
            if not Path(name).is_file():
                raise ConfigError(
                    self.key("tasks"), f"has {name}, which is not a file", "correct the path"
                )
        from megatron_tape.evaluation.tasks.harness import find_tasks

        # Raises ConfigError for an unknown name.
        find_tasks(tasks, self._folders)

    def refuse_code(self) -> None:
        """Raise ConfigError if the settings name task files."""
        # The harness imports functions named in task files, and its templates can run any Python
        # code.
        files = [*self._folders, *self._task_files]
        if files:
            raise ConfigError(
                self.section,
                f"names {files[0]}, and YAML files of tasks may run any code",
                "read it, and pass --trust-remote-code to pretrain.evaluate",
            )

    def inputs(self) -> list[Path]:
        """Return the user's own task files, and the files that they may read."""
        files = [Path(name) for name in self._task_files]
        for folder in self._folders:
            files += sorted(
                path for path in Path(folder).rglob("*") if path.is_file() and path.suffix in _FILES
            )
        return files

    def units(self, model: HuggingFaceModel) -> list[Unit]:
        """Return a unit for each name in `tasks`."""
        return [Unit(name) for name in dict.fromkeys(self.settings.tasks)]

    def evaluate(self, unit: Unit, model: HuggingFaceModel) -> Value:
        """Run the tasks with the name of the unit."""
        from megatron_tape.evaluation.tasks.harness import find_tasks, load_tasks, run

        settings = self.settings
        # Data is loaded here instead of in `units`, since each rank runs only some of the tasks.
        manager = find_tasks(settings.tasks, self._folders)
        tasks = load_tasks(manager, unit.key, settings.num_fewshot)
        harness = model.harness(settings.batch_size, settings.max_length)
        outcomes = run(harness, tasks, unit.key, settings.limit)
        return {
            "max_length": getattr(harness, "max_length", None),
            "outcomes": [_finite(outcome) for outcome in outcomes],
        }

    def summarize(self, values: Values, info: ModelInfo) -> Summary:
        """Return the metrics of all tasks and groups as scores."""
        scores = []
        notes = []
        tasks = {}  # by name of a task or group, what `details` says about it
        for value in values.values():
            for outcome in value["outcomes"]:
                # A task that is in several groups has the same outcome in each, and counts once.
                if outcome["name"] not in tasks:
                    scores += _scores(outcome)
                    notes += _notes(outcome, value["max_length"])
                tasks[outcome["name"]] = {
                    "version": outcome["version"],
                    "fewshot": outcome["fewshot"],
                    "truncated": outcome["truncated"],
                    "documents": len(outcome["documents"]),
                }
        if self.settings.limit is not None:
            notes.append(
                f"Only the first {self.settings.limit:,} documents of each task were used."
            )
        return Summary(scores, {"tasks": tasks}, notes)

    @classmethod
    def draw(cls, results: TaskResults) -> list[Picture]:
        """Return a picture of the metrics that are fractions."""
        return pictures_by_group(
            results, lambda score: score.is_fraction, file_name="lm_eval", x_label="score"
        )

    @property
    def _folders(self) -> tuple[str, ...]:
        """The directory of the user's own task files: one path, or an empty tuple."""
        return tuple(filter(None, [self.settings.include_path]))

    @property
    def _task_files(self) -> list[str]:
        """Those of `tasks` that are paths of YAML files."""
        return [name for name in self.settings.tasks if name.endswith(_TASK_FILES)]


def _finite(outcome: dict) -> dict:
    """Return the outcome of a task or group (see `harness.run`) without `responses` and infinite or
    NaN metrics. The names of these metrics are in `not_finite`.
    """
    metrics = outcome["metrics"]
    # JSON has neither infinite numbers nor NaN.
    finite = {key: metric for key, metric in metrics.items() if math.isfinite(metric["value"])}
    values = {}
    for key in finite:
        # The values by document are left out if there are none, or if one is not a finite number.
        column = outcome["values"].get(key)
        if column and all(
            isinstance(value, (int, float)) and math.isfinite(value) for value in column
        ):
            values[key] = list(map(float, column))
    not_finite = sorted(metric_name(key) for key in metrics.keys() - finite.keys())
    changed = {"metrics": finite, "values": values, "not_finite": not_finite}
    return {key: value for key, value in outcome.items() if key != "responses"} | changed


def _scores(outcome: dict) -> list[Score]:
    """Return the metrics of a task or group as scores, given its outcome."""
    scores = []
    for key, metric in outcome["metrics"].items():
        interval = _interval(metric, outcome["values"].get(key))
        better: Literal["higher", "lower"] = "higher" if metric["higher_is_better"] else "lower"
        scores.append(
            Score(
                metric_name(key),
                metric["value"],
                better,
                *interval,
                group=outcome["name"],
                count=len(outcome["documents"]) or None,  # unknown for a group
            )
        )
    return scores


def _notes(outcome: dict, max_length: int) -> list[str]:
    """Return sentences about truncated documents and omitted metrics of a task or group."""
    notes = []
    if outcome["truncated"]:
        notes.append(
            f"{outcome['name']}: {outcome['truncated']:,} of {len(outcome['documents']):,}"
            f" documents are longer than the limit of {max_length:,} tokens and were truncated on"
            " the left."
        )
    if outcome["not_finite"]:
        notes.append(
            f"{outcome['name']}: {', '.join(outcome['not_finite'])} is not a finite number and was"
            " omitted."
        )
    return notes


def _interval(metric: dict, values: list[float] | None) -> Interval:
    """Return Wilson's interval if the metric is a fraction of documents, else one from the
    harness's standard error. `values` are those of the documents, or None if unknown.
    """
    value = metric["value"]
    # Wilson's interval holds only for the mean of values 0 and 1. F1, for example, is computed from
    # such values, but is not their mean.
    if values and set(values) <= {0.0, 1.0} and math.isclose(sum(values) / len(values), value):
        return wilson(sum(values), len(values))
    if metric["error"] is None:
        return None, None
    spread = NORMAL_QUANTILE * metric["error"]
    return value - spread, value + spread


def metric_name(key: str) -> str:
    """Return `acc` for the harness's `acc,none`, and `exact_match (strict-match)` for
    `exact_match,strict-match`.
    """
    metric, _, filter_name = key.partition(",")
    if filter_name == "none":
        return metric
    return f"{metric} ({filter_name})"
