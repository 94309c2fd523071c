"""Start a real Slurm cluster of virtual nodes on this machine, and run jobs on it; see
slurm_local.sh.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent.parent
SCRIPT = Path(__file__).parent / "slurm_local.sh"
PROGRAMS = (
    "slurmctld",
    "slurmd",
    "sbatch",
    "srun",
    "scontrol",
    "squeue",
    "munged",
    "python3",
    "unshare",
)
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
OUTER_VARIABLES = ("SLURM", "SBATCH", "TAPE")
PATIENCE = 180
"""Seconds without any progress after which a test fails."""
SEARCH = os.pathsep.join(
    [os.environ.get("PATH", ""), "/usr/sbin", "/sbin", "/usr/lib/x86_64-linux-gnu/slurm-wlm"]
)


def missing():
    """Return why no cluster can run on this machine, or None if one can."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=SEARCH) is None]
    if not absent:
        return None
    return (
        f"no {', '.join(absent)}; on Debian or Ubuntu: "
        "apt-get install --no-install-recommends slurmd slurmctld munge slurm-client iproute2"
    )


class Cluster:
    """A cluster of virtual nodes, each with its own host name and processes, and a working
    directory with the code.
    """

    def __init__(self, nodes="nodeA nodeB", gpus=0, mode="auto", cpus=4, task_plugin="task/none"):
        self.directory = Path(tempfile.mkdtemp(prefix="slc", dir="/tmp"))
        self.directory.chmod(0o755)
        self.work = self.directory / "work"
        self.work.mkdir()
        names = [name for name in os.environ if not name.startswith(OUTER_VARIABLES)]
        self.environment = {
            **{name: os.environ[name] for name in names},
            "PATH": SEARCH,
            "SLURM_CONF": f"{self.directory}/slurm.conf",
            "SLURM_LOCAL_DIR": str(self.directory),
            "SLURM_LOCAL_NODES": nodes,
            "SLURM_LOCAL_GPUS": str(gpus),
            "SLURM_LOCAL_CPUS": str(cpus),
            "SLURM_LOCAL_TASK_PLUGIN": task_plugin,
            "SLURM_LOCAL_MODE": mode,
        }
        copy_code(self.work / "repo")

    def __enter__(self):
        self.control("start")
        return self

    def __exit__(self, *_):
        self.control("stop", check=False)
        shutil.rmtree(self.directory, ignore_errors=True)

    def control(self, *arguments, check=True):
        """Call slurm_local.sh: start, stop, kill-node N, start-node N, cut-node N, kill-ctl,
        start-ctl ...
        """
        return self.run("bash", str(SCRIPT), *arguments, check=check)

    def run(self, *command, check=True, cwd=None):
        done = subprocess.run(
            command, env=self.environment, cwd=cwd or self.work, capture_output=True, text=True
        )
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def mode(self):
        return (self.directory / "mode").read_text().strip()

    def site(self, *lines):
        text = [
            f"TAPE_PYTHON={sys.executable}",
            "export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= PYTHONWARNINGS=ignore",
        ]
        text.append("TAPE_SRUN_KILL_DELAY=10")
        (self.work / "repo" / "slurm" / "site.env").write_text("\n".join([*text, *lines]) + "\n")

    def submit(self, script, *arguments, options=()):
        """Submit a script of slurm/ from the working directory."""
        return self.run(
            "sbatch",
            "--parsable",
            *options,
            f"{self.work}/repo/slurm/{script}",
            *map(str, arguments),
        )

    def field(self, job, name):
        shown = self.run("scontrol", "--oneliner", "show", "job", job, check=False)
        return next(
            (word.partition("=")[2] for word in shown.split() if word.startswith(f"{name}=")), ""
        )

    def wait(self, job):
        """Wait until a job has ended; return its state or, for an array, the different states of
        its tasks.
        """

        def states():
            shown = re.findall(
                r"JobState=(\S+)", self.run("scontrol", "show", "job", job, check=False)
            )
            return shown and all(state in ENDED for state in shown) and ",".join(sorted(set(shown)))

        return self.until(states, job)

    def until(self, condition, job):
        """Wait for the condition and return its value; fail after PATIENCE seconds without
        progress.
        """
        seen = None
        since = time.monotonic()
        while not (value := condition()):
            if (found := self.progress()) != seen:
                seen = found
                since = time.monotonic()
            assert time.monotonic() < since + PATIENCE, (
                f"nothing has changed for {PATIENCE} s; {self.story(job)}"
            )
            time.sleep(0.2)
        return value

    def progress(self):
        """Return facts that change while jobs make progress, about the files that they write and
        their CPU time.
        """
        written = []
        for folder, names, files in os.walk(self.work):
            names[:] = [name for name in names if name != "repo"]
            for name in files:
                try:
                    found = os.stat(os.path.join(folder, name))
                except OSError:
                    continue
                written.append((folder, name, found.st_size, found.st_mtime_ns))
        return written, [_cpu_time(pid) for pid, _ in self.programs()]

    def log(self, job):
        path = Path(self.field(job, "StdOut"))
        if path.is_file():
            return path.read_text(errors="replace")
        return ""

    def story(self, job):
        return f"job {job} is {self.field(job, 'JobState')}; its log:\n{self.log(job)}"

    def programs(self):
        """Yield the process id and the environment of each of the jobs' Python processes."""
        for entry in Path("/proc").iterdir():
            try:
                if not entry.name.isdigit() or "python" not in os.readlink(entry / "exe"):
                    continue
                words = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            values = dict(word.decode(errors="replace").partition("=")[::2] for word in words)
            if values.get("SLURM_CONF") == self.environment["SLURM_CONF"]:
                yield int(entry.name), values

    def processes(self, attempt=None, rank=None):
        """Return the process ids of a job's ranks, optionally of one attempt and rank."""
        ranks = [
            (pid, int(v["TAPE_ATTEMPT"]), int(v["RANK"]))
            for pid, v in self.programs()
            if "RANK" in v
        ]
        return [pid for pid, *of in ranks if attempt in (None, of[0]) and rank in (None, of[1])]

    def kill(self, attempt, rank, number=signal.SIGKILL):
        """Send a signal to a rank of an attempt; return whether it existed."""
        pids = self.processes(attempt, rank)
        for pid in pids:
            os.kill(pid, number)
        return bool(pids)


def _cpu_time(pid):
    """Return the CPU time of a process in units of five seconds, so that an idle process shows no
    progress.
    """
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(words[11]) + int(words[12])) // (5 * os.sysconf("SC_CLK_TCK"))


def copy_code(target):
    """Copy the parts of this repository that a job needs, as in a user's clone."""
    for name in ("megatron_tape", "pretrain", "tools", "slurm"):
        ignored = shutil.ignore_patterns("__pycache__", "site.env")
        shutil.copytree(REPOSITORY / name, target / name, ignore=ignored)
