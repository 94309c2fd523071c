"""Tests of Muon against torch's implementation, and of which parameters it updates."""

from functools import partial

import pytest
import torch
from configurations import make_alone
from datasets_for_tests import write_all
from models import build, random_batch, small_model
from torch.optim import _muon
from training_cases import RECIPE, option

from megatron_tape.model.names import MATRICES, kind_of
from megatron_tape.model.weights import from_megatron
from megatron_tape.training.engine import Engine
from megatron_tape.training.muon import COEFFICIENTS, STEPS, orthogonalize
from pretrain import train

MODEL = small_model()
RATE = 0.01
DECAY = 0.1


@pytest.mark.parametrize(
    "shape",
    [(24, 24), (16, 40), (40, 16)],
)
def test_orthogonalization_moves_singular_values_near_one_and_keeps_singular_vectors(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    rotated = left.T @ orthogonalize(matrix) @ right.T
    assert values.min() / values.max() < 0.7
    assert rotated.diagonal().min() > 0.6
    assert rotated.diagonal().max() < 1.3
    assert (rotated - rotated.diagonal().diag()).abs().max() < 1e-4


def test_orthogonalization_in_bf16_equals_torchs():
    matrix = torch.randn(16, 40, generator=torch.Generator().manual_seed(1))
    theirs = _muon._zeropower_via_newtonschulz(matrix, COEFFICIENTS, STEPS, _muon.EPS)
    torch.testing.assert_close(
        orthogonalize(matrix.bfloat16()),
        theirs,
        rtol=0.02,
        atol=0.01,
    )


def of_run(zero_stage, kind="muon"):
    config = make_alone(
        MODEL,
        optimizer__kind=kind,
        optimizer__weight_decay=DECAY,
        optimizer__clip_grad=0.0,
        deepspeed__zero_stage=zero_stage,
        deepspeed__reduce_bucket_size=3000,
    )
    model, layout = build(MODEL)
    return Engine(model, config, layout)


def unsharded_weights(state, names):
    """Return the weights by Hugging Face's names."""
    parts = {}
    for name in names:
        parts |= from_megatron(name, state[f"weight/{name}"], MODEL)
    return parts


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_matrices_get_the_updates_of_torchs_muon(zero_stage, monkeypatch):
    engine = of_run(zero_stage)
    names = [name for name in engine.parameters if kind_of(name) in MATRICES]
    start = unsharded_weights(engine.training_state(), names)
    theirs = {name: weight.clone().requires_grad_() for name, weight in start.items()}
    assert len(theirs) == 7 * 3
    monkeypatch.setattr(
        _muon, "_zeropower_via_newtonschulz", lambda matrix, *_: orthogonalize(matrix)
    )
    muon = torch.optim.Muon(
        theirs.values(), RATE, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw"
    )

    def give(name, gradient):
        for weight_name, weight_gradient in from_megatron(name, gradient, MODEL).items():
            theirs[weight_name].grad = weight_gradient.clone()

    for name in names:
        engine.parameters[name].register_hook(partial(give, name))
    for step in range(1, 4):
        engine.train_step([random_batch(step)], RATE, step)
        muon.step()
    for name, weight in unsharded_weights(engine.training_state(), names).items():
        expected = theirs[name].detach()
        assert (weight - expected).norm() < 1e-4 * (expected - start[name]).norm(), name
        assert (expected - start[name]).abs().max() > RATE / 10


def test_a_run_continues_only_with_its_own_moments(tmp_path, capfd):
    arguments = ["--config", str(RECIPE), f"--logging.directory={tmp_path}/run"]
    arguments += [option("data.prefix", f"{write_all(tmp_path)}/a"), "--train.eval_interval=0"]
    arguments += ["--schedule.warmup_steps=0"]
    assert train.main([*arguments, "--train.steps=1"]) == 0
    assert train.main([*arguments, "--train.steps=2", "--optimizer.kind=muon"]) == 2
    assert "has the optimizer state of adamw" in capfd.readouterr().err


def test_all_other_parameters_get_the_updates_of_adamw():
    states = {}
    for kind in ("adamw", "muon"):
        engine = of_run(1, kind)
        engine.train_step([random_batch(1)], RATE)
        states[kind] = engine.training_state()
    for name in engine.parameters:
        kinds = {key.partition("/")[0] for key in states["muon"] if key.endswith(f"/{name}")}
        same = torch.equal(*(state[f"weight/{name}"] for state in states.values()))
        if kind_of(name) in MATRICES:
            assert kinds == {"weight", "momentum_buffer"}
            assert not same
        else:
            assert kinds == {"weight", "exp_avg", "exp_avg_sq"}
            assert same
