"""Both supported versions of Megatron-core train the same weights bit for bit."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from datasets_for_tests import write_all
from launch import alone
from megatron_cases import STEPS, cases

TESTS = Path(__file__).resolve().parents[1]
OTHER = TESTS.parent / ".venv-megatron" / "bin" / "python"
"""Python with the packages of this one, but the other version of Megatron-core."""

pytestmark = pytest.mark.slow


def train_with(python, data, output):
    """Run the cases with the Megatron-core of a Python; return its version and the results by
    case.
    """
    command = [python, TESTS / "megatron_cases.py", data, output]
    done = subprocess.run(
        command,
        env=alone(),
        capture_output=True,
        text=True,
        timeout=420,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    found = torch.load(output, weights_only=True)
    return found["version"], found["cases"]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Train with both versions. The second also reads the index of the data that the first has
    built.
    """
    if not OTHER.exists():
        pytest.fail(f"{OTHER} does not exist; make it with: make .venv-megatron")
    folder = tmp_path_factory.mktemp("versions")
    data = write_all(folder)
    version, own = train_with(sys.executable, data, folder / "own.pt")
    index = {path: path.stat().st_mtime_ns for path in folder.rglob("*.npy")}
    other_version, others = train_with(OTHER, data, folder / "other.pt")
    assert version != other_version
    assert index
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.npy")} == index
    return own, others


@pytest.mark.parametrize("case", cases(""))
def test_both_versions_train_the_same_weights_bit_for_bit(results, case):
    own, other = (found[case] for found in results)
    assert len(own["rows"]) == STEPS
    assert "validation/loss" in own["rows"][-1]
    assert own["rows"] == other["rows"]
    for step, state in own["states"].items():
        expected = other["states"][step]
        assert state.keys() == expected.keys()
        assert [
            name for name, value in state.items() if not torch.equal(value, expected[name])
        ] == []
