"""Tests of hooks: a registered evaluation, the choice of evaluations, and profiling."""

import gzip
import json
import os
import signal
from pathlib import Path

import pytest
import torch
from datasets_for_tests import write_all
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training_cases import RECIPE, option, rows

from megatron_tape.model.language_model import LanguageModel
from megatron_tape.training.engine import Engine
from megatron_tape.training.hooks import HOOKS, Hook, HookResult, merge_results, register
from pretrain import train


class Toy(Hook):
    """Counts the steps and the tokens of each step, and returns a scalar and a text from each
    evaluation.
    """

    seen = 0
    tokens = 0

    def on_micro_batch(self, trainer, step, batch):
        self.tokens += batch["tokens"].numel()

    def after_step(self, trainer, step, result):
        assert trainer.step == step
        assert not result.skipped
        self.seen += 1
        tokens, self.tokens = self.tokens, 0
        return HookResult({"toy/seen": self.seen, "toy/tokens": tokens})

    def evaluate(self, trainer, step):
        return HookResult(scalars={"toy/step": step}, texts={"toy": f"text of {step}"})


@pytest.fixture
def run(tmp_path):
    register("toy", Toy)
    data = write_all(tmp_path)

    def start(*overrides):
        prefix = option("data.prefix", f"{data}/a")
        folder = f"--logging.directory={tmp_path / 'run'}"
        return train.main(["--config", str(RECIPE), prefix, folder, "--train.steps=5", *overrides])

    start.folder = tmp_path / "run"
    yield start
    del HOOKS["toy"]
    HOOKS.pop("end_of_document", None)


def test_results_of_a_registered_evaluation_reach_metrics_and_tensorboard(run):
    chosen = [
        "--train.evaluations=[position_norms,toy]",
        "--logging.tensorboard=true",
        "--logging.interval=2",
    ]
    assert run(*chosen, "--train.eval_interval=3") == 0
    logged = rows(run.folder)
    assert [row["step"] for row in logged] == [1, 2, 3, 4, 5]
    assert [row["toy/seen"] for row in logged] == [1, 2, 3, 4, 5]
    assert {row["toy/tokens"] for row in logged} == {4 * 16}
    assert [row.get("toy/step") for row in logged] == [None, None, 3, None, 5]
    assert not any("validation/loss" in row for row in logged)
    assert all("position/state_norm/layer_01" in row for row in logged)

    events = EventAccumulator(str(run.folder / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("toy/step")] == [(3, 3.0), (5, 5.0)]
    first, last = events.Tensors("toy/text_summary")
    assert b"text of 3" in first.tensor_proto.string_val[0]
    assert last.step == 5


def test_hooks_see_the_micro_batches_that_the_rank_trains_on(run, monkeypatch):
    forward = LanguageModel.forward
    seen = []
    trained = []

    def recorded(model, tokens, *arguments, **keywords):
        if model.training:
            trained.append(tokens)
        return forward(model, tokens, *arguments, **keywords)

    def on_micro_batch(toy, trainer, step, batch):
        assert trainer.step == step - 1 == len(seen) // 2
        seen.append(batch["tokens"])

    monkeypatch.setattr(LanguageModel, "forward", recorded)
    monkeypatch.setattr(Toy, "on_micro_batch", on_micro_batch)
    assert run("--train.evaluations=[toy]", "--train.micro_batch_size=2") == 0
    assert len(seen) == len(trained) == 5 * 2
    assert all(map(torch.equal, seen, trained))


def test_hooks_see_the_datasets_of_a_blend_which_the_model_and_the_validation_do_not_get(
    run, monkeypatch
):
    tokens = {0: 0, 1: 0}

    def on_micro_batch(toy, trainer, step, batch):
        for number, sequence in zip(batch["dataset_id"].tolist(), batch["tokens"], strict=True):
            tokens[number] += len(sequence)

    monkeypatch.setattr(Toy, "on_micro_batch", on_micro_batch)
    folder = run.folder.parent
    blend = option("data.prefix", f"{{{folder}/a: 0.25, {folder}/b: 0.75}}")
    chosen = "--train.evaluations=[validation_loss,toy]"
    assert run(blend, chosen, "--train.micro_batch_size=2") == 0
    assert tokens == {0: 5 * 16, 1: 15 * 16}
    assert "validation/loss" in rows(run.folder)[-1]


def test_the_hook_in_the_documentation_counts_tokens_of_each_batch(run):
    page = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
    (code,) = [part.split("```")[0] for part in page.split("```python") if "class EndOf" in part]
    exec(code, {})
    tokenizer = option("data.tokenizer", run.folder.with_name("tokenizer.json"))
    assert run("--train.evaluations=[end_of_document]", tokenizer) == 0
    shares = [row["data/end_of_document"] for row in rows(run.folder)]
    assert len(shares) == 5
    assert 0 < sum(shares) < 5


def test_only_named_evaluations_run(run):
    assert run("--train.evaluations=[]", "--train.eval_interval=3", "--logging.interval=2") == 0
    assert [row["step"] for row in rows(run.folder)] == [1, 2, 4, 5]
    assert not any(
        {"validation/loss", "position/state_norm"} & row.keys() for row in rows(run.folder)
    )


def test_configured_steps_and_steps_after_a_signal_are_traced_without_changing_training(
    run, monkeypatch
):
    assert run("--train.profile={steps: [1, 2]}", "--train.steps=6") == 0
    train_step = Engine.train_step

    def signaled(engine, batches, rate, step):
        if step == 3:
            os.kill(os.getpid(), signal.SIGUSR2)
        return train_step(engine, batches, rate, step)

    traces = run.folder / "profile"
    traced = rows(run.folder)
    assert "aten::mm" in names_in(traces / "steps-1-2-rank-0.json.gz")
    run.folder.rename(run.folder.with_name("traced"))
    with monkeypatch.context() as patched:
        patched.setattr(Engine, "train_step", signaled)
        assert run("--train.profile={ranks: [0]}", "--train.steps=6") == 0
    assert [path.name for path in traces.iterdir()] == ["steps-4-5-rank-0.json.gz"]
    assert "aten::mm" in names_in(traces / "steps-4-5-rank-0.json.gz")
    assert rows(run.folder) == traced
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


def names_in(trace):
    with gzip.open(trace) as file:
        return {event["name"] for event in json.load(file)["traceEvents"]}


def test_two_evaluations_cannot_return_the_same_name():
    result = HookResult(scalars={"train/loss": 1.0})
    with pytest.raises(ValueError, match="evaluation toy returns train/loss"):
        merge_results([("training", result), ("toy", result)])


def test_an_unknown_evaluation_is_refused_with_the_known_ones(run, capfd):
    with pytest.raises(SystemExit):
        run("--train.evaluations=[validation_loss,perplexity]")
    error = capfd.readouterr().err
    assert "perplexity" in error
    assert "gradient_norms, toy" in error
    assert error.count("\n") == 1
