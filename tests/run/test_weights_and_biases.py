"""Logging to Weights & Biases, whose package is replaced by a small module."""

import json
import sys

import pytest
from datasets_for_tests import write_all
from training_cases import RECIPE, option, rows

from megatron_tape.config.schema import WandbSettings
from megatron_tape.run.metrics import MetricsWriter
from megatron_tape.run.weights_and_biases import WandbRun, read_wandb
from pretrain import status, train

STUB = """
import json, os

Settings = dict

class Run:
    def __init__(self, id, dir, project, **settings):
        self.id = id
        self.url = f"https://wandb.example/{project}/{id}"
        self.file = os.path.join(dir, "logged.jsonl")
        shown = ("name", "mode", "resume", "entity")
        self.write({"init": id, **{key: settings[key] for key in shown}})

    def write(self, entry):
        if os.path.exists(os.path.join(os.path.dirname(self.file), "fails")):
            raise ConnectionError("no answer")
        with open(self.file, "a") as file:
            file.write(json.dumps(entry) + "\\n")

    def define_metric(self, name, step_metric):
        self.write({"by": step_metric})

    def log(self, values):
        self.write(values)

    def finish(self):
        self.write("finished")

def init(**settings):
    return Run(**settings)
"""
SETTINGS = WandbSettings(project="tape")


@pytest.fixture(autouse=True)
def stub(tmp_path, monkeypatch):
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "wandb.py").write_text(STUB)
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    yield
    sys.modules.pop("wandb", None)


def logged(folder):
    return [json.loads(line) for line in (folder / "logged.jsonl").read_text().splitlines()]


def test_a_continued_run_logs_to_the_same_wandb_run_and_trains_as_without_wandb(tmp_path, capfd):
    def start(name, *overrides):
        given = ["--config", str(RECIPE), option("data.prefix", f"{write_all(tmp_path / name)}/a")]
        given += [f"--logging.directory={tmp_path / name}", "--train.eval_interval=0"]
        assert train.main([*given, *overrides]) == 0
        return tmp_path / name

    wandb = ["--logging.wandb={project: tape, entity: us}", "--schedule.kind=constant"]
    start("run", *wandb, "--train.steps=3")
    run = start("run", *wandb, "--train.steps=4")
    alone = start("alone", "--train.steps=4", "--schedule.kind=constant")
    assert [row["train/loss"] for row in rows(run)] == [row["train/loss"] for row in rows(alone)]
    init = {"init": read_wandb(run)["id"], "name": "run", "mode": "online"}
    init |= {"resume": "allow", "entity": "us"}
    entries = logged(run)
    without_steps = [entry for entry in entries if "step" not in entry]
    assert without_steps == [init, {"by": "step"}, "finished"] * 2
    losses = [(entry["step"], entry["train/loss"]) for entry in entries if "step" in entry]
    assert losses == [(row["step"], row["train/loss"]) for row in rows(run)]
    assert status.main([str(run)]) == 0
    assert f"wandb       https://wandb.example/tape/{init['init']}\n" in capfd.readouterr().out


def test_a_failure_of_wandb_is_a_warning_and_metrics_are_still_written(tmp_path, caplog):
    writer = MetricsWriter(tmp_path, 9, tensorboard=False, wandb=WandbRun(SETTINGS, tmp_path, {}))
    writer.log(1, {"train/loss": 1.0})
    (tmp_path / "fails").touch()
    for step in (2, 3):
        writer.log(step, {"train/loss": 1.0})
    writer.close()
    assert [entry.get("step") for entry in logged(tmp_path) if "by" not in entry] == [None, 1]
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 3
    WandbRun(SETTINGS, tmp_path, {}).log(4, {})
    assert [record.message.endswith("(no answer)") for record in caplog.records] == [True, True]
