"""Rehearsals on fake GPUs agree with the arithmetic and find planted mistakes."""

import json
import os
import subprocess
import sys

import pytest
import rehearsal_cases
from rehearsal_cases import DRAWN_AT_ONCE, MANY, QUICK_CASES, SMALL, ZERO

from megatron_tape.command_line import status_of
from megatron_tape.errors import ConfigError
from megatron_tape.planning.rehearsal import cuda_hooks
from pretrain import rehearse as command

WAITS = "an_item_in_a_layer_and_a_copy_from_pageable_memory"
COSTS = "a_collective_in_the_wrong_group_a_buffer_kept_twice_and_an_all_gather_of_the_state"


def rehearsed(which, folder):
    """Run the cases in a process of their own: a rehearsal changes torch for good."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    arguments = [sys.executable, rehearsal_cases.__file__, which, str(folder / "small.yaml")]
    result = subprocess.run(arguments, env=environment, cwd=folder, capture_output=True, text=True, timeout=850)
    assert result.returncode == 0, result.stderr[-6000:]
    assert [path.name for path in folder.iterdir()] == ["small.yaml"]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    return rehearsed("quick", tmp_path_factory.mktemp("rehearsed"))


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    return rehearsed("many", tmp_path_factory.mktemp("rehearsed"))


def differing(case):
    return {name for name, (_, _, agrees) in case["rows"].items() if not agrees}


@pytest.mark.parametrize("name", QUICK_CASES)
def test_memory_and_collectives_are_those_estimated(quick, name):
    assert not quick[name]["faults"]
    assert not differing(quick[name]), quick[name]["rows"]
    assert all(quick[name]["rows"][row][0] > 0 for row in ("weights", "kept by a forward pass", "peak"))


WAITS_OF_A_STEP = {
    "zero_1": {"update: item": 7, "update: copy from pageable memory": 4},
    "zero_3": {"update: item": 3, "update: copy from pageable memory": 3, "update: synchronize": 1},
}
"""How often the host waits for the GPU in two micro-batches and the update: for the loss, the norm and whether they are
finite, and for small tables of DeepSpeed's. ZeRO 1 takes the norm of each of three parameter groups."""


@pytest.mark.parametrize("name", ZERO)
def test_a_step_waits_for_the_gpu_no_more_often_than_is_known(quick, name):
    assert quick[name]["waits"] == WAITS_OF_A_STEP[name]


@pytest.mark.parametrize("name", ZERO)
def test_gradients_of_replicated_parameters_take_one_collective_a_step(quick, name):
    """In each of two micro-batches, the softmax takes two."""
    assert quick[name]["rows"]["tensor parallel: all-reduce calls"] == [2 * 2 + 1, 2 * 2 + 1, True]


def test_a_save_gathers_this_ranks_share_and_reduces_nothing(quick):
    for name in ZERO:
        gathered = {row for row in quick[name]["rows"] if row.endswith("in a save")}
        assert gathered == {"data parallel: all-to-all in a save"}
        assert 0 < quick[name]["rows"][gathered.pop()][0] < quick[name]["rows"]["optimizer state"][0] * 2.1


def test_making_the_weights_takes_their_partitions_and_one_parameter(quick):
    """Under tensor parallelism over two ranks and ZeRO 3 over two; the largest parameter is the embedding."""
    weights, drawing = quick["zero_3"]["rows"]["weights"][0], 64 * DRAWN_AT_ONCE
    largest = 2048 * 256 // 2 * 2
    assert weights < quick["zero_3"]["start"] < weights + largest + drawing
    share = quick["zero_1"]["rows"]["weights"][0]
    assert share <= quick["zero_1"]["start"] < share + drawing


@pytest.mark.slow
@pytest.mark.parametrize("name", MANY)
def test_memory_and_collectives_of_many_configurations_are_those_estimated(many, name):
    assert not many[name]["faults"]
    one_call = "torch_wide" if name.startswith("chosen") else "torch"
    assert many[name]["backend"] == ("triton" if "fused" in name else one_call)
    assert not differing(many[name]), many[name]["rows"]


@pytest.mark.parametrize(
    "name, fault",
    [
        ("frequencies_on_the_cpu", "position/rope.py:"),
        ("labels_on_the_cpu", "GPU and the CPU at megatron_tape/ops/linear_cross_entropy.py:"),
        ("a_wrong_type", "takes tensors of one type"),
        (WAITS, "waits for the GPU in the forward pass: item at tests/rehearsal_cases.py:"),
        (WAITS, "copy from pageable memory at tests/rehearsal_cases.py:"),
    ],
)
def test_a_mistake_that_a_gpu_refuses_or_waits_for_is_found_with_its_place(quick, name, fault):
    assert any(fault in sentence for sentence in quick[name]["faults"]), quick[name]["faults"]


@pytest.mark.parametrize(
    "mistake, row",
    [
        ("a collective in the wrong group", "tensor parallel: all-reduce calls"),
        ("a buffer kept twice", "kept by a forward pass"),
        ("an all-gather of the state", "tensor parallel: all-to-all"),
    ],
)
def test_a_mistake_that_costs_memory_or_traffic_is_found(quick, mistake, row):
    assert not quick[COSTS]["faults"]
    assert row in differing(quick[COSTS]), quick[COSTS]["rows"]
    assert row not in differing(quick["zero_1"])


def test_the_command_reports_and_touches_no_run(quick):
    report = quick["command"]["report"]
    assert quick["command"]["status"] == 0, report
    assert report.startswith("rank 3 of 4: 2 tensor parallel x 2 data parallel, ZeRO 2, bf16") and "no fault" in report
    for row in ("weights", "optimizer state", "kept by a forward pass", "peak", "tensor parallel: all-to-all"):
        assert f"\n{row} " in report
    assert "times a step, update: the host waits for the GPU, item at " in report


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--processes=4", "--rank=4"], "--rank is 4"),
        (["--processes=0"], "--processes is 0"),
        (["--processes=65537"], "--processes is 65537; give 1 to 65,536"),
        (["--train.stepps=3"], "train.stepps"),
    ],
)
def test_mistakes_end_in_one_sentence(capsys, tmp_path, arguments, named):
    recipe = tmp_path / "small.yaml"
    recipe.write_text(SMALL)
    assert status_of(lambda: command.main(["--config", str(recipe), *arguments])) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and named in error


def test_a_torch_whose_insides_are_not_known_is_refused(monkeypatch):
    monkeypatch.setattr(cuda_hooks.torch, "__version__", "2.9.1+cpu")
    with pytest.raises(ConfigError) as error:
        cuda_hooks.fill_cuda_hooks()
    assert error.value.key == "torch"
