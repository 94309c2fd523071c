"""slurm/common.sh: find the address of rank 0, and read fields of a job from scontrol."""

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
    [("alpha 10.0.0.7", 2, "alpha"), ("10.0.0.7", 2, "10.0.0.7"), ("", 1, "127.0.0.1"), ("", 2, "alpha")],
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
# For the last task of an array, scontrol shows all tasks, which is more than a pipe's buffer can hold.
SCONTROL = 'SLURM_JOB_ID=7; scontrol() { for ((task = 0; task < 500; task++)); do printf %s "$JOB"; done; }'
FIELDS = """
source "$1"
for name in JobState Restarts Requeue ExcNodeList Reservation; do value=$(job_field $name); echo "$name $value"; done
job_log
"""


def test_arguments_of_a_job_are_not_read_as_its_fields():
    environment = {"JOB": JOB, "PATH": "/usr/bin:/bin"}
    command = ["bash", "-euo", "pipefail", "-c", f"{SCONTROL}{FIELDS}", "bash", str(COMMON)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20)
    fields = ["JobState RUNNING", "Restarts 2", "Requeue 1", "ExcNodeList n[1-2]", "Reservation ", "/logs/a b.out"]
    assert (done.returncode, done.stdout.splitlines(), done.stderr) == (0, fields, "")


@pytest.mark.parametrize("script", ["pretrain_tape", "preprocess"])
def test_a_job_finds_the_repository_that_it_was_submitted_from(script):
    text = (COMMON.parent / f"{script}.sh").read_text()
    command = next(line for line in text.splitlines() if line.strip().startswith("root=$(scontrol"))
    environment = {"JOB": JOB.replace("pretrain_tape", script), "PATH": "/usr/bin:/bin"}
    code = ["bash", "-euo", "pipefail", "-c", f'{SCONTROL}\n{command.removesuffix("|| true")}\nprintf %s "$root"']
    done = subprocess.run(code, env=environment, capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout, done.stderr) == (0, "/a repo", "")
