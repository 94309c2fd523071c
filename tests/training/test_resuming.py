"""Continued runs against uninterrupted ones."""

import pytest
from datasets_for_tests import write_all
from launch import run_group
from training_cases import LAYOUTS, RESUMED_STEPS, assert_close, without_speed


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    return run_group("training_cases", 2, write_all(tmp_path_factory.mktemp("data")), "resume")


FROZEN = [*(f"frozen_zero{stage}" for stage in (0, 1, 2, 3)), "adapters"]


@pytest.mark.parametrize(
    "case", [*LAYOUTS, "context_parallel", "hierarchical", "bf16", "offload", "ramp_offload", "workers", *FROZEN]
)
def test_a_continued_run_equals_the_uninterrupted_one_bit_for_bit(resumed, case):
    assert without_speed(resumed[case]["continued"]) == without_speed(resumed[case]["whole"])
    assert resumed[case]["continued_state"] == resumed[case]["whole_state"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_training_a_part_is_the_same_under_every_zero_stage(resumed, stage):
    rows, expected = (resumed[case]["whole"] for case in (f"frozen_zero{stage}", "frozen_zero0"))
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in expected], rel=1e-4)
    assert rows[-1]["position/update_norm/layer_00"] > 0


def test_a_slow_rank_is_named_once_with_its_own_seconds_and_a_stalling_loader_is_seen(resumed):
    slow = resumed["slow"]
    of_rank_0, of_ranks = {"data": 0.0, "forward": 2.0}, {"compute_median": 2.0, "compute_slowest": 6.0}
    expected = of_rank_0 | of_ranks | {"data_slowest": 1.0}  # two micro-batches
    for row in slow["rows"]:
        assert {key: row[f"seconds/{key}"] for key in expected} == expected
        assert row["slowest_rank"] == f"1 on {slow['node']}"
    straggler = {"rank": 1, "place": slow["node"], "step": 12, "seconds": 6.0, "times": 3.0}
    assert slow["stragglers"] == [straggler]


def test_saving_changes_nothing(resumed):
    assert without_speed(resumed["unsaved"]) == without_speed(resumed["bf16"]["whole"])


OTHER_LAYOUTS = ["another_layout", "from_context_to_tensor_parallel", "from_tensor_to_context_parallel"]


@pytest.mark.parametrize("case", [*OTHER_LAYOUTS, "generated", "ramp"])
def test_a_run_continues_under_another_layout(resumed, case):
    assert_close(resumed[case]["continued"], resumed[case]["whole"], RESUMED_STEPS)


def test_a_ramp_counts_what_it_has_seen(resumed):
    for rows in resumed["ramp"].values():
        if isinstance(rows, list):
            assert [row["tokens"] // 16 for row in rows] == [4, 8, 16, 28]
