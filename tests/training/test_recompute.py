"""Layers that are computed again in the backward pass learn what layers learn that are not."""

import pytest
from launch import run_group
from recompute_cases import cases

KEYS = [
    f"{name}_zero{stage}_{precision}_{trained}_{recompute}"
    for name, stage, precision, trained, kinds in cases()
    for recompute in kinds
]


@pytest.fixture(scope="module")
def results():
    return run_group("recompute_cases", 2)


@pytest.mark.parametrize("case", KEYS)
def test_recomputation_changes_no_gradient_of_any_encoding(results, case):
    for found in results[case]:
        assert isinstance(found, dict), found
    assert sum(found["gradients"] for found in results[case]) > 0
    assert all(found["same_loss"] for found in results[case])
    # Recorded attention gives frozen biases gradients, too, which another kernel of torch computes.
    assert max(found["far"] for found in results[case]) <= (1e-5 if "_others_" in case else 0)
