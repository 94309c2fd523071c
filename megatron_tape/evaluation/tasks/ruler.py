"""RULER: thirteen long-context tasks, run with lm-evaluation-harness by context length, and
effective lengths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from megatron_tape.config.values import Count, PathText, format_value
from megatron_tape.errors import ConfigError, FileError
from megatron_tape.evaluation.results import Score, TaskResult
from megatron_tape.evaluation.score_pictures import by_length, fraction_maps
from megatron_tape.evaluation.statistics import wilson
from megatron_tape.evaluation.task import HuggingFaceModel, ModelInfo, Picture, Summary, Task, Unit
from megatron_tape.evaluation.tasks.text_sources import chosen_lengths
from megatron_tape.io.records import RECORD_BYTES, read_record, read_small

ESSAYS = ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery")
"""Tasks that hide needles in essays."""
QUESTIONS = {"qa_squad": "squad", "qa_hotpot": "hotpotqa"}
"""Tasks with questions from datasets, and the setting for the file of each."""
TASKS = (
    *(
        "niah_single_1",
        "niah_single_2",
        "niah_single_3",
        "niah_multikey_1",
        "niah_multikey_2",
        "niah_multikey_3",
    ),
    *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_squad", "qa_hotpot"),
)
OFFLINE = tuple(task for task in TASKS if task not in ESSAYS and task not in QUESTIONS)
"""Tasks that need no files or downloads."""
THRESHOLD = 0.856
"""Score of Llama-2-7B-chat at 4K in RULER's paper. The effective length is the longest one with at
least this score.
"""


_CHECKED = 8192
"""Lengths up to this one are checked by making samples before any task runs. Greater lengths always
have samples.
"""


@dataclass(kw_only=True)
class RulerSettings:
    """Scores of RULER's thirteen long-context tasks by context length, and effective context
    lengths.
    """

    tasks: list[str] | Literal["offline", "all"] = "offline"
    """A list of tasks, or a name: offline for the six that need no files or downloads
    (niah_single_1, niah_multikey_2, niah_multikey_3, vt, cwe and fwe), all for all thirteen."""
    lengths: list[int] | None = None
    """Context lengths in tokens, including the answer. Default: the training length, half of it and
    a quarter of it.
    """
    samples: Annotated[int, Field(ge=1, le=500)] = 50
    """Number of samples for each task and length, at most 500, which is the number in published
    tables.
    """
    haystack: PathText | None = None
    """Path of a long UTF-8 text in which needles are hidden. Default: RULER's essays, from the hub.
    """
    squad: PathText | None = None
    """Path of the file dev-v2.0.json of SQuAD. Default: it is downloaded."""
    hotpotqa: PathText | None = None
    """Path of the file hotpot_dev_distractor_v1.json of HotpotQA. Default: it is downloaded."""
    trained_length: Count | None = None
    """Length in tokens at which the model's score is the threshold of "own effective length".
    Default: the training length of the model. For an extended model, set it to the length before
    the extension."""
    seed: int = 0
    """Seed of the samples."""
    batch_size: Count = 1
    """Number of prompts per batch."""


class Ruler(Task):
    """The fraction of the expected items that the model generates, by task and length.

    The model greedily continues the beginning of the answer that RULER gives. Values of units
    contain, for each sample: the `scores` (0 to 1), the `expected` items, the generated `answers`,
    and the numbers of `tokens` of the prompts.
    """

    name = "ruler"
    title = "RULER"
    Settings = RulerSettings
    generates = True

    def check(self, info: ModelInfo) -> None:
        settings = self.settings
        self.require("lm_eval", "wonderwords", "nltk", "scipy")
        key = self.key("tasks")
        if not self._tasks:
            raise ConfigError(key, "is []", "give at least one task, or set it to offline or all")
        for task in self._tasks:
            if task not in TASKS:
                raise ConfigError(
                    key, f"has {format_value(task)}", f"choose from {', '.join(TASKS)}"
                )
        for name in ("haystack", *QUESTIONS.values()):
            file = getattr(settings, name)
            if file is not None and not Path(file).is_file():
                raise ConfigError(
                    self.key(name), f"is {file}, which is not a file", "correct the path"
                )
        if settings.haystack is not None:
            _check_text(Path(settings.haystack))
        for name, shape in (("squad", dict[str, Any]), ("hotpotqa", list[dict[str, Any]])):
            if getattr(settings, name) is not None:
                read_record(getattr(settings, name), shape)
        self._lengths(info)

    def inputs(self) -> list[Path]:
        settings = self.settings
        files = []
        if settings.haystack is not None and set(self._tasks) & set(ESSAYS):
            files.append(Path(settings.haystack))
        files += [
            Path(getattr(settings, QUESTIONS[task])) for task in self._tasks if self._file_of(task)
        ]
        return files

    def units(self, model: HuggingFaceModel) -> list[Unit]:
        from megatron_tape.evaluation.tasks.ruler_samples import TooShort, make_samples

        lengths = self._lengths(model.info)
        sources = self._sources()
        seed = self.settings.seed
        for task in self._tasks:
            # Missing data leads to an error at the first length.
            for length in [lengths[0], *(length for length in lengths[1:] if length <= _CHECKED)]:
                try:
                    make_samples(
                        task, length, min(self.settings.samples, 10), model.tokenizer, seed, sources
                    )
                except TooShort as error:
                    raise self._too_short(task, length, error) from None
        pairs = [(task, length) for length in lengths for task in self._tasks]
        return [
            Unit(f"{task}/{length}", cost=self.settings.samples * length) for task, length in pairs
        ]

    def evaluate(self, unit: Unit, model: HuggingFaceModel) -> dict[str, Any]:
        from megatron_tape.evaluation.tasks.harness import run
        from megatron_tape.evaluation.tasks.ruler_samples import TooShort, make_samples

        task = unit.key.split("/")[0]
        length = int(unit.key.split("/")[1])
        settings = self.settings
        try:
            samples = make_samples(
                task, length, settings.samples, model.tokenizer, settings.seed, self._sources()
            )
        except TooShort as error:
            raise self._too_short(task, length, error) from None
        (outcome,) = run(model.harness(settings.batch_size, length), samples.tasks, seed=unit.key)
        return {
            "scores": list(map(float, outcome["values"][f"{length},none"])),
            "answers": outcome["responses"],
            "expected": [row["outputs"] for row in samples.rows],
            "tokens": samples.tokens,
            "truncated": outcome["truncated"],
        }

    def _too_short(self, task: str, length: int, error: Exception) -> ConfigError:
        problem = (
            f"contains {length:,}, for which {task} has no samples with this model's tokenizer"
            f" ({error})"
        )
        fix = f"set longer lengths, or remove {task} from tasks"
        return ConfigError((self.key("lengths"), self.key("tasks")), problem, fix)

    def summarize(self, values: dict[str, dict[str, Any]], info: ModelInfo) -> Summary:
        lengths = self._lengths(info)
        mean_name = self._mean_name()
        scores = []
        means = []
        by_task = {task: [] for task in self._tasks}
        for length in lengths:
            everything: list[float] = []
            for task in self._tasks:
                of_task = values[f"{task}/{length}"]["scores"]
                by_task[task].append(sum(of_task) / len(of_task))
                scores.append(_mean_score("score", of_task, length, task))
                everything += of_task
            # Tasks have equal numbers of samples, so this is the mean of the tasks' scores.
            means.append(_mean_score(mean_name, everything, length))
        curve = [score.value for score in means]
        effective, notes = self._effective(lengths, curve, info)
        details = {"lengths": lengths, "tasks": by_task, "mean_name": mean_name}
        return Summary([*means, *effective, *scores], details, [*self._notes(values), *notes])

    @classmethod
    def draw(cls, results: dict[str, TaskResult]) -> list[Picture]:
        def names(result: TaskResult) -> tuple[list[str], list[str]]:
            return list(result.details["tasks"]), [
                f"{length:,}" for length in result.details["lengths"]
            ]

        # Means over different tasks are never in one panel.
        alike: dict[tuple[str, ...], dict[str, TaskResult]] = {}
        for label, result in results.items():
            alike.setdefault((result.details["mean_name"], *result.details["tasks"]), {})[label] = (
                result
            )
        pictures = [
            picture
            for (mean, *_), of in alike.items()
            for picture in by_length(of, mean, "ruler", mean)
        ]
        title = "RULER's tasks by context length"

        def fractions(result: TaskResult) -> list[list[float]]:
            return list(result.details["tasks"].values())

        return pictures + fraction_maps(results, fractions, names, "ruler-tasks", title)

    @property
    def _tasks(self) -> list[str]:
        tasks = self.settings.tasks
        return list(
            {"offline": OFFLINE, "all": TASKS}[tasks]
            if isinstance(tasks, str)
            else dict.fromkeys(tasks)
        )

    def _lengths(self, info: ModelInfo) -> list[int]:
        return chosen_lengths(self.settings.lengths, info, self.key("lengths"))

    def _file_of(self, task: str) -> str | None:
        if task in QUESTIONS:
            return getattr(self.settings, QUESTIONS[task])
        return None

    def _sources(self) -> Any:
        from megatron_tape.evaluation.tasks.ruler_samples import Sources

        return Sources(self.settings.haystack, self.settings.squad, self.settings.hotpotqa)

    def _mean_name(self) -> str:
        """Return the metric name of the mean over tasks, which contains the set of tasks."""
        chosen = set(self._tasks)
        if len(chosen) == 1:
            return f"score of {self._tasks[0]}"
        if chosen == set(TASKS):
            return "mean of all 13 tasks"
        if chosen == set(OFFLINE):
            return "mean of the 6 offline tasks"
        return f"mean of {len(chosen)} chosen tasks"

    def _effective(
        self, lengths: list[int], curve: list[float], info: ModelInfo
    ) -> tuple[list[Score], list[str]]:
        """Return the effective length, the own effective length and the area under the curve as
        scores, with notes.
        """
        name = self._mean_name()
        found = [
            Score(
                "effective length",
                _longest(lengths, curve, THRESHOLD),
                "higher",
                group=name,
                unit="tokens",
            )
        ]
        meaning = f"The effective length is the longest with a {name} of at least {THRESHOLD}, or 0"
        trained = self.settings.trained_length or info.trained_length
        own = curve[lengths.index(trained)] if trained in lengths else None
        if own:
            found.append(
                Score(
                    "own effective length",
                    _longest(lengths, curve, own),
                    "higher",
                    group=name,
                    unit="tokens",
                )
            )
            meaning += (
                f"; the own effective length is the longest with at least {own:.3f}, the model's"
                f" score at the training length of {trained:,} tokens."
            )
        else:
            meaning += "; the own effective length requires a score above 0 at the training length."
        notes = [meaning]
        if len(lengths) > 1:
            steps = [math.log2(after / before) for before, after in zip(lengths, lengths[1:])]
            area = sum(step * (a + b) / 2 for step, a, b in zip(steps, curve, curve[1:])) / sum(
                steps
            )
            found.append(Score("area under the curve", area, "higher", group=name))
            notes.append(
                "The area under the curve is the mean score over the logarithm of the length."
            )
        if name != "mean of all 13 tasks":
            notes.append(
                f"The threshold of {THRESHOLD} from RULER's paper applies to the mean of all 13"
                " tasks; other means are not comparable with published figures."
            )
        return found, notes

    def _notes(self, values: dict[str, dict[str, Any]]) -> list[str]:
        settings = self.settings
        tasks = self._tasks
        notes = [
            f"The {self._mean_name()} is over {', '.join(tasks)}; samples per task and length:"
            f" {settings.samples}."
        ]
        if set(tasks) & set(ESSAYS):
            from megatron_tape.evaluation.tasks.ruler_samples import has_punkt

            if settings.haystack is not None:
                notes.append(
                    f"The needles of {', '.join(task for task in ESSAYS if task in tasks)} were"
                    f" hidden in {Path(settings.haystack).name}, not in the essays that published"
                    " figures use."
                )
            if not has_punkt():
                notes.append(
                    "The haystack was split into sentences without nltk's list of abbreviations. To"
                    " install it: python -m nltk.downloader punkt_tab"
                )
        truncated = {key: value["truncated"] for key, value in values.items() if value["truncated"]}
        if truncated:
            notes.append(
                f"Truncated prompts: {', '.join(f'{n} of {k}' for k, n in truncated.items())}."
            )
        return notes


def _mean_score(metric: str, values: list[float], length: int, group: str = "") -> Score:
    mean = sum(values) / len(values)
    interval = wilson(sum(values), len(values))
    return Score(metric, mean, "higher", *interval, length, group, len(values))


def _longest(lengths: Sequence[int], curve: Sequence[float], least: float) -> float:
    """Return the longest length with a score of at least `least`, or 0. `curve` contains the score
    of each length.
    """
    return float(
        max((length for length, score in zip(lengths, curve) if score >= least), default=0)
    )


def _check_text(file: Path) -> None:
    """Raise FileError unless a haystack is a UTF-8 text of at least 500 words."""
    try:
        words = read_small(file, RECORD_BYTES).decode().split()
    except ValueError as error:
        raise FileError(
            str(file), f"cannot be used: {error}", "give a text file in UTF-8"
        ) from None
    if len(words) < 500:
        raise FileError(str(file), f"has {len(words)} words", "give a text of at least 500 words")
