"""The task `scrolls`: generates answers and summaries, and scores them like SCROLLS' official
evaluator.

The TAPE paper fine-tunes a model on each dataset before the evaluation
(docs/evaluation/scrolls.md). Models that were not fine-tuned can be compared by the loss on the
targets.

The score of an example is F1, exact match or ROUGE without stemming, in percent, and the highest
over the references. The score of a dataset is the mean over its examples; for ROUGE, the geometric
mean of the means of ROUGE-1, -2 and -L.
"""

import functools
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_tape.config.data import check_template
from megatron_tape.config.evaluation import ScrollsSettings
from megatron_tape.config.values import format_value
from megatron_tape.data.examples import ExampleEncoder, read_examples
from megatron_tape.errors import ConfigError, FileError
from megatron_tape.evaluation.results import Score
from megatron_tape.evaluation.score_pictures import pictures_by_group
from megatron_tape.evaluation.statistics import Interval, percentiles, ratio_score
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

METRICS = {
    "qasper": "f1",
    "contract_nli": "exact_match",
    "narrative_qa": "f1",
    "quality": "exact_match",
    "qmsum": "rouge",
    "summ_screen_fd": "rouge",
    "gov_report": "rouge",
}
"""The datasets of SCROLLS and their metrics, in the order of the TAPE paper's table."""
PARTS = {"f1": ("f1",), "exact_match": ("exact_match",), "rouge": ("rouge1", "rouge2", "rougeL")}
"""Names of the values that are computed for each example, by metric."""
SHOWN = {"f1": "f1", "exact_match": "exact_match", "rouge": "rouge_geometric_mean"}
"""Name of the score of a dataset, by metric."""
TARGET_TOKENS = {"f1": 200, "exact_match": 200, "rouge": 1000}
"""Maximum number of tokens of answers by metric, as in the TAPE paper's released code."""
_SHARE_OF_TARGET = 4
"""Answers have at most the context length divided by this number."""
_SAMPLES = 1000
"""Number of bootstrap samples of an interval."""
_COST_OF_TOKEN = 20.0
"""Cost of generating a token relative to reading one, used to balance ranks."""
_CHARACTERS_PER_TOKEN = 4
"""Assumed number of characters of a token, for costs."""


@dataclass
class _Example:
    """An input of a dataset, and its targets (the reference answers)."""

    dataset: str
    input: str
    targets: list[str]


class Scrolls(Task):
    """Score of generated answers (F1, exact match or ROUGE), and loss on targets, by dataset."""

    name = "scrolls"
    title = "SCROLLS"
    Settings = ScrollsSettings
    generates = True

    def check(self, info: ModelInfo) -> None:
        """Raise UserError if the settings are invalid, or an example."""
        settings = self.settings
        if not (settings.generate or settings.loss):
            raise ConfigError(
                (self.key("generate"), self.key("loss")),
                "is false, and so is loss",
                "set at least one of them to true",
            )

        check_template(settings.template, self.key("template"))
        self._length(info)
        known = {**METRICS, **settings.metrics}
        if not settings.data:
            raise ConfigError(self.key("data"), "is empty", "give {NAME: path}")
        for name, path in settings.data.items():
            if name not in known:
                raise ConfigError(
                    self.key("data"),
                    f"has {format_value(name)}, for which there is no metric",
                    f"choose from {', '.join(known)}, or add a metric to {self.key('metrics')}",
                )
            if not Path(path).is_file():
                raise ConfigError(
                    self.key("data"),
                    f"has {format_value(path)} for {name}, but there is no such file",
                    "correct the path",
                )
            # Raises FileError for an invalid line.
            self._read(name)

    def inputs(self) -> list[Path]:
        """Return the files of the datasets."""
        return [Path(path) for path in self.settings.data.values()]

    def _length(self, info: ModelInfo) -> int:
        """Return the context length in tokens. Raises ConfigError if it is unknown."""
        length = self.settings.length or info.trained_length
        if length is None:
            raise ConfigError(
                self.key("length"),
                f"is null, but the configuration of {info.label} does not contain the training"
                " length",
                "set it, for example to 1024",
            )
        return length

    def _metric(self, name: str) -> str:
        """Return the metric of a dataset, such as `rouge`."""
        return self.settings.metrics.get(name) or METRICS[name]

    def _target_tokens(self, name: str, length: int) -> int:
        """Return the maximum number of tokens of a dataset's answers at a context length."""
        if self.settings.target_tokens is not None:
            return self.settings.target_tokens
        return min(TARGET_TOKENS[self._metric(name)], length // _SHARE_OF_TARGET)

    def _read(self, name: str) -> list[_Example]:
        """Return the examples of a dataset. Lines with the same id form one example with several
        targets.
        """
        path = self.settings.data[name]
        most = self.settings.examples
        examples = {}  # by id, or by place in the file for lines without an id
        for line in read_examples(path, self.settings.split):
            # SCROLLS repeats an input for each of its reference answers.
            key = line.place if line.key is None else f"id {line.key}"
            if key in examples:
                examples[key].targets.append(line.target)
            elif most is None or len(examples) < most:
                examples[key] = _Example(name, line.input, [line.target])
        if not examples:
            raise FileError(path, "contains no examples", "give another file")
        return list(examples.values())

    def units(self, model: HuggingFaceModel) -> list[Unit]:
        """Read all examples; return a unit for each, with the key `DATASET/NUMBER`."""
        settings = self.settings
        length = self._length(model.info)
        bos = self._bos(model)
        # Examples by unit key, and encoders by dataset.
        self._examples = {}
        self._encoders = {}
        units = []
        for name in settings.data:
            count = self._target_tokens(name, length)
            self._encoders[name] = ExampleEncoder(
                model.encode,
                bos,
                settings.template,
                length,
                count,
            )
            for index, example in enumerate(self._read(name)):
                key = f"{name}/{index}"
                self._examples[key] = example
                # Longer inputs are truncated to the context length.
                cost = min(length, 1 + len(example.input) / _CHARACTERS_PER_TOKEN)
                if settings.generate:
                    cost += _COST_OF_TOKEN * count
                units.append(Unit(key, cost))
        return units

    def _bos(self, model: HuggingFaceModel) -> list[int]:
        """Return the beginning-of-text token of prompts: a list of one id, or an empty list."""
        if self.settings.bos is None:
            return model.bos
        if not self.settings.bos:
            return []
        token = model.tokenizer.bos_token_id
        if token is None:
            raise ConfigError(
                self.key("bos"),
                "is true, but the tokenizer has no beginning-of-text token",
                "set it to false",
            )
        return [token]

    def evaluate(self, unit: Unit, model: HuggingFaceModel) -> Value:
        """Return the loss on the first target of an example, and the scores of an answer."""
        example = self._examples[unit.key]
        name = example.dataset
        encoded = self._encoders[name](example.input, example.targets[0])
        prompt = encoded.prompt
        target = encoded.target
        value: Value = {
            "input_cut": encoded.input_truncated,
            "target_cut": encoded.target_truncated,
        }
        if self.settings.loss:
            # Only the target has a loss: `losses` returns those from token `len(prompt)` on.
            losses = model.losses(np.array([*prompt, *target]), len(prompt))
            value |= {"nats": float(losses.sum()), "tokens": len(target)}
        if self.settings.generate:
            count = self._target_tokens(name, self._length(model.info))
            answer, ended = model.answer(prompt, count)
            scores = score(self._metric(name), answer, example.targets)
            value |= {"answer": answer, "ended": ended, "scores": scores}
        return value

    def summarize(self, values: Values, info: ModelInfo) -> Summary:
        """Return scores and losses by dataset and, with all datasets, their mean."""
        length = self._length(info)
        scores = []
        notes = []
        parts = {}  # the mean of each of `PARTS`, by dataset
        resampled = []  # bootstrap scores (samples,) of each dataset
        for name in self.settings.data:
            examples = [value for key, value in values.items() if key.rpartition("/")[0] == name]
            count = len(examples)
            common = {"length": length, "count": count, "counted": "example", "group": name}

            # Values of generated answers: a row for each example, a column for each of `PARTS`.
            if self.settings.generate:
                metric = self._metric(name)
                example_parts = np.array([value["scores"] for value in examples])
                means = example_parts.mean(0)
                resampled.append(_resample(example_parts))
                interval = _interval(resampled[-1], count)
                scores.append(
                    Score(
                        SHOWN[metric],
                        float(combine(means)),
                        "higher",
                        *interval,
                        unit="%",
                        **common,
                    )
                )
                parts[name] = dict(zip(PARTS[metric], means.tolist()))

            # Losses on the first targets.
            if self.settings.loss:
                nats = [value["nats"] for value in examples]
                tokens = [value["tokens"] for value in examples]
                unit = "nats per target token"
                scores.append(
                    ratio_score("target_loss", nats, tokens, "lower", unit=unit, **common)
                )

            notes += self._notes(name, examples)

        # The mean is comparable with published figures only if no dataset is missing.
        if resampled and set(self.settings.data) == set(METRICS):
            datasets = [score for score in scores if score.metric in SHOWN.values()]
            mean = float(np.mean([score.value for score in datasets]))
            counts = [score.count for score in datasets]
            interval = _interval(np.mean(resampled, axis=0), min(counts))
            scores.append(
                Score(
                    "scrolls_score",
                    mean,
                    "higher",
                    *interval,
                    length=length,
                    count=sum(counts),
                    unit="%",
                )
            )
        return Summary(scores, {"parts": parts}, notes)

    def _notes(self, name: str, examples: list[Value]) -> list[str]:
        """Return sentences on truncated inputs and targets, and on answers that did not end."""
        cut_inputs = sum(value["input_cut"] for value in examples)
        cut_targets = sum(value["target_cut"] and "nats" in value for value in examples)
        unfinished = sum(not value.get("ended", True) for value in examples)
        counts = {
            "inputs were truncated at the end": cut_inputs,
            "first targets were truncated for the loss": cut_targets,
            "answers did not end within the maximum length": unfinished,
        }
        return [
            f"{name}: {count:,} of {len(examples):,} {problem}."
            for problem, count in counts.items()
            if count
        ]

    @classmethod
    def draw(cls, results: TaskResults) -> list[Picture]:
        """Return pictures of the scores and of the losses by dataset."""
        return [
            *pictures_by_group(
                results,
                lambda score: score.unit == "%",
                file_name="scrolls-scores",
                x_label="score (%)",
            ),
            *pictures_by_group(
                results,
                lambda score: score.unit != "%",
                file_name="scrolls-loss",
                x_label="loss (nats per target token)",
            ),
        ]


def _resample(parts: np.ndarray) -> np.ndarray:
    """Return `_SAMPLES` bootstrap scores of a dataset, from its values (examples, `PARTS`)."""
    # The seed is fixed, so that the same values always have the same interval.
    random = np.random.default_rng(0)
    count = len(parts)
    means = []
    for _ in range(_SAMPLES):
        drawn = random.integers(count, size=count)
        means.append(parts[drawn].mean(0))
    return combine(np.array(means))


def _interval(resampled: np.ndarray, examples: int) -> Interval:
    """Return the 95 % interval of bootstrap scores; none for fewer than two examples."""
    if examples < 2:
        return None, None
    return percentiles(resampled)


def score(metric: str, prediction: str, references: Sequence[str]) -> list[float]:
    """Return the values (`PARTS`) of a metric in percent for a prediction, each the maximum over
    the references.
    """
    by_reference = [_FUNCTIONS[metric](prediction, reference) for reference in references]
    return [100.0 * max(values) for values in zip(*by_reference)]


def combine(means: np.ndarray) -> np.ndarray:
    """Return the scores (...) of datasets: geometric means over the P `PARTS` of `means` (...,
    P).
    """
    return means.prod(axis=-1) ** (1.0 / means.shape[-1])


def normalize(text: str) -> str:
    """Normalize a text as SQuAD does: to lower case, without punctuation, articles and repeated
    spaces.
    """
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _f1(prediction: str, reference: str) -> tuple[float]:
    """Return the F1 of words, from 0 to 1, as a tuple like those of the other metrics."""
    predicted = normalize(prediction).split()
    expected = normalize(reference).split()
    # Words in both, as often as in the one with fewer of them.
    common = (Counter(predicted) & Counter(expected)).total()
    return (2 * common / max(1, len(predicted) + len(expected)),)


def _exact_match(prediction: str, reference: str) -> tuple[float]:
    """Return 1 if the normalized texts are equal, else 0."""
    return (float(normalize(prediction) == normalize(reference)),)


def _rouge(prediction: str, reference: str) -> tuple[float, ...]:
    """Return ROUGE-1, ROUGE-2 and ROUGE-L, from 0 to 1."""
    scores = _scorer().score(reference, prediction)
    return tuple(scores[part].fmeasure for part in PARTS["rouge"])


@functools.cache
def _scorer() -> Any:
    """Return the scorer of the package rouge_score."""
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(list(PARTS["rouge"]), use_stemmer=False)


_FUNCTIONS: dict[str, Callable[[str, str], tuple[float, ...]]] = {
    "f1": _f1,
    "exact_match": _exact_match,
    "rouge": _rouge,
}
