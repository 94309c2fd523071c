"""Nodes that must not train together are named before training begins."""

import importlib.metadata
import re
import signal
from pathlib import Path

import pytest
from cluster import wait_until
from test_survive import start, whole  # noqa: F401  (fixtures)


def refused(cluster, job):
    assert cluster.wait(job, 90) == "FAILED", cluster.story(job)
    log = cluster.log(job)
    assert "building a tape model" not in log
    return next(line for line in log.splitlines() if line.startswith("error: preflight: "))


def test_a_node_with_other_data_or_other_versions_is_named(cluster, start):  # noqa: F811
    if cluster.mode() == "plain":
        pytest.skip("without namespaces the virtual nodes see the same files")
    job = start()
    assert cluster.wait(job) == "COMPLETED", cluster.story(job)
    changed = cluster.work / "changed.bin"
    original = cluster.work / "data" / "a.bin"
    changed.write_bytes(bytes([original.read_bytes()[0] ^ 1]) + original.read_bytes()[1:])
    packages = Path(importlib.metadata.distribution("deepspeed").locate_file(""))
    metadata = next(packages.glob("deepspeed-*.dist-info/METADATA"))
    other = cluster.work / "METADATA"
    other.write_text(re.sub(r"(?m)^Version: .*$", "Version: 0.0.1", metadata.read_text(), count=1))
    for source, target in ((changed, original), (other, metadata)):
        cluster.control("sh-node", "nodeB", "mount", "--bind", str(source), str(target))
    told = refused(cluster, start(overrides={"logging.directory": "runs/differing"}))
    assert "nodeB: deepspeed is 0.0.1, but " in told and "on nodeA" in told
    assert re.search(r"nodeB: data/a.bin is \d+ bytes, sha256 \w+, but", told)
    log = cluster.log(job)
    assert re.search(r"preflight: passed in \d+\.\d s", log)


def test_a_rank_that_does_not_answer_is_named_with_its_node(cluster, start):  # noqa: F811
    job = start(site=("TAPE_PREFLIGHT_OPTIONS='--timeout 6'",))
    wait_until(lambda: cluster.kill(1, 1, signal.SIGSTOP), 60, lambda: cluster.story(job))
    assert refused(cluster, job) == "error: preflight: rank 1 on nodeB did not answer within 6 s"


@pytest.mark.parametrize("cluster", [{"gpus": 2}], indirect=True)
def test_gpus_that_slurm_gave_and_torch_does_not_see_are_named(cluster, start):  # noqa: F811
    told = refused(cluster, start(options=("--gpus-per-node=2",)))
    assert "nodeA: torch sees 0 of the 2 GPUs" in told and "nodeB: torch sees 0 of the 2 GPUs" in told
    assert "2 task(s) on each of nodeA,nodeB" in cluster.log("1")


def test_a_checkpoint_directory_that_is_not_shared_is_named(cluster, start):  # noqa: F811
    if cluster.mode() == "plain":
        pytest.skip("without namespaces the virtual nodes see the same files")
    (cluster.work / "checkpoints").mkdir()
    (cluster.work / "local").mkdir()
    cluster.control("sh-node", "nodeB", "mount", "--bind", f"{cluster.work}/local", f"{cluster.work}/checkpoints")
    told = refused(cluster, start(overrides={"checkpoint.directory": f"{cluster.work}/checkpoints"}))
    assert "nodeB: checkpoint.directory" in told


def test_run_all_submits_a_chain_of_which_a_failure_takes_the_rest(cluster, start):  # noqa: F811
    start(overrides={"train.steps": 1, "schedule.warmup_steps": 0}, options=("--hold",))
    from test_survive import settings

    few = settings("runs/chain", **{"train.steps": 4})
    told = cluster.run("bash", f"{cluster.work}/repo/slurm/run_all.sh", "--sbatch", "--nodes=2", "tiny.yaml", *few)
    jobs = [word.strip(",") for word in re.findall(r"job (\d+)", told)]
    assert len(jobs) == 3 and "note: pretrain.evaluate is not part of this version" in told
    assert cluster.wait(jobs[0]) == "COMPLETED", cluster.story(jobs[0])
    assert cluster.wait(jobs[1]) == "FAILED"
    assert "context extension is not part of this version" in cluster.log(jobs[1])
    assert cluster.wait(jobs[2]) == "CANCELLED"
