"""The small training run of the tests on Slurm: its settings, and functions that read its
records.
"""

import json

from megatron_tape.run.judging import read_attempts

STEPS = 60
INTERVAL = 5
TWO_STAGES = {"parallel.pipeline_model_parallel_size": 2, "model.num_layers": 4}
"""Pipeline stages: one on each node."""


def settings(run="runs/tiny", **overrides):
    chosen = {
        "data.prefix": "data/a",
        "train.steps": STEPS,
        "checkpoint.interval": INTERVAL,
        "train.eval_interval": 10,
        "logging.directory": run,
        "logging.tensorboard": "true",
        **overrides,
    }
    return [f"--{key}={value}" for key, value in chosen.items()]


def rows(run):
    """Return the rows of a run's metrics without times, speeds and memory."""
    path = run / "metrics.jsonl"
    if path.exists():
        found = [json.loads(line) for line in path.read_text().splitlines()]
    else:
        found = []
    excluded = ("time", "slowest_rank")
    return [
        {key: value for key, value in row.items() if "second" not in key and key not in excluded}
        for row in found
    ]


def step_of(run):
    if rows(run):
        return rows(run)[-1]["step"]
    return 0


def wait_for_step(cluster, job, run, step):
    return cluster.until(lambda: step_of(run) >= step, job)


def wait_for_attempt(cluster, job, run, number):
    """Wait until attempt `number` has started."""

    def begun():
        return sum("started" in record.facts for record in read_attempts(run)) >= number

    cluster.until(begun, job)
