import os
import re
import subprocess
import sys

import pytest
from cluster import REPOSITORY, Cluster, wait_until


@pytest.fixture(scope="module")
def cluster():
    made = Cluster()
    made.site()
    with made:
        yield made


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A directory with a corpus of several files, its tokenizer, and the dataset `single` made by one process."""
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
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, REPOSITORY / "tools" / f"{name}.py", *arguments]
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def script(cluster):
    return f"{cluster.work}/repo/slurm/preprocess.sh"


def submit(cluster, corpus, prefix, *options, arguments=()):
    command = [*options, script(cluster), *ARGUMENTS, "--output-prefix", prefix, *arguments]
    return cluster.run("sbatch", "--parsable", *command, cwd=corpus)


def logs(corpus, job):
    paths = sorted(corpus.glob(f"slurm-tape-preprocess-{job}_*.out"))
    return {path.stem.rsplit("_", 1)[1]: path.read_text() for path in paths}


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
    """Task numbers need not start at 0; after a failed task, the next array reuses the other parts."""
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
    """When the node of the joining task dies, all parts, its lock and half an output are left behind."""
    for index in range(2):
        tool("preprocess_data", *ARGUMENTS, "--output-prefix", "dead", "--shard", f"{index}/2", cwd=corpus)
    job = submit(cluster, corpus, "dead", "--array=0-1", "--hold")
    (corpus / f"dead.merge-{job}").symlink_to("1")
    (corpus / "dead.bin.partial").write_bytes(b"half")
    cluster.run("scontrol", "release", f"{job}_0")
    wait_until(lambda: "task 0: task 1 joins the parts" in logs(corpus, job).get("0", ""), 60)
    assert not (corpus / "dead.idx").exists()
    cluster.run("scontrol", "release", f"{job}_1")
    assert cluster.wait(job) == "COMPLETED", logs(corpus, job)
    check_result(corpus, "dead")


def test_old_parts_of_other_settings_are_overwritten_before_they_are_joined(cluster, corpus):
    for index in range(2):
        tool("preprocess_data", *ARGUMENTS[:-1], "--output-prefix", "old", "--shard", f"{index}/2", cwd=corpus)
    job = submit(cluster, corpus, "old", "--array=0-1", "--hold", arguments=["--overwrite"])
    cluster.run("scontrol", "release", f"{job}_1")
    wait_until(lambda: "task 1: 1 of 2 parts are complete" in logs(corpus, job).get("1", ""), 60)
    cluster.run("scontrol", "release", f"{job}_0")
    assert cluster.wait(job) == "COMPLETED", logs(corpus, job)
    check_result(corpus, "old")


def test_task_requeued_in_the_middle_starts_its_part_afresh(cluster, corpus):
    # One document per chunk: some seconds of work, visible by the shard's unfinished file.
    (corpus / "slow").mkdir()
    (corpus / "slow" / "a.jsonl").write_text("".join(path.read_text() for path in corpus.glob("*.jsonl")) * 12)
    options = ["--input", "slow/*.jsonl", "--chunk-bytes", "1"]
    job = submit(cluster, corpus, "back", "--array=0-1", arguments=options)
    partial = corpus / "back.shard-00001-of-00002.bin.partial"
    wait_until(lambda: partial.exists() and partial.stat().st_size > 10000, 60)
    cluster.run("scontrol", "requeue", f"{job}_1")
    assert cluster.wait(job) == "COMPLETED", logs(corpus, job)
    tool("preprocess_data", *ARGUMENTS, *options[:2], "--output-prefix", "back-single", cwd=corpus)
    for ending in ("bin", "idx"):
        assert (corpus / f"back.{ending}").read_bytes() == (corpus / f"back-single.{ending}").read_bytes()
    assert len(list(corpus.glob("back.*"))) == 3
    assert "Restarts=1" in cluster.run("scontrol", "show", "job", f"{job}_1")


def test_wrong_submissions_say_what_to_do(cluster, corpus):
    job = submit(cluster, corpus, "gaps", "--array=0-4:2")
    assert cluster.wait(job) == "FAILED"
    assert "error: the array has gaps" in logs(corpus, job)["2"]
    job = cluster.run("sbatch", "--parsable", "--array=0-0", script(cluster), *ARGUMENTS, cwd=corpus)
    assert cluster.wait(job) == "FAILED"
    assert "error: --output-prefix is missing" in logs(corpus, job)["0"]
    assert not list(corpus.glob("gaps*"))


def test_script_submits_itself_and_explains_itself(cluster, corpus):
    said = cluster.run(script(cluster), *ARGUMENTS, "--output-prefix", "self", cwd=corpus)
    job = re.fullmatch(r"Submitted batch job (\d+)", said)[1]
    assert cluster.wait(job, timeout=90) == "COMPLETED", logs(corpus, job)
    assert len(logs(corpus, job)) == 8
    check_result(corpus, "self")
    assert "sbatch --array=0-7" in cluster.run(script(cluster), "--help")
