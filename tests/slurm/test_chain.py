"""slurm/run_all.sh: pretraining, its extension and its evaluation follow each other on a real Slurm."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from cluster import REPOSITORY, rows
from test_survive import settings, start, wait_for_step, whole  # noqa: F401  (fixtures)

from megatron_tape.run.attempts import read_attempts

STEPS = 12


@pytest.fixture
def chain(cluster, start):  # noqa: F811
    """Submit a chain of a few steps each; return its jobs."""
    shutil.copy(REPOSITORY / "tests" / "recipes" / "extend.yaml", cluster.work)
    script = f"{cluster.work}/repo/slurm/run_all.sh"
    first = settings("runs/first", **{"train.steps": 4, "model.position_encoding": "rope"})
    second = ["--data.prefix=data/a", f"--train.steps={STEPS}", "--checkpoint.interval=100"]

    def submit(*extending):
        # Prepares the site and the data; its own job never starts.
        cluster.run("scancel", start(options=("--hold",), inject={"sleep": 0.4}))
        output = cluster.run("bash", script, "tiny.yaml", *first, "--extend", "extend.yaml", *second, *extending)
        assert "in runs/first" in output and "note: pretrain.evaluate is not part of this version" in output
        return re.findall(r"^\w+ +job (\d+)", output, re.M)

    submit.run = cluster.work / "runs" / "extend"
    return submit


def test_pretraining_is_extended_and_a_preempted_extension_loses_nothing(cluster, chain):
    pretraining, extension, evaluation = chain()
    wait_for_step(cluster, extension, chain.run, 3, timeout=300)
    cluster.run("scancel", "--batch", "--signal=USR1", extension)
    assert cluster.wait(extension) == "COMPLETED", cluster.story(extension)
    assert cluster.field(pretraining, "JobState") == "COMPLETED"
    interrupted, finished = read_attempts(chain.run)
    assert interrupted.outcome == "interrupted" and finished.facts["checkpoint_step"] >= 3
    log = cluster.log(extension)
    assert log.count("beginning with the weights of runs/first/checkpoints/step-00000004") == 1
    assert cluster.wait(evaluation, 60) == "FAILED"
    assert "evaluation is not part of this version" in cluster.log(evaluation)
    config = chain.run / "jobs" / extension / "config.yaml"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m"]
    command = [*launcher, "pretrain.extend_context", "--config", str(config), "--logging.directory=runs/alone"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    alone = [*command, "--checkpoint.directory=runs/alone/checkpoints"]
    done = subprocess.run(alone, env=environment, cwd=cluster.work, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert rows(chain.run) == rows(cluster.work / "runs" / "alone")


def test_what_cannot_be_a_chain_is_refused_before_anything_is_submitted(cluster, chain):
    for wrong, part in (
        ("--model.hidden_size=64", "model.hidden_size: checkpoint 32, configuration 64"),
        ("--extension.from=elsewhere", "the chain extends what it pretrains; remove it"),
        ("--logging.directory=runs/first", "for both pretraining and extension"),
        ("--train.global_batch_size=0", "train.global_batch_size is 0"),
    ):
        with pytest.raises(AssertionError, match="error: .*" + re.escape(part)):
            chain(wrong)
    script = f"{cluster.work}/repo/slurm/run_all.sh"
    with pytest.raises(AssertionError, match="--extend RECIPE is missing"):
        cluster.run("bash", script, "tiny.yaml")
    assert not cluster.run("squeue", "--noheader")


@pytest.mark.slow
def test_after_a_failure_the_later_jobs_are_removed(cluster, chain):
    _, extension, evaluation = chain()
    (cluster.work / "data" / "a.bin").rename(cluster.work / "data" / "b.gone")
    assert cluster.wait(extension) in ("FAILED", "CANCELLED")
    assert cluster.wait(evaluation) == "CANCELLED"
