"""Tests of AdamW's updates, and of learning rates and weight decay by kind of parameter."""

import pytest
import torch
from configurations import make_alone
from launches import CountLaunches
from models import build, random_batch, small_model

from megatron_tape.config.schema import ExtensionConfig, OptimizerConfig
from megatron_tape.model.names import KINDS, MATRICES, kind_of
from megatron_tape.training.engine import Engine
from megatron_tape.training.gradients import sum_of_squares
from megatron_tape.training.model_building import freeze_parameters
from megatron_tape.training.optimizer import parameter_groups

EVERY_KIND = dict(qkv_bias=True, qk_norm=True)


def test_every_parameter_has_one_of_the_kinds():
    built, _ = build(small_model(**EVERY_KIND), lora=ExtensionConfig(trains=["lora"]))
    kinds = {name: kind_of(name) for name, _ in built.named_parameters()}
    assert set(kinds.values()) == set(KINDS)
    layer = "layers.0."
    for name, kind in {
        "embedding.weight": "embeddings",
        "output.weight": "output",
        "norm.weight": "norms",
        f"{layer}self_attention.k_layernorm.weight": "norms",
        f"{layer}self_attention.linear_qkv.bias": "biases",
        f"{layer}position.down_proj": "position",
        f"{layer}mlp.linear_fc1.weight": "mlp",
        f"{layer}self_attention.linear_proj.weight": "attention",
        f"{layer}self_attention.linear_qkv.lora.k_A": "lora",
        f"{layer}self_attention.linear_proj.lora.o_B": "lora",
    }.items():
        assert kinds[name] == kind


def values_by_name(built, **settings):
    """Return weight decay and the scale of the learning rate of each parameter."""
    names = {parameter: name for name, parameter in built.named_parameters()}
    groups = parameter_groups(built, OptimizerConfig(weight_decay=0.1, **settings))
    return {
        names[parameter]: (group["weight_decay"], group["lr_scale"])
        for group in groups
        for parameter in group["params"]
    }


def test_one_parameter_of_the_encoding_may_have_values_of_its_own():
    built, _ = build(small_model(increments="learned"))
    values = values_by_name(
        built,
        weight_decay_of={"position.increments": 0.0},
        lr_scale_of={"position.increments": 0.1, "position": 2},
    )
    assert values["layers.0.position.increments"] == (0.0, 0.1)
    assert values["layers.0.position.up_proj"] == (0.1, 2)


@pytest.mark.parametrize("token_mixing", ["full", "per_head"])
def test_by_default_matrices_decay_in_one_group_and_vectors_do_not_in_another(token_mixing):
    built, _ = build(small_model(**EVERY_KIND, token_mixing=token_mixing, num_query_groups=4))
    matrices, vectors = parameter_groups(built, OptimizerConfig(weight_decay=0.1))
    parameters = list(built.parameters())
    assert [id(p) for p in matrices["params"]] == [id(p) for p in parameters if p.dim() > 1]
    assert [id(p) for p in vectors["params"]] == [id(p) for p in parameters if p.dim() <= 1]
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert matrices["lr_scale"] == vectors["lr_scale"] == 1.0


def test_the_attribute_decay_of_a_parameter_overrides_the_default():
    built, _ = build(small_model())
    parameters = dict(built.named_parameters())
    still = "layers.0.position.up_proj"
    moving = "norm.weight"
    parameters[still].decay = False
    parameters[moving].decay = True
    for settings in ({}, {"weight_decay_of": {"position": 0.3}}):
        values = values_by_name(built, **settings)
        assert (values[still][0], values[moving][0]) == (0.0, 0.1)
    assert values["layers.1.position.up_proj"][0] == 0.3
    assert values_by_name(built, weight_decay_of={"position.up_proj": 0.2})[still][0] == 0.2


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_updates_equal_torchs_adamw_with_clipped_gradients(zero_stage):
    config = make_alone(
        small_model(),
        optimizer__clip_grad=0.3,
        deepspeed__zero_stage=zero_stage,
        train__global_batch_size=2,
    )
    (plain, layout), (model, _) = build(config.model), build(config.model)
    engine = Engine(model, config, layout)
    settings = config.optimizer
    groups = [
        {"params": group["params"], "weight_decay": group["weight_decay"]}
        for group in parameter_groups(plain, settings)
    ]
    adamw = torch.optim.AdamW(
        groups,
        0.01,
        (settings.beta1, settings.beta2),
        settings.eps,
    )
    for step in range(1, 4):
        batches = [random_batch(10 * step + number) for number in range(2)]
        loss = sum(plain(**batch) for batch in batches) / 2
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), settings.clip_grad)
        assert norm > settings.clip_grad
        adamw.step()
        adamw.zero_grad()
        result = engine.train_step(batches, 0.01, step)
        assert (result.loss, result.grad_norm) == pytest.approx(
            (loss.item(), norm.item()), rel=1e-5
        )
    state = engine.training_state()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(
            state[f"weight/{name}"], parameter.detach(), atol=1e-5, rtol=1e-4, msg=name
        )


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_each_kind_decays_at_its_own_rate(zero_stage):
    decay = {"position": 0.0, "norms": 0.2, "embeddings": 0.3}
    scale = {"embeddings": 2.0, "norms": 0.5}
    config = make_alone(
        small_model(),
        optimizer__weight_decay=0.1,
        optimizer__weight_decay_of=decay,
        optimizer__lr_scale_of=scale,
        deepspeed__zero_stage=zero_stage,
    )
    model, layout = build(config.model)
    engine = Engine(model, config, layout)
    before = engine.training_state()
    # All tokens have the loss weight 0, so gradients are zero and only weight decay changes the
    # weights.
    batch = random_batch(3) | {"loss_weights": torch.zeros(1, 16)}
    assert not engine.train_step([batch], lr=0.5).skipped
    after = engine.training_state()
    factors = {"embeddings": 1 - 1.0 * 0.3, "norms": 1 - 0.25 * 0.2, "position": 1.0}
    factors |= dict.fromkeys((*MATRICES, "output"), 1 - 0.5 * 0.1)
    for name in engine.parameters:
        expected = before[f"weight/{name}"] * factors[kind_of(name)]
        torch.testing.assert_close(
            after[f"weight/{name}"],
            expected,
            atol=0,
            rtol=1e-6,
            msg=name,
        )


def small_engine(zero_stage, trains=None, precision="fp32", **changes):
    settings = changes.pop("model", small_model())
    config = make_alone(
        settings, deepspeed__zero_stage=zero_stage, train__precision=precision, **changes
    )
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model, layout = build(settings, dtype=dtype)
    if trains is not None:
        freeze_parameters(model, trains)
    return Engine(model, config, layout)


def only_position(name, parameter):
    return ".position." in name


NORM_CASES = {
    "all": {},
    "bf16": {"precision": "bf16"},
    "small_groups": {"deepspeed__reduce_bucket_size": 3000},
    "muon": {"optimizer__kind": "muon"},
    "frozen": {"trains": only_position},
}


@pytest.mark.parametrize(
    "case, zero_stage",
    [
        (case, zero_stage)
        for case in NORM_CASES
        for zero_stage in (1, 2, 3)
        if (case, zero_stage) != ("muon", 3)  # not supported
    ],
)
def test_the_gradient_norm_is_that_of_all_averaged_gradients_in_fp64(case, zero_stage):
    engine = small_engine(zero_stage, train__global_batch_size=2, **NORM_CASES[case])
    gradients = []

    def copy_gradients():
        for group in engine._zero.averaged_gradients.values():
            gradients.extend(gradient.double().flatten() for gradient in group)

    engine.before_update = copy_gradients
    result = engine.train_step([random_batch(1), random_batch(2)], 0.01)
    expected = torch.cat(gradients).square().sum().sqrt().item()
    assert expected > 0.001
    assert result.grad_norm == pytest.approx(expected, rel=1e-7)


def test_squares_of_many_elements_are_summed_in_fp64():
    numbers = torch.full((2**24 + 1,), 0.001)
    value = numbers[0].item()
    total = sum_of_squares([numbers, numbers[:3]], numbers.device)
    assert total.item() == pytest.approx((2**24 + 4) * value**2, rel=1e-9)


@pytest.mark.parametrize("zero_stage, expected", [(1, 63), (2, 63), (3, 59)])
@pytest.mark.parametrize("encoding", ["rope", "tape"])
def test_an_update_launches_no_kernel_for_each_parameter(encoding, zero_stage, expected):
    # As many parameters as in the 155M model.
    model = small_model(position_encoding=encoding, num_layers=12)
    engine = small_engine(zero_stage, precision="bf16", model=model)
    update = engine.deepspeed_engine.step
    launches = CountLaunches()

    def count_launches():
        with launches:
            update()

    # The first step creates the optimizer's state.
    engine.train_step([random_batch(1)], 0.01)
    engine.deepspeed_engine.step = count_launches
    assert not engine.train_step([random_batch(1)], 0.01).skipped
    assert launches.total == expected, launches.counts
