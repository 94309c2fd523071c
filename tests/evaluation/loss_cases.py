"""Models with known losses, and shared helpers for tests of loss tasks."""

import json

import numpy as np

from megatron_tape.evaluation.results import TaskResult
from megatron_tape.evaluation.task import ModelInfo


class ByteModel:
    """A byte-level model whose loss is a function of (tokens before, token). Records the tokens
    that it scored.
    """

    def __init__(self, loss, vocab_size=256, trained_length=64, bos=()):
        self.info = ModelInfo("byte model", vocab_size, trained_length, {}, has_tokenizer=True)
        self.bos = list(bos)
        self.tokenizer = object()
        self._loss = loss
        self.scored = []
        self.longest = 0

    def encode(self, text):
        return list(text.encode())

    def decode(self, tokens):
        return bytes(tokens).decode(errors="replace")

    def losses(self, tokens, first):
        assert first >= 1
        assert list(tokens[: len(self.bos)]) == self.bos
        self.scored.append(list(tokens[first:]))
        self.longest = max(self.longest, len(tokens) - 1)
        return np.array(
            [self._loss(tokens[:i], tokens[i]) for i in range(first, len(tokens))], np.float64
        )


def uniform(vocab_size):
    return lambda before, token: np.log(vocab_size)


def copies(distance):
    """Expect the byte that stands `distance` bytes back, if the context reaches that far."""

    def loss(before, token):
        if len(before) < distance:
            return np.log(256)
        if before[-distance] == token:
            return -np.log(0.99)
        return -np.log(0.01 / 255)

    return loss


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def run(task_class, model, **settings):
    """Check, evaluate and summarize as the runner does; return the task's entry of results.json."""
    task = task_class(task_class.Settings(**settings))
    task.check(model.info)
    assert all(path.is_file() for path in task.inputs())
    units = task.units(model)
    values = {unit.key: through_json(task.evaluate(unit, model)) for unit in units}
    assert len(values) == len(units)
    assert all(unit.cost > 0 for unit in units)
    return result_of(task.summarize(values, model.info), values)


def through_json(value):
    return json.loads(json.dumps(value, allow_nan=False))


def result_of(summary, values=None):
    """A task's entry of results.json."""
    return TaskResult(
        settings={},
        data={},
        seconds=1.0,
        processes=1,
        scores=summary.scores,
        details=through_json(summary.details),
        notes=summary.notes,
        examples=values or {},
        dtype="fp32",
        hardware="a CPU",
        versions={},
    )


def score(result, metric, length=None, group=None):
    (found,) = [
        one
        for one in result.scores
        if one.metric == metric and length in (None, one.length) and group in (None, one.group)
    ]
    return found
