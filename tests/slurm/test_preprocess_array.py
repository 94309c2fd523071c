"""slurm/preprocess.sh makes one dataset per job, or one per array task."""

import pytest
from tool_runs import write_lines

from megatron_tape.data.indexed_dataset import IndexedDatasetReader


@pytest.mark.slow
def test_an_array_makes_one_dataset_per_task_and_repeats_none(cluster, tmp_path, run_tool):
    for directory in (tmp_path, *tmp_path.parents[:2]):
        directory.chmod(0o755)
    for name in "abc":
        lines = [f"{name} {number} some words" for number in range(100)]
        write_lines(tmp_path / f"{name}.jsonl", lines)
    texts = tmp_path / "*.jsonl"
    tokenizer = tmp_path / "t.model"
    run_tool("train_tokenizer", "--input", texts, "--vocab-size", "300", "--output", tokenizer)

    def submit(*options):
        script = f"{cluster.work}/repo/slurm/preprocess.sh"
        arguments = ["--input", "*.jsonl", "--tokenizer", "t.model", "--output-prefix", "out"]
        job = cluster.run("sbatch", "--parsable", *options, script, *arguments, cwd=tmp_path)
        return cluster.wait(job), "".join(path.read_text() for path in tmp_path.glob("slurm-*.out"))

    state, log = submit("--array=0-1")
    assert state == "COMPLETED", log
    parts = [tmp_path / f"out-0000{index}-of-00002" for index in range(2)]
    assert [len(IndexedDatasetReader(part)) for part in parts] == [200, 100]
    state, log = submit("--array=0-1", "--cpus-per-task=2")
    assert state == "COMPLETED" and log.count("is complete already") == 2, log
