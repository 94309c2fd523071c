"""In every layout, two ranks have the losses, gradients, weights and checkpoints of one process.

Without a GPU, both ranks run on the CPU. With one GPU (`TESTS_ON=gpu`) they share it and use gloo;
with several, each has its own and they use NCCL. The single process runs on the same device.
"""

import statistics

import pytest
import torch
from datasets_for_tests import write_dataset
from launch import environment_on_device, run_groups
from training_cases import assert_close, assert_same_state
from two_rank_cases import BF16_LAYOUTS, FP32_LAYOUTS, LAYOUTS, RESUMED, STEPS, result_path

pytestmark = pytest.mark.gpu

GRADIENT_ERROR = 1e-4
"""Maximum relative error of a gradient in fp32. On a CPU it was 2e-6, also in the GPU's size."""
NEAR = {"train/loss": 0.005, "train/grad_norm": 0.05, "validation/loss": 0.005}
"""Maximum relative difference of metrics between bf16 and fp32. On a CPU, in the GPU's size, it was
0.0012, 0.007 and 0.0022.
"""
FLOOR = 1e-3
"""Relative error in bf16 that is always allowed."""
ATTEMPTS = 3
"""A group that fails is started again without the layout that failed, so that a trial of a GPU
learns of the others.
"""


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """Return a function for the results of a layout, or of a run on one process.

    Both groups run at the same time.
    """
    folder = tmp_path_factory.mktemp("two_ranks")
    write_dataset(folder / "data", documents=600)
    failures = {}
    for _ in range(ATTEMPTS):
        try:
            run_groups("two_rank_cases", [2, 1], folder, *failures, of_rank=environment_on_device)
            break
        except AssertionError as error:
            missing = [name for name in LAYOUTS if not result_path(folder, name).exists()]
            failed = next((name for name in missing if name not in failures), "one process")
            failures[failed] = str(error)

    def load(name):
        path = result_path(folder, name)
        if path.exists():
            return torch.load(path, weights_only=True)
        pytest.fail(failures.get(name, f"{name} was not run, since {[*failures]} failed"))

    return load


def relative_error(found, expected):
    return ((found - expected).norm() / expected.norm().clamp(min=1e-12)).item()


def relative_errors(found, expected):
    """Return the relative error of each tensor."""
    assert found.keys() == expected.keys()
    assert len(expected) > 20
    return {key: relative_error(found[key], value) for key, value in expected.items()}


def total_error(found, expected, kind):
    """Return the relative error of all weights, or of all moments of a kind."""
    keys = [key for key in expected if key.startswith(f"{kind}/")]
    assert keys
    return relative_error(
        torch.cat([found[key].flatten() for key in keys]),
        torch.cat([expected[key].flatten() for key in keys]),
    )


@pytest.mark.parametrize("layout", FP32_LAYOUTS)
def test_two_ranks_equal_one_process(result, layout):
    found = result(layout)
    single, _ = FP32_LAYOUTS[layout]
    expected = result(single)
    assert_close(found["rows"], expected["rows"], STEPS)
    errors = relative_errors(found["gradients"], expected["gradients"])
    print(f"{layout}: largest error of a gradient {max(errors.values()):.0e}")
    wrong = {key: error for key, error in errors.items() if not error < GRADIENT_ERROR}
    assert not wrong
    assert_same_state(found["state"], expected["state"])


@pytest.mark.parametrize("layout", BF16_LAYOUTS)
def test_two_ranks_in_bf16_have_at_most_twice_the_error_of_one_process(result, layout):
    exact = result("tape")
    found = result(layout)
    single = result("tape_bf16")

    for row, other in zip(found["rows"], exact["rows"], strict=True):
        for key in NEAR.keys() & other.keys():
            assert row[key] == pytest.approx(other[key], rel=NEAR[key]), (row["step"], key)

    errors = relative_errors(found["gradients"], exact["gradients"])
    allowed = relative_errors(single["gradients"], exact["gradients"])
    # The rounding error of a small tensor may be small by chance.
    typical = statistics.median(allowed.values())
    wrong = {
        key: error
        for key, error in errors.items()
        if not error <= 2 * max(allowed[key], typical) + FLOOR
    }
    assert not wrong

    for kind in ("weight", "exp_avg", "exp_avg_sq"):
        error = total_error(found["state"], exact["state"], kind)
        allowed_error = total_error(single["state"], exact["state"], kind)
        print(f"{layout}: error of all {kind} {error:.1e}, of one process {allowed_error:.1e}")
        assert error <= 2 * allowed_error + FLOOR, kind


@pytest.mark.parametrize("layout", RESUMED)
def test_one_process_resumes_a_checkpoint_of_two_ranks(result, layout):
    resumed = result(f"{layout}_resumed")
    single, _ = FP32_LAYOUTS[layout]
    expected = result(single)
    (row,) = resumed["rows"]
    other = expected["rows"][-1]
    assert row["step"] == other["step"] == STEPS
    for key in NEAR:
        assert row[key] == pytest.approx(other[key], rel=1e-4), key
    assert_same_state(resumed["state"], expected["state"])
