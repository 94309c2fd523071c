from pathlib import Path

import pytest

from megatron_tape.evaluation.comparison_file import read_comparison

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
