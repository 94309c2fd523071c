"""Tasks as hooks of a training run; tests/training/test_training.py covers all layouts."""

import dataclasses
import json
from functools import partial

import pytest
from configurations import make
from datasets_for_tests import write_all, write_tokenizer
from evaluation.loss_cases import write_jsonl
from training_cases import RECIPE, option, rows

from megatron_tape.config.evaluation import EvaluationConfig
from megatron_tape.errors import ConfigError, UserError
from megatron_tape.evaluation import tasks
from megatron_tape.evaluation.during_training import check_tasks
from megatron_tape.evaluation.results import read_results
from megatron_tape.evaluation.task import Task, Unit
from megatron_tape.evaluation.tasks import TASKS
from pretrain import evaluate, train


def test_every_task_that_does_not_generate_runs_during_training():
    known = {field.name for field in dataclasses.fields(EvaluationConfig)} - {"every"}
    assert known == {name for name in TASKS if not TASKS[name].generates}


def test_invalid_task_settings_are_rejected_with_the_other_settings():
    with pytest.raises(ConfigError) as error:
        make(evaluation__perplexity={"data": "x", "length": [8]})
    assert error.value.key == "evaluation.perplexity.length"


def test_data_is_refused_with_the_name_of_the_setting(tmp_path):
    path = tmp_path / "perplexity.jsonl"
    path.write_text('{"text": "good"}\n{"text": 3}\n')
    settings = {"data": str(path), "lengths": [8]}
    write_tokenizer(tmp_path / "tokenizer.json")
    make_config = partial(make, data__tokenizer=str(tmp_path / "tokenizer.json"))
    for tokenizer, subject in (
        (str(tmp_path / "tokenizer.json"), f"{path}:2"),
        (None, "evaluation.perplexity.data"),
    ):
        with pytest.raises(UserError) as error:
            check_tasks(make(evaluation__perplexity=settings, data__tokenizer=tokenizer))
        assert error.value.subject == subject
    path.unlink()
    with pytest.raises(ConfigError) as error:
        check_tasks(make_config(evaluation__perplexity=settings))
    assert error.value.key == "evaluation.perplexity.data"


@pytest.fixture
def run(tmp_path):
    data = write_all(tmp_path)
    words = [" ".join(f"w{(i * step) % 60}" for i in range(40)) for step in (1, 3, 7)]
    write_jsonl(tmp_path / "held_out.jsonl", words)

    def start(*overrides):
        options = [
            option("data.prefix", f"{data}/a"),
            option("data.tokenizer", f"{data}/tokenizer.json"),
        ]
        options += [
            option("logging.directory", tmp_path / "run"),
            "--train.steps=4",
            "--train.evaluations=[]",
        ]
        return train.main(["--config", str(RECIPE), *options, *overrides])

    start.folder = tmp_path
    return start


def test_scores_during_training_equal_those_of_pretrain_evaluate(run, monkeypatch, capfd):
    monkeypatch.setattr(evaluate.signal, "signal", lambda *_: None)
    settings = {"data": str(run.folder / "held_out.jsonl"), "lengths": [6, 12], "stride": 4}
    assert (
        run(
            option("evaluation.perplexity", json.dumps(settings)),
            "--evaluation.every=3",
            "--logging.interval=10",
        )
        == 0
    )
    printed = capfd.readouterr()
    logged = rows(run.folder / "run")
    found = [
        {name: value for name, value in row.items() if name.startswith("evaluation/")}
        for row in logged
    ]
    assert (
        [row["step"] for row in logged] == [1, 3, 4]
        and not found[0]
        and found[1].keys() == found[2].keys()
    )
    line = " | ".join(
        f"{name.removeprefix('evaluation/')} {value:.4g}" for name, value in found[1].items()
    )
    assert f"evaluation at step 3 | {line}\n" in printed.out + printed.err

    output = run.folder / "evaluation"
    arguments = [f"--perplexity.{key}={value}" for key, value in settings.items()]
    command = [
        "perplexity",
        "--model",
        str(run.folder / "run"),
        "--output",
        str(output),
        "--device=cpu",
        *arguments,
    ]
    assert evaluate.main(command) == 0
    scores = read_results(output).tasks["perplexity"].scores
    expected = {f"evaluation/perplexity/{s.metric}/{s.group}/{s.length}": s.value for s in scores}
    assert len(expected) == 6 and found[2] == pytest.approx(expected, rel=1e-5)


class Failing(Task):
    """A task that fails on its second unit."""

    name = "perplexity"
    needs_tokenizer = False

    def units(self, model):
        return [Unit("0"), Unit("1")]

    def evaluate(self, unit, model):
        if unit.key == "1":
            raise ValueError("the loss is infinite")
        return {}


def test_a_task_that_fails_is_a_warning_and_training_goes_on(run, monkeypatch, capfd):
    monkeypatch.setitem(tasks.TASKS, "perplexity", Failing)
    assert run("--evaluation.perplexity={data: none}", "--evaluation.every=2") == 0
    logged = rows(run.folder / "run")
    assert len(logged) == 4 and not any(
        name.startswith("evaluation/") for row in logged for name in row
    )
    assert (
        "the evaluation perplexity of step 2 has no result: the loss is infinite"
        in capfd.readouterr().err
    )
