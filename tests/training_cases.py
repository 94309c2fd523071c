"""Runs the training command again and again inside one process group, for test_training.py and test_resuming.py."""

import json
import math
import shutil
from pathlib import Path

import torch.distributed as dist

from pretrain import train

RECIPE = Path(__file__).parent / "recipes" / "tiny.yaml"
STEPS = 6
LAYOUTS = [f"tp{tp}_zero{stage}" for tp in (1, 2) for stage in (0, 1, 2, 3)]


def assert_close(rows, expected):
    """Assert that a run's figures are another's."""
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row, other in zip(rows, expected):
        for key in ("loss", "grad_norm", "validation_loss"):
            assert (key in row) == (key in other)
            if key in other:
                assert math.isclose(row[key], other[key], rel_tol=1e-4), (row["step"], key)


def run(folder, name, *overrides, expect=0):
    """Train in `folder`/`name`; return the rows of metrics.jsonl (on rank 0), checking the exit status."""
    steps = [option("train.steps", STEPS), option("train.eval_interval", STEPS // 2)]
    arguments = ["--config", str(RECIPE), "--logging.directory", f"{folder}/{name}", *steps, *map(str, overrides)]
    status = train.main(arguments)
    assert status == expect, f"{name} ended with {status} instead of {expect}"
    dist.barrier()
    rows = [json.loads(line) for line in Path(folder, name, "metrics.jsonl").read_text().splitlines()]
    dist.barrier()
    return rows


def option(section_key, value):
    return f"--{section_key}={value}"


def tp(size):
    return option("parallel.tensor_model_parallel_size", size)


def zero(stage):
    return option("deepspeed.zero_stage", stage)


def equal_runs(folder, data, sizes, stages=(0, 1, 2, 3)):
    """The same steps under every layout this many processes allow."""
    prefix = option("data.prefix", f"{data}/a")
    rows = {}
    for size in sizes:
        for stage in stages:
            rows[f"tp{size}_zero{stage}"] = run(folder, f"equal-{size}-{stage}", prefix, tp(size), zero(stage))
    last = sizes[-1]
    blend = option("data.prefix", f"[0.3,{data}/a,0.7,{data}/b]")
    accumulate = [option("train.global_batch_size", 16), option("train.micro_batch_size", 2)]
    rows["blend"] = run(folder, "blend", blend, tp(last))
    rows["accumulation"] = run(folder, "accumulation", prefix, tp(last), *accumulate)
    rows["packed"] = run(folder, "packed", prefix, tp(last), *packed(data))
    sampling = [option("logging.sample_tokens", 3), option("logging.sample_prompt", "w1 w2 w3")]
    rows["sampled"] = run(folder, "sampled", prefix, tp(last), zero(3), *packed(data), *sampling)
    rows["bf16"] = run(folder, "bf16", prefix, tp(last), zero(2), option("train.precision", "bf16"))
    rows["epochs"] = run(folder, "epochs", option("data.prefix", f"[{data}/a,{data}/b]"), tp(last), *many_samples())
    if sizes != (2,):  # on four processes only what data parallelism has to do with
        rows["recompute"] = run(folder, "recompute", prefix, tp(last), zero(3), option("train.recompute", "full"))
        rows["tied"] = run(folder, "tied", prefix, tp(last), zero(3), option("model.tie_embeddings", "true"))
        rows["rope"] = run(folder, "rope", prefix, tp(last), option("model.position_encoding", "rope"))
    return rows


def many_samples():
    """More than one pass over the data, 330 sequences of 16 tokens: 64 in each step."""
    return [option("train.global_batch_size", 64), option("train.micro_batch_size", 8)]


def packed(data):
    return [option("data.reset_attention_mask", "true"), option("data.tokenizer", f"{data}/tokenizer.json")]


def resumed_run(folder, name, *overrides, then=()):
    """All steps at once, and again from the checkpoint at step 2, as if the run had ended before the next."""
    whole = run(folder, name, *overrides, option("checkpoint.interval", 2))
    for step in (4, 6):
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(f"{folder}/{name}/checkpoints/step-{step:08d}")
        dist.barrier()
    continued = run(folder, name, *(then or overrides), option("checkpoint.interval", 2))
    return {"whole": whole, "continued": continued}


def main(folder, data, what):
    size = int(__import__("os").environ["WORLD_SIZE"])
    prefix = option("data.prefix", f"{data}/a")
    if what == "equal":
        return equal_runs(folder, data, {1: (1,), 2: (1, 2), 4: (2,)}[size])
    results = {}
    for tensor_size in (1, 2):
        for stage in (0, 1, 2, 3):
            name = f"tp{tensor_size}_zero{stage}"
            results[name] = resumed_run(folder, name, prefix, tp(tensor_size), zero(stage))
    bf16 = [prefix, zero(2), option("train.precision", "bf16")]
    results["bf16"] = resumed_run(folder, "bf16", *bf16)
    offload = [prefix, zero(2), option("deepspeed.offload_optimizer", "true")]
    results["offload"] = resumed_run(folder, "offload", *offload)
    workers = [prefix, option("data.num_workers", 2)]
    results["workers"] = resumed_run(folder, "workers", *workers)
    results["unsaved"] = run(folder, "unsaved", *bf16)
    before, after = [prefix, tp(1), zero(1)], [prefix, tp(2), zero(3)]
    results["another_layout"] = resumed_run(folder, "another-layout", *before, then=after)
    return results
