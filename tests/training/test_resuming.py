"""Tests of continued runs against uninterrupted ones."""

import pytest
from datasets_for_tests import write_all
from launch import run_group
from training_cases import RESUMED, assert_close, assert_same_state, without_speed

from megatron_tape.errors import EXIT_DIVERGED, EXIT_RESTART


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    return run_group("training_cases", 2, write_all(tmp_path_factory.mktemp("data")), "resume")


STEERED = ["spike_skip", "spike_rewind", "muon", "stages"]
LAYOUTS = [f"tp{tensor_size}_zero{stage}" for tensor_size, stage in RESUMED]


@pytest.mark.parametrize(
    "case", [*LAYOUTS, "context_parallel", "gathered", "bf16", "workers", "frozen", *STEERED]
)
def test_a_continued_run_equals_the_uninterrupted_one_bit_for_bit(resumed, case):
    assert without_speed(resumed[case]["continued"]) == without_speed(resumed[case]["whole"])
    assert resumed[case]["continued_state"] == resumed[case]["whole_state"]


def test_a_stage_of_the_data_begins_at_its_step_and_is_logged(resumed):
    rows, without = (resumed[case]["whole"] for case in ("stages", "workers"))
    assert [row["train/data_stage"] for row in rows] == [0, 0, 0, 1]
    assert [row["train/loss"] for row in rows[:3]] == [row["train/loss"] for row in without[:3]]
    assert rows[3]["train/loss"] != without[3]["train/loss"]


def test_the_update_of_a_spike_is_skipped(resumed):
    rows = resumed["spike_skip"]["whole"]
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert rows[5]["train/grad_norm"] > 100 * rows[4]["train/grad_norm"]
    assert abs(rows[6]["train/loss"] - rows[4]["train/loss"]) < 0.5


def test_a_rewind_continues_from_the_last_checkpoint_with_the_data_after_the_spike(resumed):
    rows = resumed["spike_rewind"]["whole"]
    assert [row["train/tokens"] // 16 for row in rows] == [4, 8, 12, 16, 28, 32, 36, 40]
    (record,) = resumed["spike_records"]
    assert (record["step"], record["action"], record["number"]) == (6, "rewind", 1)


def test_more_spikes_than_the_limit_end_the_run(resumed):
    assert resumed["spike_twice"]["statuses"] == [EXIT_RESTART, EXIT_DIVERGED]
    # No checkpoint was saved, so the run started again at step 1, with the data after the first
    # spike.
    sequences = [row["train/tokens"] // 16 for row in resumed["spike_twice"]["rows"]]
    assert sequences == [28, 32, 36, 40, 44]


def test_saving_changes_nothing(resumed):
    assert without_speed(resumed["unsaved"]) == without_speed(resumed["bf16"]["whole"])


@pytest.mark.parametrize("case", ["from_tensor_to_context_parallel", "ramp", "muon_another_layout"])
def test_a_run_continues_under_another_layout(resumed, case):
    assert_close(resumed[case]["continued"], resumed[case]["whole"])
    assert_same_state(resumed[case]["continued_tensors"], resumed[case]["whole_tensors"])


def test_a_batch_ramp_counts_the_sequences_so_far(resumed):
    for rows in resumed["ramp"].values():
        if isinstance(rows, list):
            assert [row["train/tokens"] // 16 for row in rows] == [4, 8, 16, 28]
