"""Steps with a NaN or infinite loss or gradient on one of two processes; see test_bad_steps.py."""

import math
import os

import torch
import torch.distributed as dist
from configurations import make_alone
from deepspeed.runtime.comm.coalesced_collectives import reduce_scatter_coalesced
from models import build, random_batch, small_model

from megatron_tape.config.train import AverageSettings
from megatron_tape.model.names import kind_of
from megatron_tape.parallel.deepspeed_patches import average_and_scatter
from megatron_tape.training.engine import Engine
from megatron_tape.training.gradients import local_gradient

CASES = [(1, zero_stage, what, "fp32") for zero_stage in (1, 2, 3) for what in ("loss", "spike")]
CASES += [(1, zero_stage, "gradient", "bf16") for zero_stage in (1, 2, 3)]
CASES += [(2, 1, "loss", "fp32"), (2, 3, "spike", "fp32")]
CASES += [(2, zero_stage, "replicated", "fp32") for zero_stage in (1, 3)]
CASES += [
    (tp, zero_stage, what, "bf16")
    for tp, what in ((1, "first_element"), (1, "last_element"), (2, "replicated_element"))
    for zero_stage in (1, 2, 3)
]
"""Tensor-parallel size, ZeRO stage, what is bad, and precision."""


def name_of(tp, zero_stage, what, precision):
    return f"tp{tp}_zero{zero_stage}_{what}_{precision}"


def engine(tp, zero_stage, precision, clip_grad=1.0, model=None, **zero):
    changes = {f"deepspeed__{key}": value for key, value in zero.items()}
    config = make_alone(
        model or small_model(),
        optimizer__clip_grad=clip_grad,
        parallel__tensor_model_parallel_size=tp,
        deepspeed__zero_stage=zero_stage,
        train__global_batch_size=4 // tp,
        train__precision=precision,
        train__average=AverageSettings(kind="ema", decay=0.5),
        **changes,
    )
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model, layout = build(config.model, tp=tp, dtype=dtype)
    return Engine(model, config, layout)


def batches(engine, seed, mask=1.0):
    for i in range(engine.micro_batches):
        batch = random_batch(seed + i + 100 * engine.layout.data_parallel_rank)
        yield batch | {"loss_weights": torch.full((1, 16), mask / 16)}


def weights(engine):
    """Return the unsharded state, on every rank."""
    states = [
        engine.training_state(lambda key, rank=rank: rank)
        for rank in range(engine.layout.replica_size)
    ]
    return states[engine.layout.replica_rank]


REPLICATED = "layers.1.input_layernorm.weight"
"""A parameter that every tensor-parallel rank holds whole."""


# With these sizes, a group of parameters ends with two elements of padding on the last rank.
PADDED = small_model(num_layers=2, num_query_groups=1, mlp_size=5)


def spoil_element(engine, what):
    """Make one element of this rank's averaged gradients NaN or infinite."""
    gradients = {}
    for name, parameter in engine.trained.items():
        gradient = local_gradient(parameter, engine.zero_stage)
        if gradient is not None:
            gradients[name] = gradient.view(-1)

    if what == "first_element":
        next(iter(gradients.values()))[0] = math.nan
    elif what == "last_element":
        if engine.zero_stage < 3:
            assert engine._zero.groups_padding[0] == 2
        gradients["output.weight"][-1] = math.inf
    else:
        gradients[REPLICATED][0] = math.nan


def trial(tp, zero_stage, what, precision):
    e = engine(tp, zero_stage, precision, model=PADDED if what == "last_element" else None)
    e.train_step(batches(e, 0), 1e-2)
    before = weights(e)
    rank = dist.get_rank()
    if what == "loss":
        # A tensor-parallel group shares one loss; otherwise only rank 1 has the bad one.
        result = e.train_step(
            batches(e, 10, math.nan if rank == 1 or tp == 2 else 1.0),
            1e-2,
        )
    elif what == "spike":  # on rank 1 alone, in one step
        answers = iter([rank == 1])
        judged = []
        e.set_skip_predicate(lambda loss, norm: judged.append((loss, norm)) or next(answers, False))
        result = e.train_step(batches(e, 10), 1e-2)
        assert judged == [(result.loss, result.grad_norm)]
    elif "element" in what:
        if rank == 1:
            e.before_update = lambda: spoil_element(e, what)
        result = e.train_step(batches(e, 10), 1e-2)
        e.before_update = lambda: None
    else:
        parameter = e.parameters[
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


FINE = 2.0**-9
"""Lost when it is added to 1 in bf16, whose next number is 1 + 2^-7."""
GRADIENTS = {
    "mlp.linear_fc1.weight": [[1, 0], [FINE, 0]],
    "mlp.linear_fc2.weight": [[1, FINE], [0, 0]],
}
"""By parameter, the value of its gradient on each rank in each of two micro-batches."""


def averaged(zero_stage, **zero):
    """Return ZeRO's reduction of GRADIENTS, times 2: the sum over both ranks and micro-batches if
    nothing is lost.
    """
    e = engine(1, zero_stage, "bf16", clip_grad=0.0, **zero)
    names = [f"layers.0.{name}" for name in GRADIENTS]
    for name, of_ranks in zip(names, GRADIENTS.values()):
        left = iter(of_ranks[dist.get_rank()])
        e.parameters[name].register_hook(lambda g, left=left: torch.full_like(g, next(left)))
    e.train_step(batches(e, 0), 1e-2)
    moments = [weights(e)[f"exp_avg/{name}"].double() for name in names]
    return [(moment * 10 * 2).flatten()[[0, -1]].tolist() for moment in moments]


SHARES = {
    "layers.1.input_layernorm.weight": [[1, 0], [FINE, 0]],
    "norm.weight": [[1, FINE], [0, 0]],
}
"""The same for replicated parameters, for which each rank processes half of the tokens."""


def summed(zero_stage):
    """Return two tensor-parallel ranks' reduction of SHARES, and the norm of a step's gradient
    before it.
    """
    e = engine(2, zero_stage, "bf16", clip_grad=0.0)
    norm = e.train_step(batches(e, 1), 0.0).grad_norm
    before = weights(e)
    for name, of_ranks in SHARES.items():
        left = iter(of_ranks[dist.get_rank()])
        e.parameters[name].register_hook(lambda g, left=left: torch.full_like(g, next(left)))
    e.train_step(batches(e, 0), 0.0)
    after = weights(e)
    moments = []
    for name in SHARES:
        before_step, after_step = (state[f"exp_avg/{name}"].double() for state in (before, after))
        moments.append((after_step - 0.9 * before_step) * 10)
    return {"norm": norm, "sums": [moment[[0, -1]].tolist() for moment in moments]}


def norm(engine, seeds):
    """Return the gradient norm of a step in which the gradients of replicated parameters are the
    largest.
    """
    for name, parameter in engine.parameters.items():
        if kind_of(name) in ("norms", "position"):
            parameter.register_hook(lambda g: 100 * g)
    return engine.train_step([random_batch(seed) for seed in seeds], 0.0).grad_norm


NORM_SEEDS = {1: (0, 1, 2, 3), 2: (0, 1)}
"""Seeds of a step's sequences, by tensor-parallel size."""


def norms(zero_stage):
    """Return the gradient norms of `norm` by tensor-parallel size."""
    found = {}
    for tp, seeds in NORM_SEEDS.items():
        e = engine(tp, zero_stage, "fp32")
        rank = e.layout.data_parallel_rank
        size = e.micro_batches
        found[tp] = norm(e, seeds[rank * size : (rank + 1) * size])
    return found


def overlapped(zero_stage):
    """Return whether two steps with and without `overlap_comm` give the same weights."""
    states = []
    for overlap in (False, True):
        e = engine(1, zero_stage, "bf16", overlap_comm=overlap, reduce_bucket_size=3000)
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
    for zero_stage in (1, 2, 3):
        results[f"summed_zero{zero_stage}"] = summed(zero_stage)
        results[f"norms_zero{zero_stage}"] = norms(zero_stage)
        results[f"averaged_zero{zero_stage}"] = averaged(zero_stage)
        results[f"averaged_zero{zero_stage}_bf16"] = averaged(
            zero_stage, communication_precision="bf16"
        )
        results[f"overlapped_zero{zero_stage}"] = overlapped(zero_stage)
    outcome = torch.tensor(scattered()).int()
    dist.all_reduce(outcome, op=dist.ReduceOp.MIN)
    results["scattered"] = bool(outcome)
    return results
