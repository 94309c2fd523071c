"""`python -m pretrain.preflight` on one process; tests/slurm/test_preflight.py shows it stop jobs of two nodes."""

import shutil
import subprocess
import sys

import pytest
from datasets_for_tests import write_all
from launch import environment, free_port
from training_cases import RECIPE

from megatron_tape.run.attempts import Attempt, read_attempts
from megatron_tape.run.nodes import versions


@pytest.fixture
def preflight(tmp_path):
    write_all(tmp_path)
    attempt = Attempt.claim(tmp_path / "run", tmp_path / "run" / "checkpoints", {"job": "7"})

    def run(*options):
        command = [sys.executable, "-m", "pretrain.preflight", "--config", RECIPE, "--data.prefix=a"]
        return subprocess.run(
            [*command, "--logging.directory=run", *options],
            env=environment(0, 1, free_port()) | {"TAPE_ATTEMPT": "1"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )

    run.attempt = attempt
    run.folder = tmp_path
    return run


def test_a_node_in_order_passes_and_is_described(preflight):
    done = preflight()
    assert done.returncode == 0, done.stderr
    assert f"torch {versions()['torch']}" in done.stdout and "28,528 parameters" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("preflight: passed in")
    assert list(preflight.attempt.home.iterdir()) == []
    assert read_attempts(preflight.folder / "run")[0].outcome is None


def test_errors_that_nobody_foresaw_are_recorded_with_the_node(preflight):
    shutil.rmtree(preflight.attempt.home)
    done = preflight()
    assert done.returncode == 1 and "FileNotFoundError" in done.stderr
    (record,) = read_attempts(preflight.folder / "run")
    assert record.outcome == "refused" and "FileNotFoundError" in record.message


def test_gpus_that_are_missing_are_recorded_before_anybody_ends(preflight):
    done = preflight("--gpus", "1", "--nodes", "alpha")
    assert done.returncode == 1 and "torch sees 0 of the 1 GPUs" in done.stderr
    (record,) = read_attempts(preflight.folder / "run")
    assert record.outcome == "refused" and record.message in done.stderr
