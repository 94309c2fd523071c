"""The training command under every layout against one process."""

import itertools
import math

import pytest
from datasets_for_tests import write_all
from launch import run_group
from tensor_parallel_cases import assert_equal
from training_cases import CONTEXT_LAYOUTS, EVALUATED, LAYOUTS, assert_close

VARIANTS = ["accumulation", "ramp", "packed", "sampled", "epochs", "generated", "generated_zero3"]
OF_TWO_PROCESSES = ["accumulation", "generated_zero3", "recompute", "tied"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_all(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def equal(data):
    return {size: run_group("training_cases", size, data, "equal") for size in (1, 2, 4)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_processes_equal_one(equal, layout):
    assert_close(equal[2][layout], equal[1]["tp1_zero1"])


@pytest.mark.parametrize("layout", LAYOUTS[3:])
def test_four_processes_equal_one(equal, layout):
    assert_close(equal[4][layout], equal[1]["tp1_zero1"])


@pytest.mark.parametrize(
    "size, layout", [(size, layout) for size in CONTEXT_LAYOUTS for layout in CONTEXT_LAYOUTS[size]]
)
def test_ranks_that_share_sequences_equal_one_process(equal, size, layout):
    assert_close(equal[size]["tp{}_cp{}_zero{}".format(*layout)], equal[1]["tp1_zero1"])


@pytest.mark.parametrize("size, variant", [(2, "muon"), (2, "muon_zero2"), (4, "muon")])
def test_muon_under_every_layout_equals_one_process(equal, size, variant):
    assert_close(equal[size][variant], equal[1]["muon"])


def test_weights_that_are_never_whole_learn_as_those_of_one_process(equal):
    assert_close(equal[2]["gathered"], equal[1]["tp1_zero1"])


def test_muon_learns_in_another_way(equal):
    muon, adamw = equal[1]["muon"], equal[1]["tp1_zero1"]
    assert muon[0]["loss"] == adamw[0]["loss"] and muon[-1]["loss"] != adamw[-1]["loss"]
    assert muon[-1]["loss"] < muon[0]["loss"] - 0.3


@pytest.mark.parametrize("size, variant", [(2, "packed"), (2, "generated"), (4, "generated")])
def test_variants_with_shared_sequences_equal_one_process(equal, size, variant):
    assert_close(equal[size][f"context_{variant}"], equal[1][variant])


def test_models_on_four_processes_that_share_sequences_equal_one_process(equal):
    models = equal[4]["models"]
    assert {name.rpartition("_tp")[2] for name in models} == {"2_cp2", "1_cp4"}
    for name, result in models.items():
        print(name)  # shown if the next line fails
        assert_equal(result)


@pytest.mark.parametrize("stage", [2, 3])
def test_every_zero_stage_is_the_same_on_one_process(equal, stage):
    assert_close(equal[1][f"tp1_zero{stage}"], equal[1]["tp1_zero1"])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_overlapping_communication_changes_no_bit(equal, stage):
    keys = ("loss", "grad_norm", "validation_loss")
    for row, apart in zip(equal[4][f"tp2_zero{stage}"], equal[4][f"apart_zero{stage}"], strict=True):
        assert [row.get(key) for key in keys] == [apart.get(key) for key in keys]


@pytest.mark.parametrize("size", [1, 4])
def test_sampling_text_leaves_training_as_it_is(equal, size):
    assert_close(equal[size]["sampled"], equal[size]["packed"])


@pytest.mark.parametrize(
    "size, variant", [*itertools.product([4], VARIANTS), *itertools.product([2], OF_TWO_PROCESSES)]
)
def test_variants_equal_one_process(equal, size, variant):
    assert_close(equal[size][variant], equal[1][variant])
    if variant != "recompute":
        assert equal[1][variant][-1]["loss"] != equal[1]["tp1_zero1"][-1]["loss"]


EVALUATING = [(size, *layout) for size, layouts in zip((1, 2, 4), EVALUATED.values()) for layout in layouts]


@pytest.mark.parametrize("size, tensor_size, stage", EVALUATING)
def test_evaluation_tasks_leave_every_bit_of_training_as_it_is(equal, size, tensor_size, stage):
    rows, plain = equal[size][f"evaluated_tp{tensor_size}"], equal[size][f"tp{tensor_size}_zero{stage}"]
    keys = ("step", "loss", "grad_norm", "validation_loss")
    for row, other in zip(rows, plain, strict=True):
        assert [row.get(key) for key in keys] == [other.get(key) for key in keys]


@pytest.mark.parametrize("size, tensor_size, stage", EVALUATING)
def test_evaluation_tasks_find_the_same_under_every_layout(equal, size, tensor_size, stage):
    alone = [of_tasks(row) for row in equal[1]["evaluated_tp1"]]
    found = [equal[size][f"evaluated_tp{tensor_size}"], *([equal[2]["context_evaluated"]] if size == 2 else [])]
    for row, expected in itertools.chain(*(zip(rows, alone, strict=True) for rows in found)):
        assert of_tasks(row) == pytest.approx(expected, rel=1e-4)
    by_task = [{name.split("/")[1] for name in found} for found in alone]
    every = {"perplexity", "context_gain", "addition"}
    assert by_task == [set(), every, set(), every]
    losses = [found[f"evaluation/perplexity/loss/b/{length}"] for length in (5, 12) for found in (alone[1], alone[3])]
    assert losses[1] < losses[0] and losses[3] < losses[2], "the model learns"


def of_tasks(row):
    return {name: value for name, value in row.items() if name.startswith("evaluation/")}


@pytest.mark.parametrize("size", [1, 4])
def test_bf16_stays_near_fp32(equal, size):
    for row, exact in zip(equal[size]["bf16"], equal[1]["tp1_zero1"]):
        assert math.isclose(row["loss"], exact["loss"], rel_tol=0.02)
        assert row["loss"] != exact["loss"]


@pytest.mark.parametrize("variant", ["packed", "generated"])
def test_the_z_loss_is_logged_beside_the_loss_and_falls(equal, variant):
    rows = equal[1][variant]
    assert rows[-1]["z_loss"] < rows[0]["z_loss"]
    assert 0.01 * math.log(64) ** 2 == pytest.approx(rows[0]["z_loss"], rel=0.2), "logits are small at first"
    assert "z_loss" not in equal[1]["accumulation"][0]


def test_the_loss_falls(equal):
    rows = equal[1]["tp1_zero1"]
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.3
    assert rows[-1]["validation_loss"] < rows[len(rows) // 2 - 1]["validation_loss"]
