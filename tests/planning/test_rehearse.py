"""Rehearsals on fake GPUs agree with the estimate and detect planted errors."""

import json
import os
import subprocess
import sys

import pytest
import rehearsal_cases
from rehearsal_cases import MANY, ONE_CALL, QUICK_CASES, SMALL

from megatron_tape.command_line import status_of
from pretrain import rehearse as command

WAITS = "an_item_and_a_copy_in_a_layer"
COSTS = "a_collective_in_the_wrong_group_a_buffer_kept_twice_and_an_all_gather_of_the_state"
UPDATE = "a_tensor_in_fp64_kept_by_the_update"


def rehearsed(which, folder):
    """Run the cases in a separate process, because a rehearsal patches torch permanently."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    arguments = [sys.executable, rehearsal_cases.__file__, which, str(folder / "small.yaml")]
    result = subprocess.run(
        arguments, env=environment, cwd=folder, capture_output=True, text=True, timeout=850
    )
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
def test_memory_and_collectives_equal_the_estimate(quick, name):
    assert not quick[name]["faults"]
    assert not differing(quick[name]), quick[name]["rows"]
    assert all(
        quick[name]["rows"][row][0] > 0 for row in ("weights", "kept by a forward pass", "peak")
    )


@pytest.mark.parametrize("name, items", [("zero_1", 6), ("zero_3", 3)])
def test_a_step_synchronizes_with_the_gpu_only_at_known_places(quick, name, items):
    """The places are the mean loss, the engine's norm, and DeepSpeed's tests that the norm is
    finite.
    """
    assert quick[name]["waits"]["update pass: item"] == items
    assert not [wait for wait in quick[name]["waits"] if not wait.startswith("update pass: ")]


@pytest.mark.slow
@pytest.mark.parametrize("name", MANY)
def test_memory_and_collectives_of_many_configurations_equal_the_estimate(many, name):
    assert not many[name]["faults"]
    backend = "torch"
    if name.startswith("chosen"):
        backend = "torch_wide"
    elif name.startswith("flash_attn"):
        backend = "flash_attn"
    assert many[name]["backend"] == backend
    assert not differing(many[name]), many[name]["rows"]


def assert_kept_exactly(case):
    """A state that is kept twice, or not at all, adds or removes about 1 % of all that is kept."""
    rehearsed, estimated, _ = case["rows"]["kept by a forward pass"]
    assert estimated == pytest.approx(rehearsed, rel=0.004)


def test_a_joined_state_is_no_tensor_of_its_own(quick):
    assert quick["chosen"]["backend"] == "torch_wide"
    assert_kept_exactly(quick["chosen"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_CALL)
def test_states_of_one_call_are_kept_exactly_as_estimated(many, name):
    assert_kept_exactly(many[name])


@pytest.mark.parametrize(
    "name, fault",
    [
        ("frequencies_on_the_cpu", "position/rope.py:"),
        (WAITS, "waits for the GPU in the forward pass: item at tests/rehearsal_cases.py:"),
        (WAITS, "copy to the GPU at tests/rehearsal_cases.py:"),
    ],
)
def test_wrong_devices_and_synchronizations_are_reported_with_their_place(quick, name, fault):
    assert any(fault in sentence for sentence in quick[name]["faults"]), quick[name]["faults"]


def test_excess_memory_of_the_fused_update_is_reported(quick):
    assert not quick[UPDATE]["faults"]
    assert "kept by a forward pass" in differing(quick[UPDATE]), quick[UPDATE]["rows"]


@pytest.mark.parametrize(
    "mistake, row",
    [
        ("a collective in the wrong group", "tensor parallel: all-reduce"),
        ("a buffer kept twice", "kept by a forward pass"),
        ("an all-gather of the state", "tensor parallel: all-to-all"),
    ],
)
def test_excess_memory_and_communication_are_reported(quick, mistake, row):
    assert not quick[COSTS]["faults"]
    assert row in differing(quick[COSTS]), quick[COSTS]["rows"]
    assert row not in differing(quick["zero_1"])


def test_the_command_prints_a_report(quick):
    report = quick["command"]["report"]
    assert quick["command"]["status"] == 0, report
    assert report.startswith("rank 3 of 4: 2 tensor parallel x 2 data parallel, ZeRO 2, bf16")
    assert "no faults" in report
    for row in ("weights", "peak", "tensor parallel: all-to-all"):
        assert f"\n{row} " in report
    assert "times per step, the host waits for the GPU: update pass: item at " in report


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--processes=4", "--rank=4"], "--rank is 4"),
        (["--processes=0"], "argument --processes: 0 is below 1"),
        (["--train.stepps=3"], "train.stepps"),
    ],
)
def test_mistakes_end_in_one_sentence(capsys, tmp_path, arguments, named):
    recipe = tmp_path / "small.yaml"
    recipe.write_text(SMALL)
    assert status_of(lambda: command.main(["--config", str(recipe), *arguments])) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert named in error
