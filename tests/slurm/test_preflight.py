"""The preflight names nodes that cannot train together; the next attempt excludes them if
possible.
"""

import importlib.metadata
import re
import shutil
import signal
from pathlib import Path

import pytest
from runs import wait_for_attempt

from megatron_tape.run.judging import read_attempts


@pytest.mark.parametrize("cluster", [{"nodes": "nodeA nodeB nodeC"}], indirect=True)
def test_a_node_with_different_data_versions_and_directories_is_named_and_excluded(cluster, start):
    if cluster.mode() == "plain":
        pytest.skip("without namespaces the virtual nodes see the same files")
    changed = cluster.work / "changed.bin"
    original = cluster.work / "data" / "a.bin"
    changed.write_bytes(bytes([original.read_bytes()[0] ^ 1]) + original.read_bytes()[1:])
    packages = Path(importlib.metadata.distribution("deepspeed").locate_file(""))
    metadata = next(packages.glob("deepspeed-*.dist-info/METADATA"))
    other = cluster.work / "METADATA"
    other.write_text(re.sub(r"(?m)^Version: .*$", "Version: 0.0.1", metadata.read_text(), count=1))
    checkpoints = cluster.work / "checkpoints"
    local = cluster.work / "local"
    for directory in (checkpoints, local):
        directory.mkdir()
    differing = [(changed, original), (other, metadata), (local, checkpoints)]
    if compiler := shutil.which("gcc"):
        broken = cluster.work / "gcc"
        broken.write_text("#!/bin/sh\nexit 1\n")
        broken.chmod(0o755)
        differing.append((broken, Path(compiler).resolve()))
    for source, target in differing:
        cluster.control("sh-node", "nodeB", "mount", "--bind", str(source), str(target))
    job = start(overrides={"checkpoint.directory": str(checkpoints)})
    cluster.until(lambda: "preflight: passed in " in cluster.log(job), job)
    log = cluster.log(job)
    named = next(line for line in log.splitlines() if line.startswith("error: preflight: "))
    assert "nodeB: deepspeed is 0.0.1, but " in named
    assert "on nodeA" in named
    assert re.search(r"nodeB: data/a.bin is \d+ bytes, sha256 \w+, but", named)
    assert "nodeB: checkpoint.directory" in named
    assert not compiler or "nodeB: C compiler is none that runs, but gcc " in named
    assert "requeueing without nodeB" in log
    first, second = read_attempts(start.run)
    assert (first.outcome, first.facts["nodes"]) == ("unready", ["nodeA", "nodeB"])
    assert second.facts["nodes"] == ["nodeA", "nodeC"]


def test_a_rank_that_does_not_answer_is_retried_on_the_same_nodes_if_there_are_no_others(
    cluster, start
):
    job = start(site=("TAPE_PREFLIGHT_OPTIONS='--timeout 8'",))
    cluster.until(lambda: cluster.kill(1, 1, signal.SIGSTOP), job)
    wait_for_attempt(cluster, job, start.run, 2)
    log = cluster.log(job)
    assert "error: preflight: rank 1 on nodeB did not answer within 8 s" in log
    assert "not excluding nodeB, since too few other nodes of its kind are left" in log
    first, second = read_attempts(start.run)
    assert first.outcome == "unready"
    assert second.facts["nodes"] == ["nodeA", "nodeB"]


@pytest.mark.parametrize("cluster", [{"nodes": "nodeA nodeB nodeC"}], indirect=True)
def test_a_node_with_broken_kernels_is_named_with_rank_and_cause_and_excluded(cluster, start):
    job = start(inject={"no_kernels": "nodeB"})
    wait_for_attempt(cluster, job, start.run, 2)
    log = cluster.log(job)
    named = "error: nodeB (rank 1 of 2) cannot train with the other nodes: model.attention_backend"
    assert f"{named} is triton, whose kernel" in log
    assert "requeueing without nodeB" in log
    first, second = read_attempts(start.run)
    assert (first.outcome, first.facts["nodes"]) == ("failed", ["nodeA", "nodeB"])
    assert second.facts["nodes"] == ["nodeA", "nodeC"]
