"""slurm/run_all.sh: pretraining, extension and evaluation follow each other on a real Slurm; evaluation alone."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from cluster import REPOSITORY, rows, wait_until
from test_survive import settings, start, wait_for_step, whole  # noqa: F401  (fixtures)

from megatron_tape.evaluation.results import read_results
from megatron_tape.run.judging import read_attempts

STEPS = 12
EVALUATION = ["perplexity", "--perplexity.data", "data/a", "--perplexity.lengths", "[4, 8]"]
EVALUATION += ["--perplexity.stride", "4", "--perplexity.windows", "1", "--perplexity.documents", "3"]


@pytest.fixture
def chain(cluster, start):  # noqa: F811
    """Submit a chain of a few steps each; return its jobs."""
    shutil.copy(REPOSITORY / "tests" / "recipes" / "extend.yaml", cluster.work)
    script = f"{cluster.work}/repo/slurm/run_all.sh"
    first = settings("runs/first", **{"train.steps": 4, "model.position_encoding": "rope"})
    second = ["--data.prefix=data/a", f"--train.steps={STEPS}", "--checkpoint.interval=100"]

    def submit(*extending, evaluating=EVALUATION):
        # Prepares the site and the data; its own job never starts.
        cluster.run("scancel", start(options=("--hold",), inject={"sleep": 0.4}))
        arguments = ["tiny.yaml", *first, "--extend", "extend.yaml", *second, *extending, "--evaluate", *evaluating]
        output = cluster.run("bash", script, *arguments)
        assert "in runs/first\n" in output and output.endswith("in runs/extend/evaluation")
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
    assert cluster.wait(evaluation, 120) == "COMPLETED", cluster.story(evaluation)
    evaluated = chain.run / "evaluation" / f"step-{STEPS:08d}"
    found = read_results(evaluated)
    assert found.model.run["step"] == STEPS and (evaluated / "perplexity.png").is_file()
    assert [score.length for score in found.tasks["perplexity"].scores if score.metric == "loss"] == [4, 8]
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
    for wrong, part in (
        (["perplexities"], "perplexities is not a task"),
        (["perplexity"], "perplexity.data must be set"),
        (["passkey"], "passkey needs a tokenizer"),
    ):
        with pytest.raises(AssertionError, match="error: .*" + re.escape(part)):
            chain(evaluating=wrong)
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


def test_a_preempted_evaluation_on_two_nodes_continues(cluster, start, whole):  # noqa: F811
    cluster.run("scancel", start(options=("--hold",), inject={"sleep": 0.5}))
    shutil.copytree(whole / "runs" / "tiny", cluster.work / "runs" / "tiny")
    settings = ["--model", "runs/tiny", "--perplexity.documents", "20"]
    job = cluster.submit("evaluate_tape.sh", *EVALUATION, *settings, options=("--nodes=2",))
    evaluations = cluster.work / "runs" / "tiny" / "evaluation"

    def values():
        return sum(file.read_bytes().count(b'"value"') for file in evaluations.glob("*/parts/*/*.jsonl"))

    wait_until(lambda: values() >= 4, 240, lambda: cluster.story(job))
    cluster.run("scancel", "--batch", "--signal=USR1", job)
    assert cluster.wait(job, 240) == "COMPLETED", cluster.story(job)
    assert cluster.field(job, "Restarts") == "1" and "of them done before" in cluster.log(job)
    (found,) = evaluations.glob("*/results.json")
    assert read_results(found).tasks["perplexity"].processes == 2
