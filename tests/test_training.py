"""The training command under every layout against one process, and continued runs against uninterrupted ones."""

import math

import pytest
from datasets_for_tests import write_all
from launch import run_group

LAYOUTS = [f"tp{tp}_zero{stage}" for tp in (1, 2) for stage in (0, 1, 2, 3)]
VARIANTS = ["blend", "accumulation", "recompute", "packed", "sampled", "tied", "rope", "epochs"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_all(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def equal(data):
    return {size: run_group("training_cases", size, data, "equal") for size in (1, 2, 4)}


@pytest.fixture(scope="module")
def resumed(data):
    return run_group("training_cases", 2, data, "resume")


def assert_close(rows, expected):
    assert [row["step"] for row in rows] == list(range(1, 11))
    for row, other in zip(rows, expected):
        for key in ("loss", "grad_norm", "validation_loss"):
            assert (key in row) == (key in other)
            if key in other:
                assert math.isclose(row[key], other[key], rel_tol=1e-4), (row["step"], key)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_processes_equal_one(equal, layout):
    assert_close(equal[2][layout], equal[1]["tp1_zero0"])


@pytest.mark.parametrize("layout", LAYOUTS[4:])
def test_four_processes_equal_one(equal, layout):
    assert_close(equal[4][layout], equal[1]["tp1_zero0"])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_equals_no_zero_on_one_process(equal, stage):
    assert_close(equal[1][f"tp1_zero{stage}"], equal[1]["tp1_zero0"])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_sampling_text_leaves_training_as_it_is(equal, size):
    assert_close(equal[size]["sampled"], equal[size]["packed"])


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_equal_one_process(equal, variant, size):
    assert_close(equal[size][variant], equal[1][variant])
    if variant != "recompute":
        assert equal[1][variant][-1]["loss"] != equal[1]["tp1_zero1"][-1]["loss"]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_bf16_stays_near_fp32(equal, size):
    for row, exact in zip(equal[size]["bf16"], equal[1]["tp1_zero0"]):
        assert math.isclose(row["loss"], exact["loss"], rel_tol=0.02)
        assert row["loss"] != exact["loss"]


def test_the_loss_falls(equal):
    rows = equal[1]["tp1_zero1"]
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.3
    assert rows[9]["validation_loss"] < rows[4]["validation_loss"]


def without_speed(rows):
    return [{key: value for key, value in row.items() if "per_second" not in key and key != "time"} for row in rows]


@pytest.mark.parametrize("case", [*LAYOUTS, "bf16", "offload", "workers"])
def test_a_continued_run_equals_the_uninterrupted_one_bit_for_bit(resumed, case):
    assert without_speed(resumed[case]["continued"]) == without_speed(resumed[case]["whole"])


def test_a_run_continues_under_another_layout(resumed):
    assert_close(resumed["another_layout"]["continued"], resumed["another_layout"]["whole"])
