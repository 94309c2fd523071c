"""What training programs say and need when they start, in processes started as a user would."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from datasets_for_tests import write_all
from launch import alone, free_port
from training_cases import RECIPE

REPOSITORY = Path(__file__).parents[2]
OWN_LINES = ("loading torch", "building ", "index ready", "training with ", "attention runs as ", "saved ", "step ")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_all(tmp_path_factory.mktemp("data"))


def program(*arguments, environment=None, **options):
    """Run a program to its end; its output and errors come together, without what tests silence."""
    environment = {"OMP_NUM_THREADS": "1", **(environment or alone())}
    environment.pop("PYTHONWARNINGS", None)
    environment.pop("DS_ACCELERATOR", None)
    command = [sys.executable, *map(str, arguments)]
    together = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.run(command, cwd=REPOSITORY, env=environment, timeout=600, **together, **options)


@pytest.mark.parametrize("stage", [1, 3])
def test_two_processes_say_nothing_but_what_they_do(data, tmp_path, stage):
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    settings = [f"--data.prefix={data}/a", f"--logging.directory={tmp_path}/run", "--train.steps=4"]
    settings += [f"--deepspeed.zero_stage={stage}", "--train.micro_batch_size=1"]
    done = program(*launcher, "-m", "pretrain.train", "--config", RECIPE, *settings)
    assert done.returncode == 0, done.stdout
    expected = (*OWN_LINES, f"warning: {data}")  # datasets that these tests have written themselves
    assert [line for line in done.stdout.splitlines() if not line.startswith(expected)] == []
