"""Tests of weight averages (`train.average`): their values, and how they are exported and
evaluated.
"""

import pytest
import torch
from configurations import make, make_alone
from datasets_for_tests import write_all
from models import build, random_batch, small_model
from safetensors.torch import load_file
from training_cases import AVERAGE, RECIPE, option

from megatron_tape.checkpoint.locate import find_checkpoint
from megatron_tape.checks.combinations import validate
from megatron_tape.config.train import AverageSettings
from megatron_tape.errors import CheckpointError, ConfigError
from megatron_tape.evaluation.model_source import find_model
from megatron_tape.huggingface.export.saved_weights import open_weights
from megatron_tape.huggingface.export.to_transformers import export
from megatron_tape.training.engine import Engine
from pretrain import train

STEPS = 4


def test_a_moving_average_decays_and_forgets_its_beginning_sooner():
    moving = AverageSettings(kind="ema", decay=0.9)
    assert moving.share(1, 100, 1) == pytest.approx(1 - 2 / 11)
    assert moving.share(1000, 100, 1000) == pytest.approx(0.1)


def test_kind_last_is_the_mean_of_the_last_weights():
    mean = AverageSettings(kind="last", count=3, every=4)
    average = 0.0
    for step in range(1, 21):
        average += mean.share(step, 20, step) * (step**2 - average)
        if step == 7:
            assert average == 7**2
    assert average == pytest.approx((12**2 + 16**2 + 20**2) / 3)


@pytest.mark.parametrize(
    "setting", [{"kind": "last", "count": 4, "every": 10}, {"kind": "ema", "count": 3}]
)
def test_inconsistent_settings_of_an_average_are_refused(setting):
    with pytest.raises(ConfigError, match="train.average.count"):
        validate(make(train__average=setting, train__steps=30), 1)


def batches(seed):
    return [random_batch(seed)]


@pytest.mark.parametrize(
    "zero_stage, precision",
    [
        (1, "fp32"),
        (1, "bf16"),
        (2, "bf16"),
        (3, "bf16"),
    ],
)
def test_the_average_is_that_of_the_fp32_weights_and_evaluating_it_changes_no_bit(
    zero_stage, precision
):
    setting = AverageSettings(kind="ema", decay=0.5)
    config = make_alone(
        small_model(),
        deepspeed__zero_stage=zero_stage,
        deepspeed__reduce_bucket_size=3000,
        train__steps=STEPS,
        train__precision=precision,
        train__average=setting,
    )
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    engine = Engine(
        build(config.model, dtype=dtype)[0],
        config,
        build(config.model)[1],
    )
    assert not engine.has_average
    expected = None
    for step in range(1, STEPS + 1):
        engine.train_step(batches(step), 1e-2, step)
        state = engine.training_state()
        weights = {name: state[f"weight/{name}"] for name in engine.parameters}
        fraction = setting.share(step, STEPS, step)
        expected = expected or weights
        expected = {
            name: expected[name] + fraction * (weights[name] - expected[name]) for name in weights
        }
    for name, value in expected.items():
        torch.testing.assert_close(state[f"average/{name}"], value, rtol=1e-5, atol=1e-7)
        assert not torch.equal(value, weights[name])

    before = engine.evaluate(batches(9))
    with engine.averaged_weights():
        averaged_loss = engine.evaluate(batches(9))
    assert engine.evaluate(batches(9)) == before != averaged_loss
    after = engine.training_state()
    assert after.keys() == state.keys()
    assert all(torch.equal(after[key], value) for key, value in state.items())

    plain, _ = build(config.model, dtype=dtype)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(state[f"average/{name}"])
        assert plain(**random_batch(9)).item() == pytest.approx(averaged_loss, rel=1e-6)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The directory of two runs: `averaged` with an average of the weights, and `plain` without
    one.
    """
    folder = tmp_path_factory.mktemp("runs")
    data = write_all(folder)
    shorter = [option("data.prefix", f"{data}/a"), "--train.steps=3", "--train.eval_interval=3"]
    for name, more in {"averaged": [AVERAGE], "plain": []}.items():
        run = ["--config", str(RECIPE), f"--logging.directory={folder / name}"]
        assert train.main([*run, *shorter, *more]) == 0
    return folder


def test_the_averaged_weights_are_exported(runs, tmp_path):
    digests = set()
    for average in (False, True):
        export(runs / "averaged", tmp_path / str(average), tokenizer="none", average=average)
        exported = load_file(tmp_path / str(average) / "model.safetensors")["model.norm.weight"]
        saved = open_weights(find_checkpoint(runs / "averaged"), average)
        assert torch.equal(exported, saved.read_parameter("norm.weight"))
        digests.add(exported.sum().item())
    assert len(digests) == 2


def test_the_averaged_weights_are_evaluated_under_a_name_of_their_own(runs):
    raw, averaged = (
        find_model(str(runs / "averaged"), average=average) for average in (False, True)
    )
    assert raw.digest() != averaged.digest()
    assert (raw.info.label, averaged.info.label) == ("averaged", "averaged-average")
    assert averaged.default_output == raw.default_output.with_name("step-00000003-average")


def test_a_run_without_an_average_is_refused(runs, tmp_path):
    with pytest.raises(ConfigError, match="plain cannot be used: .*has no averaged weights"):
        find_model(str(runs / "plain"), average=True)
    with pytest.raises(CheckpointError, match="has no averaged weights"):
        export(runs / "plain", tmp_path / "out", tokenizer="none", average=True)
    assert not (tmp_path / "out").exists()
