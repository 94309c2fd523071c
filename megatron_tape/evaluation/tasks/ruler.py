"""RULER: thirteen long-context tasks, run with lm-evaluation-harness by context length, and
effective lengths.
"""

from pathlib import Path
from typing import Any

from megatron_tape.config.evaluation import RulerSettings
from megatron_tape.config.values import format_value
from megatron_tape.errors import ConfigError, FileError
from megatron_tape.evaluation.results import Score, TaskResult
from megatron_tape.evaluation.score_pictures import fraction_maps, pictures_by_length
from megatron_tape.evaluation.statistics import fraction_score
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
from megatron_tape.io.records import RECORD_BYTES, read_record, read_small

ESSAYS = ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery")
"""Tasks that hide needles in essays."""
QUESTIONS = {"qa_squad": "squad", "qa_hotpot": "hotpotqa"}
"""Tasks with questions from datasets, and the setting for the file of each."""
TASKS = (
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_multivalue",
    "niah_multiquery",
    "vt",
    "cwe",
    "fwe",
    "qa_squad",
    "qa_hotpot",
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
        """Raise ConfigError or FileError if tasks, files or lengths are invalid."""
        settings = self.settings
        self.require("lm_eval", "wonderwords", "nltk", "scipy")
        if not self.tasks:
            raise ConfigError(
                self.key("tasks"), "is []", "give at least one task, or set it to offline or all"
            )
        for task in self.tasks:
            if task not in TASKS:
                raise ConfigError(
                    self.key("tasks"),
                    f"has {format_value(task)}",
                    f"choose from {', '.join(TASKS)}",
                )

        for name in ("haystack", "squad", "hotpotqa"):
            file = getattr(settings, name)
            if file is not None and not Path(file).is_file():
                raise ConfigError(
                    self.key(name), f"is {file}, which is not a file", "correct the path"
                )
        if settings.haystack is not None:
            _check_text(Path(settings.haystack))
        if settings.squad is not None:
            read_record(settings.squad, dict[str, Any])
        if settings.hotpotqa is not None:
            read_record(settings.hotpotqa, list[dict[str, Any]])
        self.context_lengths(info)

    def inputs(self) -> list[Path]:
        """Return the files that replace downloads."""
        settings = self.settings
        files = [getattr(settings, QUESTIONS[task]) for task in self.tasks if task in QUESTIONS]
        if set(self.tasks) & set(ESSAYS):
            files.insert(0, settings.haystack)
        # If the setting for a file is None, its data is downloaded instead.
        return [Path(file) for file in files if file is not None]

    def units(self, model: HuggingFaceModel) -> list[Unit]:
        """Return a unit for each task and length, after a test whether samples fit."""
        lengths = self.context_lengths(model.info)
        # The first length is always checked, so that missing data is an error here.
        checked = [lengths[0], *(length for length in lengths[1:] if length <= _CHECKED)]
        for task in self.tasks:
            for length in checked:
                # Ten samples show whether samples fit. `evaluate` makes all of them.
                self._samples(task, length, min(self.settings.samples, 10), model)
        return [
            Unit(f"{task}/{length}", cost=self.settings.samples * length)
            for length in lengths
            for task in self.tasks
        ]

    def evaluate(self, unit: Unit, model: HuggingFaceModel) -> Value:
        """Let the model answer the samples of one task and length."""
        from megatron_tape.evaluation.tasks.harness import run

        task, length = unit.key.split("/")
        samples = self._samples(task, int(length), self.settings.samples, model)
        harness = model.harness(self.settings.batch_size, int(length))
        (outcome,) = run(harness, samples.tasks, seed=unit.key)
        return {
            # RULER's tasks in the harness name the metric by the length, such as `4096,none`.
            "scores": list(map(float, outcome["values"][f"{length},none"])),
            "answers": outcome["responses"],
            "expected": [row["outputs"] for row in samples.rows],
            "tokens": samples.tokens,
            "truncated": outcome["truncated"],
        }

    def _samples(self, task: str, length: int, count: int, model: HuggingFaceModel) -> Any:
        """Return the `Samples` of a task. Raises ConfigError if none fit into the length."""
        from megatron_tape.evaluation.tasks.ruler_samples import TooShort, make_samples

        settings = self.settings
        try:
            return make_samples(task, length, count, model.tokenizer, settings)
        except TooShort as error:
            raise ConfigError(
                (self.key("lengths"), self.key("tasks")),
                f"contains {length:,}, for which {task} has no samples with this model's tokenizer"
                f" ({error})",
                f"set longer lengths, or remove {task} from tasks",
            ) from None

    def summarize(self, values: Values, info: ModelInfo) -> Summary:
        """Return the score of each task and of all tasks by length, and effective lengths."""
        lengths = self.context_lengths(info)
        mean_name = self._mean_name()
        scores = []  # of each task at each length
        means = []  # over the tasks, at each length
        by_task = {task: [] for task in self.tasks}
        for length in lengths:
            length_scores = []
            for task in self.tasks:
                task_scores = values[f"{task}/{length}"]["scores"]
                length_scores += task_scores
                total = sum(task_scores)
                scores.append(
                    fraction_score("score", total, len(task_scores), length=length, group=task)
                )
                by_task[task].append(scores[-1].value)
            # All tasks have the same number of samples, so the mean over samples is the mean of the
            # tasks' scores.
            total = sum(length_scores)
            means.append(fraction_score(mean_name, total, len(length_scores), length=length))

        effective, notes = self._effective(means, info)
        details = {"lengths": lengths, "tasks": by_task, "mean_name": mean_name}
        return Summary(means + effective + scores, details, self._notes() + notes)

    @classmethod
    def draw(cls, results: TaskResults) -> list[Picture]:
        """Return curves of the means by length, and heat maps of tasks by length."""
        # Results by the name of the mean and the tasks behind it, since means over different tasks
        # are not comparable. A picture shows the means over the same tasks.
        by_tasks = {}
        for label, result in results.items():
            mean_and_tasks = (result.details["mean_name"], *result.details["tasks"])
            by_tasks.setdefault(mean_and_tasks, {})[label] = result
        pictures = []
        for (mean_name, *_), comparable in by_tasks.items():
            pictures += pictures_by_length(
                comparable, mean_name, file_name="ruler", y_label=mean_name
            )

        def score_matrix(result: TaskResult) -> tuple[list, list, list]:
            """Return the scores by task and length, the tasks, and the lengths as text."""
            tasks = result.details["tasks"]
            columns = [f"{length:,}" for length in result.details["lengths"]]
            return list(tasks.values()), list(tasks), columns

        return pictures + fraction_maps(
            results, score_matrix, file_name="ruler-tasks", title="RULER's tasks by context length"
        )

    @property
    def tasks(self) -> list[str]:
        """The names of RULER's tasks to run, each once."""
        tasks = self.settings.tasks
        if tasks == "offline":
            return list(OFFLINE)
        if tasks == "all":
            return list(TASKS)
        return list(dict.fromkeys(tasks))

    def _mean_name(self) -> str:
        """Return the metric name of the mean over tasks, which contains the set of tasks."""
        tasks = set(self.tasks)
        if len(tasks) == 1:
            return f"score of {self.tasks[0]}"
        if tasks == set(TASKS):
            return "mean of all 13 tasks"
        if tasks == set(OFFLINE):
            return "mean of the 6 offline tasks"
        return f"mean of {len(tasks)} chosen tasks"

    def _effective(self, means: list[Score], info: ModelInfo) -> tuple[list[Score], list[str]]:
        """Return scores and notes: the effective length by RULER's threshold, and the one by the
        model's own score at its training length.
        """
        name = self._mean_name()

        def longest(metric: str, threshold: float) -> Score:
            """Return the longest length with a mean of at least `threshold`, or 0."""
            lengths = [mean.length for mean in means if mean.value >= threshold]
            value = float(max(lengths, default=0))
            return Score(metric, value, "higher", group=name, unit="tokens")

        scores = [longest("effective length", THRESHOLD)]
        notes = [
            f"The effective length is the longest with a {name} of at least {THRESHOLD}, or 0."
        ]
        trained = self.settings.trained_length or info.trained_length
        # The mean at the training length; 0 if this is not one of the lengths.
        own_score = max((mean.value for mean in means if mean.length == trained), default=0)
        if own_score > 0:
            scores.append(longest("own effective length", own_score))
            notes.append(
                f"The own effective length is the longest with at least {own_score:.3f}, the"
                f" model's score at {trained:,} tokens."
            )
        if name != "mean of all 13 tasks":
            notes.append(
                f"The threshold of {THRESHOLD} from RULER's paper applies to the mean of all 13"
                " tasks; other means are not comparable with published figures."
            )
        return scores, notes

    def _notes(self) -> list[str]:
        """Return sentences on what the samples were made from."""
        notes = [
            f"The {self._mean_name()} is over {', '.join(self.tasks)}; samples per task and"
            f" length: {self.settings.samples}."
        ]
        if set(self.tasks) & set(ESSAYS):
            from megatron_tape.evaluation.tasks.ruler_samples import has_punkt

            if self.settings.haystack is not None:
                notes.append(
                    f"Needles were hidden in {Path(self.settings.haystack).name}, not in the essays"
                    " that published figures use."
                )
            if not has_punkt():
                notes.append(
                    "The haystack was split into sentences without nltk's list of abbreviations. To"
                    " install it: python -m nltk.downloader punkt_tab"
                )
        return notes


def _check_text(file: Path) -> None:
    """Raise FileError unless a haystack is a UTF-8 text of at least 500 words."""
    try:
        words = read_small(file, RECORD_BYTES).decode().split()
    except ValueError as error:
        raise FileError(file, f"cannot be used: {error}", "give a text file in UTF-8") from None
    if len(words) < 500:
        raise FileError(file, f"has {len(words)} words", "give a text of at least 500 words")
