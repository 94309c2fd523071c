"""slurm/common.sh: at which address ranks look for rank 0."""

import subprocess
from pathlib import Path

import pytest

COMMON = Path(__file__).parents[2] / "slurm" / "common.sh"
SCRIPT = """
source "$1"
getent() { [[ " $RESOLVED " = *" $2 "* ]]; }
scontrol() { echo "   NodeAddr=10.0.0.7 NodeHostName=alpha"; }
head_address alpha
"""


@pytest.mark.parametrize(
    "resolved, nodes, address",
    [("alpha 10.0.0.7", 2, "alpha"), ("10.0.0.7", 2, "10.0.0.7"), ("", 1, "127.0.0.1"), ("", 2, "alpha")],
)
def test_rank_0_is_found_by_what_resolves(resolved, nodes, address):
    environment = {"RESOLVED": resolved, "SLURM_JOB_NUM_NODES": str(nodes), "PATH": "/usr/bin:/bin"}
    command = ["bash", "-uc", SCRIPT, "bash", str(COMMON)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{address}\n", "")
