"""Jobs on a real Slurm: inherited variables, heterogeneous jobs, unequal nodes, and steps that do
not start.
"""

import os

import pytest
from runs import settings, wait_for_step

from megatron_tape.run.judging import read_attempts

SESSION = {
    "SLURM_CPU_BIND": "quiet,mask_cpu:0x1",
    "SLURM_CPU_BIND_TYPE": "mask_cpu:",
    "SLURM_CPU_BIND_LIST": "0x1",
    "SLURM_MEM_BIND": "local",
    "SLURM_MEM_PER_CPU": "1",
    "SLURM_HINT": "nomultithread",
    "SLURM_THREADS_PER_CORE": "1",
    "SLURM_GPUS_PER_TASK": "1",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_NTASKS_PER_NODE": "9",
    "SLURM_NTASKS_PER_CORE": "1",
    "SLURM_EXCLUSIVE": "1",
    "SLURM_TASK_PROLOG": "/missing",
    "SLURM_WCKEY": "session",
    "SRUN_CONTAINER": "/missing",
    "SLURM_RESTART_COUNT": "3",
    "SLURM_ARRAY_JOB_ID": "77",
    "SLURM_ARRAY_TASK_ID": "1",
    "SLURM_HET_SIZE": "2",
}
"""Variables of the job that a job is submitted in: a requeued task of an array, with one CPU on
eight GPUs.
"""
OF_STEP = {"SLURM_CPU_BIND", "SLURM_CPU_BIND_TYPE", "SLURM_CPU_BIND_LIST"}
"""Variables that srun sets in every step, here to all CPUs of the node."""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
@pytest.mark.parametrize(
    "cluster",
    [{"cpus": 2, "task_plugin": "task/affinity"}],
    indirect=True,
)
def test_a_job_submitted_in_another_job_uses_its_own_cpus_and_options(cluster, start):
    cluster.environment |= SESSION
    job = start()
    wait_for_step(cluster, job, start.run, 1)
    variables = dict(cluster.programs())
    ranks = cluster.processes()
    assert len(ranks) == 2
    for rank in ranks:
        assert len(os.sched_getaffinity(rank)) == 2
        inherited = {
            name: value
            for name, value in variables[rank].items()
            if name in SESSION.keys() - OF_STEP
        }
        assert inherited == {"SLURM_RESTART_COUNT": "0", "SLURM_NTASKS_PER_NODE": "1"}
    assert "start 1: 1 task(s) on each of nodeA,nodeB" in cluster.log(job)


@pytest.mark.parametrize("cluster", [{"gpus": "2 1"}], indirect=True)
def test_the_node_with_the_fewest_gpus_decides_how_many_are_used(cluster, start):
    job = start(options=["--no-requeue"])
    assert cluster.wait(job) == "FAILED", cluster.story(job)
    log = cluster.log(job)
    assert "warning: the nodes of this job have 1 or 2 GPUs; it uses 1 on each" in log
    assert "nodeA: torch finds 0 of the 1 GPU" in log
    assert "nodeB: torch finds 0 of the 1 GPU" in log


def test_a_step_that_srun_cannot_start_is_reported_as_such(cluster, start):
    job = start(options=["--no-requeue"], site=("TAPE_SRUN_OPTIONS=--mpi=missing",))
    assert cluster.wait(job) == "FAILED", cluster.story(job)
    (attempt,) = read_attempts(start.run)
    assert attempt.outcome == "unready"
    assert cluster.field(job, "StdOut") in attempt.message
    log = cluster.log(job)
    assert f"attempt 1: {attempt.message}" in log
    assert "Invalid MPI type 'missing'" in log


@pytest.mark.parametrize("cluster", [{"gpus": 2}], indirect=True)
def test_every_task_sees_the_gpus_that_the_job_has_on_its_node_and_no_others(cluster, start):
    show = cluster.work / "show"
    show.write_text(
        '#!/bin/sh\n[ -z "$RANK" ] || echo "rank $RANK: ${CUDA_VISIBLE_DEVICES-unset}"\nexec "$@"\n'
    )
    show.chmod(0o755)
    site = (f"TAPE_CONTAINER={show}", "unset CUDA_VISIBLE_DEVICES")

    def seen(job):
        cluster.wait(job)
        return sorted(line for line in cluster.log(job).splitlines() if line.startswith("rank "))

    whole = ["--no-requeue", "--nodes=2", "--gpus-per-node=2", "--ntasks-per-node=2"]
    job = start(whole, site=site)
    assert seen(job) == [f"rank {rank}: 0,1" for rank in range(4)], cluster.log(job)

    part = ["--no-requeue", "--oversubscribe", "--nodelist=nodeA", "--nodes=1"]
    part += ["--gpus-per-node=1", "--mem=0"]
    other = cluster.run("sbatch", "--parsable", *part, "--wrap", "sleep 3600")
    cluster.until(lambda: cluster.field(other, "JobState") == "RUNNING", other)
    assert seen(start([*part, "--cpus-per-task=1"], site=site)) == ["rank 0: 1"]


SCRIPTS = ["pretrain_tape.sh", "extend_tape.sh", "evaluate_tape.sh", "compare.sh", "preprocess.sh"]


def test_jobs_that_a_script_cannot_run_are_refused(cluster, prepare):
    prepare()
    heterogeneous = ["--nodes=1", ":", "--nodes=1"]
    for script in SCRIPTS:
        job = cluster.submit(script, "tiny.yaml", *settings(), options=heterogeneous)
        leader = job.partition("+")[0]
        assert cluster.wait(leader) != "COMPLETED"
        assert "error: this job is heterogeneous (sbatch ... : ...)" in cluster.log(leader)

    nodes = cluster.submit("pretrain_tape.sh", "tiny.yaml", "--nodes=2")
    dry_run = cluster.submit("evaluate_tape.sh", "perplexity", "--dry-run")
    assert cluster.wait(nodes) == cluster.wait(dry_run) == "FAILED"
    assert "run  sbatch --nodes=2 SCRIPT ...  or  SCRIPT --sbatch" in cluster.log(nodes)
    assert "error: --dry-run and --sbatch work only if" in cluster.log(dry_run)
