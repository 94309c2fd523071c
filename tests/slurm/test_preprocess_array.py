import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("slurmctld", "slurmd", "sbatch", "scontrol")
SEARCHED = os.pathsep.join((os.environ["PATH"], "/usr/sbin", "/sbin"))
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}

pytestmark = pytest.mark.skipif(
    not all(shutil.which(tool, path=SEARCHED) for tool in TOOLS), reason="Slurm is not installed"
)


class Cluster:
    """A private Slurm cluster of two nodes on this machine."""

    def __init__(self, directory: Path):
        self.script = Path(__file__).with_name("slurm_local.sh")
        self.environment = {**os.environ, "PATH": SEARCHED, "SLURM_LOCAL_DIR": str(directory)}
        self.environment["SLURM_CONF"] = str(directory / "slurm.conf")
        for name in [name for name in self.environment if name.startswith(("SLURM_JOB", "SLURM_ARRAY", "SBATCH_"))]:
            del self.environment[name]

    def local(self, *arguments: str) -> None:
        result = subprocess.run(
            ["bash", self.script, *arguments],
            env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=90,
        )  # fmt: skip
        assert result.returncode == 0, result.stdout

    def command(self, *arguments, cwd: Path | None = None) -> str:
        result = subprocess.run(
            list(map(str, arguments)), env=self.environment, cwd=cwd, capture_output=True, text=True, timeout=60
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    def sbatch(self, arguments: list[str], cwd: Path) -> str:
        return self.command("sbatch", "--parsable", *arguments, cwd=cwd).strip()

    def wait(self, job: str, timeout: float = 60) -> str:
        """Return the state of a job once it has ended: of an array, of all tasks, once each if they differ."""
        deadline = time.monotonic() + timeout
        while True:
            states = set(re.findall(r"JobState=(\S+)", shown := self.command("scontrol", "show", "job", job)))
            if states <= ENDED:
                return ",".join(sorted(states))
            assert time.monotonic() < deadline, shown
            time.sleep(0.2)


@pytest.fixture(scope="module")
def cluster():
    # The paths of unix sockets are short.
    directory = Path(tempfile.mkdtemp(prefix="tape", dir="/tmp"))
    cluster = Cluster(directory)
    try:
        cluster.local("start")
        yield cluster
    finally:
        cluster.local("stop", "--purge")
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A directory with a corpus of several files, its tokenizer, and the dataset `single` of one process."""
    directory = tmp_path_factory.mktemp("corpus")
    for parent in (directory, *directory.parents[:2]):
        parent.chmod(0o755)
    for name in "abc":
        lines = [f'{{"text": "{name} {number} {"some words of text " * (number % 9)}"}}\n' for number in range(300)]
        (directory / f"{name}.jsonl").write_text("".join(lines))
    tool("train_tokenizer", "--input", "*.jsonl", "--vocab-size", "300", "--output", "t.model", cwd=directory)
    tool("preprocess_data", *ARGUMENTS, "--output-prefix", "single", "--workers", "1", cwd=directory)
    return directory


ARGUMENTS = ["--input", "*.jsonl", "--tokenizer", "t.model", "--append-eod"]


def tool(name, *arguments, cwd):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, ROOT / "tools" / f"{name}.py", *arguments]
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def submit(cluster, corpus, prefix, *options, arguments=()):
    script = ROOT / "slurm" / "preprocess.sh"
    return cluster.sbatch([*options, script, *ARGUMENTS, "--output-prefix", prefix, *arguments], cwd=corpus)


def logs(corpus, job):
    paths = sorted(corpus.glob(f"slurm-tape-preprocess-{job}_*.out"))
    return {path.stem.rsplit("_", 1)[1]: path.read_text() for path in paths}


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def check_result(corpus, prefix):
    for ending in ("bin", "idx"):
        assert (corpus / f"{prefix}.{ending}").read_bytes() == (corpus / f"single.{ending}").read_bytes()
    assert sorted(path.name for path in corpus.glob(f"{prefix}.*")) == [
        f"{prefix}.{e}" for e in ("bin", "idx", "origin")
    ]


def test_array_makes_the_bytes_of_one_process_and_may_be_run_again(cluster, corpus):
    job = submit(cluster, corpus, "out", "--array=0-3")
    assert cluster.wait(job) == "COMPLETED", logs(corpus, job)
    check_result(corpus, "out")
    reports = logs(corpus, job)
    assert sorted(reports) == ["0", "1", "2", "3"]
    assert sum("joining the parts" in report for report in reports.values()) == 1, reports
    inode = (corpus / "out.bin").stat().st_ino
    again = submit(cluster, corpus, "out", "--array=0-3")
    assert cluster.wait(again) == "COMPLETED", logs(corpus, again)
    assert all("out is complete already; nothing to do" in report for report in logs(corpus, again).values())
    check_result(corpus, "out")
    assert (corpus / "out.bin").stat().st_ino == inode
    other = submit(cluster, corpus, "out", "--array=0-1", arguments=["--on-error", "skip"])
    assert cluster.wait(other) == "FAILED"
    assert "out was made differently (on_error 'stop' instead of 'skip')" in logs(corpus, other)["1"]


def test_missing_tasks_are_made_by_another_array(cluster, corpus):
    """Numbers need not begin at 0; a task that fails leaves the parts of the others to the next array."""
    (corpus / "late.shard-00001-of-00003.bin.partial").mkdir()
    job = submit(cluster, corpus, "late", "--array=5-7", "--cpus-per-task=2")
    assert cluster.wait(job) == "COMPLETED,FAILED", logs(corpus, job)
    assert not (corpus / "late.idx").exists()
    (corpus / "late.shard-00001-of-00003.bin.partial").rmdir()
    again = submit(cluster, corpus, "late", "--array=5-7")
    assert cluster.wait(again) == "COMPLETED", logs(corpus, again)
    check_result(corpus, "late")
    assert "2 workers" in logs(corpus, job)["5"]
    assert "is complete already" in logs(corpus, again)["5"]


def test_requeued_owner_of_the_merge_takes_over_its_own_lock(cluster, corpus):
    """The state that a merger leaves when its node dies: all parts, its lock, half an output."""
    for index in range(2):
        tool("preprocess_data", *ARGUMENTS, "--output-prefix", "dead", "--shard", f"{index}/2", cwd=corpus)
    job = submit(cluster, corpus, "dead", "--array=0-1", "--hold")
    (corpus / f"dead.merge-{job}").symlink_to("1")
    (corpus / "dead.bin.partial").write_bytes(b"half")
    cluster.command("scontrol", "release", f"{job}_0")
    wait_until(lambda: "task 0: task 1 joins the parts" in logs(corpus, job).get("0", ""))
    assert not (corpus / "dead.idx").exists()
    cluster.command("scontrol", "release", f"{job}_1")
    assert cluster.wait(job) == "COMPLETED", logs(corpus, job)
    check_result(corpus, "dead")


def test_old_parts_of_other_settings_are_overwritten_before_they_are_joined(cluster, corpus):
    for index in range(2):
        tool("preprocess_data", *ARGUMENTS[:-1], "--output-prefix", "old", "--shard", f"{index}/2", cwd=corpus)
    job = submit(cluster, corpus, "old", "--array=0-1", "--hold", arguments=["--overwrite"])
    cluster.command("scontrol", "release", f"{job}_1")
    wait_until(lambda: "task 1: 1 of 2 parts are complete" in logs(corpus, job).get("1", ""))
    cluster.command("scontrol", "release", f"{job}_0")
    assert cluster.wait(job) == "COMPLETED", logs(corpus, job)
    check_result(corpus, "old")


def test_task_requeued_in_the_middle_starts_its_part_afresh(cluster, corpus):
    # One document a chunk: some seconds of work, of which the shard's unfinished file tells.
    (corpus / "slow").mkdir()
    (corpus / "slow" / "a.jsonl").write_text("".join(path.read_text() for path in corpus.glob("*.jsonl")) * 12)
    options = ["--input", "slow/*.jsonl", "--chunk-bytes", "1"]
    job = submit(cluster, corpus, "back", "--array=0-1", arguments=options)
    partial = corpus / "back.shard-00001-of-00002.bin.partial"
    wait_until(lambda: partial.exists() and partial.stat().st_size > 10000)
    cluster.command("scontrol", "requeue", f"{job}_1")
    assert cluster.wait(job) == "COMPLETED", logs(corpus, job)
    tool("preprocess_data", *ARGUMENTS, *options[:2], "--output-prefix", "back-single", cwd=corpus)
    for ending in ("bin", "idx"):
        assert (corpus / f"back.{ending}").read_bytes() == (corpus / f"back-single.{ending}").read_bytes()
    assert len(list(corpus.glob("back.*"))) == 3
    assert "Restarts=1" in cluster.command("scontrol", "show", "job", f"{job}_1")


def test_wrong_submissions_say_what_to_do(cluster, corpus):
    job = submit(cluster, corpus, "gaps", "--array=0-4:2")
    assert cluster.wait(job) == "FAILED"
    assert "error: the array has gaps" in logs(corpus, job)["2"]
    script = ROOT / "slurm" / "preprocess.sh"
    job = cluster.sbatch(["--array=0-0", script, *ARGUMENTS], cwd=corpus)
    assert cluster.wait(job) == "FAILED"
    assert "error: --output-prefix is missing" in logs(corpus, job)["0"]
    assert not list(corpus.glob("gaps*"))


def test_script_submits_itself_and_explains_itself(cluster, corpus):
    script = ROOT / "slurm" / "preprocess.sh"
    said = cluster.command(script, *ARGUMENTS, "--output-prefix", "self", cwd=corpus)
    job = re.fullmatch(r"Submitted batch job (\d+)\n", said)[1]
    assert cluster.wait(job, timeout=90) == "COMPLETED", logs(corpus, job)
    assert len(logs(corpus, job)) == 8
    check_result(corpus, "self")
    assert "sbatch --array=0-7" in cluster.command(script, "--help")
