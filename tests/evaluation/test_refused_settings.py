"""Invalid settings and data of tasks are refused by their key before anything is loaded."""

from dataclasses import replace

import numpy as np
import pytest
from evaluation.loss_cases import write_jsonl

from megatron_tape.errors import ConfigError, FileError
from megatron_tape.evaluation.task import ModelInfo
from megatron_tape.evaluation.tasks import TASKS

CONFIG = {"model_type": "tape", "num_hidden_layers": 5, "num_attention_heads": 4}
INFO = ModelInfo("model", 256, 64, CONFIG, has_tokenizer=True)
REQUIRED = {
    "perplexity": {"data": "texts.jsonl"},
    "context_gain": {"data": "texts.jsonl"},
    "positions": {"data": "texts.jsonl"},
    "scrolls": {"data": {"qasper": "qasper.jsonl"}},
    "lm_eval": {"tasks": ["own"]},
}


def refused(task, settings, info=INFO):
    """Return the error of a task's `check`, after adding the settings that the task requires."""
    with pytest.raises((ConfigError, FileError)) as error:
        TASKS[task](TASKS[task].Settings(**{**REQUIRED.get(task, {}), **settings})).check(info)
    assert str(error.value).count("\n") == 0
    assert error.value.problem
    return error.value


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "texts.jsonl", ["a text of more than sixteen bytes"] * 3)
    (tmp_path / "qasper.jsonl").write_text('{"id": "1", "pid": "1", "input": "a", "output": "b"}\n')
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": 3}\n')
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n')
    np.array([1, 2, 300] * 20, "<u2").tofile(tmp_path / "ids.bin")
    np.array([1, 2, 3] * 20, "<u4").tofile(tmp_path / "uint32.bin")
    (tmp_path / "cut.bin").write_bytes(b"\1\0" * 63)
    (tmp_path / "hay").write_bytes(b"word " * 600 + b"\n\xff\xfe")
    (tmp_path / "few").write_bytes(b"word " * 9)
    (tmp_path / "odd.json").write_text("{}")
    for name in ("damaged.idx", "damaged.bin"):
        (tmp_path / name).write_bytes(b"abc")


@pytest.mark.parametrize(
    "task, settings, key",
    [
        ("perplexity", {"lengths": [16, 1]}, "lengths"),
        ("perplexity", {"data": "nowhere.jsonl"}, "data"),
        ("perplexity", {"split": "1,0,0"}, "split"),
        ("perplexity", {"split": "6,3,1"}, "split"),
        ("context_gain", {"lengths": [16, 64], "short": 16}, "short"),
        ("ruler", {"tasks": ["vt", "niah"]}, "tasks"),
        ("ruler", {"haystack": "no/such/file"}, "haystack"),
        ("ruler", {"lengths": [160, 160]}, "lengths"),
        ("lm_eval", {"tasks": ["no.yaml"]}, "tasks"),
        ("lm_eval", {"include_path": "nowhere"}, "include_path"),
        ("scrolls", {"generate": False, "loss": False}, "generate"),
        ("scrolls", {"template": "Answer:"}, "template"),
        ("scrolls", {"data": {"own": "qasper.jsonl"}}, "data"),
        ("positions", {"length": 1}, "length"),
        ("addition", {"step": 100}, "step"),
        ("selective_copy", {"blanks": {}}, "blanks"),
        ("grid_navigation", {"variants": {"IID": [1.5, 2, 0]}}, "variants.IID"),
        ("grid_navigation", {"dimensions": 3}, "dimensions"),
        ("recall", {"keys": 2}, "keys"),
    ],
)
def test_invalid_settings_are_rejected_with_their_key(task, settings, key):
    assert refused(task, settings).subject == f"{task}.{key}"


@pytest.mark.parametrize(
    "settings, subject, said",
    [
        ({"data": "bad.jsonl"}, "bad.jsonl:2", "the value of 'text' is not a string"),
        ({"text_key": "body"}, "texts.jsonl:1", "with --perplexity.text_key"),
        ({"lengths": [100]}, "texts.jsonl", "the longest has 33 bytes"),
        ({"data": "empty.jsonl"}, "empty.jsonl", "the longest has 0 bytes"),
        ({"data": "ids.bin", "lengths": [16]}, "ids.bin", "token 2 of document 0 is 300"),
        ({"data": "ids.bin", "lengths": [100]}, "ids.bin", "no document of the 101 tokens"),
        ({"data": "uint32.bin"}, "uint32.bin", "set perplexity.token_dtype to uint32"),
        ({"data": "cut.bin", "token_dtype": "uint32"}, "cut.bin", "a multiple of 4"),
        ({"data": "damaged"}, "damaged", "damaged header"),
    ],
)
def test_invalid_documents_are_rejected_with_their_file(settings, subject, said):
    error = refused("perplexity", settings)
    assert error.subject == subject
    assert said in f"{error.problem}; {error.fix}"


@pytest.mark.parametrize(
    "setting, file", [("haystack", "hay"), ("haystack", "few"), ("hotpotqa", "odd.json")]
)
def test_invalid_data_of_ruler_is_rejected_with_its_file(setting, file):
    assert refused("ruler", {setting: file}).subject == file


@pytest.mark.parametrize("task", ["perplexity", "passkey", "ruler", "scrolls"])
def test_a_model_of_unknown_length_requires_a_length_setting(task):
    error = refused(task, {}, replace(INFO, trained_length=None))
    assert error.subject in (f"{task}.lengths", f"{task}.length")
    assert error.problem.startswith("is null")


@pytest.mark.parametrize(
    "task, settings, info",
    [
        (
            "perplexity",
            {"lengths": [33]},
            replace(INFO, trained_length=32, config={"model_type": "gpt2"}),
        ),
        ("perplexity", {}, replace(INFO, has_tokenizer=False)),
        ("perplexity", {"data": "ids.bin", "lengths": [16]}, replace(INFO, vocab_size=65_537)),
        ("positions", {}, replace(INFO, config={"model_type": "llama"})),
        ("addition", {}, replace(INFO, vocab_size=12)),
    ],
)
def test_a_model_that_does_not_fit_a_task_is_rejected(task, settings, info):
    assert refused(task, settings, info).subject.startswith(task)
