"""Tests of the training command under every layout against one process."""

import math

import pytest
from datasets_for_tests import write_all
from launch import run_group
from tensor_parallel_cases import assert_equal
from training_cases import LAYOUTS, assert_close, assert_same_state

VARIANTS = {
    2: ["muon", "packed", "generated"],
    4: ["muon", "packed", "generated", "sampled", "epochs", "ramp"],
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_all(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def equal(data):
    return {size: run_group("training_cases", size, data, "equal") for size in (1, 2, 4)}


def assert_equals_one_process(equal, size, name, alone="tp1_cp1_zero1"):
    """Assert that a run has the metrics, weights and moments of the run `alone` of one process."""
    assert_close(equal[size][name], equal[1][alone])
    assert_same_state(equal[size]["states"][name], equal[1]["states"][alone])


@pytest.mark.parametrize(
    "size, layout", [(size, layout) for size in LAYOUTS for layout in LAYOUTS[size]]
)
def test_every_layout_equals_one_process(equal, size, layout):
    assert_equals_one_process(equal, size, "tp{}_cp{}_zero{}".format(*layout))


def test_muon_trains_differently_from_adamw(equal):
    muon = equal[1]["muon"]
    adamw = equal[1]["tp1_cp1_zero1"]
    assert muon[0]["train/loss"] == adamw[0]["train/loss"]
    assert muon[-1]["train/loss"] != adamw[-1]["train/loss"]
    assert muon[-1]["train/loss"] < muon[0]["train/loss"] - 0.3


def test_models_on_four_processes_that_share_sequences_equal_one_process(equal):
    models = equal[4]["models"]
    assert {name.rpartition("_tp")[2] for name in models} == {"2_cp2", "1_cp4"}
    for name, result in models.items():
        print(name)  # shown if the next line fails
        assert_equal(result)


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_every_zero_stage_is_the_same_on_one_process(equal, zero_stage):
    assert_equals_one_process(equal, 1, f"tp1_cp1_zero{zero_stage}")


@pytest.mark.parametrize(
    "size, variant", [(size, variant) for size in VARIANTS for variant in VARIANTS[size]]
)
def test_variants_equal_one_process(equal, size, variant):
    """Sampling text does not change training, so it is compared with `packed`."""
    alone = "packed" if variant == "sampled" else variant
    assert_equals_one_process(equal, size, variant, alone)
    assert equal[1][alone][-1]["train/loss"] != equal[1]["tp1_cp1_zero1"][-1]["train/loss"]


@pytest.mark.parametrize(
    "size, layout", [(1, "tp1_cp1_zero3"), (2, "tp1_cp2_zero1"), (4, "tp2_cp1_zero3")]
)
def test_evaluation_tasks_agree_under_every_layout_and_do_not_change_training(equal, size, layout):
    keys = ("step", "train/loss", "train/grad_norm", "validation/loss")
    for row, other_row in zip(
        equal[size]["evaluated"],
        equal[size][layout],
        strict=True,
    ):
        assert [row.get(key) for key in keys] == [other_row.get(key) for key in keys]
    alone = [of_tasks(row) for row in equal[1]["evaluated"]]
    for row, expected in zip(equal[size]["evaluated"], alone, strict=True):
        assert of_tasks(row) == pytest.approx(expected, rel=1e-4)
    by_task = [{name.split("/")[1] for name in found} for found in alone]
    every = {"perplexity", "context_gain", "addition"}
    assert by_task == [set(), every, set(), every]


def of_tasks(row):
    return {name: value for name, value in row.items() if name.startswith("evaluation/")}


def test_bf16_stays_near_fp32(equal):
    for row, exact in zip(equal[4]["bf16"], equal[1]["tp1_cp1_zero1"]):
        assert math.isclose(row["train/loss"], exact["train/loss"], rel_tol=0.02)
        assert row["train/loss"] != exact["train/loss"]


@pytest.mark.parametrize("variant", ["packed", "generated"])
def test_the_z_loss_is_logged_in_addition_to_the_loss_and_falls(equal, variant):
    rows = equal[1][variant]
    assert rows[-1]["train/z_loss"] < rows[0]["train/z_loss"]
    assert 0.01 * math.log(64) ** 2 == pytest.approx(rows[0]["train/z_loss"], rel=0.2), (
        "logits are small at first"
    )
    assert "train/z_loss" not in equal[1]["ramp"][0]


def test_the_loss_falls(equal):
    rows = equal[1]["tp1_cp1_zero1"]
    assert rows[-1]["train/loss"] < rows[0]["train/loss"] - 0.3
    assert rows[-1]["validation/loss"] < rows[len(rows) // 2 - 1]["validation/loss"]
