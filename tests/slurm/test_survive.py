"""Jobs that are interrupted or lose nodes have the same result as an uninterrupted run."""

import random
import re
import time

import pytest
from runs import STEPS, TWO_STAGES, rows, step_of, wait_for_attempt, wait_for_step

from megatron_tape.checkpoint import directories as checkpoint_files
from megatron_tape.checkpoint.directories import checkpointed_step
from megatron_tape.run.judging import read_attempts

slow = pytest.mark.slow
IN_BACKGROUND = {"checkpoint.asynchronous": "true"}
"""For the tests with the most kinds of interruption; the others save synchronously, the default."""


def check_equal(run, whole, attempts=None):
    """Check that a run has the same metrics and last checkpoint as the uninterrupted one, and all
    TensorBoard steps.
    """
    assert rows(run) == rows(whole / "runs/tiny")
    newest = checkpoint_files.newest_complete(run / "checkpoints", pytest.fail)
    assert newest.name == f"step-{STEPS:08d}"
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    shown.Reload()
    steps = [event.step for event in shown.Scalars("train/loss")]
    assert steps == list(range(1, STEPS + 1))
    records = read_attempts(run)
    if attempts is not None:
        assert len(records) == attempts, [(record.outcome, record.message) for record in records]
    return records


def completed(cluster, job):
    return cluster.field(job, "JobState") == "COMPLETED"


def finish(cluster, job):
    assert cluster.wait(job) == "COMPLETED", cluster.story(job)


@slow
def test_a_run_survives_four_kills_of_a_rank_and_one_of_the_controller(cluster, start, whole):
    moments = random.Random(20261121)
    job = start(overrides=IN_BACKGROUND)
    log = cluster.work / f"slurm-tape-pretrain-{job}.out"
    for kill in range(1, 5):
        wait_for_attempt(cluster, job, start.run, kill)
        record = read_attempts(start.run)[-1]
        if kill % 2:
            # During a save, a step or an evaluation, but after a new checkpoint, so that it is not
            # a crash loop.
            begun = record.facts["checkpoint_step"]
            cluster.until(
                lambda begun=begun: (
                    checkpointed_step(start.run / "checkpoints") > begun or completed(cluster, job)
                ),
                job,
            )
            time.sleep(moments.uniform(0, 0.7))
        else:
            time.sleep(moments.uniform(0, 12))
        if completed(cluster, job):
            pytest.fail(f"the run was over before kill {kill}; it needs more steps")
        rank = moments.randrange(2)
        if kill == 3:
            cluster.control("kill-ctl")
        cluster.until(lambda kill=kill, rank=rank: cluster.kill(kill, rank), job)
        if kill == 3:
            cluster.until(lambda: "attempt 3:" in log.read_text(), job)
            cluster.control("start-ctl")
    finish(cluster, job)
    records = check_equal(start.run, whole, attempts=5)
    starts = [record.facts["checkpoint_step"] for record in records]
    assert starts == sorted(starts)


def test_a_two_node_run_equals_one_without_slurm_and_does_not_wait_for_an_earlier_step(
    cluster, start, whole
):
    # Like the preflight: without --overlap, srun may wait two minutes until Slurm reports the end
    # of the earlier step.
    earlier_step = '[ -z "${SLURM_JOB_ID:-}" ] || srun --nodes=2 --ntasks=2 sleep 600 &'
    container = cluster.work / "container"
    inside = cluster.work / "inside"
    container.write_text(
        f'#!/bin/sh\necho "$@" | tr "\\n" " " >>{inside}\necho >>{inside}\nexec "$@"\n'
    )
    container.chmod(0o755)
    job = start(inject={"sleep": 0}, site=(earlier_step, "sleep 2", f"TAPE_CONTAINER={container}"))
    finish(cluster, job)
    for module in (
        "pretrain.attempt begin",
        "pretrain.preflight",
        "pretrain.train",
        "pretrain.attempt decide",
    ):
        assert f" {module} " in inside.read_text(), module
    (attempt,) = check_equal(start.run, whole, attempts=1)
    assert attempt.facts["nodes"] == ["nodeA", "nodeB"]
    assert re.search(r"all-reduce of 16 MiB over 2 ranks: [0-9.]+ GB/s", cluster.log(job))


@slow
def test_a_signal_the_time_limit_and_preemption_save_and_requeue_with_the_copied_code(
    cluster, start, whole
):
    # Slow steps, so that training between two interruptions takes longer than Slurm needs to notice
    # a time limit.
    job = start(options=("--partition=low",), inject={"sleep": 1.2}, overrides=IN_BACKGROUND)
    wait_for_step(cluster, job, start.run, 3)
    (cluster.work / "repo" / "pretrain" / "train.py").write_text(
        "raise RuntimeError('not the copy')"
    )
    cluster.run("scancel", "--signal=USR1", job)
    wait_for_attempt(cluster, job, start.run, 2)
    wait_for_step(cluster, job, start.run, 20)
    # Every 30 s, Slurm sends warnings (here to the batch script) and ends jobs past their time
    # limit.
    cluster.run("scontrol", "update", f"JobId={job}", "EndTime=now+2minutes")
    wait_for_attempt(cluster, job, start.run, 3)
    cluster.run(
        "scontrol", "update", f"JobId={job}", "TimeLimit=30"
    )  # a requeued job keeps the limit
    step = step_of(start.run) + 3
    wait_for_step(cluster, job, start.run, step)
    options = ["--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null"]
    other = cluster.run("sbatch", "--parsable", *options, "--wrap", "sleep 3")
    assert cluster.wait(other) == "COMPLETED"
    finish(cluster, job)
    # Only the attempt after the time limit may end before it has trained, while its limit is being
    # changed. If srun refuses to start its processes, the attempt is unready.
    found = check_equal(start.run, whole)
    untrained = [record.number for record in found if record.outcome in (None, "unready")]
    assert untrained in ([], [3])
    records = [record for record in found if record.number not in untrained]
    assert [record.outcome for record in records] == ["interrupted"] * 3 + ["finished"]
    starts = [record.facts["checkpoint_step"] for record in records[1:]]
    assert all(begun >= step for begun, step in zip(starts, (3, 20, step)))


@slow
def test_pipeline_stages_on_two_nodes_survive_signals_and_the_loss_of_either_node(
    cluster, start, whole_of_stages
):
    if cluster.mode() == "plain":
        pytest.skip("without user namespaces killing a virtual node leaves its processes alive")
    job = start(overrides=TWO_STAGES | IN_BACKGROUND)
    wait_for_step(cluster, job, start.run, 7)
    cluster.run("scancel", "--signal=USR1", job)
    wait_for_attempt(cluster, job, start.run, 2)
    wait_for_step(cluster, job, start.run, 18)
    cluster.control("kill-node", "nodeB")
    time.sleep(3)
    cluster.control("start-node", "nodeB")
    wait_for_attempt(cluster, job, start.run, 3)
    wait_for_step(cluster, job, start.run, 33)
    cluster.control("kill-node", "nodeA")  # the node that runs the batch script
    cluster.until(lambda: cluster.field(job, "JobState") != "RUNNING", job)
    cluster.control("start-node", "nodeA")
    finish(cluster, job)
    first, *_, last = records = check_equal(start.run, whole_of_stages)
    assert first.outcome == "interrupted"
    assert len(records) >= 4
    assert last.facts["checkpoint_step"] >= 25
    assert last.facts["layout"] == "1 tensor parallel x 2 pipeline parallel x 1 data parallel"


@slow
@pytest.mark.parametrize(
    "cluster",
    [{"nodes": "n1 n2 n3", "mode": "net"}],
    indirect=True,
)
def test_an_old_attempt_on_a_disconnected_node_ends_and_writes_nothing(cluster, start, whole):
    job = start(inject={"sleep": 0.3}, overrides=IN_BACKGROUND)
    wait_for_step(cluster, job, start.run, 12)
    assert read_attempts(start.run)[-1].facts["nodes"] == ["n1", "n2"]
    cluster.control("cut-node", "n1")
    old = cluster.processes(attempt=1, rank=0)
    assert old
    cluster.run("scontrol", "update", "nodename=n1", "state=down", "reason=cut")
    wait_for_attempt(cluster, job, start.run, 2)
    assert read_attempts(start.run)[-1].facts["nodes"] == ["n2", "n3"]
    cluster.until(lambda: not cluster.processes(attempt=1), job)
    finish(cluster, job)
    records = check_equal(start.run, whole, attempts=2)
    assert records[0].outcome == "stale"


@slow
def test_after_a_hang_all_stacks_are_written_and_the_run_continues(cluster, start, whole):
    once = cluster.work / "hung"
    job = start(
        inject={"hang": [1, 17], "once": str(once)},
        overrides={"train.hang_timeout": 10},
    )
    finish(cluster, job)
    first, _ = check_equal(start.run, whole, attempts=2)
    assert first.outcome == "hung"
    assert "train.hang_timeout" in first.message
    for rank, place in ((0, "train_step"), (1, "sitecustomize.py")):
        stacks = (start.run / "attempts" / "000001" / f"stacks-0000{rank}.txt").read_text()
        assert f"rank {rank} on node" in stacks
        assert place in stacks
