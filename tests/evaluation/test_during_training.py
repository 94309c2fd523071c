"""Tasks as hooks of a training run; tests/training/test_training.py covers all layouts."""

import dataclasses
import json

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
    data = tmp_path / "perplexity.jsonl"
    data.write_text('{"text": "good"}\n{"text": 3}\n')
    tokenizer = str(tmp_path / "tokenizer.json")
    write_tokenizer(tmp_path / "tokenizer.json")
    for path, tokenizer_path, subject in (
        (data, tokenizer, f"{data}:2"),
        (data, None, "evaluation.perplexity.data"),
        (tmp_path / "nowhere", tokenizer, "evaluation.perplexity.data"),
    ):
        settings = {"data": str(path), "lengths": [8]}
        config = make(evaluation__perplexity=settings, data__tokenizer=tokenizer_path)
        with pytest.raises(UserError) as error:
            check_tasks(config)
        assert error.value.subject == subject


@pytest.fixture
def run(tmp_path):
    data = write_all(tmp_path)
    words = [" ".join(f"w{(i * step) % 60}" for i in range(40)) for step in (1, 3, 7)]
    write_jsonl(tmp_path / "held_out.jsonl", words)
    options = [
        option("data.prefix", f"{data}/a"),
        option("data.tokenizer", f"{data}/tokenizer.json"),
        option("logging.directory", tmp_path / "run"),
        "--train.steps=4",
        "--train.evaluations=[]",
    ]
    return lambda *overrides: train.main(["--config", str(RECIPE), *options, *overrides])


def test_scores_during_training_equal_those_of_pretrain_evaluate(run, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(evaluate.signal, "signal", lambda *_: None)
    settings = {"data": str(tmp_path / "held_out.jsonl"), "lengths": [6, 12], "stride": 4}
    given = option("evaluation.perplexity", json.dumps(settings))
    assert run(given, "--evaluation.every=3", "--logging.interval=10") == 0
    first, third, last = rows(tmp_path / "run")
    assert (first["step"], third["step"], last["step"]) == (1, 3, 4)
    assert first.keys() & {"evaluation/perplexity/loss/held_out/6"} == set()
    loss = third["evaluation/perplexity/loss/held_out/6"]
    printed = capfd.readouterr()
    line = f"evaluation at step 3 | perplexity/loss/held_out/6 {loss:.4g} | "
    assert line in printed.out + printed.err

    arguments = [f"--perplexity.{key}={value}" for key, value in settings.items()]
    places = [f"--model={tmp_path / 'run'}", f"--output={tmp_path / 'out'}", "--device=cpu"]
    assert evaluate.main(["perplexity", *places, *arguments]) == 0
    scores = read_results(tmp_path / "out").tasks["perplexity"].scores
    assert len(scores) == 6
    for score in scores:
        tag = f"evaluation/perplexity/{score.metric}/{score.group}/{score.length}"
        assert last[tag] == pytest.approx(score.value, rel=1e-5)


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


def test_a_task_that_fails_is_a_warning_and_training_goes_on(run, tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(tasks.TASKS, "perplexity", Failing)
    assert run("--evaluation.perplexity={data: none}", "--evaluation.every=2") == 0
    logged = rows(tmp_path / "run")
    names = {name for row in logged for name in row}
    assert len(logged) == 4
    assert not any(name.startswith("evaluation/") for name in names)
    warning = "the evaluation perplexity of step 2 has no result: the loss is infinite"
    assert warning in capfd.readouterr().err
