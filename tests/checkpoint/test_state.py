"""Saves that fail on one rank, and sums of many micro-batches; continued runs are in test_resuming.py."""

import torch
from launch import run_group
from models import build, random_tokens, small_model

from megatron_tape.config.schema import DataConfig, DeepSpeedConfig, OptimizerConfig, RunConfig, TrainConfig
from megatron_tape.training.engine import Engine


def test_a_full_disk_on_one_rank_is_told_on_all_and_costs_no_checkpoint():
    result = run_group("full_disk_cases", 2)
    assert len(set(result["messages"])) == 1
    assert "checkpoint 2" in result["messages"][0] and "rank 1" in result["messages"][0]
    assert result["after_failure"] == "step-00000001"
    assert result["after_retry"] == "step-00000003"
    assert result["unfinished"] == []
    assert result["left"] == [".attempt-000001", "step-00000001", "step-00000003"]


def summed_gradient(precision, stage, micro_batches=64):
    """Adam's first moment after one step: a tenth of the gradient."""
    config = RunConfig(
        model=small_model(),
        data=DataConfig(prefix="unused"),
        optimizer=OptimizerConfig(clip_grad=0.0),
        deepspeed=DeepSpeedConfig(zero_stage=stage),
        train=TrainConfig(steps=1, micro_batch_size=1, global_batch_size=micro_batches, precision=precision),
    )
    model, layout = build(config.model, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
    engine = Engine(model, config, layout)
    tokens = [random_tokens(batch=1, length=17, seed=seed) for seed in range(micro_batches)]
    engine.train_step(({"tokens": t[:, :-1], "labels": t[:, 1:]} for t in tokens), lr=0.0)
    state = engine.training_state(lambda index: True)
    return torch.cat([value.flatten() for key, value in state.items() if key.startswith("exp_avg/")])


def test_bf16_adds_up_micro_batches_in_fp32_at_stages_2_and_3():
    exact = summed_gradient("fp32", 1)
    errors = [(summed_gradient("bf16", stage) - exact).norm() / exact.norm() for stage in (1, 2, 3)]
    assert errors[1] < 0.8 * errors[0] and errors[2] < 0.8 * errors[0]
