"""slurm/common.sh: find the address of rank 0, and read facts about a job and its nodes from
scontrol.
"""

import subprocess
from pathlib import Path

import pytest

COMMON = Path(__file__).parents[2] / "slurm" / "common.sh"
SCRIPT = """
source "$1"
getent() { [[ " $RESOLVED " = *" $2 "* ]]; }
scontrol() { echo "   NodeAddr=10.0.0.7 NodeHostName=alpha"; }
head_address alpha
"""


@pytest.mark.parametrize(
    "resolved, nodes, address",
    [
        ("alpha 10.0.0.7", 2, "alpha"),
        ("10.0.0.7", 2, "10.0.0.7"),
        ("", 1, "127.0.0.1"),
        ("", 2, "alpha"),
    ],
)
def test_the_head_address_is_one_that_resolves(resolved, nodes, address):
    environment = {"RESOLVED": resolved, "SLURM_JOB_NUM_NODES": str(nodes), "PATH": "/usr/bin:/bin"}
    command = ["bash", "-uc", SCRIPT, "bash", str(COMMON)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{address}\n", "")


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
SCONTROL = (
    'SLURM_JOB_ID=7; scontrol() { for ((task = 0; task < 500; task++)); do printf %s "$JOB";'
    " done; }"
)
FIELDS = """
source "$1"
for name in JobState Restarts Requeue ExcNodeList Reservation; do value=$(job_field $name); echo "$name $value"; done
job_log
"""


def test_arguments_of_a_job_are_not_read_as_its_fields():
    environment = {"JOB": JOB, "PATH": "/usr/bin:/bin"}
    command = ["bash", "-euo", "pipefail", "-c", f"{SCONTROL}{FIELDS}", "bash", str(COMMON)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20)
    fields = [
        "JobState RUNNING",
        "Restarts 2",
        "Requeue 1",
        "ExcNodeList n[1-2]",
        "Reservation ",
        "/logs/a b.out",
    ]
    assert (done.returncode, done.stdout.splitlines(), done.stderr) == (0, fields, "")


@pytest.mark.parametrize("script", ["pretrain_tape", "preprocess"])
def test_a_job_finds_the_repository_that_it_was_submitted_from(script):
    text = (COMMON.parent / f"{script}.sh").read_text()
    command = next(line for line in text.splitlines() if line.strip().startswith("root=$(scontrol"))
    environment = {"JOB": JOB.replace("pretrain_tape", script), "PATH": "/usr/bin:/bin"}
    code = [
        "bash",
        "-euo",
        "pipefail",
        "-c",
        f'{SCONTROL}\n{command.removesuffix("|| true")}\nprintf %s "$root"',
    ]
    done = subprocess.run(code, env=environment, capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout, done.stderr) == (0, "/a repo", "")


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
    record = [
        f"     Nodes=n{number} CPU_IDs=0-3 Mem=0 {resources}"
        for number, resources in enumerate(nodes)
    ]
    record += ["   Command=/slurm/pretrain_tape.sh --logging.note x", " Nodes=n9 GRES=gpu:1"]
    environment = {"JOB": "\n".join(record), "PATH": "/usr/bin:/bin", "SLURM_GPUS_ON_NODE": "8"}
    environment |= {"SLURM_JOB_ID": "7", "SLURM_JOB_CPUS_PER_NODE": "64(x2),9,128(x3)"}
    script = 'source "$1"; scontrol() { echo "$JOB"; }; gpus_per_node; tasks=2; cpus_per_task'
    done = subprocess.run(
        ["bash", "-uc", script, "bash", str(COMMON)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ([] if gpus is None else [gpus, "4"])
    assert message in done.stderr and (message or not done.stderr)
