"""Tasks of lm-evaluation-harness by their names, and what has changed since other results."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from megatron_tape.config.values import PathText, shown
from megatron_tape.errors import ConfigError, FileError, refuse
from megatron_tape.evaluation.results import Score, TaskResult, read_results, results_file
from megatron_tape.evaluation.statistics import NORMAL_QUANTILE, Interval, wilson
from megatron_tape.evaluation.task import HuggingFaceModel, ModelInfo, Picture, Summary, Task, Unit
from megatron_tape.evaluation.tasks.lm_eval_changes import changes, described, metric_name
from megatron_tape.io.records import check_shape

_FILES = (".yaml", ".yml", ".py", ".json", ".jsonl", ".csv", ".txt")
_TASK_FILES = (".yaml", ".yml")
CHANGE = ", change"
"""How metrics end that are changes of others."""
_SHOWN = 30
"""Rows of a picture at most."""


@dataclass(kw_only=True)
class LmEvalSettings:
    """Any tasks of lm-evaluation-harness, and a comparison with results of the same ones."""

    tasks: list[PathText]
    """Names of tasks, groups or tags, as `lm_eval ls tasks` lists them, or paths of YAML files; the latter may run
    code, and need --trust-remote-code."""
    include_path: PathText | None = None
    """A directory with tasks of your own, which may run code, and needs --trust-remote-code."""
    limit: int | None = None
    """At most so many documents of each task, the first ones; null means all."""
    num_fewshot: int | None = None
    """Examples in every prompt; null means what the task says."""
    max_length: int | None = None
    """Tokens that the model takes, longer prompts lose their beginning; null means what its configuration says."""
    batch_size: int = 1
    """Prompts that run at once."""
    before: PathText | None = None
    """Results (a results.json, or the directory with it) of the same tasks, such as of the model before an extension;
    the differences are shown."""


class _Metric(TypedDict):
    value: float
    error: float | None
    higher_is_better: bool


class _Outcome(TypedDict):
    name: str
    metrics: dict[str, _Metric]
    documents: list[str]
    values: dict[str, list[float]]


class _Value(TypedDict):
    """What is compared of the value of a unit in results before."""

    max_length: int | None
    outcomes: list[_Outcome]


class LmEval(Task):
    """What the harness reports, with intervals.

    The values: `max_length`, and `outcomes`, of every task and group behind a name: its `metrics`, the digests of its
    `documents`, their `values` of each metric where those are numbers, and how many were `truncated`.
    """

    name = "lm_eval"
    title = "lm-evaluation-harness"
    Settings = LmEvalSettings
    generates = True

    def check(self, info: ModelInfo) -> None:
        settings = self.settings
        self.require("lm_eval")
        key, include = self.key("tasks"), settings.include_path
        refuse(not settings.tasks, key, "is []", "name some of what lm_eval ls tasks lists")
        refuse(len(set(settings.tasks)) < len(settings.tasks), key, "names a task twice", "name each once")
        self.refuse_below(limit=1, num_fewshot=0, max_length=2, batch_size=1)
        missing = include is not None and not Path(include).is_dir()
        refuse(missing, self.key("include_path"), f"is {include}, which is not a directory", "correct it")
        for name in settings.tasks:
            file = name.endswith(_TASK_FILES)
            refuse(file and not Path(name).is_file(), key, f"has {name}, which is not a file", "correct it")
        if settings.before is not None:
            self._compared()
        from megatron_tape.evaluation.tasks.harness import find_tasks

        find_tasks(settings.tasks, self._include)

    def refuse_code(self) -> None:
        # The harness imports functions that a task's file names, and its templates reach all of Python.
        own = [("include_path", self.settings.include_path)] if self.settings.include_path is not None else []
        for setting, path in own + [("tasks", name) for name in self.settings.tasks if name.endswith(_TASK_FILES)]:
            problem = f"names {path}, and tasks of the harness in files of your own may run any code"
            refuse(True, self.key(setting), problem, "read it, and pass --trust-remote-code to pretrain.evaluate")

    def inputs(self) -> list[Path]:
        files = [Path(name) for name in self.settings.tasks if name.endswith(_TASK_FILES)]
        for folder in self._include:
            files += sorted(path for path in Path(folder).rglob("*") if path.is_file() and path.suffix in _FILES)
        return files + ([results_file(self.settings.before)] if self.settings.before else [])

    def units(self, model: HuggingFaceModel) -> list[Unit]:
        return [Unit(name) for name in self.settings.tasks]

    def evaluate(self, unit: Unit, model: HuggingFaceModel) -> dict[str, Any]:
        from megatron_tape.evaluation.tasks.harness import find_tasks, load_tasks, run

        settings = self.settings
        # Its data is read here, and not for all tasks in `units`: other ranks may need other ones.
        tasks = load_tasks(find_tasks(settings.tasks, self._include), unit.key, settings.num_fewshot)
        harness = model.harness(settings.batch_size, settings.max_length)
        outcomes = run(harness, tasks, unit.key, settings.limit)
        return {
            "max_length": getattr(harness, "max_length", None),
            "outcomes": [_kept(outcome) for outcome in outcomes],
        }

    def summarize(self, values: dict[str, dict[str, Any]], info: ModelInfo) -> Summary:
        outcomes = _outcomes(values)
        scores, notes, tasks = [], [], {}
        for name, outcome in outcomes.items():
            count = len(outcome["documents"])
            for key, metric in outcome["metrics"].items():
                interval = _interval(metric, outcome["values"].get(key))
                better = "higher" if metric["higher_is_better"] else "lower"
                scores.append(Score(metric_name(key), metric["value"], better, *interval, None, name, count or None))
            tasks[name] = {key: outcome[key] for key in ("version", "fewshot", "truncated")} | {"documents": count}
            if outcome["truncated"]:
                notes.append(
                    f"{name}: {outcome['truncated']:,} of {count:,} documents are longer than the "
                    f"{outcome['max_length']:,} tokens that the model takes, so that it saw only their last part."
                )
            if outcome["not_finite"]:
                notes.append(f"{name}: {', '.join(outcome['not_finite'])} is not a finite number and is left out.")
        if self.settings.limit is not None:
            notes.append(f"Only the first {self.settings.limit:,} documents of each task.")
        details: dict[str, Any] = {"tasks": tasks}
        if self.settings.before is not None:
            label, before = self._compared()
            details |= {"before": label, "changes": changes(before, outcomes)}
            scores += [
                Score(f"{row['metric']}{CHANGE}", row["change"], row["better"], row["low"], row["high"],
                      group=row["task"], count=row["count"])
                for row in details["changes"]
            ]  # fmt: skip
            notes += described(details["changes"], label)
        return Summary(scores, details, notes)

    @classmethod
    def draw(cls, results: dict[str, TaskResult]) -> list[Picture]:
        shares: dict[str, dict[str, Score]] = {}
        changed: dict[str, dict[str, Score]] = {}
        for label, result in results.items():
            for score in result.scores:
                is_change = score.metric.endswith(CHANGE)
                if is_change or (0 <= score.value <= 1 and score.better != "lower"):
                    row = f"{score.group} {score.metric.removesuffix(CHANGE)}"
                    (changed if is_change else shares).setdefault(row, {})[label] = score
        pictures = [_drawn("lm_eval", shares, "Scores in tasks of lm_eval", list(results))] if shares else []
        title = "Changes of scores in tasks of lm_eval since the results before"
        return pictures + ([_drawn("lm_eval-changes", changed, title, list(results))] if changed else [])

    @property
    def _include(self) -> tuple[str, ...]:
        return (self.settings.include_path,) if self.settings.include_path else ()

    def _compared(self) -> tuple[str, dict[str, dict[str, Any]]]:
        """Return the label and the outcomes of the results before; ConfigError if they cannot be compared with."""
        given, key = self.settings.before, self.key("before")
        try:
            results = read_results(given)
        except (OSError, FileError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(key, f"is {given}, which cannot be read: {reason}") from None
        found = results.tasks.get(self.name)
        refuse(found is None, key, f"is {given}, which has no results of lm_eval", "evaluate lm_eval there first")
        then, now = found.settings.get("num_fewshot"), self.settings.num_fewshot
        problem = f"is {given}, whose num_fewshot is {shown(then)} and here is {shown(now)}"
        refuse(then != now, (key, self.key("num_fewshot")), problem, "evaluate with the same one")
        try:
            check_shape(found.examples, dict[str, _Value], f"{self.name}.examples")
        except ValueError as error:
            problem = f"is {given}, whose results of lm_eval are not whole: {error}"
            raise ConfigError(key, problem, "evaluate again") from None
        outcomes = _outcomes(found.examples)
        common = set(found.examples) & set(self.settings.tasks)
        problem = f"is {given}, which has none of the tasks {', '.join(self.settings.tasks):.200}"
        refuse(not common, (key, self.key("tasks")), problem, f"it has {', '.join(found.examples):.200}")
        return results.label, outcomes


def _kept(outcome: Any) -> dict[str, Any]:
    finite = {key: metric for key, metric in outcome.metrics.items() if math.isfinite(metric["value"])}
    values = {}
    for key in finite:
        column = [example.metrics.get(key) for example in outcome.examples]
        if column and all(isinstance(value, (int, float)) and math.isfinite(value) for value in column):
            values[key] = [float(value) for value in column]
    return {
        "name": outcome.name,
        "version": outcome.version,
        "fewshot": outcome.fewshot,
        "metrics": finite,
        "not_finite": sorted(metric_name(key) for key in outcome.metrics.keys() - finite.keys()),
        "documents": [example.digest for example in outcome.examples],
        "values": values,
        "truncated": sum(example.truncated for example in outcome.examples),
    }


def _outcomes(values: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the outcomes by their names; a task that several groups have is the same in all."""
    return {
        outcome["name"]: {**outcome, "max_length": value["max_length"]}
        for value in values.values()
        for outcome in value["outcomes"]
    }


def _interval(metric: dict[str, Any], values: list[float] | None) -> Interval:
    """Return Wilson's interval of a share of documents, and that of the harness's standard error otherwise."""
    share = values and set(values) <= {0.0, 1.0} and math.isclose(sum(values) / len(values), metric["value"])
    if share:
        return wilson(sum(values), len(values))
    if metric["error"] is None:
        return None, None
    spread = NORMAL_QUANTILE * metric["error"]
    return metric["value"] - spread, metric["value"] + spread


def _drawn(name: str, table: dict[str, dict[str, Score]], title: str, labels: list[str]) -> Picture:
    """Return a picture with one row for each task and metric, and one point with its interval for each model."""
    from megatron_tape.evaluation.figures import legend, new_figure, plain, styles

    rows = list(table.items())[:_SHOWN]
    looks = styles(labels)
    figure, (axes,) = new_figure(width=7.0, height=1.2 + 0.24 * len(rows) + 0.09 * len(rows) * len(labels))
    said = []
    for number, label in enumerate(labels):
        offset = (number - (len(labels) - 1) / 2) * 0.7 / max(2, len(labels))
        look = {**looks[label], "linestyle": "none"}
        found = [(row + offset, what, cells[label]) for row, (what, cells) in enumerate(rows) if label in cells]
        if not found:
            continue
        places, names, scores = zip(*found)
        values, spreads = [score.value for score in scores], [score.error_bar for score in scores]
        axes.plot(values, places, **look)
        axes.errorbar(values, places, xerr=list(zip(*spreads)), fmt="none", ecolor=look["color"], elinewidth=1)
        said.append(f"{label}: {', '.join(f'{value:.3f} {what}' for value, what in zip(values, names))}.")
    axes.set_yticks(range(len(rows)), [plain(what) for what, _ in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    if name.endswith("changes"):
        axes.axvline(0, linewidth=1, alpha=0.6)
        axes.set_xlabel("change")
    else:
        axes.set_xlabel("score")
    legend(figure)
    if len(table) > _SHOWN:
        said.insert(0, f"The first {_SHOWN} of {len(table):,} rows.")
        axes.set_title(said[0], fontsize=10)
    return Picture(name, f"{title}. {' '.join(said)}", figure)
