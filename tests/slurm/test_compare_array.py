import shutil
from pathlib import Path

import pytest

from megatron_tape.evaluation.comparison_file import read_comparison
from megatron_tape.evaluation.ladder_file import read_ladder

RECIPE = """
model:
  {num_layers: 2, hidden_size: 16, num_attention_heads: 2, ffn_hidden_size: 16, seq_length: 12,
   vocab_size: 6}
data:
  generator: {task: selective_copy, copied: 4, blanks: 4, symbols: 4}
  loss_on: answers
train:
  {steps: 150, micro_batch_size: 2, global_batch_size: 4, precision: fp32, eval_interval: 150,
   eval_steps: 1}
evaluation:
  every: 150
  selective_copy: {copied: 4, symbols: 4, blanks: {IID: 4}, samples: 20}
logging: {interval: 1, sample_tokens: 0, tensorboard: false}
"""
# The best learning rate is about 0.04, at the end of the grid.
LADDER = """
recipe: tiny.yaml
settings: {data.prefix: data/a}
variants: {rope: rope, tape: tape}
sizes: {small: {model.hidden_size: 16}}
tokens_per_parameter: [0.3]
tuning: {learning_rates: [0.04, 0.08, 0.16], seeds: [9]}
seeds: [1]
"""


@pytest.mark.slow
def test_a_comparison_array_completes_after_preemption_and_writes_the_page(cluster):
    """One of two tasks gets the preemption signal: it saves and is requeued, and the page is still
    written.
    """
    (cluster.work / "tiny.yaml").write_text(RECIPE)
    script = f"{cluster.work}/repo/slurm/compare.sh"
    given = ["--recipe", "tiny.yaml", "--encodings", "rope,tape", "--seeds", "1", "--output", "out"]
    output = cluster.run(script, "--at-once", "2", *given).splitlines()
    assert output[0] == "2 runs, 0 finished, output in out"
    array, page = (line.split()[2].rstrip(",") for line in output[1:3])
    log = cluster.work / f"slurm-tape-compare-{array}_0.out"
    run = cluster.work / "out" / "rope" / "seed-1"
    cluster.until(
        lambda: (run / "metrics.jsonl").is_file() and (run / "metrics.jsonl").stat().st_size, array
    )
    cluster.run("scancel", "--batch", "--signal=USR1", f"{array}_0")
    assert cluster.wait(array) == "COMPLETED", log.read_text()
    assert cluster.wait(page) == "COMPLETED", cluster.log(page)
    assert "not finished: 1 of 2 runs" in log.read_text()
    assert "requeueing" in log.read_text()
    saved = [
        line for line in (run / "log.txt").read_text().splitlines() if "continuing from" in line
    ]
    assert len(saved) == 1
    assert "step-00000150" not in saved[0]
    found = read_comparison(cluster.work / "out" / "comparison.json")
    assert [(made.variant, made.seed) for made in found.runs] == [("rope", 1), ("tape", 1)]
    assert "tape" in Path(cluster.work / "out" / "report.html").read_text()
    wrong = cluster.run(script, *given, "--train.stepz", "3", check=False)
    assert wrong == ""
    assert cluster.run("squeue", "--noheader") == ""


@pytest.mark.slow
def test_the_arrays_of_a_ladder_stop_without_a_learning_rate_and_continue(cluster, inputs):
    """The first tuning fails, since its best rate is at the end of the grid: the second array is
    cancelled. With --extend-grid, all jobs complete.
    """
    shutil.copytree(inputs, cluster.work, dirs_exist_ok=True)
    (cluster.work / "ladder.yaml").write_text(LADDER)

    def submit(*options):
        """Submit a ladder, and return the line about its runs and the IDs of its jobs."""
        script = f"{cluster.work}/repo/slurm/compare.sh"
        arguments = ["--ladder", "ladder.yaml", "--output", "out", *options]
        described, *jobs = cluster.run(script, *arguments).splitlines()
        return described, [line.split()[2].rstrip(",") for line in jobs]

    described, (tunings, runs, report) = submit("--encodings", "rope")
    assert described.startswith("1 tuning of learning rates (3 runs), 1 other run, 0 of 4 finished")
    assert cluster.wait(tunings) == "FAILED", cluster.log(tunings)
    assert cluster.wait(runs) == "CANCELLED", cluster.log(runs)
    assert cluster.wait(report) == "FAILED", cluster.log(report)
    assert "ends at the best rate: 0.04 of rope" in cluster.log(report)
    assert "rope" in (cluster.work / "out" / "ladder.md").read_text()

    described, (tunings, runs, report) = submit("--extend-grid")
    assert "2 tunings of learning rates (6 runs), 2 other runs, 3 of 8 finished" in described
    for job in (tunings, runs, report):
        assert cluster.wait(job) == "COMPLETED", cluster.log(job)
    (point,) = read_ladder(cluster.work / "out" / "ladder.json").points
    assert {run.variant for run in point.comparison.runs} == {"rope", "tape"}
    for name, rate in point.learning_rates.items():
        rates = sorted(float(run.variant) for run in point.tuning[name].runs)
        assert rates[0] < rate.rate < rates[-1]
        assert rates[-3:] == [0.04, 0.08, 0.16]
