"""Steps with a NaN or infinite loss or gradient on one of two processes; see test_bad_steps.py."""

import math
import os

import torch
import torch.distributed as dist
from deepspeed.runtime.comm.coalesced_collectives import reduce_scatter_coalesced
from models import build, random_tokens, small_model

from megatron_tape.config.data import DataConfig
from megatron_tape.config.schema import DeepSpeedConfig, OptimizerConfig, ParallelConfig, RunConfig
from megatron_tape.config.train import AverageSettings, TrainConfig
from megatron_tape.parallel.deepspeed_patches import average_and_scatter
from megatron_tape.training.engine import Engine

CASES = [(1, stage, what, "fp32") for stage in (1, 2, 3) for what in ("loss", "spike")]
CASES += [(1, stage, "gradient", "bf16") for stage in (1, 2, 3)]
CASES += [(2, 1, "loss", "fp32"), (2, 3, "spike", "fp32")]
CASES += [(2, stage, "replicated", "fp32") for stage in (1, 3)]
"""Tensor-parallel size, ZeRO stage, what is bad, and precision."""


def name_of(tp, stage, what, precision):
    return f"tp{tp}_zero{stage}_{what}_{precision}"


def engine(tp, stage, precision, clip_grad=1.0, average=None, kind="adamw", state=None, **zero):
    """Return an engine with new weights, or with those of a training state."""
    sizes = {"micro_batch_size": 1, "global_batch_size": 4 // tp}
    config = RunConfig(
        model=small_model(),
        data=DataConfig(prefix="unused"),
        optimizer=OptimizerConfig(kind=kind, lr=1e-2, clip_grad=clip_grad),
        parallel=ParallelConfig(tensor_model_parallel_size=tp),
        deepspeed=DeepSpeedConfig(zero_stage=stage, **zero),
        train=TrainConfig(steps=10, precision=precision, average=average, **sizes),
    )
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model, layout = build(config.model, tp=tp, dtype=dtype)
    if state is not None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(state[f"weight/{name}"])
    return Engine(model, config, layout)


def batches(engine, seed, mask=1.0):
    for i in range(engine.micro_batches):
        tokens = random_tokens(
            batch=1, length=17, seed=seed + i + 100 * engine.layout.data_parallel_rank
        )
        yield {
            "tokens": tokens[:, :-1],
            "labels": tokens[:, 1:],
            "loss_weights": torch.full((1, 16), mask / 16),
        }


def weights(engine):
    """Return the unsharded state, on every rank."""
    states = [
        engine.training_state(lambda key, rank=rank: rank)
        for rank in range(engine.layout.replica_size)
    ]
    return states[engine.layout.replica_rank]


REPLICATED = "layers.1.input_layernorm.weight"
"""A parameter that every tensor-parallel rank holds whole."""


def trial(tp, stage, what, precision):
    e = engine(tp, stage, precision)
    e.train_step(batches(e, 0), 1e-2)
    before = weights(e)
    rank = dist.get_rank()
    if what == "loss":
        # A tensor-parallel group shares one loss; otherwise only rank 1 has the bad one.
        result = e.train_step(batches(e, 10, math.nan if rank == 1 or tp == 2 else 1.0), 1e-2)
    elif what == "spike":  # on rank 1 alone, in one step
        answers = iter([rank == 1])
        judged = []
        e.set_skip_predicate(lambda loss, norm: judged.append((loss, norm)) or next(answers, False))
        result = e.train_step(batches(e, 10), 1e-2)
        assert judged == [(result.loss, result.grad_norm)]
    else:
        parameter = e.names[
            REPLICATED if what == "replicated" else "layers.1.mlp.linear_fc1.weight"
        ]
        handle = parameter.register_hook(lambda g: g * math.inf if rank == 1 else g)
        result = e.train_step(batches(e, 10), 1e-2)
        handle.remove()
    after = weights(e)
    unchanged = all(torch.equal(before[key], after[key]) for key in before)
    good = e.train_step(batches(e, 20), 1e-2)
    moved = any(not torch.equal(before[key], value) for key, value in weights(e).items())
    outcome = torch.tensor(
        [result.skipped, unchanged, not good.skipped, moved, math.isfinite(good.loss)]
    ).int()
    dist.all_reduce(outcome, op=dist.ReduceOp.MIN)
    return outcome.tolist() + [int(math.isfinite(result.grad_norm)), e.optimizer_steps]


MOVING = AverageSettings(kind="ema", decay=0.5)
LEFT_OUT = [
    (1, "fp32", "adamw", "loss"),
    (2, "fp32", "muon", "spike"),
    (2, "bf16", "adamw", "loss"),
    (3, "bf16", "adamw", "spike"),
]
"""ZeRO stage, precision, optimizer, and why a step is skipped."""


def left_out(stage, precision, kind, what):
    """Return, on every rank, whether a skipped step has no effect, also in a run resumed after it.

    Compared are the weights, moments and averages at the end, and how many updates there were.
    """

    def new(state=None):
        return engine(1, stage, precision, average=MOVING, kind=kind, state=state)

    def end(e, *steps):
        for step, seed in steps:
            e.train_step(batches(e, seed), 1e-2, step)
        return weights(e), e.optimizer_steps

    ends = [end(new(), (1, 0), (2, 20), (3, 30), (4, 40))]
    e = new()
    end(e, (1, 0), (2, 20))  # after a single update, the average would equal the weights
    if what == "spike":
        answers = iter([True])
        e.set_skip_predicate(lambda loss, norm: next(answers, False))
    skipped = e.train_step(batches(e, 10, math.nan if what == "loss" else 1.0), 1e-2, 3).skipped
    saved = weights(e)
    updates = e.optimizer_steps
    ends.append(end(e, (4, 30), (5, 40)))
    again = new(saved)
    again.load_training_state(saved.get, updates)
    ends.append(end(again, (4, 30), (5, 40)))
    (expected, count), *others = ends
    averaged = any(key.startswith("average/") for key in expected)
    same = all(count == other and expected.keys() == state.keys() for state, other in others)
    same = same and all(
        torch.equal(value, state[key]) for state, _ in others for key, value in expected.items()
    )
    outcome = torch.tensor(skipped and averaged and same).int()
    dist.all_reduce(outcome, op=dist.ReduceOp.MIN)
    return bool(outcome)


FINE = 2.0**-9
"""Lost when it is added to 1 in bf16, whose next number is 1 + 2^-7."""
GRADIENTS = {
    "mlp.linear_fc1.weight": [[1, 0], [FINE, 0]],
    "mlp.linear_fc2.weight": [[1, FINE], [0, 0]],
}
"""By parameter, the value of its gradient on each rank in each of two micro-batches."""


def averaged(stage, **zero):
    """Return ZeRO's reduction of GRADIENTS, times 2: the sum over both ranks and micro-batches if
    nothing is lost.
    """
    e = engine(1, stage, "bf16", clip_grad=0.0, **zero)
    names = {f"layers.0.{name}": values[dist.get_rank()] for name, values in GRADIENTS.items()}
    left = {name: list(values) for name, values in names.items()}
    for name in names:
        e.names[name].register_hook(lambda g, name=name: torch.full_like(g, left[name].pop(0)))
    e.train_step(batches(e, 0), 1e-2)
    state = weights(e)
    return [
        (state[f"exp_avg/{name}"].double() * 10 * 2).flatten()[[0, -1]].tolist() for name in names
    ]


SHARES = {
    "layers.1.input_layernorm.weight": [[1, 0], [FINE, 0]],
    "norm.weight": [[1, FINE], [0, 0]],
}
"""The same for replicated parameters, for which each rank processes half of the tokens."""


def summed(stage):
    """Return two tensor-parallel ranks' reduction of SHARES, and the norm of a step's gradient
    before it.
    """
    e = engine(2, stage, "bf16", clip_grad=0.0)
    norm = e.train_step(batches(e, 1), 0.0).grad_norm
    values = {name: list(ranks[dist.get_rank()]) for name, ranks in SHARES.items()}
    before = weights(e)
    for name, left in values.items():
        e.names[name].register_hook(lambda g, left=left: torch.full_like(g, left.pop(0)))
    e.train_step(batches(e, 0), 0.0)
    after = weights(e)
    moments = [
        (after[key].double() - 0.9 * before[key].double()) * 10
        for key in (f"exp_avg/{n}" for n in values)
    ]
    same = all(
        _same_on_both(after[f"weight/{name}"]) and _same_on_both(after[f"exp_avg/{name}"])
        for name in values
    )
    return {"norm": norm, "sums": [moment[[0, -1]].tolist() for moment in moments], "same": same}


def _same_on_both(tensor):
    others = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(others, tensor)
    return torch.equal(*others)


def overlapped(stage):
    """Return whether two steps with and without `overlap_comm` give the same weights."""
    states = []
    for overlap in (False, True):
        e = engine(1, stage, "bf16", overlap_comm=overlap, reduce_bucket_size=3000)
        for seed in (0, 1):
            e.train_step(batches(e, seed), 1e-2)
        assert e.deepspeed_engine.zero_overlap_comm() == overlap
        states.append(weights(e))
    return all(torch.equal(value, states[1][key]) for key, value in states[0].items())


def scattered():
    """Return whether gradients of odd sizes are averaged and partitioned as by DeepSpeed's
    function.
    """
    group = dist.group.WORLD
    generator = torch.Generator().manual_seed(dist.get_rank())
    tensors = [
        torch.randn(size, generator=generator) for size in [(1,), (2,), (7, 3), (64,), (5, 13)]
    ]
    expected = reduce_scatter_coalesced([tensor.clone() for tensor in tensors], group)
    found = average_and_scatter(tensors, group)
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def main(folder):
    assert os.environ["WORLD_SIZE"] == "2"
    results = {name_of(*case): trial(*case) for case in CASES}
    for stage in (1, 2, 3):
        results[f"summed_zero{stage}"] = summed(stage)
        results[f"averaged_zero{stage}"] = averaged(stage)
        results[f"averaged_zero{stage}_bf16"] = averaged(stage, communication_precision="bf16")
        results[f"overlapped_zero{stage}"] = overlapped(stage)
    outcome = torch.tensor(scattered()).int()
    dist.all_reduce(outcome, op=dist.ReduceOp.MIN)
    results["scattered"] = bool(outcome)
    results |= {"left_out_" + "_".join(map(str, case)): left_out(*case) for case in LEFT_OUT}
    return results
