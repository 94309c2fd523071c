"""slurm/preprocess.sh makes one dataset per job, or one per array task."""

import pytest
from tool_runs import write_lines

from megatron_tape.data.indexed_dataset import IndexedDatasetReader


@pytest.fixture
def submit(cluster, tmp_path, run_tool):
    for directory in (tmp_path, *tmp_path.parents[:2]):
        directory.chmod(0o755)
    for name in "abc":
        write_lines(
            tmp_path / f"{name}.jsonl", [f"{name} {number} some words" for number in range(100)]
        )
    trained = [
        "--input",
        tmp_path / "*.jsonl",
        "--vocab-size",
        "300",
        "--output",
        tmp_path / "t.model",
    ]
    run_tool("train_tokenizer", *trained)

    def run(*options):
        script = f"{cluster.work}/repo/slurm/preprocess.sh"
        arguments = ["--input", "*.jsonl", "--tokenizer", "t.model", "--output-prefix", "out"]
        job = cluster.run("sbatch", "--parsable", *options, script, *arguments, cwd=tmp_path)
        return cluster.wait(job), "".join(path.read_text() for path in tmp_path.glob("slurm-*.out"))

    return run


@pytest.mark.slow
def test_a_job_makes_one_dataset_and_an_array_one_per_task(submit, tmp_path):
    state, log = submit("--array=0-1")
    assert state == "COMPLETED", log
    assert [
        len(IndexedDatasetReader(tmp_path / f"out-0000{index}-of-00002")) for index in range(2)
    ] == [200, 100]
    state, log = submit("--array=0-1", "--cpus-per-task=2")
    assert state == "COMPLETED" and log.count("is complete already") == 2, log
    state, log = submit()
    assert state == "COMPLETED" and len(IndexedDatasetReader(tmp_path / "out")) == 300, log
