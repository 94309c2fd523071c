"""A loss or gradient that is not finite on one process costs all of them that step, and no weight."""

import pytest
from bad_step_cases import FINE
from launch import run_group

CASES = [
    f"tp{tp}_zero{stage}_{what}_{precision}"
    for tp in (1, 2)
    for stage in (0, 1, 2, 3)
    for what in ("loss", "gradient")
    for precision in (("fp32",) if stage == 0 else ("fp32", "bf16"))
]


@pytest.fixture(scope="module")
def results():
    return run_group("bad_step_cases", 2)


@pytest.mark.parametrize("case", CASES)
def test_a_bad_step_is_skipped_on_every_rank_and_changes_nothing(results, case):
    skipped, unchanged, next_step_taken, next_step_moved, next_loss_finite, norm_finite, updates = results[case]
    assert skipped and not norm_finite
    assert unchanged
    assert next_step_taken and next_step_moved and next_loss_finite
    assert updates == 2


@pytest.mark.parametrize("case", ["zero1", "zero2", "zero3", "zero1_offload"])
def test_bf16_gradients_are_averaged_and_added_up_in_fp32(results, case):
    for found in results[f"averaged_{case}"]:
        assert found == pytest.approx([1 + FINE] * 2, rel=1e-6)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_are_averaged_in_bf16_on_request(results, stage):
    over_ranks, _ = results[f"averaged_zero{stage}_bf16"]
    assert over_ranks == pytest.approx([1, 1], rel=1e-6)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_overlapping_communication_changes_no_weight(results, stage):
    assert results[f"overlapped_zero{stage}"]
