import pytest
from cluster import Cluster, wait_until

ARGUMENTS = ["--input", "*.jsonl", "--tokenizer", "t.model", "--append-eod"]
# One cluster and corpus are enough for these tests, so one of pytest-xdist's workers runs them all.
pytestmark = pytest.mark.xdist_group("preprocessing")


@pytest.fixture(scope="module")
def cluster():
    made = Cluster()
    made.site()
    with made:
        yield made


@pytest.fixture(scope="module")
def tool(tmp_path_factory, run_tool):
    """Run a tool in the directory of the corpus."""
    directory = tmp_path_factory.mktemp("corpus")
    for parent in (directory, *directory.parents[:2]):
        parent.chmod(0o755)

    def run(*arguments):
        with pytest.MonkeyPatch.context() as patched:
            patched.chdir(directory)
            run_tool(*arguments)

    run.directory = directory
    return run


@pytest.fixture(scope="module")
def corpus(tool):
    """A directory with a corpus of several files, its tokenizer, and the dataset `single` made by one process."""
    for name in "abc":
        lines = [f'{{"text": "{name} {number} {"some words of text " * (number % 9)}"}}\n' for number in range(300)]
        (tool.directory / f"{name}.jsonl").write_text("".join(lines))
    tool("train_tokenizer", "--input", "*.jsonl", "--vocab-size", "300", "--output", "t.model")
    tool("preprocess_data", *ARGUMENTS, "--output-prefix", "single")
    return tool.directory


def submit(cluster, corpus, prefix, *options, arguments=()):
    script = f"{cluster.work}/repo/slurm/preprocess.sh"
    command = [*options, script, *ARGUMENTS, "--output-prefix", prefix, *arguments]
    return cluster.run("sbatch", "--parsable", *command, cwd=corpus)


def logs(corpus, job):
    paths = sorted(corpus.glob(f"slurm-tape-preprocess-{job}_*.out"))
    return {path.stem.rsplit("_", 1)[1]: path.read_text() for path in paths}


def check_result(corpus, prefix, expected="single"):
    for ending in ("bin", "idx"):
        assert (corpus / f"{prefix}.{ending}").read_bytes() == (corpus / f"{expected}.{ending}").read_bytes()
    assert {path.name for path in corpus.glob(f"{prefix}.*")} == {f"{prefix}.{end}" for end in ("bin", "idx", "origin")}


def test_an_array_run_again_after_a_failed_task_reuses_parts_and_makes_the_bytes_of_one_process(cluster, corpus):
    (corpus / "out.shard-00001-of-00003.bin.partial").mkdir()
    given = cluster, corpus, "out", "--array=5-7", "--cpus-per-task=2"
    job = submit(*given)
    assert cluster.wait(job) == "COMPLETED,FAILED", logs(corpus, job)
    assert not (corpus / "out.idx").exists() and "2 workers" in logs(corpus, job)["5"]
    (corpus / "out.shard-00001-of-00003.bin.partial").rmdir()
    again = submit(*given)
    assert cluster.wait(again) == "COMPLETED", logs(corpus, again)
    check_result(corpus, "out")
    reports = logs(corpus, again)
    assert sorted(reports) == ["5", "6", "7"] and "is complete already" in reports["5"]
    assert sum("joining the parts" in report for report in reports.values()) == 1, reports
    inode = (corpus / "out.bin").stat().st_ino
    whole = submit(*given)
    assert cluster.wait(whole) == "COMPLETED", logs(corpus, whole)
    assert all("out is complete already; nothing to do" in report for report in logs(corpus, whole).values())
    assert (corpus / "out.bin").stat().st_ino == inode


def test_requeued_owner_of_the_merge_takes_over_its_own_lock(cluster, corpus, tool):
    """When the node of the joining task dies, all parts, its lock and half an output are left behind."""
    for index in range(2):
        tool("preprocess_data", *ARGUMENTS, "--output-prefix", "dead", "--shard", f"{index}/2")
    job = submit(cluster, corpus, "dead", "--array=0-1", "--hold")
    (corpus / f"dead.merge-{job}").symlink_to("1")
    (corpus / "dead.bin.partial").write_bytes(b"half")
    cluster.run("scontrol", "release", f"{job}_0")
    wait_until(lambda: "task 0: task 1 joins the parts" in logs(corpus, job).get("0", ""), 60)
    assert not (corpus / "dead.idx").exists()
    cluster.run("scontrol", "release", f"{job}_1")
    assert cluster.wait(job) == "COMPLETED", logs(corpus, job)
    check_result(corpus, "dead")


def test_old_parts_of_other_settings_are_overwritten_before_they_are_joined(cluster, corpus, tool):
    for index in range(2):
        tool("preprocess_data", *ARGUMENTS[:-1], "--output-prefix", "old", "--shard", f"{index}/2")
    job = submit(cluster, corpus, "old", "--array=0-1", "--hold", arguments=["--overwrite"])
    cluster.run("scontrol", "release", f"{job}_1")
    wait_until(lambda: "task 1: 1 of 2 parts are complete" in logs(corpus, job).get("1", ""), 60)
    cluster.run("scontrol", "release", f"{job}_0")
    assert cluster.wait(job) == "COMPLETED", logs(corpus, job)
    check_result(corpus, "old")


def test_task_requeued_in_the_middle_starts_its_part_afresh(cluster, corpus, tool):
    # One document per chunk: some seconds of work, visible by the shard's unfinished file.
    (corpus / "slow").mkdir()
    (corpus / "slow" / "a.jsonl").write_text("".join(path.read_text() for path in corpus.glob("*.jsonl")) * 12)
    options = ["--input", "slow/*.jsonl", "--chunk-bytes", "1"]
    job = submit(cluster, corpus, "back", "--array=0-1", arguments=options)
    partial = corpus / "back.shard-00001-of-00002.bin.partial"
    wait_until(lambda: partial.exists() and partial.stat().st_size > 10000, 60)
    cluster.run("scontrol", "requeue", f"{job}_1")
    assert cluster.wait(job) == "COMPLETED", logs(corpus, job)
    tool("preprocess_data", *ARGUMENTS, *options[:2], "--output-prefix", "back-single")
    check_result(corpus, "back", "back-single")
    assert "Restarts=1" in cluster.run("scontrol", "show", "job", f"{job}_1")


@pytest.mark.parametrize(
    "array, prefix, told", [("0-2:2", "x", "the array has gaps"), ("0-0", "", "--output-prefix is missing")]
)
def test_wrong_submissions_say_what_to_do(cluster, corpus, array, prefix, told):
    job = submit(cluster, corpus, prefix, f"--array={array}")
    assert cluster.wait(job) == "FAILED"
    assert f"error: {told}" in logs(corpus, job)["0"]
    assert not list(corpus.glob("x*"))
