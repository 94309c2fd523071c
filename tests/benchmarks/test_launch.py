"""`python -m benchmarks.launch`: the files that the launch of a job touches grow with its nodes, not with its ranks."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
NODES, RANKS = 3, 48


def test_a_rank_reads_the_configuration_and_leaves_the_rest_to_the_first_of_its_node():
    sizes = ["--ranks", str(RANKS), "--ranks-per-node", str(RANKS // NODES)]
    command = [sys.executable, "-m", "benchmarks.launch", *sizes]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "verdict: done finished all" in done.stdout and "1 rank," in done.stdout
    for stage in ("preflight", "training"):
        row = [line for line in done.stdout.splitlines() if line.startswith(stage)][-1]
        read, written, listed, changed, _ = map(int, re.findall(r"(\d+) \(most \d+\)", row)[-5:])
        # The first rank of a node reads the data and a token, too; rank 0 writes and removes records.
        assert RANKS <= read <= RANKS + 4 * NODES + 10, stage
        assert 0 < written <= NODES + 10 and listed <= 4 and 0 < changed <= NODES + 10, stage
