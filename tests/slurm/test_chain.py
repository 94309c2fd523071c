"""slurm/run_all.sh runs pretraining, extension and evaluation as dependent jobs on a real Slurm."""

import re
import shutil

from cluster import REPOSITORY
from runs import rows, settings, wait_for_step

from megatron_tape.evaluation.results import read_results
from megatron_tape.run.judging import read_attempts

STEPS = 12
EVALUATION = ["perplexity", "--perplexity.data", "data/a", "--perplexity.lengths", "[4, 8]"]
EVALUATION += ["--perplexity.stride=4", "--perplexity.windows=1", "--perplexity.documents", "20"]


def test_a_chain_completes_after_its_extension_and_evaluation_are_preempted(cluster, prepare):
    prepare(sleep=0.4)
    shutil.copy(REPOSITORY / "tests" / "recipes" / "extend.yaml", cluster.work)
    first = settings("runs/first", **{"train.steps": 4, "model.position_encoding": "rope"})
    extend = ["--data.prefix=data/a", f"--train.steps={STEPS}", "--checkpoint.interval=100"]
    output = cluster.run(
        *("bash", f"{cluster.work}/repo/slurm/run_all.sh", "--sbatch", "--nodes=2"),
        *("tiny.yaml", *first, "--extend", "extend.yaml", *extend, "--evaluate", *EVALUATION),
    )
    assert "in runs/first\n" in output
    assert output.endswith("in runs/extend/evaluation")
    pretraining, extension, evaluation = re.findall(r"^\w+ +job (\d+)", output, re.M)

    run = cluster.work / "runs" / "extend"
    wait_for_step(cluster, extension, run, 3)
    cluster.run("scancel", "--batch", "--signal=USR1", extension)
    assert cluster.wait(extension) == "COMPLETED", cluster.story(extension)
    assert cluster.field(pretraining, "JobState") == "COMPLETED"
    interrupted, finished = read_attempts(run)
    assert interrupted.outcome == "interrupted"
    assert finished.facts["checkpoint_step"] >= 3
    assert [row["step"] for row in rows(run)] == list(range(1, STEPS + 1))
    log = cluster.log(extension)
    assert log.count("starting with the weights of runs/first/checkpoints/step-00000004") == 1

    def values():
        return sum(
            file.read_bytes().count(b'"value"')
            for file in (run / "evaluation").glob("*/parts/*/*.jsonl")
        )

    cluster.until(lambda: values() >= 4, evaluation)
    cluster.run("scancel", "--batch", "--signal=USR1", evaluation)
    assert cluster.wait(evaluation) == "COMPLETED", cluster.story(evaluation)
    assert cluster.field(evaluation, "Restarts") == "1"
    assert "of them already finished" in cluster.log(evaluation)
    evaluated = run / "evaluation" / f"step-{STEPS:08d}"
    found = read_results(evaluated)
    perplexity = read_results(evaluated).tasks["perplexity"]
    assert found.model.run["step"] == STEPS
    assert (evaluated / "perplexity.png").is_file()
    assert [score.length for score in perplexity.scores if score.metric == "loss"] == [4, 8]
    assert perplexity.processes == 2
