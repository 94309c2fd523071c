"""The task `scrolls`: generates answers and summaries, and scores them like SCROLLS' official
evaluator.

The TAPE paper fine-tunes a model on each dataset before the evaluation
(docs/evaluation/scrolls.md). Models that were not fine-tuned can be compared by the loss on the
targets.

The score of an example is F1, exact match or ROUGE without stemming, in percent, and the highest
over the references. The score of a dataset is the mean over its examples; for ROUGE, the geometric
mean of the means of ROUGE-1, -2 and -L.
"""

from __future__ import annotations

import functools
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from megatron_tape.config.data import TEMPLATE, check_template
from megatron_tape.config.values import Count, PathText, format_value
from megatron_tape.data.examples import ExampleEncoder, read_examples
from megatron_tape.errors import ConfigError, FileError
from megatron_tape.evaluation.results import Score, TaskResult
from megatron_tape.evaluation.score_pictures import by_group
from megatron_tape.evaluation.statistics import bootstrap_ratio, percentiles
from megatron_tape.evaluation.task import HuggingFaceModel, ModelInfo, Picture, Summary, Task, Unit

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
_COST_OF_TOKEN = 20.0
"""Cost of generating a token relative to reading one, used to balance ranks."""
_CHARACTERS_PER_TOKEN = 4


@dataclass(kw_only=True)
class ScrollsSettings:
    """Scores of generated answers and summaries on the datasets of SCROLLS, and the loss on their
    targets.
    """

    data: dict[str, PathText]
    """Paths of the datasets by name, such as {qasper: data/scrolls/qasper.zip}. A path is a zip
    file from the hub, or a file of JSON lines with the same schema."""
    split: str = "validation"
    """Split to read from zip files. The test split cannot be used, since it has no targets."""
    metrics: dict[str, Literal["f1", "exact_match", "rouge"]] = field(default_factory=dict)
    """Metric of each dataset that is not one of the seven of SCROLLS, by name of the dataset."""
    examples: Count | None = None
    """Maximum number of examples of each dataset; the first ones are used. Default: all examples.
    """
    length: Annotated[int, Field(ge=8)] | None = None
    """Context length in tokens, including the answer. Default: the training length."""
    target_tokens: Count | None = None
    """Maximum number of tokens of answers. Default: 200, or 1000 for summaries, but at most a
    quarter of length.
    """
    template: str = TEMPLATE
    """Template of prompts; use that of the fine-tuning. Inputs that are too long are truncated at
    the end, as in SCROLLS' baselines. The text of the template after an input is never truncated.
    """
    bos: bool | None = None
    """Whether prompts begin with the tokenizer's beginning-of-text token; use data.examples.bos of
    the fine-tuning. Default: as the exported tokenizer does; exported SentencePiece tokenizers add
    none."""
    generate: bool = True
    """Whether to generate answers greedily and score them."""
    loss: bool = True
    """Whether to compute the loss on the first target of each example, in nats per token."""


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
    generates: ClassVar[bool] = True

    def check(self, info: ModelInfo) -> None:
        settings = self.settings
        disabled = not (settings.generate or settings.loss)
        if disabled:
            raise ConfigError(
                (self.key("generate"), self.key("loss")),
                "is false, and so is loss",
                "set at least one of them to true",
            )
        check_template(settings.template, self.key("template"))
        length = self._length(info)
        tokens = settings.target_tokens or 0
        if tokens >= length:
            raise ConfigError(
                self.key("target_tokens"), f"is {tokens}", f"set it below the length, {length}"
            )
        for name in self._files():
            self._read(name)

    def inputs(self) -> list[Path]:
        return [Path(path) for path in self._files().values()]

    def _length(self, info: ModelInfo) -> int:
        length = self.settings.length or info.trained_length
        if length is None:
            raise ConfigError(
                self.key("length"),
                f"is null, but the configuration of {info.label} does not contain the training"
                " length",
                "set it, for example to 1024",
            )
        return length

    def _files(self) -> dict[str, str]:
        """Return the path of each dataset. Raises ConfigError if a file is missing, or a dataset
        has no metric.
        """
        key = self.key("data")
        data = self.settings.data
        known = {**METRICS, **self.settings.metrics}
        if not data:
            raise ConfigError(key, "is empty", "give {NAME: path}")
        for name, path in data.items():
            if name not in known:
                raise ConfigError(
                    key,
                    f"has {format_value(name)}, for which there is no metric",
                    f"choose from {', '.join(known)}, or add a metric to {self.key('metrics')}",
                )
            missing = not Path(path).is_file()
            if missing:
                raise ConfigError(
                    key,
                    f"has {format_value(path)} for {name}, but there is no such file",
                    "correct the path",
                )
        return data

    def _metric(self, name: str) -> str:
        return self.settings.metrics.get(name) or METRICS[name]

    def _target_tokens(self, name: str, length: int) -> int:
        count = self.settings.target_tokens
        if count is None:
            return min(TARGET_TOKENS[self._metric(name)], length // _SHARE_OF_TARGET)
        return count

    def _read(self, name: str) -> list[_Example]:
        """Return the examples of a dataset. Lines with the same id form one example with several
        targets.
        """
        path = self._files()[name]
        most = self.settings.examples
        examples: dict[str, _Example] = {}
        for line in read_examples(path, self.settings.split):
            key = line.place if line.key is None else f"id {line.key}"
            if key in examples:
                examples[key].targets.append(line.target)
            elif most is None or len(examples) < most:
                examples[key] = _Example(name, line.input, [line.target])
        if not examples:
            raise FileError(path, "contains no examples", "give another file")
        return list(examples.values())

    def units(self, model: HuggingFaceModel) -> list[Unit]:
        length = self._length(model.info)
        settings = self.settings
        self._examples: dict[str, _Example] = {}
        self._encoders: dict[str, ExampleEncoder] = {}
        units = []
        for name in self._files():
            count = self._target_tokens(name, length)
            self._encoders[name] = ExampleEncoder(
                model.encode, self._bos(model), settings.template, length, count
            )
            generation = _COST_OF_TOKEN * count if settings.generate else 0.0
            for index, example in enumerate(self._read(name)):
                key = f"{name}/{index}"
                self._examples[key] = example
                units.append(
                    Unit(
                        key,
                        min(length, 1 + len(example.input) / _CHARACTERS_PER_TOKEN) + generation,
                    )
                )
        return units

    def _bos(self, model: HuggingFaceModel) -> list[int]:
        if self.settings.bos is None:
            return model.bos
        token = model.tokenizer.bos_token_id
        missing = self.settings.bos and token is None
        if missing:
            raise ConfigError(
                self.key("bos"),
                "is true, but the tokenizer has no beginning-of-text token",
                "set it to false",
            )
        if self.settings.bos:
            return [token]
        return []

    def evaluate(self, unit: Unit, model: HuggingFaceModel) -> dict[str, Any]:
        example = self._examples[unit.key]
        settings = self.settings
        encoded = self._encoders[example.dataset](example.input, example.targets[0])
        found: dict[str, Any] = {
            "input_cut": encoded.input_truncated,
            "target_cut": encoded.target_truncated,
        }
        if settings.loss:
            losses = model.losses(np.array([*encoded.prompt, *encoded.target]), len(encoded.prompt))
            found |= {"nats": float(losses.sum()), "tokens": len(encoded.target)}
        if settings.generate:
            count = self._target_tokens(example.dataset, self._length(model.info))
            answer, ended = model.answer(encoded.prompt, count)
            parts = score(self._metric(example.dataset), answer, example.targets)
            found |= {"answer": answer, "ended": ended, "scores": parts}
        return found

    def summarize(self, values: dict[str, dict[str, Any]], info: ModelInfo) -> Summary:
        length = self._length(info)
        by_dataset = {name: [] for name in self._files()}
        for key, value in values.items():
            by_dataset[key.rpartition("/")[0]].append(value)
        scores = []
        notes = []
        details = {"parts": {}}
        resampled = []
        for name, found in by_dataset.items():
            common = {"length": length, "count": len(found), "counted": "example", "group": name}
            if self.settings.generate:
                metric = self._metric(name)
                parts = np.array([one["scores"] for one in found])
                resampled.append(_resample(parts))
                value = float(combine(parts.mean(0)))
                if len(found) > 1:
                    interval = percentiles(resampled[-1])
                else:
                    interval = (None, None)
                scores.append(Score(SHOWN[metric], value, "higher", *interval, unit="%", **common))
                details["parts"][name] = dict(zip(PARTS[metric], parts.mean(0).tolist()))
            if self.settings.loss:
                nats, tokens = ([one[key] for one in found] for key in ("nats", "tokens"))
                value = sum(nats) / max(1, sum(tokens))
                interval = bootstrap_ratio(nats, tokens)
                scores.append(
                    Score(
                        "target_loss",
                        value,
                        "lower",
                        *interval,
                        unit="nats per target token",
                        **common,
                    )
                )
            notes += self._notes(name, found)
        if len(resampled) > 1:
            scores.append(self._mean(scores, resampled, by_dataset, length))
        return Summary(scores, details, notes)

    @staticmethod
    def _mean(
        scores: list[Score], resampled: list[np.ndarray], by_dataset: dict[str, list], length: int
    ) -> Score:
        """Return the mean of the datasets' scores, named SCROLLS score only if all seven datasets
        are evaluated.
        """
        whole = set(by_dataset) == set(METRICS)
        name, group = (
            ("scrolls_score", "") if whole else ("mean_score", f"of {', '.join(by_dataset)} only")
        )
        value = float(np.mean([score.value for score in scores if score.metric in SHOWN.values()]))
        counts = list(map(len, by_dataset.values()))
        if min(counts) > 1:
            interval = percentiles(np.mean(resampled, axis=0))
        else:
            interval = (None, None)
        return Score(name, value, "higher", *interval, length, group, sum(counts), "%")

    def _notes(self, name: str, found: list[dict[str, Any]]) -> list[str]:
        counts = {
            "inputs were truncated at the end": sum(one["input_cut"] for one in found),
            "first targets were truncated for the loss": sum(
                one["target_cut"] and self.settings.loss for one in found
            ),
            "answers did not end within the maximum length": sum(
                not one.get("ended", True) for one in found
            ),
        }
        return [
            f"{name}: {count:,} of {len(found):,} {what}."
            for what, count in counts.items()
            if count
        ]

    @classmethod
    def draw(cls, results: dict[str, TaskResult]) -> list[Picture]:
        return [
            *by_group(results, lambda score: score.unit == "%", "scrolls-scores", "score (%)"),
            *by_group(
                results,
                lambda score: score.unit != "%",
                "scrolls-loss",
                "loss (nats per target token)",
            ),
        ]


def _resample(parts: np.ndarray) -> np.ndarray:
    random = np.random.default_rng(0)
    means = [parts[random.integers(len(parts), size=len(parts))].mean(0) for _ in range(_SAMPLES)]
    return combine(np.array(means))


def score(metric: str, prediction: str, references: Sequence[str]) -> list[float]:
    """Return the values (`PARTS`) of a metric in percent for a prediction, each the maximum over
    the references.
    """
    every = [_FUNCTIONS[metric](prediction, reference) for reference in references]
    return [100.0 * max(values) for values in zip(*every)]


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
    predicted = normalize(prediction).split()
    expected = normalize(reference).split()
    common = sum((Counter(predicted) & Counter(expected)).values())
    return (2 * common / (len(predicted) + len(expected)) if common else 0.0,)


def _exact_match(prediction: str, reference: str) -> tuple[float]:
    return (float(normalize(prediction) == normalize(reference)),)


def _rouge(prediction: str, reference: str) -> tuple[float, ...]:
    scores = _scorer().score(reference, prediction)
    return tuple(scores[part].fmeasure for part in PARTS["rouge"])


@functools.cache
def _scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(list(PARTS["rouge"]), use_stemmer=False)


_FUNCTIONS: dict[str, Callable[[str, str], tuple[float, ...]]] = {
    "f1": _f1,
    "exact_match": _exact_match,
    "rouge": _rouge,
}
