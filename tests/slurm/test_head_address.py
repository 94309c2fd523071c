"""slurm/common.sh: find the address of rank 0, and read facts about a job and its nodes from
scontrol.
"""

import shlex
import subprocess
from pathlib import Path

import pytest

SLURM = Path(__file__).parents[2] / "slurm"
SOURCED = f"source {shlex.quote(str(SLURM / 'common.sh'))}\n"


def bash(script, **variables):
    environment = {"PATH": "/usr/bin:/bin"} | variables
    command = ["bash", "-uo", "pipefail", "-c", script]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20)


@pytest.mark.parametrize(
    "resolved, nodes, address",
    [
        ("alpha 10.0.0.7", "2", "alpha"),
        ("10.0.0.7", "2", "10.0.0.7"),
        ("", "1", "127.0.0.1"),
        ("", "2", "alpha"),
    ],
)
def test_the_head_address_is_one_that_resolves(resolved, nodes, address):
    script = """
        getent() { [[ " $RESOLVED " = *" $2 "* ]]; }
        scontrol() { echo "   NodeAddr=10.0.0.7 NodeHostName=alpha"; }
        head_address alpha
    """
    done = bash(SOURCED + script, RESOLVED=resolved, SLURM_JOB_NUM_NODES=nodes)
    assert (done.stdout, done.stderr) == (f"{address}\n", "")


JOB = """\
JobId=7 JobName=my Requeue=0 job
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 ExitCode=0:0
   ReqNodeList=(null) ExcNodeList=n[1-2]
   Command=/a repo/slurm/pretrain_tape.sh --logging.note JobState=FAILED /slurm/pretrain_tape.sh
   StdOut=/etc/passwd
   Restarts=9
   WorkDir=/work
   StdOut=/logs/a b.out
"""
# For the last task of an array, scontrol shows all tasks, which is more than a pipe's buffer can
# hold.
SCONTROL = """
SLURM_JOB_ID=7
scontrol() { for ((task = 0; task < 500; task++)); do printf %s "$JOB"; done; }
"""


def test_arguments_of_a_job_are_not_read_as_its_fields():
    script = """
        for name in JobState Restarts Requeue ExcNodeList Reservation; do job_field $name; done
        job_log
    """
    done = bash(SCONTROL + SOURCED + script, JOB=JOB)
    assert done.stdout.split("\n")[:4] == ["RUNNING", "2", "1", "n[1-2]"]
    assert done.stdout.endswith("/logs/a b.out\n")
    assert done.stderr == ""


@pytest.mark.parametrize("script", ["pretrain_tape", "preprocess"])
def test_a_job_finds_the_repository_that_it_was_submitted_from(script):
    lines = (SLURM / f"{script}.sh").read_text().splitlines()
    command = next(line for line in lines if line.strip().startswith("root=$(scontrol"))
    code = f'{SCONTROL}{command.removesuffix("|| true")}\nprintf %s "$root"'
    done = bash(code, JOB=JOB.replace("pretrain_tape", script))
    assert (done.stdout, done.stderr) == ("/a repo", "")


@pytest.mark.parametrize(
    "nodes, gpus, message",
    [
        (["GRES=gpu:a100:2(IDX:0-1)", "GRES=gpu:a100:2(IDX:0,3)"], "2", ""),
        (
            ["GRES=gpu:a100:2(IDX:0-1),gpu:h100:1(IDX:2)", "GRES=nvme:9(CNT:9),gpu:8(IDX:0-7)"],
            "3",
            "3 or 8 GPUs",
        ),
        (["GRES=", "GRES="], "0", ""),
        (["GRES=gpu:4(IDX:0-3)", "GRES=nvme:1"], None, "some nodes of this job have no GPU"),
        ([], "8", ""),
    ],
)
def test_the_smallest_number_of_gpus_and_cpus_of_a_node_counts(nodes, gpus, message):
    record = [f"     Nodes=n{number} CPU_IDs=0-3 {gres}" for number, gres in enumerate(nodes)]
    record += ["   Command=/slurm/pretrain_tape.sh --logging.note x", " Nodes=n9 GRES=gpu:1"]
    done = bash(
        SOURCED + 'scontrol() { echo "$JOB"; }; gpus_per_node; tasks=2; cpus_per_task',
        JOB="\n".join(record),
        SLURM_GPUS_ON_NODE="8",
        SLURM_JOB_ID="7",
        SLURM_JOB_CPUS_PER_NODE="64(x2),9,128(x3)",
    )
    assert done.stdout.split() == ([] if gpus is None else [gpus, "4"])
    assert message in done.stderr
    assert message or not done.stderr
