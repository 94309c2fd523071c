"""`python -m pretrain.preflight` in one process; tests/slurm/test_preflight.py runs it in jobs of two nodes."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from datasets_for_tests import write_all
from launch import environment, free_port
from training_cases import RECIPE

from megatron_tape.run.attempts import Attempt
from megatron_tape.run.judging import read_attempts
from megatron_tape.run.nodes import versions


@pytest.fixture
def preflight(tmp_path):
    write_all(tmp_path)
    attempt = Attempt.claim(tmp_path / "run", tmp_path / "run" / "checkpoints", {"job": "7"})

    def run(*options, size=1):
        command = [sys.executable, "-m", "pretrain.preflight", "--config", RECIPE, "--data.prefix=a"]
        return subprocess.run(
            [*command, "--logging.directory=run", *options],
            env=environment(0, size, free_port()) | {"TAPE_ATTEMPT": "1"},
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


def test_unexpected_errors_are_recorded_with_the_node_and_the_job_continues(preflight):
    shutil.rmtree(preflight.attempt.home)
    done = preflight()
    assert done.returncode == 1 and "FileNotFoundError" in done.stderr
    (record,) = read_attempts(preflight.folder / "run")
    assert record.outcome == "unready" and "FileNotFoundError" in record.message and record.bad_nodes == ()


def test_a_torch_without_cuda_for_a_job_with_gpus_is_a_mistake_recorded_before_any_rank_ends(preflight):
    done = preflight("--gpus", "1", "--nodes", "alpha")
    assert done.returncode == 1 and "torch sees 0 of the 1 GPUs" in done.stderr
    (record,) = read_attempts(preflight.folder / "run")
    assert record.outcome == ("unready" if torch.backends.cuda.is_built() else "refused")
    assert record.message in done.stderr and len(record.bad_nodes) == 1


def test_a_rank_that_does_not_answer_makes_its_node_a_bad_one_and_the_job_continues(preflight):
    done = preflight("--nodes", "alpha,beta", "--timeout", "1", size=2)
    assert done.returncode == 1 and done.stderr.endswith("preflight: rank 1 on beta did not answer within 1 s\n")
    (record,) = read_attempts(preflight.folder / "run")
    assert record.outcome == "unready" and record.bad_nodes == ("beta",)


def test_a_mistake_in_the_configuration_stops_the_job(preflight):
    done = preflight("--train.global_batch_size=3", size=2)
    assert done.returncode == 1
    (record,) = read_attempts(preflight.folder / "run")
    assert record.outcome == "refused" and "train.global_batch_size 3" in record.message


COUNTED = """
import json, os, sys
opened = []
sys.addaudithook(lambda event, values: event == "open" and opened.append(str(values[0])))
from pretrain import preflight
status = preflight.main(sys.argv[1:])
print(json.dumps([path for path in opened if not path.startswith("/") and os.path.exists(path)]))
sys.exit(status)
"""


def test_a_rank_reads_the_configuration_and_leaves_the_rest_to_the_first_of_its_node(preflight):
    """Otherwise the files that a start touches would grow with its ranks, not with its nodes."""
    shutil.copy(RECIPE, preflight.folder / "config.yaml")
    options = ["--config=config.yaml", "--data.prefix=a", "--logging.directory=run", "--nodes=alpha,beta"]
    port, ranks = free_port(), []
    for rank in range(4):
        place = {"LOCAL_RANK": str(rank % 2), "SLURMD_NODENAME": ("alpha", "beta")[rank // 2], "TAPE_ATTEMPT": "1"}
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-c", COUNTED, *options, "--train.global_batch_size=4", "--train.micro_batch_size=1"],
                env=environment(rank, 4, port) | place,
                cwd=preflight.folder,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    answers = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 4, answers
    opened = [json.loads(answer.splitlines()[-1]) for answer in answers]
    assert opened[1] == opened[3] == ["config.yaml"]
    assert all(any(path.startswith("a.") for path in opened[first]) for first in (0, 2))
