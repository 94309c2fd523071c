"""Run the training command several times in one process group, for test_training.py and
test_resuming.py.
"""

import contextlib
import json
import math
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import tensor_parallel_cases
import torch.distributed as dist

from megatron_tape.checkpoint.directories import list_checkpoints, read_manifest, read_state
from megatron_tape.checkpoint.reading import Checkpoint
from megatron_tape.errors import EXIT_RESTART
from megatron_tape.model.names import kind_of
from megatron_tape.model.weights import unshard
from megatron_tape.training import engine
from pretrain import train

RECIPE = Path(__file__).parent / "recipes" / "tiny.yaml"
STEPS = 4
LAYOUTS = {
    2: [(1, 2, 1)],
    4: [
        (2, 1, 1),
        (2, 1, 2),
        (2, 1, 3),
        (1, 2, 2),
        (2, 2, 1),
        (1, 4, 3),
    ],
}
"""Tensor-parallel size, context-parallel size and ZeRO stage, by the number of processes.
gpu/test_two_ranks.py has the other layouts of two.
"""
RESUMED = [(1, 2), (2, 1), (2, 3)]
"""Tensor-parallel size and ZeRO stage of runs to resume; other tests resume with more changes."""
LOSSES = (
    "train/loss",
    "train/grad_norm",
    "train/z_loss",
    "validation/loss",
    "validation/loss_averaged_weights",
)


def assert_close(rows, expected, steps=STEPS):
    """Assert that two runs have the same metrics."""
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    for row, other in zip(rows, expected):
        for key in LOSSES:
            assert (key in row) == (key in other)
            if key in other:
                assert math.isclose(
                    row[key],
                    other[key],
                    rel_tol=1e-4,
                ), (row["step"], key)
        norms = {key: norm for key, norm in row.items() if key.startswith("grad_norm/")}
        total = row["train/grad_norm"]
        for key, norm in norms.items():
            assert math.isclose(norm, other[key], rel_tol=1e-4, abs_tol=1e-4 * total), key
        assert math.isclose(math.hypot(*norms.values()), total, rel_tol=1e-4)


def assert_same_state(state, expected, bound=5e-4):
    """Assert that the weights and moments after the last step are equal, up to rounding.

    Losses alone do not show everything: TAPE's matrices begin at zero, and hardly change the loss
    of the first steps.
    """
    assert state.keys() == expected.keys()
    assert len(expected) > 20
    for key, value in expected.items():
        assert (state[key] - value).norm() <= bound * value.norm(), key


def without_speed(rows):
    """Return the rows without metrics that differ between equal runs: speeds, times and memory."""
    of_time = ("time", "seconds_left", "slowest_rank")
    groups = ("seconds/", "memory/", "throughput/")
    return [
        {k: v for k, v in row.items() if k not in of_time and not k.startswith(groups)}
        for row in rows
    ]


def rows(folder):
    """Return the rows of a run's metrics.jsonl without speeds, times and memory."""
    return without_speed(
        [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    )


def steps_saved(folder):
    return sorted(step for step, _ in list_checkpoints(Path(folder, "checkpoints")))


def run(folder, name, *overrides, expect=0, trains=None):
    """Train in `folder`/`name`; return the rows of metrics.jsonl (on rank 0), checking the exit
    status.
    """
    arguments = ["--config", str(RECIPE), f"--logging.directory={folder}/{name}"]
    arguments += [option("train.steps", STEPS), option("train.eval_interval", STEPS // 2)]
    arguments += [option("train.micro_batch_size", 2), option("train.eval_steps", 1)]
    status = train.main([*arguments, *map(str, overrides)], trains)
    assert status == expect, f"{name} ended with {status} instead of {expect}"
    dist.barrier()
    text = Path(folder, name, "metrics.jsonl").read_text()
    dist.barrier()
    return [json.loads(line) for line in text.splitlines()]


def whole_state(folder, name, step):
    """Return the unsharded weights and moments of a checkpoint."""
    path = Path(folder, name, "checkpoints", f"step-{step:08d}")
    checkpoint = Checkpoint(path, read_state(path))
    whole = {}
    for key, shards in checkpoint.shards.items():
        parts = [checkpoint.read(*shard) for shard in shards if shard is not None]
        _, _, name = key.partition("/")
        sharding = checkpoint.state["sharded"].get(name)
        if sharding is None:
            whole[key] = parts[0].clone()
            continue
        parameter = SimpleNamespace(tensor_model_parallel=True)
        parameter.partition_dim = sharding["dim"]
        parameter.partition_stride = sharding["stride"]
        whole[key] = unshard(parts, parameter).clone()
    return whole


def option(section_key, value):
    return f"--{section_key}={value}"


Z_LOSS = option("optimizer.z_loss", 0.01)
AVERAGE = option("train.average", "{kind: ema, decay: 0.8}")
MUON = option("optimizer.kind", "muon")
SPIKES = "{action: %s, window: 3, threshold: 300, limit: 1}"


def tp(size):
    return option("parallel.tensor_model_parallel_size", size)


def cp(size):
    return option("parallel.context_parallel_size", size)


def zero(zero_stage):
    return option("deepspeed.zero_stage", zero_stage)


@contextlib.contextmanager
def gathering_all():
    """Make ZeRO 3 partition all parameters; by default it replicates small ones, which here are
    all.
    """
    settings = engine.deepspeed_config

    def changed(*arguments):
        found = settings(*arguments)
        found["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        return found

    with mock.patch.object(engine, "deepspeed_config", changed):
        yield


def equal_runs(folder, data, size):
    """Train the same steps in every layout of this many processes."""
    prefix = option("data.prefix", f"{data}/a")
    rows = {}
    # On four processes, tensor parallelism shards each matrix over two, and ZeRO partitions the
    # shards over two.
    tensor = tp(2 if size == 4 else 1)
    for layout in LAYOUTS.get(
        size,
        [(1, 1, 1), (1, 1, 2), (1, 1, 3)],
    ):
        name = "tp{}_cp{}_zero{}".format(*layout)
        rows[name] = run(
            folder,
            name,
            prefix,
            tp(layout[0]),
            cp(layout[1]),
            zero(layout[2]),
        )
    rows["muon"] = run(
        folder,
        "muon",
        prefix,
        MUON,
        AVERAGE,
        tensor,
        zero(1 if size == 4 else 2),
    )
    shared = cp(2) if size == 2 else tensor
    rows["packed"] = run(
        folder,
        "packed",
        prefix,
        shared,
        zero(2),
        *packed(data),
    )
    # ZeRO 3 gathers the weights in every forward pass, so all ranks must do equally many in an
    # evaluation.
    rows["evaluated"] = run(
        folder, "evaluated", prefix, shared, zero(1 if size == 2 else 3), *evaluated(data)
    )
    # Sequences have different numbers of answers, so that micro-batches and ranks do, too.
    accumulate = [option("train.global_batch_size", 8), AVERAGE]
    rows["generated"] = run(
        folder,
        "generated",
        *generated(),
        shared,
        zero(3),
        *accumulate,
    )
    if size == 2:
        return rows
    rows["epochs"] = run(
        folder, "epochs", option("data.prefix", f"[{data}/a,{data}/b]"), tensor, *many_samples()
    )
    rows["ramp"] = run(folder, "ramp", prefix, tensor, *ramp())
    if size == 4:
        sampling = [option("logging.sample_tokens", 3), option("logging.sample_prompt", "w1 w2 w3")]
        rows["sampled"] = run(
            folder,
            "sampled",
            prefix,
            tensor,
            zero(3),
            *packed(data),
            *sampling,
        )
        rows["bf16"] = run(
            folder, "bf16", prefix, tensor, zero(2), option("train.precision", "bf16")
        )
    return rows


def many_samples():
    """More than one pass over the data, 330 sequences of 16 tokens: 96 in each step."""
    return [option("train.global_batch_size", 96), option("train.micro_batch_size", 16)]


def ramp():
    """Steps of 4, 4, 8 and 12 sequences; the weights of the last three are averaged."""
    last = option("train.average", "{kind: last, count: 3, every: 1}")
    return [
        last,
        option("train.global_batch_size", 12),
        option("train.batch_ramp", "{from: 4, over_samples: 16}"),
    ]


def generated():
    return [
        option("data.prefix", "null"),
        option("data.generator", "{task: addition, digits: 4}"),
        Z_LOSS,
    ]


def evaluated(data):
    """Tasks of unequal size, so that ranks have different numbers of forward passes with odd
    lengths.
    """
    documents = f"data: {data}/b, documents: 3, stride: 4"
    return [
        option("evaluation.every", 2),
        option("evaluation.perplexity", f"{{{documents}, lengths: [5, 12], windows: 2}}"),
        option("evaluation.context_gain", f"{{{documents}, lengths: [9], short: 3}}"),
        option("evaluation.addition", "{digits: 1, samples: 3}"),
    ]


def packed(data):
    return [
        option("data.reset_attention_mask", "true"),
        option("data.tokenizer", f"{data}/tokenizer.json"),
        Z_LOSS,
    ]


def resumed_run(folder, name, *overrides, then=(), steps=STEPS, at=2, interval=2, trains=None):
    """Train all steps at once, and again resumed at step `at`, as if the run had been interrupted
    there.

    Returns the rows of both, the checksums of the tensors at their last step and, if the layout
    changes, the tensors.
    """
    settings = [option("train.steps", steps), option("checkpoint.interval", interval)]
    whole = run(folder, name, *overrides, *settings, trains=trains)
    last = checksums(folder, name, steps)
    tensors = whole_state(folder, name, steps) if then else None
    dist.barrier()
    for step, path in list_checkpoints(f"{folder}/{name}/checkpoints"):
        if dist.get_rank() == 0 and step > at:
            shutil.rmtree(path)
    dist.barrier()
    continued = run(folder, name, *(then or overrides), *settings, trains=trains)
    states = {"whole_state": last, "continued_state": checksums(folder, name, steps)}
    if then:
        states |= {"whole_tensors": tensors, "continued_tensors": whole_state(folder, name, steps)}
    return {"whole": whole, "continued": continued, **states}


@contextlib.contextmanager
def spikes(step, times):
    """Multiply the gradient by a thousand in these attempts at this step."""
    train_step = engine.Engine.train_step
    scaled = engine._nan_unless_finite
    seen = []

    def changed(self, batches, lr, number=0):
        seen.extend([number] * (number == step))
        spike = number == step and len(seen) in times
        with mock.patch.object(
            engine,
            "_nan_unless_finite",
            lambda loss: scaled(1000 * loss) if spike else scaled(loss),
        ):
            return train_step(self, batches, lr, number)

    with mock.patch.object(engine.Engine, "train_step", changed):
        yield


def spike_runs(folder, prefix):
    """Runs of 8 steps with a spike in the sixth, saved after every second."""
    results = {}
    eight = {"steps": 8, "interval": 2}

    def settings(action):
        return [prefix, option("train.spikes", SPIKES % action)]

    with spikes(6, (1, 2)):
        skips = [*settings("skip"), AVERAGE, tp(2), zero(1)]
        results["spike_skip"] = resumed_run(folder, "spike-skip", *skips, at=4, **eight)
    with spikes(6, (1,)):
        rewinds = [*settings("rewind"), zero(3)]
        until_spike = [option("train.steps", 8), option("checkpoint.interval", 2)]
        run(folder, "spike-rewind", *rewinds, *until_spike, expect=EXIT_RESTART)
        results["spike_rewind"] = resumed_run(folder, "spike-rewind", *rewinds, at=6, **eight)
    records = Path(folder, "spike-rewind", "attempts").glob("*/spikes.jsonl")
    results["spike_records"] = [
        json.loads(line) for path in records for line in path.read_text().splitlines()
    ]
    return results


def spike_twice(folder, prefix):
    """A run that rewinds after its first spike, and stops after its second."""
    again = [prefix, option("train.spikes", SPIKES % "rewind"), option("train.steps", 8)]
    with spikes(6, (1, 2)):
        arguments = ["--config", str(RECIPE), f"--logging.directory={folder}/spike-twice", *again]
        statuses = [train.main(arguments) for _ in range(2)]
    return {"statuses": statuses, "rows": rows(Path(folder, "spike-twice"))}


def checksums(folder, name, step):
    """Return the manifest's checksums of the weights and moments of a checkpoint."""
    files = read_manifest(f"{folder}/{name}/checkpoints/step-{step:08d}")["files"]
    return {file: entry["sha256"] for file, entry in files.items() if file.startswith("tensors")}


def resumed_runs(folder, data):
    prefix = option("data.prefix", f"{data}/a")
    results = {}
    for tensor_size, zero_stage in RESUMED:
        name = f"tp{tensor_size}_zero{zero_stage}"
        results[name] = resumed_run(folder, name, prefix, tp(tensor_size), zero(zero_stage))
    bf16 = [prefix, zero(2), option("train.precision", "bf16"), AVERAGE]
    in_background = [option("checkpoint.asynchronous", "true"), option("checkpoint.writers", 2)]
    results["bf16"] = resumed_run(folder, "bf16", *bf16, *in_background)
    results["unsaved"] = run(folder, "unsaved", *bf16)
    workers = [prefix, option("data.num_workers", 2)]
    results["workers"] = resumed_run(folder, "workers", *workers)
    stages = option("data.stages", f"[{{prefix: {data}/b, share: 0.25}}]")
    results["stages"] = resumed_run(folder, "stages", prefix, stages)
    before = [*generated(), *ramp(), tp(1), zero(1)]
    after = [*generated(), *ramp(), tp(2), zero(3)]
    results["ramp"] = resumed_run(
        folder,
        "ramp",
        *before,
        then=after,
        at=3,
        interval=1,
    )
    muon = [prefix, MUON, AVERAGE]
    results["muon"] = resumed_run(folder, "muon", *muon, tp(1), zero(2))
    results["muon_another_layout"] = resumed_run(
        folder, "muon-other", *muon, zero(1), then=[*muon, tp(2), zero(1)]
    )
    before = [prefix, tp(2), zero(3)]
    after = [prefix, cp(2), zero(2)]
    results["from_tensor_to_context_parallel"] = resumed_run(
        folder, "to-context", *before, then=after
    )
    results["context_parallel"] = resumed_run(folder, "context", prefix, cp(2), zero(1))
    with gathering_all():
        results["gathered"] = resumed_run(folder, "gathered", prefix, AVERAGE, zero(3))
    frozen = {
        "steps": 3,
        "at": 2,
        "trains": lambda name, _: kind_of(name) == "position",
    }
    results["frozen"] = resumed_run(
        folder,
        "frozen",
        prefix,
        tp(2),
        zero(3),
        **frozen,
    )
    results |= spike_runs(folder, prefix)
    # Last, since processes leave their groups.
    return results | {"spike_twice": spike_twice(folder, prefix)}


def main(folder, data, what):
    if what == "resume":
        return resumed_runs(folder, data)
    size = int(os.environ["WORLD_SIZE"])
    found = equal_runs(folder, data, size)
    found["states"] = {name: whole_state(folder, name, STEPS) for name in found}
    if size == 4:
        return found | {"models": tensor_parallel_cases.of_four_processes()}
    return found
