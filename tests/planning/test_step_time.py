"""Estimated step times equal arithmetic by hand; the search finds the fastest layouts."""

from collections import Counter

import pytest
from plans import GIB, of_recipe

from megatron_tape.checks.combinations import validate
from megatron_tape.ops.backends.table import HOPPER
from megatron_tape.planning.communication import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    CONTEXT,
    DATA,
    PIPELINE,
    SEND,
    TENSOR,
)
from megatron_tape.planning.flops import flops_per_step, flops_per_token, recomputed_flops_per_token
from megatron_tape.planning.hardware import KINDS, Hardware
from megatron_tape.planning.memory import memory
from megatron_tape.planning.search import candidates, fits, search
from megatron_tape.planning.step_time import EFFICIENCY, _seconds, step_time

H100 = KINDS["H100"]
ROUND = Hardware(
    "round", HOPPER, 80, peak=1e15, intra_node_bandwidth=1e10, inter_node_bandwidth=1e9
)
ONE, TWO = (f"--parallel.tensor_model_parallel_size={size}" for size in (1, 2))
ALONE = [ONE, "--deepspeed.zero_stage=1"]


@pytest.mark.parametrize(
    "processes, sizes, group, kind, seconds",
    [
        # In a ring of four within a node, each rank sends three quarters of the bytes.
        (8, (4, 1, 1), TENSOR, ALL_GATHER, 0.75e9 / 1e10),
        (8, (4, 1, 1), TENSOR, ALL_REDUCE, 2 * 0.75e9 / 1e10),
        (8, (1, 4, 1), CONTEXT, ALL_TO_ALL, 0.75e9 / 1e10),
        # Eight ranks of a node share its links to another node; a single rank uses one link.
        (16, (1, 1, 1), DATA, ALL_GATHER, 15 / 16 * 1e9 / 8e9),
        (16, (8, 1, 1), DATA, ALL_GATHER, 0.5e9 / 1e9),
        # Four adjacent context ranks, and four more eight stages later: half of each node's GPUs
        # are members.
        (64, (1, 4, 8), DATA, ALL_GATHER, 7 / 8 * 1e9 / 4e9),
        # In an all-to-all of two nodes with two ranks each, half of the bytes goes to the other
        # node.
        (16, (4, 4, 1), CONTEXT, ALL_TO_ALL, 0.5e9 / 1e9),
        (8, (1, 1, 4), PIPELINE, SEND, 1e9 / 1e10),
        (32, (4, 1, 4), PIPELINE, SEND, 1e9 / 1e9),
    ],
)
def test_collectives_take_the_time_of_a_ring_or_of_single_messages(
    processes, sizes, group, kind, seconds
):
    names = ("tensor_model", "context", "pipeline_model")
    plan = of_recipe(
        processes, *(f"--parallel.{name}_parallel_size={size}" for name, size in zip(names, sizes))
    )
    assert _seconds(plan, group, kind, 10**9, ROUND) == pytest.approx(seconds)


@pytest.mark.parametrize("encoding", ["tape", "rope", "fox"])
@pytest.mark.parametrize(
    "more", [[], ["--extension.trains=[lora,norms]", "--extension.lora_rank=4"]]
)
def test_the_flops_of_all_stages_sum_to_those_of_the_model(encoding, more):
    settings = [f"--model.position_encoding={encoding}", ONE, *more]
    whole = of_recipe(8, *settings)
    stages = of_recipe(8, *settings, "--parallel.pipeline_model_parallel_size=4").pipeline_stages()
    found = sum(flops_per_token(stage.model, stage.extension, stage.contents) for stage in stages)
    assert found == flops_per_token(whole.model, whole.extension)


def test_a_step_takes_its_flops_and_bytes_at_the_assumed_rates():
    plan = of_recipe(4, "--model.position_encoding=rope", *ALONE)
    found = step_time(plan, ROUND)
    matrices = (
        16 * (2048 * 64 * (32 + 2 * 8) + 2048 * 2048 + 3 * 2048 * 8192)
        + 2048 * plan.model.vocab_size
    )
    pairs = 16 * 2048 * 4096
    assert found.computation == pytest.approx(
        6 * (matrices + pairs) * 512 * 4096 / 4 / (EFFICIENCY * 1e15)
    )
    # Four GPUs reduce-scatter fp32 gradients in a ring, and all-gather bf16 weights.
    assert found.communication == pytest.approx((4 + 2) * plan.elements * 3 / 4 / 1e10)
    assert found.bubble == 0
    assert found.total == found.computation + found.communication


def test_full_recomputation_repeats_the_forward_pass_and_selective_omits_attention():
    none, selective, full = (
        of_recipe(4, ONE, f"--train.recompute={kind}") for kind in ("none", "selective", "full")
    )
    once = flops_per_step(none) // none.tokens_per_step
    output = 6 * 2048 * none.model.vocab_size
    assert recomputed_flops_per_token(none) == 0
    assert recomputed_flops_per_token(full) * 3 == once - output
    # Scores and two averages; the last layer does not average the state.
    attention = 2 * (16 * 3 - 1) * 2048 * 4096 // 2
    assert recomputed_flops_per_token(full) - recomputed_flops_per_token(selective) == attention


def test_stages_wait_as_long_as_the_pipeline_schedule_implies():
    settings = [ONE, "--parallel.pipeline_model_parallel_size=4", "--train.micro_batch_size=1"]
    plain, virtual = (
        of_recipe(
            4, *settings, f"--parallel.virtual_pipeline_size={size}", "--train.global_batch_size=16"
        )
        for size in (1, 2)
    )
    found = step_time(plain, H100)
    less = step_time(virtual, H100)
    assert found.bubble == pytest.approx((found.computation + found.communication) * 3 / 16)
    assert 0.4 < less.bubble / found.bubble < 0.6
    assert less.communication > found.communication


def test_a_search_finds_the_fastest_layouts_that_fit():
    plan = of_recipe(16)
    found = search(plan, H100, 40, validate)
    every = list(candidates(plan, validate, Counter()))
    fitting = [step_time(layout, H100).total for layout in every if fits(memory(layout), 40)]
    assert len(every) > 50
    assert found.too_large
    assert [candidate.time.total for candidate in found.fitting] == sorted(fitting)[:10]
    assert all(candidate.memory.peak <= 0.9 * 40 * GIB for candidate in found.fitting)
