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
from megatron_tape.evaluation.score_pictures import by_group
from megatron_tape.evaluation.statistics import NORMAL_QUANTILE, Interval, bootstrap_mean, wilson
from megatron_tape.evaluation.task import HuggingFaceModel, ModelInfo, Picture, Summary, Task, Unit
from megatron_tape.io.records import check_shape

_FILES = (".yaml", ".yml", ".py", ".json", ".jsonl", ".csv", ".txt")
_TASK_FILES = (".yaml", ".yml")
CHANGE = ", change"
"""How metrics end that are changes of others."""


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
        def is_share(score: Score) -> bool:
            return not is_change(score) and 0 <= score.value <= 1 and score.better != "lower"

        def is_change(score: Score) -> bool:
            return score.metric.endswith(CHANGE)

        title = "change since the results before"
        return by_group(results, is_share, "lm_eval", "score") + by_group(results, is_change, "lm_eval-changes", title)

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


def _kept(outcome: dict[str, Any]) -> dict[str, Any]:
    """Return an outcome without responses, and with finite numbers alone."""
    kept = {key: value for key, value in outcome.items() if key != "responses"}
    finite = {key: metric for key, metric in outcome["metrics"].items() if math.isfinite(metric["value"])}
    values = {
        key: list(map(float, column))
        for key in finite
        if (column := outcome["values"].get(key))
        and all(isinstance(value, (int, float)) and math.isfinite(value) for value in column)
    }
    not_finite = sorted(metric_name(key) for key in outcome["metrics"].keys() - finite.keys())
    return {**kept, "metrics": finite, "values": values, "not_finite": not_finite}


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


def metric_name(key: str) -> str:
    """Return `acc` for the harness's `acc,none`, and `exact_match (strict-match)` for `exact_match,strict-match`."""
    metric, _, kind = key.partition(",")
    return metric if kind == "none" else f"{metric} ({kind})"


def changes(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return by how much each metric differs that both have, document by document where that is possible.

    A difference of documents is that over those that both have. Intervals are of 95 %: over resampled documents, or of
    the normal distribution from both standard errors.
    """
    rows = []
    for task in after:
        for key in after[task]["metrics"]:
            if task not in before or key not in before[task]["metrics"]:
                continue
            old, new = before[task]["metrics"][key], after[task]["metrics"][key]
            better = "higher" if new["higher_is_better"] else "lower"
            row: dict[str, Any] = {"task": task, "metric": metric_name(key), "better": better}
            pairs = _pairs(before[task], after[task], key)
            if pairs:
                low, high = bootstrap_mean([b - a for a, b in pairs])
                then, now = (sum(pair[side] for pair in pairs) / len(pairs) for side in (0, 1))
                row |= {"before": then, "after": now, "low": low, "high": high, "count": len(pairs), "paired": True}
            else:
                errors = old["error"], new["error"]
                spread = None if None in errors else NORMAL_QUANTILE * math.hypot(*errors)
                change = new["value"] - old["value"]
                low, high = (None, None) if spread is None else (change - spread, change + spread)
                row |= {"before": old["value"], "after": new["value"], "low": low, "high": high}
                row |= {"count": len(after[task]["documents"]) or None, "paired": False}
            rows.append(row | {"change": row["after"] - row["before"]})
    return rows


def _pairs(before: dict[str, Any], after: dict[str, Any], key: str) -> list[tuple[float, float]]:
    sides = []
    for outcome in (before, after):
        values = outcome["values"].get(key)
        if not values or not math.isclose(
            sum(values) / len(values), outcome["metrics"][key]["value"], rel_tol=1e-6, abs_tol=1e-9
        ):
            return []
        sides.append(dict(zip(outcome["documents"], values)))
    return [(sides[0][digest], value) for digest, value in sides[1].items() if digest in sides[0]]


def described(rows: list[dict[str, Any]], label: str) -> list[str]:
    """Return in sentences which metrics have become worse or better than chance explains."""
    notes = [
        f"Changes are those since the results of {label}, with 95 % intervals, of the same documents where their "
        "scores are known."
    ]
    for word, sign in (("worse", -1), ("better", 1)):
        moved = []
        for row in rows:
            direction = sign if row["better"] == "higher" else -sign
            if row["low"] is not None and (row["low"] > 0 if direction > 0 else row["high"] < 0):
                moved.append(f"{row['task']} {row['metric']} ({row['change']:+.3f})")
        if moved:
            notes.append(f"Clearly {word}: {', '.join(moved)}.")
    return notes if len(notes) > 1 or not rows else [*notes, "No change is clearly different from 0."]
