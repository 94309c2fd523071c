"""A context extension under every layout against one process, and continued ones against
uninterrupted ones.
"""

import extension_cases as cases
import pytest
from datasets_for_tests import write_all
from launch import run_group
from training_cases import assert_close, assert_same_state, without_speed


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    data = write_all(tmp_path_factory.mktemp("data"))
    return {
        1: cases.main(tmp_path_factory.mktemp("alone"), data),
        2: run_group("extension_cases", 2, data),
    }


@pytest.mark.parametrize(
    "layout", ["tp2_zero1", *(f"tp{tp}_zero{stage}" for tp, stage in cases.LAYOUTS)]
)
def test_every_layout_equals_one_process(rows, layout):
    assert_close(rows[2][layout], rows[1]["tp1_zero1"], cases.STEPS)
    assert_same_state(rows[2]["states"][layout], rows[1]["states"]["tp1_zero1"])


@pytest.mark.parametrize("variant", [*cases.VARIANTS, "packed", "with_lora"])
def test_two_processes_equal_one_for_any_trained_parameters(rows, variant):
    assert_close(rows[2][variant], rows[1][variant], cases.STEPS)
    assert_same_state(rows[2]["states"][variant], rows[1]["states"][variant])
    assert rows[1][variant][-1]["train/loss"] != rows[1]["tp1_zero1"][-1]["train/loss"]


@pytest.mark.parametrize("variant", ["tape_recomputed", "lora_recomputed"])
def test_layers_get_gradients_when_recomputed_over_a_frozen_embedding(rows, variant):
    assert all(row["train/grad_norm"] > 1e-4 for row in rows[1][variant])


@pytest.mark.parametrize("run", ["tp2_zero1", "with_lora"])
def test_a_continued_extension_equals_the_uninterrupted_one_bit_for_bit(rows, run):
    case = rows[2]["resumed"][run]
    assert without_speed(case["continued"]) == without_speed(case["whole"])
    assert case["continued_state"] == case["whole_state"]
