"""Continued runs against uninterrupted ones."""

import pytest
from datasets_for_tests import write_all
from launch import run_group
from training_cases import LAYOUTS, assert_close


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    return run_group("training_cases", 2, write_all(tmp_path_factory.mktemp("data")), "resume")


def without_speed(rows):
    return [{key: value for key, value in row.items() if "per_second" not in key and key != "time"} for row in rows]


@pytest.mark.parametrize("case", [*LAYOUTS, "bf16", "offload", "workers"])
def test_a_continued_run_equals_the_uninterrupted_one_bit_for_bit(resumed, case):
    assert without_speed(resumed[case]["continued"]) == without_speed(resumed[case]["whole"])


def test_saving_changes_nothing(resumed):
    assert without_speed(resumed["unsaved"]) == without_speed(resumed["bf16"]["whole"])


def test_a_run_continues_under_another_layout(resumed):
    assert_close(resumed["another_layout"]["continued"], resumed["another_layout"]["whole"])
