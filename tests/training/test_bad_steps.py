"""Tests of the averaging of gradients, and of steps whose loss or gradient is not finite on one
process.
"""

import pytest
from bad_step_cases import CASES, FINE, NORM_SEEDS, name_of, norm
from configurations import make_alone
from launch import run_group
from models import build, small_model

from megatron_tape.training.engine import Engine


@pytest.fixture(scope="module")
def results():
    return run_group("bad_step_cases", 2)


@pytest.mark.parametrize("case", [name_of(*case) for case in CASES])
def test_a_bad_step_is_skipped_on_every_rank_and_changes_nothing(results, case):
    skipped, unchanged, next_taken, next_moved, next_finite, norm_finite, updates = results[case]
    assert skipped
    assert norm_finite == ("spike" in case)
    assert unchanged
    assert next_taken
    assert next_moved
    assert next_finite
    assert updates == 2


@pytest.mark.parametrize("case", ["zero1", "zero2", "zero3"])
def test_bf16_gradients_are_averaged_and_added_up_in_fp32(results, case):
    for averages in results[f"averaged_{case}"]:
        assert averages == pytest.approx([1 + FINE] * 2, rel=1e-6)


@pytest.mark.parametrize("case", ["zero1", "zero2", "zero3"])
def test_gradients_of_replicated_parameters_are_summed_in_fp32_over_the_ranks_that_share_a_model(
    results, case
):
    summed = results[f"summed_{case}"]
    for sums in summed["sums"]:
        assert sums == pytest.approx([1 + FINE] * 2, rel=1e-6)
    assert summed["norm"] == pytest.approx(results["summed_zero1"]["norm"], rel=1e-5)


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
@pytest.mark.parametrize("tp", NORM_SEEDS)
def test_the_gradient_norm_counts_replicated_parameters_once(results, tp, zero_stage):
    seeds = NORM_SEEDS[tp]
    config = make_alone(small_model(), train__global_batch_size=len(seeds))
    model, layout = build(config.model)
    expected = norm(Engine(model, config, layout), seeds)
    assert results[f"norms_zero{zero_stage}"][tp] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_gradients_are_averaged_in_bf16_on_request(results, zero_stage):
    over_ranks, _ = results[f"averaged_zero{zero_stage}_bf16"]
    assert over_ranks == pytest.approx([1, 1], rel=1e-6)


def test_zero_3_averages_and_partitions_gradients_as_deepspeed_does(results):
    assert results["scattered"]


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_overlapping_communication_changes_no_weight(results, zero_stage):
    assert results[f"overlapped_zero{zero_stage}"]
